"""What a run says: a progress bar on a terminal, plain lines elsewhere, and the loss curve."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

BAR_INTERVAL = 0.1  # seconds between updates of the bar, so that fast steps do not wait for it


def is_terminal(stream: IO[str]) -> bool:
    """Whether `stream` is a terminal that can redraw a line (TERM=dumb cannot)."""
    return stream.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown")


def uses_color(stream: IO[str]) -> bool:
    """Whether to colour `stream`: terminals only, and not where NO_COLOR is set."""
    return is_terminal(stream) and not os.environ.get("NO_COLOR")


def _encodable(text: str, encoding: str) -> bool:
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def printable(text: str) -> str:
    """`text` with control characters but newline and tab spelled out (ESC as `\\x1b`).

    Sampled text may hold any character; none may steer the terminal.
    """
    return "".join(
        c if c in "\n\t" or not (ord(c) < 32 or 127 <= ord(c) < 160) else f"\\x{ord(c):02x}"
        for c in text
    )


def duration(seconds: float) -> str:
    """Seconds as `m:ss` or `h:mm:ss`."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Report:
    """The voice of a run of `steps` optimizer steps, of which `start` are done already.

    On a terminal `step` moves a progress bar and everything else is printed above it. On any
    other stream `step` prints one line for every `every` steps, for every evaluation, and for the
    last step, without control characters. A reader that goes away (a closed pipe) silences the
    report; the run goes on.
    """

    def __init__(
        self, steps: int, *, start: int = 0, every: int = 10, stream: IO[str] | None = None
    ) -> None:
        self.steps, self.start, self.every = steps, start, every
        self.stream: IO[str] = sys.stdout if stream is None else stream
        self._encoding: str = getattr(self.stream, "encoding", None) or "ascii"
        self._console: Console | None = None
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._val_loss: float | None = None
        self._began = time.monotonic()
        self._drawn = -math.inf

    # ------------------------------------------------------------------------------- speaking

    def say(self, text: str = "") -> None:
        """Prints `text`, above the bar where there is one."""
        line = printable(text).encode(self._encoding, errors="replace").decode(self._encoding)
        if self._console is not None:
            self._console.print(line, markup=False, highlight=False, emoji=False, soft_wrap=True)
            return
        with contextlib.suppress(BrokenPipeError, ValueError):  # ValueError: closed stream
            self.stream.write(line + "\n")
            self.stream.flush()

    def step(
        self,
        step: int,
        *,
        loss: float,
        lr: float,
        tokens_per_s: float,
        val_loss: float | None = None,
    ) -> None:
        """Reports that `step` optimizer steps are done; losses are nats per token."""
        if val_loss is not None:
            self._val_loss = val_loss
        last = step == self.steps
        if self._progress is not None and self._task is not None:
            now = time.monotonic()
            if last or val_loss is not None or now - self._drawn >= BAR_INTERVAL:
                self._drawn = now
                text = self._numbers(step, loss, lr, tokens_per_s, self._val_loss)
                self._progress.update(self._task, completed=step, numbers=text)
        elif last or val_loss is not None or step % self.every == 0:
            head = f"step {step:{len(str(self.steps))}d}/{self.steps}"
            self.say(f"{head}  {self._numbers(step, loss, lr, tokens_per_s, val_loss)}")

    def curve(
        self, metrics: Iterable[Mapping[str, Any]], width: int = 72, height: int = 14
    ) -> None:
        """Prints the loss curve with the characters and colours that the stream can show."""
        unicode = _encodable("⣿●", self._encoding)
        color = uses_color(self.stream)
        text = loss_curve(metrics, width, height, unicode=unicode, color=color)
        if not color:
            self.say(text)
            return
        self.close()
        with contextlib.suppress(BrokenPipeError, ValueError):
            self.stream.write(text + "\n")
            self.stream.flush()

    def _numbers(
        self, step: int, loss: float, lr: float, tokens_per_s: float, val_loss: float | None
    ) -> str:
        parts = [f"loss {loss:.4f}"]
        if val_loss is not None:
            parts.append(f"val {val_loss:.4f}")
        parts += [f"lr {lr:.2e}", f"{tokens_per_s:,.0f} tok/s"]
        done = step - self.start
        if done > 0:
            left = (time.monotonic() - self._began) / done * (self.steps - step)
            parts.append(f"ETA {duration(left)}")
        return "  ".join(parts)

    # ------------------------------------------------------------------------------ the bar

    def __enter__(self) -> Report:
        self._began = time.monotonic()
        if not is_terminal(self.stream):
            return self
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._console = Console(file=self.stream, highlight=False)
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[numbers]}", markup=False),
            console=self._console,
            refresh_per_second=5,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._progress.add_task("", total=self.steps, completed=self.start, numbers="")
        self._progress.start()
        return self

    def close(self) -> None:
        """Leaves the bar as it stands; what follows is printed below it."""
        if self._progress is not None:
            self._progress.stop()
        self._progress = self._console = self._task = None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


