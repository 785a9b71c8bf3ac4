"""`treadle eval`."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from treadle.cli.options import DEVICE

if TYPE_CHECKING:
    import numpy as np

    from treadle.data.corpus import Dataset
    from treadle.data.tokenizer import Tokenizer

SPLITS = ("val", "train", "all")


def command(
    source: str = typer.Argument(..., metavar="RUN|CHECKPOINT|model.safetensors"),
    data: Path = typer.Option(..., help="A text, a directory of texts, or of token files."),
    split: str = typer.Option(
        "val",
        metavar="|".join(SPLITS),
        help="The validation split as the run had it, the training split, or all tokens.",
    ),
    batch_size: int = typer.Option(8, min=1, help="Windows at a time; the loss is the same."),
    device: str = DEVICE,
    threads: int | None = typer.Option(None, min=1, help="CPU threads.", show_default=False),
    tokenizer: Path | None = typer.Option(
        None, help="A tokenizer.json or its directory, for a checkpoint without one."
    ),
) -> None:
    """Take the loss of a trained model over a whole split, to the last token.

    Each token but the first is predicted once, from what stands before it in its window of the
    model's context; windows follow one another without overlap. Perplexity is e to the loss. Bits
    per byte divide the whole loss by the bytes of the text that was predicted, so that models
    with other tokenizers can be compared; end-of-text tokens count as no bytes.
    """
    from treadle.api import load
    from treadle.cli.tables import table
    from treadle.errors import ConfigError, DataError

    if split not in SPLITS:
        raise ConfigError(f"--split: got {split}; one of {', '.join(SPLITS)}")
    model = load(source, device=device, threads=threads, tokenizer=tokenizer)
    for note in model.notes:
        print(f"treadle: {note}", file=sys.stderr)
    dataset = _open(data, model.tokenizer, _val_fraction(source) if split != "all" else 0.0)
    if dataset.vocab_size > model.model.vocab_size:
        raise DataError(
            f"{data}: has {dataset.vocab_size} token ids, but the model {model.model.vocab_size}; "
            "the tokens were made by another tokenizer"
        )
    parts = {"val": [dataset.val], "train": [dataset.train], "all": [dataset.train, dataset.val]}
    chosen = [tokens for tokens in parts[split] if len(tokens) >= 2]
    if not chosen:
        raise DataError(f"{data}: its {split} split has nothing to predict; try --split all")
    nats, predicted, nbytes = 0.0, 0, 0
    for tokens in chosen:
        windows = -(-(len(tokens) - 1) // model.model.block_size)
        nats += model.loss(tokens, min(batch_size, windows), _watched) * (len(tokens) - 1)
        predicted += len(tokens) - 1
        if model.tokenizer is not None and model.tokenizer.kind != "other":
            nbytes += count_bytes(tokens[1:], model.tokenizer)
    loss = nats / predicted
    rows = [
        ("tokens predicted", f"{predicted:,}"),
        ("bytes of text", f"{nbytes:,}" if nbytes else "not known"),
        ("loss", f"{loss:.4f} nats per token"),
        ("perplexity", f"{math.exp(min(loss, 700.0)):,.3f}"),
        ("bits per byte", f"{nats / math.log(2) / nbytes:.4f}" if nbytes else "not known"),
    ]
    print(table(rows, left=2))


def _val_fraction(source: str) -> float | None:
    """The fraction that the run of a checkpoint held out; None where it does not say."""
    from treadle.errors import CheckpointError
    from treadle.train.checkpoint import STATE_NAME, read_state
    from treadle.train.registry import find_checkpoint

    try:
        path, _ = find_checkpoint(source, "best")
    except CheckpointError:  # a model of another program, which names no split
        return None
    if not (path / STATE_NAME).is_file():
        return None
    return read_state(path)["state"].get("config", {}).get("data", {}).get("val_fraction")


def _open(path: Path, tokenizer: Tokenizer | None, val_fraction: float | None) -> Dataset:
    """The tokens of a text by the checkpoint's tokenizer, or those of token files."""
    from treadle.config import MODEL_TOKENIZER, DataConfig
    from treadle.data.corpus import is_tokenised, prepare_cached
    from treadle.errors import DataError

    values: dict[str, Any] = {} if val_fraction is None else {"val_fraction": val_fraction}
    if is_tokenised(path):
        dataset = prepare_cached(path, DataConfig(**values))
        own = dataset.tokenizer
        if own is not None and tokenizer is not None and own.to_json() != tokenizer.to_json():
            raise DataError(
                f"{path}: its tokens were made by another tokenizer than the checkpoint's; give "
                "the text itself"
            )
        return dataset
    if tokenizer is None:
        raise DataError(f"the checkpoint has no tokenizer to read {path} with; give --tokenizer")
    return prepare_cached(
        path, DataConfig(tokenizer=MODEL_TOKENIZER, **values), model_tokenizer=tokenizer
    )


def count_bytes(tokens: np.ndarray, tokenizer: Tokenizer) -> int:
    """Bytes of UTF-8 of the text that tokens [N] stand for; tokens that only mark the beginning
    or the end of a text count as none."""
    import numpy as np

    from treadle.data.shards import pieces

    counts = np.zeros(tokenizer.vocab_size, np.int64)
    for piece in pieces(tokens):
        counts += np.bincount(piece, minlength=tokenizer.vocab_size)
    marks = (tokenizer.bos_id, tokenizer.eos_id)
    present = (int(i) for i in np.flatnonzero(counts))
    return sum(int(counts[i]) * len(tokenizer.token_bytes(i)) for i in present if i not in marks)


def _watched(batches: Iterable[Any], number: int) -> Iterable[Any]:
    """The batches, with a progress bar where stderr is a terminal."""
    from treadle.train.report import is_terminal

    if not is_terminal(sys.stderr):
        return batches
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    return track(batches, "evaluating", total=number, console=console, transient=True)
