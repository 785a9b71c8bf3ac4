"""What `--device auto` is: an NVIDIA GPU through CUDA if it is there; else the processor, unless
another graphics processor wins a comparison with it.

The comparison multiplies two matrices on both (treadle/measure.py). It happens once for each
device, driver and processor, in a process of its own, so that a driver that hangs or crashes costs
one wait and no run. Whatever fails here means the processor.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from treadle import __version__
from treadle.backends import cpu, kernel_cache
from treadle.errors import BackendError

TIMEOUT = 60.0  # seconds of a comparison; most of it compiles kernels
# A step is many small kernels too, which a GPU is slow to start, so a narrow win is none.
MARGIN = 1.5
HOST, DEVICE = "host", "device"  # keys of a stored comparison: microseconds, 0 where it failed


@dataclass(frozen=True)
class Candidate:
    """A graphics processor: the name that `backends.named` takes, its own, and what its driver
    says of itself."""

    device: str
    name: str
    driver: str


@dataclass(frozen=True)
class Choice:
    """device: a name that `backends.named` takes. why: for the person."""

    device: str
    why: str


def host() -> str:
    """The device that is always there: the C kernels, else the NumPy reference."""
    return "cpu" if cpu.available() else "numpy"


def _host_alone() -> Choice:
    if cpu.available():
        return Choice("cpu", "the kernels are built")
    return Choice(
        "numpy",
        "the C kernels are not built: install gcc or clang and reinstall for a much faster run",
    )


def choose() -> Choice:
    """The fastest device, as the comparisons say, and why."""
    alone = _host_alone()
    try:
        nvidia = cuda_gpus()
        if nvidia:
            return Choice(nvidia[0].device, f"{nvidia[0].name} is there")
        found = [gpu for family in FAMILIES for gpu in family()]
        if not found:
            return alone
        ratios = {gpu: _ratio(comparison(gpu)) for gpu in found}
    except Exception as error:
        return Choice(alone.device, f"looking for a GPU failed: {type(error).__name__}: {error}")
    best = max(found, key=lambda gpu: ratios[gpu])
    if not ratios[best]:
        return Choice(alone.device, f"{best.name} failed in a comparison")
    told = f"{best.name} multiplies matrices {_times(ratios[best])} as fast as the CPU"
    if ratios[best] < MARGIN:
        return Choice(alone.device, f"{told}, which is not enough")
    return Choice(best.device, told)


def opencl_gpus() -> list[Candidate]:
    """The graphics processors that OpenCL shows; none without pyopencl or without a driver."""
    if find_spec("pyopencl") is None:
        return []
    from treadle.backends import opencl

    try:
        found = opencl.devices()
    except BackendError:  # there is no driver, which is no fault of anything that is there
        return []
    return [
        Candidate(f"opencl:{i}", d.name.strip(), f"{d.platform.version} {d.driver_version}")
        for i, d in enumerate(found)
        if opencl.is_gpu(d)
    ]


def cuda_gpus() -> list[Candidate]:
    """The NVIDIA GPUs that CUDA shows; none without cuda-core, nvmath-python or a driver."""
    if any(find_spec(name) is None for name in ("cuda", "nvmath")):
        return []
    from treadle.backends import cuda_driver

    try:
        return [Candidate(d.device, d.name, d.driver) for d in cuda_driver.devices()]
    except BackendError:
        return []


# What looks for graphics processors. It must cost little where there is nothing to find.
FAMILIES: list[Callable[[], list[Candidate]]] = [opencl_gpus]


def comparison(gpu: Candidate) -> dict[str, int]:
    """Microseconds of a matrix product by HOST and DEVICE, from the cache or measured now."""
    identity = cpu.CpuBackend().identity() if cpu.available() else {"backend": "numpy"}
    kind = gpu.device.partition(":")[0]
    key = kernel_cache.digest(__version__, *identity.values(), kind, gpu.name, gpu.driver)
    file = f"auto-{key}.json"
    times = kernel_cache.load_choices(file)
    if times.keys() != {HOST, DEVICE}:
        times = measured(gpu.device)
        kernel_cache.store_choices(file, times)
    return times


def measured(name: str) -> dict[str, int]:
    """See comparison; zeros where it failed or took too long."""
    if sys.stderr is not None and sys.stderr.isatty():
        print(f"treadle: comparing {name} with the CPU, once", file=sys.stderr, flush=True)
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "TREADLE_TUNE": "0",  # the first guess is good enough, and compiles in a fraction
    }
    command = [sys.executable, "-P", "-m", "treadle.measure", host(), name]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=True
        )
        seconds = json.loads(done.stdout)
        return {HOST: _micro(seconds[host()]), DEVICE: _micro(seconds[name])}
    except (OSError, ValueError, KeyError, TypeError, subprocess.SubprocessError):
        return {HOST: 0, DEVICE: 0}


def _micro(seconds: float) -> int:
    return max(1, round(1e6 * seconds))


def _ratio(times: dict[str, int]) -> float:
    """How many times as fast the device is; 0 where that is not known."""
    return times[HOST] / times[DEVICE] if times[DEVICE] > 0 else 0.0


def _times(ratio: float) -> str:
    return f"{ratio:,.0f} times" if ratio >= 10 else f"{ratio:.2g} times"
