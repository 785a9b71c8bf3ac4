"""`treadle report`."""

from __future__ import annotations

from pathlib import Path

import typer


def command(
    run: Path = typer.Argument(..., metavar="RUN", help="A run directory."),
    output: Path | None = typer.Option(
        None, "-o", "--output", help="The page; RUN/report.html by default.", show_default=False
    ),
) -> None:
    """Write one HTML page about a run: curves, samples, checkpoints, settings, environment.

    The page needs no other file and no network. A run that still goes on can be reported too.
    """
    from treadle.errors import ConfigError
    from treadle.files import write_atomic
    from treadle.train.htmlreport import page

    target = output or run / "report.html"
    text = page(run)
    try:
        write_atomic(target, text.encode())
    except OSError as error:
        raise ConfigError(f"{target}: cannot write: {error.strerror}") from None
    print(f"wrote {target}")
