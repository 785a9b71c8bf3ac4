"""`treadle train`."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import typer

from treadle.cli.options import with_flags
from treadle.cli.tables import mebibytes, table
from treadle.config import Config, dump_config, with_values


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
    run_steps: int | None = typer.Option(
        None, min=1, help="Stop after so many more steps, with a checkpoint.", show_default=False
    ),
    tensorboard: bool = typer.Option(
        False, "--tensorboard", help="Write TensorBoard event files into the run directory too."
    ),
    list_checkpoints: bool = typer.Option(
        False, "--list-checkpoints", help="List the checkpoints of the run directory and leave."
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
    from treadle.train.ranks import launched
    from treadle.train.run import Request, follow, resolve, train

    run = out or Path("runs", name)
    with launched() as ranks:
        if ranks.rank > 0:
            follow(ranks)
            return
        if list_checkpoints:
            print(checkpoint_table(run))
            return
        if tensorboard:
            config = with_values(config, {"train.tensorboard": True})
        if write_config is not None:
            filled = resolve(config)[0] if config.data.path else config
            dump_config(with_values(filled, _following(config)), write_config)
            print(f"wrote {write_config}")
            return
        train(Request(config, run, resume, run_steps), ranks=ranks)


def _following(config: Config) -> dict[str, Any]:
    """The keys that follow steps and learning rate, as they were given: left null in a file, they
    follow what is changed there or by a flag."""
    schedule = config.schedule
    return {"schedule.warmup_steps": schedule.warmup_steps, "schedule.min_lr": schedule.min_lr}


def checkpoint_table(run: Path) -> str:
    """The checkpoints of a run, every file verified. CheckpointError where there are none."""
    from treadle.errors import CheckpointError
    from treadle.train.registry import Registry

    found = Registry(run).listed()
    if not found:
        raise CheckpointError(f"{run}: no checkpoints; train it first, or name a run with --out")
    now, rows = datetime.now(UTC), []
    for row in found:
        losses = ("-" if x is None else f"{x:.4f}" for x in (row.train_loss, row.val_loss))
        age = "-" if row.time is None else _age((now - row.time).total_seconds())
        marks = ", ".join(name for name in ("best", "latest") if getattr(row, name))
        state = "intact" if row.fault is None else "damaged"
        rows.append((row.step, *losses, mebibytes(row.size), age, state, marks))
    header = ("step", "train loss", "val loss", "size", "age", "state", "")
    faults = [f"step {row.step}: {row.fault}" for row in found if row.fault is not None]
    return "\n".join([table(rows, header, left=0), *faults])


def _age(seconds: float) -> str:
    """`42 s`, `5 min`, `3 h` or `12 d`."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
