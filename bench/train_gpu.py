"""A training step on a GPU: CUDA against PyTorch and llm.c, OpenCL against tinygrad.

    python bench/train_gpu.py [PRESET ...] --device cuda|opencl[:N|:NAME]
                              [--precision fp32|bf16] [--llmc PATH] [--peak-fp32 GFLOPS]
                              [--peak-bf16 GFLOPS] [--bandwidth GB/S] [--json FILE]

A step is forward, backward, clipping by the global norm, AdamW, and loss and norm on the host. All
contestants start from the same weights and see the same batches; the losses of the first steps must
agree with ours before anything is measured. Each lives in a process of its own, and they take
turns, as in train_cpu.py. On CUDA we run in both modes, deterministic and fast; PyTorch runs eager,
compiled, and compiled with its CUDA graphs (reduce-overhead), with its fused AdamW and, in bf16,
autocast. tinygrad runs its whole step through its JIT.

--llmc names a built train_gpt2cu of llm.c: it takes part in 124m-gpu in bf16, in its own folder,
where it expects its tokens. It has weights and batches of its own, its losses are not compared, and
its options are its defaults.

MFU is llm.c's: (6 N + 6 L C T) FLOP a token, over the declared peak. memory is the peak on the
device: ours as planned, PyTorch's as its allocator counts it.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import re
import subprocess
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import common
from common import PRESETS, Preset
from train_cpu import BATCHES, LEARNING_RATE, OPTIMIZER, SEED, Step, batches
from treadle.train.session import Session

# Steps that are checked and not measured; tinygrad takes seconds for one of a large model.
CHECK_STEPS = {"cuda": 20, "opencl": 5}
# How far the losses of the first steps may be from ours, relatively.
TOLERANCE = {"fp32": 2e-3, "bf16": 2e-2}
LLMC_PRESET = "124m-gpu"
# Above so many parameters LEARNING_RATE without a warm-up lets rounding errors grow from step to
# step, whoever trains; the check compares implementations, and takes less.
LARGE, LARGE_RATE = 200e6, 1e-4


def learning_rate(preset: Preset) -> float:
    """The rate of a preset's steps."""
    return LARGE_RATE if preset.model.n_parameters() > LARGE else LEARNING_RATE


class Stepper:
    """Takes a step by its number; loss, and norm of the gradient before clipping."""

    def __call__(self, i: int) -> tuple[float, float]:
        raise NotImplementedError

    def peak_bytes(self) -> int | None:
        """Peak memory on the device."""
        return None


class Ours(Stepper):
    """Treadle."""

    def __init__(self, preset: Preset, precision: str, device: str, fast: bool) -> None:
        from treadle.backends import select

        if device.startswith("cuda"):
            from treadle.backends.cuda import CudaBackend

            backend: Any = CudaBackend(device, deterministic=not fast)
        else:
            backend, _ = select(device)
        self.session = Session(
            *(preset.model, backend, OPTIMIZER, preset.batch, preset.time),
            seed=SEED,
            precision=precision,
        )
        self.session.initialise()
        self.data, self.rate = batches(preset), learning_rate(preset)

    def __call__(self, i: int) -> tuple[float, float]:
        result = self.session.step(i, *self.data[i % BATCHES], self.rate)
        return result.loss, result.grad_norm

    def peak_bytes(self) -> int | None:
        return self.session.executable.memory().total


class Torch(Stepper):
    """PyTorch. mode: of torch.compile; None for eager."""

    def __init__(self, preset: Preset, precision: str, mode: str | None) -> None:
        import torch

        from torch_gpt2 import GPT2

        self.torch, self.precision = torch, precision
        torch.set_float32_matmul_precision("highest")
        self.model = GPT2(preset.model)
        parameters = {p.name: p for p in preset.model.parameters()}
        named = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, tensor in named.items():
                tensor.copy_(torch.from_numpy(parameters[name].initial(SEED)))
        self.model.cuda()
        groups = [
            {
                "params": [t for name, t in named.items() if parameters[name].decays == decays],
                "weight_decay": OPTIMIZER.weight_decay if decays else 0.0,
            }
            for decays in (True, False)
        ]
        self.optimizer = torch.optim.AdamW(
            groups, learning_rate(preset), OPTIMIZER.betas, OPTIMIZER.eps, fused=True
        )
        self.forward = self.model if mode is None else torch.compile(self.model, mode=mode)
        self.data = [
            tuple(torch.from_numpy(x).long().cuda() for x in pair) for pair in batches(preset)
        ]

    def __call__(self, i: int) -> tuple[float, float]:
        torch = self.torch
        with torch.autocast("cuda", torch.bfloat16, enabled=self.precision == "bf16"):
            loss = self.forward(*self.data[i % BATCHES])
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), OPTIMIZER.grad_clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item(), norm.item()

    def peak_bytes(self) -> int | None:
        return int(self.torch.cuda.max_memory_allocated())


