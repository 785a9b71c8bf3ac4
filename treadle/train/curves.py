"""The curves of a run as numbers: what plots and reports draw."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Points = list[tuple[float, float]]

SMOOTH_OVER = 50  # points that a smoothed curve takes the mean of
SMOOTH_PART = 5  # and at most one in so many of those up to there, as losses fall fast at first


def points(metrics: Iterable[Mapping[str, Any]], key: str) -> Points:
    """(step, value) of each line that has a finite value under `key`."""
    pairs = ((line["step"], line.get(key)) for line in metrics)
    return [(float(x), float(y)) for x, y in pairs if y is not None and math.isfinite(y)]


def smoothed(curve: Points) -> Points:
    """The mean of each point and some before it, so that it is never ahead of the run."""
    sums, means = [0.0], []
    for i, (x, y) in enumerate(curve, start=1):
        sums.append(sums[-1] + y)
        width = max(1, min(SMOOTH_OVER, i // SMOOTH_PART))
        means.append((x, (sums[i] - sums[i - width]) / width))
    return means


def thinned(curve: Points, most: int) -> list[tuple[float, float, float, float]]:
    """(x, mean, least, greatest) of at most `most` groups of neighbouring points."""
    size = max(1, -(-len(curve) // most))
    groups = (curve[i : i + size] for i in range(0, len(curve), size))
    return [
        (
            sum(x for x, _ in group) / len(group),
            sum(y for _, y in group) / len(group),
            min(y for _, y in group),
            max(y for _, y in group),
        )
        for group in groups
    ]


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers from low to high, at most `most` of them, at 1, 2 or 5 times a power of ten."""
    if high <= low:
        return [low]
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 5, 10) if power * m * most >= high - low)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)][:most]


def quantile(values: Sequence[float], part: float) -> float:
    """The value below which `part` of the values lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]
