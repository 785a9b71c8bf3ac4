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


@cache
def _start() -> OpenClBackend | str:
    """The backend, or why there is none."""
    from treadle.backends.opencl import OpenClBackend

    os.environ.setdefault("TREADLE_TUNE", "0")  # one kernel of several that give the same bits
    try:
        return OpenClBackend(DEVICE)
    except BackendError as error:
        return str(error)


def opencl() -> OpenClBackend:
    """The backend of DEVICE. Where it is missing the test is skipped; in CI, where it must not be,
    the test fails."""
    found = _start()
    if isinstance(found, str):
        if os.environ.get("CI"):
            pytest.fail(f"{DEVICE}: {found}")
        pytest.skip(f"{DEVICE}: {found}")
    return found
