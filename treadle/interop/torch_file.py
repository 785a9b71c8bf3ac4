"""PyTorch's files of weights (`pytorch_model.bin`), read without running what they say.

`torch.save` writes a zip archive: `NAME/data.pkl`, a pickle of the state dict, and one stored entry
`NAME/data/KEY` for each storage, to which the pickle refers by persistent ids. Pickle is a program;
this one may call what a state dict needs and nothing else:

    collections.OrderedDict                            the dict itself
    torch._utils._rebuild_tensor_v2, _rebuild_parameter   a view of a storage
    torch.FloatStorage, HalfStorage …                  the dtype of a storage

Anything else is refused by name. Tensors are read when asked for, after their view was checked to
lie inside its storage.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from treadle.errors import CheckpointError, CorruptError
from treadle.files import one_line
from treadle.safetensors_io import BFLOAT16, DTYPES

PICKLE_LIMIT = 64 << 20  # bytes; the pickle holds names and shapes, no numbers
HOW_TO_CONVERT = (
    "convert it where it comes from, with transformers: "
    "AutoModelForCausalLM.from_pretrained(OLD).save_pretrained(NEW)"
)

# Storage class: dtype as safetensors names it.
STORAGES = {
    "DoubleStorage": "F64",
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": BFLOAT16,
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
}


@dataclass(frozen=True)
class _Storage:
    key: str
    code: str
    items: int


@dataclass(frozen=True)
class _View:
    """A tensor: items of a storage from `offset` on, by shape and strides."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Rebuild:
    """The callables that a pickle may name; without attributes that it could change."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *args: Any) -> Any:
        if self._name == "OrderedDict":
            return OrderedDict(*args)
        if self._name == "_rebuild_parameter":  # (tensor, requires_grad, hooks)
            return args[0]
        storage, offset, shape, strides = args[:4]  # then requires_grad, hooks, metadata
        return _View(storage, offset, tuple(shape), tuple(strides))


_CALLABLES = {
    ("collections", "OrderedDict"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch._utils", "_rebuild_parameter"),
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _CALLABLES:
            return _Rebuild(name)
        if module == "torch" and name in STORAGES:
            return STORAGES[name]
        raise pickle.UnpicklingError(f"it wants {module}.{name}, which is not part of a state dict")

    def persistent_load(self, pid: Any) -> _Storage:
        kind, code, key, _, items = pid
        if kind != "storage" or code not in STORAGES.values() or not isinstance(key, str):
            raise pickle.UnpicklingError(f"it refers to {pid!r}")
        return _Storage(key, code, items)


class TorchFile:
    """A file that is open for reading. codes: dtypes by name, as safetensors spells them; shapes.

    A context manager. Raises CheckpointError when the file cannot be opened or is of another kind,
    CorruptError when it is damaged or asks for more than a state dict needs.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._zip = zipfile.ZipFile(path)
        except (zipfile.BadZipFile, ValueError, EOFError) as error:
            raise CheckpointError(
                f"{path}: not a zip archive as PyTorch 1.6 and later write it "
                f"({one_line(error)}); {HOW_TO_CONVERT}"
            ) from None
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror or one_line(error)}") from None
        try:
            self._root, self._entries = self._index()
            self._views = self._state_dict()
        except BaseException:
            self._zip.close()
            raise
        self.codes = {name: view.storage.code for name, view in self._views.items()}
        self.shapes = {name: view.shape for name, view in self._views.items()}

    def __enter__(self) -> TorchFile:
        return self

    def __exit__(self, *args: Any) -> None:
        self._zip.close()

    def read(self, name: str) -> np.ndarray:
        """A copy of a tensor, bfloat16 as its bits (uint16)."""
        view = self._views[name]
        code = view.storage.code
        dtype = np.dtype(np.uint16) if code == BFLOAT16 else DTYPES[code]
        data = self._entry(f"data/{view.storage.key}")
        try:
            items = np.frombuffer(data, dtype, view.storage.items)[view.offset :]
            strides = [stride * dtype.itemsize for stride in view.strides]
            return np.lib.stride_tricks.as_strided(items, view.shape, strides).copy()
        except ValueError as error:
            raise CorruptError(
                f"{self.path}: tensor {one_line(name)!r} does not fit its storage "
                f"({one_line(error)})"
            ) from None

    # ---------------------------------------------------------------- the archive

    def _index(self) -> tuple[str, dict[str, zipfile.ZipInfo]]:
        """The folder that all entries lie in, and the entries."""
        entries = {info.filename: info for info in self._zip.infolist()}
        roots = [name.removesuffix("data.pkl") for name in entries if name.endswith("/data.pkl")]
        if len(roots) != 1:
            raise CheckpointError(
                f"{self.path}: a zip archive without data.pkl, not PyTorch's; {HOW_TO_CONVERT}"
            )
        for info in entries.values():
            if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
                raise CorruptError(
                    f"{self.path}: {one_line(info.filename)!r} is compressed, which PyTorch never "
                    "does"
                )
        return roots[0], entries

    def _entry(self, name: str) -> bytes:
        info = self._entries.get(self._root + name)
        if info is None:
            raise CorruptError(f"{self.path}: has no entry {one_line(name)!r}")
        try:
            return self._zip.read(info)
        except (zipfile.BadZipFile, ValueError, EOFError, OSError, NotImplementedError) as error:
            raise CorruptError(
                f"{self.path}: {one_line(name)!r} is damaged ({one_line(error)})"
            ) from None

    def _state_dict(self) -> dict[str, _View]:
        if self._entries[f"{self._root}data.pkl"].file_size > PICKLE_LIMIT:
            raise CorruptError(f"{self.path}: data.pkl is over {PICKLE_LIMIT} bytes")
        order = self._root + "byteorder"
        if order in self._entries and self._entry("byteorder").strip() != b"little":
            raise CheckpointError(f"{self.path}: is not little-endian; {HOW_TO_CONVERT}")
        data = self._entry("data.pkl")
        try:
            # The memo is an array as long as its largest index, so an index is a claim on memory.
            for opcode, argument, _ in pickletools.genops(data):
                if opcode.name.endswith("PUT") and int(argument or 0) > len(data):
                    raise pickle.UnpicklingError(f"memo index {argument}")
            content = _Unpickler(io.BytesIO(data)).load()
        except Exception as error:  # a hostile pickle can raise anything
            raise CorruptError(
                f"{self.path}: data.pkl is not a state dict ({one_line(error)}); {HOW_TO_CONVERT}"
            ) from None
        if not isinstance(content, Mapping):
            raise CheckpointError(
                f"{self.path}: holds {type(content).__name__}, not a dict of tensors; "
                f"{HOW_TO_CONVERT}"
            )
        views = {name: view for name, view in content.items() if isinstance(view, _View)}
        if not views:
            raise CheckpointError(f"{self.path}: holds no tensors; {HOW_TO_CONVERT}")
        for name, view in views.items():
            self._check(name, view)
        return views

    def _check(self, name: Any, view: _View) -> None:
        """That a view lies inside its storage, and repeats nothing."""
        storage, shape, strides = view.storage, view.shape, view.strides
        numbers = (view.offset, *shape, *strides)
        fits = (
            isinstance(name, str)
            and isinstance(storage, _Storage)
            and all(type(n) is int and n >= 0 for n in (*numbers, storage.items))
            and len(shape) == len(strides) <= 8
            and prod(shape) <= storage.items
            and view.offset
            + sum((n - 1) * s for n, s in zip(shape, strides, strict=True) if prod(shape))
            < storage.items + (prod(shape) == 0)
        )
        if not fits:
            raise CorruptError(f"{self.path}: tensor {one_line(name)!r} leaves its storage")
