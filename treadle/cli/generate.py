"""`treadle generate`."""

from __future__ import annotations

import sys
from pathlib import Path

import typer


def command(
    source: str = typer.Argument(..., metavar="RUN|CHECKPOINT|model.safetensors"),
    prompt: str = typer.Option("", help="The text to go on from."),
    tokens: int = typer.Option(200, min=0, help="How many tokens to write at most."),
    temperature: float = typer.Option(0.8, help="0 always takes the most likely token."),
    top_k: int = typer.Option(0, help="Draw among the k most likely tokens; 0 is off."),
    top_p: float = typer.Option(1.0, help="Draw among the likeliest that make up p; 1 is off."),
    seed: int = typer.Option(0, min=0, help="The same seed writes the same text."),
    device: str = typer.Option("auto", help="Where to compute."),
    threads: int | None = typer.Option(None, min=1, help="CPU threads.", show_default=False),
    tokenizer: Path | None = typer.Option(
        None, help="A tokenizer.json or its directory, for a checkpoint without one."
    ),
    vocab: Path | None = typer.Option(None, help="vocab.json of a BPE tokenizer."),
    merges: Path | None = typer.Option(None, help="merges.txt of a BPE tokenizer."),
) -> None:
    """Write text with a trained model: a run's best checkpoint, a checkpoint, or one file."""
    from treadle.api import load
    from treadle.generate import Sampling
    from treadle.train.report import is_terminal, printable

    prompt = prompt.replace("\r\n", "\n").replace("\r", "\n")  # as in the texts of a corpus
    sampling = Sampling(temperature, top_k, top_p, seed)
    model = load(source, device=device, threads=threads, tokenizer=tokenizer, vocab=vocab,
                 merges=merges)  # fmt: skip
    out = sys.stdout
    shown = printable if is_terminal(out) else str  # no text may steer the terminal
    for note in model.notes:
        print(f"treadle: {note}", file=sys.stderr)
    notices: list[str] = []
    pieces = model.stream(prompt, tokens, sampling, notice=notices.append)
    out.write(shown(prompt))
    out.flush()
    for piece in pieces:
        out.write(shown(piece))
        out.flush()
    out.write("\n")
    out.flush()
    for notice in notices:  # not before, because it would stand in the middle of the text
        print(f"treadle: {notice}", file=sys.stderr)
