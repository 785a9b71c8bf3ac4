"""Elementwise ops, activations, and the sum over leading dimensions that undoes broadcasting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar

import numpy as np

from treadle.graph.op import (
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
    pointwise,
    suffixed,
    touched,
)
from treadle.graph.value import SUFFIX, Shape, Spec, Value

# ---------------------------------------------------------------- add, mul


def _trailing(op: str, a: Spec, b: Spec) -> None:
    """b has a's shape, or the last dimensions of it."""
    expect_float(op, a, b)
    expect_same(op, Spec((), a.dtype), Spec((), b.dtype))
    n = len(b.shape)
    expect(
        b.shape == a.shape[len(a.shape) - n :] and n <= len(a.shape),
        op,
        f"a second shape that ends {list(a.shape)}",
        list(b.shape),
        "only leading dimensions broadcast",
    )


@dataclass(frozen=True)
class Add(Op):
    """y = a + b; b has a's shape or its last dimensions, and is repeated over the leading ones."""

    name: ClassVar[str] = "add"
    inplace: ClassVar[dict[int, tuple[int, ...]]] = {0: (0, 1)}

    def infer(self, a: Spec, b: Spec) -> Sequence[Spec]:
        _trailing("add", a, b)
        return (a,)

    def reference(self, a: np.ndarray, b: np.ndarray) -> Sequence[np.ndarray]:
        return (a + b,)

    def grad(self, node, dys, needs):  # type: ignore[no-untyped-def]
        (dy,) = dys
        return dy, sum_leading(dy, node.inputs[1].shape) if needs[1] else None

    def lower(self, target: Target, node: Node) -> Sequence[Launch]:
        return _binary(target, "add", node)


@dataclass(frozen=True)
class Mul(Op):
    """y = a · b; b has a's shape or its last dimensions, and is repeated over the leading ones."""

    name: ClassVar[str] = "mul"
    inplace: ClassVar[dict[int, tuple[int, ...]]] = {0: (0, 1)}

    def infer(self, a: Spec, b: Spec) -> Sequence[Spec]:
        _trailing("mul", a, b)
        return (a,)

    def reference(self, a: np.ndarray, b: np.ndarray) -> Sequence[np.ndarray]:
        return (a * b,)

    def grad(self, node, dys, needs):  # type: ignore[no-untyped-def]
        (dy,), (a, b) = dys, node.inputs
        da = mul(dy, b) if needs[0] else None
        return da, sum_leading(mul(dy, a), b.shape) if needs[1] else None

    def lower(self, target: Target, node: Node) -> Sequence[Launch]:
        return _binary(target, "mul", node)


def _binary(target: Target, kernel: str, node: Node) -> Sequence[Launch]:
    (a, b), y = node.inputs, node.outputs[0]
    assert a is not None and b is not None
    return _pointwise(target, kernel, y.dtype, [y, a, b], 1, [y.size, b.size])


def _pointwise(
    target: Target,
    kernel: str,
    dtype: str,
    args: Sequence[Arg],
    writes: int,
    dims: Sequence[int],
    nums: Sequence[float] = (),
) -> list[Launch]:
    return pointwise(target, "elementwise", kernel, [dtype], args, writes, dims, nums)


# ---------------------------------------------------------------- scale, copy


@dataclass(frozen=True)
class Scale(Op):
    """y = alpha · x, alpha a constant."""

    alpha: float = 1.0
    name: ClassVar[str] = "scale"
    inplace: ClassVar[dict[int, tuple[int, ...]]] = {0: (0,)}

    def infer(self, x: Spec) -> Sequence[Spec]:
        expect_float("scale", x)
        return (x,)

    def reference(self, x: np.ndarray) -> Sequence[np.ndarray]:
        return (x * self.alpha,)

    def grad(self, node, dys, needs):  # type: ignore[no-untyped-def]
        return (scale(dys[0], self.alpha),)

    def lower(self, target: Target, node: Node) -> Sequence[Launch]:
        x, y = node.inputs[0], node.outputs[0]
        return _pointwise(target, "scale", y.dtype, [y, x], 1, [y.size], [self.alpha])


