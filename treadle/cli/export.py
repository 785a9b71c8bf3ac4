"""`treadle export`."""

from __future__ import annotations

from pathlib import Path

import typer

from treadle.interop.base import Imported
from treadle.interop.formats import WRITERS, Writer

HF = "hf"
FORMATS = (HF, *WRITERS)


def command(
    source: str = typer.Argument(..., metavar="RUN|CHECKPOINT|model.safetensors"),
    to: str = typer.Option(
        ..., metavar="|".join(FORMATS), help="The format to write.", show_default=False
    ),
    out: Path = typer.Option(..., help="The directory or file to write.", show_default=False),
    dtype: str | None = typer.Option(
        None, help="Dtype of the weights; by default the format's usual one.", show_default=False
    ),
) -> None:
    """Write a model for other programs: a run's best checkpoint, a checkpoint, or one file."""
    from treadle.errors import ConfigError
    from treadle.interop.hub import named
    from treadle.train.source import new_place, open_source, save_model

    def write_hf(path: Path, found: Imported, dtype: str) -> list[str]:
        save_model(path, found.model, found.weights, found.tokenizer)
        return []

    if to not in FORMATS:
        raise ConfigError(f"--to: got {to}; one of {', '.join(FORMATS)}")
    writer = Writer(("fp32",), write_hf) if to == HF else WRITERS[to]
    dtype = dtype or writer.dtypes[0]
    if dtype not in writer.dtypes:
        raise ConfigError(f"--dtype: got {dtype}; {to} takes {', '.join(writer.dtypes)}")
    new_place(out)
    found = open_source(named(source))
    notes = found.notes + writer.write(out, found, dtype)
    print(f"wrote {out}: {to}, {dtype}")
    for note in notes:
        print(f"note: {note}")
