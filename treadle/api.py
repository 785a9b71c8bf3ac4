"""The Python API: language models in a few lines, and compiled training steps for other models."""

from __future__ import annotations

import inspect
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, overload

import numpy as np

from treadle import backends
from treadle.config import Config, with_values
from treadle.data.corpus import Dataset, open_data
from treadle.data.sampler import Sampler, eval_windows
from treadle.data.tokenizer import Tokenizer
from treadle.errors import ConfigError, NonFiniteError, TokenizerError
from treadle.generate import (
    Decoder,
    Sampling,
    add_generation,
    start_ids,
    write_texts,
    write_weight,
)
from treadle.graph.op import Graph
from treadle.graph.program import Program
from treadle.graph.value import Value
from treadle.models.base import PRECISIONS, Model, declare
from treadle.ops.loss import mean
from treadle.train.program import (
    SCALARS,
    OptimizerSettings,
    add_evaluate,
    add_update,
    train_graph,
)
from treadle.train.report import Report
from treadle.train.schedule import learning_rate
from treadle.train.session import Batches, Session, evaluate
from treadle.train.source import given_tokenizer, open_source, save_model

PathLike = str | os.PathLike[str]
# Prompts that are read and written together: as many as a matrix product takes in one pass.
BATCH_SIZE = 8

# ---------------------------------------------------------------- language models


def load_data(path: PathLike, tokenizer: str = "auto", vocab_size: int | None = None) -> Dataset:
    """The tokens of a text file or a directory of texts, from the cache where it has them.

    tokenizer: "char", "byte", "bpe" (trained on the text, with vocab_size entries), the path of a
    tokenizer.json, or "auto", which follows the size of the text. DataError for unusable texts.
    """
    values = {"data.path": str(path), "data.tokenizer": tokenizer, "data.vocab_size": vocab_size}
    # A context of one token, because which context a model wants is not known here.
    return open_data(with_values(Config(), values | {"model.block_size": 1}))[1]


