"""Loss spikes: losses that stand far above those of the steps before, by their z-score."""

from __future__ import annotations

import math
from collections import deque
from typing import Any


class Spikes:
    """The losses before a step, and the limit that they set for its own.

    limit = mean + zscore · deviation over the last `window` losses (the deviation of the whole
    population); infinite until there are so many, and where they are all equal. A loss above the
    limit enters the window as the limit: a single spike then hides no other one, and a lasting
    rise stops being one after a few steps. `skipped` counts the updates that were left out,
    `in_a_row` the last ones of them that were so for a loss or gradient that was not finite.

    All of it is in `state`, so that a resumed run judges as one at a stretch.
    """

    def __init__(self, window: int, zscore: float) -> None:
        self.window, self.threshold = window, zscore
        self.losses: deque[float] = deque(maxlen=window)
        self.skipped = self.in_a_row = 0

    def limit(self) -> float:
        """The loss, nats, above which the next step is a spike."""
        if len(self.losses) < self.window:
            return math.inf
        mean, deviation = self._moments()
        return mean + self.threshold * deviation if deviation else math.inf

    def zscore(self, loss: float) -> float:
        """How many standard deviations a loss stands above the mean; where `limit` is finite."""
        mean, deviation = self._moments()
        return (loss - mean) / deviation

    def observe(self, loss: float) -> None:
        """Take in the finite loss of a step that has been judged."""
        self.losses.append(min(loss, self.limit()))

    def _moments(self) -> tuple[float, float]:
        mean = math.fsum(self.losses) / len(self.losses)
        return mean, math.sqrt(math.fsum((x - mean) ** 2 for x in self.losses) / len(self.losses))

    # ---------------------------------------------------------------- state

    def state(self) -> dict[str, Any]:
        """What `restore` needs, as JSON holds it."""
        return {"losses": list(self.losses), "skipped": self.skipped, "in_a_row": self.in_a_row}

    def restore(self, state: dict[str, Any] | None) -> None:
        """Go on from `state`, or from nothing where a checkpoint has none."""
        found = state or {}
        self.losses.extend(found.get("losses", ()))
        self.skipped, self.in_a_row = found.get("skipped", 0), found.get("in_a_row", 0)
