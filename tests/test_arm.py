"""The op table on 64-bit Arm: the kernels are cross-compiled and run under qemu.

Wants Debian's gcc-aarch64-linux-gnu and qemu-user; run with `make test-arm`.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import ArrayLike

from treadle import checks
from treadle.backends import build as builder
from treadle.backends.base import Backend, Executable
from treadle.cases import Case, all_cases
from treadle.graph.op import Node
from treadle.graph.plan import ALIGN, align, plan
from treadle.graph.program import Program
from treadle.graph.value import STORAGE, from_bfloat16, to_bfloat16

COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
pytestmark = pytest.mark.arm


class Driver:
    """An emulated process that runs plans; see arm_driver.c."""

    def __init__(self, program: Path, library: Path) -> None:
        command = [EMULATOR, "-L", "/usr/aarch64-linux-gnu", str(program), str(library)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def run(self, memory: np.ndarray, parts: list[np.ndarray], head: list[int]) -> np.ndarray:
        assert self.process.stdin is not None and self.process.stdout is not None
        for part in (np.array(head, np.int64), memory, *parts):
            self.process.stdin.write(part.tobytes())
        self.process.stdin.flush()
        answer = self.process.stdout.read(memory.nbytes)
        assert len(answer) == memory.nbytes, "the emulated process ended"
        return np.frombuffer(answer, np.uint8).copy()


class ArmBackend(Backend):
    name = "arm"

    def __init__(self, driver: Driver) -> None:
        self.driver = driver

    def load(self, program: Program, graphs: Iterable[str] | None = None) -> ArmExecutable:
        return ArmExecutable(program, self.driver)

    def describe(self) -> str:
        return "emulated"


class ArmExecutable(Executable):
    """Lays memory out as the CPU backend does, in one piece that travels to the driver and back."""

    def __init__(self, program: Program, driver: Driver) -> None:
        self.program, self.driver = program, driver
        self.plans = {name: plan(graph, "cpu") for name, graph in program.graphs.items()}
        self.base: dict[str | None, int] = {}
        offset = 0
        for b in program.buffers.values():
            self.base[b.name] = offset
            offset += align(b.nbytes)
        self.base[None] = offset
        self.memory_bytes = np.zeros(offset + self.memory().arena + ALIGN, np.uint8)

    def _view(self, name: str) -> np.ndarray:
        b, at = self.buffer(name), self.base[name]
        return self.memory_bytes[at : at + b.nbytes].view(STORAGE[b.dtype]).reshape(b.shape)

    def write(self, name: str, array: ArrayLike) -> None:
        values = self.checked(name, array)
        if self.buffer(name).dtype == "bfloat16":
            values = to_bfloat16(np.asarray(values, np.float32))
        np.copyto(self._view(name), values, casting="unsafe")

    def read(self, name: str) -> np.ndarray:
        view = self._view(name)
        return from_bfloat16(view) if self.buffer(name).dtype == "bfloat16" else view.copy()

    def run(self, *graphs: str) -> None:
        for name in graphs:
            self._run(name)

    def profile(self, graph: str) -> list[tuple[Node, float]]:
        raise NotImplementedError("emulated time says nothing")

    def _run(self, name: str) -> None:
        p = self.plans[name]
        kernels = sorted({x.kernel for x in p.launches})
        names = np.zeros((len(kernels), 64), np.uint8)
        for row, kernel in zip(names, kernels, strict=True):
            row[: len(kernel)] = np.frombuffer(kernel.encode(), np.uint8)
        rows: list[list[int]] = []
        pointers: list[int] = []
        dims: list[int] = []
        nums: list[float] = []
        for x in p.launches:
            rows.append([kernels.index(x.kernel), x.tasks, len(pointers), len(dims), len(nums)])
            places = [p.place(a) for a in x.args]
            pointers += [-1 if q is None else self.base[q.buffer] + q.offset for q in places]
            dims += x.dims
            nums += x.nums
        parts = [names, np.array(rows, np.int64), np.array([*p.phases, len(rows)], np.int64)]
        parts += [np.array(pointers, np.int64), np.array(dims, np.int64), np.array(nums)]
        sizes = [len(kernels), len(rows), len(p.phases), len(pointers), len(dims), len(nums)]
        head = [self.memory_bytes.nbytes, *sizes, p.scratch_bytes]
        self.memory_bytes = self.driver.run(self.memory_bytes, parts, head)


@pytest.fixture(scope="session")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ArmBackend]:
    if shutil.which(COMPILER) is None or shutil.which(EMULATOR) is None:
        pytest.fail(f"install {COMPILER} and {EMULATOR} (Debian: gcc-aarch64-linux-gnu, qemu-user)")
    folder = tmp_path_factory.mktemp("arm")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CC", COMPILER)
        (result,) = builder.build(folder, cache_dir=folder / "cache")
    assert result.isa == "neon" and result.path is not None and result.message == ""
    source = Path(__file__).with_name("arm_driver.c")
    include = f"-I{builder.PACKAGE / 'kernels'}"
    command = [COMPILER, "-O1", "-Wall", include, str(source), "-ldl", "-o", str(folder / "driver")]
    subprocess.run(command, check=True)
    driver = Driver(folder / "driver", result.path)
    yield ArmBackend(driver)
    assert driver.process.stdin is not None
    driver.process.stdin.close()
    assert driver.process.wait(60) == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", all_cases(), ids=lambda c: c.title)
def test_kernels_on_arm(case: Case, dtype: str, backend: ArmBackend) -> None:
    if dtype not in case.dtypes:
        pytest.skip(f"no {dtype} kernel")
    result = checks.symmetry(case, backend, dtype)
    assert result.ok, f"error {result.error:.2e} above {result.limit:.2e}"
