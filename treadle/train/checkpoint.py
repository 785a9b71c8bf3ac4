"""Checkpoints: directories that are whole or absent, and prove it by digests.

`save_checkpoint` and `load_checkpoint` move plain arrays, dicts and text; they know nothing of
models. The files are those that Hugging Face tools load, and two more for resuming; their exact
content is in `docs/formats.md`. `treadle.train.registry` keeps the checkpoints of a run.
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from treadle.errors import CheckpointError, CorruptError, MismatchError
from treadle.files import (
    FileDigest,
    digest_file,
    json_file,
    json_text,
    one_line,
    parse_json,
    read_bytes,
    sync_directory,
    temporary_sibling,
    write_synced,
)
from treadle.safetensors_io import (
    DTYPES,
    Arrays,
    read_safetensors,
    write_safetensors,
)

CONFIG_NAME = "config.json"
MODEL_NAME = "model.safetensors"
OPTIMIZER_NAME = "optimizer.safetensors"
TOKENIZER_NAME = "tokenizer.json"
TOKENIZER_CONFIG_NAME = "tokenizer_config.json"
STATE_NAME = "trainer_state.json"
DIGESTED_NAMES = (CONFIG_NAME, MODEL_NAME, OPTIMIZER_NAME, TOKENIZER_NAME, TOKENIZER_CONFIG_NAME)

STATE_FORMAT = 1
CONFIG_KEY = "treadle.config"
TOKENIZER_KEY = "treadle.tokenizer"
TOKENIZER_METADATA_LIMIT = 16 << 20  # bytes of UTF-8; a longer tokenizer stays in its own file


@dataclass(frozen=True)
class Checkpoint:
    """What `load_checkpoint` read.

    `config` is the content of config.json; `tensors` are the float32 weights by name, `optimizer`
    the optimizer's arrays or None where there are none or they were not asked for; `state` is the
    trainer's own dict or None for files without trainer_state.json.
    """

    path: Path
    config: dict[str, Any]
    tensors: Arrays
    optimizer: Arrays | None
    state: dict[str, Any] | None
    tokenizer_json: str | None
    tokenizer_config: dict[str, Any] | None


# ------------------------------------------------------------------------------------------ save


def save_checkpoint(
    directory: str | os.PathLike[str],
    *,
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    optimizer: Mapping[str, np.ndarray] | None,
    tokenizer_json: str | None,
    tokenizer_config: Mapping[str, Any] | None,
    state: Mapping[str, Any],
    on_file: Callable[[str], None] | None = None,
) -> str:
    """Writes a checkpoint directory, replacing one of the same name, and returns its digest.

    All is written and synced under a hidden temporary name beside `directory` and then renamed,
    so a kill at any instant leaves either nothing or everything under the final name (and beside
    it the one to be replaced, which `Registry` still finds and its `recover` puts back). The
    bytes depend on the arguments alone. `on_file` is called with each file's name when it is on
    the disk.

    `tensors` are float32, `optimizer` arrays of any safetensors dtype, or None for weights
    alone; `state` is a JSON object, which for a run's registry has "step" and may have
    "train_loss" and "val_loss". Raises NonFiniteError naming the first tensor with a NaN or an
    infinity, CheckpointError for another dtype, for what JSON cannot hold, and when the files
    cannot be written; what was under the final name before is then untouched.
    """
    target = Path(directory)
    for name, array in tensors.items():
        if array.dtype != np.float32:
            raise CheckpointError(f"tensor {name!r}: expected float32, got {array.dtype}")
    temporary = temporary_sibling(target, "tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if temporary.exists():
            shutil.rmtree(temporary)
        temporary.mkdir()
        digests = {}
        for name, digest in _write_files(
            temporary, config, tensors, optimizer, tokenizer_json, tokenizer_config
        ):
            digests[name] = digest
            if on_file is not None:
                on_file(name)
        document = _state_document(digests, state)
        write_synced(temporary / STATE_NAME, json_file(document))
        if on_file is not None:
            on_file(STATE_NAME)
        sync_directory(temporary)
        _put_in_place(temporary, target)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError):
            raise CheckpointError(
                f"cannot write {target}: {error.strerror or one_line(error)}; earlier "
                "checkpoints are whole, so make room or set the permissions and resume"
            ) from error
        raise
    return str(document["digest"])


def _write_files(
    directory: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    optimizer: Mapping[str, np.ndarray] | None,
    tokenizer_json: str | None,
    tokenizer_config: Mapping[str, Any] | None,
) -> Iterator[tuple[str, FileDigest]]:
    """Writes all files but trainer_state.json, one for each item."""
    metadata = {"format": "pt", CONFIG_KEY: json_text(dict(config))}
    tokenizer = None if tokenizer_json is None else tokenizer_json.encode()
    if tokenizer is not None and len(tokenizer) <= TOKENIZER_METADATA_LIMIT:
        metadata[TOKENIZER_KEY] = tokenizer.decode()
    yield CONFIG_NAME, write_synced(directory / CONFIG_NAME, json_file(dict(config)))
    if tokenizer is not None:
        yield TOKENIZER_NAME, write_synced(directory / TOKENIZER_NAME, tokenizer)
    if tokenizer_config is not None:
        data = json_file(dict(tokenizer_config))
        yield TOKENIZER_CONFIG_NAME, write_synced(directory / TOKENIZER_CONFIG_NAME, data)
    yield MODEL_NAME, write_safetensors(directory / MODEL_NAME, tensors, metadata)
    if optimizer is not None:
        yield OPTIMIZER_NAME, write_safetensors(directory / OPTIMIZER_NAME, optimizer, {})


def _state_document(digests: Mapping[str, FileDigest], state: Mapping[str, Any]) -> dict[str, Any]:
    document: dict[str, Any] = {
        "format": STATE_FORMAT,
        "files": {name: vars(digest) for name, digest in digests.items()},
        "state": dict(state),
    }
    return document | {"digest": _document_digest(document)}


def _document_digest(document: Mapping[str, Any]) -> str:
    """SHA-256 of the document's canonical JSON, its own "digest" left out."""
    rest = {key: value for key, value in document.items() if key != "digest"}
    return hashlib.sha256(json_text(rest).encode()).hexdigest()


