"""What the programs beside this file share: presets, floors, options, alternation, tables."""

# ruff: noqa: E402 - what NumPy's BLAS reads from the environment has to go before NumPy is loaded

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

# What shells export for one BLAS version slows another down; the peers run as they choose to.
for _variable in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"):
    os.environ.pop(_variable, None)

from treadle.backends.cpu import CpuBackend
from treadle.models.base import PRECISIONS
from treadle.models.gpt2 import GPT2

# Contestants' own threads spin for a while after their last call; the next one waits that out.
PAUSE_SECONDS = 0.1
# A load average above this means that the machine is not ours alone.
BUSY_LOAD = 0.5
# AdamW reads w, g, m, v and writes w, m, v, all float32; with bf16 it writes a copy of w as well.
OPTIMIZER_BYTES = {"fp32": 28, "bf16": 30}


# ---------------------------------------------------------------- presets


@dataclass(frozen=True)
class Preset:
    """A training step's model, and its batch of `batch` windows of `time` tokens."""

    model: GPT2
    batch: int
    time: int

    @property
    def rows(self) -> int:
        """Tokens of a step."""
        return self.batch * self.time

    def linears(self) -> dict[str, tuple[int, int, int]]:
        """Inputs, outputs and how often it occurs, of each linear layer."""
        c, layers = self.model.n_embd, self.model.n_layer
        return {
            "c_attn": (c, 3 * c, layers),
            "attn c_proj": (c, c, layers),
            "c_fc": (c, 4 * c, layers),
            "mlp c_proj": (4 * c, c, layers),
            "head": (c, self.model.vocab_size, 1),
        }

    def flops(self) -> int:
        """Of a step's matrix products, forward and backward: each linear layer three times, and
        attention's two products over the causal half, with twice as many backward."""
        m = self.model
        dense = sum(2 * self.rows * k * n * count for k, n, count in self.linears().values())
        pairs = self.batch * self.time * (self.time + 1) // 2
        return 3 * (dense + 4 * m.n_embd * pairs * m.n_layer)

    def optimizer_bytes(self, precision: str) -> int:
        """Memory traffic of AdamW."""
        return OPTIMIZER_BYTES[precision] * self.model.n_parameters()

    def describe(self) -> str:
        """One line."""
        m = self.model
        return (
            f"{m.n_parameters() / 1e6:.2f}M parameters ({m.n_layer} layers, {m.n_head} heads, "
            f"{m.n_embd} wide, vocabulary {m.vocab_size}), {self.batch} x {self.time} tokens, "
            f"{self.flops() / 1e9:.4g} GFLOP a step"
        )


def _gpt2(layers: int, heads: int, width: int, vocabulary: int, time: int, tied: bool) -> GPT2:
    return GPT2(vocabulary, layers, heads, width, time, tie_embeddings=tied)


PRESETS = {
    "tiny": Preset(_gpt2(2, 2, 64, 256, 16, True), 4, 16),
    "char": Preset(_gpt2(4, 4, 128, 65, 64, True), 12, 64),
    "5m": Preset(_gpt2(6, 2, 128, 16_000, 128, False), 4, 128),
    "124m-64": Preset(_gpt2(12, 12, 768, 50_257, 1024, True), 4, 64),
    "124m-1024": Preset(_gpt2(12, 12, 768, 50_257, 1024, True), 4, 1024),
    "124m-8": Preset(_gpt2(12, 12, 768, 50_257, 1024, True), 8, 1024),
    "124m-gpu": Preset(_gpt2(12, 12, 768, 50_257, 1024, True), 64, 1024),
    "350m-gpu": Preset(_gpt2(24, 16, 1024, 50_257, 1024, True), 32, 1024),
    "1558m-gpu": Preset(_gpt2(48, 25, 1600, 50_257, 1024, True), 16, 1024),
}
# What only a GPU takes in a reasonable time.
LARGE = ("124m-8", "124m-gpu", "350m-gpu", "1558m-gpu")


# ---------------------------------------------------------------- the setting


@dataclass(frozen=True)
class Setting:
    """The machine as the command line declares it, and how to measure. gflops: the most that its
    matrix products reach, by precision; bandwidth: of memory, in GB/s; None where not declared."""

    threads: int
    rounds: int
    seconds: float
    gflops: Mapping[str, float | None]
    bandwidth: float | None

    def times(self, flops: float, nbytes: float, precision: str) -> tuple[float, float] | None:
        """Seconds that the arithmetic and the memory traffic need; None where not declared."""
        gflops = self.gflops[precision]
        if not gflops or not self.bandwidth:
            return None
        return flops / gflops / 1e9, nbytes / self.bandwidth / 1e9


