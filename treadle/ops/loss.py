"""Softmax cross-entropy and mean squared error.

Both return the sum of the losses and how many there are, so that a mean over several micro-steps
or ranks divides by the count of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar

import numpy as np

from treadle.errors import DTypeError, GraphError
from treadle.graph.op import (
    BLOCK,
    EACH,
    ITEMS,
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
from treadle.ops.elementwise import scale

# Logits that one task works through, in whole rows: an exponential each, so fewer than a BLOCK.
LOGITS_BLOCK = 4096


def _combined(
    kernel: str,
    node: Node,
    args: Sequence[Value | None],
    dims: list[int],
    tasks: int,
) -> Sequence[Launch]:
    """Launches for (sum, count): one pair of float64 partials a task, then their sum in order."""
    loss_sum, count = node.outputs[:2]
    dtype = node.inputs[0].dtype  # type: ignore[union-attr]
    partial = Temp(tasks * 16, "partial")
    lse = [node.out(i) for i in range(2, len(node.outputs))]
    return [
        Launch(suffixed(kernel, dtype), [partial, *lse, *args], 1 + len(lse), dims, tasks=tasks),
        Launch(suffixed("loss_combine", dtype), [loss_sum, count, partial], 2, [tasks]),
    ]


# On a GPU a work-group adds up so many pairs; a work-item of squared_error_forward has so many
# elements, as in loss.cl.
COMBINED, SQUARES = 4096, 16


def combine_pairs(
    target: Gpu, grid: Grid, outputs: Sequence[Arg], pairs: Sequence[Temp], parts: int
) -> list[Launch]:
    """Launches for (sum, count) of `parts` of each, in passes. grid: of the kernel before, which
    says how loss.cl is compiled."""
    launches = []
    while True:
        passes = blocks(parts, COMBINED)
        into = list(outputs) if passes == 1 else [Temp(passes * 4, "partial") for _ in pairs]
        each = replace(grid, groups=(passes,))
        dims = [parts, COMBINED]
        launches.append(Launch("loss_combine", [*into, *pairs], 2, dims, grids=[each]))
        if passes == 1:
            return launches
        pairs, parts = into, passes  # type: ignore[assignment]


# ---------------------------------------------------------------- cross-entropy


def _expect_targets(op: str, logits: Spec, targets: Spec) -> None:
    expect_float(op, logits)
    expect(len(logits.shape) > 0 and logits.size > 0, op, "logits [..., V]", list(logits.shape))
    if targets.dtype != "int32":
        raise DTypeError(f"[{op}] expected targets of int32, got {targets}")
    expect(
        targets.shape == logits.shape[:-1],
        op,
        f"targets {list(logits.shape[:-1])} for logits {list(logits.shape)}",
        list(targets.shape),
    )


def _counted(targets: np.ndarray, vocabulary: int, ignore_index: int) -> np.ndarray:
    """Which targets make a loss."""
    return (targets != ignore_index) & (targets >= 0) & (targets < vocabulary)


def _log_sum_exp(logits: np.ndarray) -> np.ndarray:
    top = logits.max(axis=-1)
    return top + np.log(np.exp(logits - top[..., None]).sum(axis=-1))


@dataclass(frozen=True)
class CrossEntropy(Op):
    """loss_sum = Σ lse - logits[target], lse = log Σ exp(logits), over targets ≠ ignore_index.

    logits [..., V]; targets int32 [...]. Outputs: loss_sum () and count (), the number of targets
    that are not ignored, and lse [...] for backward (0 where ignored); all float32 where logits
    are bfloat16. A target outside 0 … V-1 is ignored too. lse comes from one pass with a running
    maximum: Milakov & Gimelshein 2018, "Online normalizer calculation for softmax".
    """

    ignore_index: int = -1
    name: ClassVar[str] = "cross_entropy"
    optional: ClassVar[tuple[int, ...]] = (2,)

    def infer(self, logits: Spec, targets: Spec) -> Sequence[Spec]:
        _expect_targets("cross_entropy", logits, targets)
        dtype = wide(logits.dtype)
        return (Spec((), dtype), Spec((), dtype), Spec(targets.shape, dtype))

    def reference(self, logits: np.ndarray, targets: np.ndarray) -> Sequence[np.ndarray]:
        counted = _counted(targets, logits.shape[-1], self.ignore_index)
        lse = np.zeros(targets.shape, logits.dtype)
        lse[counted] = _log_sum_exp(logits[counted])
        chosen = np.take_along_axis(logits[counted], targets[counted][:, None], axis=-1)[:, 0]
        return ((lse[counted] - chosen).sum(), counted.sum(), lse)

    def grad(self, node, dys, needs):  # type: ignore[no-untyped-def]
        (logits, targets), (dloss, _, dlse) = node.inputs, dys
        if dlse is not None:
            raise GraphError("[cross_entropy] lse has no gradient; use loss_sum only")
        if dloss is None:
            return None, None
        op = CrossEntropyGrad(self.ignore_index)
        inputs = (dloss, logits, targets, node.outputs[2])
        return logits.graph.apply(op, *inputs, name=self.name)[0], None

    def cost(self, node: Node) -> Cost:
        logits = node.inputs[0]
        assert logits is not None
        return Cost(4 * logits.size, touched(node))

    def lower(self, target: Target, node: Node) -> Sequence[Launch]:
        logits = node.inputs[0]
        assert logits is not None
        dims, tasks = _dims(logits, self.ignore_index)
        if isinstance(target, Gpu):
            rows, vocabulary = dims[:2]
            grid = row_grid(target, "loss", [logits.dtype] * 2, rows, vocabulary)
            pairs = [Temp(rows * 4, "partial") for _ in range(2)]
            args = [*pairs, node.out(2), *node.inputs]
            kernel, dims = "cross_entropy_forward", dims[:3]
            return [
                Launch(kernel, args, 3, dims, [0.0], grids=[grid]),
                *combine_pairs(target, grid, node.outputs[:2], pairs, rows),
            ]
        return _combined("cross_entropy_forward", node, node.inputs, dims, tasks)


def _dims(logits: Value, ignore_index: int) -> tuple[list[int], int]:
    """Rows, vocabulary, ignore_index, rows of a task; and the number of tasks."""
    vocabulary = logits.shape[-1]
    rows, height = prod(logits.shape[:-1]), max(1, LOGITS_BLOCK // vocabulary)
    return [rows, vocabulary, ignore_index, height], blocks(rows, height)


@dataclass(frozen=True)
class CrossEntropyGrad(Op):
    """dlogits = (exp(logits - lse) - onehot(target)) · dloss; rows that are ignored give 0.

    dloss (), read at run time; logits [..., V]; targets int32 [...]; lse [...]. dlogits is like
    logits and takes over their memory.
    """

    ignore_index: int = -1
    name: ClassVar[str] = "cross_entropy_grad"
    inplace: ClassVar[dict[int, tuple[int, ...]]] = {0: (1,)}

    def infer(self, dloss: Spec, logits: Spec, targets: Spec, lse: Spec) -> Sequence[Spec]:
        _expect_targets(self.name, logits, targets)
        dtype = wide(logits.dtype)
        expect_same(self.name, Spec((), dtype), dloss)
        expect_same(self.name, Spec(targets.shape, dtype), lse)
        return (logits,)

    def reference(
        self, dloss: np.ndarray, logits: np.ndarray, targets: np.ndarray, lse: np.ndarray
    ) -> Sequence[np.ndarray]:
        counted = _counted(targets, logits.shape[-1], self.ignore_index)
        p = np.exp(logits[counted] - lse[counted][:, None])
        p[np.arange(len(p)), targets[counted]] -= 1
        dlogits = np.zeros_like(logits)
        dlogits[counted] = p * dloss
        return (dlogits,)

    def cost(self, node: Node) -> Cost:
        return Cost(3 * node.outputs[0].size, touched(node))

    def lower(self, target: Target, node: Node) -> Sequence[Launch]:
        dlogits = node.outputs[0]
        dims, tasks = _dims(dlogits, self.ignore_index)
        args = [dlogits, *node.inputs]
        if isinstance(target, Gpu):
            grid = row_grid(target, "loss", [dlogits.dtype] * 2, *dims[:2])
            return [Launch("cross_entropy_backward", args, 1, dims[:3], [0.0], grids=[grid])]
        kernel = suffixed("cross_entropy_backward", dlogits.dtype)
        return [Launch(kernel, args, 1, dims, tasks=tasks)]


# ---------------------------------------------------------------- mean squared error


@dataclass(frozen=True)
class MeanSquaredError(Op):
    """loss_sum = Σ (y - target)² and count = the number of elements; the mean is their quotient.

    y, target of one shape and dtype. Both outputs have shape (), float32 where y is bfloat16.
    """

    name: ClassVar[str] = "mean_squared_error"

    def infer(self, y: Spec, target: Spec) -> Sequence[Spec]:
        expect_float(self.name, y)
        expect_same(self.name, y, target)
        out = Spec((), wide(y.dtype))
        return (out, out)

    def reference(self, y: np.ndarray, target: np.ndarray) -> Sequence[np.ndarray]:
        return (np.square(y - target).sum(), np.asarray(y.size, y.dtype))

    def grad(self, node, dys, needs):  # type: ignore[no-untyped-def]
        (y, target), dloss = node.inputs, dys[0]
        if dloss is None:
            return None, None
        dy = y.graph.apply(MeanSquaredErrorGrad(), dloss, y, target, name=self.name)[0]
        return dy, scale(dy, -1.0) if needs[1] else None

    def cost(self, node: Node) -> Cost:
        y = node.inputs[0]
        assert y is not None
        return Cost(3 * y.size, touched(node))

    def lower(self, target: Target, node: Node) -> Sequence[Launch]:
        y = node.inputs[0]
        assert y is not None
        if isinstance(target, Gpu):
            items = target.items(ITEMS)
            parts = blocks(y.size, SQUARES * items)
            grid = replace(row_grid(target, "loss", [y.dtype] * 2, 1, 1), groups=(parts,))
            pairs = [Temp(parts * 4, "partial") for _ in range(2)]
            args = [*pairs, *node.inputs]
            return [
                Launch("squared_error_forward", args, 2, [y.size], grids=[grid]),
                *combine_pairs(target, grid, node.outputs, pairs, parts),
            ]
        dims = [y.size, BLOCK]
        return _combined("squared_error_forward", node, node.inputs, dims, blocks(y.size))


@dataclass(frozen=True)
class MeanSquaredErrorGrad(Op):
    """dy = 2 (y - target) · dloss; dloss (), read at run time."""

    name: ClassVar[str] = "mean_squared_error_grad"
    inplace: ClassVar[dict[int, tuple[int, ...]]] = {0: (1, 2)}

    def infer(self, dloss: Spec, y: Spec, target: Spec) -> Sequence[Spec]:
        expect_same(self.name, y, target)
        expect_same(self.name, Spec((), wide(y.dtype)), dloss)
        return (y,)

    def reference(
        self, dloss: np.ndarray, y: np.ndarray, target: np.ndarray
    ) -> Sequence[np.ndarray]:
        return (2 * (y - target) * dloss,)

    def cost(self, node: Node) -> Cost:
        return Cost(3 * node.outputs[0].size, touched(node))

    def lower(self, target: Target, node: Node) -> Sequence[Launch]:
        dy = node.outputs[0]
        args, dims = [dy, *node.inputs], [dy.size, BLOCK]
        if isinstance(target, Gpu):
            grid = row_grid(target, "loss", [dy.dtype] * 2, 1, 1)
            grid = replace(grid, groups=(blocks(dy.size, EACH * grid.items),))
            return [Launch("squared_error_backward", args, 1, dims[:1], grids=[grid])]
        kernel = suffixed("squared_error_backward", dy.dtype)
        return [Launch(kernel, args, 1, dims, tasks=blocks(dy.size))]


# ---------------------------------------------------------------- functions


def cross_entropy(logits: Value, targets: Value, ignore_index: int = -1) -> tuple[Value, Value]:
    """(loss_sum, count) of -log softmax(logits)[target] over targets ≠ ignore_index.

    logits [..., V], targets int32 [...]; both results have shape (), float32 where logits are
    bfloat16. Without any target, both are 0. ShapeError or DTypeError where targets do not fit.
    """
    op = CrossEntropy(int(ignore_index))
    loss_sum, count, _ = logits.graph.apply(op, logits, targets)
    return loss_sum, count


def mean_squared_error(y: Value, target: Value) -> tuple[Value, Value]:
    """(loss_sum, count): Σ (y - target)² and the number of elements, both of shape ().

    y and target have one shape and dtype, else ShapeError or DTypeError. The mean is their
    quotient, as for cross_entropy.
    """
    loss_sum, count = y.graph.apply(MeanSquaredError(), y, target)
    return loss_sum, count


# ---------------------------------------------------------------- mean


@dataclass(frozen=True)
class Mean(Op):
    """y = loss_sum / max(count, 1): the mean of a (sum, count) pair. The count has no gradient."""

    name: ClassVar[str] = "mean"

    def infer(self, loss_sum: Spec, count: Spec) -> Sequence[Spec]:
        expect_float("mean", loss_sum, count)
        expect_same("mean", Spec((), loss_sum.dtype), loss_sum, count)
        return (loss_sum,)

    def reference(self, loss_sum: np.ndarray, count: np.ndarray) -> Sequence[np.ndarray]:
        return (loss_sum / np.maximum(count, 1),)

    def grad(self, node, dys, needs):  # type: ignore[no-untyped-def]
        (dy,), count = dys, node.inputs[1]
        return mean(dy, count), None

    def lower(self, target: Target, node: Node) -> Sequence[Launch]:
        y = node.outputs[0]
        args = [y, *node.inputs]
        if isinstance(target, Gpu):
            return [Launch("mean", args, 1, grids=[row_grid(target, "loss", [y.dtype] * 2, 1, 1)])]
        return [Launch(suffixed("mean", y.dtype), args, 1)]


def mean(loss_sum: Value, count: Value) -> Value:
    """loss_sum / count, both of shape (); 0 where nothing was counted."""
    return loss_sum.graph.apply(Mean(), loss_sum, count)[0]
