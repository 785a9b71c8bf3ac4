"""The header of a GGUF file, read by ourselves: quickly, and safely from files that lie.

    magic "GGUF", version u32, tensors u64, pairs u64
    pairs:   key string, type u32, value         string: length u64, UTF-8
    tensors: name string, dimensions u32, each u64, type u32, offset u64
    data:    from the next multiple of general.alignment (32 where it is absent)

Every count is compared with the bytes that are left before anything of its size is made. The
specification is docs/gguf.md of the project ggml.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass, field
from pathlib import Path

from treadle.errors import CheckpointError, CorruptError
from treadle.files import one_line

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32
_KEPT = 4096  # bytes of a string that is worth keeping; longer ones are templates and licences

# Value types of the pairs by their number; 8 is a string, 9 an array.
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9

# ggml's types of tensors: name, numbers in a block, bytes of a block.
_TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 36),
    10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292), 24: ("I8", 1, 1), 25: ("I16", 1, 2),
    26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8), 30: ("BF16", 1, 2),
}  # fmt: skip


@dataclass(frozen=True)
class Tensor:
    """A tensor of a file. shape: the last dimension is the one whose numbers are neighbours.
    nbytes: None where the type is not known."""

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    nbytes: int | None


@dataclass
class Header:
    """values: by key, scalars and strings; of an array, its length. data: where tensors begin."""

    version: int
    values: dict[str, object] = field(default_factory=dict)
    tensors: list[Tensor] = field(default_factory=list)
    data: int = 0


def is_gguf(path: str | Path) -> bool:
    """Whether a file begins as GGUF does."""
    try:
        with open(path, "rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def read_header(path: Path) -> Header:
    """The header of a file, its tensors checked against the file's length.

    Raises:
        CheckpointError: not a GGUF file, of another version, or not readable.
        CorruptError: damaged or cut off.
    """
    try:
        with open(path, "rb") as file:
            head = file.read(8)
            if head[:4] != MAGIC:
                raise CheckpointError(f"{path}: not a GGUF file")
            version = int.from_bytes(head[4:], "little")
            if version not in _VERSIONS:
                big_endian = not version & 0xFFFF and len(head) == 8
                hint = "; it is big-endian" if big_endian else ""
                raise CheckpointError(f"{path}: GGUF version {version}; this reads 2 and 3{hint}")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(path, data).header(version)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or one_line(error)}") from error


class _Reader:
    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at = path, data, 8

    def header(self, version: int) -> Header:
        found = Header(version)
        tensors, pairs = self.number("Q"), self.number("Q")
        # The smallest pair is an empty key and one byte; the smallest tensor has no dimensions.
        if 13 * pairs + 24 * tensors > len(self.data) - self.at:
            raise self.damaged(f"{tensors} tensors and {pairs} pairs do not fit into it")
        for _ in range(pairs):
            key = self.string()
            if key in found.values:
                raise self.damaged(f"the key {one_line(key, 60)!r} is there twice")
            found.values[key] = self.value(self.number("I"))
        names: set[str] = set()
        for _ in range(tensors):
            tensor = self.tensor()
            if tensor.name in names:
                raise self.damaged(f"tensor {one_line(tensor.name, 60)!r} is there twice")
            names.add(tensor.name)
            found.tensors.append(tensor)
        alignment = found.values.get("general.alignment", _ALIGNMENT)
        if type(alignment) is not int or alignment < 1:
            raise self.damaged(f"general.alignment is {one_line(alignment, 60)}")
        found.data = -(-self.at // alignment) * alignment
        for tensor in found.tensors:
            end = found.data + tensor.offset + (tensor.nbytes or 0)
            if end > len(self.data) or tensor.offset % alignment:
                raise self.damaged(
                    f"tensor {one_line(tensor.name, 60)!r} ends at byte {end} of {len(self.data)}"
                )
        _check_overlaps(self, found.tensors)
        return found

    def tensor(self) -> Tensor:
        name, dimensions = self.string(), self.number("I")
        if dimensions > 8:
            raise self.damaged(f"tensor {one_line(name, 60)!r} has {dimensions} dimensions")
        shape = tuple(self.number("Q") for _ in range(dimensions))[::-1]
        kind, offset = self.number("I"), self.number("Q")
        if kind not in _TYPES:
            return Tensor(name, shape, f"type {kind}", offset, None)
        label, numbers, nbytes = _TYPES[kind]
        if shape and shape[-1] % numbers:
            raise self.damaged(
                f"tensor {one_line(name, 60)!r}: rows of {shape[-1]} in blocks of {numbers}"
            )
        return Tensor(name, shape, label, offset, math.prod(shape) // numbers * nbytes)

    def value(self, kind: int) -> object:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise self.damaged(f"unknown type {kind} of a value at byte {self.at - 4}")
        item, count = self.number("I"), self.number("Q")
        if item in _SCALARS:
            self.skip(count * struct.calcsize("<" + _SCALARS[item]))
        elif item == _STRING:
            if 8 * count > len(self.data) - self.at:
                raise self.damaged(f"an array of {count} strings does not fit into it")
            for _ in range(count):
                self.skip(self.number("Q"))
        else:
            raise self.damaged(f"an array of values of type {item}")
        return count

    def string(self) -> str:
        length = self.number("Q")
        start = self.at
        self.skip(length)
        return self.data[start : start + min(length, _KEPT)].decode("utf-8", "replace")

    def number(self, code: str) -> int:
        start = self.at
        self.skip(struct.calcsize("<" + code))
        return struct.unpack_from("<" + code, self.data, start)[0]

    def skip(self, length: int) -> None:
        if length > len(self.data) - self.at:
            raise self.damaged("it is cut off")
        self.at += length

    def damaged(self, what: str) -> CorruptError:
        return CorruptError(f"{self.path}: damaged GGUF header: {what}")


def _check_overlaps(reader: _Reader, tensors: list[Tensor]) -> None:
    end, before = 0, ""
    for tensor in sorted(tensors, key=lambda t: t.offset):
        if tensor.offset < end:
            raise reader.damaged(
                f"tensors {one_line(before, 60)!r} and {one_line(tensor.name, 60)!r} overlap"
            )
        end, before = tensor.offset + (tensor.nbytes or 0), tensor.name
