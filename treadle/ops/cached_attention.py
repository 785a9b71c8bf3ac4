"""Attention over a cache of keys and values, for writing a text a token at a time.

The online softmax is Milakov & Gimelshein 2018, "Online normalizer calculation for softmax";
cutting the keys of one query among processors is Dao et al. 2023, "Flash-Decoding"; grouped queries
are Ainslie et al. 2023; the window is Beltagy, Peters & Cohan 2020, "Longformer"; capping scores is
Gemma Team 2024, "Gemma 2".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import ClassVar

import numpy as np

from treadle.errors import DTypeError
from treadle.graph.op import (
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
    suffixed,
)
from treadle.graph.value import SUFFIX, Spec, Value
from treadle.ops.attention import ACROSS, STEP, chunk_of

# ---------------------------------------------------------------- tiles

# Keys of a block, whose scores a task softmaxes at once; at most so many blocks cover the cache.
# The bits of a result follow from this cut, so it depends on the size of the cache alone.
KEYS = 256
KEY_BLOCKS = 32
# Queries (of all heads that share keys) that a task takes at a time.
QUERIES = 64
# So few queries are split among tasks by blocks of keys, until there are about this many tasks.
FEW_QUERIES = 16
TASKS = 64
# In floats: the widest vector; the widest strip of keys; what stands before a block's values.
PAD = 16
STRIP = 64
RECORD = 16
FLOAT_BYTES = 4
# On a GPU: the least keys of a block, the most blocks, and the floats before a block's values;
# work-items of the kernels that have no tiles.
GPU_KEYS = 64
GPU_KEY_BLOCKS = 64
GPU_RECORD = 4
ITEMS = 256


def _pad(n: int) -> int:
    return ceil(n / PAD) * PAD


def _keys_of_block(size: int) -> int:
    """Keys of a block for a cache of `size` positions, a multiple of STRIP."""
    return max(KEYS, ceil(size / KEY_BLOCKS / STRIP) * STRIP)


# ---------------------------------------------------------------- the op


@dataclass(frozen=True)
class CachedAttention(Op):
    """keys[b, :, start[b] + t] ← k[b, t] and values likewise, in place; then, for each head,
    y[b, t] = softmax over j of s(q[b, t] · keys[b, j]) · values[b, j], over the positions
    j ≤ p = start[b] + t, and j > p - window where there is one.

    s(x) = scale · x, or softcap · tanh(scale · x / softcap) where there is one.
    qkv: [B, T, (H + 2K) D], packed as Attention's.  keys, values: [B, K, S, D], buffers.
    start: int32 [B], 0 or more, read at run time; T ≤ S. A position from S on, as the filling of a
    short text may have, is not written, and sees what S - 1 sees.  y: [B, T, H D].
    A row of the batch, and a query among others, has the bits that it has alone.
    """

    n_head: int = 1
    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    name: ClassVar[str] = "cached_attention"
    updates: ClassVar[dict[int, int]] = {1: 1, 2: 2}

    def infer(self, qkv: Spec, keys: Spec, values: Spec, start: Spec) -> Sequence[Spec]:
        op, h = self.name, self.n_head
        expect_float(op, qkv, keys, values)
        fits = len(qkv.shape) == 3 and min(qkv.shape) > 0
        expect(fits, op, "qkv of shape [B, T, (H + 2K) D]", list(qkv.shape))
        fits = len(keys.shape) == 4 and min(keys.shape) > 0
        expect(fits, op, "keys of shape [B, K, S, D]", list(keys.shape))
        batch, time, width = qkv.shape
        _, k, size, d = keys.shape
        expect(h >= 1 and h % k == 0, op, "n_head a multiple of the heads of keys", (h, k))
        wanted = [batch, k, size, width // (h + 2 * k)]
        expect(
            list(keys.shape) == wanted and width == (h + 2 * k) * d,
            op,
            f"keys {wanted} for qkv {list(qkv.shape)}",
            list(keys.shape),
        )
        expect(values.shape == keys.shape, op, f"values {wanted}", list(values.shape))
        if not qkv.dtype == keys.dtype == values.dtype:
            raise DTypeError(f"[{op}] expected a cache of {qkv.dtype}, got {keys} and {values}")
        expect(time <= size, op, f"at most {size} tokens, as the cache holds", time)
        expect(start.shape == (batch,), op, f"start [{batch}]", list(start.shape))
        if start.dtype != "int32":
            raise DTypeError(f"[{op}] expected start of int32, got {start}")
        expect(self.window is None or self.window >= 1, op, "a window of 1 or more", self.window)
        expect(self.softcap is None or self.softcap > 0, op, "softcap > 0", self.softcap)
        return Spec((batch, time, h * d), qkv.dtype), keys, values

    def factor(self, size: int) -> float:
        """What scores are multiplied by: `scale`, or 1/√D when it is None."""
        return size**-0.5 if self.scale is None else self.scale

    def reference(
        self, qkv: np.ndarray, keys: np.ndarray, values: np.ndarray, start: np.ndarray
    ) -> Sequence[np.ndarray]:
        batch, time, _ = qkv.shape
        _, k, size, d = keys.shape
        heads = qkv.reshape(batch, time, self.n_head + 2 * k, d).transpose(0, 2, 1, 3)
        q, new_keys, new_values = np.split(heads, (self.n_head, self.n_head + k), axis=1)
        keys, values = keys.copy(), values.copy()
        y = np.empty((batch, self.n_head, time, d), qkv.dtype)
        for b, first in enumerate(int(i) for i in start):
            n = max(0, min(time, size - first))
            keys[b, :, first : first + n] = new_keys[b, :, :n]
            values[b, :, first : first + n] = new_values[b, :, :n]
            group = self.n_head // k
            seen_keys, seen_values = (np.repeat(x[b], group, axis=0) for x in (keys, values))
            s = (q[b] @ seen_keys.swapaxes(1, 2)) * self.factor(d)
            if self.softcap is not None:
                s = self.softcap * np.tanh(s / self.softcap)
            position = np.minimum(first + np.arange(time), size - 1)[:, None]
            key = np.arange(size)
            visible = key <= position
            if self.window is not None:
                visible &= key > position - self.window
            s = np.where(visible, s, -np.inf)
            e = np.exp(s - s.max(axis=2, keepdims=True))
            y[b] = (e / e.sum(axis=2, keepdims=True)) @ seen_values
        return y.swapaxes(1, 2).reshape(batch, time, -1), keys, values

    def cost(self, node: Node) -> Cost:
        qkv, keys, values = node.inputs[:3]
        assert qkv is not None and keys is not None and values is not None
        batch, time, _ = qkv.shape
        _, _, size, d = keys.shape
        pairs = batch * self.n_head * time * size
        moved = 2 * qkv.nbytes + node.outputs[0].nbytes + keys.nbytes + values.nbytes
        return Cost(4 * d * pairs, moved)

    def lower(self, target: Target, node: Node) -> Sequence[Launch]:
        qkv, keys, _, start = node.inputs
        y, new_keys, new_values = node.outputs
        assert qkv is not None and keys is not None
        if isinstance(target, Gpu):
            return self._gpu_launches(target, node)
        batch, time, _ = qkv.shape
        _, k, size, d = keys.shape
        padded, keys_of_block = _pad(d), _keys_of_block(size)
        rows, key_blocks = time * self.n_head // k, blocks(size, keys_of_block)
        splits, queries = 1, min(QUERIES, rows)
        if rows <= FEW_QUERIES:
            splits = min(key_blocks, max(1, TASKS // (batch * k)))
        dims = [
            *(time, self.n_head, k, d, padded, size, keys_of_block, self.window or 0),
            *(queries, splits, batch),
        ]
        nums = [self.factor(d), self.softcap or 0.0]
        partial = None
        if splits > 1:
            records = batch * k * rows * key_blocks
            partial = Temp(records * (RECORD + padded) * FLOAT_BYTES, "partial")
        floats = queries * (3 * padded + keys_of_block) + STRIP * (padded + 1) + 4 * _pad(queries)
        launches = [
            Launch(
                suffixed("cache_write", qkv.dtype),
                [new_keys, new_values, qkv, start],
                2,
                dims,
                nums,
                tasks=min(batch * k, blocks(2 * batch * time * k * d)),
            ),
            Launch(
                suffixed("cached_attention", qkv.dtype),
                [*((None, partial) if partial else (y, None)), qkv, new_keys, new_values, start],
                2,
                dims,
                nums,
                tasks=batch * k * blocks(rows, queries) * splits,
                scratch=floats * FLOAT_BYTES,
            ),
        ]
        if partial is not None:
            launches.append(
                Launch(
                    suffixed("cached_attention_combine", qkv.dtype),
                    [y, partial, start],
                    1,
                    dims,
                    nums,
                    tasks=min(batch * k * rows, blocks(partial.nbytes // FLOAT_BYTES)),
                    scratch=padded * FLOAT_BYTES,
                )
            )
        return launches

    def _gpu_launches(self, target: Gpu, node: Node) -> list[Launch]:
        qkv, keys, _, start = node.inputs
        y, new_keys, new_values = node.outputs
        assert qkv is not None and keys is not None
        batch, time, _ = qkv.shape
        _, k, size, d = keys.shape
        rows = time * self.n_head // k
        block = max(GPU_KEYS, ceil(size / GPU_KEY_BLOCKS / STEP) * STEP)
        key_blocks = blocks(size, block)
        split = rows <= FEW_QUERIES and key_blocks > 1
        chunks, chunk = chunk_of(d)
        own, each = _cut(target, rows, d)
        numbers = {"D": d, "CHUNKS": chunks, "CHUNK": chunk, "OWN": own, "STEP": STEP}
        numbers |= {"ACROSS": ACROSS, "VECTOR": target.vector}
        kind: tuple[str, str | int] = ("T", SUFFIX[qkv.dtype])
        defines = (kind, *numbers.items())
        source, items = "cached_attention", own // each * ACROSS
        dims = [time, self.n_head, k, size, block, self.window or size]
        nums = [self.factor(d), self.softcap or 0.0]
        partial, parts = None, 1
        if split:
            width = GPU_RECORD + chunks * chunk
            partial, parts = Temp(batch * k * rows * key_blocks * width * FLOAT_BYTES), key_blocks
        many = target.items(ITEMS)

        def flat(n: int) -> list[Grid]:
            whole = (("OWN", many // ACROSS), ("FLAT", 1))
            shared = tuple(pair for pair in defines if pair[0] != "OWN")
            return [Grid(source, (blocks(n, many),), many, (*shared, *whole))]

        written = [new_keys, new_values, qkv, start]
        args = [None if split else y, partial, qkv, new_keys, new_values, start]
        grid = Grid(source, (blocks(rows, own) * parts, k, batch), items, defines)
        moved = batch * k * time * d
        launches = [
            Launch("cache_write", written, 2, [moved, *dims], grids=flat(moved)),
            Launch("cached_attention", args, 2, dims, nums, grids=[grid]),
        ]
        if split:
            quads = batch * k * rows * chunks * chunk // 4
            combine = [y, partial, start]
            launches.append(
                Launch("cached_attention_combine", combine, 1, [quads, *dims], grids=flat(quads))
            )
        return launches


def _cut(target: Gpu, rows: int, size: int) -> tuple[int, int]:
    """Queries of a group, and of a work-item, on a GPU: the bits are the same for all."""
    if target.vector > 1 and rows <= 4:  # few work-items, each with many scores
        return (own := 1 << (rows - 1).bit_length()), own
    if rows <= 8:
        return 8, 1
    return (32, 4) if size <= 128 and rows > 16 else (16, 2)


# ---------------------------------------------------------------- the function


def cached_attention(
    qkv: Value,
    keys: Value,
    values: Value,
    start: Value,
    n_head: int,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    name: str = "attention",
) -> Value:
    """Causal attention of T new tokens over a cache, which they enter; y [B, T, n_head · D].

    qkv: [B, T, (n_head + 2K) D], as `attention` takes it.  keys, values: buffers [B, K, S, D], that
    are updated in place.  start: int32 [B], the position of the first new token of each row.
    scale: of the scores, 1/√D when None.  window: how many positions a query sees, its own
    included.  softcap: scores become softcap · tanh(score / softcap).
    No gradient. ShapeError or DTypeError when inputs do not fit. See CachedAttention.
    """
    op = CachedAttention(n_head, scale, window, softcap)
    return qkv.graph.apply(op, qkv, keys, values, start, name=name)[0]
