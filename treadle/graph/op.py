"""Ops, nodes and graphs; and the primitives that differentiation itself needs.

A graph is an explicit list of nodes in SSA form: every value is produced once, before it is used.
An op is a frozen dataclass: its fields are the node's attributes. Nothing is computed here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from dataclasses import fields as dataclass_fields
from typing import Any, ClassVar

import numpy as np

from treadle.errors import DTypeError, GraphError, ShapeError
from treadle.graph.value import FLOATS, SUFFIX, Buffer, Shape, Spec, Value

# ---------------------------------------------------------------- launches


@dataclass(eq=False)
class Temp:
    """Memory that one node needs while it runs: packed panels, partial sums."""

    nbytes: int
    name: str = "temp"


@dataclass(frozen=True, eq=False)
class Slice:
    """Part of a tensor's memory, as a launch argument: `nbytes` bytes from `offset` on."""

    base: Value | Temp
    offset: int
    nbytes: int


Arg = Value | Temp | Slice | None


@dataclass(frozen=True)
class Gpu:
    """A target whose kernels are OpenCL C, and the sizes that they are cut for.

    group:      work-items of a work-group at most.
    local:      bytes of local memory of a work-group.
    vector:     floats of the register that one work-item computes in: 1 on a GPU, whose
                work-items are lanes; 4 or more on a processor.
    allocation: bytes of one piece of memory at most, None without a limit.
    vendor:     whether cuBLASLt and cuDNN are there.
    memory:     bytes that the device has, for choices between speed and memory.
    """

    group: int = 64
    local: int = 32768
    vector: int = 1
    allocation: int | None = None
    vendor: bool = False
    memory: int = 8 << 30

    def items(self, wanted: int) -> int:
        """A power of two, at most `wanted` and at most a work-group."""
        return 1 << (min(wanted, self.group).bit_length() - 1)


Target = str | Gpu  # "cpu": the C kernels


@dataclass(frozen=True)
class Grid:
    """How a GPU runs a kernel of ops/<source>.cl: compiled with `defines`, in `groups` work-groups
    (x, y, z) of `items` work-items. The kernel sees `items` as GROUP; where it is 0, `source` is a
    vendor's library instead."""

    source: str
    groups: tuple[int, ...]
    items: int
    defines: tuple[tuple[str, str | int], ...] = ()


@dataclass(eq=False)
class Launch:
    """One kernel call: what a backend executes, as data.

    kernel: exported symbol, dtype suffix included; for a GPU the name in its source.
    args:   tensors in the kernel's order; the first `writes` of them are written (and may be
            read), the others only read. None where an optional tensor is absent.
    dims:   run-time sizes and integer attributes.  nums: real attributes.
    tasks:  independent pieces of work, fixed by shape.  scratch: bytes a thread needs.
    grids:  for a GPU, ways to run it that give the same bits; the fastest is found by measurement.
    merges: for a GPU, dims[0] counts elements that do not depend on each other, so that calls
            whose tensors follow each other in memory may become one.
    """

    kernel: str
    args: Sequence[Arg]
    writes: int
    dims: Sequence[int] = ()
    nums: Sequence[float] = ()
    tasks: int = 1
    scratch: int = 0
    grids: Sequence[Grid] = ()
    merges: bool = False


@dataclass(frozen=True)
class Cost:
    """What a node costs at least: floating-point operations, and bytes to and from memory."""

    flops: int = 0
    nbytes: int = 0


# ---------------------------------------------------------------- ops


