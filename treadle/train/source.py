"""The model that a person names: a run, a checkpoint, a file, or a directory from elsewhere."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from treadle import models
from treadle.config import (
    FINE_TUNING_LR,
    HUB_PREFIX,
    MODEL_TOKENIZER,
    Config,
    ModelConfig,
    to_dict,
    with_values,
)
from treadle.data.corpus import is_tokenised
from treadle.data.tokenizer import TOKENIZER_FILE, Tokenizer
from treadle.errors import ConfigError
from treadle.interop.base import Imported
from treadle.interop.formats import READERS
from treadle.interop.hf import is_hf, read_hf
from treadle.interop.hub import download
from treadle.models.base import Model
from treadle.train.checkpoint import STATE_NAME, Checkpoint, load_checkpoint, save_checkpoint
from treadle.train.registry import find_checkpoint

OWN_KEYS = ("dropout",)  # of the section model: a matter of training, not of the weights


def open_source(source: str | os.PathLike[str]) -> Imported:
    """The model of a run (its best checkpoint), a checkpoint, a model.safetensors, a Hugging Face
    directory, `hf:NAME`, or a file of another program.

    CheckpointError, CorruptError or TokenizerError in one line.
    """
    name = os.fspath(source)
    if name.startswith(HUB_PREFIX):
        return read_hf(download(name.removeprefix(HUB_PREFIX)))
    for belongs, read in READERS.values():
        if belongs(Path(source)):
            return read(Path(source))
    path, note = find_checkpoint(source, "best")
    if is_hf(path) and not (path / STATE_NAME).is_file():
        return read_hf(path)
    checkpoint = load_checkpoint(path, with_optimizer=False)
    model = models.from_hf_config(checkpoint.config)
    models.check_layers(model, len(checkpoint.tensors))
    weights = model.from_hf(checkpoint.tensors)
    return Imported(model, weights, tokenizer_of(checkpoint), [note] if note else [])


def tokenizer_of(checkpoint: Checkpoint) -> Tokenizer | None:
    """The tokenizer that a checkpoint carries."""
    if (checkpoint.path / TOKENIZER_FILE).is_file():
        return Tokenizer.load(checkpoint.path)
    if checkpoint.tokenizer_json is not None:
        return Tokenizer.load(checkpoint.tokenizer_json.encode())
    return None


def given_tokenizer(
    tokenizer: str | os.PathLike[str] | None,
    vocab: str | os.PathLike[str] | None,
    merges: str | os.PathLike[str] | None,
) -> Tokenizer | None:
    """The tokenizer of the files that a person gave, or None."""
    if tokenizer is not None:
        return Tokenizer.load(tokenizer)
    if vocab is not None and merges is not None:
        return Tokenizer.from_vocab_merges(vocab, merges)
    return None


def new_place(path: Path) -> None:
    """ConfigError where something is there already: nothing is overwritten."""
    if path.exists():
        raise ConfigError(f"{path} is there already; choose another --out, or delete it first")


def adopt(config: Config, source: Imported) -> Config:
    """The configuration of a run that starts from a model: its sizes, and its tokenizer where the
    data are text and no other was given.

    ConfigError where a size that was given is not the model's.
    """
    sizes = _sizes(source.model)
    given = config.model.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    for key, value in given.items():
        if key in sizes and value != sizes[key]:
            hint = "; for shorter windows set train.window" if key == "block_size" else ""
            raise ConfigError(
                f"model.{key}: {value} is given, but the weights of {config.train.init_from} have "
                f"{sizes[key]}; drop it{hint}"
            )
    values = {f"model.{key}": value for key, value in sizes.items()}
    data, path = config.data, config.data.path
    if data.tokenizer == "auto" and data.vocab_path is None:
        if source.tokenizer is not None:
            values["data.tokenizer"] = MODEL_TOKENIZER
        elif path is not None and not is_tokenised(path):
            raise ConfigError(
                f"data.tokenizer: the weights of {config.train.init_from} have no tokenizer with "
                "them; name the file of theirs with --tokenizer"
            )
    if config.optimizer.lr is None:
        values["optimizer.lr"] = FINE_TUNING_LR
    return with_values(config, values)


def _sizes(model: Model) -> dict[str, object]:
    """The keys of the section model that a model decides."""
    sizes = {"architecture": model.architecture, **dataclasses.asdict(model)}  # type: ignore[call-overload]
    return {k: v for k, v in sizes.items() if k in ModelConfig.model_fields and k not in OWN_KEYS}


def adopted_model(config: Config, model: Model) -> Model:
    """The model with what the configuration decides of it."""
    own = {key: to_dict(config)["model"][key] for key in OWN_KEYS if hasattr(model, key)}
    return dataclasses.replace(model, **own)  # type: ignore[type-var]


def save_model(
    directory: str | os.PathLike[str],
    model: Model,
    weights: Mapping[str, np.ndarray],
    tokenizer: Tokenizer | None,
    optimizer: Mapping[str, np.ndarray] | None = None,
    state: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint directory, which Hugging Face's tools load as it is; see save_checkpoint.

    Without optimizer and state it is a model alone, which can start a run and not resume one.
    """
    save_checkpoint(
        directory,
        config=model.hf_config(tokenizer.eos_id if tokenizer else None),
        tensors=model.to_hf(weights),
        optimizer=optimizer,
        tokenizer_json=tokenizer.to_json() if tokenizer else None,
        tokenizer_config=tokenizer.hf_config(model.block_size) if tokenizer else None,
        state=state or {},
    )
