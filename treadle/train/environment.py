"""`environment.json`: the software and the machine that a run was last trained with."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any

import numpy as np

from treadle import __version__
from treadle.backends.base import Backend
from treadle.errors import TrainingError
from treadle.files import json_file, one_line, write_atomic

ENVIRONMENT_NAME = "environment.json"


def environment(backend: Backend) -> dict[str, str]:
    """Versions, system, processor and device; nothing that names a person or a machine."""
    return {
        "treadle": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "system": platform.platform(),
        "processor": processor(),
        "processors": str(os.cpu_count()),
        "device": backend.describe(),
        **backend.identity(),
    }


def processor() -> str:
    """The processor's name, as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def write_environment(run_dir: Path, backend: Backend) -> None:
    """Write the file in a run directory. TrainingError where that is not possible."""
    path = run_dir / ENVIRONMENT_NAME
    try:
        write_atomic(path, json_file(environment(backend)))
    except OSError as error:
        raise TrainingError(f"cannot write {path}: {error.strerror or one_line(error)}") from error


def read_environment(run_dir: Path) -> dict[str, Any]:
    """What `write_environment` wrote; nothing where it is not there or damaged."""
    try:
        found = json.loads((run_dir / ENVIRONMENT_NAME).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
