"""One trainer per run directory, whatever happens to the first."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from treadle.errors import LockError
from treadle.train.lock import RunLock

ROOT = Path(__file__).resolve().parent.parent
HOLD = """
import sys
from treadle.train.lock import RunLock
with RunLock(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


def holder(run: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_second_trainer_is_told_who_holds_the_run(tmp_path: Path) -> None:
    process = holder(tmp_path)
    try:
        with pytest.raises(LockError) as caught:
            RunLock(tmp_path).acquire()
        text = str(caught.value)
        assert f"process {process.pid} on {socket.gethostname()}" in text
        assert "--out" in text and "\n" not in text
    finally:
        process.communicate("")
    with RunLock(tmp_path):
        pass


def test_lock_dies_with_its_process(tmp_path: Path) -> None:
    process = holder(tmp_path)
    process.kill()
    process.communicate()
    with RunLock(tmp_path), pytest.raises(LockError, match=f"process {os.getpid()} on"):
        RunLock(tmp_path).acquire()


def test_lock_is_not_passed_on_to_a_started_program(tmp_path: Path) -> None:
    with RunLock(tmp_path):
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        with RunLock(tmp_path):
            pass
    finally:
        child.communicate(b"\n")


def test_released_lock_can_be_taken_again(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "new"
    lock = RunLock(run)
    lock.release()
    for _ in range(2):
        lock.acquire()
        assert b'"pid"' in (run / "train.lock").read_bytes()
        lock.release()
        assert (run / "train.lock").read_bytes() == b""


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"pid": "x"}', b"\xff"])
def test_unreadable_owner_is_still_an_owner(text: bytes, tmp_path: Path) -> None:
    with RunLock(tmp_path):
        (tmp_path / "train.lock").write_bytes(text)
        with pytest.raises(LockError, match="in use by another process"):
            RunLock(tmp_path).acquire()


def test_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LockError, match=r"train\.lock: .*; choose another --out"):
        RunLock(tmp_path / "file").acquire()


def test_failed_attempt_leaks_nothing(tmp_path: Path) -> None:
    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("counts descriptors through /proc")
    with RunLock(tmp_path):
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(5):
            with pytest.raises(LockError):
                RunLock(tmp_path).acquire()
        assert len(os.listdir("/proc/self/fd")) == before
