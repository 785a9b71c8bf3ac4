"""Hugging Face's model directories, read with care: what they hold was written by others.

    config.json                          the architecture and its sizes
    model.safetensors                    the weights; or shards, with
    model.safetensors.index.json         which tensor lies in which file
    pytorch_model.bin (.index.json)      the same in PyTorch's format (see `torch_file`)
    tokenizer.json                       or vocab.json and merges.txt of GPT-2's first files

Weights may be float32, float16, bfloat16 or float64; names may lack the prefix of the model's body,
as files of a body alone have them; the head may be there beside a tied embedding. The same is
written as a checkpoint, which Hugging Face tools load as it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from re import compile as regex

import numpy as np

from treadle import models
from treadle.data.tokenizer import MERGES_FILE, TOKENIZER_FILE, VOCAB_FILE, Tokenizer
from treadle.errors import CheckpointError, CorruptError, NonFiniteError
from treadle.files import one_line, parse_json, read_bytes
from treadle.graph.value import from_bfloat16
from treadle.interop.base import Imported
from treadle.interop.torch_file import HOW_TO_CONVERT, TorchFile
from treadle.models.base import Model
from treadle.safetensors_io import BFLOAT16, SafetensorsFile

CONFIG_FILE = "config.json"
JSON_LIMIT = 64 << 20  # bytes of a config.json or an index
NOTED_NAMES = 5  # tensors that a note names
CHECK_ITEMS = 1 << 20  # items looked at for NaN at a time

SAFETENSORS, TORCH = "model.safetensors", "pytorch_model.bin"
WEIGHT_FILES = (SAFETENSORS, f"{SAFETENSORS}.index.json", TORCH, f"{TORCH}.index.json")
FLOAT_CODES = ("F32", "F16", BFLOAT16, "F64")
HEAD = "lm_head.weight"

# What older files hold beside the weights: causal masks and rotary frequencies.
_BUFFERS = regex(r"\.attn\.(masked_)?bias$|\.rotary_emb\.inv_freq$")

WeightFile = SafetensorsFile | TorchFile


def is_hf(path: Path) -> bool:
    """Whether a directory holds a model in Hugging Face's layout."""
    return (path / CONFIG_FILE).is_file() and any((path / n).is_file() for n in WEIGHT_FILES)


def read_hf(path: Path) -> Imported:
    """The model of a Hugging Face directory.

    CheckpointError for what is missing, of another kind or does not fit together, CorruptError for
    damaged files, NonFiniteError for weights with NaN or infinity; each in one line.
    """
    if not (path / CONFIG_FILE).is_file():
        raise CheckpointError(f"{path}: no {CONFIG_FILE}; give a Hugging Face model directory")
    config = _read_object(path / CONFIG_FILE)
    model = models.from_hf_config(config)
    with ExitStack() as opened:
        files = weight_files(path, opened)
        models.check_layers(model, len(files))
        tensors = Tensors(files, model)
        model, notes = _tied(model, tensors)
        weights = model.from_hf(tensors)
        notes += tensors.left_out()
    tokenizer, more = read_tokenizer(path)
    return Imported(model, weights, tokenizer, notes + more)


# ---------------------------------------------------------------- weights


class Tensors(Mapping[str, np.ndarray]):
    """The tensors of open files as float32, by the names that the model's files have.

    Each is read when it is first asked for, and kept. CorruptError for a dtype that is no float,
    NonFiniteError for NaN and infinity.
    """

    def __init__(self, files: Mapping[str, WeightFile], model: Model) -> None:
        body = f"{model.parameters()[0].name.partition('.')[0]}."
        bare = not any(name.startswith(body) for name in files)
        self._files = {
            (body + name if bare and name != HEAD else name): (file, name)
            for name, file in files.items()
            if not _BUFFERS.search(f".{name}")
        }
        self._kept: dict[str, np.ndarray] = {}

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._kept:
            file, stored = self._files[name]
            self._kept[name] = _as_float32(file, stored)
        return self._kept[name]

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def left_out(self) -> list[str]:
        """A note on the tensors that nobody asked for, if there are some."""
        names = sorted(self._files.keys() - self._kept.keys())
        if not names:
            return []
        more = f" and {len(names) - NOTED_NAMES} more" if len(names) > NOTED_NAMES else ""
        shown = ", ".join(one_line(name, 60) for name in names[:NOTED_NAMES])
        return [f"tensors that the model has no place for were left out: {shown}{more}"]