@dataclass(frozen=True)
class Reshape(Op):
    """y = x with another shape of as many elements: a copy, in place where x is not used again."""

    shape: Shape = ()
    name: ClassVar[str] = "reshape"
    inplace: ClassVar[dict[int, tuple[int, ...]]] = {0: (0,)}

    def infer(self, x: Spec) -> Sequence[Spec]:
        expect_float("reshape", x)
        expect(
            prod(self.shape) == x.size,
            "reshape",
            f"a shape of {x.size} elements for {list(x.shape)}",
            list(self.shape),
        )
        return (Spec(self.shape, x.dtype),)

    def reference(self, x: np.ndarray) -> Sequence[np.ndarray]:
        return (x.reshape(self.shape),)

    def grad(self, node, dys, needs):  # type: ignore[no-untyped-def]
        return (reshape(dys[0], node.inputs[0].shape),)

    def cost(self, node: Node) -> Cost:
        return Cost(0, touched(node))

    def lower(self, target: Target, node: Node) -> Sequence[Launch]:
        x, y = node.inputs[0], node.outputs[0]
        return _pointwise(target, "copy", y.dtype, [y, x], 1, [y.size])


# ---------------------------------------------------------------- activations

ACTIVATIONS = ("gelu", "gelu_erf", "relu", "silu")
_GELU_SCALE = (2.0 / np.pi) ** 0.5
_GELU_CUBIC = 0.044715


def _erf(x: np.ndarray) -> np.ndarray:
    from math import erf

    return np.vectorize(erf, otypes=[x.dtype])(x) if x.size else x.copy()


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-x))


def activation_reference(kind: str, x: np.ndarray) -> np.ndarray:
    """f(x) of an activation, in x's dtype. See Activation."""
    if kind == "gelu":
        return 0.5 * x * (1.0 + np.tanh(_GELU_SCALE * (x + _GELU_CUBIC * x * x * x)))
    if kind == "gelu_erf":
        return 0.5 * x * (1.0 + _erf(x / 2**0.5))
    if kind == "relu":
        return np.where(x > 0, x, x * 0)
    return x * _sigmoid(x)


def activation_slope(kind: str, x: np.ndarray) -> np.ndarray:
    """f'(x) of an activation, in x's dtype."""
    if kind == "gelu":
        t = np.tanh(_GELU_SCALE * (x + _GELU_CUBIC * x * x * x))
        return 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * _GELU_SCALE * (
            1.0 + 3.0 * _GELU_CUBIC * x * x
        )
    if kind == "gelu_erf":
        density = np.exp(-0.5 * x * x) / (2.0 * np.pi) ** 0.5
        return 0.5 * (1.0 + _erf(x / 2**0.5)) + x * density
    if kind == "relu":
        return np.where(x > 0, 1.0, 0.0) + x * 0
    s = _sigmoid(x)
    return s * (1.0 + x * (1.0 - s))


@dataclass(frozen=True)
class Activation(Op):
    """y = f(x), f one of
    gelu      0.5 x (1 + tanh(√(2/π) (x + 0.044715 x³)))   Hendrycks & Gimpel 2016, as in GPT-2
    gelu_erf  0.5 x (1 + erf(x / √2))                      the exact form
    relu      max(x, 0)
    silu      x / (1 + e⁻ˣ)                                Elfwing et al. 2018
    """

    kind: str = "gelu"
    name: ClassVar[str] = "activation"
    inplace: ClassVar[dict[int, tuple[int, ...]]] = {0: (0,)}

    def infer(self, x: Spec) -> Sequence[Spec]:
        expect(self.kind in ACTIVATIONS, "activation", f"one of {ACTIVATIONS}", self.kind)
        expect_float(self.kind, x)
        return (x,)

    def reference(self, x: np.ndarray) -> Sequence[np.ndarray]:
        return (activation_reference(self.kind, x),)

    def grad(self, node, dys, needs):  # type: ignore[no-untyped-def]
        x, (dy,) = node.inputs[0], dys
        return x.graph.apply(ActivationGrad(self.kind), dy, x, name=self.kind)

    def cost(self, node: Node) -> Cost:
        return Cost(8 * node.outputs[0].size, touched(node))

    def lower(self, target: Target, node: Node) -> Sequence[Launch]:
        x, y = node.inputs[0], node.outputs[0]
        return _pointwise(target, f"{self.kind}_forward", y.dtype, [y, x], 1, [y.size])


