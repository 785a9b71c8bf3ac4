"""`treadle train`."""

from __future__ import annotations

from pathlib import Path

import typer

from treadle.cli.options import with_flags
from treadle.config import Config, dump_config


@with_flags
def command(
    config: Config,
    name: str,
    out: Path | None = typer.Option(
        None, help="Run directory; runs/<config or data name> by default.", show_default=False
    ),
    resume: str = typer.Option(
        "auto",
        metavar="auto|never|PATH",
        help="Go on from the run directory's newest checkpoint, never, or from a checkpoint.",
    ),
    init_from: str | None = typer.Option(
        None, metavar="CHECKPOINT", help="Start a new run from these weights.", show_default=False
    ),
    run_steps: int | None = typer.Option(
        None, min=1, help="Stop after so many more steps, with a checkpoint.", show_default=False
    ),
    write_config: Path | None = typer.Option(
        None,
        metavar="FILE",
        help="Write the effective configuration and leave.",
        show_default=False,
    ),
) -> None:
    """Train a model on a text file, a directory of texts, or token files.

    A text is enough: what is not given (tokenizer, sizes, steps) follows the corpus size. Running
    the same command again resumes an unfinished run.
    """
    from treadle.train.run import Request, resolve, train

    if write_config is not None:
        dump_config(resolve(config)[0] if config.data.path else config, write_config)
        print(f"wrote {write_config}")
        return
    train(Request(config, out or Path("runs", name), resume, init_from, run_steps))
