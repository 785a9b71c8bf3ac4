"""The learning rate as a function of the step."""

from __future__ import annotations

import math

from treadle.errors import ConfigError

SCHEDULES = ("cosine", "linear", "constant")


def learning_rate(
    step: int, *, name: str, lr: float, min_lr: float, warmup_steps: int, steps: int
) -> float:
    """Learning rate of the update that follows `step` finished ones (0 for the first), float64.

    Warmup rises by equal amounts and would reach `lr` at step `warmup_steps`:
    lr (step + 1) / (warmup_steps + 1). After it, with t = (step - warmup_steps) /
    (steps - warmup_steps) held to at most 1:

    - cosine: min_lr + (1 + cos(pi t)) (lr - min_lr) / 2, the half period of Loshchilov and
      Hutter, "SGDR" (2017), equation 5, without restarts;
    - linear: lr + (min_lr - lr) t;
    - constant: lr.

    Raises ConfigError for another name.
    """
    if name not in SCHEDULES:
        raise ConfigError(f"schedule.name: expected one of {', '.join(SCHEDULES)}, got {name!r}")
    if step < warmup_steps:
        return lr * (step + 1) / (warmup_steps + 1)
    t = min(1.0, (step - warmup_steps) / max(1, steps - warmup_steps))
    if name == "cosine":
        return min_lr + 0.5 * (1.0 + math.cos(math.pi * t)) * (lr - min_lr)
    if name == "linear":
        return lr + (min_lr - lr) * t
    return lr
