"""`samples.txt`: the texts that a run wrote, each under a line with its step."""

from __future__ import annotations

import re
from pathlib import Path

from treadle.files import write_atomic

SAMPLES_NAME = "samples.txt"
_HEAD = re.compile(r"(?m)^--- step (\d+)\n")


def append_sample(run_dir: Path, step: int, text: str) -> None:
    """Add the text of a step."""
    with (run_dir / SAMPLES_NAME).open("a", encoding="utf-8", newline="\n") as file:
        file.write(f"--- step {step}\n{text}\n")


def read_samples(run_dir: Path) -> list[tuple[int, str]]:
    """(step, text) of each sample of a run, oldest first; none where there is no file."""
    path = run_dir / SAMPLES_NAME
    if not path.exists():
        return []
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        parts = _HEAD.split(file.read())
    return [
        (int(step), text.removesuffix("\n"))
        for step, text in zip(parts[1::2], parts[2::2], strict=True)
    ]


def cut_samples(run_dir: Path, last_step: int) -> None:
    """Drop the samples of later steps."""
    samples = read_samples(run_dir)
    kept = [(step, text) for step, text in samples if step <= last_step]
    if len(kept) < len(samples):
        content = "".join(f"--- step {step}\n{text}\n" for step, text in kept)
        write_atomic(run_dir / SAMPLES_NAME, content.encode())
