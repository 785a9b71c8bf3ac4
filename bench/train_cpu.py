"""A training step against PyTorch, eager and compiled, in fp32 and bf16, and against llm.c.

    python bench/train_cpu.py [PRESET ...] [--precision fp32|bf16] [--peak-fp32 GFLOPS]
                              [--peak-bf16 GFLOPS] [--bandwidth GB/S] [--llmc PATH] [--json FILE]

A step is forward, backward, clipping by the global norm, AdamW, and loss and norm on the host. All
contestants start from the same weights and see the same batches; the losses of the first steps,
and the first gradient's norm, must agree with PyTorch's in fp32 before anything is measured.

Each contestant lives in a process of its own, and they take turns: a round is one turn of each.
Nobody else computes during a turn, because the others wait for a message, and their OpenMP threads,
which spin for some milliseconds after the last call, have gone to sleep. So neither side meets the
other's spinning threads, memory allocator or caches within a turn, and the peak memory (the high-
water mark of the resident set while the steps run, libraries included) is each one's own. (In one
process, PyTorch's small steps took longer.) A ratio compares two turns of one round, so
slow drifts of the machine cancel. Other programs do not: PyTorch and llm.c give each thread a fixed
share of an op and wait for the last, so a busy processor costs them more than it costs Treadle, and
the ratios come out too high. Measure on a quiet machine.

The floor of a step is the time of its matrix products at the declared peak, and of AdamW's memory
traffic at the declared bandwidth, one after the other: the clipped gradient is known only when
backward is over. "floor" in the table is the part of the time that the floor accounts for.

--llmc names a built train_gpt2 of llm.c, which takes part in 124m-64, the size it is made for. It
runs in its own folder, where it expects gpt2_124M.bin (its version 3, float32; random weights do)
and dev/data/tinyshakespeare/tiny_shakespeare_{train,val}.bin. It does not clip gradients, and sees
its own data. It starts anew for each turn, and its first step, which allocates memory, is left out.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import re
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import numpy as np

import common
from common import PRESETS, Preset, Setting
from treadle.backends.cpu import CpuBackend
from treadle.train.program import OptimizerSettings
from treadle.train.session import Session

SEED = 1
LEARNING_RATE = 1e-3
BATCHES = 4
CHECK_STEPS = 3
# How far losses and the first norm may be from PyTorch's in fp32, relatively.
TOLERANCE = {"fp32": 1e-4, "bf16": 1e-2}
OPTIMIZER = OptimizerSettings()
OURS = "treadle"
REFERENCE = "torch"
LLMC_PRESET = "124m-64"


@dataclass(frozen=True)
class Step:
    """A measured step. norm: of the gradient, before clipping."""

    seconds: float
    loss: float
    norm: float


# ---------------------------------------------------------------- what the contestants compute

Stepper = Callable[[int], tuple[float, float]]


def batches(preset: Preset) -> list[tuple[np.ndarray, np.ndarray]]:
    """Random inputs and targets, int32 [B, T]."""
    rng = np.random.default_rng(SEED)
    shape = (BATCHES, preset.batch, preset.time + 1)
    tokens = rng.integers(preset.model.vocab_size, size=shape, dtype=np.int32)
    return [(np.ascontiguousarray(x[:, :-1]), np.ascontiguousarray(x[:, 1:])) for x in tokens]


def treadle_stepper(preset: Preset, precision: str, threads: int) -> Stepper:
    """Ours. precision: "fp32" or "bf16"."""
    session = Session(
        preset.model,
        CpuBackend(threads),
        OPTIMIZER,
        preset.batch,
        preset.time,
        seed=SEED,
        precision=precision,
    )
    session.initialise()
    data = batches(preset)

    def step(i: int) -> tuple[float, float]:
        result = session.step(i, *data[i % BATCHES], LEARNING_RATE)
        return result.loss, result.grad_norm

    return step


def torch_stepper(preset: Preset, precision: str, threads: int, compiled: bool) -> Stepper:
    """PyTorch's, with its fused AdamW; bf16 is its autocast."""
    import torch

    from torch_gpt2 import GPT2

    torch.set_num_threads(threads)
    model = GPT2(preset.model)
    parameters = {p.name: p for p in preset.model.parameters()}
    named = dict(model.named_parameters())
    assert named.keys() == parameters.keys()
    with torch.no_grad():
        for name, tensor in named.items():
            tensor.copy_(torch.from_numpy(parameters[name].initial(SEED)))
    groups = [
        {
            "params": [t for name, t in named.items() if parameters[name].decays == decays],
            "weight_decay": OPTIMIZER.weight_decay if decays else 0.0,
        }
        for decays in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, LEARNING_RATE, OPTIMIZER.betas, OPTIMIZER.eps, fused=True)
    forward = torch.compile(model) if compiled else model
    data = [tuple(torch.from_numpy(x).long() for x in pair) for pair in batches(preset)]

    def step(i: int) -> tuple[float, float]:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = forward(*data[i % BATCHES])
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item(), norm.item()

    return step


