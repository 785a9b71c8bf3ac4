"""What `--device auto` is: the processor, unless a graphics processor wins a comparison with it.

The comparison multiplies two matrices on both (treadle/measure.py). It happens once for each
device, driver and processor, in a process of its own, so that a driver that hangs or crashes costs
one wait and no run. Whatever fails here means the processor.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from treadle import __version__
from treadle.backends import cpu, kernel_cache
from treadle.errors import BackendError

TIMEOUT = 60.0  # seconds of a comparison; most of it compiles kernels
# A step is many small kernels too, which a GPU is slow to start, so a narrow win is none.
MARGIN = 1.5
HOST, DEVICE = "host", "device"  # keys of a stored comparison: microseconds, 0 where it failed


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
        found = gpus()
    except Exception as error:
        return Choice(alone.device, f"{alone.why}; OpenCL failed: {_line(error)}")
    ratios = [
        (_ratio(comparison(name, device)), name, device.name.strip()) for name, device in found
    ]
    ratio, name, shown = max(ratios, default=(0.0, "", ""), key=lambda entry: entry[0])
    if not ratios:
        return alone
    if not ratio:
        return Choice(alone.device, f"{ratios[0][2]} failed in a comparison")
    told = f"{shown} multiplies matrices {_times(ratio)} as fast as the CPU"
    if ratio < MARGIN:
        return Choice(alone.device, f"{told}, which is not enough")
    return Choice(name, told)


def gpus() -> list[tuple[str, Any]]:
    """(name, device) of the graphics processors that OpenCL shows; none without pyopencl."""
    if find_spec("pyopencl") is None:
        return []
    from treadle.backends import opencl

    try:
        found = opencl.devices()
    except BackendError:  # there is no driver, which is no fault of anything that is there
        return []
    return [(f"opencl:{i}", d) for i, d in enumerate(found) if opencl.is_gpu(d)]


def comparison(name: str, device: Any) -> dict[str, int]:
    """Microseconds of a matrix product by HOST and DEVICE, from the cache or measured now."""
    identity = cpu.CpuBackend().identity() if cpu.available() else {"backend": "numpy"}
    driver = (device.name, device.platform.version, device.driver_version)
    file = f"auto-{kernel_cache.digest(__version__, *identity.values(), *driver)}.json"
    times = kernel_cache.load_choices(file)
    if times.keys() != {HOST, DEVICE}:
        times = measured(name)
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


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