class Op:
    """Base of all ops. A subclass is a frozen dataclass and says how it infers, computes,
    differentiates, costs and lowers.

    `updates` maps an output to the input buffer that it replaces in place; `inplace` maps an output
    to the inputs whose memory it may take over; `optional` lists outputs that are skipped
    (None in a launch) when nobody uses them.
    """

    name: ClassVar[str] = ""
    updates: ClassVar[dict[int, int]] = {}
    inplace: ClassVar[dict[int, tuple[int, ...]]] = {}
    optional: ClassVar[tuple[int, ...]] = ()

    def infer(self, *inputs: Any) -> Sequence[Spec]:
        """Specs of the outputs; ShapeError or DTypeError where the inputs do not fit."""
        raise NotImplementedError

    def reference(self, *inputs: Any) -> Sequence[np.ndarray]:
        """The outputs by plain NumPy, in whatever float dtype the inputs have."""
        raise NotImplementedError

    def evaluate(
        self, node: Node, inputs: Sequence[Any], stored: Callable[[np.ndarray, Spec], np.ndarray]
    ) -> Sequence[np.ndarray]:
        """`reference` of a node's inputs. stored: an array as memory of a spec holds it; for an op
        that computes one of its outputs from another, as it is stored."""
        return self.reference(*inputs)

    def grad(
        self, node: Node, dys: Sequence[Value | None], needs: Sequence[bool]
    ) -> Sequence[Value | None]:
        """Gradient of each input (None where `needs` is false or the input is not a float)."""
        raise GraphError(f"[{self.name}] has no gradient; differentiate before fusing")

    def cost(self, node: Node) -> Cost:
        """By default one operation an output element, and every tensor touched once."""
        return Cost(sum(v.size for v in node.outputs), touched(node))

    def lower(self, target: Target, node: Node) -> Sequence[Launch]:
        """The launches that compute the node on `target`."""
        raise NotImplementedError(f"[{self.name}] has no kernels for {target}")

    def attributes(self) -> dict[str, Any]:
        """The op's fields by name."""
        return {f.name: getattr(self, f.name) for f in dataclass_fields(self)}  # type: ignore[arg-type]


def touched(node: Node) -> int:
    """Bytes of all inputs and outputs of a node."""
    return sum(v.nbytes for v in (*node.inputs, *node.outputs) if v is not None)


def suffixed(kernel: str, dtype: str) -> str:
    """The exported symbol of a kernel for a dtype: `layernorm_forward_f32`."""
    return f"{kernel}_{SUFFIX[dtype]}"


# Elements that one task of an elementwise or optimizer kernel handles.
BLOCK = 16384


