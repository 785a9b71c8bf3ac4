"""The training loop: step, log, evaluate, sample, checkpoint; read it from top to bottom."""

from __future__ import annotations

import math
import re
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
from treadle.errors import NonFiniteError, TreadleError
from treadle.files import write_atomic
from treadle.generate import Sampling, generate_ids, start_ids
from treadle.train.checkpoint import Checkpoint, save_checkpoint
from treadle.train.metrics import MetricsWriter
from treadle.train.registry import Registry
from treadle.train.report import Report
from treadle.train.schedule import learning_rate
from treadle.train.session import Session
from treadle.train.signals import StopRequest

SAMPLE_TOKENS = 120
SAMPLES_NAME = "samples.txt"


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
        train, block = config.train, session.block_size
        assert train.batch_size is not None and train.steps is not None
        self.batch_size, self.steps = train.batch_size, train.steps
        self.sampler = Sampler(dataset.train, block, self.batch_size, train.seed)
        self.registry = Registry(run_dir)
        self.metrics = MetricsWriter(run_dir)
        self.has_validation = len(dataset.val) >= 2
        self.step = 0
        self.line: dict[str, Any] | None = None  # the last step's metrics, not yet written
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
        self.metrics.truncate_to(self.step - 1 if self.line else self.step)
        self._cut_samples()

    def _cut_samples(self) -> None:
        """Drop the samples of steps that are run again."""
        path = self.run_dir / SAMPLES_NAME
        if path.exists():
            text = path.read_text(encoding="utf-8")
            blocks = re.split(r"(?m)^(?=--- step \d+$)", text)
            kept = "".join(b for b in blocks if not b or int(b.split()[2]) <= self.step)
            write_atomic(path, kept.encode())

    def save(self) -> Path:
        """Write the checkpoint of this step; every file synced before it gets its name.

        NonFiniteError when a weight is NaN or infinite; nothing is written then.
        """
        path = self.registry.path_for(self.step)
        model, tokenizer = self.session.model, self.dataset.tokenizer
        eos = tokenizer.eos_id if tokenizer else None
        try:
            save_checkpoint(
                path,
                config=model.hf_config(eos),
                tensors=model.to_hf(self.session.weights()),
                optimizer=self.session.optimizer_state(),
                tokenizer_json=tokenizer.to_json() if tokenizer else None,
                tokenizer_config=tokenizer.hf_config(model.block_size) if tokenizer else None,
                state={
                    "step": self.step,
                    "train_loss": self.outcome.train_loss,
                    "val_loss": self.rank_loss,
                    "config": to_dict(self.config),
                    "data": self.dataset.digest(),
                    "identity": self.session.backend.identity(),
                    "line": self.line,
                },
            )
        except NonFiniteError as error:
            raise NonFiniteError(f"step {self.step}: {error}") from None
        self.registry.add(self.step, keep=self.config.checkpoint.keep)
        self.outcome.checkpoint, self.saved = path, self.step
        return path

    # ---------------------------------------------------------------- the loop

    def run(self, run_steps: int | None = None) -> Outcome:
        """Train to the end, or for `run_steps` more steps. Always leaves a checkpoint behind.

        NonFiniteError when a loss or gradient is not finite: the weights before that step are
        saved first, since the device did not apply it.
        """
        end = self.steps if run_steps is None else min(self.steps, self.step + run_steps)
        began = self.step
        with self.metrics:
            if self.line is not None:
                self._finish_step()
            while self.step < end and not self.stop.requested:
                self._one_step()
                self._finish_step()
            if self.saved != self.step and (self.step > began or not self.registry.entries):
                self.save()
        self.outcome.step = self.step
        self.outcome.finished = self.step >= self.steps and self.line is None
        return self.outcome

    def _finish_step(self) -> None:
        (self._last if self.step == self.steps else self._after_step)()

    def _one_step(self) -> None:
        started = time.perf_counter()
        inputs, targets, epoch = self.sampler.batch(self.step)
        schedule, lr = self.config.schedule, self.config.optimizer.lr
        assert lr is not None and schedule.min_lr is not None
        assert schedule.warmup_steps is not None
        rate = learning_rate(
            self.step,
            name=schedule.name,
            lr=lr,
            min_lr=schedule.min_lr,
            warmup_steps=schedule.warmup_steps,
            steps=self.steps,
        )
        result = self.session.step(self.step, inputs, targets, rate)
        seconds = time.perf_counter() - started
        if not math.isfinite(result.loss):
            self._not_finite(self.step + 1, f"the loss is {result.loss}")
        if not result.applied:
            self._not_finite(self.step + 1, f"the norm of the gradient is {result.grad_norm}")
        self.step += 1
        self.val_loss = self.rank_loss = None
        self.outcome.train_loss = result.loss
        self.line = {
            "step": self.step,
            "epoch": epoch,
            "loss": result.loss,
            "lr": rate,
            "grad_norm": result.grad_norm,
            "tokens_per_s": inputs.size / seconds,
            "step_ms": 1000 * seconds,
        }

    def _after_step(self) -> None:
        """Evaluate, log, sample and checkpoint as far as they are due at this step."""
        every, batches = self.config.train.eval_every, self.config.train.eval_batches
        if every and self.step % every == 0:
            if not self._evaluate(batches):
                return  # the line stays with the checkpoint and is evaluated on resume
            self.rank_loss = self.val_loss
        self._write_line()
        if self.config.train.sample_every and self.step % self.config.train.sample_every == 0:
            self._sample()
        if self.config.checkpoint.every and self.step % self.config.checkpoint.every == 0:
            self.save()

    def _last(self) -> None:
        """The end of a run. The checkpoint comes first, so that nothing after it can lose it.

        The loss over the whole split is reported; the best checkpoint is chosen among losses over
        the same eval_batches.
        """
        self.save()
        batches = self.config.train.eval_batches
        if batches is not None and self._evaluate(batches):
            self.rank_loss = self.val_loss
        if not self._evaluate(None):
            return
        if batches is None:
            self.rank_loss = self.val_loss
        self._write_line()
        self.save()
        if self.config.train.sample_every:
            self._sample()

    def _write_line(self) -> None:
        assert self.line is not None
        line, self.line = self.line, None
        self.metrics.write(**line, val_loss=self.val_loss)
        self.report.step(
            self.step,
            loss=line["loss"],
            lr=line["lr"],
            tokens_per_s=line["tokens_per_s"],
            val_loss=self.val_loss,
        )

    def _not_finite(self, step: int, what: str) -> NoReturn:
        """End the run; an update that is not finite was not applied, so the weights are saved."""
        path = self.save()
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
        micro_batches = None if batches is None else batches * session.grad_accum
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
            with (self.run_dir / SAMPLES_NAME).open("a", encoding="utf-8", newline="\n") as file:
                file.write(f"--- step {self.step}\n{text}\n")
        except (TreadleError, OSError) as error:
            self.report.say(f"no sample at step {self.step}: {error}")
            return
        self.report.say(f"sample at step {self.step}:\n{text}")

    def sample_text(self, tokens: int = SAMPLE_TOKENS) -> str:
        """A text from the current weights; repeatable by step."""
        tokenizer = self.dataset.tokenizer
        assert tokenizer is not None
        prompt = start_ids(tokenizer)
        session = self.session
        ids = generate_ids(
            session.executable,
            session.model.block_size,
            prompt,
            tokens,
            Sampling(seed=self.config.train.seed + self.step),
            stop=tokenizer.eos_id,
            vocab_size=tokenizer.vocab_size,
        )
        return tokenizer.decode(list(ids))
