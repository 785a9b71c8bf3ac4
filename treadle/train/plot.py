"""Runs side by side in one picture, by matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from typing import Any

from treadle.errors import ConfigError
from treadle.files import one_line
from treadle.train.curves import Points, points, smoothed
from treadle.train.metrics import read_metrics

AXES = {"step": "step", "tokens": "tokens", "minutes": "minutes of training"}
"""What the losses can be drawn against, and the label of that."""

SIZE = (10.0, 5.5)  # inches
DOTS = 130  # per inch


def plot(runs: Sequence[Path], target: Path, against: str = "step") -> None:
    """Draw training and validation losses of runs into a file; its suffix says the format.

    Training losses are running means, validation losses marks. ConfigError where matplotlib is
    missing, for another axis or format, and where the file cannot be written; CheckpointError for
    a run without metrics.
    """
    if against not in AXES:
        raise ConfigError(f"--x: got {against}; one of {', '.join(AXES)}")
    if not target.suffix:
        raise ConfigError(f"{target}: expected a name that ends in .png, .svg or .pdf")
    curves = [_curves(run, against) for run in runs]
    try:
        figure = import_module("matplotlib.figure").Figure(figsize=SIZE, layout="constrained")
    except ImportError:
        raise ConfigError(
            "plotting needs the package matplotlib: pip install 'treadle[plot]'; "
            "`treadle report` draws a run without it"
        ) from None
    axes = figure.add_subplot()
    for run, name, (train, val) in zip(runs, _names(runs), curves, strict=True):
        if not train:
            raise ConfigError(f"{run}: has no losses yet; train it first")
        (line,) = axes.plot(*zip(*train, strict=True), linewidth=1.4, label=f"{name}, training")
        if val:
            axes.plot(
                *zip(*val, strict=True), color=line.get_color(), marker="o", markersize=4,
                linestyle="--", linewidth=0.9, label=f"{name}, validation",
            )  # fmt: skip
    axes.set_xlabel(AXES[against])
    axes.set_ylabel("loss, nats per token")
    axes.grid(alpha=0.25)
    axes.legend()
    try:
        figure.savefig(target, dpi=DOTS)
    except OSError as error:
        raise ConfigError(f"{target}: cannot write: {error.strerror or one_line(error)}") from None
    except ValueError as error:  # a format that it does not know
        raise ConfigError(f"{target}: {one_line(error)}") from None


def _curves(run: Path, against: str) -> tuple[Points, Points]:
    """Smoothed training losses and validation losses of a run."""
    lines = read_metrics(run)
    places = _places(lines, against)
    train, val = smoothed(points(lines, "loss")), points(lines, "val_loss")
    return [(places[int(x)], y) for x, y in train], [(places[int(x)], y) for x, y in val]


def _places(lines: Sequence[dict[str, Any]], against: str) -> dict[int, float]:
    """Where each step stands on the axis."""
    if against == "step":
        amounts = [1.0] * len(lines)
        start = lines[0]["step"] - 1.0 if lines else 0.0
    else:
        start = 0.0
        seconds = [line["step_ms"] / 1000 for line in lines]
        amounts = [s / 60 for s in seconds]
        if against == "tokens":
            pairs = zip(lines, seconds, strict=True)
            amounts = [float(round(line["tokens_per_s"] * s)) for line, s in pairs]
    sums = accumulate(amounts, initial=start)
    next(sums)
    return {line["step"]: place for line, place in zip(lines, sums, strict=True)}


def _names(runs: Sequence[Path]) -> list[str]:
    """What runs are called: their folder's name, or the whole path where two are alike."""
    short = [run.resolve().name for run in runs]
    return [
        str(run) if short.count(name) > 1 else name for run, name in zip(runs, short, strict=True)
    ]