def _put_in_place(temporary: Path, target: Path) -> None:
    """Renames `temporary` to `target`; no system replaces a directory that has files in it."""
    if target.exists():
        aside = temporary_sibling(target, "old")
        os.rename(target, aside)
        try:
            os.rename(temporary, target)
        except BaseException:
            os.rename(aside, target)
            raise
        sync_directory(target.parent)
        discard(aside)
    else:
        os.rename(temporary, target)
        sync_directory(target.parent)


def discard(directory: Path) -> None:
    """Deletes a directory, as far as the system lets us; a kill leaves no half under its name."""
    doomed = temporary_sibling(directory, "del")
    with contextlib.suppress(OSError):
        os.rename(directory, doomed)
        shutil.rmtree(doomed)


# ------------------------------------------------------------------------------------------ load


def load_checkpoint(
    path: str | os.PathLike[str],
    *,
    require_optimizer: bool = False,
    with_optimizer: bool = True,
    verify: bool = True,
) -> Checkpoint:
    """Reads a checkpoint directory, or a single `model.safetensors` with its metadata.

    Digests and sizes are verified where trainer_state.json is there, unless `verify` is off
    (for a checkpoint that `Registry.latest` or `best` has just verified). `require_optimizer`
    makes missing optimizer or trainer state an error; `with_optimizer=False` leaves the
    optimizer's file unread. Raises CorruptError for a damaged file and CheckpointError for a
    missing one, with the file's name and the reason.
    """
    source = Path(path)
    if source.is_file():
        if require_optimizer:
            raise CheckpointError(_no_resume_message(source, "a file of weights alone"))
        return _from_files(source.parent, source, None, load_optimizer=False, single=True)
    if not source.is_dir():
        raise CheckpointError(f"{source}: no such checkpoint directory or model file")
    if not (source / MODEL_NAME).is_file() and not (source / STATE_NAME).is_file():
        raise CheckpointError(
            f"{source}: not a checkpoint ({MODEL_NAME} is missing); give a directory that holds "
            "one, such as RUN/checkpoints/step-00001000"
        )
    load_optimizer = with_optimizer and (source / OPTIMIZER_NAME).is_file()
    if require_optimizer:
        for name in (OPTIMIZER_NAME, STATE_NAME):
            if not (source / name).is_file():
                raise CheckpointError(_no_resume_message(source, f"{name} is missing"))
    document = None
    if (source / STATE_NAME).is_file():
        document = read_state(source)
        if verify:
            _verify_files(source, document, skip=() if load_optimizer else (OPTIMIZER_NAME,))
    return _from_files(
        source, source / MODEL_NAME, document, load_optimizer=load_optimizer, single=False
    )


def _no_resume_message(path: Path, reason: str) -> str:
    return (
        f"{path} has no optimizer state to resume from ({reason}); to start anew from its "
        f"weights use --init-from {path}"
    )


def _from_files(
    directory: Path,
    model: Path,
    document: dict[str, Any] | None,
    *,
    load_optimizer: bool,
    single: bool,
) -> Checkpoint:
    tensors, metadata = read_safetensors(model)
    for name, array in tensors.items():
        if array.dtype != DTYPES["F32"]:
            raise CorruptError(
                f"{model}: tensor {one_line(name)!r} is {array.dtype}; weights are float32"
            )
    names = () if single else DIGESTED_NAMES
    in_directory = {name for name in names if (directory / name).is_file()}
    if CONFIG_NAME in in_directory:
        config = _read_json(directory / CONFIG_NAME)
    elif CONFIG_KEY in metadata:
        config = parse_json(metadata[CONFIG_KEY], f"{model}: metadata {CONFIG_KEY}")
    else:
        raise CheckpointError(
            f"{model}: no {CONFIG_NAME} beside it and no {CONFIG_KEY} in its metadata; give the "
            "checkpoint directory"
        )
    tokenizer_json = metadata.get(TOKENIZER_KEY)
    if TOKENIZER_NAME in in_directory:
        tokenizer_json = _read_text(directory / TOKENIZER_NAME)
    return Checkpoint(
        path=model if single else directory,
        config=config,
        tensors=tensors,
        optimizer=read_safetensors(directory / OPTIMIZER_NAME)[0] if load_optimizer else None,
        state=None if document is None else document["state"],
        tokenizer_json=tokenizer_json,
        tokenizer_config=(
            _read_json(directory / TOKENIZER_CONFIG_NAME)
            if TOKENIZER_CONFIG_NAME in in_directory
            else None
        ),
    )


