"""A training session: a model, its optimizer and its buffers on a device.

Knows nothing of files, schedules or loops. `step` and `evaluate` are all that a trainer needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from treadle.backends.base import Backend, Executable
from treadle.backends.cpu import physical_memory
from treadle.data.sampler import IGNORE
from treadle.errors import BackendError, OutOfMemoryError
from treadle.generate import add_generation, write_weight
from treadle.graph.op import Cost
from treadle.graph.plan import Plan, plan, unit_of
from treadle.graph.program import Memory, Program, memory
from treadle.models.base import Model, declare
from treadle.train.program import LOSS_LIMIT, OptimizerSettings, add_training
from treadle.train.ranks import Ranks
from treadle.train.signals import StopRequest

Arrays = dict[str, np.ndarray]
Batches = Iterable[tuple[np.ndarray, np.ndarray, int]]  # inputs, targets, targets that count


@dataclass(frozen=True)
class StepResult:
    """loss: mean cross-entropy of the step's targets, nats. grad_norm: before clipping.
    applied: whether the weights were updated (not when the gradient was not finite).
    spiked: whether the loss was above the limit."""

    loss: float
    grad_norm: float
    applied: bool
    spiked: bool = False

    @property
    def finite(self) -> bool:
        """Whether neither loss nor gradient was NaN or infinite."""
        return bool(np.isfinite(self.loss) and np.isfinite(self.grad_norm))


class Session:
    """See the module. batch_size: windows of an optimizer step, a multiple of grad_accum.

    precision: "fp32", or "bf16" for bfloat16 activations and matrix operands; master weights,
    moments, weight gradients, statistics and losses stay float32. recompute: what is computed again
    in the backward pass instead of being kept, "none", "gelu" or "block". ranks: the processes that
    share a step; batch_size is then that of all together, and a multiple of their number too.
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
        recompute: str = "none",
        ranks: Ranks | None = None,
    ) -> None:
        self.model, self.backend, self.optimizer = model, backend, optimizer
        self.block_size, self.seed = block_size, seed
        self.ranks, self.stop = ranks or Ranks(), StopRequest()
        self.micro_batch = batch_size // (grad_accum * self.ranks.size)
        self.grad_accum = grad_accum
        _refuse_too_large(model, self.micro_batch * block_size)
        self.precision = precision
        self.program = self._build(recompute)
        try:
            self.executable = backend.load(self.program)
        except OutOfMemoryError as error:
            fits = self._largest(error.room, recompute) * grad_accum * self.ranks.size
            hint = f"a train.batch_size of {fits} fits" if fits else "not even one window fits"
            raise OutOfMemoryError(f"{error}; {hint}", error.room) from error
        self._shared = False  # whether the other ranks have the weights and the optimizer's state
        self._sums = Sums(self.program, self.ranks) if self.ranks.size > 1 else None

    def _build(self, recompute: str, micro_batch: int | None = None) -> Program:
        sizes = micro_batch or self.micro_batch, self.block_size, self.grad_accum > 1
        return build_program(self.model, self.optimizer, *sizes, self.precision, recompute)

    def _largest(self, room: float, recompute: str) -> int:
        """The most windows of a micro-step whose program takes at most `room` bytes."""
        fits, over = 0, self.micro_batch
        while over - fits > 1:
            middle = (fits + over) // 2
            program = self._build(recompute, middle)
            if self._memory(program, self._plans(program)).total <= room:
                fits = middle
            else:
                over = middle
        return fits

    # ---------------------------------------------------------------- state

    def initialise(self) -> None:
        """Fresh weights from the seed; optimizer state zero."""
        for p in self.model.parameters():
            write_weight(self.executable, p.name, p.initial(self.seed))
        self.load_optimizer({})

    def weights(self, into: Arrays | None = None) -> Arrays:
        """Copies of the weights, float32, by name; in the arrays of an earlier call, if given."""
        return self._copies([p.name for p in self.model.parameters()], into)

    def load_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        """Set every weight."""
        for p in self.model.parameters():
            write_weight(self.executable, p.name, weights[p.name])
        self._shared = False

    def optimizer_state(self, into: Arrays | None = None) -> Arrays:
        """Copies of the optimizer's tensors, `<parameter>.<state>`; `into` as for weights."""
        return self._copies(self._state_names(), into)

    def _copies(self, names: list[str], into: Arrays | None) -> Arrays:
        if into is None:
            return {name: self.executable.read(name) for name in names}
        for name in names:
            self.executable.read_into(name, into[name])
        return into

    def load_optimizer(self, state: Mapping[str, np.ndarray]) -> None:
        """Set the optimizer's tensors; those that are absent become zeros."""
        for name in self._state_names():
            shape = self.program.buffers[name].shape
            self.executable.write(name, state.get(name, np.zeros(shape, np.float32)))
        self._shared = False

    def _state_names(self) -> list[str]:
        return [b.name for b in self.program.buffers.values() if b.role == "state"]

    # ---------------------------------------------------------------- running

    def step(
        self, step: int, inputs: np.ndarray, targets: np.ndarray, lr: float, **more: Any
    ) -> StepResult:
        """One optimizer step; arguments as those of `begin`."""
        self.begin(step, inputs, targets, lr, **more)
        return self.finish()

    def begin(
        self,
        step: int,
        inputs: np.ndarray,
        targets: np.ndarray,
        lr: float,
        apply: bool = True,
        loss_limit: float = float("inf"),
        skip_spikes: bool = True,
        updates: int | None = None,
    ) -> None:
        """Start an optimizer step, counted from 0; `finish` waits for it. inputs, targets: int32
        [batch_size, block_size].

        loss_limit: the mean loss, nats, above which the step is a spike; with skip_spikes its
        update is left out, which the device decides by itself. updates: of the weights before
        this one, which Adam's corrections count; `step` when None.
        """
        b1, b2 = self.optimizer.betas
        count = max(1, int(np.count_nonzero(targets != IGNORE)))
        power = (step if updates is None else updates) + 1
        limit = np.float32(loss_limit * count)
        scalars = {
            "lr": np.float32(lr),
            "correction1": np.float32(1.0 - b1**power),
            "correction2": np.float32(1.0 - b2**power),
            "inv_count": np.float32(1.0 / count),
            "apply": np.float32(apply),
            LOSS_LIMIT: limit if skip_spikes else np.float32(np.inf),
        }
        self._share_state()
        self.ranks.send((step, inputs, targets, scalars))
        self.ranks.in_step = True
        self._compute(step, inputs, targets, scalars)
        self.ranks.in_step = False
        self._begun = count, float(limit)

    def _compute(
        self, step: int, inputs: np.ndarray, targets: np.ndarray, scalars: Mapping[str, np.float32]
    ) -> None:
        """This rank's part of a step; the others' is added before the update."""
        run, ranks = self.executable, self.ranks
        for name, value in scalars.items():
            run.write(name, value)
        for i in range(self.grad_accum):
            start = (i * ranks.size + ranks.rank) * self.micro_batch
            rows = slice(start, start + self.micro_batch)
            run.write("tokens", inputs[rows])
            run.write("targets", targets[rows])
            run.write("random", np.array([self.seed & 0xFFFFFFFF, step, start, 0], np.uint32))
            micro = "micro_first" if i == 0 else "micro"
            last = i == self.grad_accum - 1
            if last and self._sums is not None:
                run.run(micro)
                if self._sums.add(run, self.stop.requested):
                    self.stop.requested = True
                run.run("update")
            else:
                run.run(*((micro, "update") if last else (micro,)))

    def _share_state(self) -> None:
        """Give the other ranks the weights and the optimizer's state, where they were set since."""
        if self._shared:
            return
        self._shared = True
        if self.ranks.size > 1:
            self.ranks.send(True)
            self.ranks.share([*self.weights().values(), *self.optimizer_state().values()])

    def follow(self) -> None:
        """Take part in the steps that rank 0 begins, until it ends the run."""
        while (message := self.ranks.receive()) is not None:
            if message is not True:
                self._compute(*message)
                continue
            weights, state = self.weights(), self.optimizer_state()
            self.ranks.share([*weights.values(), *state.values()])
            self.load_weights(weights)
            self.load_optimizer(state)

    def finish(self) -> StepResult:
        """The result of the step that `begin` started."""
        run, (count, limit) = self.executable, self._begun
        loss = float(run.read("loss"))
        return StepResult(loss / count, float(run.read("norm")), bool(run.read("ok")), loss > limit)

    def identity(self) -> dict[str, str]:
        """What the bits of a run depend on: its backend, and the number of ranks where several."""
        several = {"ranks": str(self.ranks.size)} if self.ranks.size > 1 else {}
        return self.backend.identity() | several

    def planned(self, recompute: str) -> tuple[Memory, Cost]:
        """Peak memory and the cost of a step, were it to recompute that; nothing is loaded."""
        program = self._build(recompute)
        plans = self._plans(program)
        return self._memory(program, plans), self._cost(plans)

    def _plans(self, program: Program) -> dict[str, Plan]:
        return {name: plan(graph, self.backend.target) for name, graph in program.graphs.items()}

    def _memory(self, program: Program, plans: dict[str, Plan]) -> Memory:
        threads = getattr(self.backend, "threads", 0)
        return memory(program, plans, threads, unit_of(self.backend.target))

    @property
    def exchange_bytes(self) -> int:
        """Memory that the sums over ranks take beside the program's."""
        return 0 if self._sums is None else self._sums.nbytes

    def cost(self) -> Cost:
        """FLOPs and bytes of this rank in one optimizer step."""
        return self._cost(self.executable.plans)

    def _cost(self, plans: Mapping[str, Plan]) -> Cost:
        graphs = ["micro_first", *["micro"] * (self.grad_accum - 1), "update"]
        costs = [plans[name].cost for name in graphs]
        return Cost(sum(c.flops for c in costs), sum(c.nbytes for c in costs))

    def evaluate(self, batches: Batches) -> float:
        """Mean cross-entropy in nats over batches; NaN for none."""
        return evaluate(self.executable, batches)


