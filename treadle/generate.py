"""Text from a model: the graphs that read and write tokens, sampling, batches, stop strings."""

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
from treadle.models.cache import START, Cache
from treadle.ops.embedding import select_row
from treadle.ops.random import philox_uniform, stream_of
from treadle.passes.fuse import fuse

# ---------------------------------------------------------------- graphs

SHORTEST = 16


def bucket_lengths(block_size: int) -> list[int]:
    """Lengths T for which there is a graph that reads a prompt: 16, 32, 64 …, and block_size."""
    lengths = []
    n = SHORTEST
    while n < block_size:
        lengths.append(n)
        n *= 2
    return [*lengths, block_size]


def add_generation(program: Program, model: Model, batch: int = 1) -> None:
    """Graphs that read tokens into a cache and leave `logits` [B, V] of the tokens that follow.

    `prefill_T` reads prompt_T [B, T], `decode` one token of each row: the same with T = 1. The
    first token of a row stands at position `start` [B]; what follows index `last` [B] is padding,
    which a causal model cannot see from there.
    """
    last = program.buffer("last", (batch,), "int32", "scalar")
    logits = program.buffer("logits", (batch, model.vocab_size), "float32", "output")
    for t in (1, *bucket_lengths(model.block_size)):
        g = program.graph(_graph(t))
        tokens = g.read(program.buffer(_prompt(t), (batch, t), "int32", "input"))
        weights = read_weights(program, g, model)
        cache = Cache(program, g, batch, model.block_size)
        hidden = select_row(model.hidden(weights, tokens, cache=cache), g.read(last))
        g.assign(logits, cast(model.logits(weights, hidden), "float32"))
        fuse(g)


def _graph(length: int) -> str:
    return "decode" if length == 1 else f"prefill_{length}"


def _prompt(length: int) -> str:
    return "token" if length == 1 else f"prompt_{length}"


def write_weight(executable: Executable, name: str, array: np.ndarray) -> None:
    """Set a weight: its float32 buffer and its bfloat16 copy, whichever the program has."""
    for buffer in (name, shadow(name)):
        if buffer in executable.program.buffers:
            executable.write(buffer, array)


# ---------------------------------------------------------------- reading