class Tinygrad(Stepper):
    """tinygrad on its OpenCL device."""

    def __init__(self, preset: Preset) -> None:
        os.environ["DEV"] = "CL"
        from tinygrad import Context, Tensor, TinyJit
        from tinygrad.nn.optim import AdamW, OptimizerGroup

        from tinygrad_gpt2 import GPT2

        self.context = Context
        parameters = preset.model.parameters()
        model = GPT2(preset.model, {p.name: p.initial(SEED) for p in parameters})
        optimizers = [
            AdamW(
                [model.weights[p.name] for p in parameters if p.decays == decays],
                *(learning_rate(preset), *OPTIMIZER.betas, OPTIMIZER.eps),
                OPTIMIZER.weight_decay if decays else 0.0,
            )
            for decays in (True, False)
        ]
        optimizer = OptimizerGroup(*optimizers)

        @TinyJit
        def step(tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            optimizer.zero_grad()
            loss = model(tokens, targets).backward()
            # Each sum is a kernel of its own: PoCL names folders after kernels, and the name of
            # one that does them all is longer than a file system allows.
            squares = [t.grad.square().sum().contiguous() for t in optimizer.params]
            norm = sum(squares).sqrt()
            scale = (OPTIMIZER.grad_clip / (norm + 1e-6)).minimum(1.0)
            for t in optimizer.params:
                t.grad = t.grad * scale
            # Together: a loss that is realized later would be that of the new weights.
            Tensor.realize(loss, norm, *optimizer.schedule_step())
            return loss, norm

        self.step = step
        self.data = [tuple(Tensor(x).realize() for x in pair) for pair in batches(preset)]

    def __call__(self, i: int) -> tuple[float, float]:
        with self.context(TRAINING=1):
            loss, norm = self.step(*self.data[i % BATCHES])
        return loss.item(), norm.item()


# ---------------------------------------------------------------- contestants


def serve(pipe: Connection, start: Callable[[], Stepper], checked: int) -> None:
    """What a contestant's process does: take the checked steps, then as many as it is told."""
    done = 0

    def take(count: int) -> list[Step]:
        nonlocal done
        steps = []
        for i in range(done, done + count):
            begin = time.perf_counter()
            loss, norm = step(i)
            steps.append(Step(time.perf_counter() - begin, loss, norm))
        done += count
        return steps

    try:
        step = start()
        pipe.send(take(checked))
        for count in iter(pipe.recv, 0):
            pipe.send(take(count) if count > 0 else step.peak_bytes())
    except EOFError:  # the parent has gone
        return
    except Exception as error:
        pipe.send(error)


class Worker:
    """A contestant in a process of its own."""

    def __init__(self, start: Callable[[], Stepper], checked: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, start, checked))
        self.process.start()
        theirs.close()
        self.first: list[Step] = self._receive()

    def _receive(self) -> Any:
        try:
            answer = self.pipe.recv()
        except EOFError:
            self.process.join()
            raise RuntimeError(f"its process ended with {self.process.exitcode}") from None
        if isinstance(answer, Exception):
            self.process.join()
            raise answer
        return answer

    def run(self, count: int) -> list[Step]:
        """Take so many steps."""
        self.pipe.send(count)
        return self._receive()

    def peak_bytes(self) -> int | None:
        """Peak memory on the device."""
        self.pipe.send(-1)
        return self._receive()

    def close(self) -> None:
        """End its process."""
        with contextlib.suppress(OSError):
            self.pipe.send(0)
        self.process.join()


class LlmC:
    """llm.c's train_gpt2cu, which starts anew for each turn."""

    line = re.compile(r"step\s+(\d+)/\d+ \| loss ([\d.]+).*?\| ([\d.]+) ms")

    def __init__(self, program: Path, preset: Preset) -> None:
        self.program, self.preset = program.resolve(), preset
        self.first = self.run(2)

    def run(self, count: int) -> list[Step]:
        p = self.preset
        command = [
            *(str(self.program), "-b", str(p.batch), "-t", str(p.time)),
            *("-d", str(p.batch * p.time), "-x", str(count + 2), "-v", "1000000", "-s", "0"),
            *("-l", str(learning_rate(p)), "-e", "d12"),
        ]
        found = subprocess.run(command, cwd=self.program.parent, capture_output=True, text=True)
        steps = [
            Step(float(m[3]) / 1e3, float(m[2]), math.nan) for m in self.line.finditer(found.stdout)
        ]
        if len(steps) < count:
            raise RuntimeError(
                f"{self.program.name} ended early: {found.stdout[-300:]}{found.stderr[-300:]}"
            )
        return steps[2:]

    def peak_bytes(self) -> int | None:
        return None

    def close(self) -> None:
        """Nothing runs between turns."""


