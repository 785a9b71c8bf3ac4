"""`treadle profile`."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

import typer

from treadle.cli.options import with_flags
from treadle.cli.tables import LiveTable, mebibytes, rate, table
from treadle.cli.trial import Trial, open_trial
from treadle.config import Config, ModelConfig, TrainConfig, inherit
from treadle.graph.op import Node


def _sizes(batch_size: int, **model: Any) -> Config:
    return Config(model=ModelConfig(**model), train=TrainConfig(batch_size=batch_size))


# What is measured when nothing is given: models of about these numbers of parameters.
LADDER = {
    "0.1M": _sizes(4, vocab_size=256, n_layer=2, n_head=2, n_embd=64, block_size=16),
    "1M": _sizes(12, vocab_size=1024, n_layer=4, n_head=4, n_embd=128, block_size=64),
    "5M": _sizes(
        4,
        vocab_size=16000,
        n_layer=6,
        n_head=2,
        n_embd=128,
        block_size=128,
        tie_embeddings=False,
    ),
    "10M": _sizes(4, vocab_size=16000, n_layer=8, n_head=8, n_embd=256, block_size=128),
}


@with_flags
def command(
    config: Config,
    name: str,
    steps: int = typer.Option(10, min=1, help="How many steps to time."),
) -> None:
    """Time a training step op by op; without a model or data, whole steps of four model sizes.

    Each op is run by itself, so their sum is more than the time of a whole step.
    """
    if config.data.path is None and config.model == ModelConfig():
        _ladder(config, steps)
        return
    trial = open_trial(config)
    print(f"profile of {name} on {trial.session.backend.describe()} ({trial.why})\n")
    seconds = trial.measure(steps)
    print(_ops(trial, steps))
    cost = trial.session.cost()
    print(
        f"\na whole step: {1000 * seconds:,.2f} ms, {trial.tokens / seconds:,.0f} tokens/s, "
        f"{rate(cost.flops, seconds)} GFLOP/s, {rate(cost.nbytes, seconds)} GB/s "
        f"(median of {steps})"
    )
    trial.close()


def _ladder(config: Config, steps: int) -> None:
    shown: LiveTable | None = None
    header = ("model", "parameters", "tokens", "ms/step", "tokens/s", "GFLOP/s", "memory")
    for label, sizes in LADDER.items():
        trial = open_trial(inherit(config, sizes))
        if shown is None:
            print(f"training steps on {trial.session.backend.describe()} ({trial.why})\n")
            shown = LiveTable(header, (5, 10, 6, 9, 9, 7, 11))
        seconds = trial.measure(steps)
        shown.add(
            label,
            f"{trial.session.model.n_parameters():,}",
            f"{trial.tokens:,}",
            f"{1000 * seconds:,.2f}",
            f"{trial.tokens / seconds:,.0f}",
            rate(trial.session.cost().flops, seconds),
            mebibytes(trial.session.executable.memory().total),
        )
        trial.close()


# ---------------------------------------------------------------- op by op


@dataclass
class _Total:
    calls: int = 0
    seconds: float = 0.0
    flops: int = 0
    nbytes: int = 0


def _ops(trial: Trial, passes: int) -> str:
    totals: dict[str, _Total] = {}
    for graph, count in trial.graphs().items():
        runs = [trial.session.executable.profile(graph) for _ in range(passes)]
        for timed in zip(*runs, strict=True):
            node = timed[0][0]
            cost, total = node.op.cost(node), totals.setdefault(_kind(node), _Total())
            total.calls += count
            total.seconds += count * median(seconds for _, seconds in timed)
            total.flops += count * cost.flops
            total.nbytes += count * cost.nbytes
    rows = sorted(totals.items(), key=lambda item: -item[1].seconds)
    everything = _Total(
        sum(t.calls for t in totals.values()),
        sum(t.seconds for t in totals.values()),
        sum(t.flops for t in totals.values()),
        sum(t.nbytes for t in totals.values()),
    )
    header = ("op", "calls", "ms", "%", "GFLOP/s", "GB/s")
    cells = [_row(kind, t, everything.seconds) for kind, t in (*rows, ("all", everything))]
    return table(cells, header)


def _kind(node: Node) -> str:
    """An op by its name, those of the backward pass apart from those of the forward pass."""
    return f"grad/{node.op.name}" if node.name.startswith("grad/") else node.op.name


def _row(kind: str, total: _Total, whole: float) -> tuple[str, ...]:
    return (
        kind,
        str(total.calls),
        f"{1000 * total.seconds:,.3f}",
        f"{100 * total.seconds / whole:.1f}",
        rate(total.flops, total.seconds),
        rate(total.nbytes, total.seconds),
    )