def parser(description: str, presets: Sequence[str], seconds: float) -> argparse.ArgumentParser:
    """The options that every program has. presets, seconds: the defaults."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument(
        "presets",
        nargs="*",
        metavar="PRESET",
        help=f"of {', '.join(PRESETS)}; default: {', '.join(presets)}",
    )
    made.add_argument(
        "--precision", choices=PRECISIONS, action="append", help="repeatable; default: both"
    )
    made.add_argument("--threads", type=int, help="of all contestants; default: physical cores")
    made.add_argument("--rounds", type=int, default=7, help="turns of each contestant; %(default)s")
    made.add_argument(
        "--seconds", type=float, default=seconds, help="of each turn, at least; %(default)s"
    )
    for precision in PRECISIONS:
        made.add_argument(
            f"--peak-{precision}",
            type=float,
            metavar="GFLOPS",
            help=f"the machine's fastest {precision} matrix product, for the floor",
        )
    made.add_argument("--bandwidth", type=float, metavar="GB/S", help="of memory, for the floor")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the measurements there")
    made.set_defaults(default_presets=presets)
    return made


def parse(made: argparse.ArgumentParser) -> tuple[argparse.Namespace, Setting]:
    """The parsed options, with defaults filled in, and the setting."""
    options = options_of(made)
    gflops = {p: getattr(options, f"peak_{p}") for p in PRECISIONS}
    threads = CpuBackend(options.threads).threads
    return options, Setting(threads, options.rounds, options.seconds, gflops, options.bandwidth)


def options_of(made: argparse.ArgumentParser) -> argparse.Namespace:
    """The parsed options, with defaults filled in."""
    options = made.parse_args()
    options.presets = options.presets or list(options.default_presets)
    for name in options.presets:
        if name not in PRESETS:
            made.error(f"there is no preset '{name}'; one of {', '.join(PRESETS)}")
    options.precision = options.precision or list(PRECISIONS)
    return options


# ---------------------------------------------------------------- measuring


def alternate(
    runs: Mapping[str, Callable[[], Sequence[float]]], rounds: int
) -> dict[str, list[list[float]]]:
    """Seconds of every measurement, by contestant and round. In each round every contestant has
    one turn, in which it measures as often as it likes, and returns the seconds."""
    found: dict[str, list[list[float]]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            time.sleep(PAUSE_SECONDS)
            found[name].append(list(run()))
    return found


def summary(rounds: Sequence[Sequence[float]], ours: Sequence[Sequence[float]]) -> dict[str, float]:
    """median and min of a contestant's seconds; ratio: how many times as long as we it takes, the
    median over the rounds, because the two turns of a round see the same other programs."""
    turns = zip(rounds, ours, strict=True)
    return {
        "median": median(s for turn in rounds for s in turn),
        "min": min(s for turn in rounds for s in turn),
        "ratio": median(median(peer) / median(own) for peer, own in turns),
    }


# ---------------------------------------------------------------- reporting


def processor() -> str:
    """The processor's name, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "unknown"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "unknown"


def header(setting: Setting, **peers: str) -> dict[str, Any]:
    """Print who takes part and where; the same for the JSON file."""
    backend = CpuBackend(setting.threads)
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    versions = ", ".join(f"{name} {version}" for name, version in peers.items())
    print(f"{backend.describe()}; {versions}; {processor()}")
    if load is not None and load > BUSY_LOAD:
        print(f"the load average is {load:.1f}: if others compute too, ratios come out too high")
    return {
        "device": backend.describe(),
        "library": backend.library.info,
        "processor": processor(),
        "load": load,
        "peers": peers,
        "rounds": setting.rounds,
        "seconds": setting.seconds,
        "peak_gflops": dict(setting.gflops),
        "bandwidth": setting.bandwidth,
    }


Column = tuple[str, int, Callable[[Any], str]]


def show(columns: Sequence[Column], row: Mapping[str, Any] | None) -> None:
    """Print a row of a table, or its head when there is none. A column: its key, its width (left
    aligned where negative), and how to print its value; what is None prints as a dash."""
    cells = []
    for key, width, text in columns:
        cell = key if row is None else "-" if row.get(key) is None else text(row[key])
        cells.append(cell.ljust(-width) if width < 0 else cell.rjust(width))
    print(" ".join(cells).rstrip(), flush=True)


def decimals(places: int, scale: float = 1.0) -> Callable[[float], str]:
    """Prints numbers times `scale` with so many decimals."""
    return lambda number: f"{number * scale:.{places}f}"


def save(file: Path | None, report: Mapping[str, Any]) -> None:
    """Write the JSON file, where one is wanted."""
    if file is not None:
        file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