def starters(
    preset: Preset, name: str, precision: str, device: str, llmc: Path | None
) -> dict[str, Callable[[], Any]]:
    """How to start each contestant, ours first."""
    steps = CHECK_STEPS[device.partition(":")[0]]
    if not device.startswith("cuda"):
        made: dict[str, Callable[[], Any]] = {
            "treadle": partial(Worker, partial(Ours, preset, precision, device, False), steps)
        }
        if precision == "fp32":
            made["tinygrad"] = partial(Worker, partial(Tinygrad, preset), steps)
        return made
    made = {
        "treadle": partial(Worker, partial(Ours, preset, precision, device, False), steps),
        "treadle, fast": partial(Worker, partial(Ours, preset, precision, device, True), steps),
        "torch": partial(Worker, partial(Torch, preset, precision, None), steps),
        "torch.compile": partial(Worker, partial(Torch, preset, precision, "default"), steps),
        "reduce-overhead": partial(
            Worker, partial(Torch, preset, precision, "reduce-overhead"), steps
        ),
    }
    if llmc is not None and precision == "bf16" and name == LLMC_PRESET:
        made["llm.c"] = partial(LlmC, llmc, preset)
    return made


# ---------------------------------------------------------------- measuring


def error(steps: list[Step], reference: list[Step]) -> float:
    """The largest relative difference of the losses."""
    return max(abs(a.loss / b.loss - 1) for a, b in zip(steps, reference, strict=True))


def measure(options: Any, name: str, precision: str) -> list[dict[str, Any]]:
    """A row of the table for each contestant that can take part."""
    preset = PRESETS[name]
    contestants: dict[str, Any] = {}
    errors: dict[str, float] = {}
    try:
        for who, start in starters(preset, name, precision, options.device, options.llmc).items():
            if options.only and who not in options.only:
                continue
            try:
                made = start()
            except Exception as failure:
                if who == "treadle":
                    raise
                print(f"  {who} does not take part: {str(failure)[:300]}")
                continue
            contestants[who] = made
            ours = contestants["treadle"]
            if isinstance(made, Worker):
                errors[who] = off = error(made.first, ours.first)
                if not off <= TOLERANCE[precision]:
                    raise SystemExit(f"{who}, {precision}: losses are {off:.1e} off ours")

        def turn(made: Any) -> list[float]:
            count = max(1, math.ceil(options.seconds / made.first[-1].seconds))
            return [step.seconds for step in made.run(count)]

        runs = {who: partial(turn, made) for who, made in contestants.items()}
        times = common.alternate(runs, options.rounds)
        peaks = {who: made.peak_bytes() for who, made in contestants.items()}
    finally:
        for made in contestants.values():
            made.close()
    peak = getattr(options, f"peak_{precision}")
    floor = None
    if peak and options.bandwidth:
        floor = preset.flops() / peak / 1e9
        floor += preset.optimizer_bytes(precision) / options.bandwidth / 1e9
    model = preset.model
    token = 6 * model.n_parameters() + 6 * model.n_layer * model.n_embd * preset.time
    rows = []
    for who, rounds in times.items():
        found = common.summary(rounds, times["treadle"])
        seconds = found["median"]
        rows.append(
            {
                "contestant": who,
                "precision": precision,
                **found,
                "tokens/s": preset.rows / seconds,
                "mfu": None if not peak else token * preset.rows / seconds / peak / 1e9,
                "floor": None if floor is None else floor / seconds,
                "memory": peaks[who],
                "error": errors.get(who),
                "turns": rounds,
            }
        )
    return rows


COLUMNS: list[common.Column] = [
    ("contestant", -15, str),
    ("precision", -9, str),
    ("median", 10, common.decimals(3, 1e3)),
    ("min", 10, common.decimals(3, 1e3)),
    ("ratio", 6, common.decimals(2)),
    ("tokens/s", 10, "{:,.0f}".format),
    ("mfu", 6, common.decimals(3)),
    ("floor", 6, common.decimals(2)),
    ("memory", 8, common.decimals(0, 1 / 2**20)),
    ("error", 8, "{:.1e}".format),
]


def main() -> None:
    made = common.parser("A GPU training step, side by side.", ["5m"], seconds=1.0)
    made.add_argument("--device", default="opencl", help="%(default)s")
    made.add_argument("--llmc", type=Path, metavar="PATH", help="a built train_gpt2cu of llm.c")
    made.add_argument("--only", action="append", metavar="NAME", help="contestants; repeatable")
    options = common.options_of(made)
    report: dict[str, Any] = {"device": options.device, "presets": {}}
    print("times in ms, ratio = time / treadle's, memory = peak MiB, error = of losses")
    for name in options.presets:
        print(f"\n{name}: {PRESETS[name].describe()}")
        common.show(COLUMNS, None)
        rows = report["presets"][name] = []
        for precision in options.precision:
            for row in measure(options, name, precision):
                common.show(COLUMNS, row)
                rows.append(row)
    common.save(options.json, report)


if __name__ == "__main__":
    main()
