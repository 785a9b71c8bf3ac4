"""Packed matrix multiplication against float64, for every instruction set of this machine."""

from __future__ import annotations

import ctypes
import dataclasses

import numpy as np
import pytest

from kernels_c import (
    ACTIVATIONS,
    ISAS,
    activated,
    load_library,
    rounded_to_bf16,
    run_matmul,
    strides,
)
from treadle.ops.tiles import matmul_tiles


@pytest.fixture(scope="session", params=ISAS)
def library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    return load_library(request.param)


SIZES = [
    (1, 1, 1), (1, 33, 257), (31, 1, 33), (2, 123, 1), (33, 31, 123), (123, 257, 31), (257, 33, 2),
    (257, 123, 400), (14, 32, 384), (28, 64, 385), (300, 500, 20), (768, 65, 64), (1, 768, 768),
]  # fmt: skip
LAYOUTS = [(False, False), (True, False), (False, True), (True, True)]


def operand(rng: np.random.Generator, rows: int, cols: int, transposed: bool) -> np.ndarray:
    """Random [rows, cols] inside a larger array, so that its outer stride exceeds its width."""
    shape = (cols, rows) if transposed else (rows, cols)
    wide = rng.standard_normal((shape[0], shape[1] + 5)).astype(np.float32)
    inner = wide[:, 2 : 2 + shape[1]]
    return inner.T if transposed else inner


def check_error(got: np.ndarray, exact: np.ndarray, naive: np.ndarray, floor: float) -> None:
    """Largest error at most twice that of naive float32, plus a small floor."""
    allowed = 2 * np.abs(naive - exact).max() + floor
    error = np.abs(got - exact).max()
    assert error <= allowed, f"error {error:.2e}, allowed {allowed:.2e}"


def naive_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """float32, one product after another."""
    total = np.zeros((a.shape[0], b.shape[1]), np.float32)
    for k in range(a.shape[1]):
        total += a[:, k : k + 1] * b[k : k + 1]
    return total


