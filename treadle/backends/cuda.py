"""The CUDA backend: the kernels of ops/*.cl through NVRTC, matrix products through cuBLASLt,
attention in bfloat16 through cuDNN where it is installed.

A step is one captured graph. Inputs and scalars go to the device in one copy from pinned memory
before it, losses come back in one copy behind it.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from treadle.backends import gpu, kernel_cache
from treadle.backends.base import Backend, Executable
from treadle.backends.cuda_driver import (
    INSTEAD,
    LEAST,
    LEAST_BF16,
    checked,
    choose,
    driver,
    version,
)
from treadle.backends.first_use import shown
from treadle.backends.streams import STREAMS, Slot, schedule
from treadle.errors import BackendError, OutOfMemoryError
from treadle.graph.op import Gpu, Grid, Node
from treadle.graph.plan import GPU_ALIGN, plan
from treadle.graph.program import Memory, Program, memory
from treadle.graph.value import STORAGE, from_bfloat16, to_bfloat16

# Bytes behind each piece of memory, so that a product may be computed for more columns than a
# tensor has (ops/classifier.py).
SLACK = 1 << 20
MIRRORED = ("scalar", "input", "output")  # roles of buffers that have a copy on the host


# ---------------------------------------------------------------- the backend


class CudaBackend(Backend):
    """See the module. device: `cuda` or `cuda:N`.

    deterministic: only ways of computing that give the same bits every time; without it cuBLASLt
    and cuDNN may add in any order. tf32: fp32 matrix products on tensor cores, with operands
    rounded to 10 bits of mantissa.
    """

    name = "cuda"

    def __init__(
        self, device: str = "cuda", deterministic: bool = True, tf32: bool = False
    ) -> None:
        super().__init__()
        self.ordinal = choose(device)
        self.deterministic, self.tf32 = deterministic, tf32
        from cuda.core import Device

        self.device = Device(self.ordinal)
        self.device.set_current()
        self.streams = [self.device.create_stream() for _ in range(STREAMS)]
        self.stream = self.streams[0]
        capability = self.device.compute_capability
        self.capability = (int(capability[0]), int(capability[1]))
        if self.capability < LEAST:
            raise BackendError(
                f"{self.device.name} has compute capability {self.capability[0]}."
                f"{self.capability[1]}; at least {LEAST[0]}.{LEAST[1]} is needed: use --device "
                "opencl or --device cpu"
            )
        total = checked(driver().cuMemGetInfo())[1]
        self.target = Gpu(256, 48 * 1024, vector=1, vendor=True, memory=int(total))
        self.modules: dict[tuple[Any, ...], Any] = {}

    def load(self, program: Program, graphs: Iterable[str] | None = None) -> CudaExecutable:
        if self.capability < LEAST_BF16 and any(
            b.dtype == "bfloat16" for b in program.buffers.values()
        ):
            raise BackendError(f"{self.device.name} has no bfloat16: use --precision fp32")
        return CudaExecutable(self, program, graphs)

    def describe(self) -> str:
        mode = "deterministic" if self.deterministic else "fast"
        return f"cuda, {self.device.name}, {mode}{', TF32' if self.tf32 else ''}"

    def identity(self) -> dict[str, str]:
        return {
            "backend": self.name,
            "device": self.device.name,
            "driver": version(),
            "mode": f"{'deterministic' if self.deterministic else 'fast'}"
            f"{' tf32' if self.tf32 else ''}",
        }

    # ------------------------------------------------------------ kernels

    def kernel(self, name: str, grid: Grid) -> Any:
        """A kernel, compiled now if it was not before."""
        key = (grid.source, grid.items, grid.defines)
        if key not in self.modules:
            self.modules[key] = self._module(gpu.source("cuda", grid), grid)
        return self.modules[key].get_kernel(name)

    def _module(self, text: str, grid: Grid) -> Any:
        from cuda.core import ObjectCode, Program, ProgramOptions

        arch = f"sm_{self.capability[0]}{self.capability[1]}"
        file = kernel_cache.digest("cuda", arch, compiler(), text) + ".cubin"
        binary = kernel_cache.load(file)
        if binary is None:
            options = ProgramOptions(std="c++17", arch=arch, fma=False)
            try:
                compiled = Program(text, "c++", options).compile("cubin")
            except Exception as error:
                raise BackendError(
                    f"NVRTC cannot compile {grid.source}.cl for {arch}: {error}"
                ) from error
            binary = bytes(compiled.code)
            kernel_cache.store(file, binary)
        return ObjectCode.from_cubin(binary)


@cache
def compiler() -> str:
    """The version of NVRTC."""
    from cuda.bindings import nvrtc

    _, major, minor = nvrtc.nvrtcVersion()
    return f"nvrtc {major}.{minor}"


# ---------------------------------------------------------------- the executable


class CudaExecutable(Executable):
    """See CudaBackend."""

    def __init__(
        self, backend: CudaBackend, program: Program, graphs: Iterable[str] | None
    ) -> None:
        self.backend, self.program, self.stream = backend, program, backend.stream
        target = backend.target
        assert isinstance(target, Gpu)
        self.plans = {n: plan(program.graphs[n], target) for n in (graphs or program.graphs)}
        layout = gpu.regions(program, None)
        locate = gpu.locator(layout, None)
        self._offsets = {n: (i, o) for i, r in enumerate(layout) for n, o in r.offsets.items()}
        self._sizes = [r.nbytes for r in layout] + gpu.arena_pieces(self.plans.values(), None)
        self._libraries = Libraries(backend)
        self._pieces: list[int] = []
        self._refuse_too_large()
        self._sizes = [size + SLACK for size in self._sizes]
        for size in self._sizes:
            self._pieces.append(self._allocate(size))
        self._mirrors = _Mirrors(self, layout)
        calls = {n: gpu.calls(p, locate) for n, p in self.plans.items()}
        self._nodes = {n: [c.nodes for c in found] for n, found in calls.items()}
        self._clear()  # what is measured and tried below computes on zeros
        self._tuning = gpu.Tuning("cuda", backend.identity(), self._measure)
        with shown(backend.device.name, sum(map(len, calls.values()))) as each:
            self._calls = {n: [self._bind(c) for c in each(x)] for n, x in calls.items()}
        self._tuning.save()
        self._schedules = {n: schedule(found) for n, found in calls.items()}
        self._libraries.settle(self._needs())
        for name, bound in self._calls.items():  # libraries load their kernels at first use
            for run, place in zip(bound, self._schedules[name], strict=True):
                run(place.stream)
        self._finish()
        self._clear()
        self._captured: dict[tuple[str, ...], Any] = {}

    def _needs(self) -> list[int]:
        """Bytes of workspace that matrix products of each stream need."""
        needs = [0] * STREAMS
        for name, bound in self._calls.items():
            for run, place in zip(bound, self._schedules[name], strict=True):
                needs[place.stream] = max(needs[place.stream], getattr(run, "workspace", 0))
        return needs

    def _finish(self) -> None:
        """Wait for all streams."""
        checked(driver().cuCtxSynchronize())

    # ------------------------------------------------------------ memory

    def memory(self) -> Memory:
        planned = memory(self.program, self.plans, 0, GPU_ALIGN)
        return Memory(planned.persistent, planned.arena, self._libraries.workspace_bytes)

    def _refuse_too_large(self) -> None:
        total = self.memory().total
        free, there = checked(driver().cuMemGetInfo())
        if total > free:
            raise OutOfMemoryError(
                f"out of device memory: the program needs {total / 2**30:.2f} GiB, and of the "
                f"{there / 2**30:.2f} of {self.backend.device.name} {free / 2**30:.2f} are free; "
                f"lower train.batch_size, raise train.grad_accum, {INSTEAD}",
                free,
            )

    def _allocate(self, nbytes: int) -> int:
        status, pointer = driver().cuMemAlloc(max(nbytes, GPU_ALIGN))
        if int(status) != 0:
            raise BackendError(
                f"out of device memory: {self.backend.device.name} gives no "
                f"{nbytes / 2**30:.2f} GiB in one piece; lower train.batch_size, raise "
                f"train.grad_accum, {INSTEAD}"
            )
        return int(pointer)

    def _clear(self) -> None:
        for pointer, size in zip(self._pieces, self._sizes, strict=True):
            checked(driver().cuMemsetD8Async(pointer, 0, max(size, GPU_ALIGN), self._handle()))
        self.stream.sync()

    def _handle(self) -> Any:
        return self.stream.handle

    def _pointer(self, m: gpu.Memory | None) -> int:
        return 0 if m is None else self._pieces[m.piece] + m.offset

    # ------------------------------------------------------------ calls

    def _bind(self, call: gpu.Call) -> Any:
        """A function that puts the call on a stream, by its number."""
        if call.grids[0].items == 0:  # a vendor's library
            return self._libraries.bind(call, [self._pointer(m) for m in call.memory])
        best = self._tuning.choose(call) if len(call.grids) > 1 else 0
        return self.bound(call, call.grids[best])

    def bound(self, call: gpu.Call, grid: Grid) -> Any:
        """See _bind, for one of the call's grids."""
        from cuda.core import LaunchConfig, launch

        kernel = self.backend.kernel(call.launch.kernel, grid)
        arguments = (
            *(self._pointer(m) for m in call.memory),
            *(np.int64(d) for d in call.dims),
            *(np.float32(x) for x in call.launch.nums),
        )
        config = LaunchConfig(grid=(*grid.groups, 1, 1)[:3], block=(grid.items, 1, 1))
        streams = self.backend.streams
        return lambda s: launch(streams[s], config, kernel, *arguments)

    def _measure(self, call: gpu.Call, grid: Grid) -> float:
        bound = self.bound(call, grid)
        return gpu.fastest(lambda: bound(0), self.stream.sync)

    def run(self, *graphs: str) -> None:
        self._mirrors.send()
        if graphs not in self._captured:
            self._captured[graphs] = self._capture(graphs)
        checked(driver().cuGraphLaunch(self._captured[graphs], self._handle()))
        self._mirrors.fetch()

    def _capture(self, graphs: tuple[str, ...]) -> Any:
        d = driver()
        mode = d.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        checked(d.cuStreamBeginCapture(self._handle(), mode))
        for name in graphs:
            self._put(self._calls[name], self._schedules[name])
        captured = checked(d.cuStreamEndCapture(self._handle()))
        made = checked(d.cuGraphInstantiate(captured, 0))
        checked(d.cuGraphDestroy(captured))
        return made

    def _put(self, bound: list[Any], places: list[Slot]) -> None:
        """Put a graph's calls on the streams, which come together again in the first."""
        d = driver()
        streams = [s.handle for s in self.backend.streams]
        disabled = d.CUevent_flags.CU_EVENT_DISABLE_TIMING

        def mark(s: int) -> Any:
            event = checked(d.cuEventCreate(disabled))
            checked(d.cuEventRecord(event, streams[s]))
            return event

        used = sorted({place.stream for place in places} - {0})
        start = mark(0)
        for s in used:
            checked(d.cuStreamWaitEvent(streams[s], start, 0))
        awaited = {j for place in places for j in place.waits}
        events: dict[int, Any] = {}
        for i, (run, place) in enumerate(zip(bound, places, strict=True)):
            for j in place.waits:
                checked(d.cuStreamWaitEvent(streams[place.stream], events[j], 0))
            run(place.stream)
            if i in awaited:
                events[i] = mark(place.stream)
        for s in used:
            checked(d.cuStreamWaitEvent(streams[0], mark(s), 0))

    def profile(self, graph: str) -> list[tuple[Node, float]]:
        seconds = {id(node): 0.0 for node in self.plans[graph].graph.nodes}
        self._mirrors.send()
        self._finish()
        parts = zip(self._calls[graph], self._schedules[graph], self._nodes[graph], strict=True)
        for run, place, nodes in parts:
            start = time.perf_counter()
            run(place.stream)
            self._finish()
            seconds[id(nodes[0])] += time.perf_counter() - start
        self._mirrors.fetch()
        return [(node, seconds[id(node)]) for node in self.plans[graph].graph.nodes]

    # ------------------------------------------------------------ buffers

    def write(self, name: str, array: ArrayLike) -> None:
        values = self.checked(name, array)
        buffer = self.buffer(name)
        if buffer.dtype == "bfloat16":
            data = to_bfloat16(np.asarray(values, np.float32))
        else:
            data = np.asarray(values, STORAGE[buffer.dtype], order="C")
        if self._mirrors.write(name, data) or not data.nbytes:
            return
        self.stream.sync()
        checked(driver().cuMemcpyHtoD(self._address(name), data.ctypes.data, data.nbytes))

    def read(self, name: str) -> np.ndarray:
        buffer = self.buffer(name)
        data: np.ndarray = np.empty(buffer.shape, STORAGE[buffer.dtype])
        self._read(name, data)
        return from_bfloat16(data) if buffer.dtype == "bfloat16" else data

    def read_into(self, name: str, target: np.ndarray) -> None:
        buffer = self.buffer(name)
        if target.dtype == STORAGE[buffer.dtype] and target.flags.c_contiguous:
            self._read(name, target)
        else:
            super().read_into(name, target)

    def _read(self, name: str, data: np.ndarray) -> None:
        self._mirrors.send()  # what was written and not yet used
        self.stream.sync()
        if data.nbytes and not self._mirrors.read(name, data):
            checked(driver().cuMemcpyDtoH(data.ctypes.data, self._address(name), data.nbytes))

    def _address(self, name: str) -> int:
        piece, offset = self._offsets[name]
        return self._pieces[piece] + offset

    def close(self) -> None:
        self.stream.sync()
        for made in self._captured.values():
            checked(driver().cuGraphExecDestroy(made))
        for pointer in self._pieces:
            checked(driver().cuMemFree(pointer))
        self._mirrors.close()
        self._libraries.close()
        self._pieces, self._calls, self._captured = [], {}, {}


