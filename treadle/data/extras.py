"""Packages of the extra `corpus`, imported when they are needed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from treadle.errors import DataError


def require(module: str, what: str) -> Any:
    """An optional module; `what` says in the error which use needs it.

    Raises:
        DataError: not installed, with the command that installs it.
    """
    try:
        return import_module(module)
    except ImportError:
        raise DataError(
            f"{what} needs {module.partition('.')[0]}: pip install 'treadle[corpus]'"
        ) from None
