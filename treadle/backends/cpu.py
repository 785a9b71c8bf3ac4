"""The CPU backend: C kernels, one call into C for each step.

Loading a program turns each plan into tables of calls whose pointers are final; running it hands
the tables to the walker (kernels/walker.c), which deals the tasks of each phase to its threads.
The walker runs in a worker thread, so that the main thread stays free for signals.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from itertools import groupby
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from treadle.backends.base import Backend, Executable
from treadle.backends.build import source_digest
from treadle.errors import BackendError, OutOfMemoryError
from treadle.graph.op import Node
from treadle.graph.plan import ALIGN, Plan, align, plan
from treadle.graph.program import Program
from treadle.graph.value import STORAGE, from_bfloat16, to_bfloat16

LIBRARIES = Path(__file__).parent / "lib"
# From the most to the least able; the first that was built and that the processor runs is loaded.
ISAS = ("avx512bf16", "avx512", "avx2", "neon", "baseline")

CALL = np.dtype([("kernel", "u8"), ("tasks", "i8"), ("ptr", "u8"), ("dim", "u8"), ("num", "u8")])


# ---------------------------------------------------------------- the library


def physical_cores() -> int:
    """Physical cores that this process may use (logical ones where the system does not tell)."""
    allowed = (
        os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    )
    cores = set()
    for cpu in allowed:
        topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
        try:
            package = (topology / "physical_package_id").read_text().strip()
            cores.add((package, (topology / "core_id").read_text().strip()))
        except OSError:
            return max(1, len(allowed))
    return max(1, len(cores))


def default_threads() -> int:
    """OMP_NUM_THREADS where it is set to a positive number, else the physical cores."""
    text = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(text) if text.isdigit() and int(text) > 0 else physical_cores()


class Library:
    """A loaded kernel library: `isa`, its own description, and its kernels' addresses."""

    def __init__(self, path: Path, isa: str) -> None:
        try:
            self.handle = ctypes.CDLL(str(path))
        except OSError as error:
            raise BackendError(
                f"cannot load the kernel library {path.name}: {error}; rebuild it with "
                "`pip install --force-reinstall .`, or use --device numpy"
            ) from error
        self.isa = isa
        self.handle.treadle_info.restype = ctypes.c_char_p
        self.handle.treadle_threaded.restype = ctypes.c_int
        self.handle.treadle_run.restype = ctypes.c_int
        self.handle.treadle_run.argtypes = [
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_int64,
            ctypes.c_int,
            ctypes.c_void_p,
            ctypes.c_int64,
        ]
        self.info = self.handle.treadle_info().decode()
        facts = dict(fact.split("=", 1) for fact in self.info.split("; "))
        if facts.get("sources") != source_digest():
            raise BackendError(
                f"the kernel library {path.name} was built from other sources than those that are "
                "installed; rebuild it with `python -m treadle.backends.build`"
            )
        self.threaded = bool(self.handle.treadle_threaded())

    @cache  # noqa: B019 - libraries live as long as the process
    def address(self, kernel: str) -> int:
        """The address of an exported kernel; BackendError when there is none of that name."""
        try:
            return ctypes.cast(getattr(self.handle, kernel), ctypes.c_void_p).value or 0
        except AttributeError:
            raise BackendError(
                f"the kernel library has no kernel '{kernel}'; it is older than the package: "
                "rebuild it with `pip install --force-reinstall .`"
            ) from None


def _library_file(isa: str) -> Path | None:
    found = sorted(LIBRARIES.glob(f"libtreadle_{isa}.*"))
    return found[0] if found else None


@cache
def instruction_sets() -> list[str]:
    """Those that kernels were built for and that this processor runs, the best first; BackendError
    when there is none."""
    base = _library_file("baseline") or _library_file("neon")
    if base is None:
        raise BackendError(
            "the CPU kernels are not built here (no C compiler at install time); install gcc or "
            "clang and reinstall, or use --device numpy"
        )
    supported = ctypes.CDLL(str(base)).treadle_supports
    supported.argtypes = [ctypes.c_char_p]
    ranks = {name: supported(name.encode()) for name in ISAS if _library_file(name)}
    return sorted((name for name in ranks if ranks[name]), key=lambda name: ranks[name])


@cache
def library(isa: str | None = None) -> Library:
    """The library of the best instruction set, or of the one asked for.

    TREADLE_ISA names one as well. BackendError when there is none.
    """
    wanted = isa or os.environ.get("TREADLE_ISA") or None
    for name in instruction_sets():
        path = _library_file(name)
        if path is not None and wanted in (None, name):
            return Library(path, name)
    raise BackendError(
        f"no kernel library for instruction set {wanted!r} was built or runs on this processor; "
        f"one of {', '.join(i for i in ISAS if _library_file(i))}"
    )


def available() -> bool:
    """Whether kernels were built at install time."""
    return _library_file("baseline") is not None or _library_file("neon") is not None


# ---------------------------------------------------------------- the backend


class CpuBackend(Backend):
    """C kernels on `threads` threads (OMP_NUM_THREADS, else the physical cores, when None)."""

    name = "cpu"
    target = "cpu"

    def __init__(self, threads: int | None = None, isa: str | None = None) -> None:
        super().__init__()
        self.library = library(isa)
        if threads is not None and threads < 1:
            raise BackendError(f"threads must be at least 1, got {threads}")
        self.threads = (threads or default_threads()) if self.library.threaded else 1

    def load(self, program: Program, graphs: Iterable[str] | None = None) -> CpuExecutable:
        return CpuExecutable(program, graphs, self.library, self.threads)

    def describe(self) -> str:
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        note = "" if self.library.threaded else " (built for one thread)"
        return f"cpu, {self.library.isa}, {threads}{note}"

    def identity(self) -> dict[str, str]:
        return {"backend": self.name, "isa": self.library.isa, "library": self.library.info}


