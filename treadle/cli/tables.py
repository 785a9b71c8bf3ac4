"""Plain text tables and the numbers in them, for all commands."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from itertools import zip_longest

GAP = "  "  # between columns


def table(rows: Iterable[Sequence[object]], header: Sequence[str] = (), left: int = 1) -> str:
    """Lines of aligned columns: the first `left` columns to the left, the others to the right."""
    return "\n".join(blocks(rows, header, left))


def blocks(
    rows: Iterable[Sequence[object]], header: Sequence[str] = (), left: int = 1
) -> list[str]:
    """The rows of a `table`, after the header and its rule; each may be of several lines, since the
    widest cells are wrapped where the terminal is too narrow."""
    cells = [[str(cell) for cell in row] for row in ([header, *rows] if header else rows)]
    widths = _fitted(cells)
    if header:
        cells.insert(1, ["-" * width for width in widths])
    return [_aligned(row, widths, left) for row in cells]


def _fitted(cells: list[list[str]]) -> list[int]:
    columns = list(zip(*cells, strict=True))
    widths = [max(map(len, column)) for column in columns]
    words = [max(len(w) for cell in column for w in (cell.split() or [""])) for column in columns]
    room = terminal_width()
    while room and sum(widths) + len(GAP) * (len(widths) - 1) > room:
        widest = max(range(len(widths)), key=lambda i: (widths[i] > words[i], widths[i]))
        if widths[widest] <= words[widest]:
            break
        widths[widest] -= 1
    return widths


def _aligned(row: Sequence[str], widths: Sequence[int], left: int) -> str:
    wrapped = [
        [cell] if len(cell) <= width else textwrap.wrap(cell, width, break_on_hyphens=False)
        for cell, width in zip(row, widths, strict=True)
    ]
    return "\n".join(_padded(line, widths, left) for line in zip_longest(*wrapped, fillvalue=""))


def _padded(cells: Sequence[str], widths: Sequence[int], left: int) -> str:
    columns = enumerate(zip(cells, widths, strict=True))
    return GAP.join(c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in columns).rstrip()


def terminal_width() -> int:
    """Columns of the terminal that stdout is; 0 where it is none and lines may have any length."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 0


class LiveTable:
    """A table that is printed row by row, each as soon as it is known.

    widths: the least width of each column, since later rows are not known yet.
    """

    def __init__(self, header: Sequence[str], widths: Sequence[int], left: int = 1) -> None:
        self.widths = [max(len(h), w) for h, w in zip(header, widths, strict=True)]
        self.left = left
        self.add(*header)
        self.add(*("-" * width for width in self.widths))

    def add(self, *row: object) -> None:
        """Print a row."""
        print(_padded([str(cell) for cell in row], self.widths, self.left), flush=True)


def counted(number: int, noun: str) -> str:
    """`1 thread`, `2 threads`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def mebibytes(nbytes: int) -> str:
    """Bytes in MiB: `12.5 MiB`."""
    return f"{nbytes / 2**20:,.1f} MiB"


def rate(amount: float, seconds: float) -> str:
    """Billions of `amount` a second: `182.4`; a dash when no time passed."""
    return f"{amount / seconds / 1e9:,.1f}" if seconds > 0 else "-"