class LanguageModel:
    """A model with its weights and its tokenizer.

    weights: float32 arrays by parameter name; fresh ones from `seed` when None.
    device: "auto", "cpu", "numpy", or a GPU by its name in `treadle devices`, such as "opencl:0";
    threads: of the CPU, all physical cores when None.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer | None = None,
        weights: Mapping[str, np.ndarray] | None = None,
        seed: int = 1337,
        device: str = "auto",
        threads: int | None = None,
    ) -> None:
        self.model, self.tokenizer, self.seed = model, tokenizer, seed
        self.backend, _ = backends.select(device, threads)
        self.weights = dict(weights or {p.name: p.initial(seed) for p in model.parameters()})
        self.notes: list[str] = []
        self._decoder: Decoder | None = None
        self._decoding = (0, "")  # its batch and precision

    def __repr__(self) -> str:
        words = self.tokenizer.kind if self.tokenizer else "no"
        return (
            f"LanguageModel({self.model.architecture}, {self.model.n_parameters():,} parameters, "
            f"{words} tokenizer, {self.backend.name})"
        )

    def fit(
        self,
        data: Dataset,
        steps: int,
        batch_size: int = 12,
        lr: float = 1e-3,
        optimizer: OptimizerSettings | None = None,
        on_step: Callable[[int, float], None] | None = None,
        progress: bool = True,
    ) -> list[float]:
        """Train for `steps` optimizer steps with warmup and cosine decay to lr / 10.

        Returns the loss of every step in nats. on_step(step, loss) is called after each.
        progress: tell the loss on stderr, as `treadle train` does.
        NonFiniteError when a loss is not finite; the weights are those before that step.
        """
        if data.vocab_size > self.model.vocab_size:
            raise ConfigError(
                f"the data have {data.vocab_size} token ids, the model {self.model.vocab_size}; "
                "build it with vocab_size=data.vocab_size"
            )
        settings = optimizer or OptimizerSettings()
        block = self.model.block_size
        sampler = Sampler(data.train, block, batch_size, self.seed)
        session = Session(self.model, self.backend, settings, batch_size, block, seed=self.seed)
        session.load_weights(self.weights)
        losses: list[float] = []
        with Report(steps, stream=sys.stderr) if progress else nullcontext() as report:
            for step in range(steps):
                started = time.perf_counter()
                inputs, targets, _ = sampler.batch(step)
                rate = learning_rate(
                    step, name="cosine", lr=lr, min_lr=lr / 10,
                    warmup_steps=min(100, steps // 10), steps=steps,
                )  # fmt: skip
                result = session.step(step, inputs, targets, rate)
                if not result.applied:
                    self._take(session)
                    raise NonFiniteError(
                        f"step {step + 1}: the loss is {result.loss}; lower lr ({lr})"
                    )
                losses.append(result.loss)
                if report is not None:
                    speed = inputs.size / (time.perf_counter() - started)
                    report.step(step + 1, loss=result.loss, lr=rate, tokens_per_s=speed)
                if on_step is not None:
                    on_step(step + 1, result.loss)
        self._take(session)
        return losses

    def _take(self, session: Session) -> None:
        self.weights, self._decoder = session.weights(), None
        session.executable.close()

    def loss(
        self,
        tokens: np.ndarray,
        batch_size: int = 8,
        watch: Callable[[Batches, int], Batches] | None = None,
    ) -> float:
        """Mean cross-entropy in nats over all of tokens [N], in windows of block_size.

        watch: gets the batches and how many there are, and returns them, to show progress.
        """
        program, block = Program(), self.model.block_size
        declare(program, self.model)
        add_evaluate(program, self.model, batch_size, block)
        executable = self.backend.load(program)
        for name, array in self.weights.items():
            executable.write(name, array)
        batches: Batches = eval_windows(tokens, block, batch_size)
        if watch is not None:
            batches = watch(batches, -(-(len(tokens) - 1) // (batch_size * block)))
        value = evaluate(executable, batches)
        executable.close()
        return value

    @overload
    def generate(self, prompt: str = "", tokens: int = 200, **options: Any) -> str: ...

    @overload
    def generate(self, prompt: Sequence[str], tokens: int = 200, **options: Any) -> list[str]: ...

    def generate(
        self,
        prompt: str | Sequence[str] = "",
        tokens: int = 200,
        stop: str | Sequence[str] = (),
        precision: str = "fp32",
        batch_size: int = BATCH_SIZE,
        notice: Callable[[str], object] | None = None,
        **sampling: Any,
    ) -> str | list[str]:
        """The prompt and what the model writes after it; a list of them for several prompts.

        Each of several prompts gets the text that it gets alone, the i-th, counted from 0, with
        seed + i: equal prompts get different texts. batch_size: prompts that are computed
        together. stop, precision, notice: see stream. sampling: see generate.Sampling.
        """
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        texts: list[str] = []
        first = Sampling(**sampling)
        size = max(1, min(batch_size, len(prompts)))
        for at in range(0, len(prompts), size):
            part = prompts[at : at + size]
            drawn = [replace(first, seed=first.seed + at + i) for i in range(len(part))]
            pieces = self._write(part, tokens, drawn, stop, precision, size, notice)
            texts += ["".join(written) for written in zip(part, *pieces, strict=True)]
        return texts[0] if isinstance(prompt, str) else texts

    def stream(
        self,
        prompt: str,
        tokens: int,
        sampling: Sampling,
        notice: Callable[[str], object] | None = None,
        stop: str | Sequence[str] = (),
        precision: str = "fp32",
    ) -> Iterator[str]:
        """Text as it is written. notice gets a line when the context starts to slide.

        stop: strings before which the text ends. precision: "fp32", or "bf16" for bfloat16
        matrices, embeddings, activations and cache, which take half the memory and time.
        TokenizerError, at once, for a prompt that the tokenizer or the model cannot take.
        """
        pieces = self._write([prompt], tokens, [sampling], stop, precision, 1, notice)
        return (piece for (piece,) in pieces)

    def _write(
        self,
        prompts: Sequence[str],
        tokens: int,
        sampling: Sequence[Sampling],
        stop: str | Sequence[str],
        precision: str,
        batch: int,
        notice: Callable[[str], object] | None = None,
    ) -> Iterator[list[str]]:
        """Pieces of what follows up to `batch` prompts."""
        if precision not in PRECISIONS:
            raise ConfigError(f"precision must be {' or '.join(PRECISIONS)}, got {precision!r}")
        if self.tokenizer is None:
            raise TokenizerError(
                "this model has no tokenizer; give one with --tokenizer FILE, or --vocab and "
                "--merges"
            )
        ids = [self._ids(prompt, self.tokenizer) for prompt in prompts]
        block = self.model.block_size

        def sliding() -> None:
            if notice is not None:
                notice(f"the text is longer than the context: the last {block} tokens count")

        stops = [stop] if isinstance(stop, str) else list(stop)
        decoder = self._decoder_of(batch, precision)
        return write_texts(decoder, self.tokenizer, ids, tokens, sampling, stops, sliding)

    def _ids(self, prompt: str, tokenizer: Tokenizer) -> list[int]:
        ids = [int(i) for i in tokenizer.encode(prompt)] or start_ids(tokenizer)
        if max(ids) >= self.model.vocab_size:
            raise TokenizerError(
                f"the prompt has token id {max(ids)}, but the model's vocabulary has "
                f"{self.model.vocab_size} ids; the tokenizer belongs to another model"
            )
        return ids

    def _decoder_of(self, batch: int, precision: str) -> Decoder:
        """The decoder for so many texts at a time; the one of the last call, if it fits."""
        if self._decoder is None or self._decoding != (batch, precision):
            program = Program()
            declare(program, self.model, precision, masters=False)
            add_generation(program, self.model, batch)
            executable = self.backend.load(program)
            for name, array in self.weights.items():
                write_weight(executable, name, array)
            self._decoder = Decoder(executable, self.model.block_size)
            self._decoding = (batch, precision)
        return self._decoder

    def save(self, directory: PathLike) -> None:
        """Write a checkpoint directory that `load` and Hugging Face's tools open."""
        save_model(directory, self.model, self.weights, self.tokenizer)


