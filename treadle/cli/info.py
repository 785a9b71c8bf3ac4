"""`treadle info`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING
from zipfile import is_zipfile

import typer

from treadle.cli.tables import counted, table
from treadle.errors import CheckpointError, TreadleError
from treadle.files import one_line
from treadle.interop.formats import DESCRIPTIONS

if TYPE_CHECKING:
    from treadle.data.tokenizer import Tokenizer
    from treadle.models.base import Model

Rows = list[tuple[str, str]]


def command(
    path: Path = typer.Argument(
        ...,
        metavar="PATH",
        help="A run, a checkpoint, a Hugging Face directory, tokens, a tokenizer, or a file.",
        show_default=False,
    ),
) -> None:
    """Say what a file or directory is, its shapes and tokenizer, and whether it is intact.

    Every byte of weights is read, against its digest where there is one. The exit code is 1 when
    something is damaged.
    """
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or directory")
    found = describe(path)
    print(table(found.rows, left=2))
    if found.shapes:
        print(f"\n{table(found.shapes, ('tensor', 'shape', 'dtype', 'number'), left=3)}")
    if found.fault is not None:
        raise typer.Exit(1)


@dataclasses.dataclass
class Found:
    """rows: what to say. shapes: rows of the table of tensors. fault: what is wrong, or None."""

    rows: Rows = dataclasses.field(default_factory=list)
    shapes: list[tuple[str, str, str, int]] = dataclasses.field(default_factory=list)
    fault: str | None = None

    def say(self, name: str, value: object) -> None:
        """Add a row."""
        self.rows.append((name, str(value)))


def describe(path: Path) -> Found:
    """What a path is. CheckpointError for something that is none of ours."""
    foreign = {name: (belongs, _rows_of(rows)) for name, (belongs, rows) in DESCRIPTIONS.items()}
    for name, (belongs, tell) in (foreign | KINDS).items():
        if belongs(path):
            found = Found([("kind", name)])
            try:
                tell(path, found)
            except TreadleError as error:
                found.fault = str(error)
                found.say("intact", f"no: {error}")
            else:
                if name in foreign:
                    found.say("intact", "yes, as far as its header tells")
            return found
    raise CheckpointError(f"{path}: not a run, model, tokenizer or token file that Treadle knows")


Tell = Callable[[Path, Found], None]


def _rows_of(rows: Callable[[Path], Rows]) -> Tell:
    return lambda path, found: found.rows.extend(rows(path))


# ---------------------------------------------------------------- runs and models


def _run(path: Path, found: Found) -> None:
    from treadle.train.registry import Registry

    listed = Registry(path).listed()
    found.say("checkpoints", ", ".join(str(row.step) for row in listed) or "none")
    for row in listed:
        if row.fault is not None:
            found.fault = row.fault
            found.say("damaged", f"step {row.step}: {row.fault}")
    for row in listed:
        if row.best:
            found.say("the best", Registry(path).path_for(row.step))
            _model(Registry(path).path_for(row.step), found)


def _model(path: Path, found: Found) -> None:
    """A directory in Hugging Face's layout, ours or another's."""
    from treadle.interop.hf import weight_files
    from treadle.train.checkpoint import STATE_NAME, read_state, verify_checkpoint
    from treadle.train.source import open_source

    with ExitStack() as opened:
        files = weight_files(path, opened)
        found.shapes += _shapes(
            {name: (file.shapes[name], file.codes[name]) for name, file in files.items()}
        )
        names = sorted({file.path.name for file in files.values()})
        found.say("weights", names[0] if len(names) == 1 else f"{len(names)} files, {names[0]} …")
    proof = "every weight is finite and has its place; there are no digests"
    if (path / STATE_NAME).is_file():
        verify_checkpoint(path)
        state = read_state(path)
        proof = f"{counted(len(state['files']), 'file')} with the digests of {STATE_NAME}"
        for key in ("step", "train_loss", "val_loss"):
            if state["state"].get(key) is not None:
                found.say(key, state["state"][key])
    model = open_source(path)
    found.rows += model_rows(model.model, model.tokenizer)
    found.rows += [("note", note) for note in model.notes]
    found.say("intact", f"yes: {proof}")


def model_rows(model: Model, tokenizer: Tokenizer | None) -> Rows:
    """Architecture, parameters, sizes and tokenizer of a model."""
    sizes = {f.name: getattr(model, f.name) for f in dataclasses.fields(model)}  # type: ignore[arg-type]
    return [
        ("architecture", model.architecture),
        ("parameters", f"{model.n_parameters():,}"),
        ("sizes", ", ".join(f"{name} {value}" for name, value in sizes.items())),
        ("tokenizer", tokenizer_text(tokenizer)),
    ]


def tokenizer_text(tokenizer: Tokenizer | None) -> str:
    """The kind, the size and the special tokens of a tokenizer."""
    if tokenizer is None:
        return "none"
    ends = {"begins with": tokenizer.bos_token, "ends with": tokenizer.eos_token}
    marks = "".join(f", {verb} {token}" for verb, token in ends.items() if token is not None)
    return f"{tokenizer.kind}, {tokenizer.vocab_size:,} ids{marks}"


def _shapes(tensors: Mapping[str, tuple[tuple[int, ...], str]]) -> list[tuple[str, str, str, int]]:
    """A row for the tensors that differ in the number of their layer alone."""
    groups: dict[tuple[str, str, str], int] = {}
    for name, (shape, code) in tensors.items():
        key = re.sub(r"\.\d+\.", ".*.", one_line(name)), str(list(shape)), code
        groups[key] = groups.get(key, 0) + 1
    return [(*key, number) for key, number in groups.items()]


# ---------------------------------------------------------------- single files


def _safetensors(path: Path, found: Found) -> None:
    from treadle.safetensors_io import SafetensorsFile
    from treadle.train.checkpoint import CONFIG_KEY
    from treadle.train.source import open_source

    with SafetensorsFile(path) as file:
        found.shapes += _shapes({n: (file.shapes[n], file.codes[n]) for n in file.codes})
        alone = CONFIG_KEY in file.metadata
    if alone:
        model = open_source(path)
        found.rows += model_rows(model.model, model.tokenizer)
    found.say("intact", "yes, as far as its header tells")


def _torch(path: Path, found: Found) -> None:
    from treadle.interop.torch_file import TorchFile

    with TorchFile(path) as file:
        found.shapes += _shapes({n: (file.shapes[n], file.codes[n]) for n in file.codes})
        for name in file.codes:
            file.read(name)
    found.say("intact", "yes: every tensor was read against its checksum")


def _tokens(path: Path, found: Found) -> None:
    """A directory of token files."""
    from treadle.config import DataConfig
    from treadle.data.corpus import load_tokens

    dataset = load_tokens(path, DataConfig())
    found.say("training", f"{len(dataset.train):,} tokens")
    found.say("validation", f"{len(dataset.val):,} tokens")
    found.say("vocabulary", f"{dataset.vocab_size:,} ids")
    found.say("tokenizer", tokenizer_text(dataset.tokenizer))
    found.say("intact", "yes" if dataset.metadata else "yes, as far as can be told without digests")


def _token_file(path: Path, found: Found) -> None:
    from treadle.data.shards import id_range, read_tokens

    tokens = read_tokens(path)
    found.say("tokens", f"{len(tokens):,} of {tokens.dtype}")
    if len(tokens):
        found.say("ids", "{:,} to {:,}".format(*id_range(tokens)))
    found.say("intact", "yes: its size is what its header says")


def _tokenizer(path: Path, found: Found) -> None:
    from treadle.data.tokenizer import Tokenizer

    found.say("tokenizer", tokenizer_text(Tokenizer.load(path)))
    found.say("intact", "yes")


def _is_model(path: Path) -> bool:
    from treadle.interop.hf import WEIGHT_FILES

    return any((path / name).is_file() for name in WEIGHT_FILES)


# Kind: whether a path is of it, and what tells of it. The first that fits counts.
KINDS: dict[str, tuple[Callable[[Path], bool], Tell]] = {
    "run": (lambda path: (path / "checkpoints").is_dir(), _run),
    "checkpoint": (lambda path: (path / "trainer_state.json").is_file(), _model),
    "Hugging Face directory": (_is_model, _model),
    "tokens": (lambda path: (path / "train.bin").is_file(), _tokens),
    "tokenizer": (
        lambda path: (path / "tokenizer.json").is_file() or path.name.endswith("tokenizer.json"),
        _tokenizer,
    ),
    "safetensors file": (lambda path: path.suffix == ".safetensors", _safetensors),
    "PyTorch file": (lambda path: path.is_file() and is_zipfile(path), _torch),
    "token file": (lambda path: path.suffix == ".bin", _token_file),
}
