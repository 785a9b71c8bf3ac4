"""`treadle tokenize`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from treadle.data.tokenizer import Tokenizer


def command(
    source: str = typer.Argument(
        ...,
        metavar="TOKENIZER|RUN|CHECKPOINT",
        help="A tokenizer.json or a directory with one, a run, a checkpoint, a model.safetensors, "
        "or spanish.",
        show_default=False,
    ),
    text: str | None = typer.Argument(
        None,
        metavar="TEXT",
        help="The text; read from standard input by default.",
        show_default=False,
    ),
    file: Path | None = typer.Option(None, help="Read the text from a file.", show_default=False),
    as_json: bool = typer.Option(False, "--json", help="Print a JSON object for each token."),
    plain: bool = typer.Option(
        False, "--plain", help="Take special tokens in the text for text like any other."
    ),
) -> None:
    """Show how a text is split: the id, the piece of text and the bytes of each token."""
    from treadle.cli.tables import table
    from treadle.data.corpus import decode_text
    from treadle.errors import ConfigError, DataError

    tokenizer = find_tokenizer(source)
    if text is not None and file is not None:
        raise ConfigError("a text and --file are given; drop one")
    if text is None:
        try:
            data = file.read_bytes() if file is not None else sys.stdin.buffer.read()
        except OSError as error:
            raise DataError(f"{file}: cannot read: {error.strerror}") from None
        text = decode_text(data, str(file or "standard input"))
    ids = tokenizer.encode(text, plain).tolist()
    pieces = [tokenizer.token_bytes(number) for number in ids]
    if as_json:
        for number, piece in zip(ids, pieces, strict=True):
            shown = piece.decode("utf-8", "replace")
            print(json.dumps({"id": number, "text": shown, "bytes": piece.hex()}))
        return
    rows = [
        [number, json.dumps(piece.decode("utf-8", "replace"), ensure_ascii=False), piece.hex(" ")]
        for number, piece in zip(ids, pieces, strict=True)
    ]
    if rows:
        print(table(rows, ["id", "text", "bytes"], left=3))
    size = len(text.encode())
    each = f", {size / len(ids):.2f} bytes a token" if ids else ""
    print(f"{len(ids):,} tokens, {len(text):,} characters, {size:,} bytes{each}")


def find_tokenizer(source: str) -> Tokenizer:
    """The tokenizer of a file, a directory of tokens, a run or a checkpoint.

    Raises:
        TreadleError: there is none.
    """
    from treadle.data.choose import load_tokenizer
    from treadle.data.tokenizer import TOKENIZER_FILE, VOCAB_FILE, Tokenizer
    from treadle.errors import TokenizerError
    from treadle.train.checkpoint import load_checkpoint
    from treadle.train.registry import CHECKPOINTS_DIR, find_checkpoint

    path = Path(source)
    own = any((path / name).exists() for name in (TOKENIZER_FILE, VOCAB_FILE))
    is_model = path.suffix == ".safetensors" or (path.is_dir() and not own)
    if not is_model and not (path / CHECKPOINTS_DIR).is_dir():
        return load_tokenizer(source, {}, lambda name, done, total: None)
    found, _ = find_checkpoint(source, "best")
    inside = load_checkpoint(found, with_optimizer=False).tokenizer_json
    if inside is None:
        raise TokenizerError(f"{found}: the checkpoint has no tokenizer")
    return Tokenizer.load(inside.encode())
