"""`treadle demo`."""

from __future__ import annotations

import secrets
import shlex
import shutil
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from treadle.cli.options import DEVICE

STORIES = 6000
COMMON = {
    "data.tokenizer": "bpe",
    "data.vocab_size": 1400,  # nearly every word is one token, so that none is misspelt
    "data.val_fraction": 0.05,
    "model.n_layer": 2,
    "train.batch_size": 8,
    "train.eval_every": 100,
    "train.eval_batches": 10,
    "train.sample_every": 0,
    "optimizer.weight_decay": 0.0,
    "checkpoint.every": 400,
}
# What learns the stories in about a minute on two cores: with the C kernels, and with NumPy alone.
# A story is about 160 tokens; narrow heads let the larger model tell its characters apart sooner.
FULL: dict[str, Any] = {
    "model.n_head": 8,
    "model.n_embd": 128,
    "model.block_size": 160,
    "train.steps": 3000,
    "optimizer.lr": 4e-3,
}
SMALL: dict[str, Any] = {
    "model.n_head": 2,
    "model.n_embd": 64,
    "model.block_size": 96,
    "train.steps": 600,
    "optimizer.lr": 6e-3,
}
COMPILERS = (
    "the C kernels are not built, so a smaller model is trained; for the whole demo install a "
    "compiler (Debian, Ubuntu: apt install gcc; Fedora: dnf install gcc; macOS: xcode-select "
    "--install; Windows: winget install LLVM.LLVM) and then Treadle again"
)

SHOWN, TRIES = 3, 12  # new stories, and how many are written to find them
STORY_TOKENS = 300
TEMPERATURE = 0.6


def command(
    language: str = typer.Option("en", metavar="en|es", help="English or Spanish stories."),
    seed: int | None = typer.Option(
        None,
        min=0,
        help="Seed of the training and of the new stories; where the run is finished already, "
        "each time another one unless it is given.",
        show_default=False,
    ),
    threads: int | None = typer.Option(None, min=1, help="CPU threads.", show_default=False),
    device: str = DEVICE,
    out: Path | None = typer.Option(
        None, help="Run directory; runs/demo-<language> by default.", show_default=False
    ),
) -> None:
    """Train on the built-in stories for about a minute, and write new ones.

    Where the run is finished already, new stories are written from it.
    """
    from treadle import backends
    from treadle.config import Config, with_values
    from treadle.train.report import Report
    from treadle.train.run import Request, train

    run = out or Path("runs", f"demo-{language}")
    text = _write_corpus(run, language)
    kernels = backends.select(device, threads)[0].name != "numpy"
    report = Report(0)
    if _finished(run):
        seed = secrets.randbelow(10**6) if seed is None else seed
        report.say(f"{run} is a finished demo: new stories from it (--out trains another)")
    else:
        if not kernels and device == "auto":
            report.say(COMPILERS)
        values = COMMON | (FULL if kernels else SMALL) | {"data.path": str(text)}
        seed = Config().train.seed if seed is None else seed
        values |= {"train.seed": seed, "train.device": device, "train.threads": threads}
        outcome = train(Request(with_values(Config(), values), run))
        if not outcome.finished:
            return
    _show(run, text, report, seed, device, threads)


def _write_corpus(run: Path, language: str) -> Path:
    """The stories as stories.txt of the run, each ended by the end-of-text token and a line end."""
    from treadle.data.stories import generate_stories
    from treadle.data.tokenizer import END_OF_TEXT
    from treadle.errors import ConfigError
    from treadle.files import write_atomic

    stories = generate_stories(language, STORIES).strip().split("\n\n")
    content = "".join(f"{story}{END_OF_TEXT}\n" for story in stories).encode()
    path = run / "stories.txt"
    try:
        if path.exists() and path.read_bytes() != content:
            raise ConfigError(f"{path} holds other stories than this demo's; choose another --out")
        run.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            write_atomic(path, content)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; choose another --out") from None
    return path


def _finished(run: Path) -> bool:
    """Whether the newest checkpoint of a run is its last."""
    from treadle.train.checkpoint import read_state
    from treadle.train.registry import Registry

    newest = Registry(run).latest()
    if newest is None:
        return False
    state = read_state(newest.path)["state"]
    return state["step"] >= state["config"]["train"]["steps"] and not state["line"]


def _show(run: Path, text: Path, report: Any, seed: int, device: str, threads: int | None) -> None:
    """The stories, the loss curve, the checkpoint, and how to go on."""
    from treadle.train.metrics import read_metrics
    from treadle.train.registry import find_checkpoint
    from treadle.train.report import command_name

    report.say("\nNew stories, none of which is in the training text:")
    for story in _new_stories(run, text.read_text(encoding="utf-8"), seed, device, threads):
        width = min(shutil.get_terminal_size((88, 24)).columns, 100)
        report.say("\n" + textwrap.fill(story, width))
    report.say()
    report.curve(read_metrics(run))
    report.say(f"\ncheckpoint: {find_checkpoint(run, 'best')[0]}")
    flags = f"--tokens {STORY_TOKENS} --temperature {TEMPERATURE} --seed {seed + TRIES}"
    report.say(f"more stories: {command_name()} generate {shlex.quote(str(run))} {flags}")


def _new_stories(
    run: Path, known: str, seed: int, device: str, threads: int | None
) -> Iterator[str]:
    """SHOWN stories that the model writes and the corpus does not hold, or as many as it finds."""
    from treadle.api import load

    model, found = load(run, device=device, threads=threads), 0
    for number in range(TRIES):
        story = model.generate(
            tokens=STORY_TOKENS, temperature=TEMPERATURE, seed=seed + number
        ).strip()
        if story and story not in known:
            yield story
            found += 1
        if found == SHOWN:
            return