# ---------------------------------------------------------------- the contestants


class Contestant(Protocol):
    """first: the steps that are checked, not measured."""

    first: list[Step]

    def run(self, count: int) -> list[Step]:
        """Take so many steps."""

    def peak_bytes(self) -> int | None:
        """Peak of the resident memory while steps ran; None where the system does not tell."""

    def close(self) -> None:
        """End its process."""


def high_water(pid: int) -> int | None:
    """The peak of a process's resident memory, in bytes."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    except OSError:
        return None
    found = re.search(r"VmHWM:\s*(\d+) kB", status)
    return int(found[1]) * 1024 if found else None


def serve(pipe: Connection, start: Callable[[], Stepper]) -> None:
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
        pipe.send(take(CHECK_STEPS))
        with contextlib.suppress(OSError):  # what loading needed is no part of the high-water mark
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        for count in iter(pipe.recv, 0):
            pipe.send(take(count))
    except EOFError:  # the parent has gone
        return
    except Exception as error:
        pipe.send(error)


class Worker:
    """A Contestant in a process of its own."""

    def __init__(self, start: Callable[[], Stepper]) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, start), daemon=False)
        self.process.start()
        theirs.close()
        self.first = self._receive()

    def _receive(self) -> list[Step]:
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
        self.pipe.send(count)
        return self._receive()

    def peak_bytes(self) -> int | None:
        return high_water(self.process.pid) if self.process.pid else None

    def close(self) -> None:
        with contextlib.suppress(OSError):  # it may have ended on its own
            self.pipe.send(0)
        self.process.join()


class LlmC:
    """A Contestant that starts llm.c's train_gpt2 for each turn."""

    line = re.compile(r"step (\d+): train loss (\S+) \(took (\S+) ms")

    def __init__(self, program: Path, threads: int) -> None:
        self.program, self.threads = program.resolve(), threads
        self.peak: int | None = None
        self.first = self.run(1)

    def run(self, count: int) -> list[Step]:
        steps: list[Step] = []
        process = subprocess.Popen(
            ["stdbuf", "-oL", str(self.program)],  # else its lines come when it ends
            cwd=self.program.parent,
            env={**os.environ, "OMP_NUM_THREADS": str(self.threads)},
            stdout=subprocess.PIPE,
            text=True,
        )
        with process:
            assert process.stdout is not None
            for found in filter(None, map(self.line.match, process.stdout)):
                if found[1] != "0":
                    steps.append(Step(float(found[3]) / 1e3, float(found[2]), math.nan))
                if len(steps) == count:
                    break
            self.peak = high_water(process.pid)
            process.kill()
        if len(steps) < count:
            raise RuntimeError(f"{self.program.name} ended before its step {count}")
        return steps

    def peak_bytes(self) -> int | None:
        return self.peak

    def close(self) -> None:
        """Nothing runs between turns."""


# ---------------------------------------------------------------- checking and measuring


def error(steps: Sequence[Step], reference: Sequence[Step]) -> float:
    """The largest relative difference of the losses and of the first norm. Norms that come later
    say little: Adam's first updates are the signs of gradients, of those that are rounding, too."""
    pairs = [(x.loss, y.loss) for x, y in zip(steps, reference, strict=True)]
    pairs.append((steps[0].norm, reference[0].norm))
    return max(abs(a / b - 1) for a, b in pairs)


