"""The C kernels' foundations: vector maths, bfloat16, Philox, the walker, the build."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kernels_c import (
    COMPILER,
    ISAS,
    VECTOR_FUNCTIONS,
    Calls,
    compile_probe,
    erf64,
    load_library,
    pointer,
    rounded_to_bf16,
    run_matmul,
)
from treadle.backends import build as builder
from treadle.backends import cpu


@pytest.fixture(scope="session", params=ISAS)
def isa(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def library(isa: str) -> ctypes.CDLL:
    return load_library(isa)


@pytest.fixture(scope="session")
def probes(isa: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, ctypes.CDLL]:
    return compile_probe(isa, tmp_path_factory.mktemp(f"probe-{isa}"))


@pytest.fixture(scope="session")
def probe(probes: dict[str, ctypes.CDLL]) -> ctypes.CDLL:
    return probes["f32"]


def apply(probe: ctypes.CDLL, name: str, x: np.ndarray) -> np.ndarray:
    y = np.full_like(x, 7.0)
    getattr(probe, f"map_{name}")(ctypes.c_int64(x.size), pointer(x), pointer(y))
    return y


# ---- vector maths ------------------------------------------------------------------------------


def every_magnitude(low: float, high: float) -> np.ndarray:
    """Both signs, dense in exponent from denormals up, and dense linearly in [low, high]."""
    bits = np.linspace(1, 0x7F7FFFFF, 200_003).astype(np.uint32)
    magnitudes = bits.view(np.float32)
    linear = np.linspace(low, high, 300_007).astype(np.float32)
    return np.concatenate([magnitudes, -magnitudes, linear, np.zeros(1, np.float32)])


# name: oracle, dense interval, largest error in ulp, absolute floor
ACCURACY: dict[str, tuple[Callable[[np.ndarray], np.ndarray], float, float, float, float]] = {
    "vexp": (np.exp, -106.0, 90.0, 1.5, 0.0),
    "vlog": (np.log, 1e-6, 4.0, 1.5, 0.0),
    "vtanh": (np.tanh, -12.0, 12.0, 3.0, 0.0),
    "verf": (erf64, -5.0, 5.0, 3.0, 0.0),
    "vsigmoid": (lambda x: 1 / (1 + np.exp(-x)), -90.0, 20.0, 3.0, 1.2e-38),
    "vrsqrt": (lambda x: 1 / np.sqrt(x), 0.0, 10.0, 1.5, 0.0),
    "vsqrt": (np.sqrt, 0.0, 10.0, 0.5, 0.0),
}


@pytest.mark.parametrize("name", ACCURACY)
def test_elementary_functions_stay_within_their_stated_error(probe: ctypes.CDLL, name: str) -> None:
    oracle, low, high, ulps, floor = ACCURACY[name]
    x = every_magnitude(low, high)
    got = apply(probe, name, x)
    with np.errstate(all="ignore"):
        exact = oracle(x.astype(np.float64))
        expected = exact.astype(np.float32)
        unit = np.spacing(np.abs(expected)).astype(np.float64)
        error = np.abs(got - exact) / unit
    special = ~np.isfinite(expected)
    np.testing.assert_array_equal(got[special], expected[special])
    measured = np.where(error * unit <= floor, 0.0, error)[~special]
    worst = int(np.argmax(measured))
    assert measured[worst] <= ulps, f"{name}({x[~special][worst]!r}): {measured[worst]:.2f} ulp"


@pytest.mark.parametrize("name", VECTOR_FUNCTIONS)
def test_nan_and_tails_pass_through_every_function(probe: ctypes.CDLL, name: str) -> None:
    lanes = probe.lanes()
    x = np.linspace(0.1, 0.9, 3 * lanes).astype(np.float32)
    whole = apply(probe, name, x)
    for n in range(1, 2 * lanes + 1):
        y = np.full(3 * lanes, 7.0, np.float32)
        getattr(probe, f"map_{name}")(ctypes.c_int64(n), pointer(x), pointer(y))
        np.testing.assert_array_equal(y[:n], whole[:n])
        np.testing.assert_array_equal(y[n:], 7.0)
    for bits in (0x7FC00000, 0xFFC00000, 0x7F800001, 0x7FC12345):
        nan = np.full(lanes + 1, bits, np.uint32).view(np.float32)
        assert np.isnan(apply(probe, name, nan)).all()


def test_maxima_selections_and_sums_treat_nan_and_infinities_as_documented(
    probe: ctypes.CDLL,
) -> None:
    lanes = probe.lanes()
    rng = np.random.default_rng(0)
    nan, inf = np.float32("nan"), np.float32("inf")
    for trial in range(200):
        a, b, c = rng.choice([0.0, -0.0, 1.5, -2.25, inf, -inf, nan, 3e-45], (3, lanes)).astype(
            np.float32
        )
        out = np.empty((8, lanes), np.float32)
        probe.pairs(pointer(a), pointer(b), pointer(c), pointer(out))
        with np.errstate(invalid="ignore"):
            lane = np.arange(lanes)
            expected = [
                np.maximum(a, b),
                np.minimum(a, b),
                (a.astype(np.float64) * b + c).astype(np.float32),
                np.copysign(np.abs(a), b),
                np.where(a < b, a, c),
                np.where((lane < 3) & ~(a == b), b, c),
                np.where((a >= b) | np.isnan(c), a, b),
                lane,
            ]
        for got, want in zip(out, expected, strict=True):
            np.testing.assert_array_equal(got, want, err_msg=f"trial {trial}")
        x = np.where(np.isnan(a), 2.0, a).astype(np.float32)
        if trial % 2:
            x[trial % lanes] = nan
        sums = np.empty(2, np.float32)
        probe.horizontal(pointer(x), pointer(sums))
        np.testing.assert_array_equal(sums[1], x.max())
        with np.errstate(invalid="ignore"):
            np.testing.assert_array_equal(sums[0], x.sum())


def test_sum_over_lanes_halves_in_a_fixed_order(probe: ctypes.CDLL) -> None:
    lanes = probe.lanes()
    x = np.random.default_rng(1).standard_normal(lanes).astype(np.float32)
    out = np.empty(2, np.float32)
    probe.horizontal(pointer(x), pointer(out))
    tree = x
    while tree.size > 1:
        tree = tree[: tree.size // 2] + tree[tree.size // 2 :]
    assert out[0] == tree[0]


# ---- bfloat16 ----------------------------------------------------------------------------------


def test_bf16_narrowing_rounds_to_nearest_even_and_keeps_nan_and_denormals(
    probes: dict[str, ctypes.CDLL],
) -> None:
    probe = probes["bf16"]
    high = np.arange(0, 1 << 16, 7, dtype=np.uint32) << 16
    low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    x = (high[:, None] | low).ravel().view(np.float32)
    vector, scalar = np.zeros((2, x.size), np.uint16)
    probe.narrow(ctypes.c_int64(x.size), pointer(x), pointer(vector), pointer(scalar))
    np.testing.assert_array_equal(vector, rounded_to_bf16(x))
    np.testing.assert_array_equal(scalar, rounded_to_bf16(x))


@pytest.mark.parametrize("dtype", builder.DTYPE_FLAGS)
def test_partial_loads_and_stores_touch_only_their_lanes(
    probes: dict[str, ctypes.CDLL], dtype: str
) -> None:
    probe = probes[dtype]
    lanes = probe.lanes()
    values = np.linspace(-3, 5, lanes).astype(np.float32)
    stored = rounded_to_bf16(values) if dtype == "bf16" else values
    exact = (stored.astype(np.uint32) << 16).view(np.float32) if dtype == "bf16" else values
    for n in range(lanes + 1):
        # The end of a page that cannot be read lies right after the last element.
        page = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
        source = guarded(stored[:n], page)
        y = np.full(lanes + 1, 9.0, np.float32)
        z = np.full(lanes + 1, 9, stored.dtype)
        probe.copy(ctypes.c_int64(n), source, pointer(y), pointer(z))
        np.testing.assert_array_equal(y[:n], exact[:n])
        np.testing.assert_array_equal(z[:n], stored[:n])
        assert (y[n:] == 9.0).all() and (z[n:] == 9).all()
    z, y = np.zeros(lanes, stored.dtype), np.zeros(lanes, np.float32)
    probe.whole(pointer(values), pointer(z), pointer(y))
    np.testing.assert_array_equal(z, stored)
    np.testing.assert_array_equal(y, exact)


GUARDED: list[object] = []


def guarded(array: np.ndarray, page: int) -> ctypes.c_void_p:
    """A copy of the array that ends where a page without access begins (where mprotect exists)."""
    import mmap

    memory = mmap.mmap(-1, 2 * page)
    GUARDED.append(memory)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    at = start + page - array.nbytes
    ctypes.memmove(at, array.tobytes(), array.nbytes)
    if os.name == "posix":
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + page), page, 0) == 0
    return ctypes.c_void_p(at)


# ---- Philox ------------------------------------------------------------------------------------

# Random123's known-answer file: counter, key, words.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000",
     "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
     "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
     "d16cfe09 94fdcceb 5001e420 24126ea1"),
]  # fmt: skip


def words(text: str) -> np.ndarray:
    return np.array([int(word, 16) for word in text.split()], np.uint32)


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_philox_gives_the_known_answers(
    probe: ctypes.CDLL, counter: str, key: str, answer: str
) -> None:
    lanes = probe.lanes()
    block = words(counter)
    probe.random_words(pointer(block), pointer(words(key)))
    np.testing.assert_array_equal(block, words(answer))
    blocks = np.repeat(words(counter)[:, None], lanes, axis=1).copy()
    blocks[0, 1:] = np.arange(lanes - 1)
    expected = blocks.T.copy()
    uniform = np.zeros((2, lanes), np.float32)
    probe.random_vectors(pointer(blocks), pointer(words(key)), pointer(uniform))
    for row in expected:
        probe.random_words(pointer(row), pointer(words(key)))
    np.testing.assert_array_equal(blocks.T, expected)
    np.testing.assert_array_equal(uniform[0], (blocks[0] >> 8) * np.float32(2.0**-24))
    np.testing.assert_array_equal(uniform[0], uniform[1])


# ---- the walker --------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_walker_runs_every_task_once_in_phase_order(
    library: ctypes.CDLL, probe: ctypes.CDLL, threads: int
) -> None:
    rng = np.random.default_rng(2)
    calls = Calls()
    state = rng.integers(0, 1000, 17)
    expected = state
    counters = []
    for phase in range(300):
        size = int(rng.choice([1, 1, 1, 2, 3, 40]))
        after = np.zeros(size, np.int64)
        calls.add(probe, "chain_f32", size, [after, state], [state.size])
        weights = np.arange(expected.size) + np.arange(size)[:, None] + 1
        expected = (weights * expected).sum(axis=1) % 1000003
        state = after
        for _ in range(phase % 3):
            seen = np.zeros(int(rng.integers(0, 9)), np.int64)
            counters.append(seen)
            calls.add(probe, "add_one_f32", seen.size, [seen], [1])
        calls.end_phase()
    calls.run(library, threads)
    np.testing.assert_array_equal(state, expected)
    assert all((seen == 1).all() for seen in counters)


def test_walker_accepts_empty_lists_and_refuses_no_threads(library: ctypes.CDLL) -> None:
    calls = Calls()
    calls.run(library, 2)
    calls.end_phase()
    calls.run(library, 2)
    assert library.treadle_run(None, None, ctypes.c_int64(0), 0, None, ctypes.c_int64(0)) == -1


def test_every_instruction_set_of_the_processor_is_found() -> None:
    assert sorted(cpu.instruction_sets()) == sorted(ISAS)


def test_library_says_what_it_is(library: ctypes.CDLL, isa: str, probe: ctypes.CDLL) -> None:
    library.treadle_info.restype = ctypes.c_char_p
    facts = dict(part.split("=", 1) for part in library.treadle_info().decode().split("; "))
    assert facts["isa"] == isa
    assert facts["vector"] == str(probe.lanes())
    assert facts["threads"] == ("yes" if COMPILER.threaded else "no")
    assert bool(library.treadle_threaded()) == COMPILER.threaded
    assert library.treadle_supports(b"baseline") == 1
    assert library.treadle_supports(b"z80") == 0


def test_without_threads_the_library_runs_on_one_thread(tmp_path: Path) -> None:
    (result,) = builder.build(tmp_path, [ISAS[0]], threads=False)
    assert result.path is not None and result.message == ""
    plain = ctypes.CDLL(str(result.path))
    assert plain.treadle_threaded() == 0
    a, b = np.ones((40, 30), np.float32), np.ones((30, 20), np.float32)
    out = np.zeros((40, 20), np.float32)
    run_matmul(plain, out, a, b, threads=4)
    np.testing.assert_array_equal(out, 30.0)


# ---- the build ---------------------------------------------------------------------------------


def test_build_without_a_compiler_reports_and_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    (result,) = builder.build(tmp_path)
    assert result.path is None and "no-such-compiler" in result.message
    assert "numpy backend" in builder.report([result], threads=False)


def test_build_leaves_out_only_what_does_not_compile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = builder.Isa("imaginary", COMPILER.family, ("-mno-such-flag",))
    monkeypatch.setattr(builder, "ISAS", (*builder.ISAS, wrong))
    monkeypatch.setattr(builder, "sources", lambda: [builder.PACKAGE / "kernels" / "walker.c"])
    built = builder.build(tmp_path, [ISAS[-1], "imaginary"], cache_dir=tmp_path / "cache")
    results = {result.isa: result for result in built}
    assert results[ISAS[-1]].path is not None
    assert results["imaginary"].path is None and results["imaginary"].message


def test_build_refuses_an_unknown_instruction_set(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no instruction set mmx .* choose from"):
        builder.build(tmp_path, ["mmx"])


def test_build_compiles_again_only_what_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    compiled = []
    write = builder._write
    monkeypatch.setattr(
        builder, "_write", lambda c, t: compiled.append(Path(t).name) or write(c, t)
    )
    isa = ISAS[-1]
    monkeypatch.setattr(builder, "sources", lambda: [builder.PACKAGE / "kernels" / "walker.c"])
    builder.build(tmp_path, [isa], cache_dir=cache)
    assert len(compiled) == 2  # an object and the library
    builder.build(tmp_path, [isa], cache_dir=cache)
    assert len(compiled) == 2
    monkeypatch.setattr(builder, "COMPILE_FLAGS", [*builder.COMPILE_FLAGS, "-DCHANGED"])
    builder.build(tmp_path, [isa], cache_dir=cache)
    assert len(compiled) == 4


@pytest.mark.parametrize(("first_line", "dtypes"), [
    ("/* dtypes: f32 */", ["f32"]),
    ("/* dtypes: f32 bf16 */", ["f32", "bf16"]),
    ("/* Anything else. */", ["f32", "bf16"]),
])  # fmt: skip
def test_first_line_names_the_dtypes(first_line: str, dtypes: list[str]) -> None:
    assert builder.dtypes_of(first_line + "\nint x;\n") == dtypes
