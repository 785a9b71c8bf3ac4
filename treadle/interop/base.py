"""What every reader of foreign files returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from treadle.data.tokenizer import Tokenizer
from treadle.models.base import Model


@dataclass(frozen=True)
class Imported:
    """A model read from files of another program.

    weights: float32 arrays by the model's parameter names. tokenizer: None where the files have
    none. notes: one line for each thing that a person should know, such as a tensor left out.
    """

    model: Model
    weights: Mapping[str, np.ndarray]
    tokenizer: Tokenizer | None = None
    notes: list[str] = field(default_factory=list)
