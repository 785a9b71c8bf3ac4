"""Checks of ops: gradients against finite differences, kernels against the float64 reference.

Run by the tests over the whole table, and by `treadle check` on a person's own machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from treadle.backends.base import Backend, Executable
from treadle.backends.numpy import NumpyBackend
from treadle.cases import FLOAT, WIDE, Case, Input
from treadle.graph.autograd import gradients
from treadle.graph.op import add_all
from treadle.graph.program import Program
from treadle.graph.value import FLOATS, Spec, Value, from_bfloat16, to_bfloat16, wide
from treadle.ops.elementwise import copy, mul, sum_leading

# The error a kernel may have on top of twice the naive one's, relative to the result's scale.
FLOOR = {"float32": 2e-6, "bfloat16": 4e-3}
GRADIENT_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Check:
    """A result: the error, what it may be at most, and whether it is."""

    error: float
    limit: float

    @property
    def ok(self) -> bool:
        return bool(self.error <= self.limit)

    @property
    def distance(self) -> float:
        """The error in units of its limit. A limit of 0 is that of counts, which are exact."""
        if self.limit:
            return self.error / self.limit
        return 0.0 if self.ok else float("inf")


def inputs_of(case: Case, dtype: str) -> tuple[list[Spec | None], list[np.ndarray | None]]:
    """Specs and float64 or integer arrays of a case's inputs, rounded to what `dtype` can hold."""
    rng = np.random.default_rng(len(case.title) * 7919 + 1)
    specs: list[Spec | None] = []
    arrays: list[np.ndarray | None] = []
    for raw in case.inputs:
        entry = raw if isinstance(raw, Input) or raw is None else Input(tuple(raw))
        if entry is None:
            specs.append(None)
            arrays.append(None)
            continue
        kinds = {FLOAT: dtype, WIDE: wide(dtype)}
        spec = Spec(entry.shape, kinds.get(entry.dtype, entry.dtype))
        specs.append(spec)
        arrays.append(np.asarray(entry.make(rng, spec)))
    if case.prepare is not None:
        arrays = case.prepare(arrays)
    return specs, [
        None if a is None or s is None else _rounded(a, s)
        for a, s in zip(arrays, specs, strict=True)
    ]


def _rounded(array: np.ndarray, spec: Spec) -> np.ndarray:
    if spec.dtype == "bfloat16":
        return from_bfloat16(to_bfloat16(array.astype(np.float32))).astype(np.float64)
    if spec.dtype == "float32":
        return array.astype(np.float32).astype(np.float64)
    return array


# ---------------------------------------------------------------- kernels


def _single(case: Case, specs: Sequence[Spec | None]) -> tuple[Program, list[str]]:
    """A program whose one graph is the case's op; and the names of its output buffers."""
    program = Program()
    graph = program.graph("op")
    values: list[Value | None] = []
    for i, spec in enumerate(specs):
        if spec is None:
            values.append(None)
            continue
        values.append(graph.read(program.buffer(f"in{i}", spec.shape, spec.dtype, "input")))
    names = []
    for i, out in enumerate(graph.apply(case.op, *values)):
        if out.buffer is None:
            buffer = program.buffer(f"out{i}", out.shape, out.dtype, "output")
            graph.assign(buffer, out)
        assert out.buffer is not None
        names.append(out.buffer.name)
    return program, names


def _execute(
    executable: Executable, arrays: Sequence[np.ndarray | None], names: list[str]
) -> list[np.ndarray]:
    for i, array in enumerate(arrays):
        if array is not None:
            executable.write(f"in{i}", array)
    executable.run("op")
    results = [executable.read(name) for name in names]
    executable.close()
    return results


def symmetry(case: Case, backend: Backend, dtype: str) -> Check:
    """Largest error of the backend's outputs, scaled by each output's largest element.

    The limit is twice the error of the plain NumPy version in the same dtype, plus a floor.
    """
    return symmetries(case, [backend], dtype)[0]