def _as_float32(file: WeightFile, name: str) -> np.ndarray:
    code = file.codes[name]
    if code not in FLOAT_CODES:
        raise CorruptError(
            f"{file.path}: tensor {one_line(name)!r} has dtype {code}; weights are one of "
            f"{', '.join(FLOAT_CODES)}"
        )
    array = file.read(name)
    with np.errstate(over="ignore"):  # a float64 beyond float32 becomes infinite, and is refused
        wide = from_bfloat16(array) if code == BFLOAT16 else np.asarray(array, np.float32)
    flat = wide.reshape(-1)
    for start in range(0, flat.size, CHECK_ITEMS):
        if not np.isfinite(flat[start : start + CHECK_ITEMS]).all():
            raise NonFiniteError(
                f"{file.path}: tensor {one_line(name)!r} holds NaN or infinite values; the file is "
                "damaged, or its training had failed"
            )
    return wide


def _tied(model: Model, tensors: Tensors) -> tuple[Model, list[str]]:
    """The model with a head of its own where the files have one that is not the embedding."""
    embedding = model.parameters()[0].name
    if not (model.tie_embeddings and HEAD in tensors and embedding in tensors):
        return model, []
    if np.array_equal(tensors[HEAD], tensors[embedding]):
        return model, []
    untied = dataclasses.replace(model, tie_embeddings=False)  # type: ignore[type-var]
    return untied, [f"{HEAD} differs from {embedding}, so they are not tied, against {CONFIG_FILE}"]


# ---------------------------------------------------------------- files


def weight_files(path: Path, opened: ExitStack) -> dict[str, WeightFile]:
    """Tensor name: the open file that holds it. Files are opened into `opened`.

    CheckpointError where there is none, or an index that names files elsewhere.
    """
    name = next((name for name in WEIGHT_FILES if (path / name).is_file()), None)
    if name is None:
        raise CheckpointError(
            f"{path}: no weights; expected one of {', '.join(WEIGHT_FILES)} (other formats: "
            f"{HOW_TO_CONVERT})"
        )
    if not name.endswith(".index.json"):
        file = _opened(path / name, opened)
        return dict.fromkeys(file.codes, file)
    return _shards(path / name, opened)


def _shards(index: Path, opened: ExitStack) -> dict[str, WeightFile]:
    table = _read_object(index).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise CorruptError(f"{index}: has no weight_map")
    suffix = Path(index.name.removesuffix(".index.json")).suffix
    files: dict[str, WeightFile] = {}
    for shard in table.values():
        # A plain name, so that an index cannot reach out of its directory.
        if not isinstance(shard, str) or not regex(r"[\w-][\w.-]*").fullmatch(shard):
            raise CorruptError(f"{index}: names the file {one_line(shard)!r}, not one beside it")
        if not shard.endswith(suffix):
            raise CorruptError(f"{index}: names {one_line(shard)!r}, which is no {suffix} file")
        if shard not in files:
            files[shard] = _opened(index.with_name(shard), opened)
    for name, shard in table.items():
        if name not in files[shard].codes:
            raise CorruptError(f"{index}: {one_line(name)!r} is not in {shard}")
    return {name: files[shard] for name, shard in table.items()}


def _opened(path: Path, opened: ExitStack) -> WeightFile:
    safetensors = path.suffix == ".safetensors"
    file: WeightFile = SafetensorsFile(path) if safetensors else TorchFile(path)
    opened.callback(file.__exit__, None, None, None)
    return file


def _read_object(path: Path) -> dict[str, object]:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or one_line(error)}") from None
    if size > JSON_LIMIT:
        raise CorruptError(f"{path}: {size} bytes are too many for a {path.name}")
    return parse_json(read_bytes(path), str(path))


def read_tokenizer(path: Path) -> tuple[Tokenizer | None, list[str]]:
    """The tokenizer of a directory, or None, and what a person should know of it."""
    if (path / TOKENIZER_FILE).is_file():
        return Tokenizer.load(path), []
    pair = path / VOCAB_FILE, path / MERGES_FILE
    if all(file.is_file() for file in pair):
        return Tokenizer.from_vocab_merges(*pair), []
    if (path / "tokenizer.model").is_file():
        return None, ["tokenizer.model cannot be read; save the tokenizer as tokenizer.json"]
    return None, []
