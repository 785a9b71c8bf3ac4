"""The OpenCL backend: the kernels of ops/*.cl on any device with an OpenCL 1.2 driver.

Loading a program lays out memory, compiles kernels (or takes them from the cache), measures where
a kernel can be cut in several ways, and binds every call's arguments. A step then is a recorded
list of enqueues on one queue that runs in order.
"""

from __future__ import annotations

import os
import re
import time
import warnings
from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from treadle.backends import gpu, kernel_cache
from treadle.backends.base import Backend, Executable
from treadle.backends.first_use import shown
from treadle.errors import BackendError, OutOfMemoryError
from treadle.graph.op import Gpu, Grid, Node
from treadle.graph.plan import GPU_ALIGN, plan
from treadle.graph.program import Memory, Program, memory
from treadle.graph.value import STORAGE, from_bfloat16, to_bfloat16

INSTEAD = "or use --device cpu"
LEAST = (1, 2)  # version of OpenCL
LEAST_GROUP, LEAST_LOCAL = 64, 32768  # work-items of a work-group, and bytes of its local memory
# Host arrays up to so many bytes are sent without waiting for the device.
SMALL_BYTES = 1 << 20
# PoCL compiles each kernel when it first runs and keeps it on disk itself. To hand out a binary it
# would compile every kernel of the source, for twice the time of all else.
POCL = "Portable Computing Language"


# ---------------------------------------------------------------- devices


@cache
def module() -> Any:
    """pyopencl; BackendError where it is not installed or finds no driver loader."""
    os.environ.setdefault("PYOPENCL_NO_CACHE", "1")  # kernel_cache.py does that
    own = kernel_cache.subfolder("pocl")
    if own is not None:
        os.environ.setdefault("POCL_CACHE_DIR", str(own))
    try:
        import pyopencl
    except (ImportError, OSError) as error:
        raise BackendError(
            f"--device opencl needs pyopencl ({error}): pip install 'treadle[opencl]', {INSTEAD}"
        ) from None
    warnings.filterwarnings("ignore", category=pyopencl.CompilerWarning)
    return pyopencl


def platforms() -> list[Any]:
    """The OpenCL platforms of this machine; BackendError when there is none."""
    cl = module()
    try:
        found: list[Any] = list(cl.get_platforms())
    except cl.Error:
        found = []
    if not found:
        raise BackendError(
            "no OpenCL driver is installed; install one (Debian: mesa-opencl-icd for AMD, "
            "intel-opencl-icd for Intel, pocl-opencl-icd for any processor; see docs/opencl.md), "
            f"{INSTEAD}"
        )
    return found


def devices_of(platform: Any) -> list[Any]:
    """A platform's devices; none where it has none or is broken."""
    cl = module()
    try:
        return list(platform.get_devices())
    except cl.Error:
        return []


def is_gpu(device: Any) -> bool:
    """Whether the device is a graphics processor, and not a processor that runs OpenCL too."""
    return bool(device.type & module().device_type.GPU)


def devices() -> list[Any]:
    """All devices, graphics processors before the others, else as the drivers list them."""
    found = [d for p in platforms() for d in devices_of(p)]
    return sorted(found, key=lambda d: not is_gpu(d))


def remedy(platform: Any) -> str:
    """What helps where a platform shows no device."""
    name = platform.name.strip()
    if name == "rusticl":
        return (
            "set RUSTICL_ENABLE=radeonsi (AMD), iris (Intel) or llvmpipe (the processor), and be "
            "in the group `render` (sudo usermod -aG render $USER, then log in again)"
        )
    if name == "Clover":
        return "Clover is no longer developed; use rusticl of the same Mesa"
    return "check that its driver is loaded and that you may open /dev/dri/renderD*"