def symmetries(case: Case, backends: Sequence[Backend], dtype: str) -> list[Check]:
    """`symmetry` for each of the backends."""
    specs, arrays = inputs_of(case, dtype)
    runs = []
    for b in (NumpyBackend("float64"), NumpyBackend(), *backends):
        program, names = _single(case, specs)
        runs.append(_execute(b.load(program), arrays, names))
    oracle, naive, *others = runs
    results = []
    for ours in others:
        outputs = zip(oracle, naive, ours, strict=True)
        checks = [_compare(*output, FLOOR[dtype]) for output in outputs]
        results.append(max(checks, key=lambda check: (check.distance, check.limit)))
    return results


def _compare(oracle: np.ndarray, naive: np.ndarray, ours: np.ndarray, floor: float) -> Check:
    if oracle.dtype.kind != "f":
        return Check(float(np.sum(oracle != ours)), 0.0)
    finite = np.isfinite(oracle)
    if not np.array_equal(oracle[~finite], ours[~finite], equal_nan=True):
        return Check(float("inf"), floor)
    exact = oracle[finite]
    scale = float(np.max(np.abs(exact), initial=0.0)) or 1.0
    error, allowed = (
        float(np.max(np.abs(x[finite] - exact), initial=0.0)) / scale for x in (ours, naive)
    )
    return Check(error if np.isfinite(error) else float("inf"), 2 * allowed + floor)


# ---------------------------------------------------------------- gradients


def gradient(case: Case, samples: int = 12, step: float = 1e-5) -> Check:
    """Largest error of the op's gradient against central differences in float64.

    The loss is a weighted sum of all float outputs; up to `samples` elements of each float input
    are moved. Relative to the largest gradient of that input.
    """
    specs, arrays = inputs_of(case, "float64")
    rng = np.random.default_rng(3)
    program = Program()
    graph = program.graph("op")
    values = [
        None
        if spec is None
        else graph.read(program.buffer(f"in{i}", spec.shape, spec.dtype, "input"))
        for i, spec in enumerate(specs)
    ]
    terms, weights = [], {}
    for i, y in enumerate(graph.apply(case.op, *values)):
        if y.dtype in FLOATS and case.differentiable(i):
            w = program.buffer(f"w{i}", y.shape, y.dtype, "input")
            weights[w.name] = rng.standard_normal(y.shape)
            terms.append(sum_leading(mul(y, graph.read(w)), (), y.dtype))
    loss = add_all(terms)
    wrt = [i for i, s in enumerate(specs) if s is not None and s.dtype in FLOATS]
    wrt = [i for i in wrt if i not in case.constants]
    grads = gradients(loss, [v for i in wrt if (v := values[i]) is not None])
    for i, dx in zip(wrt, grads, strict=True):
        out = program.buffer(f"d{i}", dx.shape, dx.dtype, "output")
        graph.assign(out, copy(dx) if dx.buffer is not None else dx)
    graph.assign(program.buffer("loss", (), loss.dtype, "output"), loss)

    executable = NumpyBackend("float64").load(program)
    for name, weight in weights.items():
        executable.write(name, weight)

    def evaluate(i: int, array: np.ndarray) -> float:
        executable.write(f"in{i}", array)
        executable.run("op")
        return float(executable.read("loss"))

    for i, array in enumerate(arrays):
        if array is not None:
            executable.write(f"in{i}", array)
    executable.run("op")
    exact = {i: executable.read(f"d{i}") for i in wrt}
    worst = 0.0
    for i in wrt:
        base = arrays[i]
        assert base is not None
        scale = max(float(np.max(np.abs(exact[i]), initial=0.0)), 1e-3)
        for flat in rng.choice(base.size, min(samples, base.size), replace=False):
            moved = []
            for sign in (1.0, -1.0):
                x = base.astype(np.float64)
                x.flat[flat] += sign * step
                moved.append(evaluate(i, x))
            difference = (moved[0] - moved[1]) / (2 * step)
            worst = max(worst, abs(difference - float(exact[i].flat[flat])) / scale)
        executable.write(f"in{i}", base)
    return Check(worst, GRADIENT_TOLERANCE)