def aligned(nbytes: int) -> np.ndarray:
    """Zeroed bytes that begin at a multiple of 4096."""
    page = 4096
    raw = np.zeros(nbytes + page, np.uint8)
    start = -raw.ctypes.data % page
    return raw[start : start + nbytes]


def physical_memory() -> float:
    """Bytes of memory that the machine has; infinity where the system does not tell."""
    try:
        return float(os.sysconf("SC_PAGE_SIZE")) * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return float("inf")


class _Calls:
    """A plan as the walker reads it: tables of calls, pointers, dims and nums, and phases."""

    def __init__(self, plan: Plan, base: dict[str | None, int], lib: Library) -> None:
        launches = plan.launches
        self.ptr = np.array(
            [
                0 if place is None else base[place.buffer] + place.offset
                for x in launches
                for place in map(plan.place, x.args)
            ]
            or [0],
            np.uint64,
        )
        self.dim = np.array([d for x in launches for d in x.dims] or [0], np.int64)
        self.num = np.array([f for x in launches for f in x.nums] or [0], np.float64)
        self.calls = np.zeros(len(launches), CALL)
        at = [self.ptr.ctypes.data, self.dim.ctypes.data, self.num.ctypes.data]
        for i, x in enumerate(launches):
            self.calls[i] = (lib.address(x.kernel), x.tasks, *at)
            at = [a + 8 * len(t) for a, t in zip(at, (x.args, x.dims, x.nums), strict=True)]
        self.phases = np.array([*plan.phases, len(launches)], np.int64)


class CpuExecutable(Executable):
    """See CpuBackend."""

    def __init__(
        self, program: Program, graphs: Iterable[str] | None, lib: Library, threads: int
    ) -> None:
        self.program = program
        self.library = lib
        self.threads = threads
        self.plans = {
            name: plan(program.graphs[name], "cpu") for name in (graphs or program.graphs)
        }
        memory = self.memory()
        try:
            # Systems hand out memory that they do not have, and end the process when it is used.
            if memory.total > physical_memory():
                raise MemoryError
            self._persistent = aligned(memory.persistent)
            self._arena = aligned(memory.arena)
            self._scratch = aligned(memory.scratch + ALIGN)
        except MemoryError:
            raise OutOfMemoryError(
                f"out of memory: the program needs {memory.total / 2**30:.2f} GiB; lower "
                "train.batch_size, raise train.grad_accum, or make the model smaller",
                physical_memory(),
            ) from None
        self._views: dict[str, np.ndarray] = {}
        base: dict[str | None, int] = {None: self._arena.ctypes.data}
        offset = 0
        for b in program.buffers.values():
            raw = self._persistent[offset : offset + b.nbytes]
            self._views[b.name] = raw.view(STORAGE[b.dtype]).reshape(b.shape)
            base[b.name] = self._persistent.ctypes.data + offset
            offset += align(b.nbytes)
        self._calls = {name: _Calls(p, base, lib) for name, p in self.plans.items()}
        self._stride = max((p.scratch_bytes for p in self.plans.values()), default=0)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="treadle-walker")
        self._running: Future[None] | None = None

    def write(self, name: str, array: ArrayLike) -> None:
        values = self.checked(name, array)
        self._wait()
        if self.buffer(name).dtype == "bfloat16":
            values = to_bfloat16(np.asarray(values, np.float32))
        np.copyto(self._views[name], values, casting="unsafe")

    def read(self, name: str) -> np.ndarray:
        buffer = self.buffer(name)
        self._wait()
        view = self._views[name]
        return from_bfloat16(view) if buffer.dtype == "bfloat16" else view.copy()

    def read_into(self, name: str, target: np.ndarray) -> None:
        if self.buffer(name).dtype == "bfloat16":
            super().read_into(name, target)
        else:
            self._wait()
            np.copyto(target, self._views[name])

    def run(self, *graphs: str) -> None:
        self._wait()
        self._running = self._worker.submit(self._run, graphs)

    def _wait(self) -> None:
        """For what runs; its error is raised here."""
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def profile(self, graph: str) -> list[tuple[Node, float]]:
        self._wait()
        return self._worker.submit(self._profile, graph).result()

    def _run(self, graphs: Sequence[str]) -> None:
        for name in graphs:
            self._walk(name, self._calls[name].phases)

    def _profile(self, name: str) -> list[tuple[Node, float]]:
        plan = self.plans[name]
        seconds = {id(node): 0.0 for node in plan.graph.nodes}
        first = 0
        for key, group in groupby(plan.nodes, key=id):
            end = first + len(list(group))
            inner = [p for p in plan.phases if first < p < end]
            phases = np.array([first, *inner, end], np.int64)
            start = time.perf_counter()
            self._walk(name, phases)
            seconds[key] = time.perf_counter() - start
            first = end
        return [(node, seconds[id(node)]) for node in plan.graph.nodes]

    def _walk(self, name: str, phases: np.ndarray) -> None:
        """Run the calls of a graph from phases[0] to phases[-1], in phases that begin there."""
        status = self.library.handle.treadle_run(
            self._calls[name].calls.ctypes.data,
            phases.ctypes.data,
            len(phases) - 1,
            self.threads,
            self._scratch.ctypes.data,
            self._stride,
        )
        if status != 0:
            raise BackendError(f"the walker failed on graph '{name}' with status {status}")

    def close(self) -> None:
        self._worker.shutdown()
        self._running = None
        self._views = {}
        self._calls = {}
