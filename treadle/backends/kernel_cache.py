"""Compiled kernels and measured choices, kept between runs.

A folder of files named by a digest of all that they follow from, so that nothing in it is ever out
of date, and deleting it costs only time. Files appear whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any


def folder() -> Path:
    """TREADLE_CACHE, else `treadle` in the user's folder for caches."""
    chosen = os.environ.get("TREADLE_CACHE")
    if chosen:
        return Path(chosen)
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA")
    elif sys.platform == "darwin":
        base = str(Path.home() / "Library" / "Caches")
    else:
        base = os.environ.get("XDG_CACHE_HOME")
    return Path(base) / "treadle" if base else Path.home() / ".cache" / "treadle"


def subfolder(name: str) -> Path | None:
    """A folder in the cache for a driver that keeps its kernels itself; None where there can be
    none."""
    chosen = folder() / name
    try:
        chosen.mkdir(parents=True, exist_ok=True)
        return chosen if os.access(chosen, os.W_OK | os.X_OK) else None
    except OSError:
        return None


def digest(*parts: str) -> str:
    """A file's name: of everything that its content follows from."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:40]


def load(name: str) -> bytes | None:
    """What was stored under a name; None when nothing was, or it cannot be read."""
    try:
        return (folder() / name).read_bytes()
    except OSError:
        return None


def store(name: str, content: bytes) -> None:
    """Keep content under a name. A cache that cannot be written is no reason to stop."""
    try:
        folder().mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=folder())
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, folder() / name)
    except OSError:
        return


def load_choices(name: str) -> dict[str, int]:
    """Numbers by name, as `store_choices` keeps them; empty when there are none."""
    try:
        found: Any = json.loads(load(name) or b"{}")
        return {str(k): int(v) for k, v in found.items()}
    except (ValueError, TypeError, AttributeError):
        return {}


def store_choices(name: str, choices: dict[str, int]) -> dict[str, int]:
    """Keep numbers by name; what others stored meanwhile stays. Returns all that are kept."""
    merged = choices | load_choices(name)
    store(name, json.dumps(merged, sort_keys=True, indent=0).encode())
    return merged
