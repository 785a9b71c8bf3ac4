"""The reference backend: every op by its `reference`, in plain NumPy.

Always there, readable, and able to run a whole program in float64, where it is the oracle that
the other backends are tested against.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import numpy as np
from numpy.typing import ArrayLike

from treadle.backends.base import Backend, Executable
from treadle.errors import BackendError
from treadle.graph.op import Node
from treadle.graph.plan import plan
from treadle.graph.program import Program
from treadle.graph.value import FLOATS, STORAGE, Spec, from_bfloat16, to_bfloat16


class NumpyBackend(Backend):
    """Runs programs by reference.

    float_dtype: "float32" keeps the graph's dtypes (bfloat16 values are float32 arrays rounded to
    bfloat16); "float64" computes every float value in double precision.
    """

    name = "numpy"

    def __init__(self, float_dtype: str = "float32") -> None:
        super().__init__()
        if float_dtype not in ("float32", "float64"):
            raise BackendError(f"the numpy backend runs in float32 or float64, not {float_dtype}")
        self.float_dtype = float_dtype

    def load(self, program: Program, graphs: Iterable[str] | None = None) -> NumpyExecutable:
        return NumpyExecutable(program, graphs, self.float_dtype)

    def describe(self) -> str:
        return f"numpy {np.__version__} (reference, {self.float_dtype})"

    def identity(self) -> dict[str, str]:
        return {"backend": self.name, "numpy": np.__version__}


class NumpyExecutable(Executable):
    """See NumpyBackend."""

    def __init__(self, program: Program, graphs: Iterable[str] | None, float_dtype: str) -> None:
        self.program = program
        self.float_dtype = float_dtype
        self.plans = {name: plan(program.graphs[name], None) for name in (graphs or program.graphs)}
        self.arrays: dict[str, np.ndarray] = {
            b.name: np.zeros(b.shape, self._storage(b)) for b in program.buffers.values()
        }

    def _storage(self, spec: Spec) -> type:
        if spec.dtype not in FLOATS:
            return STORAGE[spec.dtype]
        if self.float_dtype == "float64" or spec.dtype == "float64":
            return np.float64
        return np.float32

    def _round(self, array: np.ndarray, spec: Spec) -> np.ndarray:
        """The array in the dtype that this backend keeps for `spec`, never a view of an input."""
        kept: np.ndarray = np.array(array, dtype=self._storage(spec))
        if spec.dtype == "bfloat16" and self.float_dtype == "float32":
            return from_bfloat16(to_bfloat16(kept))
        return kept

    def write(self, name: str, array: ArrayLike) -> None:
        self.arrays[name] = self._round(self.checked(name, array), self.buffer(name))

    def read(self, name: str) -> np.ndarray:
        self.buffer(name)
        return self.arrays[name].copy()

    def read_into(self, name: str, target: np.ndarray) -> None:
        self.buffer(name)
        np.copyto(target, self.arrays[name])

    def run(self, *graphs: str) -> None:
        for name in graphs:
            self.profile(name)

    def profile(self, graph: str) -> list[tuple[Node, float]]:
        nodes, reads = self.plans[graph].graph.nodes, self.plans[graph].graph.reads
        values = {id(v): self.arrays[key] for key, v in reads.items()}
        remaining = {id(v): len(v.users) for n in nodes for v in n.outputs}
        timed = []
        for node in nodes:
            start = time.perf_counter()
            inputs = [None if v is None else values[id(v)] for v in node.inputs]
            with np.errstate(all="ignore"):
                outputs = node.op.evaluate(node, inputs, self._round)
            for v, array in zip(node.outputs, outputs, strict=True):
                values[id(v)] = self._round(array, v.spec)
                if v.buffer is not None:
                    self.arrays[v.buffer.name] = values[id(v)]
            for used in set(node.inputs):
                if used is not None and id(used) in remaining:
                    remaining[id(used)] -= 1
                    if remaining[id(used)] == 0:
                        del values[id(used)]
            timed.append((node, time.perf_counter() - start))
        return timed