class _Mirrors:
    """Pinned copies of the regions of inputs, scalars and outputs. What is written to inputs and
    scalars goes to the device with the next run, in one copy a region; outputs come back behind
    each run, and are read without another copy."""

    def __init__(self, executable: CudaExecutable, layout: list[gpu.Region]) -> None:
        self.executable = executable
        self.copies: dict[int, np.ndarray] = {}
        self.pointers: list[int] = []
        self.outgoing: set[int] = set()  # regions that were written since the last run
        self.incoming: set[int] = set()
        self.in_flight: set[int] = set()
        buffers = executable.program.buffers
        for i, region in enumerate(layout):
            role = buffers[next(iter(region.offsets))].role
            if role in MIRRORED:
                pointer = int(checked(driver().cuMemAllocHost(region.nbytes)))
                self.pointers.append(pointer)
                self.copies[i] = _bytes_at(pointer, region.nbytes)
                self.copies[i][:] = 0
                if role == "output":
                    self.incoming.add(i)

    def write(self, name: str, data: np.ndarray) -> bool:
        """Whether the buffer has a copy here, which then holds the data."""
        piece, offset = self.executable._offsets[name]
        if piece not in self.copies or piece in self.incoming:
            return False
        if piece in self.in_flight:
            self.executable.stream.sync()
            self.in_flight.clear()
        self.copies[piece][offset : offset + data.nbytes] = data.reshape(-1).view(np.uint8)
        self.outgoing.add(piece)
        return True

    def read(self, name: str, data: np.ndarray) -> bool:
        """The same for reading, of outputs alone: a graph may update its inputs. The stream has
        come to its end."""
        piece, offset = self.executable._offsets[name]
        self.in_flight.clear()
        if piece not in self.incoming:
            return False
        found = self.copies[piece][offset : offset + data.nbytes]
        np.copyto(data, found.view(data.dtype).reshape(data.shape))
        return True

    def send(self) -> None:
        """Before a run."""
        for i in self.outgoing:
            self._copy(driver().cuMemcpyHtoDAsync, self.executable._pieces[i], i)
        self.in_flight |= self.outgoing
        self.outgoing.clear()

    def fetch(self) -> None:
        """Behind a run."""
        for i in self.incoming:
            copy, pointer = self.copies[i], self.executable._pieces[i]
            checked(
                driver().cuMemcpyDtoHAsync(
                    copy.ctypes.data, pointer, copy.nbytes, self.executable.stream.handle
                )
            )

    def _copy(self, call: Any, pointer: int, i: int) -> None:
        copy = self.copies[i]
        checked(call(pointer, copy.ctypes.data, copy.nbytes, self.executable.stream.handle))

    def close(self) -> None:
        """Give the memory back."""
        self.copies = {}
        for pointer in self.pointers:
            checked(driver().cuMemFreeHost(pointer))


