"""Causal self-attention in flash form: no T by T matrix in memory, forward or backward.

Dao, Fu, Ermon, Rudra & Ré 2022, "FlashAttention: Fast and Memory-Efficient Exact Attention with
IO-Awareness"; the online softmax is Milakov & Gimelshein 2018; grouped queries are Ainslie et al.
2023; sliding windows Beltagy, Peters & Cohan 2020, "Longformer"; capped scores Gemma Team 2024,
"Gemma 2". The reference is the plain form, with the matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import ClassVar

import numpy as np

from treadle.errors import DTypeError, GraphError
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
    suffixed,
    touched,
)
from treadle.graph.value import SUFFIX, Spec, Value
from treadle.ops import vendor
from treadle.ops.random import UNIFORM_BITS, philox_uniform, stream_of

# ---------------------------------------------------------------- tiles

# Queries, and keys, of a tile, a multiple of PAD: its K, Q and scores share the first-level cache.
BLOCK = 64
# Scratch rounds head sizes and rows up to the widest vector of all instruction sets, in floats.
PAD = 16
FLOAT_BYTES = 4
# The blocks of queries of a head are shared out until there are about this many tasks. A split
# costs the forward kernel another packing of K and V, and the backward one a partial dK and dV.
FORWARD_TASKS = 64
BACKWARD_TASKS = 32


# On a GPU: the widest part of a head that a tile holds; work-items across a tile of scores; rows of
# the other kind that a step takes (the bits follow from these); and the ways to cut the group's own
# rows: how many it has, and how many of them a work-item takes.
CHUNK = 64
ACROSS = 8
STEP = 32
FORWARD_CUTS = ((64, 4), (64, 8), (32, 4), (32, 2), (16, 2))
BACKWARD_CUTS = ((32, 4), (64, 4), (64, 8), (32, 2), (16, 2))
# Registers of a work-item: floats of sums that it may hold.
SUMS = 128


def _pad(n: int) -> int:
    return ceil(n / PAD) * PAD


def chunk_of(size: int) -> tuple[int, int]:
    """How many parts a head passes through the tiles in, and their width, a multiple of 4."""
    chunks = ceil(size / CHUNK)
    return chunks, ceil(ceil(size / chunks) / 4) * 4


def _local_bytes(chunk: int, own: int, tiles: int, scores: int) -> int:
    """Bytes of local memory for so many pairs of tiles, of the group's own rows and of a step's, so
    many tiles of scores, and statistics of the rows. See attention.cl."""
    stride = chunk + 4 * (chunk // 4 % 2 == 0)
    statistics = own * ACROSS if tiles == 1 else 2 * STEP
    floats = tiles * (own + STEP) * stride + scores * own * (STEP + 8) + statistics
    return floats * FLOAT_BYTES


# ---------------------------------------------------------------- the two ops


@dataclass(frozen=True)
class _Heads(Op):
    """What attention and its gradient share: the attributes, and the plain form of the weights."""

    n_head: int = 1
    n_kv_head: int = 1
    scale: float | None = None
    dropout: float = 0.0
    stream: int = 0
    window: int | None = None
    softcap: float | None = None

    def factor(self, size: int) -> float:
        """What scores are multiplied by: `scale`, or 1/√D when it is None."""
        return size**-0.5 if self.scale is None else self.scale

    def head_size(self, qkv: Spec | Value) -> int:
        """D of a packed input [B, T, (H + 2K) D]."""
        return qkv.shape[2] // (self.n_head + 2 * self.n_kv_head)

    def check(self, qkv: Spec, random: Spec | None) -> None:
        """ShapeError or DTypeError unless the packed input and the random state fit."""
        op, h, k = "attention", self.n_head, self.n_kv_head
        expect_float(op, qkv)
        expect(h >= 1 and k >= 1 and h % k == 0, op, "n_head a multiple of n_kv_head", (h, k))
        packed = h + 2 * k
        shape = qkv.shape
        fits = len(shape) == 3 and min(shape) > 0
        expect(fits, op, "qkv of shape [B, T, (H + 2K) D]", list(shape))
        expect(
            shape[2] % packed == 0,
            op,
            f"a last dimension that is a multiple of n_head + 2 n_kv_head = {packed}",
            shape[2],
            "heads of queries, keys and values lie packed in it",
        )
        window, cap = self.window, self.softcap
        expect(window is None or window >= 1, op, "a window of at least 1", window)
        expect(cap is None or cap > 0, op, "a softcap above 0", cap)
        expect(0.0 <= self.dropout < 1.0, op, "a dropout with 0 <= p < 1", self.dropout)
        if self.dropout > 0:
            got = "none" if random is None else list(random.shape)
            expect(random is not None and random.shape == (4,), op, "random state [4]", got)
            if random is not None and random.dtype != "uint32":
                raise DTypeError(f"[{op}] expected random state of dtype uint32, got {random}")
        else:
            expect(random is None, op, "no random state without dropout", random)

    def split(self, qkv: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Queries, keys and values [B, H, T, D], each key and value head repeated for its group."""
        b, t, c = qkv.shape
        h, k = self.n_head, self.n_kv_head
        heads = qkv.reshape(b, t, h + 2 * k, c // (h + 2 * k)).transpose(0, 2, 1, 3)
        keys, values = (np.repeat(heads[:, at : at + k], h // k, axis=1) for at in (h, h + k))
        return heads[:, :h], keys, values

    def scores(self, q: np.ndarray, k: np.ndarray) -> np.ndarray:
        """S [B, H, T, T]: scale · Q Kᵀ, capped, and -∞ where the query does not see the key."""
        t, d = q.shape[2:]
        s = (q @ k.swapaxes(2, 3)) * self.factor(d)
        if self.softcap is not None:
            s = self.softcap * np.tanh(s / self.softcap)
        seen = np.tri(t, dtype=bool)
        if self.window is not None:
            seen &= ~np.tri(t, k=-self.window, dtype=bool)
        return np.where(seen, s, s.dtype.type(-np.inf))

    def keep(self, p: np.ndarray, random: np.ndarray | None) -> np.ndarray:
        """1/(1-p) or 0 for each probability [B, H, T, T]; ones without dropout."""
        if random is None:
            return np.ones_like(p)
        seed, step, low, high = (int(word) for word in random)
        _, h, t, _ = p.shape
        start = (low | high << 32) * h * t * t
        elements = np.arange(p.size, dtype=np.uint64) + np.uint64(start & (2**64 - 1))
        uniform = philox_uniform(seed, self.stream, step, elements).reshape(p.shape)
        return np.asarray(uniform >= self.dropout, p.dtype) / (1.0 - self.dropout)

    def by_vendor(self, target: Gpu, qkv: Value) -> bool:
        """Whether cuDNN computes this attention."""
        size, special = self.head_size(qkv), (self.dropout, self.window, self.softcap)
        return target.vendor and vendor.attends(qkv.dtype, size, *special)

    def vendor_numbers(self, qkv: Value) -> tuple[list[int], float]:
        """B, T, H, K, D; and the scale."""
        size = self.head_size(qkv)
        return [*qkv.shape[:2], self.n_head, self.n_kv_head, size], self.factor(size)

    def _splits(self, qkv: Value, tasks: int) -> int:
        b, t, _ = qkv.shape
        return min(blocks(t, BLOCK), ceil(tasks / max(1, b * self.n_kv_head)))

    def _dims(self, qkv: Value, splits: int) -> list[int]:
        # u ≥ p between whole numbers, so that every backend decides alike.
        threshold = ceil(self.dropout * 2**UNIFORM_BITS)
        t, d = qkv.shape[1], self.head_size(qkv)
        sizes = [t, self.n_head, self.n_kv_head, d, _pad(t), _pad(d), BLOCK, splits]
        return [*sizes, self.stream, threshold, min(self.window or t, t)]

    def _nums(self, qkv: Value) -> list[float]:
        return [self.factor(self.head_size(qkv)), 1.0 / (1.0 - self.dropout), self.softcap or 0.0]

    def _grids(
        self,
        target: Gpu,
        kernel: str,
        qkv: Value,
        heads: int,
        cuts: Sequence[tuple[int, int]],
        tiles: int,
        results: int,
    ) -> list[Grid]:
        """The ways to run a kernel that keeps so many pairs of tiles in local memory, and has so
        many results for each element of its own rows, as many tiles of scores too."""
        b, t, _ = qkv.shape
        size = self.head_size(qkv)
        chunks, chunk = chunk_of(size)
        width = results * chunks * ceil(chunk / 4 / ACROSS) * 4
        grids: list[Grid] = []
        for own, rows in cuts:
            items = own // rows * ACROSS
            if items > target.group or _local_bytes(chunk, own, tiles, results) > target.local:
                continue
            if rows * width > SUMS and rows > 2:
                continue
            numbers = {"D": size, "CHUNKS": chunks, "CHUNK": chunk, "OWN": own, "STEP": STEP}
            numbers |= {"ACROSS": ACROSS, "VECTOR": target.vector}
            numbers["EXTRAS"] = int(self.dropout > 0 or self.softcap is not None)
            kind: tuple[tuple[str, str | int], ...] = ((kernel, 1), ("T", SUFFIX[qkv.dtype]))
            defines = (*kind, *numbers.items())
            grids.append(Grid("attention", (blocks(t, own), heads, b), items, defines))
        return grids[:1] if target.vector > 1 else grids

    def _gpu_dims(self, qkv: Value) -> list[int]:
        time, heads, kv_heads, *_, stream, threshold, window = self._dims(qkv, 1)
        return [time, heads, kv_heads, stream, threshold, window]

    def _scratch(self, qkv: Value, whole: int, wide: int, tiles: int, vectors: int) -> int:
        """Bytes of so many K's, blocks of queries, tiles of scores, and numbers for each query."""
        rows, size = _pad(qkv.shape[1]), _pad(self.head_size(qkv))
        floats = whole * rows * size + wide * BLOCK * size + tiles * BLOCK**2 + vectors * BLOCK
        return floats * FLOAT_BYTES


@dataclass(frozen=True)
class Attention(_Heads):
    """y = (drop ∘ softmax(S)) V for each head, with the scores S[t, j] = scale · q_t · k_j where
    query t sees key j, else -∞; and lse[b, h, t] = log Σ_j exp S[t, j].

    A query sees the keys j ≤ t, with a `window` only those with j > t - window. With a `softcap`
    S = softcap · tanh(scale · Q Kᵀ / softcap) before the mask.

    qkv: [B, T, (H + 2K) D]: H query heads, K key heads, K value heads, each D wide; query head h
    uses key and value head h // (H / K).  y: [B, T, H D].  lse: float32 for bfloat16 inputs.
    random: uint32[4] = seed, step, and the index of the first row in the global batch as two words,
    low first; only with dropout. The probability (b, h, i, j) is kept, and scaled by 1/(1-p), iff
    the uniform number of (seed, `stream`, step, (((first + b) H + h) T + i) T + j) is at least p.
    """

    name: ClassVar[str] = "attention"
    optional: ClassVar[tuple[int, ...]] = (1,)

    def infer(self, qkv: Spec, random: Spec | None = None) -> Sequence[Spec]:
        self.check(qkv, random)
        b, t, _ = qkv.shape
        statistics = "float32" if qkv.dtype == "bfloat16" else qkv.dtype
        y = Spec((b, t, self.n_head * self.head_size(qkv)), qkv.dtype)
        return y, Spec((b, self.n_head, t), statistics)

    def reference(self, qkv: np.ndarray, random: np.ndarray | None = None) -> Sequence[np.ndarray]:
        q, k, v = self.split(qkv)
        s = self.scores(q, k)
        top = s.max(axis=3, keepdims=True)
        e = np.exp(s - top)
        total = e.sum(axis=3, keepdims=True)
        p = e / total
        y = (p * self.keep(p, random)) @ v
        return y.swapaxes(1, 2).reshape(*qkv.shape[:2], -1), (top + np.log(total))[..., 0]

    def grad(self, node, dys, needs):  # type: ignore[no-untyped-def]
        dy, dlse = dys
        if dlse is not None:
            raise GraphError("[attention] lse has no gradient; make the loss of y alone")
        qkv, *random = node.inputs
        y, lse = node.outputs
        op = AttentionGrad(**self.attributes())
        return [qkv.graph.apply(op, dy, qkv, y, lse, *random)[0], *(None for _ in random)]

    def cost(self, node: Node) -> Cost:
        return Cost(_flops(self, node.inputs[0], 2), touched(node))

    def lower(self, target: Target, node: Node) -> Sequence[Launch]:
        qkv, random = node.inputs[0], _random(node)
        assert qkv is not None
        if isinstance(target, Gpu) and self.by_vendor(target, qkv):
            packed: list[Arg] = [node.outputs[0], node.out(1), qkv]
            return vendor.attention(packed, 2, False, *self.vendor_numbers(qkv))
        if isinstance(target, Gpu):
            args = [node.outputs[0], node.out(1), qkv, random]
            grids = self._grids(target, "FORWARD", qkv, self.n_head, FORWARD_CUTS, 1, 1)
            dims, nums = self._gpu_dims(qkv), self._nums(qkv)
            return [Launch("attention_forward", args, 2, dims, nums, grids=grids)]
        splits = self._splits(qkv, FORWARD_TASKS)
        return [
            Launch(
                suffixed("attention_forward", qkv.dtype),
                [node.outputs[0], node.out(1), qkv, random],
                2,
                self._dims(qkv, splits),
                self._nums(qkv),
                tasks=qkv.shape[0] * self.n_kv_head * splits,
                scratch=self._scratch(qkv, whole=2, wide=2, tiles=2, vectors=3),
            )
        ]


@dataclass(frozen=True)
class AttentionGrad(_Heads):
    """dqkv of an Attention, from its output and saved lse. For each head, with P = exp(S - lse),
    and drop the factors 0 or 1/(1-p):

        dV = (drop ∘ P)ᵀ dy          dS = P ∘ (drop ∘ (dy Vᵀ) - rowsum(dy ∘ y))
        dQ = scale · dS K            dK = scale · dSᵀ Q

    with dS ∘ (1 - (S / softcap)²) in place of dS where scores are capped. dK and dV are summed over
    the query heads of a group.
    """

    name: ClassVar[str] = "attention_grad"

    def infer(
        self, dy: Spec, qkv: Spec, y: Spec, lse: Spec, random: Spec | None = None
    ) -> Sequence[Spec]:
        self.check(qkv, random)
        expect_same("attention", dy, y)
        (out, statistics), name = Attention(**self.attributes()).infer(qkv, random), "attention"
        expect(y.shape == out.shape, name, f"y of shape {list(out.shape)}", list(y.shape))
        expect(lse.shape == statistics.shape, name, f"lse {list(statistics.shape)}", lse.shape)
        return (qkv,)

    def reference(
        self,
        dy: np.ndarray,
        qkv: np.ndarray,
        y: np.ndarray,
        lse: np.ndarray,
        random: np.ndarray | None = None,
    ) -> Sequence[np.ndarray]:
        b, t, c = qkv.shape
        h, n = self.n_head, self.n_kv_head
        q, k, v = self.split(qkv)
        dy, y = (x.reshape(b, t, h, -1).swapaxes(1, 2) for x in (dy, y))
        s = self.scores(q, k)
        p = np.exp(s - lse[..., None])
        keep = self.keep(p, random)
        dv = (p * keep).swapaxes(2, 3) @ dy
        ds = p * ((dy @ v.swapaxes(2, 3)) * keep - (dy * y).sum(axis=3, keepdims=True))
        if self.softcap is not None:
            ds *= 1.0 - np.square(np.maximum(s, -self.softcap) / self.softcap)
        ds *= self.factor(q.shape[3])
        dq, dk = ds @ k, ds.swapaxes(2, 3) @ q
        dk, dv = (x.reshape(b, n, h // n, t, -1).sum(axis=2) for x in (dk, dv))
        return (np.concatenate([dq, dk, dv], axis=1).swapaxes(1, 2).reshape(b, t, c),)

    def cost(self, node: Node) -> Cost:
        return Cost(_flops(self, node.inputs[1], 5), touched(node))

    def lower(self, target: Target, node: Node) -> Sequence[Launch]:
        dy, qkv, y, lse = node.inputs[:4]
        assert qkv is not None
        dqkv, random = node.outputs[0], _random(node)
        if isinstance(target, Gpu) and self.by_vendor(target, qkv):
            args: list[Arg] = [dqkv, dy, qkv, y, lse]
            return vendor.attention(args, 1, True, *self.vendor_numbers(qkv))
        if isinstance(target, Gpu):
            return self._gpu_launches(target, node)
        b, t, _ = qkv.shape
        splits = self._splits(qkv, BACKWARD_TASKS)
        dims, nums = self._dims(qkv, splits), self._nums(qkv)
        tasks = b * self.n_kv_head * splits
        partial = None
        if splits > 1:
            partial = Temp(tasks * self._scratch(qkv, 2, 0, 0, 0), "dk_dv")
        launches = [
            Launch(
                suffixed("attention_backward", qkv.dtype),
                [dqkv, partial, dy, qkv, y, lse, random],
                2,
                dims,
                nums,
                tasks=tasks,
                scratch=self._scratch(qkv, whole=2 if partial else 4, wide=5, tiles=3, vectors=3),
            )
        ]
        if partial is not None:
            launches.append(
                Launch(
                    suffixed("attention_backward_combine", qkv.dtype),
                    [dqkv, partial],
                    1,
                    dims,
                    nums,
                    tasks=b * self.n_kv_head * blocks(t, BLOCK),
                    scratch=self._scratch(qkv, whole=0, wide=1, tiles=0, vectors=0),
                )
            )
        return launches

    def _gpu_launches(self, target: Gpu, node: Node) -> list[Launch]:
        dy, qkv, y, lse = node.inputs[:4]
        assert qkv is not None
        b, t, _ = qkv.shape
        h = self.n_head
        dims, nums = self._gpu_dims(qkv), self._nums(qkv)
        delta = Temp(b * h * t * FLOAT_BYTES, "delta")
        by_query = self._grids(target, "QUERIES", qkv, h, BACKWARD_CUTS, 2, 1)
        by_key = self._grids(target, "KEYS", qkv, self.n_kv_head, BACKWARD_CUTS, 2, 2)
        args = [node.outputs[0], dy, qkv, lse, delta, _random(node)]
        first = by_query[0]
        rows = replace(
            first,
            groups=(blocks(b * t * h, first.items // ACROSS),),
            defines=(("DELTA", 1), *first.defines[1:-1], ("EXTRAS", 0)),
        )
        return [
            Launch("attention_delta", [delta, dy, y], 1, [b * t * h, t, h], grids=[rows]),
            Launch("attention_backward_queries", args, 1, dims, nums, grids=by_query),
            Launch("attention_backward_keys", args, 1, dims, nums, grids=by_key),
        ]


def _random(node: Node) -> Value | None:
    """The random state of a node: its last input with dropout, None without."""
    op = node.op
    assert isinstance(op, _Heads)
    return node.inputs[-1] if op.dropout > 0 else None


def _flops(op: _Heads, qkv: Value | None, products: int) -> int:
    """So many matrix products: 2 D operations for each pair of a query and a key that it sees."""
    assert qkv is not None
    b, t, _ = qkv.shape
    unseen = t - min(op.window or t, t)
    pairs = (t * (t + 1) - unseen * (unseen + 1)) // 2
    return products * 2 * op.head_size(qkv) * b * op.n_head * pairs


# ---------------------------------------------------------------- the function


def attention(
    qkv: Value,
    n_head: int,
    n_kv_head: int | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    random: Value | None = None,
    name: str = "attention",
    window: int | None = None,
    softcap: float | None = None,
) -> Value:
    """Causal self-attention over packed queries, keys and values; y [B, T, n_head · D].

    qkv: [B, T, (n_head + 2 n_kv_head) D], the output of GPT-2's c_attn when n_kv_head is n_head
    (the default); n_kv_head divides n_head.  scale: of the scores, 1/√D when None.
    dropout: probability with which a softmax weight is zeroed.  random: uint32[4], see Attention;
    used only with dropout.
    name: names the node and selects its random stream; it must be the same on every rank.
    window: a query sees itself and the window - 1 tokens before it; all before it when None.
    softcap: scores s become softcap · tanh(s / softcap); not when None.
    ShapeError or DTypeError when the input does not fit.
    """
    k = n_head if n_kv_head is None else n_kv_head
    stream = stream_of(name) if dropout > 0 else 0
    op = Attention(n_head, k, scale, dropout, stream, window, softcap)
    inputs = (qkv, random) if dropout > 0 else (qkv,)
    return qkv.graph.apply(op, *inputs, name=name)[0]
