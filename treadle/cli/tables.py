"""Plain text tables and the numbers in them, for all commands."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(rows: Iterable[Sequence[object]], header: Sequence[str] = (), left: int = 1) -> str:
    """Lines of aligned columns: the first `left` columns to the left, the others to the right."""
    cells = [[str(cell) for cell in row] for row in ([header, *rows] if header else rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    if header:
        cells.insert(1, ["-" * width for width in widths])
    lines = []
    for row in cells:
        padded = [
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def counted(number: int, noun: str) -> str:
    """`1 thread`, `2 threads`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def mebibytes(nbytes: int) -> str:
    """Bytes in MiB: `12.5 MiB`."""
    return f"{nbytes / 2**20:,.1f} MiB"


def rate(amount: float, seconds: float) -> str:
    """Billions of `amount` a second: `182.4`; a dash when no time passed."""
    return f"{amount / seconds / 1e9:,.1f}" if seconds > 0 else "-"
