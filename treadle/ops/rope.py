"""Rotary position embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import pi
from typing import ClassVar

import numpy as np

from treadle.errors import DTypeError
from treadle.graph.op import (
    BLOCK,
    Cost,
    Gpu,
    Grid,
    Launch,
    Node,
    Op,
    Target,
    blocks,
    expect,
    expect_float,
    suffixed,
    touched,
)
from treadle.graph.value import SUFFIX, Spec, Value

# A turn of a pair in 2^-TURN_BITS of the circle for each position: integers, whose products with a
# position are exact modulo a whole turn (rope.c).
TURN_BITS = 48
# On a GPU: work-items of a group, and heads that one turns (rope.cl).
ITEMS = 256
HEADS_EACH = 4


@dataclass(frozen=True)
class Rope(Op):
    """Queries and keys rotated by their positions: for each of their heads x [D] at position p, and
    each d < D/2, with angle a = p · frequencies[d] (-a with `inverse`),

        y[d]       = x[d] cos a - x[d + D/2] sin a
        y[d + D/2] = x[d + D/2] cos a + x[d] sin a

    qkv [B, T, (H + 2K) D] as in Attention: the values, its last K heads, are copied.  start: int32
    [B], the position of the first of the T tokens of each sequence; 0 where absent.  Su et al.
    2021, "RoFormer"; the pairs are Hugging Face's, halves of the head instead of neighbours. The
    gradient is the inverse rotation.
    """

    n_head: int = 1
    n_kv_head: int = 1
    frequencies: tuple[float, ...] = ()
    inverse: bool = False
    name: ClassVar[str] = "rope"
    inplace: ClassVar[dict[int, tuple[int, ...]]] = {0: (0,)}

    def infer(self, qkv: Spec, start: Spec | None = None) -> Sequence[Spec]:
        expect_float("rope", qkv)
        h, k, half = self.n_head, self.n_kv_head, len(self.frequencies)
        expect(h >= 1 and k >= 1, "rope", "n_head and n_kv_head of at least 1", (h, k))
        expect(half > 0, "rope", "a frequency for each pair of a head", "none")
        width = (h + 2 * k) * 2 * half
        shape = qkv.shape
        expect(
            len(shape) == 3 and shape[2] == width and min(shape) > 0,
            "rope",
            f"qkv of shape ['B', 'T', {width}]",
            list(shape),
            f"{h} + 2 · {k} heads of {half} pairs lie packed in it",
        )
        if start is not None:
            expect(start.shape == shape[:1], "rope", f"start {list(shape[:1])}", list(start.shape))
            if start.dtype != "int32":
                raise DTypeError(f"[rope] expected a start of int32, got {start}")
        return (qkv,)

    def reference(self, qkv: np.ndarray, start: np.ndarray | None = None) -> Sequence[np.ndarray]:
        b, t, _ = qkv.shape
        half = len(self.frequencies)
        first = np.zeros(1, np.int64) if start is None else start
        angles = (first[:, None] + np.arange(t))[..., None] * np.asarray(self.frequencies)
        cos, sin = (np.asarray(f(angles), qkv.dtype)[:, :, None] for f in (np.cos, np.sin))
        sin = -sin if self.inverse else sin
        y = qkv.copy()
        heads = y.reshape(b, t, -1, 2, half)[:, :, : self.n_head + self.n_kv_head]
        x0, x1 = heads[..., 0, :].copy(), heads[..., 1, :].copy()
        heads[..., 0, :] = x0 * cos - x1 * sin
        heads[..., 1, :] = x1 * cos + x0 * sin
        return (y,)

    def grad(self, node, dys, needs):  # type: ignore[no-untyped-def]
        op = Rope(self.n_head, self.n_kv_head, self.frequencies, not self.inverse)
        start = node.inputs[1:]
        return dys[0].graph.apply(op, dys[0], *start, name="rope")[0], *(None for _ in start)

    def cost(self, node: Node) -> Cost:
        y = node.outputs[0]
        heads = self.n_head + self.n_kv_head
        return Cost(3 * y.size * heads // (heads + self.n_kv_head), touched(node))

    def lower(self, target: Target, node: Node) -> Sequence[Launch]:
        (qkv, start), y = (*node.inputs, None)[:2], node.outputs[0]
        b, t, width = y.shape
        sign, half = -1 if self.inverse else 1, len(self.frequencies)
        turns = [round(f / (2 * pi) * 2**TURN_BITS) % 2**TURN_BITS for f in self.frequencies]
        if isinstance(target, Gpu):
            return [self._gpu_launch(target, y, qkv, start, turns, sign)]
        turns = [sign * turn % 2**TURN_BITS for turn in turns]
        times = max(1, BLOCK // (b * width))  # positions of a task, of all sequences
        dims = [b, t, self.n_head + self.n_kv_head, self.n_kv_head, half, times, *turns]
        kernel = suffixed("rope", y.dtype)
        scratch = 2 * 4 * half
        return [Launch(kernel, [y, qkv, start], 1, dims, tasks=blocks(t, times), scratch=scratch)]

    def _gpu_launch(
        self,
        target: Gpu,
        y: Value,
        qkv: Value | None,
        start: Value | None,
        turns: list[int],
        sign: int,
    ) -> Launch:
        b, t, _ = y.shape
        rotated, copied, half = self.n_head + self.n_kv_head, self.n_kv_head, len(turns)
        pairs, items = 4 if half % 4 == 0 else 1, target.items(ITEMS)
        groups = (blocks(b * t * half // pairs, items), blocks(rotated + copied, HEADS_EACH))
        table = "{" + ", ".join(map(str, turns)) + "}"
        defines = (("T", SUFFIX[y.dtype]), ("HALF", half), ("W", pairs), ("TURNS", table))
        grid = Grid("rope", groups, items, defines)
        dims = [b * t, t, rotated, copied, sign]
        return Launch("rope", [y, qkv, start], 1, dims, grids=[grid])


def rope(
    qkv: Value,
    n_head: int,
    n_kv_head: int,
    frequencies: Sequence[float],
    start: Value | None = None,
) -> Value:
    """Packed queries, keys and values [B, T, (n_head + 2 n_kv_head) D], the first two rotated.

    frequencies: D/2 numbers, radians by which a pair turns from one position to the next.  start:
    int32 [B], the position of each sequence's first token, 0 when None.  ShapeError or DTypeError
    when the inputs do not fit. See Rope.
    """
    inputs = (qkv,) if start is None else (qkv, start)
    op = Rope(n_head, n_kv_head, tuple(float(f) for f in frequencies))
    return qkv.graph.apply(op, *inputs, name="rope")[0]
