"""Ctrl-C and SIGTERM: the first asks for a clean end, the second ends at once."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from types import FrameType
from typing import Any

STDERR = 2


def _say(text: bytes) -> None:
    """Writes past Python's streams, which a handler may find closed or in the middle of a write."""
    with contextlib.suppress(OSError):
        os.write(STDERR, text)


class StopRequest:
    """`requested` turns true at the first SIGINT or SIGTERM while the context is entered.

    The second leaves the process at once with exit code 130, without any cleaning up: checkpoints
    are whole at every instant, so there is nothing to clean. Outside the main thread signals
    cannot be caught; the request then stays false. quiet: say nothing about it.
    """

    def __init__(self, quiet: bool = False) -> None:
        self.requested, self.quiet = False, quiet
        self._previous: dict[signal.Signals, Any] = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            self._tell(b"\nstopped at once; the last checkpoint is whole\n")
            os._exit(130)
        self.requested = True
        self._tell(b"\nstopping after this step and saving; once more to leave at once\n")

    def _tell(self, text: bytes) -> None:
        if not self.quiet:
            _say(text)

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}