def choose(name: str) -> Any:
    """The device for `opencl`, `opencl:N` or `opencl:NAME`; BackendError when there is none.

    N counts the devices as `treadle devices` lists them; NAME is part of a device's or its
    platform's name, in either case.
    """
    wanted = name.partition(":")[2]
    found = devices()
    if not found:
        shown = "; ".join(f"{p.name.strip()}: {remedy(p)}" for p in platforms())
        raise BackendError(f"OpenCL shows no device ({shown}), {INSTEAD}")
    if not wanted:
        return found[0]
    for i, device in enumerate(found):
        names = f"{device.name} {device.platform.name}".lower()
        if int(wanted) == i if wanted.isdigit() else wanted.lower() in names:
            return device
    listed = ", ".join(f"{i}: {d.name.strip()}" for i, d in enumerate(found))
    raise BackendError(
        f"there is no OpenCL device {wanted!r}; choose among {listed} (treadle devices), {INSTEAD}"
    )


def _limit(variable: str, most: int) -> int:
    """What the device allows, or less where the environment says so (for tests)."""
    text = os.environ.get(variable)
    if not text:
        return most
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise BackendError(f"{variable} is {text!r}, and has to be a whole number above 0")
    return min(most, int(text))


def _power_of_two(n: int) -> int:
    """The largest that is at most n."""
    return 1 << (n.bit_length() - 1)


# ---------------------------------------------------------------- the backend


class OpenClBackend(Backend):
    """See the module. device: as `choose` takes it.

    TREADLE_OPENCL_GROUP and TREADLE_OPENCL_LOCAL lower the work-items and the bytes of local memory
    of a work-group, TREADLE_OPENCL_VECTOR=1 treats a processor as a GPU; TREADLE_TUNE=0 measures
    nothing.
    """

    name = "opencl"

    def __init__(self, device: str = "opencl") -> None:
        super().__init__()
        cl = module()
        self.device = choose(device)
        version = re.match(r"OpenCL (\d+)\.(\d+)", self.device.version)
        if version and (int(version[1]), int(version[2])) < LEAST:
            raise BackendError(
                f"{self.device.name.strip()} has OpenCL {version[1]}.{version[2]} only, and 1.2 is "
                f"needed; update its driver, {INSTEAD}"
            )
        try:
            self.context = cl.Context([self.device])
            self.queue = cl.CommandQueue(self.context)
        except cl.Error as error:
            raise BackendError(
                f"the OpenCL driver of {self.device.name.strip()} does not start: {error}; "
                f"update it, {INSTEAD}"
            ) from None
        processor = bool(self.device.type & cl.device_type.CPU)
        piece = self.device.max_mem_alloc_size // GPU_ALIGN * GPU_ALIGN
        floats = self.device.preferred_vector_width_float
        group = _limit("TREADLE_OPENCL_GROUP", min(256, self.device.max_work_group_size))
        self.target = Gpu(
            group=_power_of_two(group),
            local=_limit("TREADLE_OPENCL_LOCAL", min(49152, self.device.local_mem_size)),
            vector=_power_of_two(_limit("TREADLE_OPENCL_VECTOR", floats if processor else 1)),
            allocation=piece,
        )
        if self.target.group < LEAST_GROUP or self.target.local < LEAST_LOCAL:
            raise BackendError(
                f"{self.device.name.strip()} has work-groups of {self.target.group} work-items and "
                f"{self.target.local:,} bytes of local memory, and {LEAST_GROUP} and "
                f"{LEAST_LOCAL:,} are needed; where TREADLE_OPENCL_GROUP or _LOCAL is set, raise "
                f"it, {INSTEAD}"
            )
        self.programs: dict[tuple[Any, ...], Any] = {}

    def load(self, program: Program, graphs: Iterable[str] | None = None) -> OpenClExecutable:
        return OpenClExecutable(self, program, graphs)

    def describe(self) -> str:
        return f"opencl, {self.device.name.strip()} ({self.device.platform.name.strip()})"

    def identity(self) -> dict[str, str]:
        assert isinstance(self.target, Gpu)
        return {
            "backend": self.name,
            "device": self.device.name.strip(),
            "driver": f"{self.device.platform.version.strip()}; {self.device.driver_version}",
            "limits": f"{self.target.group} {self.target.local} {self.target.vector}",
        }

    # ------------------------------------------------------------ kernels

    def kernel(self, name: str, grid: Grid) -> Any:
        """A kernel object of its own, compiled now if it was not before."""
        cl = module()
        key = (grid.source, grid.items, grid.defines)
        if key not in self.programs:
            self.programs[key] = self._program(gpu.source("opencl", grid), grid)
        return cl.Kernel(self.programs[key], name)

    def _program(self, text: str, grid: Grid) -> Any:
        cl = module()
        keeps = self.device.platform.name.strip() == POCL
        name = kernel_cache.digest(*self.identity().values(), text) + ".cl.bin"
        binary = None if keeps else kernel_cache.load(name)
        if binary is not None:
            try:
                return cl.Program(self.context, [self.device], [binary]).build()
            except cl.Error:
                pass  # a driver that refuses its own binary gets the source
        try:
            built = cl.Program(self.context, text).build(options=["-w"], cache_dir=False)
            if not keeps:
                kernel_cache.store(name, built.get_info(cl.program_info.BINARIES)[0])
        except cl.Error as error:
            raise BackendError(
                f"the OpenCL driver of {self.device.name.strip()} cannot compile "
                f"{grid.source}.cl: {str(error).strip().splitlines()[0]}; update it, {INSTEAD}"
            ) from error
        return built


