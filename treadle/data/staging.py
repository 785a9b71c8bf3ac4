"""A directory whose files appear all at once, as far as a file system can.

    with staging_folder(out) as folder:
        ...                              # files are made in folder / "out"
        put_in_place(folder / "out", out)

The files are moved with `metadata.json` first and `train.bin` last: with the digests of the first,
what is there is whole, or is seen not to be. What a killed process left behind is cleared by the
next.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from treadle.data.corpus import METADATA_FILE, TRAIN_FILE, VAL_FILE
from treadle.data.tokenizer import MERGES_FILE, VOCAB_FILE
from treadle.files import leftover, sync_directory, temporary_sibling

_NAME = "prepare"


@contextmanager
def staging_folder(out: Path) -> Iterator[Path]:
    """A hidden folder inside of `out` that is gone at the end, as are those of killed runs."""
    was_there = out.exists()
    out.mkdir(parents=True, exist_ok=True)
    for path in out.iterdir():
        if leftover(path) == (_NAME, "tmp") and not _is_running(path.name):
            shutil.rmtree(path, ignore_errors=True)
    folder = temporary_sibling(out / _NAME, "tmp")
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if not was_there:
            with suppress(OSError):  # it is not empty unless something failed
                out.rmdir()


def _is_running(name: str) -> bool:
    """Whether the process that a temporary name ends in is there; on Windows, whose files cannot
    be deleted while they are open, it need not be known."""
    process = int(name.rpartition("-")[2])
    if os.name == "nt" or process == os.getpid():
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def put_in_place(folder: Path, out: Path) -> None:
    """Moves the files: first the one that names the others, last the one that makes `out` a
    directory of tokens."""
    names = {path.name for path in folder.iterdir()}
    stale = {VOCAB_FILE, MERGES_FILE, VAL_FILE} - names if (out / METADATA_FILE).exists() else set()
    others = sorted(names - {METADATA_FILE, TRAIN_FILE})
    for name in (METADATA_FILE, *others, TRAIN_FILE):
        os.replace(folder / name, out / name)
    for name in stale:
        (out / name).unlink(missing_ok=True)
    sync_directory(out)