def starters(
    name: str, precision: str, threads: int, llmc: Path | None
) -> dict[str, Callable[[], Contestant]]:
    """How to start each contestant, by name."""
    preset = PRESETS[name]
    made: dict[str, Callable[[], Contestant]] = {
        OURS: partial(Worker, partial(treadle_stepper, preset, precision, threads)),
        REFERENCE: partial(Worker, partial(torch_stepper, preset, precision, threads, False)),
        "torch.compile": partial(Worker, partial(torch_stepper, preset, precision, threads, True)),
    }
    if llmc is not None and precision == "fp32" and name == LLMC_PRESET:
        made["llm.c"] = partial(LlmC, llmc, threads)
    return made


def reference_steps(preset: Preset, threads: int) -> list[Step]:
    """The first steps of PyTorch in fp32."""
    worker = Worker(partial(torch_stepper, preset, "fp32", threads, False))
    worker.close()
    return worker.first


def measure(
    name: str, precision: str, setting: Setting, llmc: Path | None, reference: list[Step]
) -> list[dict[str, Any]]:
    """A row of the table for each contestant that can take part."""
    contestants: dict[str, Contestant] = {}
    errors: dict[str, float] = {}
    try:
        for who, start in starters(name, precision, setting.threads, llmc).items():
            try:
                made = start()
            except Exception as failure:
                if who == OURS:
                    raise
                print(f"  {who} does not take part: {failure}")
                continue
            contestants[who] = made
            if isinstance(made, LlmC):
                continue
            errors[who] = off = error(made.first, reference)
            if not off <= TOLERANCE[precision]:
                raise SystemExit(
                    f"{who}, {precision}: losses or norm are {off:.1e} off PyTorch's in fp32, "
                    f"more than {TOLERANCE[precision]:.0e}: {made.first} for {reference}"
                )

        def turn(made: Contestant) -> list[float]:
            count = max(1, math.ceil(setting.seconds / made.first[-1].seconds))
            return [step.seconds for step in made.run(count)]

        runs = {who: partial(turn, made) for who, made in contestants.items()}
        times = common.alternate(runs, setting.rounds)
        peaks = {who: made.peak_bytes() for who, made in contestants.items()}
    finally:
        for made in contestants.values():
            made.close()

    preset = PRESETS[name]
    parts = setting.times(preset.flops(), preset.optimizer_bytes(precision), precision)
    rows = []
    for who, rounds in times.items():
        found = common.summary(rounds, times[OURS])
        rows.append(
            {
                "contestant": who,
                "precision": precision,
                **found,
                "gflops": preset.flops() / found["median"] / 1e9,
                "floor": None if parts is None else sum(parts) / found["median"],
                "memory": peaks[who],
                "error": errors.get(who),
                "turns": rounds,
            }
        )
    return rows


COLUMNS: list[common.Column] = [
    ("contestant", -14, str),
    ("precision", -9, str),
    ("median", 10, common.decimals(2, 1e3)),
    ("min", 10, common.decimals(2, 1e3)),
    ("ratio", 6, common.decimals(2)),
    ("gflops", 8, common.decimals(1)),
    ("floor", 6, common.decimals(2)),
    ("memory", 8, common.decimals(0, 1 / 2**20)),
    ("error", 8, "{:.1e}".format),
]


def main() -> None:
    small = [name for name in PRESETS if name not in common.LARGE]
    made = common.parser("A CPU training step, side by side.", small, seconds=1.0)
    made.add_argument("--llmc", type=Path, metavar="PATH", help="a built train_gpt2 of llm.c")
    options, setting = common.parse(made)
    report = common.header(setting, torch=version("torch"))
    report["presets"] = {}
    print("times in ms, ratio = time / treadle's, memory = peak MiB, error = of losses and norm")
    for name in options.presets:
        print(f"\n{name}: {PRESETS[name].describe()}")
        common.show(COLUMNS, None)
        rows = report["presets"][name] = []
        reference = reference_steps(PRESETS[name], setting.threads)
        for precision in options.precision:
            for row in measure(name, precision, setting, options.llmc, reference):
                common.show(COLUMNS, row)
                rows.append(row)
    common.save(options.json, report)


if __name__ == "__main__":
    main()
