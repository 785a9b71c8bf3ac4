"""Optimizers: global-norm clipping, AdamW, SGD with momentum, gradient accumulation.

All of them update persistent buffers in place. What changes from step to step (learning rate,
Adam's corrections, whether to apply the step) comes as values of shape (), read at run time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from treadle.errors import DTypeError
from treadle.graph.op import (
    BLOCK,
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
    cast,
    expect,
    expect_same,
    pointwise,
    suffixed,
    touched,
)
from treadle.graph.value import Spec, Value

# PyTorch's clip_grad_norm_ divides by norm + this, so that a norm of 0 is no division by 0.
NORM_EPSILON = 1e-6


def _expect_master(op: str, *specs: Spec | None) -> None:
    """All specs float32, or all float64: weights, gradients and moments are never narrower."""
    for spec in specs:
        if spec is not None and spec.dtype not in ("float32", "float64"):
            raise DTypeError(f"[{op}] expected float32 weights and gradients, got {spec}")


def _expect_shadow(op: str, w: Spec, shadow: Spec | None, wanted: bool) -> None:
    expect((shadow is not None) == wanted, op, "a shadow" if wanted else "no shadow", shadow)
    if shadow is not None:
        expect_same(op, Spec(w.shape, "bfloat16"), shadow)


def _expect_scalars(op: str, **scalars: Spec) -> None:
    for name, spec in scalars.items():
        expect(spec.shape == (), op, f"{name} of shape []", list(spec.shape))
        _expect_master(op, spec)


def _update(
    target: Target,
    kernel: str,
    y: Value,
    args: Sequence[Arg],
    writes: int,
    nums: Sequence[float] = (),
) -> list[Launch]:
    """The launch that updates y element by element; on a GPU one for all neighbours in memory."""
    if isinstance(target, Gpu):
        return pointwise(target, "optim", kernel, [], args, writes, [y.size], nums, merges=True)
    return pointwise(target, "optim", kernel, [y.dtype], args, writes, [y.size], nums)


# ---------------------------------------------------------------- global norm

# On a GPU NORM_LANES work-items add up the squares of NORM_BLOCK elements, as in optim.cl, and a
# work-group so many of the sums.
NORM_LANES, NORM_BLOCK, NORM_PARTS = 8, 256, 8192


@dataclass(frozen=True)
class GlobalNorm(Op):
    """norm = √(Σᵢ ‖gᵢ‖²) over all gradients, scale = min(1, max_norm / (norm + 10⁻⁶)), or 1 when
    max_norm is 0, and ok = apply if the norm is finite, else 0 (Pascanu et al. 2013).

    Inputs: apply (), with `limited` loss () and limit (), then g₁ … gₙ of any shapes. Outputs:
    norm (), scale (), ok (). A gradient with an infinity or a NaN thus skips the update on the
    device, and the host need not wait for it; so does one with a square beyond float32, and with
    `limited` a loss that is NaN or above the limit.
    """

    max_norm: float = 0.0
    limited: bool = False
    name: ClassVar[str] = "global_norm"

    @property
    def scalars(self) -> int:
        """How many inputs stand before the gradients."""
        return 3 if self.limited else 1

    def infer(self, *inputs: Spec) -> Sequence[Spec]:
        expect(self.max_norm >= 0, "global_norm", "max_norm >= 0", self.max_norm)
        scalars, grads = inputs[: self.scalars], inputs[self.scalars :]
        expect(len(grads) > 0, "global_norm", "at least one gradient", "none")
        names = ("apply", "loss", "limit")[: self.scalars]
        _expect_scalars("global_norm", **dict(zip(names, scalars, strict=True)))
        _expect_master("global_norm", *grads)
        return (scalars[0],) * 3

    def reference(self, *inputs: np.ndarray) -> Sequence[np.ndarray]:
        apply, grads = inputs[0], inputs[self.scalars :]
        norm = np.sqrt(sum(np.sum(np.square(g), dtype=np.float64) for g in grads))
        one = np.ones(())
        scale = np.minimum(one, self.max_norm / (norm + NORM_EPSILON)) if self.max_norm else one
        fine = np.isfinite(norm)
        if self.limited:
            fine &= inputs[1] <= inputs[2]
        return (norm, scale, np.where(fine, apply, 0.0))

    def cost(self, node: Node) -> Cost:
        return Cost(2 * sum(v.size for v in node.inputs if v is not None), touched(node))

    def lower(self, target: Target, node: Node) -> Sequence[Launch]:
        scalars, grads = node.inputs[: self.scalars], node.inputs[self.scalars :]
        apply, loss, limit = scalars if self.limited else (*scalars, None, None)
        if isinstance(target, Gpu):
            return self._grids(target, node, grads, [apply, loss, limit])
        sizes = [g.size for g in grads if g is not None]
        parts = sum(blocks(n) for n in sizes)
        partial = Temp(parts * 8, "partial")
        dtype = node.outputs[0].dtype
        dims = [BLOCK, len(sizes), *sizes]
        nums = [self.max_norm, NORM_EPSILON]
        combine = suffixed("norm_combine", dtype)
        return [
            Launch(suffixed("norm_squares", dtype), [partial, *grads], 1, dims, tasks=parts),
            Launch(combine, [*node.outputs, partial, apply, loss, limit], 3, [parts], nums),
        ]

    def _grids(
        self, target: Gpu, node: Node, grads: Sequence[Value | None], scalars: Sequence[Arg]
    ) -> list[Launch]:
        """Squares of every gradient by blocks, all blocks in passes, and the results."""
        items = target.items(ITEMS)
        sizes = [g.size for g in grads if g is not None]
        parts = sum(blocks(n, NORM_BLOCK) for n in sizes)
        partial = Temp(parts * 4, "partial")
        launches, first = [], 0
        for g, n in zip(grads, sizes, strict=True):
            groups = blocks(n, NORM_BLOCK * items // NORM_LANES)
            grid = Grid("optim", (groups,), items)
            dims = [n, first]
            launches.append(
                Launch("norm_squares", [partial, g], 1, dims, grids=[grid], merges=True)
            )
            first += blocks(n, NORM_BLOCK)
        while parts > NORM_PARTS:
            into = Temp(blocks(parts, NORM_PARTS) * 4, "partial")
            grid = Grid("optim", (blocks(parts, NORM_PARTS),), items)
            dims = [parts, NORM_PARTS]
            launches.append(Launch("norm_partials", [into, partial], 1, dims, grids=[grid]))
            partial, parts = into, blocks(parts, NORM_PARTS)
        args, nums = [*node.outputs, partial, *scalars], [self.max_norm, NORM_EPSILON]
        grid = Grid("optim", (1,), items)
        return [*launches, Launch("norm_combine", args, 3, [parts], nums, grids=[grid])]


# ---------------------------------------------------------------- AdamW


@dataclass(frozen=True)
class AdamW(Op):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019), in PyTorch's form:

        g ← scale · g                      w ← w - lr · weight_decay · w
        m ← β₁ m + (1 - β₁) g              v ← β₂ v + (1 - β₂) g²
        w ← w - lr / correction1 · m / (√v / √correction2 + eps)

    w, g, m, v: one shape, float32. lr, correction1 = 1 - β₁ᵗ, correction2 = 1 - β₂ᵗ, scale, ok: ().
    shadow: None, or a bfloat16 buffer of w's shape, which becomes a copy of the new w.
    Outputs: w, m, v and the shadow, updated in place; unchanged where ok is 0.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    shadow: bool = False
    name: ClassVar[str] = "adamw"

    @property
    def updates(self) -> dict[int, int]:  # type: ignore[override]
        return {0: 0, 1: 2, 2: 3} | ({3: 9} if self.shadow else {})

    def infer(
        self,
        w: Spec,
        g: Spec,
        m: Spec,
        v: Spec,
        lr: Spec,
        correction1: Spec,
        correction2: Spec,
        scale: Spec,
        ok: Spec,
        shadow: Spec | None = None,
    ) -> Sequence[Spec]:
        expect_same("adamw", w, g, m, v)
        _expect_master("adamw", w)
        _expect_shadow("adamw", w, shadow, self.shadow)
        _expect_scalars(
            "adamw", lr=lr, correction1=correction1, correction2=correction2, scale=scale, ok=ok
        )
        return (w, m, v) if shadow is None else (w, m, v, shadow)

    def reference(self, *inputs: np.ndarray) -> Sequence[np.ndarray]:
        w, g, m, v, lr, correction1, correction2, scale, ok, *shadow = inputs
        beta1, beta2 = self.betas
        g = g * scale
        m_new = beta1 * m + (1 - beta1) * g
        v_new = beta2 * v + (1 - beta2) * g * g
        w_new = w - lr * self.weight_decay * w
        w_new = w_new - lr / correction1 * m_new / (
            np.sqrt(v_new) / np.sqrt(correction2) + self.eps
        )
        pairs = [(w_new, w), (m_new, m), (v_new, v), *((w_new, copy) for copy in shadow)]
        return tuple(np.where(ok != 0, new, old) for new, old in pairs)

    def cost(self, node: Node) -> Cost:
        return Cost(15 * node.outputs[0].size, touched(node))

    def lower(self, target: Target, node: Node) -> Sequence[Launch]:
        w, m, v, *shadow = node.outputs
        args = [w, m, v, shadow[0] if shadow else None, *node.inputs[:9]]
        beta1, beta2 = self.betas
        nums = [*self.betas, self.eps, self.weight_decay]
        if isinstance(target, Gpu):  # 1 - beta in float64, as there are no such numbers there
            nums = [1.0 - beta1, beta2, 1.0 - beta2, self.eps, self.weight_decay]
        return _update(target, "adamw", w, args, 4, nums)


# ---------------------------------------------------------------- SGD


@dataclass(frozen=True)
class Sgd(Op):
    """Stochastic gradient descent with momentum, in PyTorch's form:

        g ← scale · g + weight_decay · w       buffer ← momentum · buffer + g
        w ← w - lr · buffer                    (w ← w - lr · g without momentum)

    w, g, buffer: one shape, float32; buffer is None when momentum is 0. lr, scale, ok: ().
    shadow: None, or a bfloat16 buffer of w's shape, which becomes a copy of the new w.
    Outputs: w, with momentum the buffer, and the shadow, updated in place; unchanged where ok is 0.
    """

    momentum: float = 0.0
    weight_decay: float = 0.0
    shadow: bool = False
    name: ClassVar[str] = "sgd"

    @property
    def updates(self) -> dict[int, int]:  # type: ignore[override]
        sources = [0, *([2] if self.momentum else []), *([6] if self.shadow else [])]
        return dict(enumerate(sources))

    def infer(
        self,
        w: Spec,
        g: Spec,
        buffer: Spec | None,
        lr: Spec,
        scale: Spec,
        ok: Spec,
        shadow: Spec | None = None,
    ) -> Sequence[Spec]:
        wanted = "a momentum buffer" if self.momentum else "no buffer without momentum"
        expect((buffer is not None) == (self.momentum != 0), "sgd", wanted, buffer)
        expect_same("sgd", w, g, buffer)
        _expect_master("sgd", w)
        _expect_shadow("sgd", w, shadow, self.shadow)
        _expect_scalars("sgd", lr=lr, scale=scale, ok=ok)
        return tuple(s for s in (w, buffer, shadow) if s is not None)

    def reference(
        self,
        w: np.ndarray,
        g: np.ndarray,
        buffer: np.ndarray | None,
        lr: np.ndarray,
        scale: np.ndarray,
        ok: np.ndarray,
        shadow: np.ndarray | None = None,
    ) -> Sequence[np.ndarray]:
        change = g * scale + self.weight_decay * w
        if buffer is not None:
            change = self.momentum * buffer + change
        w_new = w - lr * change
        pairs = ((w_new, w), (change, buffer), (w_new, shadow))
        return tuple(np.where(ok != 0, new, old) for new, old in pairs if old is not None)

    def cost(self, node: Node) -> Cost:
        return Cost((7 if self.momentum else 5) * node.outputs[0].size, touched(node))

    def lower(self, target: Target, node: Node) -> Sequence[Launch]:
        w = node.outputs[0]
        buffer = node.outputs[1] if self.momentum else None
        args = [w, buffer, node.outputs[-1] if self.shadow else None, *node.inputs[:6]]
        return _update(target, "sgd", w, args, 3, [self.momentum, self.weight_decay])


# ---------------------------------------------------------------- accumulation


@dataclass(frozen=True)
class Accumulate(Op):
    """into ← into + x, in place; one shape and dtype, float32."""

    name: ClassVar[str] = "accumulate"
    updates: ClassVar[dict[int, int]] = {0: 0}

    def infer(self, into: Spec, x: Spec) -> Sequence[Spec]:
        expect_same("accumulate", into, x)
        _expect_master("accumulate", into)
        return (into,)

    def reference(self, into: np.ndarray, x: np.ndarray) -> Sequence[np.ndarray]:
        return (into + x,)

    def lower(self, target: Target, node: Node) -> Sequence[Launch]:
        y = node.outputs[0]
        return _update(target, "accumulate", y, [y, *node.inputs], 1)


# ---------------------------------------------------------------- functions


def clip(
    grads: Sequence[Value],
    max_norm: float,
    apply: Value,
    loss: Value | None = None,
    limit: Value | None = None,
) -> tuple[Value, Value, Value]:
    """The global norm of the gradients, the factor that brings it down to max_norm (1 when that
    is 0), and `apply` with non-finite gradients turned into 0; all of shape (). See GlobalNorm.

    loss, limit: a loss of shape () that is NaN or above the limit turns `apply` into 0 as well.
    """
    limits = () if loss is None or limit is None else (loss, limit)
    op = GlobalNorm(float(max_norm), bool(limits))
    norm, scale, ok = apply.graph.apply(op, apply, *limits, *grads)
    return norm, scale, ok


def adamw(
    w: Value,
    g: Value,
    m: Value,
    v: Value,
    lr: Value,
    correction1: Value,
    correction2: Value,
    scale: Value,
    ok: Value,
    *,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    shadow: Value | None = None,
) -> tuple[Value, ...]:
    """One AdamW step on the buffers w, m, v and shadow; returns their new contents. See AdamW."""
    has = shadow is not None
    op = AdamW((float(betas[0]), float(betas[1])), float(eps), float(weight_decay), has)
    inputs = (w, g, m, v, lr, correction1, correction2, scale, ok, *([shadow] if has else []))
    return w.graph.apply(op, *inputs)


def sgd(
    w: Value,
    g: Value,
    buffer: Value | None,
    lr: Value,
    scale: Value,
    ok: Value,
    *,
    momentum: float,
    weight_decay: float,
    shadow: Value | None = None,
) -> tuple[Value, ...]:
    """One SGD step on the buffers w, with momentum `buffer`, and the shadow; returns their new
    contents. See Sgd."""
    op = Sgd(float(momentum), float(weight_decay), shadow is not None)
    return w.graph.apply(op, w, g, buffer, lr, scale, ok, *([] if shadow is None else [shadow]))


def accumulate(into: Value, x: Value) -> Value:
    """Add x to the buffer that `into` is the content of; returns its new content."""
    return into.graph.apply(Accumulate(), into, cast(x, into.dtype))[0]
