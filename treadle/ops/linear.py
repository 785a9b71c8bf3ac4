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
from treadle.ops.elementwise import activation_reference, add, sum_leading
from treadle.ops.tiles import matmul_tiles

# As linear.c and kernels/activation.h number them.
ACCUMULATE, OUTPUT_FLOAT32, GATED = 1, 2, 4
ACTIVATION_CODES = {None: 0, "gelu": 1, "gelu_erf": 2, "relu": 3, "silu": 4}


@dataclass(frozen=True)
class MatMul(Op):
    """y = f(A · B + bias) + residual (+ into), pre = A · B + bias; or, with `gated`, f of another
    product times this one: y = f(gate) · (A · B + bias), the gate in the place of the residual.

    a: [..., K], or [..., M] with transpose_a: its leading dimensions are then the sum's
    (aᵀ · b over all rows, a weight's gradient).  b: [K, N], or [N, K] with transpose_b; with
    transpose_a its shape is [..., N].
    bias: [N], float32 beside bfloat16.  residual: y's shape.  into: a buffer of y's shape that y
    is added to, in place.
    Outputs: y [..., N] ([M, N] with transpose_a), and pre (before the activation), for backward.
    f is taken of pre in its own dtype, as by an Activation or a Gated after the product.
    The sums are in float32 (float64 where the inputs are). f, gate, residual and into are set by
    the fusion pass, after differentiation; only the bare product and the bias have a gradient here.
    """

    transpose_a: bool = False
    transpose_b: bool = False
    activation: str | None = None
    dtype: str | None = None
    gated: bool = False
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
        return Cost(2 * prod(self.sizes(a.spec, b.spec)), touched(node))

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
    bias: Arg = None,
    activation: str | None = None,
    pre: Arg = None,
    residual: Arg = None,
    accumulate: bool = False,
    gated: bool = False,
    packed: Temp | None = None,
) -> list[Launch]:
    """The launches of one product: y = f(A · B + bias) + residual, added to y with `accumulate`, or
    f(residual) · (A · B + bias) with `gated`.

    sizes: M, N, K.  dtype: of a, b and pre.  a_stride: elements from one row of a, as it lies in
    memory, to the next, where that is more than its row.  packed: memory for panels that products
    share which run one after another; it grows to what this one needs.
    """
    if isinstance(target, Gpu) and target.vendor:
        return vendor.matmul(
            *(target, y, a, b, sizes, dtype, y_dtype),
            transpose_a=transpose_a,
            transpose_b=transpose_b,
            a_stride=a_stride,
            bias=bias,
            activation=activation,
            pre=pre,
            residual=residual,
            accumulate=accumulate,
            gated=gated,
        )
    m, n, k = sizes
    a_strides = (1, a_stride or m) if transpose_a else (a_stride or k, 1)
    b_strides = (1, k) if transpose_b else (n, 1)
    if n == 1 and bias is None:  # A as B, whose columns it then has, because few rows stream B
        a, b, m, n = b, a, 1, m
        a_strides, b_strides = (k, 1), (a_strides[1], a_strides[0])
    flags = ACCUMULATE * accumulate + OUTPUT_FLOAT32 * (y_dtype == "float32") + GATED * gated
    if isinstance(target, Gpu):
        kind, panels = ACTIVATION_CODES[activation], packed or Temp(0, "packed")
        return _gpu_launches(
            *(target, Epilogue(y, pre, bias, residual, dtype, y_dtype, kind, flags)),
            *(a, b, (m, n, k), a_strides, b_strides, panels),
        )
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

    @property
    def defines(self) -> tuple[tuple[str, str | int], ...]:
        has = int(bool(self.kind))
        return (("T", SUFFIX[self.dtype]), ("U", SUFFIX[self.y_dtype]), ("ACT", has))


