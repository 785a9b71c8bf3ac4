"""Optimizer steps on whole programs: what is skipped, what is clipped, and known first steps."""

from __future__ import annotations

import numpy as np
import pytest

from treadle.backends.base import Backend, Executable
from treadle.backends.cpu import CpuBackend, available
from treadle.backends.numpy import NumpyBackend
from treadle.errors import DTypeError, ShapeError
from treadle.graph.program import Program
from treadle.ops.optim import adamw, clip, sgd

needs_kernels = pytest.mark.skipif(not available(), reason="the C kernels are not built")
BACKENDS = ["numpy", pytest.param("cpu", marks=needs_kernels)]
SIZES = {"a": (40, 1000), "b": (7,)}
LR, DECAY, MAX_NORM, BETAS, EPS = 0.01, 0.1, 2.0, (0.9, 0.99), 1e-8


def backend_of(name: str, threads: int = 2) -> Backend:
    return CpuBackend(threads=threads) if name == "cpu" else NumpyBackend()


def step_program(optimizer: str, momentum: float = 0.9) -> Program:
    """Clip the gradients of two weights and update both by the optimizer."""
    program = Program()
    graph = program.graph("update")

    def scalar(name: str):  # type: ignore[no-untyped-def]
        return graph.read(program.buffer(name, (), "float32", "scalar"))

    def tensor(name: str, shape: tuple[int, ...]):  # type: ignore[no-untyped-def]
        return graph.read(program.buffer(name, shape))

    grads = [tensor(f"{key}.grad", shape) for key, shape in SIZES.items()]
    norm, factor, ok = clip(grads, MAX_NORM, scalar("apply"))
    lr, c1, c2 = scalar("lr"), scalar("correction1"), scalar("correction2")
    for (key, shape), g in zip(SIZES.items(), grads, strict=True):
        w, m = tensor(key, shape), tensor(f"{key}.m", shape)
        if optimizer == "adamw":
            v = tensor(f"{key}.v", shape)
            inputs = (w, g, m, v, lr, c1, c2, factor, ok)
            adamw(*inputs, betas=BETAS, eps=EPS, weight_decay=DECAY)
        else:
            buffer = m if momentum else None
            sgd(w, g, buffer, lr, factor, ok, momentum=momentum, weight_decay=DECAY)
    for name, value in (("norm", norm), ("scale", factor), ("ok", ok)):
        graph.assign(program.buffer(name, (), "float32", "output"), value)
    return program


def load(optimizer: str, backend: Backend, momentum: float = 0.9) -> Executable:
    """The program with weights of 1, gradients from a fixed seed, and a first step's scalars."""
    executable = backend.load(step_program(optimizer, momentum))
    rng = np.random.default_rng(0)
    for key, shape in SIZES.items():
        executable.write(key, np.ones(shape))
        executable.write(f"{key}.grad", rng.standard_normal(shape) * 1e-2)
    scalars = {"apply": 1.0, "lr": LR, "correction1": 1 - BETAS[0], "correction2": 1 - BETAS[1]}
    for name, value in scalars.items():
        executable.write(name, np.float32(value))
    return executable


def state(executable: Executable) -> dict[str, np.ndarray]:
    return {n: executable.read(n) for n in executable.program.buffers if n[0] in SIZES}


@pytest.mark.parametrize("name", BACKENDS)
def test_first_step_of_adamw_is_lr_times_nearly_the_sign(name: str) -> None:
    executable = load("adamw", backend_of(name))
    executable.run("update")
    for key in SIZES:
        g = executable.read(f"{key}.grad") * executable.read("scale")
        expected = 1 - LR * DECAY - LR * g / (np.abs(g) + EPS)
        np.testing.assert_allclose(executable.read(key), expected, atol=LR * 1e-4)


