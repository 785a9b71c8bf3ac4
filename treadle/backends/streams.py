"""Which of a captured graph's calls run beside each other on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

from treadle.backends import gpu

# Calls that do not wait for each other run on so many streams.
STREAMS = 4


@dataclass(frozen=True)
class Slot:
    """Where a call runs: its stream, and the calls of other streams that it waits for."""

    stream: int
    waits: tuple[int, ...]


def schedule(calls: list[gpu.Call]) -> list[Slot]:
    """Calls on several streams: one waits for another where both touch the same memory and one of
    them writes it. Whatever the order that results, the bits are those of one stream.

    A call follows the latest of those that it waits for on its stream, so that a chain stays on
    one; cuDNN's stay on the first, which its handle is bound to.
    """
    touched: dict[int, list[tuple[int, int, int, bool]]] = {}  # by piece: from, to, call, writes
    slots: list[Slot] = []
    clocks: list[list[int]] = []  # by call: the last call of each stream that it comes behind
    last = [-1] * STREAMS
    for i, call in enumerate(calls):
        needed: set[int] = set()
        for k, m in enumerate(call.memory):
            if m is not None:
                needed |= _touch(touched.setdefault(m.piece, []), m, i, k < call.launch.writes)
        needed.discard(i)
        behind = [j for j in sorted(needed, reverse=True) if last[slots[j].stream] == j]
        if call.grids[0].source == "cudnn":
            stream = 0
        elif behind:
            stream = slots[behind[0]].stream
        else:
            stream = last.index(min(last))
        clock = list(clocks[last[stream]]) if last[stream] >= 0 else [-1] * STREAMS
        clock[stream] = max(clock[stream], last[stream])
        waits = []
        for j in sorted(needed, reverse=True):
            if clock[slots[j].stream] < j:
                waits.append(j)
                clock = [max(a, b) for a, b in zip(clock, clocks[j], strict=True)]
                clock[slots[j].stream] = max(clock[slots[j].stream], j)
        slots.append(Slot(stream, tuple(waits)))
        clocks.append(clock)
        last[stream] = i
    return slots


def _touch(
    known: list[tuple[int, int, int, bool]], m: gpu.Memory, call: int, writes: bool
) -> set[int]:
    """Note that a call touches memory of a piece; the earlier calls that it has to wait for. What
    it overwrites whole need not be remembered: whoever comes later waits for it."""
    start, end = m.offset, m.offset + m.nbytes
    found = {j for a, b, j, w in known if a < end and start < b and (w or writes)}
    if writes:
        known[:] = [x for x in known if not (start <= x[0] and x[1] <= end) or x[2] == call]
    known.append((start, end, call, writes))
    return found