def load(
    path: PathLike,
    device: str = "auto",
    threads: int | None = None,
    tokenizer: PathLike | None = None,
    vocab: PathLike | None = None,
    merges: PathLike | None = None,
) -> LanguageModel:
    """The model of a run (its best checkpoint), a checkpoint directory, a model.safetensors, a
    Hugging Face directory, `hf:NAME` on their hub, or a file of another program.

    The tokenizer is the one inside; `tokenizer`, else `vocab` and `merges`, serve where there is
    none. CheckpointError, CorruptError or TokenizerError in one line.
    """
    source = open_source(path)
    words = source.tokenizer or given_tokenizer(tokenizer, vocab, merges)
    result = LanguageModel(source.model, words, source.weights, device=device, threads=threads)
    result.notes = source.notes
    return result


# ---------------------------------------------------------------- models of one's own

LossFunction = Callable[..., Value]


@dataclass(repr=False)
class TrainingStep:
    """A compiled step: call it with the inputs by keyword, get the loss of before the update."""

    program: Program
    executable: Any
    optimizer: OptimizerSettings
    inputs: tuple[str, ...]
    params: tuple[str, ...]
    lr: float
    count: int = 0

    def __repr__(self) -> str:
        return (
            f"TrainingStep(inputs {_listed(self.inputs)}; params {_listed(self.params)}; "
            f"{self.optimizer.name}, lr {self.lr:g}, {self.count} steps done)"
        )

    def __call__(self, *positional: np.ndarray, **inputs: np.ndarray) -> float:
        """One optimizer step on `inputs`; returns the loss."""
        self._write(positional, inputs)
        run, (b1, b2) = self.executable, self.optimizer.betas
        self.count += 1
        values = (self.lr, 1 - b1**self.count, 1 - b2**self.count, 1.0, 1.0)
        for name, value in zip(SCALARS, values, strict=True):
            run.write(name, np.float32(value))
        run.run("micro_first", "update")
        return float(run.read("loss"))

    def loss(self, *positional: np.ndarray, **inputs: np.ndarray) -> float:
        """The loss on `inputs`, without an update."""
        self._write(positional, inputs)
        self.executable.run("micro_first")
        return float(self.executable.read("loss"))

    def __getitem__(self, name: str) -> np.ndarray:
        """A copy of a parameter; ConfigError where there is none of that name."""
        return self.executable.read(self._parameter(name))

    def __setitem__(self, name: str, array: np.ndarray) -> None:
        self.executable.write(self._parameter(name), array)

    def _parameter(self, name: str) -> str:
        if name not in self.params:
            raise ConfigError(f"there is no parameter {name!r}; one of {_listed(self.params)}")
        return name

    def _write(self, positional: tuple[np.ndarray, ...], inputs: Mapping[str, np.ndarray]) -> None:
        if positional:
            example = ", ".join(f"{name}=..." for name in self.inputs)
            raise ConfigError(f"inputs are given by name: step({example})")
        if set(inputs) != set(self.inputs):
            raise ConfigError(f"expected the inputs {_listed(self.inputs)}; got {_listed(inputs)}")
        for name, array in inputs.items():
            self.executable.write(name, np.asarray(array))


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"


def compile(
    fn: LossFunction,
    params: Mapping[str, np.ndarray],
    inputs: Mapping[str, tuple[int, ...]],
    optimizer: OptimizerSettings | None = None,
    lr: float = 1e-2,
    device: str = "auto",
    threads: int | None = None,
) -> TrainingStep:
    """Compile a loss function into a training step.

    fn(**params, **inputs) is called once with symbolic values and returns the loss: a value of
    shape (), or a pair (sum, count) of a loss op, of which the mean is taken. params: initial
    float32 arrays by name. inputs: shapes by name; a pair (shape, dtype) for other dtypes.
    ConfigError where fn has other arguments than these.
    """
    try:
        inspect.signature(fn).bind(**dict.fromkeys((*params, *inputs)))
    except TypeError as error:
        raise ConfigError(
            f"the loss function takes its params and inputs by name, and here: {error}; given are "
            f"{_listed((*params, *inputs))}"
        ) from None
    settings = optimizer or OptimizerSettings(weight_decay=0.0, grad_clip=0.0)
    program = Program()
    for name, array in params.items():
        program.buffer(name, np.shape(array), "float32", "weight")
    for name, shape in inputs.items():
        dtype = "float32"
        if len(shape) == 2 and isinstance(shape[1], str):
            shape, dtype = shape
        program.buffer(name, tuple(shape), dtype, "input")

    def loss(graph: Graph, seed: Value) -> Value:
        values = {n: graph.read(program.buffers[n]) for n in (*params, *inputs)}
        result = fn(**values)
        return result if isinstance(result, Value) else mean(*result)

    train_graph(program, list(params), settings, loss)
    decays = {name: np.ndim(array) >= 2 for name, array in params.items()}
    add_update(program, decays, settings)
    backend, _ = backends.select(device, threads)
    executable = backend.load(program)
    for name, array in params.items():
        executable.write(name, np.asarray(array, np.float32))
    return TrainingStep(program, executable, settings, tuple(inputs), tuple(params), lr)
