"""Backends by name, and the choice of one."""

from __future__ import annotations

from treadle.backends.base import Backend
from treadle.errors import BackendError

NAMES = ("auto", "cpu", "numpy", "opencl[:N|:NAME]", "cuda[:N]")


def select(
    device: str = "auto",
    threads: int | None = None,
    deterministic: bool = True,
    tf32: bool = False,
) -> tuple[Backend, str]:
    """The backend for a device name, and why it was chosen.

    deterministic, tf32: see CudaBackend; the others are deterministic always and have no TF32.

    "auto" takes the C kernels, or the NumPy reference where they were not built, unless a graphics
    processor has won a comparison with them (auto.py). A device asked for by name is that device or
    a BackendError.
    """
    if device != "auto":
        return named(device, threads, deterministic, tf32), "asked for"
    from treadle.backends import auto

    choice = auto.choose()
    try:
        return named(choice.device, threads, deterministic, tf32), choice.why
    except BackendError as error:
        if choice.device == auto.host():
            raise
        return named(auto.host(), threads), f"{choice.device} does not start: {error}"


def named(
    device: str, threads: int | None = None, deterministic: bool = True, tf32: bool = False
) -> Backend:
    """The backend for a device name other than "auto"; BackendError where there is none."""
    kind = device.partition(":")[0]
    if tf32 and kind != "cuda":
        raise BackendError(
            f"train.precision: tf32 is of NVIDIA's tensor cores, and the device is {device}; use "
            "--precision fp32, or --device cuda"
        )
    if device == "numpy":
        from treadle.backends.numpy import NumpyBackend

        return NumpyBackend()
    if device == "cpu":
        from treadle.backends.cpu import CpuBackend

        return CpuBackend(threads)
    if kind == "opencl":
        from treadle.backends.opencl import OpenClBackend

        return OpenClBackend(device)
    if kind == "cuda":
        from treadle.backends.cuda import CudaBackend

        return CudaBackend(device, deterministic, tf32)
    raise BackendError(
        f"train.device: {device!r} is not available in this version; one of {', '.join(NAMES)}"
    )
