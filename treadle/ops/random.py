"""Random numbers that depend on a counter alone, weight initialisation, and dropout.

Every number is a pure function of (seed, stream, step, element), by Philox 4x32-10 (Salmon et al.,
"Parallel random numbers: as easy as 1, 2, 3", SC11) as in Random123. Ranks, micro-batches, threads
and recomputation therefore do not matter, and no mask is kept in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, prod
from typing import ClassVar
from zlib import crc32

import numpy as np

from treadle.errors import DTypeError
from treadle.graph.op import (
    Cost,
    Gpu,
    Launch,
    Node,
    Op,
    Target,
    blocks,
    expect,
    expect_float,
    pointwise,
    touched,
)
from treadle.graph.value import Shape, Spec, Value

# ---------------------------------------------------------------- the generator

ROUNDS = 10
MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
WEYL = (0x9E3779B9, 0xBB67AE85)
UNIFORM_BITS = 24
_SHIFT = np.uint64(32)

# Blocks that `normal` computes at a time: the working set stays in a processor's cache.
_CHUNK = 1 << 14


def philox(
    counter: Sequence[np.ndarray | int], key: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Philox 4x32-10: four words of uint32 (arrays, broadcast against each other) to four random
    ones, under a key of two words."""
    x0, x1, x2, x3 = np.broadcast_arrays(*(np.asarray(word, np.uint32) for word in counter))
    for r in range(ROUNDS):
        key0, key1 = (np.uint32((k + r * w) & 0xFFFFFFFF) for k, w in zip(key, WEYL, strict=True))
        a, b = MULTIPLIERS[0] * x0, MULTIPLIERS[1] * x2
        x0, x2 = (b >> _SHIFT).astype(np.uint32) ^ x1, (a >> _SHIFT).astype(np.uint32) ^ x3
        x0, x2 = x0 ^ key0, x2 ^ key1
        x1, x3 = b.astype(np.uint32), a.astype(np.uint32)
    return x0, x1, x2, x3


def philox_words(seed: int, stream: int, step: int, elements: np.ndarray) -> np.ndarray:
    """The uint32 random word of each element (uint64 array of any shape): word element % 4 of the
    block with counter (element // 4 as two words, step, 0) under the key (seed, stream)."""
    elements = np.asarray(elements, np.uint64)
    block = elements // 4
    words = philox((block & 0xFFFFFFFF, block >> _SHIFT, step, 0), (seed, stream))
    return np.choose((elements % 4).astype(np.intp), words)


def philox_uniform(seed: int, stream: int, step: int, elements: np.ndarray) -> np.ndarray:
    """A uniform number in [0, 1) for each element (uint64 array), a multiple of 2⁻²⁴; float64."""
    words = philox_words(seed, stream, step, elements)
    return (words >> np.uint32(32 - UNIFORM_BITS)) * 2.0**-UNIFORM_BITS


def stream_of(name: str) -> int:
    """The 32-bit stream of a node or weight: CRC-32 of its name in UTF-8."""
    return crc32(name.encode())


def normal(seed: int, stream: int, shape: Shape, std: float = 1.0) -> np.ndarray:
    """float32 numbers of mean 0 and standard deviation `std`, for initial weights (step 0).

    Box & Muller 1958 in float64: the words (w₀, w₁) of a pair of elements give
    r = √(-2 ln((w₀ + ½) 2⁻³²)), θ = 2π w₁ 2⁻³², and the numbers r cos θ and r sin θ.
    """
    size = prod(shape)
    out = np.empty(-(-size // 4) * 4, np.float32)
    for start in range(0, out.size // 4, _CHUNK):
        block = np.arange(start, min(start + _CHUNK, out.size // 4), dtype=np.uint64)
        words = philox((block & 0xFFFFFFFF, block >> _SHIFT, 0, 0), (seed, stream))
        chunk = out[4 * start : 4 * start + 4 * block.size].reshape(-1, 4)
        for pair in (0, 2):
            radius = np.sqrt(-2.0 * np.log((words[pair] + 0.5) * 2.0**-32)) * std
            angle = words[pair + 1] * (2.0 * np.pi * 2.0**-32)
            chunk[:, pair] = radius * np.cos(angle)
            chunk[:, pair + 1] = radius * np.sin(angle)
    return out[:size].reshape(shape)


# ---------------------------------------------------------------- dropout


@dataclass(frozen=True)
class Dropout(Op):
    """y = x · keep / (1 - p), keep = (u ≥ p): Srivastava et al. 2014, scaled while training.

    x: [rows, ...].  random: uint32[4] = seed, step, and the index of x's first row in the global
    batch as two words, low first.  u is the uniform number of (seed, `stream`, step, element),
    element = the index of the element in the global batch.  dx is the same op on dy.
    """

    p: float = 0.0
    stream: int = 0
    name: ClassVar[str] = "dropout"
    inplace: ClassVar[dict[int, tuple[int, ...]]] = {0: (0,)}

    def infer(self, x: Spec, random: Spec) -> Sequence[Spec]:
        expect(0.0 <= self.p < 1.0, "dropout", "a probability p with 0 <= p < 1", self.p)
        expect_float("dropout", x)
        expect(len(x.shape) >= 1, "dropout", "an input with rows", list(x.shape))
        expect(random.shape == (4,), "dropout", "random state of shape [4]", list(random.shape))
        if random.dtype != "uint32":
            raise DTypeError(f"[dropout] expected random state of dtype uint32, got {random}")
        return (x,)

    def reference(self, x: np.ndarray, random: np.ndarray) -> Sequence[np.ndarray]:
        seed, step, low, high = (int(word) for word in random)
        start = (low | high << 32) * prod(x.shape[1:])
        elements = np.arange(x.size, dtype=np.uint64) + np.uint64(start & (2**64 - 1))
        uniform = philox_uniform(seed, self.stream, step, elements).reshape(x.shape)
        return (x * (np.asarray(uniform >= self.p, x.dtype) / (1.0 - self.p)),)

    def grad(self, node, dys, needs):  # type: ignore[no-untyped-def]
        random = node.inputs[1]
        return dys[0].graph.apply(self, dys[0], random, name="dropout")[0], None

    def cost(self, node: Node) -> Cost:
        return Cost(2 * node.outputs[0].size, touched(node))

    def lower(self, target: Target, node: Node) -> Sequence[Launch]:
        (x, random), y = node.inputs, node.outputs[0]
        # u ≥ p between whole numbers, so that every backend decides alike.
        threshold = ceil(self.p * 2**UNIFORM_BITS)
        dims = [y.size, prod(y.shape[1:]), self.stream, threshold]
        nums = [1.0 / (1.0 - self.p)]
        launches = pointwise(target, "random", "dropout", [y.dtype], [y, x, random], 1, dims, nums)
        if isinstance(target, Gpu):  # x may begin and end amid the four elements of a Philox block
            (grid,) = launches[0].grids
            grid = replace(grid, groups=(blocks(y.size + 6, 4 * grid.items),))
            launches[0].grids = [grid]
        return launches


def dropout(x: Value, p: float, random: Value, name: str) -> Value:
    """x with each element zeroed with probability p and the others scaled by 1/(1-p); x itself when
    p is 0.

    x: [rows, ...], rows being a micro-batch's first dimension.  random: uint32[4], see Dropout.
    name: names the node and selects its random stream; it must be the same on every rank.
    """
    return x if p == 0 else x.graph.apply(Dropout(p, stream_of(name)), x, random, name=name)[0]
