"""A training session on trial: what `plan` and `profile` measure. It writes no run."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median

import numpy as np

from treadle.config import Config, to_dict
from treadle.data.corpus import Dataset
from treadle.data.sampler import Sampler, eval_windows
from treadle.errors import ConfigError
from treadle.train.run import build_model, make_session, resolve, select_backend
from treadle.train.session import Session
from treadle.train.source import adopt, open_source

# What decides a step's work, and so has to be given where no data say it.
VOCAB = "model.vocab_size"  # the one of them that has no flag
SIZES = (
    VOCAB,
    "model.n_layer",
    "model.n_head",
    "model.n_embd",
    "model.block_size",
    "train.batch_size",
)
RANDOM_WINDOWS = 64


@dataclass
class Trial:
    """A session with fresh weights and batches to train on; `dataset` is None for random ones."""

    config: Config
    session: Session
    why: str  # this device
    dataset: Dataset | None
    sampler: Sampler
    steps_done: int = 0

    def step(self) -> float:
        """Seconds of one training step. Its learning rate is 0, so the weights stay as they are."""
        inputs, targets, _ = self.sampler.batch(self.steps_done)
        start = time.perf_counter()
        self.session.step(self.steps_done, inputs, targets, lr=0.0)
        self.steps_done += 1
        return time.perf_counter() - start

    def measure(self, steps: int, at_most: float = 20.0) -> float:
        """Median seconds of up to `steps` steps, fewer when they take more than `at_most` seconds.

        One step comes before them, because the first use of memory is slow.
        """
        self.step()
        times = [self.step()]
        while len(times) < steps and sum(times) < at_most:
            times.append(self.step())
        return median(times)

    def evaluation(self) -> tuple[float, int]:
        """Seconds of one batch of an evaluation, and batches in the validation split."""
        if self.dataset is None or len(self.dataset.val) < 2:
            return 0.0, 0
        batch = self.session.micro_batch, self.session.block_size
        windows = eval_windows(self.dataset.val, batch[1], batch[0])
        start = time.perf_counter()
        self.session.evaluate([next(windows)])
        return time.perf_counter() - start, -(-(len(self.dataset.val) - 1) // (batch[0] * batch[1]))

    def graphs(self) -> dict[str, int]:
        """The graphs of a step and how often each runs in it."""
        micro = self.session.grad_accum - 1
        return {"micro_first": 1} | ({"micro": micro} if micro else {}) | {"update": 1}

    @property
    def tokens(self) -> int:
        """Tokens a step."""
        return self.sampler.batch_size * self.sampler.block_size

    def close(self) -> None:
        """Give the memory back."""
        self.session.executable.close()


def open_trial(config: Config) -> Trial:
    """A session as the configuration describes it, on its data, or on random tokens without any.

    ConfigError where there are neither data nor all of the sizes.
    """
    dataset = None
    if config.data.path is not None:
        config, dataset, _ = resolve(config)
    else:
        if config.train.init_from is not None:
            config = adopt(config, open_source(config.train.init_from))
        sections = to_dict(config)
        missing = [key for key in SIZES if sections[key.split(".")[0]][key.split(".")[1]] is None]
        if missing:
            needed = ", ".join(missing).replace(VOCAB, f"{VOCAB} (--set {VOCAB}=65)")
            raise ConfigError(f"give a text with --data; without one, these are needed: {needed}")
    model, train = build_model(config), config.train
    assert train.batch_size is not None
    backend, why = select_backend(config)
    session = make_session(config, model, backend)
    session.initialise()
    if dataset is not None:
        tokens = dataset.train
    else:
        length = RANDOM_WINDOWS * config.window + 1
        tokens = np.random.default_rng(train.seed).integers(0, model.vocab_size, length, np.int32)
    sampler = Sampler(tokens, config.window, train.batch_size, train.seed)
    return Trial(config, session, why, dataset, sampler)
