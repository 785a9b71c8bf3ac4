"""What a backend is: it loads a program and runs its graphs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

import numpy as np
from numpy.typing import ArrayLike

from treadle.errors import BackendError
from treadle.graph.op import Node, Target
from treadle.graph.plan import Plan
from treadle.graph.program import Memory, Program, memory
from treadle.graph.value import Buffer


class Executable(ABC):
    """A program in a device's memory, ready to run. Buffers start as zeros."""

    program: Program
    plans: dict[str, Plan]
    threads: int = 1

    @abstractmethod
    def write(self, name: str, array: ArrayLike) -> None:
        """Set a buffer. Floats are converted to the buffer's dtype; BackendError on a wrong shape
        or an unknown name."""

    @abstractmethod
    def read(self, name: str) -> np.ndarray:
        """A copy of a buffer's content (bfloat16 as float32)."""

    def read_into(self, name: str, target: np.ndarray) -> None:
        """Copy a buffer's content into an array of its shape, without other memory."""
        np.copyto(target, self.read(name))

    @abstractmethod
    def run(self, *graphs: str) -> None:
        """Run graphs one after another, as one call. May come back before they have run; whatever
        is done next with the executable waits for them."""

    @abstractmethod
    def profile(self, graph: str) -> list[tuple[Node, float]]:
        """Run a graph once, node by node: its nodes in order, with the seconds that each took.

        The results are those of `run`. The sum is more than a run takes, as work that nodes share
        between threads comes to a stop after each of them.
        """

    def close(self) -> None:  # noqa: B027 - most backends have nothing to do
        """Give the memory back; the executable cannot be used afterwards."""

    def memory(self) -> Memory:
        """Peak memory in bytes."""
        return memory(self.program, self.plans, self.threads)

    def buffer(self, name: str) -> Buffer:
        """The buffer's declaration; BackendError for an unknown name."""
        if name not in self.program.buffers:
            raise BackendError(f"there is no buffer @{name} in this program")
        return self.program.buffers[name]

    def checked(self, name: str, array: ArrayLike) -> np.ndarray:
        """The array, after comparing its shape with the buffer's."""
        buffer = self.buffer(name)
        values = np.asarray(array)
        if values.shape != buffer.shape:
            raise BackendError(
                f"cannot write an array of shape {values.shape} to @{name} of shape {buffer.shape}"
            )
        return values


class Backend(ABC):
    """A way to run programs on a device. target: what their graphs are lowered for, None where
    they run by reference. choices: what was measured and can change bits, by key; a run that goes
    on is given those that it began with, before anything is loaded."""

    name: str
    target: Target | None = None

    def __init__(self) -> None:
        self.choices: dict[str, int] = {}

    @abstractmethod
    def load(self, program: Program, graphs: Iterable[str] | None = None) -> Executable:
        """Plan the graphs (all when None) and lay out memory for them."""

    @abstractmethod
    def describe(self) -> str:
        """One line: device, instruction set, threads."""

    def identity(self) -> dict[str, str]:
        """What a result's bits depend on: backend, instruction set, versions."""
        return {"backend": self.name}
