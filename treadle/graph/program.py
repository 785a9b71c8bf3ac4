"""A program: several graphs over one table of named persistent buffers.

The graphs of a training run (micro-step, update, evaluate, decode) read and update the same
weights, moments, inputs and scalars. They run one at a time, so they share one arena, as large as
the largest of them needs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from treadle.errors import GraphError
from treadle.graph.op import Graph
from treadle.graph.plan import ALIGN, Plan, align
from treadle.graph.value import ROLES, Buffer, Shape


@dataclass(eq=False)
class Program:
    """Buffers and graphs by name."""

    buffers: dict[str, Buffer] = field(default_factory=dict)
    graphs: dict[str, Graph] = field(default_factory=dict)

    def buffer(
        self, name: str, shape: Shape, dtype: str = "float32", role: str = "state"
    ) -> Buffer:
        """Declare a persistent buffer; the same declaration twice is the same buffer."""
        if role not in ROLES:
            raise GraphError(f"[buffer] @{name}: unknown role {role!r}; one of {', '.join(ROLES)}")
        made = Buffer(tuple(shape), dtype, name, role)
        if self.buffers.setdefault(name, made) != made:
            raise GraphError(f"[buffer] @{name} is {self.buffers[name]} already, not {made}")
        return made

    def graph(self, name: str) -> Graph:
        """Start a new graph."""
        if name in self.graphs:
            raise GraphError(f"[program] there is a graph '{name}' already")
        self.graphs[name] = Graph(name)
        return self.graphs[name]

    def persistent_bytes(self, role: str | None = None, unit: int = ALIGN) -> int:
        """Bytes of all buffers, or of those with one role, each a multiple of `unit`."""
        chosen = (b for b in self.buffers.values() if role is None or b.role == role)
        return sum(align(b.nbytes, unit) for b in chosen)

    def __str__(self) -> str:
        return "\n".join([*map(str, self.buffers.values()), *map(str, self.graphs.values())])


@dataclass(frozen=True)
class Memory:
    """Peak memory of a program on a backend, in bytes."""

    persistent: int
    arena: int
    scratch: int

    @property
    def total(self) -> int:
        return self.persistent + self.arena + self.scratch


def memory(program: Program, plans: dict[str, Plan], threads: int, unit: int = ALIGN) -> Memory:
    """persistent + the largest arena + scratch of all threads. unit: see persistent_bytes."""
    return Memory(
        program.persistent_bytes(unit=unit),
        max((p.arena_bytes for p in plans.values()), default=0),
        max((p.scratch_bytes for p in plans.values()), default=0) * threads,
    )