@pytest.mark.parametrize("name", BACKENDS)
def test_momentum_sums_up_equal_gradients(name: str) -> None:
    executable = load("sgd", backend_of(name))
    g = {key: executable.read(f"{key}.grad").astype(np.float64) for key in SIZES}
    factor = min(1.0, MAX_NORM / np.sqrt(sum((x**2).sum() for x in g.values())))
    w, m = {key: np.ones(shape) for key, shape in SIZES.items()}, dict.fromkeys(SIZES, 0.0)
    for _ in range(3):
        executable.run("update")
        for key in SIZES:
            m[key] = 0.9 * m[key] + factor * g[key] + DECAY * w[key]
            w[key] = w[key] - LR * m[key]
    for key in SIZES:
        np.testing.assert_allclose(executable.read(key), w[key], rtol=1e-6)
        np.testing.assert_allclose(executable.read(f"{key}.m"), m[key], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", BACKENDS)
def test_sgd_without_momentum_has_no_buffer(name: str) -> None:
    executable = load("sgd", backend_of(name), momentum=0.0)
    executable.run("update")
    factor = executable.read("scale")
    for key, shape in SIZES.items():
        change = executable.read(f"{key}.grad") * factor + DECAY
        np.testing.assert_allclose(executable.read(key), 1 - LR * change, rtol=1e-6)
        assert np.array_equal(executable.read(f"{key}.m"), np.zeros(shape))


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("reason", ["not applied", float("nan"), float("inf"), -float("inf")])
def test_a_skipped_step_changes_nothing(name: str, optimizer: str, reason: str | float) -> None:
    executable = load(optimizer, backend_of(name))
    if reason == "not applied":
        executable.write("apply", np.float32(0))
    else:
        g = executable.read("b.grad")
        g[3] = reason
        executable.write("b.grad", g)
    before = state(executable)
    executable.run("update")
    assert executable.read("ok") == 0
    assert np.isfinite(executable.read("norm")) == (reason == "not applied")
    for key, array in state(executable).items():
        assert np.array_equal(array, before[key], equal_nan=True), key


@pytest.mark.parametrize("name", BACKENDS)
def test_norm_and_scale(name: str) -> None:
    executable = load("adamw", backend_of(name))
    for size, clipped in ((1e-3, False), (1.0, True), (1e6, True)):
        rng = np.random.default_rng(1)
        grads = {key: rng.standard_normal(shape) * size for key, shape in SIZES.items()}
        for key, g in grads.items():
            executable.write(f"{key}.grad", g)
        executable.run("update")
        exact = np.sqrt(
            sum((g.astype(np.float32).astype(float) ** 2).sum() for g in grads.values())
        )
        np.testing.assert_allclose(executable.read("norm"), exact, rtol=2e-7)
        scale = executable.read("scale")
        assert (scale < 1) == clipped
        np.testing.assert_allclose(scale * exact, MAX_NORM if clipped else exact, rtol=1e-6)
        assert executable.read("ok") == 1


@needs_kernels
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_same_bits_for_any_number_of_threads(optimizer: str) -> None:
    results = []
    for threads in (1, 2, 3):
        executable = load(optimizer, backend_of("cpu", threads))
        for _ in range(3):
            executable.run("update")
        results.append({**state(executable), "norm": executable.read("norm")})
        executable.close()
    for other in results[1:]:
        assert all(np.array_equal(other[key], results[0][key]) for key in other)


def test_errors_name_the_op_and_the_input() -> None:
    program = Program()
    graph = program.graph("g")
    w, narrow = graph.read(program.buffer("w", (3,))), graph.read(program.buffer("n", (2,)))
    half = graph.read(program.buffer("h", (3,), "bfloat16"))
    s = graph.read(program.buffer("s", ()))
    with pytest.raises(ShapeError, match=r"\[sgd\] expected shape \[3\], got \[2\]"):
        sgd(w, narrow, None, s, s, s, momentum=0.0, weight_decay=0.0)
    with pytest.raises(ShapeError, match=r"\[sgd\] expected lr of shape \[\], got \[3\]"):
        sgd(w, w, None, w, s, s, momentum=0.0, weight_decay=0.0)
    with pytest.raises(ShapeError, match=r"\[sgd\] expected a momentum buffer"):
        sgd(w, w, None, s, s, s, momentum=0.9, weight_decay=0.0)
    with pytest.raises(DTypeError, match=r"\[global_norm\] expected float32"):
        clip([half], 1.0, s)
    with pytest.raises(ShapeError, match=r"\[global_norm\] expected at least one gradient"):
        clip([], 1.0, s)
