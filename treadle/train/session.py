"""A training session: a model, its optimizer and its buffers on a device.

Knows nothing of files, schedules or loops. `step` and `evaluate` are all that a trainer needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from treadle.backends.base import Backend
from treadle.data.sampler import IGNORE
from treadle.generate import add_next_token, write_weight
from treadle.graph.program import Program
from treadle.models.base import Model, declare
from treadle.train.program import OptimizerSettings, add_training


@dataclass(frozen=True)
class StepResult:
    """loss: mean cross-entropy of the step's targets, nats. grad_norm: before clipping.
    applied: whether the weights were updated (not when the gradient was not finite)."""

    loss: float
    grad_norm: float
    applied: bool


class Session:
    """See the module. batch_size: windows of an optimizer step, a multiple of grad_accum.

    precision: "fp32", or "bf16" for bfloat16 activations and matrix operands; master weights,
    moments, weight gradients, statistics and losses stay float32.
    """

    def __init__(
        self,
        model: Model,
        backend: Backend,
        optimizer: OptimizerSettings,
        batch_size: int,
        block_size: int,
        grad_accum: int = 1,
        seed: int = 0,
        precision: str = "fp32",
    ) -> None:
        self.model, self.backend, self.optimizer = model, backend, optimizer
        self.block_size, self.seed = block_size, seed
        self.micro_batch, self.grad_accum = batch_size // grad_accum, grad_accum
        self.program = build_program(
            model, optimizer, self.micro_batch, block_size, grad_accum > 1, precision
        )
        self.executable = backend.load(self.program)

    # ---------------------------------------------------------------- state

    def initialise(self) -> None:
        """Fresh weights from the seed; optimizer state zero."""
        for p in self.model.parameters():
            write_weight(self.executable, p.name, p.initial(self.seed))
        self.load_optimizer({})

    def weights(self) -> dict[str, np.ndarray]:
        """Copies of the weights, float32."""
        return {p.name: self.executable.read(p.name) for p in self.model.parameters()}

    def load_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        """Set every weight."""
        for p in self.model.parameters():
            write_weight(self.executable, p.name, weights[p.name])

    def optimizer_state(self) -> dict[str, np.ndarray]:
        """Copies of the optimizer's tensors, `<parameter>.<state>`."""
        return {name: self.executable.read(name) for name in self._state_names()}

    def load_optimizer(self, state: Mapping[str, np.ndarray]) -> None:
        """Set the optimizer's tensors; those that are absent become zeros."""
        for name in self._state_names():
            shape = self.program.buffers[name].shape
            self.executable.write(name, state.get(name, np.zeros(shape, np.float32)))

    def _state_names(self) -> list[str]:
        return [b.name for b in self.program.buffers.values() if b.role == "state"]

    # ---------------------------------------------------------------- running

    def step(
        self, step: int, inputs: np.ndarray, targets: np.ndarray, lr: float, apply: bool = True
    ) -> StepResult:
        """One optimizer step, counted from 0. inputs, targets: int32 [batch_size, block_size]."""
        run, b1, b2 = self.executable, *self.optimizer.betas
        count = max(1, int(np.count_nonzero(targets != IGNORE)))
        run.write("lr", np.float32(lr))
        run.write("correction1", np.float32(1.0 - b1 ** (step + 1)))
        run.write("correction2", np.float32(1.0 - b2 ** (step + 1)))
        run.write("inv_count", np.float32(1.0 / count))
        run.write("apply", np.float32(apply))
        for i in range(self.grad_accum):
            start = i * self.micro_batch
            rows = slice(start, start + self.micro_batch)
            run.write("tokens", inputs[rows])
            run.write("targets", targets[rows])
            run.write("random", np.array([self.seed & 0xFFFFFFFF, step, start, 0], np.uint32))
            micro = "micro_first" if i == 0 else "micro"
            run.run(*((micro, "update") if i == self.grad_accum - 1 else (micro,)))
        return StepResult(
            float(run.read("loss")) / count,
            float(run.read("norm")),
            bool(run.read("ok")),
        )

    def evaluate(self, batches: Iterable[tuple[np.ndarray, np.ndarray, int]]) -> float:
        """Mean cross-entropy in nats over batches of (inputs, targets, count); NaN for none."""
        total, count = 0.0, 0.0
        for inputs, targets, _ in batches:
            self.executable.write("tokens", inputs)
            self.executable.write("targets", targets)
            self.executable.run("evaluate")
            total += float(self.executable.read("eval_loss"))
            count += float(self.executable.read("eval_count"))
        return total / count if count else float("nan")


def build_program(
    model: Model,
    optimizer: OptimizerSettings,
    micro_batch: int,
    block_size: int,
    accumulates: bool,
    precision: str = "fp32",
) -> Program:
    """The whole program of a training run."""
    program = Program()
    declare(program, model, precision)
    add_training(program, model, optimizer, micro_batch, block_size, accumulates)
    add_next_token(program, model)
    return program
