"""Small training runs for tests: in this process, and in one that is held at a chosen moment.

    run("train", "--data", text, …)             the command, here: exit code, output, errors
    with held("step", 45, "train", …) as h:     the command in a process of its own, which stops
        h.process.kill()                        before step 45 until `h.release()`

Run as a program, this file is that other process.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT = 60  # seconds; a run that hangs fails its test
HELD = "the run is held"

SMALL = (
    *("--n-layer", "1", "--n-head", "2", "--n-embd", "16", "--block-size", "16"),
    *("--batch-size", "4", "--tokenizer", "char", "--set", "train.sample_every=0"),
    *("--threads", "1"),
)
"""Flags of a model that makes a step in less than a millisecond, if threads need not wait."""

SPIKY = (
    *("--set", "train.spike_window=6", "--set", "train.spike_zscore=0.5"),
    *("--set", "train.on_spike=skip"),
)
"""Spikes are common at this limit, so that a short run has some; their updates are left out."""

BUSY = (
    *SMALL,
    *("--set", "model.dropout=0.1", "--set", "train.grad_accum=2", "--lr", "0.01"),
    *("--set", "train.eval_every=10", "--set", "checkpoint.every=5"),
)
"""Flags of a run in which much happens."""

EVERYTHING = (
    *(*BUSY, *SPIKY, "--tensorboard", "--set", "train.on_nonfinite=skip"),
    *("--set", "train.sample_every=10", "--set", "checkpoint.keep=2"),
    *("--set", "checkpoint.keep_every=15", "--steps", "40"),
)
"""Flags of a run with all that can be switched on."""

RESUMED_FILES = ("model.safetensors", "optimizer.safetensors")
TIMES = ("tokens_per_s", "step_ms")
WORDS = ("the", "cat", "sat", "on", "a", "red", "mat", "and", "his", "old", "dog", "ran", "far")


def write_text(path: Path, words: int = 1200, seed: int = 0) -> Path:
    """A text of random words; the same one for the same arguments."""
    draw = random.Random(seed)
    text = " ".join(draw.choice(WORDS) for _ in range(words))
    path.write_text(text, encoding="utf-8")
    return path


# ---------------------------------------------------------------- runs in this process


@dataclass(frozen=True)
class Result:
    """What a command did."""

    code: int
    out: str
    err: str


def run(*args: object) -> Result:
    """The `treadle` command in this process."""
    from treadle.cli import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(arg) for arg in args])
    return Result(code, out.getvalue(), err.getvalue())


def succeed(*args: object) -> str:
    """The output of a command that must succeed."""
    result = run(*args)
    assert result.code == 0, result.err
    return result.out


def fail(*args: object) -> str:
    """The one line of a command that must fail for a reason that the person can mend."""
    result = run(*args)
    lines = result.err.splitlines()
    assert (result.code, len(lines)) == (2, 1), result
    assert lines[0].startswith("treadle: error: ")
    return lines[0]


# ---------------------------------------------------------------- what a run left


def checkpoint(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step-{step:08d}"


def wait_for(run_dir: Path, step: int) -> Path:
    """The checkpoint of a step, when the process that writes it beside its training is done."""
    limit, path = time.monotonic() + TIMEOUT, checkpoint(run_dir, step)
    while not path.exists():
        assert time.monotonic() < limit, f"no {path}"
        time.sleep(0.01)
    return path


def steps_of(run_dir: Path) -> list[int]:
    """The steps of a run's checkpoints."""
    return sorted(int(path.name[5:]) for path in (run_dir / "checkpoints").glob("step-*"))


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without what depends on the clock."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [{key: value for key, value in line.items() if key not in TIMES} for line in lines]


def snapshot(folder: Path) -> dict[str, bytes]:
    """The bytes of every file under a folder."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def assert_same_run(one: Path, other: Path, step: int) -> None:
    """The checkpoints of a step are the same bytes, and the metrics up to it the same numbers."""
    for name in RESUMED_FILES:
        assert (checkpoint(one, step) / name).read_bytes() == (
            checkpoint(other, step) / name
        ).read_bytes(), name
    left, right = metrics(one), metrics(other)
    assert left[-1]["step"] == step and left == right


# ---------------------------------------------------------------- runs in another process


@dataclass
class Held:
    """A process that waits for `release`."""

    process: subprocess.Popen[str]

    def release(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def finish(self) -> Result:
        out, err = self.process.communicate(timeout=TIMEOUT)
        return Result(self.process.returncode, out, err)


@contextlib.contextmanager
def held(moment: str, number: int, *args: object) -> Iterator[Held]:
    """The command in another process, held at a moment of the run.

    moment: "step" (before the number-th step, from 0), "accumulate" (in that step, before its last
    micro-step) or "evaluate" (in the number-th evaluation, from 1, after its first batch).
    """
    command = [sys.executable, __file__, moment, str(number), *map(str, args)]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if line.strip() == HELD:
                    break
            else:
                raise AssertionError(process.stderr.read() if process.stderr else "")
            yield Held(process)
        finally:
            process.kill()


def _hold() -> None:
    print(HELD, flush=True)
    sys.stdin.readline()


def _hold_at(moment: str, number: int) -> None:
    """Changes the session of this process so that it waits at the moment."""
    from treadle.train.session import Session

    begin, evaluate = Session.begin, Session.evaluate
    evaluations = 0

    def held_begin(self: Session, at: int, *args: Any, **kwargs: Any) -> Any:
        if at != number:
            return begin(self, at, *args, **kwargs)
        if moment == "step":
            _hold()
            return begin(self, at, *args, **kwargs)
        execute = self.executable.run

        def held_execute(*graphs: str) -> None:
            if "update" in graphs:
                _hold()
            execute(*graphs)

        self.executable.run = held_execute  # type: ignore[method-assign]
        result = begin(self, at, *args, **kwargs)
        self.executable.run = execute  # type: ignore[method-assign]
        return result

    def held_evaluate(self: Session, batches: Any) -> float:
        nonlocal evaluations
        evaluations += 1

        def after_the_first() -> Iterator[Any]:
            for i, batch in enumerate(batches):
                if i == 1 and evaluations == number:
                    _hold()
                yield batch

        return evaluate(self, after_the_first())

    if moment == "evaluate":
        Session.evaluate = held_evaluate  # type: ignore[method-assign]
    else:
        Session.begin = held_begin  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    from treadle.cli import main

    _hold_at(sys.argv[1], int(sys.argv[2]))
    sys.exit(main(sys.argv[3:]))
