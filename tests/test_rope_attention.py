"""Rotary positions, and what attention with a window and a soft cap must and must not do."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from treadle.backends.cpu import CpuBackend, available
from treadle.backends.numpy import NumpyBackend
from treadle.errors import DTypeError, ShapeError
from treadle.graph.program import Program
from treadle.graph.value import Value
from treadle.ops.attention import attention
from treadle.ops.rope import rope

BACKENDS = [
    NumpyBackend("float64"),
    pytest.param(
        "cpu", marks=pytest.mark.skipif(not available(), reason="the C kernels are not built")
    ),
]
FREQUENCIES = (1.0, 0.3, 0.02)


def compute(
    backend: NumpyBackend | str,
    build: Callable[..., Value],
    x: np.ndarray,
    start: list[int] | None = None,
) -> np.ndarray:
    """What an op makes of x, and of int32 starts where they are given."""
    program = Program()
    graph = program.graph("g")
    inputs = [graph.read(program.buffer("x", x.shape, "float32", "input"))]
    if start is not None:
        inputs.append(graph.read(program.buffer("start", (len(start),), "int32", "input")))
    y = build(*inputs)
    graph.assign(program.buffer("y", y.shape, y.dtype, "output"), y)
    device = CpuBackend(threads=2) if isinstance(backend, str) else backend
    executable = device.load(program)
    executable.write("x", x)
    if start is not None:
        executable.write("start", np.array(start, np.int32))
    executable.run("g")
    result = executable.read("y")
    executable.close()
    return result


def packed(b: int, t: int, heads: int, d: int) -> np.ndarray:
    return np.random.default_rng(b + t).standard_normal((b, t, heads * d))


# ---------------------------------------------------------------- rope


@pytest.mark.parametrize("backend", BACKENDS)
def test_rope_multiplies_complex_numbers(backend: NumpyBackend | str) -> None:
    x = packed(2, 50, 4, 6)
    y = compute(backend, lambda qkv: rope(qkv, 2, 1, FREQUENCIES), x)
    pairs = x.reshape(2, 50, 4, 2, 3)
    turned = (pairs[..., 0, :] + 1j * pairs[..., 1, :]) * np.exp(
        1j * np.arange(50)[:, None, None] * np.array(FREQUENCIES)
    )
    expected = np.stack([turned.real, turned.imag], axis=3)
    expected[:, :, 3] = pairs[:, :, 3]  # the values stay
    np.testing.assert_allclose(y, expected.reshape(x.shape), atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_start_moves_the_positions(backend: NumpyBackend | str) -> None:
    x = packed(1, 50, 4, 6)
    whole = compute(backend, lambda qkv: rope(qkv, 2, 1, FREQUENCIES), x)
    parts = np.stack([x[0, 13:20], x[0, 40:47]])
    moved = compute(backend, lambda qkv, at: rope(qkv, 2, 1, FREQUENCIES, at), parts, [13, 40])
    np.testing.assert_array_equal(moved, np.stack([whole[0, 13:20], whole[0, 40:47]]))


@pytest.mark.skipif(not available(), reason="the C kernels are not built")
@pytest.mark.parametrize("position", [0, 1, 1023, 131_071, 2_000_000_000])
def test_angles_are_exact_at_any_position(position: int) -> None:
    """float32 angles, as positions times frequencies, would be off by whole radians at the end."""
    frequencies = tuple(500000.0 ** (-d / 64) for d in range(64))
    x = np.concatenate([np.ones(64), np.zeros(64), np.zeros(256)]).reshape(1, 1, 384)
    y = compute("cpu", lambda qkv, at: rope(qkv, 1, 1, frequencies, at), x, [position])[0, 0]
    angles = position * np.array(frequencies, np.longdouble)
    # Half a unit of the 48 bits that a turn is kept in, for each position.
    slack = 3e-7 + position * 2 * np.pi * 2.0**-49
    np.testing.assert_allclose(y[:64], np.cos(angles).astype(float), atol=slack)
    np.testing.assert_allclose(y[64:128], np.sin(angles).astype(float), atol=slack)


def test_what_rope_refuses() -> None:
    program = Program()
    graph = program.graph("g")
    qkv = graph.read(program.buffer("qkv", (2, 3, 24), "float32", "input"))
    start = graph.read(program.buffer("start", (3,), "int32", "input"))
    reals = graph.read(program.buffer("reals", (2,), "float32", "input"))
    with pytest.raises(ShapeError, match=r"\[rope\] expected qkv of shape \['B', 'T', 30\]"):
        rope(qkv, 3, 1, FREQUENCIES)
    with pytest.raises(ShapeError, match=r"\[rope\] expected start \[2\], got \[3\]"):
        rope(qkv, 2, 1, FREQUENCIES, start)
    with pytest.raises(DTypeError, match=r"\[rope\] expected a start of int32"):
        rope(qkv, 2, 1, FREQUENCIES, reals)


# ---------------------------------------------------------------- window, soft cap


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_window_of_one_sees_itself_alone(backend: NumpyBackend | str) -> None:
    x = packed(2, 70, 3, 5)
    y = compute(backend, lambda qkv: attention(qkv, 1, window=1), x)
    np.testing.assert_allclose(y, x[:, :, 10:], atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [3, 64, 100])
def test_a_window_is_attention_over_the_tokens_in_it(
    backend: NumpyBackend | str, window: int
) -> None:
    x = packed(1, 200, 3, 5)
    y = compute(backend, lambda qkv: attention(qkv, 1, window=window), x)
    for t in (0, 2, 63, 64, 65, 130, 199):
        seen = x[:, max(0, t - window + 1) : t + 1]
        alone = compute(NumpyBackend("float64"), lambda qkv: attention(qkv, 1), seen)
        np.testing.assert_allclose(y[:, t], alone[:, -1], atol=2e-6)


@pytest.mark.skipif(not available(), reason="the C kernels are not built")
def test_blocks_outside_the_window_are_not_computed() -> None:
    x = packed(1, 400, 3, 5)
    x[0, 0] = np.nan
    y = compute("cpu", lambda qkv: attention(qkv, 1, window=100), x)
    assert np.isnan(y[0, :100]).all() and np.isfinite(y[0, 192:]).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_soft_cap_bounds_the_scores(backend: NumpyBackend | str) -> None:
    x = packed(1, 80, 3, 5) * 3
    free, loose, tight = (
        compute(backend, lambda qkv, cap=cap: attention(qkv, 1, softcap=cap), x)
        for cap in (None, 1e4, 1e-6)
    )
    np.testing.assert_allclose(loose, free, atol=2e-3)
    means = np.cumsum(x[:, :, 10:], axis=1) / np.arange(1, 81)[:, None]  # all scores are alike
    np.testing.assert_allclose(tight, means, atol=1e-5)


def test_what_attention_refuses() -> None:
    graph = Program().graph("g")
    qkv = graph.read(Program().buffer("qkv", (2, 3, 24), "float32", "input"))
    with pytest.raises(ShapeError, match=r"\[attention\] expected a window of at least 1, got 0"):
        attention(qkv, 2, 1, window=0)
    with pytest.raises(ShapeError, match=r"\[attention\] expected a softcap above 0, got -1"):
        attention(qkv, 2, 1, softcap=-1.0)
