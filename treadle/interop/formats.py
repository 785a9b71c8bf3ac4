"""The formats of other programs, each a row of the tables here.

Checkpoints and Hugging Face's directories are not among them: those are what Treadle itself keeps
models in.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from treadle.interop.base import Imported

Belongs = Callable[[Path], bool]


class Reader(NamedTuple):
    """belongs: whether a path is of the format."""

    belongs: Belongs
    read: Callable[[Path], Imported]


class Writer(NamedTuple):
    """dtypes: of the weights in the file, the usual one first. write(path, model, dtype)."""

    dtypes: tuple[str, ...]
    write: Callable[[Path, Imported, str], None]


class Description(NamedTuple):
    """describe: rows for a person, what each is called and what it is; CorruptError where the file
    is damaged."""

    belongs: Belongs
    describe: Callable[[Path], list[tuple[str, str]]]


READERS: dict[str, Reader] = {}
WRITERS: dict[str, Writer] = {}
DESCRIPTIONS: dict[str, Description] = {}
