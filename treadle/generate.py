"""Text from a model: next-token graphs, sampling, streaming."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from treadle.backends.base import Executable
from treadle.data.tokenizer import Tokenizer
from treadle.errors import ConfigError, TokenizerError
from treadle.graph.op import cast
from treadle.graph.program import Program
from treadle.models.base import Model, read_weights, shadow
from treadle.ops.embedding import select_row
from treadle.ops.random import philox_uniform, stream_of
from treadle.passes.fuse import fuse

# ---------------------------------------------------------------- graphs


def bucket_lengths(block_size: int) -> list[int]:
    """Lengths T for which a next-token graph is made: 16, 64, 256 …, and block_size."""
    lengths = []
    n = 16
    while n < block_size:
        lengths.append(n)
        n *= 4
    return [*lengths, block_size]


def add_next_token(program: Program, model: Model) -> None:
    """Graphs `next_T`: logits [1, V] after the token at index `position` of prompt_T [1, T].

    What follows that position is padding, which a causal model cannot see from there.
    """
    position = program.buffer("position", (), "int32", "scalar")
    logits = program.buffer("logits", (1, model.vocab_size), "float32", "output")
    for t in bucket_lengths(model.block_size):
        g = program.graph(f"next_{t}")
        tokens = g.read(program.buffer(f"prompt_{t}", (1, t), "int32", "input"))
        weights = read_weights(program, g, model)
        last = select_row(model.hidden(weights, tokens), g.read(position))
        g.assign(logits, cast(model.logits(weights, last), "float32"))
        fuse(g)


def write_weight(executable: Executable, name: str, array: np.ndarray) -> None:
    """Set a weight, and its bfloat16 copy where the program has one."""
    executable.write(name, array)
    if shadow(name) in executable.program.buffers:
        executable.write(shadow(name), array)


def next_logits(executable: Executable, block_size: int, ids: Sequence[int]) -> np.ndarray:
    """Logits [V], float32, of the token that follows `ids` (its last block_size tokens)."""
    window = list(ids[-block_size:])
    length = next(t for t in bucket_lengths(block_size) if t >= len(window))
    prompt = np.zeros((1, length), np.int32)
    prompt[0, : len(window)] = window
    executable.write(f"prompt_{length}", prompt)
    executable.write("position", np.int32(len(window) - 1))
    executable.run(f"next_{length}")
    return executable.read("logits")[0]


# ---------------------------------------------------------------- sampling


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn.

    temperature: 0 takes the most likely token. top_k: only the k most likely (0 is off).
    top_p: only the most likely that together reach probability p (1 is off; Holtzman et al. 2020).
    ConfigError for values out of range.
    """

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature must be 0 or more, got {self.temperature}")
        if self.top_k < 0:
            raise ConfigError(f"top-k must be 0 (off) or more, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top-p must be above 0 and at most 1, got {self.top_p}")

    def draw(self, logits: np.ndarray, index: int) -> int:
        """The token drawn from logits [V] as the index-th of the text: a function of the seed.

        Ties go to the lower token id. ConfigError when the largest logit is not finite.
        """
        logits = np.asarray(logits, np.float64)
        if not np.isfinite(np.max(logits)):
            raise ConfigError("the model's logits are not finite; its weights are damaged")
        if self.temperature == 0:
            return int(np.argmax(logits))
        order = np.argsort(-logits, kind="stable")
        if self.top_k:
            order = order[: self.top_k]
        with np.errstate(over="ignore"):  # a tiny temperature leaves nothing but the best
            p = np.exp((logits[order] - logits[order[0]]) / self.temperature)
        cumulative = np.cumsum(p)
        cumulative /= cumulative[-1]
        if self.top_p < 1:
            kept = int(np.searchsorted(cumulative, self.top_p)) + 1
            cumulative = cumulative[:kept] / cumulative[kept - 1 : kept]
        stream = stream_of("sample")
        element = np.array([index], np.uint64)
        u = float(philox_uniform(self.seed & 0xFFFFFFFF, stream, 0, element)[0])
        return int(
            order[min(int(np.searchsorted(cumulative, u, side="right")), len(cumulative) - 1)]
        )


def start_ids(tokenizer: Tokenizer) -> list[int]:
    """In place of an empty prompt: the beginning-of-text token, else a line end, else id 0."""
    if tokenizer.bos_id is not None:
        return [tokenizer.bos_id]
    try:
        return [int(i) for i in tokenizer.encode("\n")]
    except TokenizerError:
        return [0]


def generate_ids(
    executable: Executable,
    block_size: int,
    prompt: Sequence[int],
    tokens: int,
    sampling: Sampling,
    stop: int | None = None,
    on_window: Callable[[], None] | None = None,
    vocab_size: int | None = None,
) -> Iterator[int]:
    """Yield up to `tokens` new ids after a prompt of at least one.

    Ends after `stop` was drawn (which is not yielded). Once the text is longer than block_size the
    model sees its last block_size tokens; on_window is called when that begins. vocab_size: of the
    tokenizer; ids from there on are a model's padding and are never drawn.
    """
    ids = list(prompt)
    whole = True
    for index in range(tokens):
        if whole and len(ids) > block_size:
            whole = False
            if on_window is not None:
                on_window()
        token = sampling.draw(next_logits(executable, block_size, ids)[:vocab_size], index)
        if token == stop:
            return
        ids.append(token)
        yield token
