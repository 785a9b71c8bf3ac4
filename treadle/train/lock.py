"""One trainer per run directory: a lock that the operating system drops with its process."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import sys
from pathlib import Path
from types import TracebackType

from treadle.errors import LockError
from treadle.files import one_line

LOCK_NAME = "train.lock"

if sys.platform == "win32":
    import msvcrt

    # Windows locks are mandatory, so the locked byte lies far behind the text that others read.
    _LOCKED_BYTE = 1 << 30

    def _try_lock(descriptor: int) -> bool:
        os.lseek(descriptor, _LOCKED_BYTE, os.SEEK_SET)
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EDEADLK):
                return False
            raise
        return True

else:
    import fcntl

    def _try_lock(descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


class RunLock:
    """Holds `run_dir` for this process, as a context manager or by `acquire` and `release`.

    The file `train.lock` stays behind, empty, after `release`: removing it would let two
    processes hold locks on two files of the same name. After a kill it keeps the text of the
    dead process, but nothing holds it any more and the next `acquire` succeeds.
    """

    def __init__(self, run_dir: str | os.PathLike[str]) -> None:
        self.path = Path(run_dir) / LOCK_NAME
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Takes the lock at once, or raises LockError naming the process that holds it."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise LockError(
                f"{self.path}: {error.strerror or one_line(error)}; choose another --out"
            ) from error
        try:
            if not _try_lock(descriptor):
                raise LockError(self._held_message())
            owner = json.dumps({"pid": os.getpid(), "host": socket.gethostname()}) + "\n"
            os.ftruncate(descriptor, 0)
            os.lseek(descriptor, 0, os.SEEK_SET)
            os.write(descriptor, owner.encode())
        except OSError as error:
            os.close(descriptor)
            raise LockError(
                f"{self.path}: cannot lock ({error.strerror or one_line(error)}); "
                "choose an --out on another file system"
            ) from error
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor

    def release(self) -> None:
        """Gives the lock back; does nothing when it is not held."""
        if self._descriptor is None:
            return
        with contextlib.suppress(OSError):
            os.ftruncate(self._descriptor, 0)
        os.close(self._descriptor)
        self._descriptor = None

    def _held_message(self) -> str:
        run_dir = self.path.parent
        try:
            owner = json.loads(self.path.read_bytes())
            pid, host = int(owner["pid"]), str(owner["host"])
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return f"{run_dir} is in use by another process; wait for it or choose another --out"
        return (
            f"{run_dir} is in use by process {pid} on {one_line(host)}; wait for it, stop it "
            f"(kill {pid}), or choose another --out"
        )

    def __enter__(self) -> RunLock:
        self.acquire()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()
