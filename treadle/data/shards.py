"""Token files: llm.c's `.bin`, read by memory map and written in one rename.

    bytes 0..1023   header: 256 int32, little-endian: magic, version, number of tokens, zeros
    bytes 1024..    the tokens

| magic    | version | tokens | vocabulary      |
| -------- | ------- | ------ | --------------- |
| 20240520 | 1       | uint16 | up to 65,536    |
| 20240801 | 7       | uint32 | larger          |

An older form has no header: the whole file is one stream of int32.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from treadle.errors import CorruptError, DataError
from treadle.files import atomic_file

HEADER_INTS = 256
HEADER_BYTES = 4 * HEADER_INTS


class _Form(NamedTuple):
    magic: int
    version: int
    dtype: np.dtype


_SMALL = _Form(20240520, 1, np.dtype("<u2"))
_LARGE = _Form(20240801, 7, np.dtype("<u4"))
_FORMS = {form.magic: form for form in (_SMALL, _LARGE)}
_EVALUATION_MAGIC = 20240522  # llm.c's files of multiple-choice questions
_RAW = np.dtype("<i4")
_LARGEST_SANE_ID = 1 << 24  # no vocabulary is larger; two uint16 read as one int32 mostly are
_PIECE = 1 << 22


def token_dtype(vocab_size: int) -> np.dtype:
    """The dtype that holds the ids of a vocabulary: uint16 or uint32, little-endian."""
    return (_SMALL if vocab_size <= 1 << 16 else _LARGE).dtype


class TokenWriter:
    """Writes token ids to a binary file as they come; the header is completed by `finish`.

    Attributes:
        count: ids written so far.
    """

    def __init__(self, file: IO[bytes], where: object, vocab_size: int, raw: bool = False) -> None:
        """`where` names the file in errors; `raw` leaves the header out."""
        self.count = 0
        self._file, self._where, self._vocab_size, self._raw = file, where, vocab_size, raw
        self._form = _SMALL if token_dtype(vocab_size) == _SMALL.dtype else _LARGE
        if not raw:
            file.write(bytes(HEADER_BYTES))

    def append(self, tokens: np.ndarray) -> None:
        """Adds ids [N].

        Raises:
            DataError: an id outside of the vocabulary, or more tokens than the header can count.
        """
        if not tokens.size:
            return
        low, high = id_range(tokens)
        if low < 0 or high >= self._vocab_size:
            raise DataError(
                f"{self._where}: token ids {low} to {high}, vocabulary of {self._vocab_size}"
            )
        self.count += tokens.size
        if self.count >= 1 << 31 and not self._raw:
            raise DataError(
                f"{self._where}: {self.count} tokens; a header counts fewer than 2^31: cut the "
                "corpus into several, or write the form without header"
            )
        dtype = _RAW if self._raw else self._form.dtype
        for piece in pieces(tokens):
            self._file.write(piece.astype(dtype).tobytes())

    def finish(self) -> None:
        """Writes the header."""
        if not self._raw:
            header = np.zeros(HEADER_INTS, "<i4")
            header[:3] = self._form.magic, self._form.version, self.count
            self._file.seek(0)
            self._file.write(header.tobytes())


def write_tokens(
    path: str | os.PathLike[str], tokens: np.ndarray, vocab_size: int, raw: bool = False
) -> None:
    """Writes token ids [N] for a vocabulary of `vocab_size`; `raw` leaves the header out.

    Raises:
        DataError: an id outside of the vocabulary, or more tokens than the header can count.
    """
    try:
        with atomic_file(Path(path)) as file:
            writer = TokenWriter(file, path, vocab_size, raw)
            writer.append(tokens)
            writer.finish()
    except OSError as error:
        raise DataError(f"{path}: cannot write the tokens: {error.strerror}") from None


def read_tokens(path: str | os.PathLike[str]) -> np.ndarray:
    """The tokens of a file as a read-only memory map: uint16, uint32, or int32 without header.

    Raises:
        DataError: no such file, or not a token file.
        CorruptError: fewer or more tokens than the header counts.
    """
    path = Path(path)
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            header = file.read(HEADER_BYTES)
    except OSError as error:
        raise DataError(f"{path}: cannot read the tokens: {error.strerror}") from None
    if not size:
        raise CorruptError(f"{path}: the token file is empty; write it again")
    words = np.frombuffer(header[: len(header) // 4 * 4], "<i4")
    magic = int(words[0]) if words.size else 0
    if magic == _EVALUATION_MAGIC:
        raise DataError(f"{path}: holds evaluation questions (llm.c), not a stream of tokens")
    form = _FORMS.get(magic)
    if form is None:
        return _read_raw(path, size)
    if words.size < HEADER_INTS:
        raise CorruptError(f"{path}: {size} bytes, shorter than its header of {HEADER_BYTES}")
    version, count = int(words[1]), int(words[2])
    if version != form.version:
        raise DataError(
            f"{path}: version {version} of magic {magic}; this reads version {form.version}"
        )
    expected = HEADER_BYTES + count * form.dtype.itemsize
    if size != expected:
        raise CorruptError(
            f"{path}: the header counts {count} tokens, {expected} bytes in all, "
            f"but the file has {size}; write it again"
        )
    return _map(path, form.dtype, HEADER_BYTES, count)


def _read_raw(path: Path, size: int) -> np.ndarray:
    hint = "not a token file: no header of llm.c, and not a stream of int32 ids"
    if size % _RAW.itemsize:
        raise DataError(f"{path}: {hint} ({size} bytes)")
    tokens = _map(path, _RAW, 0, size // _RAW.itemsize)
    low, high = id_range(tokens)
    if low < 0 or high > _LARGEST_SANE_ID:
        raise DataError(f"{path}: {hint} (ids from {low} to {high})")
    return tokens


def _map(path: Path, dtype: np.dtype, offset: int, count: int) -> np.ndarray:
    if not count:  # An empty file part cannot be mapped.
        return np.empty(0, dtype)
    return np.memmap(path, dtype, "r", offset, (count,))


def pieces(tokens: np.ndarray) -> Iterator[np.ndarray]:
    """Cuts ids [N] into views of bounded size, so that no pass needs the whole file in memory."""
    return (tokens[start : start + _PIECE] for start in range(0, tokens.size, _PIECE))


def id_range(tokens: np.ndarray) -> tuple[int, int]:
    """The smallest and the largest of some ids [N], N >= 1."""
    return min(int(p.min()) for p in pieces(tokens)), max(int(p.max()) for p in pieces(tokens))
