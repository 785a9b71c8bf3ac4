"""`treadle prepare`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from treadle.data.pipeline import Report


def command(
    inputs: list[str] = typer.Argument(
        ...,
        metavar="INPUT...",
        help="Files, directories, globs, - for standard input, or names of known data sets "
        "(tinyshakespeare, tinystories, quijote).",
        show_default=False,
    ),
    out: Path = typer.Option(..., metavar="DIR", help="Where the tokens go.", show_default=False),
    tokenizer: str = typer.Option(
        "auto",
        help="char, byte, bpe, gpt2, gpt2-files, spanish, or the path of a tokenizer.json or its "
        "directory; auto follows the size of the corpus.",
    ),
    vocab_size: int | None = typer.Option(
        None,
        min=1,
        help="Entries of a BPE to train; follows the corpus by default.",
        show_default=False,
    ),
    vocab: Path | None = typer.Option(None, help="vocab.json for gpt2-files.", show_default=False),
    merges: Path | None = typer.Option(None, help="merges.txt for gpt2-files.", show_default=False),
    train_tokenizer: Path | None = typer.Option(
        None,
        metavar="FILE|DIR",
        help="Train the tokenizer on these texts, not on the inputs.",
        show_default=False,
    ),
    tokenizer_dir: Path | None = typer.Option(
        None,
        metavar="DIR",
        help="Keep the tokenizer and its corpus.txt here, and use it again.",
        show_default=False,
    ),
    special_token: list[str] = typer.Option(
        [], metavar="TEXT", help="Add a special token; may be repeated.", show_default=False
    ),
    sample: int = typer.Option(
        64, min=1, metavar="MIB", help="Most text that a tokenizer is trained on, in MiB."
    ),
    vocab_merges: bool = typer.Option(
        False, "--vocab-merges", help="Write vocab.json and merges.txt too."
    ),
    val_fraction: float = typer.Option(
        0.1, help="Part of the documents for validation; 0 turns it off."
    ),
    recipe: str | None = typer.Option(
        None,
        help="Rebuild a data set as llm.c does: tinyshakespeare, tinystories; or none.",
        show_default=False,
    ),
    format: str = typer.Option(
        "auto", help="What the inputs hold: text, jsonl or parquet; auto goes by their names."
    ),
    text_key: str = typer.Option("text", help="Field or column of the text in jsonl and parquet."),
    encoding: str = typer.Option("auto", help="Encoding of the texts; auto finds out."),
    clean: bool = typer.Option(
        True, help="Bring Unicode, white space and line ends into one form."
    ),
    fix_encoding: bool = typer.Option(
        False, "--fix-encoding", help="Repair text that was decoded in the wrong encoding."
    ),
    dedupe: bool = typer.Option(True, help="Keep only the first of equal documents."),
    near_duplicates: float = typer.Option(
        0.0, help="Drop documents at least this similar to an earlier one; 0 is off, 0.8 is usual."
    ),
    min_chars: int = typer.Option(20, min=0, help="Fewest characters of a document; 0 is off."),
    max_chars: int = typer.Option(0, min=0, help="Most characters of a document; 0 is off."),
    min_letters: float = typer.Option(
        0.25, help="Least fraction of letters, white space aside; 0 is off."
    ),
    max_repetition: float = typer.Option(
        0.9, help="Largest fraction of a document that repeats; 0 is off."
    ),
    bin_format: str = typer.Option(
        "llmc", help="Form of the token files: llmc with a header, int32-raw without."
    ),
    threads: int | None = typer.Option(
        None, min=1, help="Processes at work; all processors by default.", show_default=False
    ),
    url: list[str] = typer.Option(
        [],
        metavar="NAME=URL",
        help="Download a known data set from elsewhere; may be repeated.",
        show_default=False,
    ),
) -> None:
    """Turn texts into tokens to train on: train.bin, val.bin, and the tokenizer."""
    from treadle.data.choose import TokenizerOptions
    from treadle.data.clean import Filters
    from treadle.data.datasets import read_urls
    from treadle.data.pipeline import Options, prepare

    options = Options(
        tokenizer=TokenizerOptions(
            name=tokenizer,
            vocab_size=vocab_size,
            vocab=vocab,
            merges=merges,
            train_on=train_tokenizer,
            directory=tokenizer_dir,
            specials=tuple(special_token),
            sample_bytes=sample << 20,
        ),
        filters=Filters(min_chars, max_chars, min_letters, max_repetition),
        recipe=recipe,
        format=format,
        text_key=text_key,
        encoding=encoding,
        val_fraction=val_fraction,
        dedupe=dedupe,
        near_duplicates=near_duplicates,
        clean=clean,
        fix_encoding=fix_encoding,
        bin_format=bin_format,
        vocab_merges=vocab_merges,
    )
    with _progress() as progress:
        report = prepare(inputs, out, options, threads, read_urls(url), progress)
    print(describe(report))


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar for each pass, on a terminal alone."""
    from treadle.train.report import is_terminal

    if not is_terminal(sys.stderr):
        yield lambda name, done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        DownloadColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(file=sys.stderr, highlight=False)) as bar:
        tasks = {}

        def show(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = bar.add_task(name, total=total)
            bar.update(tasks[name], completed=done, total=total or None)

        yield show


def describe(report: Report) -> str:
    """What happened, in lines for a person."""
    from treadle.cli.tables import counted, table
    from treadle.train.report import printable

    counts = report.counts
    lines = [
        f"read {counted(counts['inputs']['files'], 'file')}, {counts['inputs']['bytes']:,} bytes"
    ]
    if read := counts.get("read"):
        cut = (
            read["pieces"]
            - read["documents"]
            + sum(
                counts["dropped"].get(reason, 0) for reason in ("not text", "not JSON", "no text")
            )
        )
        lines[0] += f": {counted(read['documents'], 'document')}" + (
            f", the long ones cut into {counted(read['pieces'], 'piece')}" if cut else ""
        )
        if counts["dropped"]:
            reasons = (f"{n:,} {reason}" for reason, n in counts["dropped"].items())
            lines.append(f"dropped: {', '.join(reasons)}")
            for reason, examples in report.examples.items():
                for example in examples:
                    text = " ".join(printable(example["text"]).split())
                    lines.append(f"  {reason}: {example['where']}  {text}")
    told = counts["tokenizer"]
    lines.append(f"tokenizer: {told['kind']}, {told['vocab_size']:,} ids")
    if sample := told["trained_on"]:
        lines[-1] += f", trained on {sample['bytes']:,} bytes of {sample['source']}"
    rows = []
    for name in ("train.bin", "val.bin"):
        part = counts[name]
        row = [name, f"{part['tokens']:,}"]
        if read:
            each = part["text_bytes"] / part["tokens"] if part["tokens"] else 0
            row += [f"{part['pieces']:,}", f"{part['text_bytes']:,}", f"{each:.2f}"]
        rows.append(row)
    header = ["", "tokens", "pieces", "bytes of text", "bytes a token"][: len(rows[0])]
    lines.append(table(rows, header))
    lines += [f"note: {note}" for note in report.notes]
    lines.append(f"train on them with: treadle train --data {report.directory}")
    return "\n".join(lines)
