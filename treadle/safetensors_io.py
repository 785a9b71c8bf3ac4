"""The safetensors format: written by us so that bytes repeat, read through the library.

A file is an 8-byte little-endian length N, N bytes of JSON header, then the tensors' bytes. The
`safetensors` library orders metadata at random; here keys are sorted, the header is padded with
spaces to a multiple of 8, and tensors lie without gaps, wider dtypes first and then by name, so
that each one is aligned to its item size. `docs/formats.md` shows the bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from treadle.errors import CheckpointError, CorruptError, NonFiniteError
from treadle.files import FileDigest, json_text, one_line

Arrays = dict[str, np.ndarray]

METADATA_KEY = "__metadata__"
HEADER_LIMIT = 100_000_000  # bytes; readers of the format refuse longer headers
CHUNK_ITEMS = 1 << 20  # items written, hashed and checked at a time

DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"),
    "U32": np.dtype("<u4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
BFLOAT16 = "BF16"  # NumPy has no such dtype: it is read as bits, and never written
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def _layout(
    tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]
) -> tuple[bytes, list[str]]:
    """The length prefix and padded header, and the tensor names in the order of their bytes."""
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict[str, object] = {METADATA_KEY: dict(metadata)} if metadata else {}
    offset = 0
    for name in names:
        array = tensors[name]
        code = _NAMES.get(array.dtype.newbyteorder("<"))
        if code is None or name == METADATA_KEY:
            raise CheckpointError(
                f"[safetensors] tensor {name!r}: expected a dtype of {', '.join(DTYPES)} and a "
                f"name other than {METADATA_KEY}, got {array.dtype}"
            )
        end = offset + array.nbytes
        header[name] = {
            "dtype": code,
            "shape": list(array.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json_text(header).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > HEADER_LIMIT:
        raise CheckpointError(
            f"[safetensors] the header would be {len(text)} bytes, over the format's limit of "
            f"{HEADER_LIMIT}; shorten the metadata"
        )
    return struct.pack("<Q", len(text)) + text, names


def _pieces(name: str, array: np.ndarray) -> Iterator[memoryview]:
    """The little-endian, C-ordered bytes of one tensor; NonFiniteError at a NaN or infinity."""
    flat = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).reshape(-1)
    for start in range(0, flat.size, CHUNK_ITEMS):
        chunk = flat[start : start + CHUNK_ITEMS]
        if chunk.dtype.kind == "f" and not np.isfinite(chunk).all():
            raise NonFiniteError(
                f"tensor {name!r} holds NaN or infinite values and is not saved; lower the "
                "learning rate and start another run with --init-from an earlier checkpoint"
            )
        yield chunk.data.cast("B")


def write_safetensors(
    path: Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]
) -> FileDigest:
    """Writes and syncs a file; the same arguments give the same bytes, whatever their order.

    Streams: memory beyond the tensors themselves stays within one chunk, unless a tensor is not
    contiguous. Raises NonFiniteError for a floating tensor with NaN or infinity, CheckpointError
    for a dtype that the format lacks, OSError as the system raises it.
    """
    head, names = _layout(tensors, metadata)
    sha256 = hashlib.sha256(head)
    with open(path, "wb") as file:
        file.write(head)
        for name in names:
            for piece in _pieces(name, tensors[name]):
                file.write(piece)
                sha256.update(piece)
        file.flush()
        os.fsync(file.fileno())
        return FileDigest(sha256.hexdigest(), file.tell())


class SafetensorsFile:
    """A file that is open for reading, its header checked: tensors are read when asked for.

    codes: each tensor's dtype as the format names it; shapes; metadata. A context manager. Raises
    CheckpointError when the file cannot be opened, CorruptError when it is not a well formed
    safetensors file.
    """

    def __init__(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        if not path.is_file():
            raise CheckpointError(f"{path}: no such file")
        self.path = path
        try:
            self._file = safe_open(path, framework="numpy")
            names = sorted(self._file.keys())
            slices = {name: self._file.get_slice(name) for name in names}
            self.codes: dict[str, str] = {name: s.get_dtype() for name, s in slices.items()}
            self.shapes = {name: tuple(s.get_shape()) for name, s in slices.items()}
            self.metadata: dict[str, str] = dict(self._file.metadata() or {})
        except SafetensorError as error:
            raise CorruptError(
                f"{path}: not a whole safetensors file ({one_line(error)})"
            ) from error
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror or one_line(error)}") from error

    def __enter__(self) -> SafetensorsFile:
        self._file.__enter__()
        return self

    def __exit__(self, *args: Any) -> None:
        self._file.__exit__(*args)

    def read(self, name: str) -> np.ndarray:
        """A copy of a tensor, bfloat16 as its bits (uint16). CorruptError for other dtypes that
        NumPy has not."""
        code = self.codes[name]
        if code == BFLOAT16:  # the library hands over no dtype that NumPy lacks
            return self._bits(name)
        if code not in DTYPES:
            raise _unknown_dtype(self.path, name, code)
        return self._file.get_tensor(name)

    def _bits(self, name: str) -> np.ndarray:
        start, header = self._header
        begin, end = header[name]["data_offsets"]
        with open(self.path, "rb") as file:
            file.seek(start + begin)
            return np.frombuffer(file.read(end - begin), "<u2").reshape(self.shapes[name])

    @cached_property
    def _header(self) -> tuple[int, dict[str, Any]]:
        """Where the tensors begin, and the header, which the library has checked."""
        with open(self.path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            return 8 + length, json.loads(file.read(length))


def _unknown_dtype(path: Path, name: str, code: str) -> CorruptError:
    return CorruptError(
        f"{path}: tensor {one_line(name)!r} has dtype {code}; expected one of {', '.join(DTYPES)}"
    )


def read_safetensors(path: Path) -> tuple[Arrays, dict[str, str]]:
    """Tensors (copies, by name in sorted order) and metadata of a file.

    Raises CheckpointError when the file cannot be opened, CorruptError when it is not a well
    formed safetensors file or holds a dtype that NumPy has not.
    """
    with SafetensorsFile(path) as file:
        for name, code in file.codes.items():
            if code not in DTYPES:
                raise _unknown_dtype(path, name, code)
        return {name: file.read(name) for name in file.codes}, file.metadata