def _read_json(path: Path) -> dict[str, Any]:
    return parse_json(read_bytes(path), str(path))


def _read_text(path: Path) -> str:
    try:
        return read_bytes(path).decode()
    except UnicodeDecodeError as error:
        raise CorruptError(f"{path}: not UTF-8 ({one_line(error)})") from error


# ---------------------------------------------------------------------------------------- verify


def verify_checkpoint(path: str | os.PathLike[str], *, optimizer: bool = True) -> None:
    """Reads every file of a checkpoint directory against its digest and size.

    `optimizer=False` leaves the optimizer's file out. Raises CorruptError or CheckpointError.
    """
    source = Path(path)
    _verify_files(source, read_state(source), skip=() if optimizer else (OPTIMIZER_NAME,))


def read_state(directory: Path) -> dict[str, Any]:
    """The content of trainer_state.json: "format", "files", "state" and "digest", checked."""
    path = directory / STATE_NAME
    document = _read_json(path)
    found, files = document.get("format"), document.get("files")
    if type(found) is int and found > STATE_FORMAT:
        raise CheckpointError(
            f"{path}: format {found} is newer than {STATE_FORMAT}, which this version reads; "
            "upgrade Treadle"
        )
    try:
        digest = _document_digest(document)
    except CheckpointError:  # values that JSON text can spell but we never write
        digest = ""
    if found != STATE_FORMAT or document.get("digest") != digest:
        raise CorruptError(f"{path}: its content does not match its own digest; it is damaged")
    if not isinstance(document.get("state"), dict) or not isinstance(files, dict):
        raise CorruptError(f"{path}: expected objects under files and state")
    for name, entry in files.items():
        if name not in DIGESTED_NAMES or not isinstance(entry, dict):
            raise CorruptError(f"{path}: unknown file {one_line(name)!r} in its list")
    for name in (CONFIG_NAME, MODEL_NAME):
        if name not in files:
            raise CorruptError(f"{path}: {name} is not in its list of files")
    return document


def check_sizes(directory: Path, document: Mapping[str, Any]) -> None:
    """Compares the sizes of the files with `read_state`'s document, without reading them.

    A missing optimizer file is no fault here: the weights alone still serve for generating.
    """
    for name, entry in document["files"].items():
        if name != OPTIMIZER_NAME or (directory / name).exists():
            _check_size(directory / name, entry.get("size"))


def _check_size(path: Path, size: object) -> None:
    try:
        actual = path.stat().st_size
    except FileNotFoundError:
        raise CorruptError(f"{path}: missing, though {STATE_NAME} lists it") from None
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or one_line(error)}") from error
    if actual != size:
        raise CorruptError(f"{path}: {actual} bytes, but {STATE_NAME} says {size}; it is damaged")


def _verify_files(directory: Path, document: Mapping[str, Any], skip: Collection[str]) -> None:
    for name, entry in sorted(document["files"].items()):
        if name in skip:
            continue
        _check_size(directory / name, entry.get("size"))
        if digest_file(directory / name).sha256 != entry.get("sha256"):
            raise CorruptError(
                f"{directory / name}: its SHA-256 is not the one in {STATE_NAME}; the file is "
                "damaged or of another checkpoint"
            )


# --------------------------------------------------------------------------------------- configs


def _flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            flat |= _flatten(item, f"{prefix}{key}.")
        else:
            flat[prefix + key] = list(item) if isinstance(item, tuple) else item
    return flat


def check_config_match(
    saved: Mapping[str, Any], wanted: Mapping[str, Any], allowed: Collection[str]
) -> None:
    """Raises MismatchError listing every field that differs and is not in `allowed`.

    Configurations are nested dicts, fields dotted keys such as `model.n_head`; `allowed` holds
    keys and patterns with `*`, such as `train.eval_*`.
    """
    old, new = _flatten(saved), _flatten(wanted)
    missing = object()
    differences = [
        f"{key}: saved {_shown(old, key)}, wanted {_shown(new, key)}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key, missing) != new.get(key, missing)
        and not any(fnmatch.fnmatchcase(key, pattern) for pattern in allowed)
    ]
    if differences:
        raise MismatchError(
            f"the checkpoint has another configuration: {'; '.join(differences)}; go back to the "
            "saved values, or start another run with --out"
        )


def _shown(flat: Mapping[str, Any], key: str) -> str:
    return one_line(repr(flat[key])) if key in flat else "absent"
