"""Which tokens a step trains on: a pure function of (seed, step), in constant memory.

The tokens of a split are cut into windows of T + 1 tokens, T inputs and the T tokens that follow
them; neighbours share one token, so that every token is predicted once. An epoch is a keyed
permutation of its windows, by a Feistel network that is walked until it falls inside the range
(Black and Rogaway 2002), and the stream of epochs, one after the other, is dealt out in batches: a
batch may end one epoch and begin the next, and no window is ever left over.

Each epoch shifts the cut by its own s in (r - T, r], where r is the number of tokens that the
windows leave over: window i starts at max(0, s + i T). So other tokens meet at the edges in every
epoch, the number of windows stays W = (N - 1) // T, and no window joins the end of a text to its
beginning. Only the first window may overlap its neighbour.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np

from treadle.errors import DataError

IGNORE = -1
"""The target that counts for nothing."""

_ROUNDS = 6


class Sampler:
    """Batches of training windows.

    Args:
        tokens: ids [N] of any integer dtype, usually a memory map; N >= block_size + 1.
        block_size: T, inputs in a window.
        batch_size: B, windows in a batch.
        seed: with the step, all that the order depends on.

    Raises:
        DataError: fewer than T + 1 tokens.
    """

    def __init__(self, tokens: np.ndarray, block_size: int, batch_size: int, seed: int) -> None:
        if len(tokens) < block_size + 1:
            raise DataError(too_short(len(tokens), block_size))
        self._tokens = tokens
        self._seed = seed
        self.block_size = block_size
        self.batch_size = batch_size
        self.windows_per_epoch, self._left_over = divmod(len(tokens) - 1, block_size)

    def epoch(self, step: int) -> int:
        """The epoch, from 0, of the first window of a step, from 0."""
        return step * self.batch_size // self.windows_per_epoch

    def batch(self, step: int) -> tuple[np.ndarray, np.ndarray, int]:
        """Inputs int32 [B, T], targets int32 [B, T] and the epoch of a step, from 0."""
        starts = self.starts(step)
        windows = self._tokens[starts[:, None] + np.arange(self.block_size + 1)].astype(np.int32)
        inputs = np.ascontiguousarray(windows[:, :-1])
        targets = np.ascontiguousarray(windows[:, 1:])
        return inputs, targets, self.epoch(step)

    def starts(self, step: int) -> np.ndarray:
        """The positions int64 [B] in the tokens at which the windows of a step begin."""
        places = step * self.batch_size + np.arange(self.batch_size, dtype=np.int64)
        epochs, places = np.divmod(places, self.windows_per_epoch)
        starts = np.empty(self.batch_size, np.int64)
        for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
            rows = epochs == epoch
            *keys, shift_key = _keys(self._seed, epoch)
            shift = self._left_over - int(shift_key % np.uint64(self.block_size))
            windows = permute(places[rows], self.windows_per_epoch, keys)
            starts[rows] = np.maximum(0, shift + windows * self.block_size)
        return starts


def eval_windows(
    tokens: np.ndarray, block_size: int, batch_size: int
) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
    """The whole of a split in order, each of its N - 1 predictions once.

    Yields inputs int32 [B, T], targets int32 [B, T] and the number of targets that count. The
    last window and the last batch are filled up with the target `IGNORE`. A split of fewer than 2
    tokens yields nothing.
    """
    predictions = len(tokens) - 1
    in_batch = batch_size * block_size
    for start in range(0, predictions, in_batch):
        count = min(in_batch, predictions - start)
        piece = tokens[start : start + count + 1].astype(np.int32)
        inputs = np.zeros(in_batch, np.int32)
        targets = np.full(in_batch, IGNORE, np.int32)
        inputs[:count], targets[:count] = piece[:-1], piece[1:]
        shape = batch_size, block_size
        yield inputs.reshape(shape), targets.reshape(shape), count


def too_short(n_tokens: int, block_size: int) -> str:
    """The line for a text that does not fill one window."""
    return (
        f"the training text has {n_tokens} tokens, but model.block_size {block_size} needs at "
        f"least {block_size + 1}; use a longer text or a smaller block_size"
    )


# ---- the keyed permutation ------------------------------------------------------------------


def permute(places: np.ndarray, size: int, keys: Sequence[np.uint64]) -> np.ndarray:
    """The images int64 [n] of `places` in [0, size) under the permutation that `keys` name.

    A balanced Feistel network, one round for each key, permutes the next power of 4; where an
    image falls outside of the range, it is taken as the place again, 4 times at most on average.
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    images = places.astype(np.uint64)
    outside = np.arange(len(images))
    while outside.size:
        left, right = images[outside] >> half, images[outside] & mask
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        images[outside] = left << half | right
        outside = outside[images[outside] >= size]
    return images.astype(np.int64)


@lru_cache(maxsize=8)
def _keys(seed: int, epoch: int) -> tuple[np.uint64, ...]:
    """What an epoch draws: a key for each round, and one for the shift of its cut."""
    state = np.array([seed], np.uint64)
    for numbers in (np.array([epoch], np.uint64), np.arange(_ROUNDS + 1, dtype=np.uint64)):
        state = _mix(state + np.uint64(0x9E3779B97F4A7C15)) + numbers
    return tuple(_mix(state))


def _mix(words: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014), on uint64."""
    words = (words ^ words >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ words >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return words ^ words >> np.uint64(31)