@dataclass(frozen=True)
class ActivationGrad(Op):
    """dx = dy · f'(x) of an Activation."""

    kind: str = "gelu"
    name: ClassVar[str] = "activation_grad"
    inplace: ClassVar[dict[int, tuple[int, ...]]] = {0: (0, 1)}

    def infer(self, dy: Spec, x: Spec) -> Sequence[Spec]:
        expect_same(self.kind, dy, x)
        return (x,)

    def reference(self, dy: np.ndarray, x: np.ndarray) -> Sequence[np.ndarray]:
        return (dy * activation_slope(self.kind, x),)

    def cost(self, node: Node) -> Cost:
        return Cost(14 * node.outputs[0].size, touched(node))

    def lower(self, target: Target, node: Node) -> Sequence[Launch]:
        (dy, x), dx = node.inputs, node.outputs[0]
        return _pointwise(target, f"{self.kind}_backward", dx.dtype, [dx, dy, x], 1, [dx.size])


def slope_launches(
    target: Target, kind: str, dtype: str, dx: Arg, x: Arg, size: int
) -> list[Launch]:
    """The launches of dx = dx · f'(x), in place."""
    return _pointwise(target, f"{kind}_backward", dtype, [dx, dx, x], 1, [size])


# ---------------------------------------------------------------- gated activations


@dataclass(frozen=True)
class Gated(Op):
    """y = f(gate) · x, f an activation; gate, x and y of one shape and dtype.

    With silu the middle of SwiGLU, with gelu that of GeGLU: Shazeer 2020, "GLU Variants Improve
    Transformer".
    """

    kind: str = "silu"
    name: ClassVar[str] = "gated"
    inplace: ClassVar[dict[int, tuple[int, ...]]] = {0: (0, 1)}

    def infer(self, gate: Spec, x: Spec) -> Sequence[Spec]:
        expect(self.kind in ACTIVATIONS, self.name, f"one of {ACTIVATIONS}", self.kind)
        expect_float(self.name, gate, x)
        expect_same(self.name, gate, x)
        return (x,)

    def reference(self, gate: np.ndarray, x: np.ndarray) -> Sequence[np.ndarray]:
        return (activation_reference(self.kind, gate) * x,)

    def grad(self, node, dys, needs):  # type: ignore[no-untyped-def]
        (gate, x), (dy,) = node.inputs, dys
        return x.graph.apply(GatedGrad(self.kind), dy, gate, x, name=f"gated_{self.kind}")

    def cost(self, node: Node) -> Cost:
        return Cost(9 * node.outputs[0].size, touched(node))

    def lower(self, target: Target, node: Node) -> Sequence[Launch]:
        (gate, x), y = node.inputs, node.outputs[0]
        kernel = f"gated_{self.kind}_forward"
        return _pointwise(target, kernel, y.dtype, [y, gate, x], 1, [y.size])


@dataclass(frozen=True)
class GatedGrad(Op):
    """dgate = dy · x · f'(gate) and dx = dy · f(gate) of a Gated."""

    kind: str = "silu"
    name: ClassVar[str] = "gated_grad"
    inplace: ClassVar[dict[int, tuple[int, ...]]] = {0: (1, 0, 2), 1: (2, 0, 1)}

    def infer(self, dy: Spec, gate: Spec, x: Spec) -> Sequence[Spec]:
        expect_same(self.name, x, dy, gate)
        return (gate, x)

    def reference(self, dy: np.ndarray, gate: np.ndarray, x: np.ndarray) -> Sequence[np.ndarray]:
        slope, value = activation_slope(self.kind, gate), activation_reference(self.kind, gate)
        return (dy * x * slope, dy * value)

    def cost(self, node: Node) -> Cost:
        return Cost(17 * node.outputs[0].size, touched(node))

    def lower(self, target: Target, node: Node) -> Sequence[Launch]:
        dgate, dx = node.outputs
        kernel, args = f"gated_{self.kind}_backward", [dgate, dx, *node.inputs]
        return _pointwise(target, kernel, dx.dtype, args, 2, [dx.size])


# ---------------------------------------------------------------- soft capping


