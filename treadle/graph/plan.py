"""The plan of a graph: its launches in order, and every tensor's place in memory.

Laid out before the first step: lifetimes, in-place reuse, one arena per program. A plan is data;
a backend turns it into calls. Launches that touch no common memory share a phase, and a barrier
stands between phases, so correctness follows from addresses alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from treadle.errors import BackendError
from treadle.graph.check import check
from treadle.graph.op import Arg, Cost, Gpu, Graph, Launch, Node, Slice, Target, Temp

ALIGN = 64  # bytes: a cache line, and the widest vector
GPU_ALIGN = 512  # what any device wants of the beginning of a piece of memory


def align(n: int, unit: int = ALIGN) -> int:
    """n rounded up to a multiple of `unit`."""
    return -(-n // unit) * unit


def unit_of(target: Target | None) -> int:
    """What places in memory are a multiple of, in bytes."""
    return GPU_ALIGN if isinstance(target, Gpu) else ALIGN


@dataclass(frozen=True)
class Place:
    """Where a tensor, or a slice of one, lives: in a persistent buffer (`buffer` its name), or in
    the arena."""

    buffer: str | None
    offset: int
    nbytes: int


@dataclass(eq=False)
class _Block:
    """Arena memory that one value, or a chain of in-place values, occupies from start to end."""

    start: int
    end: int
    nbytes: int
    offset: int = 0


@dataclass(eq=False)
class Plan:
    """See the module. `phases[i]` is the index of the first launch of phase i."""

    graph: Graph
    launches: list[Launch]
    nodes: list[Node]  # the node of each launch
    phases: list[int]
    places: dict[int, Place] = field(repr=False)  # by id of a Value or Temp
    arena_bytes: int = 0
    scratch_bytes: int = 0  # for each thread
    cost: Cost = field(default_factory=Cost)

    def place(self, arg: Arg) -> Place | None:
        """Where a launch argument lives; None for an absent one."""
        if isinstance(arg, Slice):
            base = self.places[id(arg.base)]
            return Place(base.buffer, base.offset + arg.offset, arg.nbytes)
        return None if arg is None else self.places[id(arg)]

    def __str__(self) -> str:
        head = (
            f"plan {self.graph.name}: {len(self.launches)} launches in {len(self.phases)} phases, "
            f"arena {self.arena_bytes:,} B, {self.cost.flops:,} FLOP, {self.cost.nbytes:,} B moved"
        )
        starts = set(self.phases)
        lines = []
        for i, (launch, node) in enumerate(zip(self.launches, self.nodes, strict=True)):
            args = ", ".join(_show(self.place(a)) for a in launch.args)
            mark = "|" if i in starts else " "
            lines.append(f" {mark} {launch.kernel}({args}) x{launch.tasks}  # {node.name}")
        return "\n".join([head, *lines])


def _show(place: Place | None) -> str:
    if place is None:
        return "-"
    at = f"+{place.offset}"
    return at if place.buffer is None else f"@{place.buffer}{at if place.offset else ''}"


def plan(graph: Graph, target: Target | None) -> Plan:
    """Check the graph, lower its nodes for `target` and lay out memory.

    With target None nothing is lowered: the plan then holds costs and the arena only, which is
    what the reference backend and the estimates need.
    """
    unit = unit_of(target)
    graph.prune()
    check(graph)
    launches: list[Launch] = []
    owners: list[Node] = []
    temps: dict[int, Temp] = {}
    blocks: dict[int, _Block] = {}

    last_use = {
        id(v): i for i, node in enumerate(graph.nodes) for v in node.inputs if v is not None
    }
    for i, node in enumerate(graph.nodes):
        for j, v in enumerate(node.outputs):
            if v.buffer is not None or node.out(j) is None:
                continue
            end = last_use.get(id(v), i)
            donor = _donor(node, j, i, last_use, blocks, unit)
            if donor is not None:
                donor.end = max(donor.end, end)
                blocks[id(v)] = donor
            else:
                blocks[id(v)] = _Block(i, end, align(v.nbytes, unit))
        lowered = node.op.lower(target, node) if target is not None else ()
        for launch in lowered:
            launches.append(launch)
            owners.append(node)
            for arg in launch.args:
                memory = arg.base if isinstance(arg, Slice) else arg
                if isinstance(memory, Temp) and id(memory) not in temps:
                    temps[id(memory)] = memory
                    blocks[id(memory)] = _Block(i, i, align(memory.nbytes, unit))

    allocation = target.allocation if isinstance(target, Gpu) else None
    arena = _pack(list({id(b): b for b in blocks.values()}.values()), allocation)
    places = {key: Place(None, b.offset, b.nbytes) for key, b in blocks.items()}
    values = [*graph.reads.values(), *(v for n in graph.nodes for v in n.outputs)]
    for v in values:
        if v.buffer is not None:
            places[id(v)] = Place(v.buffer.name, 0, v.nbytes)

    result = Plan(graph, launches, owners, [], places, arena, cost=graph.cost())
    result.phases = _phases(result)
    result.scratch_bytes = align(max((x.scratch for x in launches), default=0))
    return result


def _donor(
    node: Node, j: int, i: int, last_use: dict[int, int], blocks: dict[int, _Block], unit: int
) -> _Block | None:
    """The block of an input that output j may take over, if its content dies here."""
    for k in node.op.inplace.get(j, ()):
        v = node.inputs[k] if k < len(node.inputs) else None
        if v is None or v.buffer is not None or last_use[id(v)] != i:
            continue
        block = blocks[id(v)]
        taken = any(block is blocks.get(id(o)) for o in node.outputs[:j])
        shared = sum(1 for w in node.inputs if w is not None and blocks.get(id(w)) is block) > 1
        if not taken and not shared and block.nbytes == align(node.outputs[j].nbytes, unit):
            return block
    return None


def _pack(blocks: Sequence[_Block], piece: int | None) -> int:
    """Give every block an offset; blocks alive together never overlap, and none lies across a
    multiple of `piece`, where memory comes in pieces. Returns the arena's size.

    Greedy by size (Pisarchyk & Lee 2020, "Efficient Memory Management for Deep Neural Net
    Inference"): the largest first, each at the lowest gap that is free over its whole life.
    """
    placed: list[_Block] = []
    total = 0
    most = max((b.nbytes for b in blocks), default=0)
    if piece is not None and most > piece:
        raise BackendError(
            f"one tensor needs {most / 2**20:,.0f} MiB, and the device gives at most "
            f"{piece / 2**20:,.0f} in one piece; lower train.batch_size, raise train.grad_accum, "
            "or use --device cpu"
        )
    for block in sorted(blocks, key=lambda b: (-b.nbytes, b.start, b.end)):
        offset = 0
        for other in placed:  # kept sorted by offset
            if other.end < block.start or other.start > block.end:
                continue
            if offset + block.nbytes <= other.offset:
                break
            offset = _whole(max(offset, other.offset + other.nbytes), block.nbytes, piece)
        block.offset = offset
        total = max(total, offset + block.nbytes)
        at = len(placed)
        while at > 0 and placed[at - 1].offset > offset:
            at -= 1
        placed.insert(at, block)
    return total


def _whole(offset: int, nbytes: int, piece: int | None) -> int:
    """The offset from which on so many bytes lie in one piece."""
    if piece is None or offset // piece == (offset + nbytes - 1) // piece:
        return offset
    return align(offset, piece)


def _phases(plan: Plan) -> list[int]:
    """Start a new phase wherever a launch touches memory that the current phase writes, or writes
    memory that it reads."""
    phases: list[int] = []
    reads: list[Place] = []
    writes: list[Place] = []
    for i, launch in enumerate(plan.launches):
        places = [plan.place(a) for a in launch.args]
        out = [p for p in places[: launch.writes] if p is not None]
        into = [p for p in places[launch.writes :] if p is not None]
        clash = (
            not phases
            or any(_overlap(a, b) for a in out for b in (*reads, *writes))
            or any(_overlap(a, b) for a in into for b in writes)
        )
        if clash:
            phases.append(i)
            reads, writes = [], []
        reads += into
        writes += out
    return phases


def _overlap(a: Place, b: Place) -> bool:
    return (
        a.buffer == b.buffer and a.offset < b.offset + b.nbytes and b.offset < a.offset + a.nbytes
    )
