"""`treadle import`."""

from __future__ import annotations

from pathlib import Path

import typer

from treadle.cli.info import model_rows
from treadle.cli.tables import table


def command(
    source: str = typer.Argument(
        ...,
        metavar="SOURCE",
        help="A Hugging Face directory, a name on their hub (gpt2, org/model), a run, a checkpoint "
        "or a model.safetensors.",
        show_default=False,
    ),
    out: Path = typer.Option(..., help="The checkpoint directory to write.", show_default=False),
    tokenizer: Path | None = typer.Option(
        None, help="A tokenizer.json or its directory, where SOURCE has none.", show_default=False
    ),
    vocab: Path | None = typer.Option(
        None, help="vocab.json of a BPE tokenizer, with --merges.", show_default=False
    ),
    merges: Path | None = typer.Option(
        None, help="merges.txt of a BPE tokenizer, with --vocab.", show_default=False
    ),
) -> None:
    """Make a checkpoint of a model from elsewhere.

    What it writes can be generated with, evaluated and trained on (treadle train --init-from), and
    is a Hugging Face directory itself.
    """
    from treadle.interop.hub import named
    from treadle.train.source import given_tokenizer, new_place, open_source, save_model

    new_place(out)
    source = named(source)
    found = open_source(source)
    words = found.tokenizer or given_tokenizer(tokenizer, vocab, merges)
    save_model(out, found.model, found.weights, words)
    rows = [("wrote", str(out)), *model_rows(found.model, words)]
    print(table(rows + [("note", note) for note in found.notes], left=2))