@dataclass(frozen=True)
class Softcap(Op):
    """y = cap · tanh(x / cap), which lies between -cap and cap; y like x.

    Gemma Team 2024, "Gemma 2", section 2.
    """

    cap: float = 1.0
    name: ClassVar[str] = "softcap"
    inplace: ClassVar[dict[int, tuple[int, ...]]] = {0: (0,)}

    def infer(self, x: Spec) -> Sequence[Spec]:
        expect(self.cap > 0, self.name, "cap > 0", self.cap)
        expect_float(self.name, x)
        return (x,)

    def reference(self, x: np.ndarray) -> Sequence[np.ndarray]:
        return (self.cap * np.tanh(x / self.cap),)

    def grad(self, node, dys, needs):  # type: ignore[no-untyped-def]
        y = node.outputs[0]
        return y.graph.apply(SoftcapGrad(self.cap), dys[0], y, name="softcap")

    def cost(self, node: Node) -> Cost:
        return Cost(10 * node.outputs[0].size, touched(node))

    def lower(self, target: Target, node: Node) -> Sequence[Launch]:
        x, y = node.inputs[0], node.outputs[0]
        return _pointwise(target, "softcap_forward", y.dtype, [y, x], 1, [y.size], [self.cap])


@dataclass(frozen=True)
class SoftcapGrad(Op):
    """dx = dy · (1 - (y / cap)²), y being the output of Softcap; all of one shape and dtype."""

    cap: float = 1.0
    name: ClassVar[str] = "softcap_grad"
    inplace: ClassVar[dict[int, tuple[int, ...]]] = {0: (0, 1)}

    def infer(self, dy: Spec, y: Spec) -> Sequence[Spec]:
        expect_same(self.name, dy, y)
        return (y,)

    def reference(self, dy: np.ndarray, y: np.ndarray) -> Sequence[np.ndarray]:
        return (dy * (1.0 - np.square(y / self.cap)),)

    def cost(self, node: Node) -> Cost:
        return Cost(4 * node.outputs[0].size, touched(node))

    def lower(self, target: Target, node: Node) -> Sequence[Launch]:
        (dy, y), dx = node.inputs, node.outputs[0]
        args = [dx, dy, y]
        return _pointwise(target, "softcap_backward", dx.dtype, args, 1, [dx.size], [self.cap])


# ---------------------------------------------------------------- sum over leading dimensions

# One task sums SUM_ROWS rows of SUM_COLUMNS columns (more rows where there are fewer columns);
# partial sums combine in a fixed tree.
SUM_ROWS = 64
SUM_COLUMNS = 256


