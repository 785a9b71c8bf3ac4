"""`treadle devices`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from typing import Any

import typer

from treadle.backends import auto, cpu
from treadle.cli.tables import counted, table
from treadle.errors import BackendError
from treadle.files import one_line


def command(
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object, for programs."),
) -> None:
    """List what there is to compute on, what to write after --device, and what `auto` takes.

    The first time that there is a graphics processor, `auto` compares it with the processor.
    """
    found = Found()
    for look in SOURCES:
        look(found)
    choice = auto.choose()
    if as_json:
        print(json.dumps(asdict(found) | {"auto": asdict(choice)}, indent=2))
        return
    header = ("--device", "name", "kind", "memory", "units", "group", "local", "features", "driver")
    print(table((_row(d) for d in found.devices), header, left=len(header)))
    print(f"\nauto takes {choice.device}: {choice.why}")
    named = next((d for d in found.devices if ":" in d.device), None)
    if named is not None:
        start = named.device.partition(":")[0]
        word = named.name.split()[0]
        print(f'a part of a name will do as well as a number: --device "{start}:{word}"')
    for note in found.notes:
        print(note)


@dataclass
class Device:
    """One row. device: what stands after --device. memory: bytes, and local those of a work-group;
    units: compute units or threads; group: work-items of a work-group at most."""

    device: str
    name: str
    kind: str
    platform: str
    driver: str = ""
    memory: int | None = None
    units: int | None = None
    group: int | None = None
    local: int | None = None
    features: list[str] = field(default_factory=list)


@dataclass
class Found:
    """Everything that is there, and lines on what is not."""

    devices: list[Device] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def _row(d: Device) -> tuple[str, ...]:
    return (
        d.device,
        d.name,
        d.kind,
        "-" if d.memory is None else f"{d.memory / 2**30:,.1f} GiB",
        "-" if d.units is None else str(d.units),
        "-" if d.group is None else str(d.group),
        "-" if d.local is None else f"{d.local // 1024} KiB",
        ", ".join(d.features) or "-",
        ", ".join(filter(None, (d.platform, d.driver))),
    )


# ---------------------------------------------------------------- processors


def _memory() -> int | None:
    there = cpu.physical_memory()
    return int(there) if there != float("inf") else None


def _cpu(found: Found) -> None:
    from treadle.train.environment import processor

    try:
        backend = cpu.CpuBackend()
    except BackendError as error:
        found.notes.append(f"cpu: {error}")
        return
    library = backend.library
    features = [library.isa, counted(backend.threads, "thread")]
    if not library.threaded:
        features.append("built for one thread")
    kernels = "C kernels", f"of {', '.join(cpu.instruction_sets())}"
    found.devices.append(
        Device("cpu", processor(), "CPU", *kernels, _memory(), backend.threads, features=features)
    )


def _numpy(found: Found) -> None:
    import numpy as np

    found.devices.append(
        Device("numpy", "the reference", "CPU", "NumPy", np.__version__, _memory())
    )


# ---------------------------------------------------------------- OpenCL


def _opencl(found: Found) -> None:
    from treadle.backends import opencl

    try:
        platforms, devices = opencl.platforms(), opencl.devices()
    except Exception as error:  # whatever a broken driver does
        found.notes.append(f"opencl: {one_line(error)}")
        return
    for i, device in enumerate(devices):
        found.devices.append(_opencl_device(f"opencl:{i}", device, opencl.is_gpu(device)))
    for platform in platforms:
        if not opencl.devices_of(platform):
            name = platform.name.strip()
            found.notes.append(f"{name} shows no device: {opencl.remedy(platform)}")


def _opencl_device(name: str, device: Any, gpu: bool) -> Device:
    ask = _Asked(device)
    extensions = str(ask("extensions") or "").split()
    features = [word for word in ("fp64", "fp16") if f"cl_khr_{word}" in extensions]
    if ask("host_unified_memory"):
        features.append("unified memory")
    platform, version = device.platform, str(ask("version") or "").split()
    return Device(
        name,
        device.name.strip(),
        "GPU" if gpu else "CPU",
        " ".join([platform.name.strip(), *version[:2]]),
        str(ask("driver_version") or ""),
        ask("global_mem_size"),
        ask("max_compute_units"),
        ask("max_work_group_size"),
        ask("local_mem_size"),
        features,
    )


@dataclass
class _Asked:
    """What a device says of itself; None where its driver does not answer."""

    device: Any

    def __call__(self, what: str) -> Any:
        try:
            return getattr(self.device, what)
        except Exception:
            return None


# ---------------------------------------------------------------- CUDA


def _cuda(found: Found) -> None:
    if find_spec("nvmath") is None and shutil.which("nvidia-smi") is None:
        return  # who has no NVIDIA GPU need not read of it
    from treadle.backends import cuda_driver

    try:
        devices = cuda_driver.devices()
    except Exception as error:  # whatever a broken driver does
        found.notes.append(f"cuda: {one_line(error)}")
        return
    for d in devices:
        features = [f"compute capability {d.capability[0]}.{d.capability[1]}"]
        features += ["bfloat16"] if d.capability >= cuda_driver.LEAST_BF16 else []
        sizes = d.memory, d.units, d.group, d.local
        found.devices.append(Device(d.device, d.name, "GPU", "CUDA", d.driver, *sizes, features))


# Backends in the order in which they are listed; each adds its devices, or a line on what it lacks.
SOURCES: tuple[Callable[[Found], None], ...] = (_cpu, _numpy, _opencl, _cuda)
