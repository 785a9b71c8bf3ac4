"""Layer normalisation, and root mean square normalisation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar

import numpy as np

from treadle.errors import DTypeError, GraphError
from treadle.graph.op import (
    BLOCK,
    Arg,
    Cost,
    Gpu,
    Grid,
    Launch,
    Node,
    Op,
    Target,
    Temp,
    blocks,
    expect,
    expect_float,
    expect_same,
    row_grid,
    suffixed,
    touched,
)
from treadle.graph.value import Spec, Value, wide
from treadle.ops.elementwise import SUM_COLUMNS

# Rows whose weight gradients one task adds up; the partial sums combine in a fixed tree.
WEIGHT_ROWS = 32
# On a GPU a work-group adds up so many rows of so many vectors of columns; more rows where there
# would be more partial sums than these.
GROUP_ROWS, COLUMN_LANES, MOST_PARTS = 128, 16, 256


def _expect_parameter(op: str, what: str, parameter: Spec | None, x: Spec) -> None:
    if parameter is None:
        return
    c = x.shape[-1]
    expect(parameter.shape == (c,), op, f"{what} [{c}]", list(parameter.shape))
    if parameter.dtype not in (x.dtype, wide(x.dtype)):
        raise DTypeError(
            f"[{op}] expected {what} of {x.dtype} or {wide(x.dtype)}, got {parameter}; cast first"
        )


def _expect_statistics(op: str, x: Spec, *statistics: Spec) -> None:
    for s in statistics:
        expect_same(op, Spec(x.shape[:-1], wide(x.dtype)), s)


def _rows(x: Value) -> list[int]:
    """Rows, channels, and the rows of one task."""
    return [prod(x.shape[:-1]), x.shape[-1], max(1, BLOCK // x.shape[-1])]


def _by_rows(
    target: Target,
    kernel: str,
    x: Value,
    weight: Value,
    args: Sequence[Arg],
    writes: int,
    nums: Sequence[float] = (),
) -> list[Launch]:
    """The launch of a kernel that computes each row of x by itself."""
    rows, channels, height = _rows(x)
    if isinstance(target, Gpu):
        grid = row_grid(target, "norm", [x.dtype, weight.dtype], rows, channels)
        return [Launch(kernel, args, writes, [rows, channels], nums, grids=[grid])]
    dims = [rows, channels, height, weight.dtype == "float32"]
    kernel, tasks = suffixed(kernel, x.dtype), blocks(rows, height)
    return [Launch(kernel, args, writes, dims, nums, tasks=tasks)]


@dataclass(frozen=True)
class LayerNorm(Op):
    """y = (x - mean) · rstd · weight + bias over the last dimension; rstd = 1 / √(variance + eps).

    x [..., C]; weight [C]; bias [C] or absent, both of x's dtype or float32. Outputs: y like x,
    and for backward mean [...] and rstd [...], float32 where x is bfloat16. The variance is the
    mean of (x - mean)², from a second pass over the row. Ba, Kiros & Hinton 2016, "Layer
    Normalization".
    """

    eps: float = 1e-5
    name: ClassVar[str] = "layernorm"
    inplace: ClassVar[dict[int, tuple[int, ...]]] = {0: (0,)}
    optional: ClassVar[tuple[int, ...]] = (1, 2)

    def infer(self, x: Spec, weight: Spec, bias: Spec | None = None) -> Sequence[Spec]:
        expect_float("layernorm", x, weight, bias)
        expect(len(x.shape) > 0 and x.size > 0, "layernorm", "x [..., C]", list(x.shape))
        _expect_parameter("layernorm", "weight", weight, x)
        _expect_parameter("layernorm", "bias", bias, x)
        expect_same("layernorm", weight, bias)
        statistics = Spec(x.shape[:-1], wide(x.dtype))
        return (x, statistics, statistics)

    def reference(
        self, x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None
    ) -> Sequence[np.ndarray]:
        mean = x.mean(axis=-1)
        centred = x - mean[..., None]
        rstd = 1.0 / np.sqrt((centred * centred).mean(axis=-1) + x.dtype.type(self.eps))
        y = centred * rstd[..., None] * weight
        return (y if bias is None else y + bias, mean, rstd)

    def grad(self, node, dys, needs):  # type: ignore[no-untyped-def]
        x, weight = node.inputs[:2]
        dy, *others = dys
        if any(d is not None for d in others):
            raise GraphError("[layernorm] mean and rstd have no gradient; use y only")
        _, mean, rstd = node.outputs
        dx = dweight = dbias = None
        if any(needs[1:]):
            op = LayerNormWeightGrad()
            dweight, dbias = x.graph.apply(op, dy, x, mean, rstd, name="layernorm_weight")
        if needs[0]:
            dx = x.graph.apply(LayerNormGrad(), dy, x, weight, mean, rstd, name="layernorm")[0]
        return (dx, dweight, dbias)[: len(node.inputs)]

    def cost(self, node: Node) -> Cost:
        return Cost(8 * node.outputs[0].size, touched(node))

    def lower(self, target: Target, node: Node) -> Sequence[Launch]:
        x, weight, bias = (*node.inputs, None)[:3]
        assert x is not None and weight is not None
        args = [node.outputs[0], node.out(1), node.out(2), x, weight, bias]
        return _by_rows(target, "layernorm_forward", x, weight, args, 3, [self.eps])


@dataclass(frozen=True)
class LayerNormGrad(Op):
    """dx = rstd · (g - mean(g) - x̂ · mean(g x̂)) (+ into), g = dy · weight, x̂ = (x - mean) · rstd.

    dy, x [..., C]; weight [C]; mean, rstd [...]; the means run over C. into [..., C] is set by the
    fusion pass: the gradient that reaches x past the norm.
    """

    name: ClassVar[str] = "layernorm_grad"
    inplace: ClassVar[dict[int, tuple[int, ...]]] = {0: (5, 0, 1)}

    def infer(
        self,
        dy: Spec,
        x: Spec,
        weight: Spec,
        mean: Spec,
        rstd: Spec,
        into: Spec | None = None,
    ) -> Sequence[Spec]:
        expect_same(self.name, x, dy, into)
        _expect_parameter("layernorm", "weight", weight, x)
        _expect_statistics(self.name, x, mean, rstd)
        return (x,)

    def reference(
        self,
        dy: np.ndarray,
        x: np.ndarray,
        weight: np.ndarray,
        mean: np.ndarray,
        rstd: np.ndarray,
        into: np.ndarray | None = None,
    ) -> Sequence[np.ndarray]:
        xhat = (x - mean[..., None]) * rstd[..., None]
        g = dy * weight
        g_mean = g.mean(axis=-1, keepdims=True)
        gx_mean = (g * xhat).mean(axis=-1, keepdims=True)
        dx = rstd[..., None] * (g - g_mean - xhat * gx_mean)
        return (dx if into is None else into + dx,)

    def cost(self, node: Node) -> Cost:
        return Cost(11 * node.outputs[0].size, touched(node))

    def lower(self, target: Target, node: Node) -> Sequence[Launch]:
        (dx,), weight = node.outputs, node.inputs[2]
        assert weight is not None
        args = [dx, *(*node.inputs, None)[:6]]
        return _by_rows(target, "layernorm_backward", dx, weight, args, 1)


@dataclass(frozen=True)
class LayerNormWeightGrad(Op):
    """dweight = Σ dy · (x - mean) · rstd and dbias = Σ dy, over all rows.

    dy, x [..., C]; mean, rstd [...]. Outputs [C], float32 where x is bfloat16. Blocks of
    WEIGHT_ROWS rows are added row by row, the blocks in a binary tree.
    """

    name: ClassVar[str] = "layernorm_weight_grad"
    optional: ClassVar[tuple[int, ...]] = (1,)

    def infer(self, dy: Spec, x: Spec, mean: Spec, rstd: Spec) -> Sequence[Spec]:
        expect_same(self.name, x, dy)
        _expect_statistics(self.name, x, mean, rstd)
        out = Spec(x.shape[-1:], wide(x.dtype))
        return (out, out)

    def reference(
        self, dy: np.ndarray, x: np.ndarray, mean: np.ndarray, rstd: np.ndarray
    ) -> Sequence[np.ndarray]:
        xhat = (x - mean[..., None]) * rstd[..., None]
        c = x.shape[-1]
        return ((dy * xhat).reshape(-1, c).sum(axis=0), dy.reshape(-1, c).sum(axis=0))

    def cost(self, node: Node) -> Cost:
        x = node.inputs[1]
        assert x is not None
        return Cost(5 * x.size, touched(node))

    def lower(self, target: Target, node: Node) -> Sequence[Launch]:
        return _weight_launches(target, node, *node.inputs)


def _weight_launches(
    target: Target,
    node: Node,
    dy: Value | None,
    x: Value | None,
    mean: Value | None,
    rstd: Value | None,
) -> list[Launch]:
    """Sums over the rows, by block and then of the blocks, into the outputs of a node."""
    assert x is not None
    rows, channels, _ = _rows(x)
    if isinstance(target, Gpu):
        return _weight_grids(target, node, [dy, x, mean, rstd], rows, channels)
    parts = blocks(rows, WEIGHT_ROWS)
    outputs = [y for i in range(len(node.outputs)) if (y := node.out(i)) is not None]
    partials = [Temp(parts * channels * 4, "partial") for _ in outputs]
    launches = [
        Launch(
            suffixed("norm_weight_backward", x.dtype),
            [partials[0], partials[1] if len(partials) > 1 else None, dy, x, mean, rstd],
            2,
            [rows, channels, WEIGHT_ROWS],
            tasks=parts,
        )
    ]
    for y, partial in zip(outputs, partials, strict=True):
        combine = suffixed("sum_leading_combine", y.dtype)
        dims = [rows, channels, parts]
        tasks = blocks(channels, SUM_COLUMNS)
        launches.append(Launch(combine, [y, partial], 1, dims, tasks=tasks))
    return launches


def _weight_grids(
    target: Gpu, node: Node, inputs: Sequence[Arg], rows: int, channels: int
) -> list[Launch]:
    """_weight_launches for a GPU: a work-group adds up `height` rows of COLUMN_LANES vectors."""
    x = node.inputs[1]
    assert x is not None
    grid = row_grid(target, "norm", [x.dtype, "float32"], rows, channels)
    sizes = dict(grid.defines) | {"LANES": min(COLUMN_LANES, grid.items)}
    across = blocks(channels, int(sizes["VEC"]) * int(sizes["LANES"]))
    height = GROUP_ROWS * blocks(rows, GROUP_ROWS * MOST_PARTS)
    parts = blocks(rows, height)
    outputs = [node.out(0), node.out(1) if len(node.outputs) > 1 else None]
    partials = [y and Temp(parts * channels * 4, "partial") for y in outputs]
    first = Grid("norm", (across, parts), grid.items, tuple(sizes.items()))
    args = [*partials, *inputs]
    if parts == 1:
        args = [*outputs, *inputs]
    dims = [rows, channels, height]
    launches = [Launch("norm_weight_backward", args, 2, dims, grids=[first])]
    if parts > 1:
        each = (across, 1, 1 if outputs[1] is None else 2)
        second = Grid("norm", each, grid.items, first.defines)
        args = [*outputs, *partials]
        dims = [parts, channels]
        launches.append(Launch("norm_weight_combine", args, 2, dims, grids=[second]))
    return launches


# ---------------------------------------------------------------- root mean square


@dataclass(frozen=True)
class RMSNorm(Op):
    """y = x · rstd · (offset + weight) (+ residual); rstd = 1 / √(mean(x²) + eps), the mean running
    over the last dimension.

    x [..., C]; weight [C] of x's dtype or float32. Outputs: y like x, and for backward rstd [...],
    float32 where x is bfloat16. residual like x is set by the fusion pass. Zhang & Sennrich 2019,
    "Root Mean Square Layer Normalization"; an offset of 1 is Gemma's.
    """

    eps: float = 1e-6
    offset: float = 0.0
    name: ClassVar[str] = "rmsnorm"
    inplace: ClassVar[dict[int, tuple[int, ...]]] = {0: (0, 2)}
    optional: ClassVar[tuple[int, ...]] = (1,)

    def infer(self, x: Spec, weight: Spec, residual: Spec | None = None) -> Sequence[Spec]:
        expect_float(self.name, x, weight)
        expect(len(x.shape) > 0 and x.size > 0, self.name, "x [..., C]", list(x.shape))
        _expect_parameter(self.name, "weight", weight, x)
        expect_same(self.name, x, residual)
        return (x, Spec(x.shape[:-1], wide(x.dtype)))

    def reference(
        self, x: np.ndarray, weight: np.ndarray, residual: np.ndarray | None = None
    ) -> Sequence[np.ndarray]:
        rstd = 1.0 / np.sqrt((x * x).mean(axis=-1) + x.dtype.type(self.eps))
        y = x * rstd[..., None] * (weight + weight.dtype.type(self.offset))
        return (y if residual is None else residual + y, rstd)

    def grad(self, node, dys, needs):  # type: ignore[no-untyped-def]
        x, weight, *residual = node.inputs
        dy, drstd = dys
        if drstd is not None:
            raise GraphError("[rmsnorm] rstd has no gradient; use y only")
        if residual:
            return super().grad(node, dys, needs)
        rstd, dx, dweight = node.outputs[1], None, None
        if needs[1]:
            dweight = x.graph.apply(RMSNormWeightGrad(), dy, x, rstd, name="rmsnorm_weight")[0]
        if needs[0]:
            op = RMSNormGrad(self.offset)
            dx = x.graph.apply(op, dy, x, weight, rstd, name="rmsnorm")[0]
        return dx, dweight

    def cost(self, node: Node) -> Cost:
        return Cost(5 * node.outputs[0].size, touched(node))

    def lower(self, target: Target, node: Node) -> Sequence[Launch]:
        x, weight, residual = (*node.inputs, None)[:3]
        assert x is not None and weight is not None
        args = [node.outputs[0], node.out(1), x, weight, residual]
        nums = [self.eps, self.offset]
        return _by_rows(target, "rmsnorm_forward", x, weight, args, 2, nums)


@dataclass(frozen=True)
class RMSNormGrad(Op):
    """dx = rstd · (g - x̂ · mean(g x̂)) (+ into), g = dy · (offset + weight), x̂ = x · rstd.

    dy, x [..., C]; weight [C]; rstd [...]; the mean runs over C. into [..., C] is set by the fusion
    pass: the gradient that reaches x past the norm.
    """

    offset: float = 0.0
    name: ClassVar[str] = "rmsnorm_grad"
    inplace: ClassVar[dict[int, tuple[int, ...]]] = {0: (4, 0, 1)}

    def infer(
        self, dy: Spec, x: Spec, weight: Spec, rstd: Spec, into: Spec | None = None
    ) -> Sequence[Spec]:
        expect_same(self.name, x, dy, into)
        _expect_parameter(self.name, "weight", weight, x)
        _expect_statistics(self.name, x, rstd)
        return (x,)

    def reference(
        self,
        dy: np.ndarray,
        x: np.ndarray,
        weight: np.ndarray,
        rstd: np.ndarray,
        into: np.ndarray | None = None,
    ) -> Sequence[np.ndarray]:
        xhat = x * rstd[..., None]
        g = dy * (weight + weight.dtype.type(self.offset))
        dx = rstd[..., None] * (g - xhat * (g * xhat).mean(axis=-1, keepdims=True))
        return (dx if into is None else into + dx,)

    def cost(self, node: Node) -> Cost:
        return Cost(9 * node.outputs[0].size, touched(node))

    def lower(self, target: Target, node: Node) -> Sequence[Launch]:
        (dx,), weight = node.outputs, node.inputs[2]
        assert weight is not None
        args = [dx, *(*node.inputs, None)[:5]]
        return _by_rows(target, "rmsnorm_backward", dx, weight, args, 1, [self.offset])


@dataclass(frozen=True)
class RMSNormWeightGrad(Op):
    """dweight = Σ dy · x · rstd over all rows: dy, x [..., C], rstd [...], dweight [C], float32
    where x is bfloat16. The order of addition is LayerNormWeightGrad's."""

    name: ClassVar[str] = "rmsnorm_weight_grad"

    def infer(self, dy: Spec, x: Spec, rstd: Spec) -> Sequence[Spec]:
        expect_same(self.name, x, dy)
        _expect_statistics(self.name, x, rstd)
        return (Spec(x.shape[-1:], wide(x.dtype)),)

    def reference(self, dy: np.ndarray, x: np.ndarray, rstd: np.ndarray) -> Sequence[np.ndarray]:
        return ((dy * (x * rstd[..., None])).reshape(-1, x.shape[-1]).sum(axis=0),)

    def cost(self, node: Node) -> Cost:
        x = node.inputs[1]
        assert x is not None
        return Cost(3 * x.size, touched(node))

    def lower(self, target: Target, node: Node) -> Sequence[Launch]:
        dy, x, rstd = node.inputs
        return _weight_launches(target, node, dy, x, None, rstd)


# ---------------------------------------------------------------- functions


def layernorm(x: Value, weight: Value, bias: Value | None = None, eps: float = 1e-5) -> Value:
    """x [..., C] normalised over C, times weight [C], plus bias [C] where given; like x.

    ShapeError or DTypeError where weight or bias do not fit. See LayerNorm.
    """
    inputs = (x, weight) if bias is None else (x, weight, bias)
    return x.graph.apply(LayerNorm(float(eps)), *inputs)[0]


def rmsnorm(x: Value, weight: Value, eps: float = 1e-6, offset: float = 0.0) -> Value:
    """x [..., C] divided by its root mean square over C, times offset + weight [C]; like x.

    ShapeError or DTypeError where the weight does not fit. See RMSNorm.
    """
    return x.graph.apply(RMSNorm(float(eps), float(offset)), x, weight)[0]