def _gpu_launches(
    target: Gpu,
    end: Epilogue,
    a: Arg,
    b: Arg,
    sizes: tuple[int, int, int],
    a_strides: tuple[int, int],
    b_strides: tuple[int, int],
    memory: Temp,
) -> list[Launch]:
    """The launches of one product on a GPU: sums, in parts of K where there are several, and then
    these together. memory: for what lies between launches; it grows to what this product needs."""
    m, n, k = sizes
    parts, depth = gpu_tiles.parts_of_k(target, m, n, k)
    used = 0

    def part_of_memory(nbytes: int) -> Slice:
        nonlocal used
        found = Slice(memory, used, nbytes)
        used = align(used + nbytes, GPU_ALIGN)
        memory.nbytes = max(memory.nbytes, used)
        return found

    launches, sums = [], end
    partial: Arg = None
    if parts > 1:
        partial = part_of_memory(parts * m * n * 4)
        sums = Epilogue(partial, None, None, None, end.dtype, "float32")
    if target.vector > 1:
        cut = gpu_tiles.panels(target, m, n)
        operands = ((a, m, a_strides, cut.rows), (b, n, b_strides[::-1], cut.columns))
        packed = [part_of_memory(align(lines, width) * k * 4) for _, lines, _, width in operands]
        for panels, (source, lines, strides, width) in zip(packed, operands, strict=True):
            groups = (blocks(lines, width), blocks(k, gpu_tiles.PACK_BLOCK))
            defines = (*end.defines, ("VL", cut.vector), ("WIDTH", width))
            grid = Grid("linear", groups, 1, defines)
            dims = [lines, k, *strides]
            launches.append(Launch("matmul_pack", [panels, source], 1, dims, grids=[grid]))
        groups = (blocks(n, cut.columns), blocks(m, cut.rows * cut.strip), parts)
        launches.append(
            Launch(
                "matmul_panels",
                [sums.y, sums.pre, *packed, sums.bias, sums.residual],
                2,
                [m, n, k, cut.strip, depth, sums.kind, sums.flags],
                grids=[
                    Grid(
                        *("linear", groups, 1),
                        (*sums.defines, ("VL", cut.vector), ("WIDTH", 1), ("ROWS", cut.rows)),
                    )
                ],
            )
        )
    else:
        launches.append(_tiled(target, sums, a, b, sizes, a_strides, b_strides, parts, depth))
    if parts == 1:
        return launches
    items = target.items(COMBINE_ITEMS)
    groups = (blocks(m * n, items * COMBINE_EACH),)
    combine = Launch(
        "matmul_combine",
        [end.y, end.pre, partial, end.bias, end.residual],
        2,
        [m * n, n, parts, end.kind, end.flags],
        grids=[Grid("linear", groups, items, (*end.defines, ("COMBINE", 1)))],
    )
    return [*launches, combine]


def _tiled(
    target: Gpu,
    end: Epilogue,
    a: Arg,
    b: Arg,
    sizes: tuple[int, int, int],
    a_strides: tuple[int, int],
    b_strides: tuple[int, int],
    parts: int,
    depth: int,
) -> Launch:
    """The launch that computes tiles of y, or of its sums over each part of K."""
    m, n, k = sizes
    transpose_a, transpose_b = a_strides[1] != 1, b_strides[1] != 1
    lda, ldb = max(a_strides), max(b_strides)
    defines = (
        *end.defines,
        ("TA", int(transpose_a)),
        ("TB", int(transpose_b)),
        ("VA", int(lda % VECTOR == 0 and (m if transpose_a else k) % VECTOR == 0)),
        ("VB", int(ldb % VECTOR == 0 and (k if transpose_b else n) % VECTOR == 0)),
        ("VC", int(n % VECTOR == 0)),
    )
    return Launch(
        "matmul",
        [end.y, end.pre, a, b, end.bias, end.residual],
        2,
        [m, n, k, lda, ldb, depth, end.kind, end.flags],
        grids=[
            Grid("linear", (tile.groups(m, n), parts), tile.items, (*defines, *tile.defines()))
            for tile in gpu_tiles.tiles(target, m, n, parts)
        ],
    )


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
