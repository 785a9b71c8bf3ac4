"""OpenCL for tests: PoCL, which runs on any processor, and devices that are made up."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from treadle.backends import opencl
from treadle.errors import BackendError

POCL = "opencl:portable computing"


def pocl() -> str:
    """The name of PoCL's device; the test is skipped where there is none, and fails in CI."""
    try:
        opencl.choose(POCL)
    except BackendError as error:
        if os.environ.get("CI"):
            pytest.fail(str(error))
        pytest.skip(str(error))
    return POCL


class FakeError(Exception):
    """Stands for pyopencl.Error."""


@dataclass
class FakePlatform:
    name: str = "Fake OpenCL"
    devices: list[FakeDevice] = field(default_factory=list)
    version: str = "OpenCL 3.0 fake"
    broken: bool = False

    def get_devices(self) -> list[FakeDevice]:
        if self.broken:
            raise FakeError("DEVICE_NOT_FOUND")
        for device in self.devices:
            device.platform = self
        return self.devices


@dataclass
class FakeDevice:
    name: str
    type: int = 4  # a GPU; 2 is a CPU
    version: str = "OpenCL 3.0 fake"
    driver_version: str = "1.0"
    global_mem_size: int = 4 << 30
    max_mem_alloc_size: int = 1 << 30
    max_compute_units: int = 8
    max_work_group_size: int = 256
    local_mem_size: int = 32768
    extensions: str = "cl_khr_fp16 cl_khr_3d_image_writes"
    host_unified_memory: int = 1
    preferred_vector_width_float: int = 1
    platform: Any = None


class FakeModule:
    """Stands for pyopencl, with these platforms."""

    Error = FakeError

    class device_type:
        CPU, GPU = 2, 4

    def __init__(self, platforms: Sequence[FakePlatform], starts: bool) -> None:
        self.platforms, self.starts = platforms, starts

    def get_platforms(self) -> Sequence[FakePlatform]:
        if not self.platforms:
            raise FakeError("clGetPlatformIDs failed: PLATFORM_NOT_FOUND_KHR")
        return self.platforms

    def Context(self, devices: list[FakeDevice]) -> Any:
        if not self.starts:
            raise FakeError("clCreateContext failed: OUT_OF_HOST_MEMORY")

    def CommandQueue(self, context: Any) -> Any:
        pass


def pretend(patch: pytest.MonkeyPatch, *platforms: FakePlatform, starts: bool = False) -> None:
    """Makes these platforms all that OpenCL shows. starts: whether a device's driver does."""
    patch.setattr(opencl, "module", lambda: FakeModule(platforms, starts))


def no_pyopencl(patch: pytest.MonkeyPatch) -> None:
    """As if pyopencl were not installed."""
    opencl.module.cache_clear()
    patch.setitem(__import__("sys").modules, "pyopencl", None)
