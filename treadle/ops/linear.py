"""Matrix multiplication and the linear layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import numpy as np

from treadle.errors import DTypeError
from treadle.graph.op import (
    Arg,
    Cost,
    Gpu,
    Grid,
    Launch,
    Node,
    Op,
    Slice,
    Target,
    Temp,
    blocks,
    expect,
    expect_float,
    expect_same,
    suffixed,
    touched,
)
from treadle.graph.plan import GPU_ALIGN, align
from treadle.graph.value import SUFFIX, Spec, Value, itemsize, wide
from treadle.ops import gpu_tiles, vendor
from treadle.ops.elementwise import activation as activate
from treadle.ops.elementwise import (
    activation_reference,
    activation_slope,
    add,
    slope_launches,
    sum_leading,
)
from treadle.ops.tiles import matmul_tiles, reads_in_place

# As linear.c and kernels/activation.h number them.
ACCUMULATE, OUTPUT_FLOAT32, GATED = 1, 2, 4
ACTIVATION_CODES = {None: 0, "gelu": 1, "gelu_erf": 2, "relu": 3, "silu": 4}


@dataclass(frozen=True)
class MatMul(Op):
    """y = f(A · B + bias) + residual (+ into), pre = A · B + bias; or, with `gated`, f of another
    product times this one: y = f(gate) · (A · B + bias), the gate in the place of the residual; or,
    with `slope`, y = (A · B) · f'(x), the gradient through an activation of x, which stands there.

    a: [..., K], or [..., M] with transpose_a: its leading dimensions are then the sum's
    (aᵀ · b over all rows, a weight's gradient).  b: [K, N], or [N, K] with transpose_b; with
    transpose_a its shape is [..., N].
    bias: [N], float32 beside bfloat16.  residual: y's shape.  into: a buffer of y's shape that y
    is added to, in place.
    Outputs: y [..., N] ([M, N] with transpose_a), and pre (before the activation), for backward.
    f is taken of pre in its own dtype, as by an Activation or a Gated after the product.
    The sums are in float32 (float64 where the inputs are). f, gate, slope, residual and into are
    set by the fusion pass, after differentiation; only the bare product and the bias have a
    gradient here.
    """

    transpose_a: bool = False
    transpose_b: bool = False
    activation: str | None = None
    dtype: str | None = None
    gated: bool = False
    slope: str | None = None
    name: ClassVar[str] = "matmul"
    optional: ClassVar[tuple[int, ...]] = (1,)

    @property
    def updates(self) -> dict[int, int]:  # type: ignore[override]
        return {}

    def sizes(self, a: Spec, b: Spec) -> tuple[int, int, int]:
        """M, N, K of the two-dimensional product."""
        if self.transpose_a:
            return a.shape[-1], b.shape[-1], prod(a.shape[:-1])
        return prod(a.shape[:-1]), b.shape[0] if self.transpose_b else b.shape[1], a.shape[-1]

    def infer(
        self, a: Spec, b: Spec, bias: Spec | None = None, residual: Spec | None = None
    ) -> Sequence[Spec]:
        expect_float("matmul", a, b, bias, residual)
        if a.dtype != b.dtype:
            raise DTypeError(f"[matmul] expected two {a.dtype} inputs, got {b}; cast first")
        expect(len(a.shape) >= 2, "matmul", "a first input of 2 or more dimensions", list(a.shape))
        if self.transpose_a:
            expect(not self.transpose_b, "matmul", "one transposed input", "two")
            expect(
                a.shape[:-1] == b.shape[:-1],
                "matmul",
                f"a second shape {[*a.shape[:-1], 'N']} for aᵀ·b",
                list(b.shape),
            )
            out: tuple[int, ...] = (a.shape[-1], b.shape[-1])
        else:
            k = b.shape[-1] if self.transpose_b else b.shape[0]
            expect(len(b.shape) == 2, "matmul", "a second input of 2 dimensions", list(b.shape))
            expect(
                k == a.shape[-1],
                "matmul",
                f"{['N', a.shape[-1]] if self.transpose_b else [a.shape[-1], 'N']} "
                f"for the second input",
                list(b.shape),
                f"the first is {list(a.shape)}",
            )
            out = (*a.shape[:-1], b.shape[0] if self.transpose_b else b.shape[1])
        if bias is not None:
            wanted = Spec(out[-1:], wide(a.dtype))
            expect(bias == wanted, "matmul", f"a bias of {wanted}", bias)
        if residual is not None:
            expect(residual.shape == out, "matmul", f"residual {list(out)}", list(residual.shape))
        y = Spec(out, self.dtype or a.dtype)
        return (y, Spec(out, a.dtype)) if self.activation else (y,)

    def reference(
        self,
        a: np.ndarray,
        b: np.ndarray,
        bias: np.ndarray | None = None,
        residual: np.ndarray | None = None,
    ) -> Sequence[np.ndarray]:
        if self.transpose_a:
            pre = a.reshape(-1, a.shape[-1]).T @ b.reshape(-1, b.shape[-1])
        else:
            pre = a @ (b.T if self.transpose_b else b)
        if bias is not None:
            pre = pre + bias
        if self.gated and self.activation and residual is not None:
            return activation_reference(self.activation, residual) * pre, pre
        if self.slope and residual is not None:
            return (pre * activation_slope(self.slope, residual),)
        y = activation_reference(self.activation, pre) if self.activation else pre
        if residual is not None:
            y = y + residual
        return (y, pre) if self.activation else (y,)

    def evaluate(
        self, node: Node, inputs: Sequence[Any], stored: Callable[[np.ndarray, Spec], np.ndarray]
    ) -> Sequence[np.ndarray]:
        if self.activation is None:
            return self.reference(*inputs)
        a, b, bias, residual, into = (*inputs, None, None, None)[:5]
        (pre,) = MatMul(self.transpose_a, self.transpose_b).reference(a, b, bias)
        pre = stored(pre, node.outputs[1].spec)
        if self.gated:
            return activation_reference(self.activation, residual) * pre, pre
        y = activation_reference(self.activation, pre)
        y = y if residual is None else y + residual
        return (y if into is None else into + y, pre)

    def grad(self, node, dys, needs):  # type: ignore[no-untyped-def]
        a, b, bias, residual = (*node.inputs, None, None)[:4]
        dy = dys[0]
        if self.activation or residual is not None:
            return super().grad(node, dys, needs)
        da = db = dbias = None
        if needs[0]:
            if self.transpose_a:  # y = aᵀ b over rows: da = b dyᵀ
                da = matmul(b, dy, transpose_b=True)
            else:
                da = matmul(dy, b, transpose_b=not self.transpose_b)
        if needs[1]:
            if self.transpose_a:  # db = a dy
                db = matmul(a, dy)
            elif self.transpose_b:
                db = matmul(dy, a, transpose_a=True, dtype=wide(b.dtype))
            else:
                db = matmul(a, dy, transpose_a=True, dtype=wide(b.dtype))
        if bias is not None and needs[2]:
            dbias = sum_leading(dy, bias.shape, bias.dtype)
        return (da, db, dbias)[: len(node.inputs)]

    def cost(self, node: Node) -> Cost:
        a, b = node.inputs[:2]
        assert a is not None and b is not None
        slope = 14 * node.outputs[0].size if self.slope else 0
        return Cost(2 * prod(self.sizes(a.spec, b.spec)) + slope, touched(node))

    def lower(self, target: Target, node: Node) -> Sequence[Launch]:
        a, b, bias, residual = (*node.inputs, None, None)[:4]
        assert a is not None and b is not None
        y = node.outputs[0]
        return matmul_launches(
            *(target, y, a, b, self.sizes(a.spec, b.spec), a.dtype, y.dtype),
            transpose_a=self.transpose_a,
            transpose_b=self.transpose_b,
            bias=bias,
            activation=self.activation,
            pre=node.out(1) if self.activation else None,
            residual=residual,
            accumulate=bool(self.updates),
            gated=self.gated,
            slope=self.slope,
        )


def matmul_launches(
    target: Target,
    y: Arg,
    a: Arg,
    b: Arg,
    sizes: tuple[int, int, int],
    dtype: str,
    y_dtype: str,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    a_stride: int | None = None,
    y_stride: int | None = None,
    bias: Arg = None,
    activation: str | None = None,
    pre: Arg = None,
    residual: Arg = None,
    accumulate: bool = False,
    gated: bool = False,
    slope: str | None = None,
    packed: Temp | None = None,
) -> list[Launch]:
    """The launches of one product: y = f(A · B + bias) + residual, added to y with `accumulate`, or
    f(residual) · (A · B + bias) with `gated`, or f'(residual) · (A · B) with `slope`.

    sizes: M, N, K.  dtype: of a, b and pre.  a_stride: elements from one row of a, as it lies in
    memory, to the next, where that is more than its row.  y_stride: of y, for a library alone.
    packed: memory for panels that products share which run one after another; it grows to what
    this one needs.
    """
    if isinstance(target, Gpu) and target.vendor:
        return vendor.matmul(
            *(target, y, a, b, sizes, dtype, y_dtype),
            transpose_a=transpose_a,
            transpose_b=transpose_b,
            a_stride=a_stride,
            y_stride=y_stride,
            bias=bias,
            activation=activation,
            pre=pre,
            residual=residual,
            accumulate=accumulate,
            gated=gated,
            slope=slope,
        )
    m, n, k = sizes
    if slope is not None:  # a pass of its own, in place
        product = matmul_launches(
            *(target, y, a, b, sizes, dtype, y_dtype),
            transpose_a=transpose_a,
            transpose_b=transpose_b,
            a_stride=a_stride,
            packed=packed,
        )
        return [*product, *slope_launches(target, slope, y_dtype, y, residual, m * n)]
    a_strides = (1, a_stride or m) if transpose_a else (a_stride or k, 1)
    b_strides = (1, k) if transpose_b else (n, 1)
    if n == 1 and bias is None:  # A as B, whose columns it then has, because few rows stream B
        a, b, m, n = b, a, 1, m
        a_strides, b_strides = (k, 1), (a_strides[1], a_strides[0])
    flags = ACCUMULATE * accumulate + OUTPUT_FLOAT32 * (y_dtype == "float32") + GATED * gated
    if isinstance(target, Gpu):
        kind = ACTIVATION_CODES[activation]
        end = Epilogue(y, pre, bias, residual, dtype, y_dtype, kind, flags)
        left, right = Operand(a, m, a_strides), Operand(b, n, b_strides[::-1])
        workspace = Workspace(packed or Temp(0, "packed"))
        return _gpu_launches(target, end, left, right, k, workspace)
    tiles = matmul_tiles(m, n, k, itemsize(dtype), a_strides)
    panels = None
    if tiles.packed_bytes:
        panels = packed or Temp(0, "packed")
        panels.nbytes = max(panels.nbytes, tiles.packed_bytes)
    launches = []
    if panels is not None:
        shared, dims = a, [m, k, *a_strides, 0]
        if tiles.by_rows:
            shared, dims = b, [n, k, *reversed(b_strides), 1]
        launches.append(
            Launch(
                suffixed("matmul_pack", dtype), [panels, shared], 1, dims, tasks=tiles.pack_tasks
            )
        )
    launches.append(
        Launch(
            suffixed("matmul", dtype),
            [y, pre, a, b, bias, residual, panels],
            2,
            [
                *(m, n, k, *a_strides, *b_strides, n),
                *(int(tiles.by_rows), tiles.blocks, tiles.k_blocks),
                *(ACTIVATION_CODES[activation], flags),
            ],
            [1.0],
            tasks=tiles.tasks,
            scratch=tiles.scratch_bytes,
        )
    )
    return launches


# ---------------------------------------------------------------- on a GPU

# Work-items of the kernel that adds parts of K, and the elements that each handles.
COMBINE_ITEMS, COMBINE_EACH = 256, 4
# A row of four elements is loaded and stored at once.
VECTOR = 4


@dataclass(frozen=True)
class Operand:
    """A, or B with its columns as lines: `lines` of K elements each. strides: in elements, from
    line to line and along k."""

    tensor: Arg
    lines: int
    strides: tuple[int, int]

    def vectors(self, k: int) -> bool:
        """Whether four neighbours in memory, from the first on, always are of it together."""
        along = k if self.strides[1] == 1 else self.lines
        return max(self.strides) % VECTOR == 0 and along % VECTOR == 0


@dataclass(frozen=True)
class Epilogue:
    """What becomes of the sums; see matmul_launches. kind, flags: as linear.cl numbers them."""

    y: Arg
    pre: Arg
    bias: Arg
    residual: Arg
    dtype: str
    y_dtype: str
    kind: int = 0
    flags: int = 0

    def defines(self, **more: int) -> tuple[tuple[str, str | int], ...]:
        types = (("T", SUFFIX[self.dtype]), ("U", SUFFIX[self.y_dtype]))
        return (*types, ("ACT", int(self.kind != 0)), *more.items())


@dataclass(eq=False)
class Workspace:
    """Parts of a temporary, one after another; it grows to what they need."""

    memory: Temp
    used: int = 0

    def part(self, nbytes: int) -> Slice:
        part = Slice(self.memory, self.used, nbytes)
        self.used = align(self.used + nbytes, GPU_ALIGN)
        self.memory.nbytes = max(self.memory.nbytes, self.used)
        return part


def _gpu_launches(
    target: Gpu, end: Epilogue, a: Operand, b: Operand, k: int, workspace: Workspace
) -> list[Launch]:
    """The launches of one product on a GPU: sums, in parts of K where there are several, and then
    these together."""
    m, n = a.lines, b.lines
    cut = gpu_tiles.few(target, m, a.strides[1] != 1, b.strides[1] == 1)
    if cut is not None:
        return [_few_rows(target, end, a, b, k, cut)]
    parts, depth = gpu_tiles.parts_of_k(target, m, n, k)
    compute = _panels if target.vector > 1 else _tiles
    if parts == 1:
        return compute(target, end, a, b, k, parts, depth, workspace)
    partial = workspace.part(parts * m * n * 4)
    sums = Epilogue(partial, None, None, None, end.dtype, "float32")
    items = target.items(COMBINE_ITEMS)
    combine = Launch(
        "matmul_combine",
        [end.y, end.pre, partial, end.bias, end.residual],
        2,
        [m * n, n, parts, end.kind, end.flags],
        grids=[
            Grid("linear", (blocks(m * n, items * COMBINE_EACH),), items, end.defines(COMBINE=1))
        ],
    )
    return [*compute(target, sums, a, b, k, parts, depth, workspace), combine]


def _few_rows(
    target: Gpu, end: Epilogue, a: Operand, b: Operand, k: int, cut: gpu_tiles.Few
) -> Launch:
    """y from a B that is read where it lies."""
    m, n = a.lines, b.lines
    defines = end.defines(FEW=cut.rows, TB=int(b.strides[1] == 1))
    if target.vector > 1:
        defines = (*defines, ("VL", gpu_tiles.vector_length(target)))
    else:
        vectors = (("VA", int(a.vectors(k))), ("VB", int(b.vectors(k))), ("LANES", cut.lanes))
        defines = (*defines, *vectors)
    args = [end.y, end.pre, a.tensor, b.tensor, end.bias, end.residual]
    dims = [m, n, k, a.strides[0], max(b.strides), end.kind, end.flags]
    grid = Grid("linear", (blocks(n, cut.columns),), cut.items, defines)
    return Launch("matmul_few", args, 2, dims, grids=[grid])


def _tiles(
    target: Gpu,
    end: Epilogue,
    a: Operand,
    b: Operand,
    k: int,
    parts: int,
    depth: int,
    workspace: Workspace,
) -> list[Launch]:
    """y, or its sums over each part of K, in tiles that pass through local memory."""
    m, n = a.lines, b.lines
    defines = end.defines(
        TA=int(a.strides[1] != 1),
        TB=int(b.strides[1] == 1),
        VA=int(a.vectors(k)),
        VB=int(b.vectors(k)),
        VC=int(n % VECTOR == 0),
    )
    grids = [
        Grid("linear", (tile.groups(m, n), parts), tile.items, (*defines, *tile.defines()))
        for tile in gpu_tiles.tiles(target, m, n, parts)
    ]
    args = [end.y, end.pre, a.tensor, b.tensor, end.bias, end.residual]
    dims = [m, n, k, max(a.strides), max(b.strides), depth, end.kind, end.flags]
    return [Launch("matmul", args, 2, dims, grids=grids)]


def _panels(
    target: Gpu,
    end: Epilogue,
    a: Operand,
    b: Operand,
    k: int,
    parts: int,
    depth: int,
    workspace: Workspace,
) -> list[Launch]:
    """The same on a processor, from packed panels; A is read where it lies if its rows are floats
    that do not fall on one set of the cache."""
    m, n = a.lines, b.lines
    cut = gpu_tiles.panels(target, m, n)
    launches = []

    def pack(operand: Operand, width: int) -> Slice:
        panels = workspace.part(align(operand.lines, width) * k * 4)
        groups = (blocks(operand.lines, width), blocks(k, gpu_tiles.PACK_BLOCK))
        grid = Grid("linear", groups, 1, end.defines(VL=cut.vector, WIDTH=width))
        dims = [operand.lines, k, *operand.strides]
        launches.append(Launch("matmul_pack", [panels, operand.tensor], 1, dims, grids=[grid]))
        return panels

    in_place = reads_in_place(k, itemsize(end.dtype), a.strides)
    left = a.tensor if in_place else pack(a, cut.rows)
    right = pack(b, cut.columns)
    groups = (blocks(n, cut.columns), blocks(m, cut.rows * cut.strip), parts)
    defines = end.defines(VL=cut.vector, ROWS=cut.rows, PACKED=int(not in_place))
    args = [end.y, end.pre, left, right, end.bias, end.residual]
    dims = [m, n, k, a.strides[0], cut.strip, depth, end.kind, end.flags]
    launches.append(
        Launch("matmul_panels", args, 2, dims, grids=[Grid("linear", groups, 1, defines)])
    )
    return launches


@dataclass(frozen=True)
class MatMulInto(MatMul):
    """into ← into + (f(A · B + bias) + residual), in place: a MatMul with a buffer of y's shape and
    dtype as its fifth input. See MatMul."""

    name: ClassVar[str] = "matmul_into"

    @property
    def updates(self) -> dict[int, int]:  # type: ignore[override]
        return {0: 4}

    def infer(  # type: ignore[override]
        self, a: Spec, b: Spec, bias: Spec | None, residual: Spec | None, into: Spec
    ) -> Sequence[Spec]:
        y, *pre = super().infer(a, b, bias, residual)
        expect_same(self.name, y, into)
        return (y, *pre)

    def reference(  # type: ignore[override]
        self,
        a: np.ndarray,
        b: np.ndarray,
        bias: np.ndarray | None,
        residual: np.ndarray | None,
        into: np.ndarray,
    ) -> Sequence[np.ndarray]:
        y, *pre = super().reference(a, b, bias, residual)
        return (into + y, *pre)


def matmul(
    a: Value,
    b: Value,
    transpose_a: bool = False,
    transpose_b: bool = False,
    dtype: str | None = None,
) -> Value:
    """A · B with either transposed; see MatMul for shapes. dtype: of the result, a's when None."""
    return a.graph.apply(MatMul(transpose_a, transpose_b, dtype=dtype), a, b)[0]


def linear(
    x: Value,
    weight: Value,
    bias: Value | None = None,
    activation: str | None = None,
    residual: Value | None = None,
    transpose_weight: bool = False,
) -> Value:
    """f(x · W + bias) + residual: x [..., K], W [K, N] ([N, K] with transpose_weight), bias [N].

    The three steps are nodes of their own; the fusion pass joins them after differentiation.
    """
    inputs = (x, weight) if bias is None else (x, weight, bias)
    y = x.graph.apply(MatMul(transpose_b=transpose_weight), *inputs, name="linear")[0]
    if activation is not None:
        y = activate(y, activation)
    return y if residual is None else add(y, residual)
