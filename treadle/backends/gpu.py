"""What the GPU backends share: kernel sources, where buffers lie, and launches as they are run."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from treadle.backends import kernel_cache
from treadle.errors import BackendError
from treadle.graph.op import Grid, Launch, Node
from treadle.graph.plan import GPU_ALIGN, Place, Plan, align
from treadle.graph.program import Program
from treadle.graph.value import Buffer, itemsize

PACKAGE = Path(__file__).parents[1]
# Buffers begin at a multiple of so many of their elements, whatever the dtype is, so that a weight,
# its gradient, its moments and its bfloat16 copy lie equally far from the first of their kind.
ELEMENTS = 256


# ---------------------------------------------------------------- sources


@cache
def text(name: str) -> str:
    """A file of kernel text, by its path in the package."""
    return (PACKAGE / name).read_text(encoding="utf-8")


def source(dialect: str, grid: Grid) -> str:
    """The whole text that a kernel is compiled from: definitions, dialect, what is shared, and
    ops/<source>.cl. dialect: "opencl" or "cuda"."""
    defines = [f"#define {key} {value}" for key, value in (*grid.defines, ("GROUP", grid.items))]
    parts = ["\n".join(defines), text(f"kernels/{dialect}.clh"), text("kernels/gpu.clh")]
    return "\n".join([*parts, _included(text(f"ops/{grid.source}.cl"))])


def _included(kernels: str) -> str:
    """A source with what it shares with others, `#include "NAME"` of kernels/, put in place."""
    return re.sub(r'(?m)^#include "(.*)"$', lambda m: text(f"kernels/{m[1]}"), kernels)


# ---------------------------------------------------------------- memory


@dataclass(frozen=True)
class Region:
    """Buffers of one kind in one piece of memory: offsets in bytes by buffer."""

    nbytes: int
    offsets: dict[str, int]


def _kind(buffer: Buffer) -> tuple[str, str]:
    """Moments of one name belong together, as do all weights, all gradients and so on."""
    return buffer.role, buffer.name.rsplit(".", 1)[-1] if buffer.role == "state" else ""


def regions(program: Program, allocation: int | None) -> list[Region]:
    """Where the program's buffers lie, those of a kind one after another in the order in which
    they were declared; pieces of memory have at most `allocation` bytes."""
    kinds: dict[tuple[str, str], list[Buffer]] = {}
    for buffer in program.buffers.values():
        kinds.setdefault(_kind(buffer), []).append(buffer)
    found = []
    for buffers in kinds.values():
        offsets: dict[str, int] = {}
        end = 0
        for b in buffers:
            nbytes = align(max(1, b.size), ELEMENTS) * itemsize(b.dtype)
            if allocation is not None and nbytes > allocation:
                raise BackendError(
                    f"@{b.name} needs {nbytes / 2**20:,.0f} MiB, and the device gives at most "
                    f"{allocation / 2**20:,.0f} in one piece; make the model smaller, or use "
                    "--device cpu"
                )
            if allocation is not None and end + nbytes > allocation:
                found.append(Region(end, offsets))
                offsets, end = {}, 0
            offsets[b.name] = end
            end += nbytes
        found.append(Region(end, offsets))
    return found


@dataclass(frozen=True)
class Memory:
    """Part of a piece of memory: `nbytes` from `offset` on. piece: a number of the executable's."""

    piece: int
    offset: int
    nbytes: int


def locator(
    layout: Sequence[Region], allocation: int | None
) -> Callable[[Place | None], Memory | None]:
    """From a plan's places to memory: pieces 0 … are the regions, then those of the arena."""
    where = {
        name: (i, offset)
        for i, region in enumerate(layout)
        for name, offset in region.offsets.items()
    }

    def locate(place: Place | None) -> Memory | None:
        if place is None:
            return None
        if place.buffer is None:
            piece, offset = divmod(place.offset, allocation) if allocation else (0, place.offset)
            return Memory(len(layout) + piece, offset, place.nbytes)
        piece, offset = where[place.buffer]
        return Memory(piece, offset + place.offset, place.nbytes)

    return locate


# ---------------------------------------------------------------- calls


@dataclass(eq=False)
class Call:
    """A launch with its tensors in memory. nodes: whose work it is; more than one when merged."""

    launch: Launch
    memory: list[Memory | None]
    dims: list[int]
    grids: Sequence[Grid]
    nodes: list[Node] = field(default_factory=list)