class Sums:
    """Memory for the gradients and the loss of all ranks, and their sums."""

    def __init__(self, program: Program, ranks: Ranks) -> None:
        summed = [b for b in program.buffers.values() if b.role == "grad" or b.name == "loss"]
        total, self.ranks = sum(b.size for b in summed) + 1, ranks
        self.values = np.zeros(-(-total // ranks.size) * ranks.size, np.float32)
        self.others = np.zeros((ranks.size, self.values.size // ranks.size), np.float32)
        self.parts, first = {}, 1  # element 0 counts the ranks that were asked to stop
        for b in summed:
            self.parts[b.name] = self.values[first : first + b.size].reshape(b.shape)
            first += b.size

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.others.nbytes

    def add(self, run: Executable, stop: bool) -> bool:
        """Sum `loss` and the gradients over the ranks; whether a stop was asked for on any."""
        self.values[0] = stop
        for name, part in self.parts.items():
            run.read_into(name, part)
        self.ranks.add(self.values, self.others)
        for name, part in self.parts.items():
            run.write(name, part)
        return bool(self.values[0] > 0)


def evaluate(executable: Executable, batches: Batches) -> float:
    """Mean cross-entropy in nats over batches, by the graph `evaluate`; NaN for none."""
    total, count = 0.0, 0.0
    for inputs, targets, _ in batches:
        executable.write("tokens", inputs)
        executable.write("targets", targets)
        executable.run("evaluate")
        total += float(executable.read("eval_loss"))
        count += float(executable.read("eval_count"))
    return total / count if count else float("nan")


def _refuse_too_large(model: Model, tokens: int) -> None:
    """BackendError for what no plan makes fit, before a graph is built for it."""
    count, there = model.n_parameters(), physical_memory()
    for what, needed, lower in (
        (f"weights and gradients of {count:.3g} parameters", 2 * 4 * count, "the model"),
        (f"the ids of {tokens:.3g} tokens", 2 * 4 * tokens, "train.batch_size"),
    ):
        if needed > there:
            raise BackendError(
                f"out of memory: {what} need {needed / 2**30:.3g} GiB, and the machine has "
                f"{there / 2**30:.3g}; make {lower} smaller"
            )


def build_program(
    model: Model,
    optimizer: OptimizerSettings,
    micro_batch: int,
    block_size: int,
    accumulates: bool,
    precision: str = "fp32",
    recompute: str = "none",
) -> Program:
    """The whole program of a training run."""
    program = Program()
    declare(program, model, precision)
    add_training(program, model, optimizer, micro_batch, block_size, accumulates, recompute)
    add_generation(program, model)
    return program
