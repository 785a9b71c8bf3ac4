"""The OpenCL device of the tests: TREADLE_TEST_OPENCL, or the processor through PoCL."""

from __future__ import annotations

import os
from functools import cache
from typing import TYPE_CHECKING

import pytest

from treadle.errors import BackendError

if TYPE_CHECKING:
    from treadle.backends.opencl import OpenClBackend

DEVICE = os.environ.get("TREADLE_TEST_OPENCL", "opencl:portable")


# The least that a device may offer, and a GPU's way of working, in which work-items are lanes.
LEAST = {"GROUP": "64", "LOCAL": "32768", "VECTOR": "1"}


@cache
def _start(least: bool) -> OpenClBackend | str:
    """The backend, or why there is none."""
    from treadle.backends.opencl import OpenClBackend

    os.environ.setdefault("TREADLE_TUNE", "0")  # one kernel of several that give the same bits
    with pytest.MonkeyPatch.context() as patch:
        for name, value in LEAST.items() if least else ():
            patch.setenv(f"TREADLE_OPENCL_{name}", value)
        try:
            return OpenClBackend(DEVICE)
        except BackendError as error:
            return str(error)


def opencl(least: bool = False) -> OpenClBackend:
    """The backend of DEVICE. least: with work-groups and local memory as small as kernels must be
    content with. Where it is missing the test is skipped; in CI, where it must not be, the test
    fails."""
    found = _start(least)
    if isinstance(found, str):
        if os.environ.get("CI"):
            pytest.fail(f"{DEVICE}: {found}")
        pytest.skip(f"{DEVICE}: {found}")
    return found
