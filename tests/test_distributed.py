"""Several ranks beside one, as processes that mpirun starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.runs import BUSY, ROOT, TIMEOUT, assert_same_run, metrics, steps_of, succeed, write_text

MPIRUN = Path(sys.executable).parent / "mpirun"
needs_mpi = pytest.mark.skipif(not MPIRUN.exists(), reason="needs the extra distributed")
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
