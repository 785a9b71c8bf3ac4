"""NVIDIA's driver: whether it is there, and which devices it shows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from treadle.errors import BackendError

INSTEAD = "or use --device cpu"
LEAST = (7, 5)  # compute capability that the kernels need
LEAST_BF16 = (8, 0)


@cache
def driver() -> Any:
    """cuda.bindings.driver; BackendError where the packages or the driver are missing."""
    try:
        from cuda.bindings import driver as bindings
    except ImportError as error:
        raise BackendError(
            f"--device cuda needs cuda-core ({error}): pip install 'treadle[cuda]', {INSTEAD}"
        ) from None
    try:
        status = bindings.cuInit(0)[0]
    except RuntimeError as error:  # no libcuda
        raise BackendError(
            f"there is no NVIDIA driver here ({str(error).splitlines()[0]}); install it, {INSTEAD}"
        ) from None
    if int(status) != 0:
        raise BackendError(
            f"the NVIDIA driver does not start: {status.name}; check nvidia-smi, {INSTEAD}"
        )
    return bindings


def checked(result: tuple[Any, ...]) -> Any:
    """What a driver call returns beside its status; BackendError where it failed."""
    status, *values = result
    if int(status) != 0:
        raise BackendError(f"the CUDA driver failed with {status.name}")
    return values[0] if len(values) == 1 else tuple(values)


def device_count() -> int:
    """How many CUDA devices there are."""
    return int(checked(driver().cuDeviceGetCount()))


@dataclass(frozen=True)
class Facts:
    """A device. device: its name after --device. memory: bytes, and local those of a work-group;
    units: multiprocessors; group: threads of a block."""

    device: str
    name: str
    driver: str
    capability: tuple[int, int]
    memory: int
    units: int
    group: int
    local: int


def version() -> str:
    """The version of CUDA that the driver knows."""
    number = int(checked(driver().cuDriverGetVersion()))
    return f"{number // 1000}.{number % 1000 // 10}"


def devices() -> list[Facts]:
    """All CUDA devices; BackendError without the packages or a driver."""
    d = driver()
    attribute = d.CUdevice_attribute
    wanted = (
        attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
        attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
        attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
        attribute.CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK,
        attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK,
    )
    found = []
    for i in range(device_count()):
        handle = checked(d.cuDeviceGet(i))
        major, minor, *rest = (int(checked(d.cuDeviceGetAttribute(a, handle))) for a in wanted)
        name = checked(d.cuDeviceGetName(256, handle)).split(b"\0")[0].decode()
        memory = int(checked(d.cuDeviceTotalMem(handle)))
        found.append(Facts(f"cuda:{i}", name, version(), (major, minor), memory, *rest))
    return found


def choose(name: str) -> int:
    """The ordinal for `cuda` or `cuda:N`; BackendError when there is none."""
    wanted = name.partition(":")[2] or "0"
    count = device_count()
    if count == 0:
        raise BackendError(f"CUDA shows no device; check nvidia-smi, {INSTEAD}")
    if not wanted.isdigit() or int(wanted) >= count:
        raise BackendError(
            f"there is no CUDA device {wanted!r}; there {'is' if count == 1 else 'are'} {count}, "
            "counted from 0"
        )
    return int(wanted)
