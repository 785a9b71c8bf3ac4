"""Values, buffers and dtypes: what flows along a graph's edges."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from treadle.errors import DTypeError

if TYPE_CHECKING:
    from treadle.graph.op import Graph, Node

Shape = tuple[int, ...]

# Storage type of each dtype, bfloat16 as its bits, since NumPy has no such type.
STORAGE: dict[str, type] = {
    "float32": np.float32,
    "float64": np.float64,
    "bfloat16": np.uint16,
    "int32": np.int32,
    "uint32": np.uint32,
}
FLOATS = ("float32", "float64", "bfloat16")
SUFFIX = {"float32": "f32", "float64": "f64", "bfloat16": "bf16", "int32": "i32", "uint32": "u32"}


def itemsize(dtype: str) -> int:
    """Bytes of one element of `dtype`; DTypeError for an unknown one."""
    if dtype not in STORAGE:
        raise DTypeError(f"[dtype] expected one of {', '.join(STORAGE)}, got {dtype!r}")
    return int(np.dtype(STORAGE[dtype]).itemsize)


def wide(dtype: str) -> str:
    """The dtype of what must stay exact beside tensors of `dtype`: statistics, losses, the
    gradients of weights. float32 for bfloat16, else the dtype itself."""
    return "float32" if dtype == "bfloat16" else dtype


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    """float32 of any shape to bfloat16 bits (uint16), round to nearest even, NaN kept NaN."""
    bits = np.asarray(x, dtype=np.float32, order="C").view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), (bits >> 16) | 0x40, rounded).astype(np.uint16)


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    """bfloat16 bits (uint16) to float32 of the same shape, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


@dataclass(frozen=True)
class Spec:
    """Shape and dtype: all that inference needs of a value."""

    shape: Shape
    dtype: str = "float32"

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self.size * itemsize(self.dtype)

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


ROLES = ("weight", "shadow", "grad", "state", "input", "scalar", "output", "cache")


@dataclass(frozen=True)
class Buffer(Spec):
    """Named memory that outlives a graph's run: weights, gradients, moments, inputs, scalars."""

    name: str = ""
    role: str = "state"

    def __str__(self) -> str:
        return f"@{self.name}: {Spec(self.shape, self.dtype)}"


@dataclass(eq=False)
class Value:
    """One SSA value of a graph.

    `buffer` is set when the value lives in persistent memory: it was read from that buffer, is the
    updated content of it, or has been assigned to it. `version` counts the updates of that buffer
    within the graph, so that the checker can tell a superseded value from the current one.
    """

    graph: Graph
    name: str
    spec: Spec
    node: Node | None = None
    index: int = 0
    buffer: Buffer | None = None
    version: int = 0
    users: list[Node] = field(default_factory=list, repr=False)

    @property
    def shape(self) -> Shape:
        return self.spec.shape

    @property
    def dtype(self) -> str:
        return self.spec.dtype

    @property
    def size(self) -> int:
        return self.spec.size

    @property
    def nbytes(self) -> int:
        return self.spec.nbytes

    def __str__(self) -> str:
        return f"%{self.name}: {self.spec}"
