"""Several ranks beside one, as processes that mpirun starts."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from runs import (
    BUSY,
    ROOT,
    TIMEOUT,
    assert_same_run,
    metrics,
    steps_of,
    succeed,
    wait_for,
    write_text,
)
from treadle.errors import BackendError, RankError
from treadle.train.ranks import Ranks, launched

MPIRUN = Path(sys.executable).parent / "mpirun"
needs_mpi = pytest.mark.skipif(not MPIRUN.exists(), reason="needs the extra distributed")
on_linux = pytest.mark.skipif(
    not MPIRUN.exists() or not Path("/proc/self/environ").exists(),
    reason="needs the extra distributed and Linux",
)
FLAGS = (*BUSY, "--batch-size", "8")


def mpirun(ranks: int, *args: object) -> subprocess.CompletedProcess[str]:
    command = [MPIRUN, "-n", ranks, sys.executable, "-m", "treadle", "train", *args]
    return subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


@needs_mpi
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_agree_with_one_and_repeat_to_the_bit(tmp_path: Path, ranks: int) -> None:
    text = write_text(tmp_path / "text.txt")
    runs = [tmp_path / name for name in ("one", "first", "again")]
    succeed("train", "--data", text, *FLAGS, "--steps", 100, "--out", runs[0])
    for run in runs[1:]:
        done = mpirun(ranks, "--data", text, *FLAGS, "--steps", 100, "--out", run)
        assert done.returncode == 0, done.stderr
    one, several = ([line["loss"] for line in metrics(run)] for run in runs[:2])
    np.testing.assert_allclose(several, one, rtol=1e-5)
    assert_same_run(runs[1], runs[2], 100)


@needs_mpi
def test_a_run_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    text = write_text(tmp_path / "text.txt")
    whole, run = tmp_path / "whole", tmp_path / "run"
    succeed("train", "--data", text, *FLAGS, "--steps", 30, "--out", whole)
    for ranks in (2, 1, 4):
        args = ("--data", text, *FLAGS, "--steps", 30, "--run-steps", 10, "--out", run)
        done = mpirun(ranks, *args)
        assert done.returncode == 0, done.stderr
    one, several = ([line["loss"] for line in metrics(path)] for path in (whole, run))
    assert max(steps_of(run)) == 30
    np.testing.assert_allclose(several, one, rtol=1e-5)


@needs_mpi
def test_an_uneven_batch_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    text, out = write_text(tmp_path / "text.txt"), tmp_path / "run"
    done = mpirun(3, "--data", text, *FLAGS, "--steps", 5, "--out", out)
    lines = [line for line in done.stderr.splitlines() if "treadle: error" in line]
    assert done.returncode == 2 and len(lines) == 1, done.stderr
    assert "the nearest that do are 6" in lines[0]
    assert not out.exists()


# ---------------------------------------------------------------- the end


class Comm:
    """A communicator of two ranks that notes what is done."""

    def __init__(self, rank: int) -> None:
        self.rank, self.done = rank, []  # type: ignore[var-annotated]

    def Get_rank(self) -> int:
        return self.rank

    def Get_size(self) -> int:
        return 2

    def allgather(self, item: str) -> list[str]:
        return [item, "other"]

    def isend(self, message: object, rank: int) -> Comm:
        self.done.append(("send", message))
        return self

    def Test(self) -> bool:
        return True

    def Abort(self, code: int) -> None:
        self.done.append(("abort", code))


@pytest.mark.parametrize(
    ("rank", "in_step", "error", "done"),
    [
        (0, False, None, [("send", None)]),
        (0, False, BackendError("x"), [("send", None)]),
        (0, True, BackendError("x"), [("abort", 2)]),
        (0, False, RankError("x"), [("abort", 2)]),
        (1, False, None, []),
        (1, False, BackendError("x"), [("abort", 2)]),
        (1, False, ValueError("x"), [("abort", 1)]),
    ],
)
def test_how_a_job_ends(
    rank: int, in_step: bool, error: Exception | None, done: list[tuple[str, object]]
) -> None:
    """The others are told to end where they wait for rank 0, and ended where they do not."""
    comm = Comm(rank)
    expected = pytest.raises(type(error)) if error else contextlib.nullcontext()
    with expected, Ranks(SimpleNamespace(COMM_WORLD=comm)) as ranks:
        ranks.in_step = in_step
        if error:
            raise error
    assert comm.done == done


def test_without_mpi4py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(BackendError, match=r"pip install 'treadle\[distributed\]'"):
        launched()


# ---------------------------------------------------------------- a rank that is hit

FOREVER = ("--steps", 1_000_000, "--set", "checkpoint.every=50", "--set", "train.eval_every=0")


def pid_of(rank: int, out: Path) -> int:
    """The process of a rank of the run in `out`."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().split(b"\0")
            variables = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if str(out).encode() in command and f"PMI_RANK={rank}".encode() in variables:
            return int(folder.name)
    raise AssertionError(f"there is no rank {rank}")


def hit(rank: int, number: int, text: Path, out: Path, *flags: object) -> tuple[int, str]:
    """The exit code and stderr of two ranks, one of which gets a signal after a checkpoint."""
    args = ("--data", text, *FLAGS, *FOREVER, *flags, "--out", out)
    command = [MPIRUN, "-n", 2, sys.executable, "-m", "treadle", "train", *args]
    with subprocess.Popen(
        [str(part) for part in command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    ) as job:
        try:
            wait_for(out, 50)
            os.kill(pid_of(rank, out), number)
            return (job.communicate(timeout=TIMEOUT)[1], job.returncode)[::-1]
        finally:
            job.kill()


def goes_on(text: Path, out: Path) -> None:
    """The run's last checkpoint is whole, and another number of ranks goes on from it."""
    last = max(steps_of(out))
    succeed("train", "--data", text, *FLAGS, *FOREVER, "--run-steps", 3, "--out", out)
    assert max(steps_of(out)) == last + 3


@on_linux
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_ends_the_job(tmp_path: Path, rank: int) -> None:
    text, out = write_text(tmp_path / "text.txt"), tmp_path / "run"
    code, _ = hit(rank, signal.SIGKILL, text, out)
    assert code != 0
    goes_on(text, out)


@on_linux
@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_rank_is_one_to_all(tmp_path: Path, rank: int) -> None:
    text, out = write_text(tmp_path / "text.txt"), tmp_path / "run"
    code, told = hit(rank, signal.SIGTERM, text, out)
    assert code == 0, told
    assert max(steps_of(out)) == metrics(out)[-1]["step"]
    goes_on(text, out)


@on_linux
def test_a_rank_that_is_stuck_is_named(tmp_path: Path) -> None:
    text, out = write_text(tmp_path / "text.txt"), tmp_path / "run"
    code, told = hit(1, signal.SIGSTOP, text, out, "--set", "train.rank_timeout=2")
    assert code == 2 and "nothing came from rank 1 on" in told, told
    goes_on(text, out)


@needs_mpi
def test_bf16_and_tied_weights(tmp_path: Path) -> None:
    text = write_text(tmp_path / "text.txt")
    flags = (*FLAGS, "--precision", "bf16", "--steps", 30)
    losses = []
    for ranks in (1, 2):
        done = mpirun(ranks, "--data", text, *flags, "--out", tmp_path / str(ranks))
        assert done.returncode == 0, done.stderr
        losses.append([line["loss"] for line in metrics(tmp_path / str(ranks))])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-2)