# --------------------------------------------------------------------------------- loss curve

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # bit of braille dot [row][column]
_BRAILLE = 0x2800
_TRAIN_COLOR, _VAL_COLOR, _RESET = "\x1b[36m", "\x1b[33m", "\x1b[0m"


def _series(metrics: Sequence[Mapping[str, Any]], key: str) -> list[tuple[float, float]]:
    points = ((record["step"], record.get(key)) for record in metrics)
    return [(float(x), float(y)) for x, y in points if y is not None and math.isfinite(y)]


def _column_means(
    points: Sequence[tuple[float, float]], low: float, high: float, columns: int
) -> dict[int, float]:
    """The mean of the points that fall into each of `columns` equal parts of low..high."""
    sums: dict[int, tuple[float, int]] = {}
    for x, y in points:
        column = round((x - low) / (high - low or 1.0) * (columns - 1))
        total, count = sums.get(column, (0.0, 0))
        sums[column] = (total + y, count + 1)
    return {column: total / count for column, (total, count) in sorted(sums.items())}


def _line(rows: Mapping[int, int]) -> set[tuple[int, int]]:
    """The pixels (column, row) of straight lines through (column, row) points in order."""
    pixels: set[tuple[int, int]] = set()
    points = list(rows.items())
    for (x0, y0), (x1, y1) in pairwise(points):
        length = max(x1 - x0, abs(y1 - y0))
        for i in range(length + 1):
            pixels.add((x0 + round(i * (x1 - x0) / length), y0 + round(i * (y1 - y0) / length)))
    return pixels or set(points)


def loss_curve(
    metrics: Iterable[Mapping[str, Any]],
    width: int = 72,
    height: int = 14,
    *,
    unicode: bool = True,
    color: bool = False,
) -> str:
    """Draws training and validation loss against the step, `width` by about `height` characters.

    `metrics` are records as `read_metrics` gives them: "step", "loss" and sometimes "val_loss";
    values that are not finite are left out. Training loss is a line (the mean of the steps in
    each column), evaluations are single marks. With `unicode` the line has 2 by 4 dots a
    character, else ASCII alone is used; `color` adds ANSI colours.
    """
    records = list(metrics)
    train, val = _series(records, "loss"), _series(records, "val_loss")
    if not train and not val:
        return "no finite loss to draw"
    steps = [x for x, _ in train + val]
    first, last = min(steps), max(steps)
    across, down = (2, 4) if unicode else (1, 1)
    label_width = 9
    columns, lines = max(8, width - label_width - 2), max(4, height - 3)

    means = _column_means(train, first, last, columns * across)
    levels = [*means.values(), *(y for _, y in val)]
    bottom, top = min(levels), max(levels)
    if top == bottom:
        bottom, top = bottom - 0.5, top + 0.5

    def row(y: float, rows: int) -> int:
        return round((top - y) / (top - bottom) * (rows - 1))

    pixels = _line({x: row(y, lines * down) for x, y in means.items()})
    cells = [[0] * columns for _ in range(lines)]
    for x, y in pixels:
        cells[y // down][x // across] |= _DOTS[y % down][x % across] if unicode else 1
    marks = {
        (row(y, lines), round((x - first) / (last - first or 1.0) * (columns - 1))) for x, y in val
    }

    train_mark, val_mark, axis, corner, rule = "⠒●┤└─" if unicode else "*o|+-"

    def paint(text: str, code: str) -> str:
        return f"{code}{text}{_RESET}" if color else text

    def glyph(i: int, j: int) -> str:
        if (i, j) in marks:
            return paint(val_mark, _VAL_COLOR)
        if not cells[i][j]:
            return " "
        return paint(chr(_BRAILLE | cells[i][j]) if unicode else train_mark, _TRAIN_COLOR)

    labelled = {0: top, lines // 2: top - (top - bottom) * (lines // 2) / (lines - 1)}
    labelled[lines - 1] = bottom
    drawn = []
    for i in range(lines):
        label = f"{labelled[i]:{label_width}.4g}" if i in labelled else " " * label_width
        drawn.append(f"{label} {axis}" + "".join(glyph(i, j) for j in range(columns)))
    drawn.append(" " * (label_width + 1) + corner + rule * columns)
    left, right = f"{first:.0f}", f"step {last:.0f}"
    drawn.append(" " * (label_width + 2) + left + right.rjust(columns - len(left)))
    legend = []
    if train:
        legend.append(paint(train_mark, _TRAIN_COLOR) + " training loss")
    if val:
        legend.append(paint(val_mark, _VAL_COLOR) + " validation loss")
    drawn.append(" " * (label_width + 2) + "   ".join(legend))
    return "\n".join(line.rstrip() for line in drawn)