class OpenClExecutable(Executable):
    """See OpenClBackend."""

    def __init__(
        self, backend: OpenClBackend, program: Program, graphs: Iterable[str] | None
    ) -> None:
        cl = module()
        self.backend, self.program = backend, program
        self.queue = backend.queue
        target = backend.target
        assert isinstance(target, Gpu)
        self.plans = {n: plan(program.graphs[n], target) for n in (graphs or program.graphs)}
        layout = gpu.regions(program, target.allocation)
        self._locate = gpu.locator(layout, target.allocation)
        self._refuse_too_large()
        sizes = [r.nbytes for r in layout]
        sizes += gpu.arena_pieces(self.plans.values(), target.allocation)
        try:
            self._pieces = [
                cl.Buffer(backend.context, cl.mem_flags.READ_WRITE, size) for size in sizes
            ]
            self._views: dict[gpu.Memory, Any] = {}
            self._offsets = {n: (i, o) for i, r in enumerate(layout) for n, o in r.offsets.items()}
            calls = {n: gpu.calls(p, self._locate) for n, p in self.plans.items()}
            self._tuned = gpu.Tuning("opencl", backend.identity(), self._measure)
            with shown(backend.device.name.strip(), sum(map(len, calls.values()))) as each:
                self._calls = {n: [self._bind(c) for c in each(x)] for n, x in calls.items()}
            self._tuned.save()
            for piece in self._pieces:
                cl.enqueue_fill_buffer(self.queue, piece, np.zeros(1, np.uint32), 0, piece.size)
            self.queue.finish()
        except cl.Error as error:
            raise self._failed(error) from error
        self._nodes = {n: [c.nodes for c in found] for n, found in calls.items()}
        self._sent: list[np.ndarray] = []

    # ------------------------------------------------------------ memory

    def memory(self) -> Memory:
        return memory(self.program, self.plans, 0, GPU_ALIGN)

    def _refuse_too_large(self) -> None:
        total, there = self.memory().total, self.backend.device.global_mem_size
        if total > there:
            raise OutOfMemoryError(
                f"out of device memory: the program needs {total / 2**30:.2f} GiB, and "
                f"{self.backend.device.name.strip()} has {there / 2**30:.2f}; lower "
                f"train.batch_size, raise train.grad_accum, {INSTEAD}",
                there,
            )

    def _failed(self, error: Exception) -> BackendError:
        """What a driver's error means."""
        name = self.backend.device.name.strip()
        if any(
            word in str(error) for word in ("ALLOCATION_FAILURE", "OUT_OF_RESOURCES", "OUT_OF_")
        ):
            total, there = self.memory().total, self.backend.device.global_mem_size
            return BackendError(
                f"out of device memory: the program needs {total / 2**30:.2f} GiB of the "
                f"{there / 2**30:.2f} of {name}, which others use too; lower train.batch_size, "
                f"raise train.grad_accum, {INSTEAD}"
            )
        return BackendError(f"the OpenCL driver of {name} failed: {error}; update it, {INSTEAD}")

    def _view(self, m: gpu.Memory | None) -> Any:
        if m is None:
            return None
        if m not in self._views:
            self._views[m] = self._pieces[m.piece].get_sub_region(m.offset, max(m.nbytes, 4))
        return self._views[m]

    # ------------------------------------------------------------ calls

    def _bind(self, call: gpu.Call) -> tuple[Any, tuple[int, ...], tuple[int, ...]]:
        """A kernel with its arguments set, its global and its local size."""
        best = self._tuned.choose(call) if len(call.grids) > 1 else 0
        return self.bound(call, call.grids[best])

    def bound(self, call: gpu.Call, grid: Grid) -> tuple[Any, tuple[int, ...], tuple[int, ...]]:
        """See _bind, for one of the call's grids."""
        kernel = self.backend.kernel(call.launch.kernel, grid)
        arguments = [self._view(m) for m in call.memory]
        arguments += [np.int64(d) for d in call.dims]
        arguments += [np.float32(x) for x in call.launch.nums]
        for i, argument in enumerate(arguments):
            kernel.set_arg(i, argument)
        groups = (*grid.groups, 1, 1)[:3]
        return kernel, (groups[0] * grid.items, *groups[1:]), (grid.items, 1, 1)

    def _measure(self, call: gpu.Call, grid: Grid) -> float:
        """Seconds that the call takes; infinity where the device cannot run it."""
        cl = module()
        try:
            bound = self.bound(call, grid)
            return gpu.fastest(
                lambda: cl.enqueue_nd_range_kernel(self.queue, *bound), self.queue.finish
            )
        except (cl.Error, BackendError):
            return float("inf")

    def run(self, *graphs: str) -> None:
        cl = module()
        enqueue, queue = cl.enqueue_nd_range_kernel, self.queue
        try:
            for name in graphs:
                for kernel, work, items in self._calls[name]:
                    enqueue(queue, kernel, work, items)
            queue.flush()
        except cl.Error as error:
            raise self._failed(error) from error

    def profile(self, graph: str) -> list[tuple[Node, float]]:
        cl = module()
        seconds = {id(node): 0.0 for node in self.plans[graph].graph.nodes}
        self.queue.finish()
        for (kernel, work, items), nodes in zip(
            self._calls[graph], self._nodes[graph], strict=True
        ):
            start = time.perf_counter()
            cl.enqueue_nd_range_kernel(self.queue, kernel, work, items)
            self.queue.finish()
            seconds[id(nodes[0])] += time.perf_counter() - start
        return [(node, seconds[id(node)]) for node in self.plans[graph].graph.nodes]

    # ------------------------------------------------------------ buffers

    def write(self, name: str, array: ArrayLike) -> None:
        values = self.checked(name, array)
        buffer = self.buffer(name)
        if buffer.dtype == "bfloat16":
            data = to_bfloat16(np.asarray(values, np.float32))
        else:
            data = np.array(values, STORAGE[buffer.dtype], order="C")
        if data.nbytes:
            self._copy(name, data, into_device=True)

    def read(self, name: str) -> np.ndarray:
        buffer = self.buffer(name)
        data: np.ndarray = np.empty(buffer.shape, STORAGE[buffer.dtype])
        self._copy(name, data, into_device=False)
        return from_bfloat16(data) if buffer.dtype == "bfloat16" else data

    def read_into(self, name: str, target: np.ndarray) -> None:
        buffer = self.buffer(name)
        if target.dtype == STORAGE[buffer.dtype] and target.flags.c_contiguous:
            self._copy(name, target, into_device=False)
        else:
            super().read_into(name, target)

    def _copy(self, name: str, data: np.ndarray, into_device: bool) -> None:
        cl = module()
        piece, offset = self._offsets[name]
        memory = self._pieces[piece]
        try:
            if into_device:
                waits = data.nbytes > SMALL_BYTES
                cl.enqueue_copy(self.queue, memory, data, dst_offset=offset, is_blocking=waits)
                if not waits:  # the array lives until the device has read it
                    self._sent.append(data)
            elif data.nbytes:
                cl.enqueue_copy(self.queue, data, memory, src_offset=offset, is_blocking=True)
                self._sent.clear()
        except cl.Error as error:
            raise self._failed(error) from error

    def close(self) -> None:
        self.queue.finish()
        for view in self._views.values():
            view.release()
        for piece in self._pieces:
            piece.release()
        self._views, self._pieces, self._calls = {}, [], {}
