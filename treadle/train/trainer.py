"""The training loop: step, log, evaluate, sample, checkpoint; read it from top to bottom."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from treadle.config import Config, to_dict
from treadle.data.corpus import Dataset
from treadle.data.sampler import Sampler, eval_windows
from treadle.errors import NonFiniteError, TrainingError, TreadleError
from treadle.generate import Decoder, Sampling, start_ids, write_texts
from treadle.train.checkpoint import Checkpoint
from treadle.train.metrics import MetricsWriter
from treadle.train.registry import Registry
from treadle.train.report import Report
from treadle.train.samples import append_sample, cut_samples
from treadle.train.saver import Saver
from treadle.train.schedule import learning_rate
from treadle.train.session import Session, StepResult
from treadle.train.signals import StopRequest
from treadle.train.spikes import Spikes
from treadle.train.tensorboard import EventFiles

Batch = tuple[np.ndarray, np.ndarray, int]

SAMPLE_TOKENS = 120
REPORTED = ("loss", "lr", "tokens_per_s", "val_loss", "grad_norm", "skipped")
MAX_SKIPPED_IN_A_ROW = 20  # a loss that is NaN for so long does not become finite by itself


@dataclass
class Outcome:
    """How a run ended. Losses in nats per token; val_loss: the last one that was evaluated."""

    step: int
    finished: bool
    checkpoint: Path | None = None
    train_loss: float | None = None
    val_loss: float | None = None


class Trainer:
    """Runs `session` from its current step to config.train.steps.

    Everything written goes to run_dir. `stop` is asked after every step and within evaluations.
    """

    def __init__(
        self,
        config: Config,
        dataset: Dataset,
        session: Session,
        run_dir: Path,
        report: Report,
        stop: StopRequest,
    ) -> None:
        self.config, self.dataset, self.session = config, dataset, session
        self.run_dir, self.report, self.stop = run_dir, report, stop
        session.stop = stop  # of another rank, too
        train, block = config.train, session.block_size
        assert train.batch_size is not None and train.steps is not None
        self.batch_size, self.steps = train.batch_size, train.steps
        self.sampler = Sampler(dataset.train, block, self.batch_size, train.seed)
        self.registry = Registry(run_dir)
        self.metrics = MetricsWriter(run_dir)
        self.events = EventFiles(run_dir) if train.tensorboard else None
        self.saver = Saver(session, self.registry, dataset.tokenizer, config.checkpoint)
        self.spikes = Spikes(train.spike_window, train.spike_zscore)
        self.has_validation = len(dataset.val) >= 2
        self.step = 0
        self.line: dict[str, Any] | None = None  # the last step's metrics, not yet written
        self.due: dict[str, Any] | None = None  # those that are written beside the next step
        self.drawn: tuple[int, Batch] | None = None  # a step, and its batch
        self.val_loss: float | None = None  # of this step, where it was evaluated
        self.rank_loss: float | None = None  # the same over eval_batches, to compare checkpoints
        self.outcome = Outcome(0, False)
        self.saved = -1  # the step of the last checkpoint

    # ---------------------------------------------------------------- state

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint: weights, optimizer, step, and the unwritten metrics line."""
        assert checkpoint.state is not None and checkpoint.optimizer is not None
        self.session.load_weights(self.session.model.from_hf(checkpoint.tensors))
        self.session.load_optimizer(checkpoint.optimizer)
        self.step = int(checkpoint.state["step"])
        self.line = checkpoint.state.get("line")
        self.val_loss = self.rank_loss = checkpoint.state.get("val_loss")
        self.outcome.train_loss = checkpoint.state.get("train_loss")
        self.spikes.restore(checkpoint.state.get("spikes"))
        self.metrics.truncate_to(self.step - 1 if self.line else self.step)
        cut_samples(self.run_dir, self.step)

    def save(self) -> Path:
        """Begin to write the checkpoint of this step; see Saver for when its errors are raised."""
        self._write_due()
        state = {
            "step": self.step,
            "train_loss": self.outcome.train_loss,
            "val_loss": self.rank_loss,
            "config": to_dict(self.config),
            "data": self.dataset.digest(),
            "identity": self.session.identity(),
            "choices": self.session.backend.choices,
            "line": self.line,
            "spikes": self.spikes.state(),
        }
        self.outcome.checkpoint, self.saved = self.saver.save(state), self.step
        return self.outcome.checkpoint

    # ---------------------------------------------------------------- the loop

    def run(self, run_steps: int | None = None) -> Outcome:
        """Train to the end, or for `run_steps` more steps. Always leaves a checkpoint behind.

        NonFiniteError when a loss or gradient is not finite, and TrainingError when a loss spikes,
        where the configuration says so: the weights before that step are saved first, since the
        device did not apply it.
        """
        end = self.steps if run_steps is None else min(self.steps, self.step + run_steps)
        began = self.step
        with self.saver, self.metrics, self.events or contextlib.nullcontext():
            if self.line is not None:
                self._finish_step()
            while self.step < end and not self.stop.requested:
                self._one_step()
                self._finish_step()
                self.saver.poll()
            self._write_due()
            if self.saved != self.step and (self.step > began or not self.registry.entries):
                self.save()
        self.outcome.step = self.step
        self.outcome.finished = self.step >= self.steps and self.line is None
        return self.outcome

    def _finish_step(self) -> None:
        (self._last if self.step == self.steps else self._after_step)()

    def _one_step(self) -> None:
        started = time.perf_counter()
        inputs, targets, epoch = self._batch(self.step)
        rate, spikes = self._rate(), self.spikes
        self.session.begin(
            self.step, inputs, targets, rate,
            loss_limit=spikes.limit(),
            skip_spikes=self.config.train.on_spike != "go_on",
            updates=self.step - spikes.skipped,
        )  # fmt: skip
        # While the device is at it: the line of the step before, and the next batch.
        self._write_due()
        self.drawn = self.step + 1, self.sampler.batch(self.step + 1)
        result = self.session.finish()
        seconds = time.perf_counter() - started
        spike = spikes.zscore(result.loss) if result.spiked and result.finite else None
        if spike is not None or not result.applied:
            self._judge(result, spike)
        if result.finite:
            spikes.observe(result.loss)
            self.outcome.train_loss = result.loss
        spikes.skipped += not result.applied
        spikes.in_a_row = 0 if result.finite else spikes.in_a_row + 1
        self.step += 1
        self.val_loss = self.rank_loss = None
        self.line = {
            "step": self.step,
            "epoch": epoch,
            "loss": _finite(result.loss),
            "lr": rate,
            "grad_norm": _finite(result.grad_norm),
            "tokens_per_s": inputs.size / seconds,
            "step_ms": 1000 * seconds,
            "spike": spike,
            "skipped": None if result.applied else spikes.skipped,
        }

    def _batch(self, step: int) -> Batch:
        """Inputs, targets and the epoch of a step, drawn beside the step before where there was
        one."""
        if self.drawn is not None and self.drawn[0] == step:
            return self.drawn[1]
        return self.sampler.batch(step)

    def _rate(self) -> float:
        schedule, lr = self.config.schedule, self.config.optimizer.lr
        assert lr is not None and schedule.min_lr is not None
        assert schedule.warmup_steps is not None
        return learning_rate(
            self.step,
            name=schedule.name,
            lr=lr,
            min_lr=schedule.min_lr,
            warmup_steps=schedule.warmup_steps,
            steps=self.steps,
        )

    def _judge(self, result: StepResult, spike: float | None) -> None:
        """Name a spike or what is not finite, and end the run where the configuration says so."""
        train, step = self.config.train, self.step + 1
        if spike is None:
            name, value = "the loss", result.loss
            if math.isfinite(value):
                name, value = "the norm of the gradient", result.grad_norm
            if train.on_nonfinite == "stop" or self.spikes.in_a_row >= MAX_SKIPPED_IN_A_ROW:
                self._not_finite(step, f"{name} is {value}")
            what, action = f"{name} is {value}", "skip"
        else:
            what = (
                f"the loss {result.loss:.4f} is {spike:.1f} standard deviations above the mean of "
                f"the {train.spike_window} before it"
            )
            action = train.on_spike
        if action == "stop":
            path = self._save_now()
            raise TrainingError(
                f"step {step}: {what}; the weights before it are in {path}; go on past it with "
                "--set train.on_spike=skip, or lower optimizer.lr in another run"
            )
        left_out = f"; its update is left out ({self.spikes.skipped + 1} so far)"
        self.report.say(f"step {step}: {what}{left_out if action == 'skip' else ''}")

    def _after_step(self) -> None:
        """Evaluate, log, sample and checkpoint as far as they are due at this step."""
        every, batches = self.config.train.eval_every, self.config.train.eval_batches
        if every and self.step % every == 0:
            if not self._evaluate(batches):
                return  # the line stays with the checkpoint and is evaluated on resume
            self.rank_loss = self.val_loss
        self._finish_line()
        if self.config.train.sample_every and self.step % self.config.train.sample_every == 0:
            self._write_due()
            self._sample()
        if self.config.checkpoint.every and self.step % self.config.checkpoint.every == 0:
            self.save()

    def _last(self) -> None:
        """The end of a run. The checkpoint comes first, so that nothing after it can lose it.

        The loss over the whole split is reported; the best checkpoint is chosen among losses over
        the same eval_batches.
        """
        self._save_now()
        batches = self.config.train.eval_batches
        if batches is not None and self._evaluate(batches):
            self.rank_loss = self.val_loss
        if not self._evaluate(None):
            return
        if batches is None:
            self.rank_loss = self.val_loss
        self._finish_line()
        self.save()
        if self.config.train.sample_every:
            self._sample()

    def _finish_line(self) -> None:
        """The step's line is complete, and is written when there is nothing else to wait for."""
        assert self.line is not None
        self.due, self.line = self.line | {"val_loss": self.val_loss}, None

    def _write_due(self) -> None:
        line, self.due = self.due, None
        if line is None:
            return
        self.metrics.write(**line)
        shown: dict[str, Any] = {name: line.get(name) for name in REPORTED}
        self.report.step(line["step"], **shown)
        if self.events is not None:
            self.events.scalars(line)

    def _save_now(self) -> Path:
        """The checkpoint of this step, on the disk."""
        path = self.save()
        self.saver.finish()
        return path

    def _not_finite(self, step: int, what: str) -> NoReturn:
        """End the run; an update that is not finite was not applied, so the weights are saved."""
        path = self._save_now()
        raise NonFiniteError(
            f"step {step}: {what}; the last finite weights are in {path}; lower optimizer.lr (now "
            f"{self.config.optimizer.lr:g}) or optimizer.grad_clip, and start another run with "
            "--init-from an earlier checkpoint"
        )

    # ---------------------------------------------------------------- evaluation and samples

    def _evaluate(self, batches: int | None) -> bool:
        """Take the validation loss over the first `batches` batches, all when None.

        False when a stop was asked for meanwhile; there is no loss then. Nor is there one without
        a validation split.
        """
        if not self.has_validation:
            return True
        session = self.session
        windows = eval_windows(self.dataset.val, session.block_size, session.micro_batch)
        micro_batches = (
            None if batches is None else batches * (self.batch_size // session.micro_batch)
        )
        loss = session.evaluate(self._until_stop(islice(windows, micro_batches)))
        if self.stop.requested:
            return False
        if not math.isfinite(loss):
            self._not_finite(self.step, f"the validation loss is {loss}")
        self.val_loss = self.outcome.val_loss = loss
        return True

    def _until_stop(
        self, batches: Iterator[tuple[np.ndarray, np.ndarray, int]]
    ) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
        for batch in batches:
            if self.stop.requested:
                return
            yield batch

    def _sample(self) -> None:
        """Append a sample to samples.txt and show it. A sample that fails never ends a run."""
        tokenizer = self.dataset.tokenizer
        if tokenizer is None:
            return
        try:
            text = self.sample_text()
            append_sample(self.run_dir, self.step, text)
        except (TreadleError, OSError) as error:
            self.report.say(f"no sample at step {self.step}: {error}")
            return
        self.report.sample(self.step, text)
        if self.events is not None:
            self.events.text(self.step, text)

    def sample_text(self, tokens: int = SAMPLE_TOKENS) -> str:
        """A text from the current weights; repeatable by step."""
        tokenizer = self.dataset.tokenizer
        assert tokenizer is not None
        decoder = Decoder(self.session.executable, self.session.model.block_size)
        sampling = Sampling(seed=self.config.train.seed + self.step)
        pieces = write_texts(decoder, tokenizer, [start_ids(tokenizer)], tokens, [sampling])
        return "".join(text for (text,) in pieces)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