def _bytes_at(pointer: int, nbytes: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(pointer))


# ---------------------------------------------------------------- libraries


class Libraries:
    """cuBLASLt and cuDNN, and their workspaces."""

    def __init__(self, backend: CudaBackend) -> None:
        self.backend = backend
        self.workspace_bytes = 0
        self._workspaces: dict[int, int] = {}  # bytes by address
        self._dnn_workspace, self._dnn_bytes = 0, 0
        self._blas: Any = None
        self._dnn: Any = None

    def bind(self, call: gpu.Call, pointers: list[int]) -> Any:
        """A function that puts the call on a stream, by its number."""
        if call.grids[0].source == "cublaslt":
            if self._blas is None:
                from treadle.backends.cublaslt import CublasLt

                self._blas = CublasLt(self.backend, self)
            return self._blas.bind(call, pointers)
        if self._dnn is None:
            from treadle.backends.cudnn import Cudnn

            self._dnn = Cudnn(self.backend, self)
        return self._dnn.bind(call, pointers)

    def settle(self, needs: list[int]) -> None:
        """All is bound; needs: bytes of workspace that matrix products of each stream need."""
        if self._blas is not None:
            self._blas.settle(needs)

    def allocate(self, nbytes: int) -> int:
        """The address of a workspace, which stays until the end or is given back."""
        pointer = int(checked(driver().cuMemAlloc(nbytes)))
        self._workspaces[pointer] = nbytes
        self.workspace_bytes += nbytes
        return pointer

    def give_back(self, pointer: int) -> None:
        """Free a workspace."""
        self.workspace_bytes -= self._workspaces.pop(pointer)
        checked(driver().cuMemFree(pointer))

    def for_attention(self, nbytes: int) -> int:
        """A workspace for calls of the first stream, one of which runs at a time. An earlier one
        stays where it is, since calls are bound to it."""
        if nbytes > self._dnn_bytes:
            self._dnn_workspace, self._dnn_bytes = self.allocate(nbytes), nbytes
        return self._dnn_workspace

    def close(self) -> None:
        """Give handles back."""
        for library in (self._blas, self._dnn):
            if library is not None:
                library.close()
        for pointer in list(self._workspaces):
            self.give_back(pointer)
