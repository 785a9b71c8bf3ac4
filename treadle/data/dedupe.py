"""Which documents are equal, or nearly so, in bounded memory.

Documents are named by their place in the corpus; of equal ones the first is kept. Keys are sorted
in parts that fit into memory: those of one part begin with the same bits, so equal ones are never
apart.

Near duplicates: the Jaccard similarity J of the sets of five-word shingles of two documents is
estimated by MinHash (Broder 1997), the part of 128 minima that are equal. Two documents are
compared where at least one of b bands of r minima is equal, which happens with probability
1 - (1 - J^r)^b.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from treadle.data.extras import require

MINIMA = 128
_SHINGLE = 5  # words
_PART = 1 << 21  # keys that are sorted at a time
_PIECE = 1 << 16  # rows that are read at a time
_MIX = np.uint64(0x9E3779B97F4A7C15)


def equal_pairs(high: np.ndarray, low: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Finds equal keys among (high, low), two uint64 [N], where `high` is spread evenly.

    Yields two int64 arrays [M]: the places of keys that occurred before, and for each the place of
    the first that equals it.
    """
    bits = max(0, (len(high) - 1) // _PART).bit_length()
    for part in range(1 << bits):
        places = np.concatenate(
            [
                start + np.flatnonzero(_leading(high[start : start + _PART], bits) == part)
                for start in range(0, len(high), _PART)
            ]
            or [np.empty(0, np.int64)]
        )
        order = np.lexsort((low[places], high[places]))
        places = places[order]
        a, b = high[places], low[places]
        is_first = np.ones(len(places), bool)
        is_first[1:] = (a[1:] != a[:-1]) | (b[1:] != b[:-1])
        firsts = places[is_first][np.cumsum(is_first) - 1]
        yield places[~is_first], firsts[~is_first]


def _leading(keys: np.ndarray, bits: int) -> np.ndarray:
    return keys >> np.uint64(64 - bits) if bits else np.zeros(len(keys), np.uint64)


def near_pairs(
    signatures: np.ndarray, threshold: float, folder: Path
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Finds documents that are similar to an earlier one.

    signatures: uint32 [N, 128]. threshold: the least estimated Jaccard similarity, above 0 and at
    most 1. folder: takes a file of 8 N bytes. Yields places and earlier places as `equal_pairs`
    does; a place may come more than once.
    """
    bands, rows = _bands(threshold)
    keys = np.memmap(folder / "keys", np.uint64, "w+", shape=len(signatures))
    for band in range(bands):
        for start in range(0, len(signatures), _PIECE):
            piece = signatures[start : start + _PIECE, band * rows : (band + 1) * rows]
            key = np.zeros(len(piece), np.uint64)
            for column in piece.T:
                key = (key ^ column) * _MIX
                key ^= key >> np.uint64(32)
            keys[start : start + _PIECE] = key * _MIX
        for later, earlier in equal_pairs(keys, keys):
            for start in range(0, len(later), _PIECE):
                a, b = later[start : start + _PIECE], earlier[start : start + _PIECE]
                similar = (signatures[a] == signatures[b]).mean(1) >= threshold
                yield a[similar], b[similar]


def _bands(threshold: float) -> tuple[int, int]:
    """The number of bands and their rows: as many rows as leave four fifths of the threshold at
    the steep part of the curve, (1/b)^(1/r)."""
    steep = [r for r in range(1, MINIMA + 1) if (r / MINIMA) ** (1 / r) <= 0.8 * threshold] or [1]
    return MINIMA // max(steep), max(steep)


@cache
def _empty() -> Any:
    datasketch = require("datasketch", "--near-duplicates")
    return datasketch.MinHash(MINIMA, seed=1, hashfunc=zlib.crc32)


def signature(text: str) -> np.ndarray:
    """The MinHash of a document's shingles, uint32 [128].

    Raises:
        DataError: without datasketch.
    """
    words = text.lower().split()
    shingles = {
        " ".join(words[i : i + _SHINGLE]).encode() for i in range(max(1, len(words) - _SHINGLE + 1))
    }
    minima = _empty().copy()
    minima.update_batch(sorted(shingles))
    return minima.hashvalues.astype(np.uint32)
