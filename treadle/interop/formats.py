"""The formats of other programs, each a row of the tables here.

Checkpoints and Hugging Face's directories are not among them: those are what Treadle itself keeps
models in.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from treadle.errors import ConfigError, TokenizerError
from treadle.interop import gguf, llmc
from treadle.interop.base import Imported

Belongs = Callable[[Path], bool]


class Reader(NamedTuple):
    """belongs: whether a path is of the format."""

    belongs: Belongs
    read: Callable[[Path], Imported]


class Writer(NamedTuple):
    """dtypes: of the weights in the file, the usual one first. write(path, model, dtype) returns
    notes for a person."""

    dtypes: tuple[str, ...]
    write: Callable[[Path, Imported, str], list[str]]


class Description(NamedTuple):
    """describe: rows for a person, what each is called and what it is; CorruptError where the file
    is damaged."""

    belongs: Belongs
    describe: Callable[[Path], list[tuple[str, str]]]


LLMC_VERSIONS = {"fp32": 3, "bf16": 5}


def _write_llmc(path: Path, found: Imported, dtype: str) -> list[str]:
    """The model, and its tokenizer beside it as `<name>_tokenizer.bin`."""
    words = path.with_name(f"{path.stem}_tokenizer.bin")
    if found.tokenizer is not None and words.exists():
        raise ConfigError(f"{words} is there already; choose another --out, or delete it first")
    path.parent.mkdir(parents=True, exist_ok=True)
    llmc.write_llmc(path, found.model, found.weights, LLMC_VERSIONS[dtype])
    if found.tokenizer is None:
        return []
    try:
        llmc.write_tokenizer(words, found.tokenizer)
    except TokenizerError as error:
        return [f"the tokenizer is left out: {error}"]
    return [f"its tokenizer is {words}"]


def _write_gguf(path: Path, found: Imported, dtype: str) -> list[str]:
    path.parent.mkdir(parents=True, exist_ok=True)
    return gguf.write_gguf(path, found.model, found.weights, found.tokenizer, dtype)


READERS: dict[str, Reader] = {"llm.c": Reader(llmc.is_llmc, llmc.read_llmc)}
WRITERS: dict[str, Writer] = {
    "gguf": Writer(gguf.DTYPES, _write_gguf),
    "llmc": Writer(tuple(LLMC_VERSIONS), _write_llmc),
}
DESCRIPTIONS: dict[str, Description] = {
    "llm.c": Description(llmc.is_llmc, llmc.describe),
    "GGUF": Description(gguf.is_gguf, gguf.describe),
}