def blocks(n: int, block: int = BLOCK) -> int:
    """Number of fixed blocks that cover n elements (at least one)."""
    return max(1, -(-n // block))


# Work-items of an elementwise kernel's work-group, and the elements that each handles: on a GPU so
# many vectors of four.
ITEMS = 256
EACH = 4
QUADS = 2


def pointwise(
    target: Target,
    source: str,
    kernel: str,
    dtypes: Sequence[str],
    args: Sequence[Arg],
    writes: int,
    dims: Sequence[int],
    nums: Sequence[float] = (),
    merges: bool = False,
) -> list[Launch]:
    """The launch of a kernel that computes dims[0] elements, each from its own place in the
    tensors.

    dtypes: of the kernel, T and then U of its source for a GPU.  merges: see Launch.
    """
    n = dims[0]
    if isinstance(target, Gpu):
        defines: tuple[tuple[str, str | int], ...]
        defines = tuple(zip("TU", (SUFFIX[d] for d in dtypes), strict=False))
        each = EACH
        if target.vector == 1 and source == "elementwise":
            defines, each = (*defines, ("QUADS", QUADS)), 4 * QUADS
        items = target.items(ITEMS)
        grid = Grid(source, (blocks(n, items * each),), items, defines)
        return [Launch(kernel, args, writes, dims, nums, grids=[grid], merges=merges)]
    name = "_".join([kernel, *(SUFFIX[d] for d in dtypes)])
    return [Launch(name, args, writes, dims, nums, tasks=blocks(n))]


# Vectors of a row that one work-item takes, where the row is long enough.
VECTORS = 4
# Work-items that share a row; few numbers, since kernels are compiled for each. A warp of CUDA's
# adds up without barriers, and so takes a longer row.
LANES = (4, 16, 64, 256)
WARP, WARP_VECTORS = 32, 16


def row_grid(target: Gpu, source: str, dtypes: Sequence[str], rows: int, columns: int) -> Grid:
    """How a kernel runs that takes rows [rows, columns], LANES work-items a row, each with some
    vectors of VEC elements; dtypes as in `pointwise`. See kernels/gpu.clh."""
    vec = 4 if columns % 4 == 0 else 1
    items = target.items(ITEMS)
    wanted = blocks(columns, vec * VECTORS)
    lanes = next((n for n in LANES if wanted <= n <= items), items)
    if target.vendor and lanes > WARP and columns <= vec * WARP * WARP_VECTORS:
        lanes = WARP
    defines = tuple(zip("TU", (SUFFIX[d] for d in dtypes), strict=False))
    shape = (("VEC", vec), ("LANES", lanes))
    return Grid(source, (blocks(rows, items // lanes),), items, (*defines, *shape))


# ---------------------------------------------------------------- graph


@dataclass(eq=False)
class Node:
    """An op applied to values. Inputs may be None where the op has optional ones."""

    op: Op
    inputs: tuple[Value | None, ...]
    outputs: tuple[Value, ...]
    name: str

    def used(self, index: int) -> bool:
        """Whether output `index` is read by a node or lives on in a buffer."""
        value = self.outputs[index]
        return bool(value.users) or value.buffer is not None

    def out(self, index: int) -> Value | None:
        """Output `index`, or None when it is optional and unused: ready for a launch."""
        if index in self.op.optional and not self.used(index):
            return None
        return self.outputs[index]

    def __str__(self) -> str:
        outs = ", ".join(f"{v}{f' -> @{v.buffer.name}' if v.buffer else ''}" for v in self.outputs)
        ins = ", ".join("none" if v is None else f"%{v.name}" for v in self.inputs)
        attrs = ", ".join(f"{k}={v!r}" for k, v in self.op.attributes().items() if v is not None)
        return f"{outs} = {self.op.name}({ins}){f' {{{attrs}}}' if attrs else ''}"


@dataclass(eq=False)
class Graph:
    """A named list of nodes over persistent buffers."""

    name: str
    nodes: list[Node] = field(default_factory=list)
    reads: dict[str, Value] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)
    names: dict[str, int] = field(default_factory=dict, repr=False)
    scopes: list[str] = field(default_factory=list, repr=False)

    def unique(self, name: str) -> str:
        """`name`, or `name_2`, `name_3` … when it is taken."""
        count = self.names.get(name, 0) + 1
        self.names[name] = count
        return name if count == 1 else self.unique(f"{name}_{count}")

    def scope(self, name: str) -> _Scope:
        """`with graph.scope("h.0"):` prefixes the names of the nodes made inside."""
        return _Scope(self, name)

    def read(self, buffer: Buffer) -> Value:
        """The buffer's content at the start of the graph (the same value at every call)."""
        if buffer.name not in self.reads:
            value = Value(self, self.unique(buffer.name), Spec(buffer.shape, buffer.dtype))
            value.buffer = buffer
            self.reads[buffer.name] = value
            self.versions[buffer.name] = 0
        return self.reads[buffer.name]

    def assign(self, buffer: Buffer, value: Value) -> None:
        """Let `value` be the buffer's new content: it is computed straight into that memory."""
        if value.buffer is not None:
            raise GraphError(
                f"[assign] %{value.name} lives in @{value.buffer.name} already and cannot be "
                f"assigned to @{buffer.name}; assign a copy"
            )
        if value.shape != buffer.shape or value.dtype != buffer.dtype:
            raise ShapeError(
                f"[assign] expected {Spec(buffer.shape, buffer.dtype)} for @{buffer.name}, "
                f"got {value.spec}"
            )
        value.buffer = buffer
        value.version = self.versions.get(buffer.name, 0) + 1
        self.versions[buffer.name] = value.version

    def apply(self, op: Op, *inputs: Value | None, name: str | None = None) -> tuple[Value, ...]:
        """Append a node; returns its outputs."""
        for v in inputs:
            if v is not None and v.graph is not self:
                raise GraphError(
                    f"[{op.name}] %{v.name} belongs to graph '{v.graph.name}', not '{self.name}'"
                )
        specs = op.infer(*(None if v is None else v.spec for v in inputs))
        label = self.unique("/".join([*self.scopes, name or op.name]))
        node = Node(op, tuple(inputs), (), label)
        outputs = []
        for i, spec in enumerate(specs):
            value = Value(self, label if i == 0 else f"{label}.{i}", spec, node, i)
            if i in op.updates:
                source = inputs[op.updates[i]]
                if source is None or source.buffer is None:
                    raise GraphError(f"[{op.name}] updates a buffer, but input is not one")
                value.buffer = source.buffer
                value.version = self.versions[source.buffer.name] + 1
                self.versions[source.buffer.name] = value.version
            outputs.append(value)
        node.outputs = tuple(outputs)
        for v in dict.fromkeys(inputs):
            if v is not None:
                v.users.append(node)
        self.nodes.append(node)
        return node.outputs

    def relink(self) -> None:
        """Recount users after nodes were added, removed or replaced."""
        for node in self.nodes:
            for v in (*node.inputs, *node.outputs):
                if v is not None:
                    v.users = []
        for node in self.nodes:
            for v in dict.fromkeys(node.inputs):
                if v is not None:
                    v.users.append(node)

    def prune(self) -> None:
        """Drop nodes whose outputs reach no buffer."""
        live: set[int] = set()
        kept: list[Node] = []
        for node in reversed(self.nodes):
            if any(v.buffer is not None or id(v) in live for v in node.outputs):
                kept.append(node)
                live.update(id(v) for v in node.inputs if v is not None)
        self.nodes = kept[::-1]
        self.relink()

    def cost(self) -> Cost:
        """Sum over the nodes."""
        costs = [n.op.cost(n) for n in self.nodes]
        return Cost(sum(c.flops for c in costs), sum(c.nbytes for c in costs))

    def __str__(self) -> str:
        lines = [f"graph {self.name} {{"]
        lines += [f"  read {v} <- @{v.buffer.name}" for v in self.reads.values() if v.buffer]
        return "\n".join([*lines, *(f"  {n}" for n in self.nodes), "}"])


@dataclass
class _Scope:
    graph: Graph
    name: str

    def __enter__(self) -> None:
        self.graph.scopes.append(self.name)

    def __exit__(self, *exc: object) -> None:
        self.graph.scopes.pop()


# ---------------------------------------------------------------- argument checks


def expect(ok: bool, op: str, want: str, got: object, hint: str = "") -> None:
    """ShapeError `[op] expected want, got got; hint` unless `ok`."""
    if not ok:
        raise ShapeError(f"[{op}] expected {want}, got {got}{'; ' + hint if hint else ''}")


def expect_float(op: str, *specs: Spec | None) -> None:
    """DTypeError unless every spec is of a floating-point dtype."""
    for spec in specs:
        if spec is not None and spec.dtype not in FLOATS:
            raise DTypeError(f"[{op}] expected a float dtype, got {spec}")


def expect_same(op: str, *specs: Spec | None) -> None:
    """ShapeError or DTypeError unless all specs are alike."""
    first, *rest = [s for s in specs if s is not None]
    for spec in rest:
        expect(spec.shape == first.shape, op, f"shape {list(first.shape)}", list(spec.shape))
        if spec.dtype != first.dtype:
            raise DTypeError(f"[{op}] expected {first.dtype}, got {spec.dtype}; cast first")


# ---------------------------------------------------------------- primitives of autograd

# Terms that one launch on a GPU adds up.
SUM_TERMS = 8


@dataclass(frozen=True)
class Fill(Op):
    """y = value, a constant of the given shape."""

    shape: Shape = ()
    value: float = 0.0
    dtype: str = "float32"
    name: ClassVar[str] = "fill"

    def infer(self) -> Sequence[Spec]:
        return (Spec(self.shape, self.dtype),)

    def reference(self) -> Sequence[np.ndarray]:
        return (np.full(self.shape, self.value),)

    def grad(self, node, dys, needs):  # type: ignore[no-untyped-def]
        return ()

    def lower(self, target: Target, node: Node) -> Sequence[Launch]:
        y = node.outputs[0]
        return pointwise(target, "elementwise", "fill", [y.dtype], [y], 1, [y.size], [self.value])


@dataclass(frozen=True)
class Cast(Op):
    """y = x in another float dtype (bfloat16: round to nearest even)."""

    dtype: str = "float32"
    name: ClassVar[str] = "cast"

    def infer(self, x: Spec) -> Sequence[Spec]:
        expect_float("cast", x, Spec((), self.dtype))
        return (Spec(x.shape, self.dtype),)

    def reference(self, x: np.ndarray) -> Sequence[np.ndarray]:
        return (x,)  # the backend that runs references rounds each output to its dtype

    def grad(self, node, dys, needs):  # type: ignore[no-untyped-def]
        return (cast(dys[0], node.inputs[0].dtype),)

    def lower(self, target: Target, node: Node) -> Sequence[Launch]:
        x, y = node.inputs[0], node.outputs[0]
        assert x is not None
        return pointwise(target, "elementwise", "cast", [x.dtype, y.dtype], [y, x], 1, [x.size])


@dataclass(frozen=True)
class Sum(Op):
    """y = x₁ + x₂ + … + xₙ, added from left to right; all of one shape."""

    name: ClassVar[str] = "sum"
    inplace: ClassVar[dict[int, tuple[int, ...]]] = {0: (0,)}

    def infer(self, *xs: Spec) -> Sequence[Spec]:
        expect(len(xs) > 0, "sum", "at least one value", "none")
        expect_float("sum", *xs)
        expect_same("sum", *xs)
        return (xs[0],)

    def reference(self, *xs: np.ndarray) -> Sequence[np.ndarray]:
        total = xs[0].copy()
        for x in xs[1:]:
            total += x
        return (total,)

    def grad(self, node, dys, needs):  # type: ignore[no-untyped-def]
        return [dys[0]] * len(node.inputs)

    def lower(self, target: Target, node: Node) -> Sequence[Launch]:
        y, xs = node.outputs[0], list(node.inputs)
        if not isinstance(target, Gpu):
            dims = [y.size, len(xs)]
            return pointwise(target, "elementwise", "sum", [y.dtype], [y, *xs], 1, dims)
        launches = []
        while xs:
            terms = [*xs[:SUM_TERMS], *[None] * (SUM_TERMS - len(xs))]
            launches += pointwise(target, "elementwise", "sum", [y.dtype], [y, *terms], 1, [y.size])
            xs = [y, *xs[SUM_TERMS:]] if len(xs) > SUM_TERMS else []
        return launches


def zeros(graph: Graph, shape: Shape, dtype: str = "float32") -> Value:
    """A constant of zeros."""
    return graph.apply(Fill(shape, 0.0, dtype), name="zeros")[0]


def cast(x: Value, dtype: str) -> Value:
    """x in another float dtype; x itself when it has that dtype."""
    return x if x.dtype == dtype else x.graph.apply(Cast(dtype), x)[0]


def add_all(values: Sequence[Value]) -> Value:
    """The sum of values of one shape, from left to right; the value itself when there is one."""
    return values[0] if len(values) == 1 else values[0].graph.apply(Sum(), *values)[0]