@pytest.mark.parametrize(("ta", "tb"), LAYOUTS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_matmul_agrees_with_float64_for_odd_sizes_and_all_transposes(
    library: ctypes.CDLL, size: tuple[int, int, int], ta: bool, tb: bool
) -> None:
    m, n, k = size
    rng = np.random.default_rng(m * 7 + n * 3 + k)
    a, b = operand(rng, m, k, ta), operand(rng, k, n, tb)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    frame = np.full((m, n + 3), 7.0, np.float32)
    run_matmul(library, frame[:, :n], a, b)
    check_error(frame[:, :n], exact, naive_product(a, b), 1e-6 * np.sqrt(k))
    assert (frame[:, n:] == 7.0).all(), "nothing is written beside the output"


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(
    "extras",
    ["", "bias", "accumulate", "bias accumulate", "residual accumulate", "bias pre residual scale"],
)
def test_matmul_epilogues(library: ctypes.CDLL, activation: str | None, extras: str) -> None:
    m, n, k = 45, 77, 400
    rng = np.random.default_rng(3)
    a, b = operand(rng, m, k, False) / np.float32(20), operand(rng, k, n, False)
    bias = rng.standard_normal(n).astype(np.float32) if "bias" in extras else None
    residual = rng.standard_normal((m, n)).astype(np.float32) if "residual" in extras else None
    pre = np.zeros((m, n), np.float32) if "pre" in extras else None
    scale = 0.25 if "scale" in extras else 1.0
    out = rng.standard_normal((m, n)).astype(np.float32)

    def reference(product: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        x = product * product.dtype.type(scale) + (0 if bias is None else bias)
        y = activated(activation, x) + (0 if residual is None else residual)
        return (out + y if "accumulate" in extras else y), x

    exact, exact_pre = reference(a.astype(np.float64) @ b.astype(np.float64))
    naive, naive_pre = reference(naive_product(a, b))
    run_matmul(
        library, out, a, b, pre=pre, bias=bias, residual=residual, scale=scale,
        activation=activation, accumulate="accumulate" in extras,
    )  # fmt: skip
    check_error(out, exact, naive, 2e-6)
    if pre is not None:
        check_error(pre, exact_pre, naive_pre, 2e-6)


def test_matmul_residual_may_be_the_output(library: ctypes.CDLL) -> None:
    rng = np.random.default_rng(4)
    a, b = operand(rng, 50, 800, False), operand(rng, 800, 70, True)
    out = rng.standard_normal((50, 70)).astype(np.float32)
    exact = out + a.astype(np.float64) @ b.astype(np.float64)
    naive = out + naive_product(a, b)
    run_matmul(library, out, a, b, residual=out)
    check_error(out, exact, naive, 1e-5)


def widened(x: np.ndarray) -> np.ndarray:
    return (x.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("output", [np.float32, np.uint16])
@pytest.mark.parametrize(("ta", "tb"), LAYOUTS)
@pytest.mark.parametrize(
    "size", [(45, 77, 400), (33, 64, 1601), (64, 33, 123), (3, 70, 1601), (1, 5, 1)], ids=str
)
def test_matmul_of_bf16(
    library: ctypes.CDLL, size: tuple[int, int, int], output: type, ta: bool, tb: bool
) -> None:
    m, n, k = size
    rng = np.random.default_rng(5)
    a = rounded_to_bf16(np.ascontiguousarray(operand(rng, m, k, False)))
    b = rounded_to_bf16(np.ascontiguousarray(operand(rng, k, n, False)))
    bias = rng.standard_normal(n).astype(np.float32)
    wide_a, wide_b = widened(a), widened(b)
    a = np.ascontiguousarray(a.T).T if ta else a
    b = np.ascontiguousarray(b.T).T if tb else b
    exact = wide_a.astype(np.float64) @ wide_b.astype(np.float64) + bias
    naive = naive_product(wide_a, wide_b) + bias
    out, pre = np.zeros((m, n), output), np.zeros((m, n), np.uint16)
    run_matmul(library, out, a, b, bias=bias, pre=pre)
    plain = np.zeros((m, n), output)
    run_matmul(library, plain, a, b, bias=bias)
    np.testing.assert_array_equal(out, plain)
    if output is np.uint16:
        naive = widened(rounded_to_bf16(naive))
        np.testing.assert_array_equal(out, pre)
        out = widened(out)
    else:
        np.testing.assert_array_equal(rounded_to_bf16(out), pre)
    check_error(out, exact, naive, 5e-7 * np.sqrt(k))


# Of a step of small models: forward, gradients of inputs (b) and weights (a), and an output layer.
TRAINING = [
    (768, 384, 128, ""), (768, 128, 512, ""), (768, 65, 128, "b"), (768, 128, 65, ""),
    (65, 128, 768, "a"), (128, 512, 768, "a"), (512, 128, 128, "a"), (256, 768, 1536, "b"),
    (512, 128, 8000, "b"), (128, 8000, 256, "a"), (64, 8000, 128, ""), (8, 3072, 768, ""),
]  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", TRAINING, ids=str)
def test_matmul_at_the_shapes_of_training(
    library: ctypes.CDLL, shape: tuple[int, int, int, str], dtype: str
) -> None:
    m, n, k, transposed = shape
    rng = np.random.default_rng(m + n + k)
    a = rng.standard_normal((k, m) if "a" in transposed else (m, k)).astype(np.float32)
    b = rng.standard_normal((n, k) if "b" in transposed else (k, n)).astype(np.float32)
    wide_a, wide_b = a, b
    if dtype == "bfloat16":
        a, b = rounded_to_bf16(a), rounded_to_bf16(b)
        wide_a, wide_b = widened(a), widened(b)
    a, wide_a = (x.T if "a" in transposed else x for x in (a, wide_a))
    b, wide_b = (x.T if "b" in transposed else x for x in (b, wide_b))
    out = np.full((m, n), np.nan, np.float32)
    run_matmul(library, out, a, b)
    exact = wide_a.astype(np.float64) @ wide_b.astype(np.float64)
    check_error(out, exact, naive_product(wide_a, wide_b), 5e-7 * np.sqrt(k))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [(200, 300, 1700), (300, 200, 1701)], ids=str)
def test_matmul_has_the_same_bits_for_any_number_of_threads_and_either_packing(
    library: ctypes.CDLL, size: tuple[int, int, int], dtype: str
) -> None:
    m, n, k = size
    rng = np.random.default_rng(6)
    a, b = operand(rng, m, k, True), operand(rng, k, n, True)
    if dtype == "bfloat16":
        a, b = rounded_to_bf16(a.T).T, rounded_to_bf16(b.T).T
    results = []
    shared = matmul_tiles(m, n, k, a.itemsize, strides(a))
    assert shared.packed_bytes and shared.k_blocks > 1 and shared.tasks > 2
    alone = dataclasses.replace(
        shared, packed_bytes=0, scratch_bytes=shared.scratch_bytes + shared.packed_bytes
    )
    for threads, tiles in [(1, shared), (2, shared), (5, shared), (1, alone), (3, alone)]:
        out = np.zeros((m, n), np.float32)
        run_matmul(library, out, a, b, threads=threads, tiles=tiles)
        results.append(out)
    for other in results[1:]:
        np.testing.assert_array_equal(results[0], other)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tb", [False, True])
def test_matmul_rows_do_not_depend_on_their_place(
    library: ctypes.CDLL, tb: bool, dtype: str
) -> None:
    """A boundary never changes bits: a row or a few alone, or among others, are the same rows."""
    rng = np.random.default_rng(7)
    a, b = operand(rng, 61, 1901, False), operand(rng, 1901, 95, tb)
    if dtype == "bfloat16":
        a = rounded_to_bf16(np.ascontiguousarray(a))
        b = rounded_to_bf16(b.T).T if tb else rounded_to_bf16(np.ascontiguousarray(b))
    together = np.zeros((61, 95), np.float32)
    run_matmul(library, together, a, b)
    for first, rows in ((0, 1), (13, 1), (53, 8), (20, 3), (60, 1)):
        alone = np.zeros((rows, 95), np.float32)
        run_matmul(library, alone, a[first : first + rows], b)
        np.testing.assert_array_equal(alone, together[first : first + rows])


@pytest.mark.parametrize("rows", [1, 5, 20, 300])
@pytest.mark.parametrize(("k", "last_chain"), [(384, 0), (385, 192), (528, 264), (768, 384)])
def test_matmul_adds_in_chains_of_bounded_length(
    library: ctypes.CDLL, rows: int, k: int, last_chain: int
) -> None:
    """2**24 swallows every 1 that is added to it, so what is left is the chains that follow."""
    a = np.ones((rows, k), np.float32)
    a[:, 0] = 2.0**24
    for b in (np.ones((k, 40), np.float32), np.ones((40, k), np.float32).T):
        out = np.zeros((rows, 40), np.float32)
        run_matmul(library, out, a, b)
        np.testing.assert_array_equal(out, 2.0**24 + last_chain)


def test_matmul_keeps_nan_visible(library: ctypes.CDLL) -> None:
    a, b = np.ones((20, 40), np.float32), np.ones((40, 50), np.float32)
    a[3, 5] = np.nan
    for activation in ACTIVATIONS:
        out = np.zeros((20, 50), np.float32)
        run_matmul(library, out, a, b, activation=activation)
        assert np.isnan(out[3]).all() and np.isfinite(np.delete(out, 3, axis=0)).all()