def calls(plan: Plan, locate: Callable[[Place | None], Memory | None]) -> list[Call]:
    """A plan's launches in order, neighbours merged where they can be."""
    made: list[Call] = []
    for launch, node in zip(plan.launches, plan.nodes, strict=True):
        if not launch.grids:
            raise BackendError(f"[{node.op.name}] has no kernels for a GPU")
        memory = [locate(plan.place(a)) for a in launch.args]
        call = Call(launch, memory, list(launch.dims), launch.grids, [node])
        if not (made and _merge(made[-1], call)):
            made.append(call)
    return made


def _merge(last: Call, call: Call) -> bool:
    """Let `last` do the work of `call` too, if both are parts of one range in all tensors."""
    a, b = last.launch, call.launch
    if not (a.merges and b.merges and a.kernel == b.kernel and list(a.nums) == list(b.nums)):
        return False
    if [(g.source, g.items, g.defines) for g in a.grids] != [
        (g.source, g.items, g.defines) for g in b.grids
    ]:
        return False
    distance = None  # in elements, from the beginning of one to the beginning of the other
    merged: list[Memory | None] = []
    for x, y, argument in zip(last.memory, call.memory, b.args, strict=True):
        if x is None or y is None:
            if x is not y:
                return False
            merged.append(None)
            continue
        if x == y:  # shared by both: a scalar
            merged.append(x)
            continue
        size = itemsize(argument.dtype)  # type: ignore[union-attr]
        if x.piece != y.piece or y.offset <= x.offset:
            return False
        between = (y.offset - x.offset) // size
        if distance not in (None, between) or y.offset != x.offset + align(
            x.nbytes, ELEMENTS * size
        ):
            return False
        distance = between
        merged.append(Memory(x.piece, x.offset, y.offset + y.nbytes - x.offset))
    if distance is None:
        return False
    last.memory = merged
    last.dims[0] = distance + call.dims[0]
    last.grids = [
        replace(g, groups=(g.groups[0] + h.groups[0], *g.groups[1:]))
        for g, h in zip(last.grids, call.grids, strict=True)
    ]
    last.nodes += call.nodes
    return True


def arena_pieces(plans: Iterable[Plan], allocation: int | None) -> list[int]:
    """Bytes of each piece of the arena that the plans share."""
    total = max(GPU_ALIGN, *(p.arena_bytes for p in plans))
    step = allocation or total
    return [min(step, total - at) for at in range(0, total, step)]


# ---------------------------------------------------------------- measured choices

# Measured calls run so often in a row; the best of ROUNDS counts.
REPEATS, ROUNDS = 3, 3


def fastest(enqueue: Callable[[], object], finish: Callable[[], object]) -> float:
    """Seconds that a call takes, after one that does not count."""
    enqueue()
    best = float("inf")
    for _ in range(ROUNDS):
        finish()
        start = time.perf_counter()
        for _ in range(REPEATS):
            enqueue()
        finish()
        best = min(best, (time.perf_counter() - start) / REPEATS)
    return best


class Tuning:
    """The fastest of several grids, which give the same bits: measured once for each kernel and
    its sizes, and kept in the cache. TREADLE_TUNE=0 takes the first instead.

    measure: the seconds that a call takes with a grid.
    """

    def __init__(
        self, dialect: str, identity: dict[str, str], measure: Callable[[Call, Grid], float]
    ) -> None:
        self.dialect, self.measure = dialect, measure
        self.device = kernel_cache.digest(*identity.values())
        self.measures = os.environ.get("TREADLE_TUNE") != "0"
        self.known: dict[str, dict[str, int]] = {}
        self.found: dict[str, dict[str, int]] = {}

    def choose(self, call: Call) -> int:
        """The index of the grid to use."""
        if not self.measures:
            return 0
        sources = [source(self.dialect, g) for g in call.grids]
        file = f"choices-{kernel_cache.digest(self.device, *sources)}.json"
        if file not in self.known:
            self.known[file] = kernel_cache.load_choices(file)
        present = "".join("-" if m is None else "+" for m in call.memory)
        key = " ".join([call.launch.kernel, present, *map(str, call.dims)])
        if key not in self.known[file]:
            times = [self.measure(call, g) for g in call.grids]
            self.known[file][key] = times.index(min(times))
            self.found.setdefault(file, {})[key] = self.known[file][key]
        best = self.known[file][key]
        return best if best < len(call.grids) else 0

    def save(self) -> None:
        """Keep what was measured."""
        for file, choices in self.found.items():
            kernel_cache.store_choices(file, choices)