class Decoder:
    """The logits of the next token, for a batch of texts, and the cache of what was read for them.

    A text that is one token longer than what the cache holds of it costs one token. Any other is
    read anew, in one pass: a new prompt, and a window that slides, since the positions of all its
    tokens change. Make a new one when the weights have changed.
    """

    def __init__(self, executable: Executable, block_size: int) -> None:
        self.executable, self.block_size = executable, block_size
        self.batch: int = executable.program.buffers[START].shape[0]
        self._cached: list[list[int] | None] = [None] * self.batch

    def logits(self, texts: Sequence[Sequence[int] | None]) -> np.ndarray:
        """float32 [B, V] of the token that follows each text's last block_size tokens.

        texts: up to B, of one token at least. The row of a text that is None holds anything.
        """
        windows = [None if t is None else list(t[-self.block_size :]) for t in texts]
        windows += [None] * (self.batch - len(windows))
        fresh = [w for w, c in zip(windows, self._cached, strict=True) if w and w[:-1] != c]
        if fresh:
            longest = max(len(w) for w in windows if w)
            length = next(t for t in bucket_lengths(self.block_size) if t >= longest)
        else:
            length = 1
        tokens = np.zeros((self.batch, length), np.int32)
        start, last = np.zeros((2, self.batch), np.int32)
        for i, window in enumerate(windows):
            if window is None:
                continue
            start[i] = 0 if fresh else len(window) - 1
            last[i] = len(window) - 1 - start[i]
            tokens[i, : last[i] + 1] = window[start[i] :]
        run = self.executable
        run.write(_prompt(length), tokens)
        run.write(START, start)
        run.write("last", last)
        run.run(_graph(length))
        self._cached = windows
        return run.read("logits")


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

        Among equal logits lower token ids come first. ConfigError when the largest is not finite.
        """
        logits = np.asarray(logits, np.float64)
        top = np.max(logits)
        if not np.isfinite(top):
            raise ConfigError("the model's logits are not finite; its weights are damaged")
        if self.temperature == 0:
            return int(np.argmax(logits))
        ids = np.arange(len(logits))
        if 0 < self.top_k < len(logits):
            ids = _largest(logits, self.top_k)
        with np.errstate(over="ignore"):  # a tiny temperature leaves nothing but the best
            p = np.exp((logits[ids] - top) / self.temperature)
        if self.top_p < 1:
            reached = np.cumsum(np.sort(p)[::-1])
            chosen = _largest(p, int(np.searchsorted(reached, self.top_p * reached[-1])) + 1)
            ids, p = ids[chosen], p[chosen]
        # Along the ids, not from the likeliest down: which of two nearly equal logits is the
        # larger one differs from backend to backend, their sums hardly.
        cumulative = np.cumsum(p)
        element = np.array([index], np.uint64)
        seed = self.seed & 0xFFFFFFFF
        u = float(philox_uniform(seed, stream_of("sample"), 0, element)[0])
        return int(ids[np.searchsorted(cumulative, u * cumulative[-1], side="right")])


def _largest(values: np.ndarray, count: int) -> np.ndarray:
    """Indices, ascending, of the `count` largest values; the first of those that are equal."""
    if count >= len(values):
        return np.arange(len(values))
    least = np.partition(values, -count)[-count]
    above, equal = np.flatnonzero(values > least), np.flatnonzero(values == least)
    return np.sort(np.concatenate([above, equal[: count - len(above)]]))


def start_ids(tokenizer: Tokenizer) -> list[int]:
    """In place of an empty prompt: the beginning-of-text token, else a line end, else id 0."""
    if tokenizer.bos_id is not None:
        return [tokenizer.bos_id]
    try:
        return [int(i) for i in tokenizer.encode("\n")]
    except TokenizerError:
        return [0]


# ---------------------------------------------------------------- writing


class Writer:
    """Texts that are written side by side, a token of each at a time.

    prompts: of one id at least, as many as the decoder's batch or fewer. tokens: to write at most.
    sampling: of each text. stop_ids: end the text that draws one, which does not belong to it.
    vocab_size: of the tokenizer; ids from there on are a model's padding and are never drawn. Once
    a text is longer than block_size the model sees its last block_size tokens; on_window is called
    when that begins.
    What is written after a prompt does not depend on the prompts beside it.
    """

    def __init__(
        self,
        decoder: Decoder,
        prompts: Sequence[Sequence[int]],
        tokens: int,
        sampling: Sequence[Sampling],
        stop_ids: Sequence[int | None] = (),
        vocab_size: int | None = None,
        on_window: Callable[[], None] | None = None,
    ) -> None:
        self.decoder, self.tokens, self.sampling = decoder, tokens, sampling
        self.stop_ids, self.vocab_size, self.on_window = stop_ids, vocab_size, on_window
        self._texts: list[list[int] | None] = [list(prompt) for prompt in prompts]

    def end(self, row: int) -> None:
        """Write no more of a text."""
        self._texts[row] = None

    def __iter__(self) -> Iterator[list[int | None]]:
        """The next id of each text, until all have ended; None for those that have."""
        for index in range(self.tokens):
            longest = max((len(text) for text in self._texts if text), default=0)
            if longest == 0:
                return
            if longest > self.decoder.block_size and self.on_window is not None:
                self.on_window()
                self.on_window = None
            logits = self.decoder.logits(self._texts)
            step: list[int | None] = []
            for i, text in enumerate(self._texts):
                token = None
                if text is not None:
                    token = self.sampling[i].draw(logits[i, : self.vocab_size], index)
                    if token in self.stop_ids:
                        self.end(i)
                        token = None
                    else:
                        text.append(token)
                step.append(token)
            if any(token is not None for token in step):
                yield step


class StopStrings:
    """Cuts a text that comes in pieces before the first of some strings.

    ConfigError for an empty one.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        if "" in strings:
            raise ConfigError("a stop string must not be empty")
        self.strings = tuple(strings)
        self.met = False
        self._held = ""

    def push(self, piece: str) -> str:
        """What can be shown now: all but what may be the beginning of a stop string."""
        text = self._held + piece
        found = [at for at in map(text.find, self.strings) if at >= 0]
        if found:
            self.met, self._held = True, ""
            return text[: min(found)]
        held = max((_overlap(text, string) for string in self.strings), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """What was held back, where no stop string came of it."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, string: str) -> int:
    """The length of the longest beginning of `string` that `text` ends with."""
    most = min(len(text), len(string) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(string[:n])), 0)


def write_texts(
    decoder: Decoder,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    sampling: Sequence[Sampling],
    stop: Sequence[str] = (),
    on_window: Callable[[], None] | None = None,
) -> Iterator[list[str]]:
    """What follows each prompt, in pieces of whole characters: one of each text at a time.

    A text ends with the tokenizer's end-of-text token or before a `stop` string. See Writer.
    """
    ends, size = (tokenizer.eos_id,), tokenizer.vocab_size
    writer = Writer(decoder, prompts, tokens, sampling, ends, size, on_window)
    streams = [tokenizer.stream() for _ in prompts]
    stops = [StopStrings(stop) for _ in prompts]
    for step in writer:
        pieces = [""] * len(step)
        for i, token in enumerate(step):
            if token is not None:
                pieces[i] = stops[i].push(streams[i].push(token))
                if stops[i].met:
                    writer.end(i)
        if any(pieces):
            yield pieces
    rest = [
        "" if cut.met else cut.push(stream.finish()) + cut.finish()
        for cut, stream in zip(stops, streams, strict=True)
    ]
    if any(rest):
        yield rest
