"""Files that are whole or absent: synced writes, atomic replacement, digests, strict JSON."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from treadle.errors import CheckpointError, CorruptError

Role = Literal["tmp", "old", "del"]
_LEFTOVER = re.compile(r"\.(?P<name>.+)\.(?P<role>tmp|old|del)-\d+")


@dataclass(frozen=True)
class FileDigest:
    """What a file must be: its SHA-256 in lower-case hexadecimal, and its size in bytes."""

    sha256: str
    size: int


def one_line(error: object, limit: int = 200) -> str:
    """A text for a message: on one line, without control characters, at most `limit` long."""
    text = " ".join(str(error).split())
    text = "".join(c if c.isprintable() else "?" for c in text)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def json_text(value: object, *, indent: int | None = None) -> str:
    """JSON with sorted keys and no NaN, the same text for the same value on every run.

    Raises CheckpointError for what JSON cannot hold.
    """
    separators = (",", ":") if indent is None else (",", ": ")
    try:
        text = json.dumps(
            value,
            sort_keys=True,
            separators=separators,
            indent=indent,
            ensure_ascii=False,
            allow_nan=False,
        )
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"[json] expected text, finite numbers, lists and dicts, got: {one_line(error)}"
        ) from error
    return text


def json_file(value: object) -> bytes:
    """The bytes of a JSON file for people to read: `json_text` indented, with a last newline."""
    return json_text(value, indent=2).encode() + b"\n"


def parse_json(text: str | bytes, where: str) -> dict[str, Any]:
    """The JSON object in `text`; CorruptError, naming `where`, for anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{where}: not valid JSON ({one_line(error)})") from error
    if not isinstance(value, dict):
        raise CorruptError(f"{where}: expected a JSON object, got {type(value).__name__}")
    return value


def read_bytes(path: Path) -> bytes:
    """The content of `path`; CheckpointError when it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or one_line(error)}") from error


def digest_file(path: Path) -> FileDigest:
    """Digest and size of a file, read in pieces; CheckpointError when it cannot be read."""
    try:
        with open(path, "rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            return FileDigest(sha256, file.tell())
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or one_line(error)}") from error


def sync_directory(path: Path) -> None:
    """Makes the names in a directory survive a power cut; Windows has no such call."""
    if os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_synced(path: Path, data: bytes) -> FileDigest:
    """Writes a file and waits until it is on the disk."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return FileDigest(hashlib.sha256(data).hexdigest(), len(data))


def temporary_sibling(path: Path, role: Role) -> Path:
    """A hidden name beside `path`: `.NAME.ROLE-PID`, which `leftover` recognises.

    The roles: `tmp` is being written, `old` is set aside while another takes its name, `del` is
    being deleted.
    """
    return path.with_name(f".{path.name}.{role}-{os.getpid()}")


def leftover(path: Path) -> tuple[str, str] | None:
    """(NAME, ROLE) when `path` is named as `temporary_sibling` names files, else None."""
    match = _LEFTOVER.fullmatch(path.name)
    return None if match is None else (match["name"], match["role"])


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """A binary file that appears under `path` whole, or not at all: after a kill or a power cut
    there is the old file or the new one. A link stays one; a device or a pipe is written to."""
    path = path.resolve()
    if path.exists() and not path.is_file() and not path.is_dir():
        with open(path, "wb") as file:
            yield file
        return
    temporary = temporary_sibling(path, "tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def write_atomic(path: Path, data: bytes) -> None:
    """Replaces `path` by `data`, as `atomic_file` does."""
    with atomic_file(path) as file:
        file.write(data)
