"""Saving beside the training: a step waits for a copy in memory, never for a disk."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import TracebackType
from typing import Any

from treadle.config import CheckpointConfig
from treadle.data.tokenizer import Tokenizer
from treadle.errors import NonFiniteError
from treadle.graph.program import Program
from treadle.train.registry import Registry
from treadle.train.session import Session
from treadle.train.source import save_model


def snapshot_bytes(program: Program) -> int:
    """The memory of a Saver's copy: the weights and the optimizer's state of a program."""
    return sum(b.nbytes for b in program.buffers.values() if b.role in ("weight", "state"))


class Saver:
    """Writes the checkpoints of a run, one at a time, in a thread of its own.

    `save` copies weights and optimizer state into memory that is laid out once, and returns; the
    files are those that `save_checkpoint` writes for the same state. A save that fails raises in
    the next `poll`, `save` or `finish`: NonFiniteError, with the step, where a weight is NaN or
    infinite (nothing is written then), and CheckpointError where the files cannot be written.
    Leaving the context waits for the save in flight.
    """

    def __init__(
        self,
        session: Session,
        registry: Registry,
        tokenizer: Tokenizer | None,
        settings: CheckpointConfig,
    ) -> None:
        self.session, self.registry = session, registry
        self.tokenizer, self.settings = tokenizer, settings
        self._weights, self._optimizer = session.weights(), session.optimizer_state()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="treadle-saver")
        self._in_flight: Future[None] | None = None

    def save(self, state: Mapping[str, Any]) -> Path:
        """Begin to write the checkpoint of state["step"], which is not changed any more; returns
        its path. Waits for the one before."""
        self.finish()
        self.session.weights(self._weights)
        self.session.optimizer_state(self._optimizer)
        self._in_flight = self._worker.submit(self._write, state)
        return self.registry.path_for(state["step"])

    def poll(self) -> None:
        """Raise the error of the last save, if it has failed by now; never waits."""
        if self._in_flight is not None and self._in_flight.done():
            self.finish()

    def finish(self) -> None:
        """Wait until the save in flight is on the disk."""
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is not None:
            in_flight.result()

    def _write(self, state: Mapping[str, Any]) -> None:
        step, model, tokenizer = state["step"], self.session.model, self.tokenizer
        try:
            save_model(
                self.registry.path_for(step),
                model,
                self._weights,
                tokenizer,
                self._optimizer,
                state,
            )
        except NonFiniteError as error:
            raise NonFiniteError(f"step {step}: {error}") from None
        self.registry.add(step, keep=self.settings.keep, keep_every=self.settings.keep_every)

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self.finish()
            elif self._in_flight is not None:
                wait([self._in_flight])  # the error that ends the run is the one to tell
        finally:
            self._worker.shutdown()
