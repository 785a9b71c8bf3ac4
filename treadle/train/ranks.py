"""Several processes, ranks, that train one model together through MPI.

Rank 0 is the one that people see: it reads the data, judges, evaluates and writes, as a run of one
process does. The others follow it: they hold a session of their own, and wait for what it sends.
A step is cut into (accumulation step, rank) parts, in this order, and the gradients of all are
added in the order of the ranks, so that a run repeats to the bit for a number of ranks.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np

from treadle.errors import BackendError, RankError, TreadleError

# By launcher, the variable that says how many processes it has started: MPICH and its kin, Open
# MPI, and a step of Slurm.
SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
SPINS = 2000  # looks at what is to arrive before the processor is left to others in between
PAUSE = 1e-4  # seconds between two looks after those


def launched() -> Ranks:
    """The ranks that this process was started among; one alone where no launcher was at work.

    BackendError where there are several and the extra `distributed` is not installed.
    """
    started = (os.environ.get(name, "") for name in SIZES)
    if not any(text.isdigit() and int(text) > 1 for text in started):
        return Ranks()
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise BackendError(
            f"several processes were launched, and mpi4py cannot be used ({error}); "
            "pip install 'treadle[distributed]'"
        ) from None
    return Ranks(MPI)


class Ranks:
    """This process among `size` ranks. mpi: the module mpi4py.MPI, None for one rank alone.

    As a context manager it ends the job: in order, where all is well and where rank 0 has an
    error to tell; at once, with one line that names the rank, where another one fails, or rank 0
    in a step. timeout: seconds that an exchange waits for a rank. in_step: whether the others are
    in a step too, and not waiting for what rank 0 sends.
    """

    def __init__(self, mpi: Any = None) -> None:
        self.timeout, self.in_step = float("inf"), False
        self.comm = None if mpi is None else mpi.COMM_WORLD
        self.rank = 0 if self.comm is None else self.comm.Get_rank()
        self.size = 1 if self.comm is None else self.comm.Get_size()
        self.local, self.hosts = 1, [socket.gethostname()]
        if self.comm is not None:
            self.hosts = self.comm.allgather(socket.gethostname())
            self.local = self.hosts.count(socket.gethostname())

    # ---------------------------------------------------------------- words and numbers

    def send(self, message: Any) -> None:
        """From rank 0: what the others get by `receive`. Does nothing where there are none."""
        if self.comm is not None:
            requests = {r: self.comm.isend(message, r) for r in range(1, self.size)}
            self._wait(requests)

    def receive(self) -> Any:
        """What rank 0 sends next. Waits as long as it takes: rank 0 may be at an evaluation."""
        assert self.comm is not None
        while not self.comm.iprobe(0):
            time.sleep(PAUSE)
        return self.comm.recv(source=0)

    def share(self, arrays: Sequence[np.ndarray]) -> None:
        """The arrays of rank 0 into those of every rank."""
        if self.comm is None:
            return
        for array in arrays:
            if self.rank == 0:
                self._wait({r: self.comm.Isend(array, r) for r in range(1, self.size)})
            else:
                self._wait({0: self.comm.Irecv(array, 0)})

    def gather(self, item: Any) -> list[Any]:
        """An item of every rank, in their order, on rank 0; an empty list elsewhere."""
        return [item] if self.comm is None else self.comm.gather(item) or []

    def add(self, values: np.ndarray, others: np.ndarray) -> None:
        """The sum over all ranks into `values`, float32 [size · n], the same bits everywhere.

        Rank r gets the r-th chunk of n from every rank, adds them in the order of the ranks and
        sends the sum to all. others: float32 [size, n], memory for what arrives.
        """
        if self.comm is None:
            return
        chunks, mine = values.reshape(self.size, -1), self.rank
        peers = [r for r in range(self.size) if r != mine]
        arriving = {r: self.comm.Irecv(others[r], r) for r in peers}
        leaving = [self.comm.Isend(chunks[r], r) for r in peers]
        self._wait(arriving)
        self._wait(dict(zip(peers, leaving, strict=True)))
        others[mine] = chunks[mine]
        np.copyto(chunks[mine], others[0])
        for r in range(1, self.size):
            chunks[mine] += others[r]
        arriving = {r: self.comm.Irecv(chunks[r], r) for r in peers}
        leaving = [self.comm.Isend(chunks[mine], r) for r in peers]
        self._wait(arriving)
        self._wait(dict(zip(peers, leaving, strict=True)))

    def _wait(self, requests: dict[int, Any]) -> None:
        """Until the requests, by rank, are done; RankError naming those that are not in time."""
        limit, looks, left = time.monotonic() + self.timeout, 0, dict(requests)
        while left:
            left = {r: request for r, request in left.items() if not request.Test()}
            looks += 1
            if looks > SPINS:
                time.sleep(PAUSE)
                if left and time.monotonic() > limit:
                    missing = ", ".join(f"rank {r} on {self.hosts[r]}" for r in sorted(left))
                    raise RankError(
                        f"nothing came from {missing} in {self.timeout:g} seconds "
                        "(train.rank_timeout); the last checkpoint is whole, the same command "
                        "resumes"
                    )

    # ---------------------------------------------------------------- the end

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.comm is None:
            return
        if self.rank == 0 and not self.in_step and not isinstance(error, RankError):
            self.send(None)
        elif error is not None:
            self._abort(error)

    def _abort(self, error: BaseException) -> None:
        assert self.comm is not None
        text = " ".join(str(error).split())
        kind = "" if isinstance(error, TreadleError) else f"{type(error).__name__}: "
        where = f"rank {self.rank} of {self.size} on {self.hosts[self.rank]}"
        print(f"{where}: treadle: error: {kind}{text}", file=sys.stderr, flush=True)
        self.comm.Abort(error.exit_code if isinstance(error, TreadleError) else 1)
