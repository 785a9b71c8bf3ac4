"""What a person sees while kernels are compiled and measured, which takes up to a minute once."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from treadle.backends import kernel_cache

PATIENCE = 2.0  # seconds after which silence would be taken for a fault

Item = TypeVar("Item")


@contextmanager
def shown(device: str, total: int) -> Iterator[Callable[[Iterable[Item]], Iterator[Item]]]:
    """A function to pass items through, `total` of them in all, which become ready one by one. What
    takes longer than PATIENCE is shown on stderr: as a bar on a terminal, else in one line."""
    text = f"preparing kernels for {device}"
    bar: Any = None
    task: Any = None
    done, began, told = 0, time.monotonic(), False

    def passing(items: Iterable[Item]) -> Iterator[Item]:
        nonlocal bar, task, done, told
        for item in items:
            yield item
            done += 1
            if bar is not None:
                bar.update(task, completed=done)
            elif not told and time.monotonic() - began > PATIENCE:
                told = True
                if sys.stderr is not None and sys.stderr.isatty():
                    from rich.console import Console
                    from rich.progress import Progress

                    bar = Progress(console=Console(file=sys.stderr), transient=True)
                    task = bar.add_task(text, total=total, completed=done)
                    bar.start()
                else:
                    where = kernel_cache.folder()
                    print(f"{text}, {done} of {total} so far; they are kept in {where}",
                          file=sys.stderr, flush=True)  # fmt: skip

    try:
        yield passing
    finally:
        if bar is not None:
            bar.stop()