@dataclass(frozen=True)
class SumLeading(Op):
    """y[shape] = Σ x over the leading dimensions; `shape` is how x's shape ends. y is `dtype`,
    accumulated in float32 or wider."""

    shape: Shape = ()
    dtype: str = "float32"
    name: ClassVar[str] = "sum_leading"

    def infer(self, x: Spec) -> Sequence[Spec]:
        expect_float("sum_leading", x)
        n = len(self.shape)
        expect(
            n <= len(x.shape) and x.shape[len(x.shape) - n :] == self.shape,
            "sum_leading",
            f"a shape that ends {list(x.shape)}",
            list(self.shape),
        )
        return (Spec(self.shape, self.dtype),)

    def reference(self, x: np.ndarray) -> Sequence[np.ndarray]:
        return (x.reshape(-1, *self.shape).sum(axis=0),)

    def grad(self, node, dys, needs):  # type: ignore[no-untyped-def]
        x, (dy,) = node.inputs[0], dys
        return (x.graph.apply(Broadcast(x.shape), dy)[0],)

    def cost(self, node: Node) -> Cost:
        x = node.inputs[0]
        assert x is not None
        return Cost(x.size, touched(node))

    def lower(self, target: Target, node: Node) -> Sequence[Launch]:
        x, y = node.inputs[0], node.outputs[0]
        assert x is not None
        columns = max(1, y.size)
        rows = x.size // columns
        if isinstance(target, Gpu):
            return sum_rows(target, y, x, rows, columns)
        parts = blocks(rows, SUM_ROWS * max(1, SUM_COLUMNS // columns))
        across = blocks(columns, SUM_COLUMNS)
        partial = Temp(parts * columns * 4, "partial")
        dims = [rows, columns, parts]
        kernel = suffixed("sum_leading", x.dtype)
        combine = suffixed("sum_leading_combine", y.dtype)
        return [
            Launch(kernel, [partial, x], 1, dims, tasks=parts * across),
            Launch(combine, [y, partial], 1, dims, tasks=across),
        ]


# On a GPU a work-group sums ROWS_OF_GROUP rows of as many columns as it has work-items.
ROWS_OF_GROUP = 128


def sum_rows(target: Gpu, y: Value, x: Value, rows: int, columns: int) -> list[Launch]:
    """The launches of y[columns] = Σ x[rows, columns] over the rows: blocks of them one after
    another, then the blocks, in passes."""
    launches: list[Launch] = []
    source: Arg = x
    dtype = x.dtype
    items = target.items(64)
    while True:
        parts = blocks(rows, ROWS_OF_GROUP)
        into: Arg = y if parts == 1 else Temp(parts * columns * 4, "partial")
        out = y.dtype if parts == 1 else "float32"
        vec = 4 if columns % 4 == 0 and target.vector == 1 else 1
        grid = Grid(
            "elementwise",
            (blocks(columns, items * vec), parts),
            items,
            (("T", SUFFIX[dtype]), ("U", SUFFIX[out]), ("VEC", vec)),
        )
        dims = [rows, columns, ROWS_OF_GROUP]
        launches.append(Launch("sum_rows", [into, source], 1, dims, grids=[grid]))
        if parts == 1:
            return launches
        source, dtype, rows = into, "float32", parts


@dataclass(frozen=True)
class Broadcast(Op):
    """y[shape] = x repeated over leading dimensions: the transpose of SumLeading."""

    shape: Shape = ()
    name: ClassVar[str] = "broadcast"

    def infer(self, x: Spec) -> Sequence[Spec]:
        _trailing("broadcast", Spec(self.shape, x.dtype), x)
        return (Spec(self.shape, x.dtype),)

    def reference(self, x: np.ndarray) -> Sequence[np.ndarray]:
        return (np.broadcast_to(x, self.shape),)

    def grad(self, node, dys, needs):  # type: ignore[no-untyped-def]
        return (sum_leading(dys[0], node.inputs[0].shape),)

    def lower(self, target: Target, node: Node) -> Sequence[Launch]:
        x, y = node.inputs[0], node.outputs[0]
        assert x is not None
        return _pointwise(target, "broadcast", y.dtype, [y, x], 1, [y.size, x.size])


# ---------------------------------------------------------------- functions


def add(a: Value, b: Value) -> Value:
    """a + b; the shape of one ends the other's (leading dimensions broadcast)."""
    if len(b.shape) > len(a.shape):
        a, b = b, a
    return a.graph.apply(Add(), a, b)[0]


def mul(a: Value, b: Value) -> Value:
    """a · b elementwise; the shape of one ends the other's (leading dimensions broadcast)."""
    if len(b.shape) > len(a.shape):
        a, b = b, a
    return a.graph.apply(Mul(), a, b)[0]


def scale(x: Value, alpha: float) -> Value:
    """alpha · x."""
    return x.graph.apply(Scale(float(alpha)), x)[0]


def reshape(x: Value, shape: Shape) -> Value:
    """x with another shape of as many elements."""
    return x.graph.apply(Reshape(tuple(shape)), x)[0]


def copy(x: Value) -> Value:
    """A value of its own with x's content."""
    return reshape(x, x.shape)


def activation(x: Value, kind: str) -> Value:
    """f(x) with f one of `gelu` (tanh form), `gelu_erf`, `relu`, `silu`."""
    return x.graph.apply(Activation(kind), x, name=kind)[0]


def gelu(x: Value) -> Value:
    """Gaussian error linear unit in GPT-2's tanh form."""
    return activation(x, "gelu")


def gelu_erf(x: Value) -> Value:
    """Gaussian error linear unit, exact form."""
    return activation(x, "gelu_erf")


def relu(x: Value) -> Value:
    """max(x, 0); NaN stays NaN."""
    return activation(x, "relu")


def silu(x: Value) -> Value:
    """x · sigmoid(x)."""
    return activation(x, "silu")


def gated(gate: Value, x: Value, kind: str) -> Value:
    """f(gate) · x with f an activation, as `activation` names it: `silu` for SwiGLU, `gelu` for
    GeGLU."""
    return x.graph.apply(Gated(kind), gate, x, name=f"gated_{kind}")[0]


def softcap(x: Value, cap: float) -> Value:
    """cap · tanh(x / cap), elementwise; ShapeError unless cap is above 0. See Softcap."""
    return x.graph.apply(Softcap(float(cap)), x)[0]


def sum_leading(x: Value, shape: Shape, dtype: str | None = None) -> Value:
    """Σ over x's leading dimensions, down to `shape`; x itself when it has that shape."""
    dtype = dtype or x.dtype
    if x.shape == shape and x.dtype == dtype:
        return x
    return x.graph.apply(SumLeading(tuple(shape), dtype), x)[0]
