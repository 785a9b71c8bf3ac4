"""Philox against its known answers, streams, normal numbers, and dropout's independence of the
way a batch is cut."""

from __future__ import annotations

import numpy as np
import pytest

from treadle.backends.base import Backend
from treadle.backends.cpu import CpuBackend, available
from treadle.backends.numpy import NumpyBackend
from treadle.errors import DTypeError, ShapeError
from treadle.graph.program import Program
from treadle.ops import random

# Known answers of Random123 for philox4x32-10: counter, key, result.
KNOWN = [
    ([0] * 4, (0, 0), [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    (
        [0xFFFFFFFF] * 4,
        (0xFFFFFFFF, 0xFFFFFFFF),
        [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
    ),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        (0xA4093822, 0x299F31D0),
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]
BACKENDS = [
    NumpyBackend(),
    pytest.param(
        "cpu", marks=pytest.mark.skipif(not available(), reason="the C kernels are not built")
    ),
]


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_known_answers(counter: list[int], key: tuple[int, int], result: list[int]) -> None:
    assert [int(word) for word in random.philox(counter, key)] == result


def test_words_follow_the_layout_of_counters() -> None:
    elements = np.array([0, 5, 2**34 + 3, 2**40 + 2], np.uint64)
    words = random.philox_words(7, 11, 13, elements)
    for element, word in zip(elements.tolist(), words.tolist(), strict=True):
        block, lane = divmod(element, 4)
        counter = [block & 0xFFFFFFFF, block >> 32, 13, 0]
        assert word == int(random.philox(counter, (7, 11))[lane])
    uniform = random.philox_uniform(7, 11, 13, elements)
    assert uniform.tolist() == [(int(w) >> 8) / 2**24 for w in words]


def test_stream_is_a_checksum_of_the_name() -> None:
    assert random.stream_of("123456789") == 0xCBF43926  # the check value of CRC-32
    assert random.stream_of("h.0/dropout") != random.stream_of("h.1/dropout")


def test_normal_numbers_have_the_right_moments_and_repeat() -> None:
    x = random.normal(1, 2, (300, 1001), 0.02)
    assert x.dtype == np.float32 and x.shape == (300, 1001)
    z = x.astype(np.float64).ravel() / 0.02
    n = z.size
    assert abs(z.mean()) < 4 / n**0.5
    assert abs(z.var() - 1) < 4 * (2 / n) ** 0.5
    assert abs((z**3).mean()) < 4 * (15 / n) ** 0.5
    assert abs((z**4).mean() - 3) < 4 * (96 / n) ** 0.5
    assert abs((z[:-1] * z[1:]).mean()) < 4 / n**0.5
    assert np.array_equal(x, random.normal(1, 2, (300, 1001), 0.02))
    assert not np.array_equal(x, random.normal(1, 3, (300, 1001), 0.02))
    assert np.array_equal(x.ravel()[:7], random.normal(1, 2, (7,), 0.02))


def _dropped(backend: Backend, x: np.ndarray, first_row: int, p: float = 0.3) -> np.ndarray:
    program = Program()
    graph = program.graph("g")
    a = graph.read(program.buffer("x", x.shape, "float32", "input"))
    state = graph.read(program.buffer("random", (4,), "uint32", "scalar"))
    y = random.dropout(a, p, state, "drop")
    graph.assign(program.buffer("y", x.shape, "float32", "output"), y)
    executable = backend.load(program)
    executable.write("x", x)
    words = [3, 5, first_row & 0xFFFFFFFF, first_row >> 32]
    executable.write("random", np.array(words, np.uint32))
    executable.run("g")
    result = executable.read("y")
    executable.close()
    return result


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("start", [0, 2**32 - 3, 2**40 + 1])
def test_dropout_does_not_depend_on_the_cut(backend: Backend | str, start: int) -> None:
    backend = CpuBackend(threads=2) if backend == "cpu" else backend
    x = np.ones((7, 33, 5), np.float32)
    whole = _dropped(backend, x, start)
    parts = [_dropped(backend, x[i : i + 2], start + i) for i in range(0, 7, 2)]
    assert np.array_equal(whole, np.concatenate(parts))
    assert set(np.unique(whole)) == {0.0, np.float32(1 / 0.7)}
    assert abs((whole == 0).mean() - 0.3) < 4 * (0.21 / x.size) ** 0.5


@pytest.mark.skipif(not available(), reason="the C kernels are not built")
def test_dropout_is_the_same_on_every_backend() -> None:
    x = np.ones((3, 7001), np.float32)
    for start in (0, 2**32 // 7001, 2**34 // 7001, 2**34 // 7001 - 1):
        ours, reference = (_dropped(b, x, start) for b in (CpuBackend(threads=2), NumpyBackend()))
        assert np.array_equal(ours, reference)


def test_dropout_of_nothing_is_the_value_itself() -> None:
    program = Program()
    graph = program.graph("g")
    x = graph.read(program.buffer("x", (3, 2)))
    state = graph.read(program.buffer("random", (4,), "uint32"))
    assert random.dropout(x, 0.0, state, "drop") is x
    with pytest.raises(ShapeError, match=r"\[dropout\] expected a probability"):
        random.dropout(x, 1.0, state, "drop")
    with pytest.raises(DTypeError, match="uint32"):
        random.dropout(x, 0.5, graph.read(program.buffer("f", (4,))), "drop")
