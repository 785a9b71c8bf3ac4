"""The output layer and its loss in one: softmax cross-entropy of x · weightᵀ.

The logits are the largest matrix of a language model, and nobody needs them whole: rows are
independent of each other. So the ops here take a chunk of rows at a time, from its logits to its
gradients, in one piece of memory; computing the logits anew in the backward pass would cost a
matrix product more. The idea is that of Hsu et al. 2024, "Liger Kernel", section 3.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar

import numpy as np

from treadle.errors import DTypeError, GraphError
from treadle.graph.op import (
    Arg,
    Cost,
    Gpu,
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
    pointwise,
    row_grid,
    suffixed,
    touched,
)
from treadle.graph.value import Spec, Value, itemsize, wide
from treadle.ops.linear import matmul_launches
from treadle.ops.loss import LOGITS_BLOCK, CrossEntropy, CrossEntropyGrad, combine_pairs

# Logits of a chunk are at most so many, but a chunk has at least so many rows: each reads all of
# the weight, and adds to all of its gradient.
CHUNK_LOGITS = 1 << 21
CHUNK_ROWS = 256


def chunks(rows: int, vocabulary: int, most: int | None = None) -> list[tuple[int, int]]:
    """First and last row + 1 of each chunk, all of nearly one size; by the shape alone.

    most: rows of a chunk at most, where that is not left to the shape.
    """
    most = most or max(CHUNK_ROWS, CHUNK_LOGITS // vocabulary)
    n = blocks(rows, most)
    return [(rows * i // n, rows * (i + 1) // n) for i in range(n)]


# ---------------------------------------------------------------- loss


@dataclass(frozen=True)
class LinearCrossEntropyLoss(Op):
    """loss_sum = Σ lse - logits[target] with logits = x · weightᵀ, and the count of the targets.

    x [..., C]; weight [V, C] of x's dtype; targets int32 [...]. Both outputs have shape (), float32
    where x is bfloat16. Targets equal to ignore_index, or outside 0 … V-1, are left out. See
    CrossEntropy. chunk: rows at a time, by the shape when None. softcap: where given, the logits
    are softcap · tanh(x · weightᵀ / softcap) instead. The gradient computes the logits once more;
    where it is wanted, LinearCrossEntropy is cheaper.
    """

    ignore_index: int = -1
    chunk: int | None = None
    softcap: float | None = None
    name: ClassVar[str] = "linear_cross_entropy_loss"

    def infer(self, x: Spec, weight: Spec, targets: Spec) -> Sequence[Spec]:
        _expect_inputs(self.name, x, weight, targets, self.softcap)
        out = Spec((), wide(x.dtype))
        return (out, out)

    def reference(
        self, x: np.ndarray, weight: np.ndarray, targets: np.ndarray
    ) -> Sequence[np.ndarray]:
        logits = _logits(x, weight, self.softcap)
        return CrossEntropy(self.ignore_index).reference(logits, targets)[:2]

    def grad(self, node, dys, needs):  # type: ignore[no-untyped-def]
        if dys[0] is None:
            return None, None, None
        op = LinearCrossEntropy(**self.attributes())
        _, _, *gradients = dys[0].graph.apply(op, *node.inputs, dys[0], name=self.name)
        return (*gradients, None)

    def cost(self, node: Node) -> Cost:
        return _cost(node, products=1)

    def lower(self, target: Target, node: Node) -> Sequence[Launch]:
        if isinstance(target, Gpu):
            return _lower_gpu(target, node, self.ignore_index, self.chunk, self.softcap)
        return _lower(target, node, self.ignore_index, self.chunk, self.softcap)


# ---------------------------------------------------------------- loss and gradients


@dataclass(frozen=True)
class LinearCrossEntropy(Op):
    """LinearCrossEntropyLoss together with its gradients, for a gradient of the loss that is known:

        dlogits = (softmax(logits) - onehot(target)) · dloss, 0 where ignored
                  and times 1 - (logits / softcap)² where they are capped
        dx = dlogits · weight        dweight = dlogitsᵀ · x

    dloss (), of the loss's dtype, read at run time. Outputs: loss_sum (), count (), dx like x, and
    dweight [V, C] in float32 where x is bfloat16, added up chunk by chunk.
    """

    ignore_index: int = -1
    chunk: int | None = None
    softcap: float | None = None
    name: ClassVar[str] = "linear_cross_entropy"
    optional: ClassVar[tuple[int, ...]] = (2, 3)

    @property
    def updates(self) -> dict[int, int]:  # type: ignore[override]
        return {}

    def infer(self, x: Spec, weight: Spec, targets: Spec, dloss: Spec) -> Sequence[Spec]:
        _expect_inputs(self.name, x, weight, targets, self.softcap)
        out = Spec((), wide(x.dtype))
        expect_same(self.name, out, dloss)
        return (out, out, x, Spec(weight.shape, wide(x.dtype)))

    def reference(
        self, x: np.ndarray, weight: np.ndarray, targets: np.ndarray, dloss: np.ndarray
    ) -> Sequence[np.ndarray]:
        logits = _logits(x, weight, self.softcap)
        loss_sum, count, lse = CrossEntropy(self.ignore_index).reference(logits, targets)
        op = CrossEntropyGrad(self.ignore_index)
        (dlogits,) = op.reference(dloss, logits, targets, lse)
        if self.softcap is not None:
            dlogits = dlogits * (1.0 - np.square(logits / self.softcap))
        rows = dlogits.reshape(-1, len(weight))
        return (loss_sum, count, dlogits @ weight, rows.T @ x.reshape(len(rows), -1))

    def grad(self, node, dys, needs):  # type: ignore[no-untyped-def]
        dloss = node.inputs[3]
        if dys[0] is not dloss or any(dy is not None for dy in dys[1:]):
            raise GraphError(
                f"[{self.name}] expected %{dloss.name}, its dloss, as the gradient of its loss and "
                f"no other, got {', '.join('none' if dy is None else f'%{dy.name}' for dy in dys)}"
                "; leave dloss out where it is not known beforehand"
            )
        return (node.outputs[2], node.outputs[3], None, None)[: len(node.inputs)]

    def cost(self, node: Node) -> Cost:
        return _cost(node, products=3)

    def lower(self, target: Target, node: Node) -> Sequence[Launch]:
        if isinstance(target, Gpu):
            return _lower_gpu(target, node, self.ignore_index, self.chunk, self.softcap)
        return _lower(target, node, self.ignore_index, self.chunk, self.softcap)


@dataclass(frozen=True)
class LinearCrossEntropyInto(LinearCrossEntropy):
    """LinearCrossEntropy with into ← into + dweight in place of dweight: a buffer of its shape and
    dtype as the fifth input."""

    name: ClassVar[str] = "linear_cross_entropy_into"

    @property
    def updates(self) -> dict[int, int]:  # type: ignore[override]
        return {3: 4}

    def infer(  # type: ignore[override]
        self, x: Spec, weight: Spec, targets: Spec, dloss: Spec, into: Spec
    ) -> Sequence[Spec]:
        specs = super().infer(x, weight, targets, dloss)
        expect_same(self.name, specs[3], into)
        return specs

    def reference(  # type: ignore[override]
        self,
        x: np.ndarray,
        weight: np.ndarray,
        targets: np.ndarray,
        dloss: np.ndarray,
        into: np.ndarray,
    ) -> Sequence[np.ndarray]:
        *outputs, dweight = super().reference(x, weight, targets, dloss)
        return (*outputs, into + dweight)


# ---------------------------------------------------------------- what they share


def _expect_inputs(op: str, x: Spec, weight: Spec, targets: Spec, softcap: float | None) -> None:
    expect_float(op, x, weight)
    expect(softcap is None or softcap > 0, op, "a softcap above 0", softcap)
    expect(len(x.shape) >= 1 and x.size > 0, op, "x [..., C]", list(x.shape))
    expect(
        len(weight.shape) == 2 and weight.shape[1] == x.shape[-1] and weight.size > 0,
        op,
        f"a weight ['V', {x.shape[-1]}]",
        list(weight.shape),
    )
    if weight.dtype != x.dtype:
        raise DTypeError(f"[{op}] expected a weight of {x.dtype}, got {weight}; cast first")
    if targets.dtype != "int32":
        raise DTypeError(f"[{op}] expected targets of int32, got {targets}")
    rows = x.shape[:-1]
    expect(targets.shape == rows, op, f"targets {list(rows)}", list(targets.shape))


def _logits(x: np.ndarray, weight: np.ndarray, softcap: float | None) -> np.ndarray:
    logits = x @ weight.T
    return logits if softcap is None else softcap * np.tanh(logits / softcap)


def _sizes(node: Node) -> tuple[int, int, int]:
    """Rows, vocabulary V and channels C."""
    x, weight = node.inputs[:2]
    assert x is not None and weight is not None
    return prod(x.shape[:-1]), *weight.shape  # type: ignore[return-value]


def _cost(node: Node, products: int) -> Cost:
    rows, vocabulary, channels = _sizes(node)
    return Cost(rows * vocabulary * (2 * channels * products + 2 + products), touched(node))


def _lower(
    target: Target, node: Node, ignore_index: int, most: int | None, softcap: float | None
) -> list[Launch]:
    """Chunk by chunk: logits in float32, loss and lse, dlogits in their place, dx, and dweight.

    Beside bfloat16 a row of dlogits takes the first half of the memory of its logits.
    """
    x, weight, targets, *_ = node.inputs
    assert x is not None and weight is not None and targets is not None
    loss_sum, count = node.outputs[:2]
    dx, dweight = (node.out(2), node.out(3)) if len(node.outputs) > 2 else (None, None)
    rows, vocabulary, channels = _sizes(node)
    size = itemsize(x.dtype)
    parts = chunks(rows, vocabulary, most)
    tallest = max(end - start for start, end in parts)
    height = max(1, LOGITS_BLOCK // vocabulary)
    partials = [blocks(end - start, height) for start, end in parts]

    logits = Temp(tallest * vocabulary * 4, "logits")
    lse = Temp(tallest * 4, "lse")
    partial, packed = Temp(sum(partials) * 16, "partial"), Temp(0, "packed")
    dlogits_stride = vocabulary * 4 // size

    launches = []
    for i, (start, end) in enumerate(parts):
        n, first = end - start, sum(partials[:i])
        part = Slice(x, start * channels * size, n * channels * size)
        labels = Slice(targets, start * 4, n * 4)
        dims = [n, vocabulary, ignore_index, height]
        launches += matmul_launches(
            *(target, logits, part, weight, (n, vocabulary, channels), x.dtype, "float32"),
            transpose_b=True,
            packed=packed,
        )
        if softcap is not None:
            capping, size_ = suffixed("softcap_forward", "float32"), n * vocabulary
            launches.append(
                Launch(capping, [logits] * 2, 1, [size_], [softcap], tasks=blocks(size_))
            )
        launches.append(
            Launch(
                suffixed("cross_entropy_forward", "float32"),
                [Slice(partial, first * 16, partials[i] * 16), lse, logits, labels],
                2,
                dims,
                tasks=partials[i],
            )
        )
        if dx is not None or dweight is not None:
            kernel = suffixed("classifier_backward", x.dtype)
            args = [logits, node.inputs[3], labels, lse]
            launches.append(Launch(kernel, args, 1, dims, [softcap or 0.0], tasks=partials[i]))
        if dx is not None:
            launches += matmul_launches(
                target,
                Slice(dx, start * channels * size, n * channels * size),
                *(logits, weight, (n, channels, vocabulary), x.dtype, dx.dtype),
                a_stride=dlogits_stride,
                packed=packed,
            )
        if dweight is not None:
            launches += matmul_launches(
                *(target, dweight, logits, part, (vocabulary, channels, n), x.dtype, dweight.dtype),
                transpose_a=True,
                a_stride=dlogits_stride,
                accumulate=i > 0 or bool(node.op.updates),
                packed=packed,
            )
    kernel = suffixed("loss_combine", loss_sum.dtype)
    launches.append(Launch(kernel, [loss_sum, count, partial], 2, [sum(partials)]))
    return launches


# Slices of tensors begin at multiples of so many rows on a GPU, whatever a row is; a graphics
# processor needs larger chunks to be busy, and the libraries' products larger ones still.
GPU_ROWS = 256
GPU_CHUNK_LOGITS, GPU_CHUNK_ROWS = 1 << 25, 1024
# There a chunk's logits, and dlogits in bfloat16, take at most this part of the device's memory.
VENDOR_CHUNK_LOGITS, VENDOR_PART = 1 << 31, 20
# Rows of logits are a multiple of so many where a library's product writes them. An odd vocabulary
# costs it six times as long, so where only weights follow the weight in memory, what lies there is
# multiplied along: the loss ignores those columns, and their dlogits are 0. The gradient of the
# weight has no such room and is made elsewhere.
VENDOR_COLUMNS = 64
WEIGHTS = ("weight", "shadow")


def _gpu_chunks(target: Gpu, rows: int, vocabulary: int, most: int | None) -> list[tuple[int, int]]:
    """`chunks` for a GPU: each but the last is a multiple of GPU_ROWS."""
    if target.vector > 1:
        most = most or max(CHUNK_ROWS, CHUNK_LOGITS // vocabulary)
    else:
        logits = GPU_CHUNK_LOGITS
        if target.vendor:
            logits = min(VENDOR_CHUNK_LOGITS, target.memory // VENDOR_PART // (4 + 2))
        most = most or max(GPU_CHUNK_ROWS, logits // vocabulary)
    units = blocks(rows, GPU_ROWS)
    found = chunks(units, vocabulary, max(1, most // GPU_ROWS))
    return [(start * GPU_ROWS, min(rows, end * GPU_ROWS)) for start, end in found]


def _lower_gpu(
    target: Gpu, node: Node, ignore_index: int, most: int | None, softcap: float | None
) -> list[Launch]:
    """Chunk by chunk: logits in float32, the loss and dlogits by one kernel, dx, and dweight.
    dlogits take the logits' place where they are of one dtype."""
    x, weight, targets, *dloss = node.inputs
    assert x is not None and weight is not None and targets is not None
    dx, dweight = (node.out(2), node.out(3)) if len(node.outputs) > 2 else (None, None)
    rows, vocabulary, channels = _sizes(node)
    size, into = itemsize(x.dtype), bool(node.op.updates)
    parts = _gpu_chunks(target, rows, vocabulary, most)
    tallest = max(end - start for start, end in parts)
    stride = columns = vocabulary
    if target.vendor:
        stride = blocks(vocabulary, VENDOR_COLUMNS) * VENDOR_COLUMNS
        if weight.buffer is not None and weight.buffer.role in WEIGHTS:
            columns = stride
    logits, packed = Temp(tallest * stride * 4, "logits"), Temp(0, "packed")
    dlogits = logits if size == 4 else Temp(tallest * stride * size, "dlogits")
    pairs = [Temp(rows * 4, "partial") for _ in range(2)]
    wanted = dloss[0] if dloss and (dx is not None or dweight is not None) else None
    summed: Value | Temp | None = dweight
    tall = vocabulary
    if dweight is not None and stride > vocabulary:  # rows of zeros, for the library's sake
        tall = stride
        summed = Temp(tall * channels * 4, "dweight")

    launches = []
    for i, (start, end) in enumerate(parts):
        n = end - start
        part = Slice(x, start * channels * size, n * channels * size)
        labels = Slice(targets, start * 4, n * 4)
        sums = [Slice(p, start * 4, n * 4) for p in pairs]
        grid = row_grid(target, "classifier", ["float32", x.dtype], n, stride)
        launches += matmul_launches(
            *(target, logits, part, weight, (n, columns, channels), x.dtype, "float32"),
            transpose_b=True,
            y_stride=stride,
            packed=packed,
        )
        args: list[Arg] = [dlogits, *sums, logits, wanted, labels]
        dims, cap = [n, vocabulary, stride, ignore_index], [softcap or 0.0]
        launches.append(Launch("classifier", args, 3, dims, cap, grids=[grid]))
        if dx is not None:
            out = Slice(dx, start * channels * size, n * channels * size)
            launches += matmul_launches(
                *(target, out, dlogits, weight, (n, channels, columns), x.dtype, dx.dtype),
                a_stride=stride,
                packed=packed,
            )
        if dweight is not None:
            launches += matmul_launches(
                *(target, summed, dlogits, part, (tall, channels, n), x.dtype, "float32"),
                transpose_a=True,
                a_stride=stride,
                accumulate=i > 0 or (into and summed is dweight),
                packed=packed,
            )
    if dweight is not None and isinstance(summed, Temp):
        found = Slice(summed, 0, dweight.nbytes)
        size_ = dweight.size
        if into:
            args, sizes = [dweight, dweight, found], [size_, size_]
            launches += pointwise(target, "elementwise", "add", ["float32"], args, 1, sizes)
        else:
            args, sizes = [dweight, found], [size_]
            launches += pointwise(target, "elementwise", "copy", ["float32"], args, 1, sizes)
    losses = row_grid(target, "loss", ["float32", x.dtype], tallest, vocabulary)
    return launches + combine_pairs(target, losses, node.outputs[:2], pairs, rows)


# ---------------------------------------------------------------- function


def linear_cross_entropy(
    x: Value,
    weight: Value,
    targets: Value,
    dloss: Value | None = None,
    ignore_index: int = -1,
    softcap: float | None = None,
) -> tuple[Value, Value]:
    """(loss_sum, count) of the softmax cross-entropy of logits = x · weightᵀ, without ever holding
    all logits: x [..., C], weight [V, C], targets int32 [...]; both results have shape ().

    dloss: the gradient of loss_sum, if it is known beforehand; the gradients of x and weight are
    then computed along with the loss, and differentiation must be seeded with just this value
    (GraphError otherwise). softcap: keeps the logits between -softcap and softcap. ShapeError or
    DTypeError where inputs do not fit. See LinearCrossEntropy.
    """
    inputs, attributes = (x, weight, targets), (int(ignore_index), None, softcap)
    if dloss is None:
        loss_sum, count = x.graph.apply(LinearCrossEntropyLoss(*attributes), *inputs)
    else:
        loss_sum, count, _, _ = x.graph.apply(LinearCrossEntropy(*attributes), *inputs, dloss)
    return loss_sum, count
