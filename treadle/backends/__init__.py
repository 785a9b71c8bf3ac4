"""Backends by name, and the choice of one."""

from __future__ import annotations

from treadle.backends.base import Backend
from treadle.errors import BackendError

NAMES = ("auto", "cpu", "numpy", "opencl[:N|:NAME]")


def select(device: str = "auto", threads: int | None = None) -> tuple[Backend, str]:
    """The backend for a device name, and why it was chosen.

    "auto" takes the C kernels, and falls back to the NumPy reference, with a notice, where they
    were not built. A device asked for by name is that device or a BackendError.
    """
    kind = device.partition(":")[0]
    if kind == "numpy":
        from treadle.backends.numpy import NumpyBackend

        return NumpyBackend(), "asked for"
    if kind == "opencl":
        from treadle.backends.opencl import OpenClBackend

        return OpenClBackend(device), "asked for"
    if kind == "cuda":
        from treadle.backends.cuda import CudaBackend

        return CudaBackend(device), "asked for"
    if kind in ("cpu", "auto"):
        from treadle.backends import cpu

        if kind == "cpu" or cpu.available():
            return cpu.CpuBackend(
                threads
            ), "asked for" if kind == "cpu" else "the kernels are built"
        from treadle.backends.numpy import NumpyBackend

        return NumpyBackend(), (
            "the C kernels are not built: install gcc or clang and reinstall for a much faster run"
        )
    raise BackendError(
        f"train.device: {device!r} is not available in this version; one of {', '.join(NAMES)}"
    )
