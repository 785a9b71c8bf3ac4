"""What broke for users of other projects: a test by its number for each kind of fault.

`pytest -k failure_14_` runs those of a number; they stand beside what they test. Faults of devices
are here: a kind of device that this version lacks brings the tests of the numbers in `WAITING`.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import treadle
from runs import fail, write_text
from treadle import backends
from treadle.backends import cpu
from treadle.backends.base import Backend
from treadle.backends.numpy import NumpyBackend
from treadle.data.sampler import Sampler
from treadle.train.program import OptimizerSettings
from treadle.train.session import Session

TESTS = Path(__file__).parent

FAULTS = {
    1: "a corpus shorter than the context",
    2: "a validation split without a whole batch",
    3: "a remainder that is never trained on",
    4: "one file or one shard only",
    5: "steps beyond one epoch",
    6: "files that are not text",
    7: "line ends, byte-order marks, the locale",
    8: "a tokenizer that differs by hash seed or threads",
    9: "a vocabulary that is not a multiple of 64",
    10: "a killed and resumed run that differs",
    11: "an optimizer state that is missing",
    12: "a save before the first evaluation after a resume",
    13: "a resume with another architecture",
    14: "a kill during a save",
    15: "Ctrl-C, once and twice",
    16: "a final evaluation or sample that fails",
    17: "a loss that is no number, or spikes",
    18: "one core in use by surprise",
    19: "a prompt with an unknown character",
    20: "temperature 0 and below",
    21: "an empty prompt",
    22: "losses of a device that drift",
    23: "a device without fp16, fp64, large groups or much local memory",
    24: "two devices of a kind",
}
WAITING = {23: "opencl", 24: "opencl"}
"""The kind of device that a number needs; its tests come with that backend."""


@cache
def numbered() -> dict[int, list[str]]:
    """The tests in these files whose names begin with `test_failure_N_`."""
    found = defaultdict(list)
    for path in sorted(TESTS.glob("test_*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            name = node.name if isinstance(node, ast.FunctionDef) else ""
            if match := re.match(r"test_failure_(\d+)_", name):
                found[int(match[1])].append(f"{path.name}::{name}")
    return found


@pytest.mark.parametrize("number", FAULTS)
def test_every_fault_has_a_test_by_its_number(number: int) -> None:
    waits_for = WAITING.get(number)
    if number in numbered():
        assert waits_for is None, f"{number} is tested: drop it from WAITING"
    else:
        told = f"write test_failure_{number}_: {FAULTS[number]}"
        assert waits_for is not None and waits_for not in backends.NAMES, told


def test_no_test_has_a_number_that_is_no_fault() -> None:
    assert numbered().keys() <= FAULTS.keys()


def test_the_numbers_are_those_of_the_collection(shared_data: Path) -> None:
    page = (shared_data.parent / "cases" / "failures.md").read_text(encoding="utf-8")
    assert [int(number) for number in re.findall(r"^(\d+)\. ", page, re.M)] == list(FAULTS)


# ---- devices --------------------------------------------------------------------------------


def losses(backend: Backend, epochs: int) -> np.ndarray:
    """The losses of a small model that learns eight windows by heart, two steps an epoch."""
    model = treadle.GPT2(vocab_size=13, n_layer=1, n_head=2, n_embd=16, block_size=8)
    session = Session(model, backend, OptimizerSettings(), batch_size=4, block_size=8, seed=1)
    session.initialise()
    tokens = np.random.default_rng(0).integers(0, 13, 65).astype(np.int32)
    windows = Sampler(tokens, 8, 4, seed=1)
    found = []
    for step in range(2 * epochs):
        inputs, targets, _ = windows.batch(step)
        found.append(session.step(step, inputs, targets, lr=0.01).loss)
    session.executable.close()
    return np.array(found)


def test_failure_22_forty_epochs_do_not_drift() -> None:
    """Each loss of 40 epochs is that of the float64 reference, as nearly as plain NumPy's."""
    if not cpu.available():
        pytest.skip("the C kernels are not built")
    exact = losses(NumpyBackend("float64"), 40)
    assert exact[-1] < 0.7 * exact[0]
    limit = 2 * np.abs(losses(NumpyBackend(), 40) - exact).max() + 1e-6
    for threads in (1, 2):
        assert np.abs(losses(cpu.CpuBackend(threads), 40) - exact).max() <= limit


@pytest.mark.parametrize("device", ["opencl", "opencl:77", "opencl:Arc", "cuda", "cuda:3"])
def test_a_device_that_is_not_there_is_named_beside_those_that_are(
    device: str, tmp_path: Path
) -> None:
    text = write_text(tmp_path / "a.txt")
    told = fail("train", "--data", text, "--device", device, "--out", tmp_path / "run")
    assert repr(device) in told and "one of auto, cpu, numpy" in told
    assert not (tmp_path / "run").exists()
