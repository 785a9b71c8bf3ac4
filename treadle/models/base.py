"""What a model is: parameters with their initialisation, and functions that build graphs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import numpy as np

from treadle.errors import CheckpointError
from treadle.graph.op import Graph
from treadle.graph.program import Program
from treadle.graph.value import Shape, Value, wide
from treadle.models.cache import Cache
from treadle.ops.classifier import linear_cross_entropy
from treadle.ops.elementwise import softcap
from treadle.ops.linear import matmul
from treadle.ops.random import normal, stream_of

Weights = Mapping[str, Value]


@dataclass(frozen=True)
class Parameter:
    """A weight: its name (Hugging Face's), shape, and initialisation.

    std: standard deviation of its normal initialisation around 0; None for a constant `fill`.
    parts: names and rows of the tensors that files hold in its place, from the first row on.
    """

    name: str
    shape: Shape
    std: float | None = None
    fill: float = 0.0
    parts: tuple[tuple[str, int], ...] = ()

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def decays(self) -> bool:
        """Weight decay is for matrices and embeddings, not for biases and norms."""
        return len(self.shape) >= 2

    def initial(self, seed: int) -> np.ndarray:
        """float32 [shape]: a function of the seed and the parameter's name alone."""
        if self.std is None:
            return np.full(self.shape, self.fill, np.float32)
        return normal(seed, stream_of(self.name), self.shape, self.std)


class Model(ABC):
    """An architecture with its sizes. B batch, T time, C channels, V vocabulary."""

    architecture: ClassVar[str]
    vocab_size: int
    n_layer: int
    block_size: int
    tie_embeddings: bool
    final_softcap: float | None = None  # of the logits

    @abstractmethod
    def parameters(self) -> list[Parameter]:
        """All weights, in the order in which checkpoints list them."""

    @abstractmethod
    def hidden(
        self,
        w: Weights,
        tokens: Value,
        random: Value | None = None,
        cache: Cache | None = None,
    ) -> Value:
        """Tokens int32 [B, T] to the last layer's normalised output [B, T, C].

        random: the uint32[4] buffer that dropout reads; None leaves dropout out.
        cache: where a text is written, what takes attention's place: `cache.attend(layer, qkv, …)`.
        The tokens then stand at the positions cache.start[b] + t; without it, at t.
        """

    @abstractmethod
    def head(self, w: Weights) -> Value:
        """The output layer's weight, [V, C]."""

    @abstractmethod
    def hf_config(self, eos_id: int | None) -> dict[str, Any]:
        """The content of Hugging Face's config.json."""

    def to_hf(self, weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Weights as the checkpoint stores them."""
        tensors = {}
        for p in self.parameters():
            row = 0
            for name, rows in p.parts or ((p.name, p.shape[0]),):
                tensors[name] = weights[p.name][row : row + rows]
                row += rows
        return tensors

    def from_hf(self, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Weights from a checkpoint's tensors; CheckpointError where one does not fit."""
        weights = {}
        for p in self.parameters():
            found = []
            for name, rows in p.parts or ((p.name, p.shape[0]),):
                shape = (rows, *p.shape[1:])
                if name not in tensors:
                    raise CheckpointError(f"the checkpoint has no tensor '{name}'")
                if tensors[name].shape != shape:
                    raise CheckpointError(
                        f"tensor '{name}' has shape {list(tensors[name].shape)}, the model wants "
                        f"{list(shape)}"
                    )
                found.append(np.asarray(tensors[name], np.float32))
            weights[p.name] = found[0] if len(found) == 1 else np.concatenate(found)
        return weights

    def logits(self, w: Weights, hidden: Value) -> Value:
        """[..., C] to [..., V], float32 where hidden is bfloat16: rounded, many would be equal."""
        logits = matmul(hidden, self.head(w), transpose_b=True, dtype=wide(hidden.dtype))
        return logits if self.final_softcap is None else softcap(logits, self.final_softcap)

    def loss(
        self,
        w: Weights,
        tokens: Value,
        targets: Value,
        random: Value | None = None,
        seed: Value | None = None,
    ) -> tuple[Value, Value]:
        """Sum of the cross-entropy over targets that are not ignored, and their count.

        seed: for training, the gradient of that sum, with which differentiation begins; shape ().
        """
        hidden = self.hidden(w, tokens, random)
        head, cap = self.head(w), self.final_softcap
        return linear_cross_entropy(hidden, head, targets, seed, softcap=cap)

    def n_parameters(self) -> int:
        """Number of trained numbers."""
        return sum(p.size for p in self.parameters())


# ---------------------------------------------------------------- weights as buffers

PRECISIONS = {"fp32": "float32", "bf16": "bfloat16"}


def shadow(name: str) -> str:
    """The buffer of a weight's bfloat16 copy, where a program has one."""
    return f"{name}.bf16"


def decaying_first(model: Model) -> list[Parameter]:
    """The parameters in the order of a program's buffers: what is updated alike lies together."""
    return sorted(model.parameters(), key=lambda p: not p.decays)


def declare(program: Program, model: Model, precision: str = "fp32", masters: bool = True) -> None:
    """Declare the model's weights as buffers of a program.

    The master weights are float32. With precision "bf16" matrices and embeddings also have a
    bfloat16 copy, which the forward and backward passes read and the update keeps equal; they have
    nothing else without `masters`, where nothing is trained.
    """
    for p in decaying_first(model):
        copied = precision == "bf16" and len(p.shape) >= 2
        if masters or not copied:
            program.buffer(p.name, p.shape, "float32", "weight")
        if copied:
            program.buffer(shadow(p.name), p.shape, "bfloat16", "shadow")


def read_weight(program: Program, graph: Graph, name: str) -> Value:
    """A weight as a graph computes with it: the bfloat16 copy where there is one."""
    copied = shadow(name)
    return graph.read(program.buffers[copied if copied in program.buffers else name])


def read_weights(program: Program, graph: Graph, model: Model) -> dict[str, Value]:
    """All weights of a model as values of a graph."""
    return {p.name: read_weight(program, graph, p.name) for p in model.parameters()}
