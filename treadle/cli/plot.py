"""`treadle plot`."""

from __future__ import annotations

from pathlib import Path

import typer


def command(
    runs: list[Path] = typer.Argument(..., metavar="RUN...", help="Run directories."),
    output: Path = typer.Option(
        Path("loss.png"), "-o", "--output", help="The picture: .png, .svg or .pdf."
    ),
    x: str = typer.Option(
        "step", metavar="step|tokens|minutes", help="What the losses are drawn against."
    ),
) -> None:
    """Draw training and validation losses of one or more runs as one picture.

    Training losses are running means. Tokens and minutes compare runs of other batch sizes or
    speeds; they count the optimizer steps alone.
    """
    from treadle.train.plot import plot

    plot(runs, output, x)
    print(f"wrote {output}")
