"""What broke for users of other projects: a test by its number for each kind of fault.

`pytest -k failure_14_` runs those of a number; they stand beside what they test. Faults of devices
are here.
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
from opencl_fakes import FakeDevice, FakePlatform, pocl, pretend
from runs import fail, succeed, write_text
from treadle.backends import auto, cpu, gpu, opencl
from treadle.backends.base import Backend
from treadle.backends.numpy import NumpyBackend
from treadle.backends.opencl import OpenClBackend
from treadle.data.sampler import Sampler
from treadle.graph.op import Gpu, Grid
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
    assert number in numbered(), f"write test_failure_{number}_: {FAULTS[number]}"


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


def test_failure_22_forty_epochs_on_a_gpu_are_those_of_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Synchronisation that is missing shows in some runs only, and not at all in a debugger."""
    monkeypatch.setenv("TREADLE_TUNE", "0")
    device = OpenClBackend(pocl())
    exact = losses(NumpyBackend("float64"), 40)
    limit = 2 * np.abs(losses(NumpyBackend(), 40) - exact).max() + 1e-6
    first = losses(device, 40)
    assert np.abs(first - exact).max() <= limit
    assert np.array_equal(first, losses(device, 40))


def test_failure_23_a_device_of_the_least_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With work-groups of 64 and 32 KB of local memory: no kernel asks for more, and all train."""
    monkeypatch.setenv("TREADLE_OPENCL_GROUP", "64")
    monkeypatch.setenv("TREADLE_OPENCL_LOCAL", "32768")
    monkeypatch.setenv("TREADLE_TUNE", "0")
    device = OpenClBackend(pocl())
    assert (device.target.group, device.target.local) == (64, 32768)  # type: ignore[union-attr]
    asked, kernel = set(), device.kernel

    def seen(name: str, grid: Grid) -> object:
        asked.add(grid.items)
        made = kernel(name, grid)
        used = made.get_work_group_info(
            opencl.module().kernel_work_group_info.LOCAL_MEM_SIZE, device.device
        )
        assert used <= 32768, f"{name} wants {used} bytes of local memory"
        return made

    monkeypatch.setattr(device, "kernel", seen)
    found = losses(device, 3)
    assert max(asked) <= 64
    assert found == pytest.approx(losses(NumpyBackend("float64"), 3), abs=1e-5)


def test_failure_23_sizes_are_asked_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    small = FakeDevice("small", max_work_group_size=128, local_mem_size=40000)
    pretend(monkeypatch, FakePlatform(devices=[small]), starts=True)
    target = OpenClBackend().target
    assert target == Gpu(group=128, local=40000, vector=1, allocation=small.max_mem_alloc_size)


@pytest.mark.parametrize(
    "path", [p for ext in ("cl", "clh") for p in sorted(gpu.PACKAGE.rglob(f"*.{ext}"))], ids=str
)
def test_failure_23_kernels_use_nothing_optional(path: Path) -> None:
    """No fp64, no fp16, no subgroups, no images, no atomic floats."""
    text = re.sub(r"/\*.*?\*/|//[^\n]*", " ", path.read_text(encoding="utf-8"), flags=re.S)
    if path.name == "cuda.clh":
        return
    words = set(re.findall(r"\w+", text))
    optional = r"double\d*|half\d*|cl_khr_\w+|sub_group\w*|image\dd\w*|atomic?_?\w*|vload_half\d*"
    assert not {w for w in words if re.fullmatch(optional, w)}


TWO = {"opencl": "faster", "opencl:0": "faster", "opencl:1": "slower", "opencl:2": "processor",
       "opencl:SLOW": "slower", "opencl:pocl": "processor"}  # fmt: skip


@pytest.mark.parametrize("name", TWO)
def test_failure_24_two_devices_are_listed_and_chosen(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By number or by name; graphics processors come first, whatever order drivers have."""
    pocl = FakePlatform("PoCL", [FakeDevice("a processor", type=2)])
    gpus = FakePlatform("GPUs", [FakeDevice("the faster one"), FakeDevice("the slower one")])
    pretend(monkeypatch, pocl, gpus)
    monkeypatch.setattr(auto, "FAMILIES", [])
    assert TWO[name] in opencl.choose(name).name
    listed = [line for line in succeed("devices").splitlines() if line.startswith("opencl:")]
    assert [line.split()[0] for line in listed] == ["opencl:0", "opencl:1", "opencl:2"]
    assert all(word in line for word, line in zip(("fast", "slow", "proc"), listed, strict=True))


@pytest.mark.parametrize("device", ["opencl:77", "opencl:no such GPU", "cuda:77"])
def test_a_device_that_is_not_there_is_refused(device: str, tmp_path: Path) -> None:
    text = write_text(tmp_path / "a.txt")
    told = fail("train", "--data", text, "--device", device, "--out", tmp_path / "run")
    assert device.partition(":")[0] in told.lower() and not (tmp_path / "run").exists()
