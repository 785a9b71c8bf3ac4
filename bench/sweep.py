"""The 5.3M reference with one size changed at a time: tokens/s, GFLOP/s and memory of a step.

    python bench/sweep.py [--precision fp32|bf16] [--threads N] [--seconds S] [--json FILE]

Nobody takes part but Treadle: this shows how speed follows width, depth, context and batch. Memory
is the plan's, which is what a run takes beside the interpreter.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np

from common import PRESETS, Preset
from treadle.backends.cpu import CpuBackend
from treadle.graph.plan import plan
from treadle.graph.program import memory
from treadle.models.base import PRECISIONS
from treadle.train.program import OptimizerSettings
from treadle.train.session import Session

REFERENCE = PRESETS["5m"]
WIDTHS, DEPTHS = (64, 128, 256, 512), (2, 6, 12)
CONTEXTS, BATCHES = (32, 128, 512), (1, 4, 16)
WARMUP, FEWEST = 2, 5
HEADS = "width|layers|context|batch|parameters|dtype|ms|tokens/s|GFLOP/s|MiB"


@dataclass(frozen=True)
class Row:
    """A measured size. memory: of the plan, MiB."""

    width: int
    layers: int
    context: int
    batch: int
    parameters: int
    precision: str
    ms: float
    tokens_per_s: float
    gflops: float
    memory: float


def sizes() -> list[Preset]:
    """The reference, and it with one number changed."""
    model, found = REFERENCE.model, [REFERENCE]
    for width in WIDTHS:
        heads = max(1, width // 64)
        found.append(replace(REFERENCE, model=replace(model, n_embd=width, n_head=heads)))
    found += [replace(REFERENCE, model=replace(model, n_layer=layers)) for layers in DEPTHS]
    found += [
        replace(REFERENCE, model=replace(model, block_size=context), time=context)
        for context in CONTEXTS
    ]
    found += [replace(REFERENCE, batch=batch) for batch in BATCHES]
    return list(dict.fromkeys(found))


def measure(preset: Preset, precision: str, threads: int | None, seconds: float) -> Row:
    """The median step of a fresh session."""
    backend = CpuBackend(threads)
    session = Session(
        preset.model, backend, OptimizerSettings(), preset.batch, preset.time, precision=precision
    )
    session.initialise()
    shape = (preset.batch, preset.time + 1)
    ids = np.random.default_rng(0).integers(0, preset.model.vocab_size, shape, dtype=np.int32)
    taken: list[float] = []
    while len(taken) < WARMUP + FEWEST or sum(taken) < seconds:
        start = time.perf_counter()
        result = session.step(len(taken), ids[:, :-1], ids[:, 1:], 1e-4)
        taken.append(time.perf_counter() - start)
        assert result.applied and np.isfinite(result.loss)
    second = median(taken[WARMUP:])
    plans = {name: plan(graph, "cpu") for name, graph in session.program.graphs.items()}
    nbytes = memory(session.program, plans, backend.threads).total
    session.executable.close()
    m = preset.model
    return Row(
        *(m.n_embd, m.n_layer, preset.time, preset.batch, m.n_parameters(), precision),
        *(1e3 * second, preset.rows / second, preset.flops() / second / 1e9, nbytes / 2**20),
    )


def main() -> None:
    made = argparse.ArgumentParser(description="The 5.3M reference, one size changed at a time.")
    made.add_argument("--precision", action="append", choices=list(PRECISIONS))
    made.add_argument("--threads", type=int, help="default: physical cores")
    made.add_argument("--seconds", type=float, default=1.0, help="of each size; %(default)s")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the measurements there")
    args = made.parse_args()
    rows = []
    print(f"|{HEADS}|", "---:".join("|" * (HEADS.count("|") + 2)), sep="\n")
    for preset in sizes():
        for precision in args.precision or list(PRECISIONS):
            r = measure(preset, precision, args.threads, args.seconds)
            rows.append(r)
            print(
                f"| {r.width} | {r.layers} | {r.context} | {r.batch} | {r.parameters / 1e6:.2f}M "
                f"| {precision} | {r.ms:.1f} | {r.tokens_per_s:,.0f} | {r.gflops:.0f} "
                f"| {r.memory:.0f} |",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps([asdict(r) for r in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
