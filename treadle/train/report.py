"""What a run says: a live display on a terminal, plain lines elsewhere, and the loss curve."""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from treadle.train.live import Display

DRAW_INTERVAL = 0.1  # seconds between frames of the display, so that fast steps do not wait for it
SMOOTHING = 0.98  # weight of the past in the smoothed loss
PLAIN_LINES = 40  # of steps, in a whole run that is not watched on a terminal


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


def command_name() -> str:
    """What a person types to call this command again: `treadle`, where the shell finds it."""
    called = Path(sys.argv[0])
    if shutil.which("treadle") is None:
        if called.name == "__main__.py":
            return "python -m treadle"
        if called.stem == "treadle":
            return shlex.quote(str(called))
    return "treadle"


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


def duration(seconds: float) -> str:
    """Seconds as `m:ss` or `h:mm:ss`."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Frame(NamedTuple):
    """What a display shows: rows of (text, style) that stand side by side, and a sample."""

    step: int = 0
    left: str = ""  # the time, as text
    rows: Sequence[Sequence[tuple[str, str]]] = ()
    sample_step: int = 0
    sample: str = ""


class Report:
    """The voice of a run of `steps` optimizer steps, of which `start` are done already.

    On a terminal `step` and `sample` move a live display and everything else is printed above it.
    On any other stream `step` prints one line for every `every` steps (None: about PLAIN_LINES in
    all, at least 10 steps apart), for every evaluation, and for the last step, without control
    characters. A reader that goes away (a closed pipe)
    silences the report; the run goes on.

    flops_per_token: of training, for the speed in GFLOP/s. memory: bytes, to be shown.
    """

    def __init__(
        self,
        steps: int,
        *,
        start: int = 0,
        every: int | None = None,
        stream: IO[str] | None = None,
        flops_per_token: float = 0.0,
        memory: int = 0,
    ) -> None:
        self.steps, self.start = steps, start
        self.every = max(10, steps // PLAIN_LINES) if every is None else every
        self.flops_per_token, self.memory = flops_per_token, memory
        self.stream: IO[str] = sys.stdout if stream is None else stream
        self._encoding: str = getattr(self.stream, "encoding", None) or "ascii"
        self._display: Display | None = None
        self._val_loss: float | None = None
        self._smoothed, self._weight = 0.0, 0.0
        self._skipped = 0
        self._frame = Frame()
        self._began = time.monotonic()
        self._drawn = -math.inf

    # ------------------------------------------------------------------------------- speaking

    def say(self, text: str = "") -> None:
        """Prints `text`, above the display where there is one."""
        line = self._shown(text)
        if self._display is not None:
            self._display.say(line)
            return
        with contextlib.suppress(BrokenPipeError, ValueError):  # ValueError: closed stream
            self.stream.write(line + "\n")
            self.stream.flush()

    def step(
        self,
        step: int,
        *,
        loss: float | None,
        lr: float,
        tokens_per_s: float,
        val_loss: float | None = None,
        grad_norm: float | None = None,
        skipped: int | None = None,
    ) -> None:
        """Reports that `step` optimizer steps are done; losses are nats per token.

        loss, grad_norm: None where they were not finite. skipped: how many updates were left out
        so far, on a step that was one of them.
        """
        self._val_loss = self._val_loss if val_loss is None else val_loss
        self._skipped = skipped or self._skipped
        if loss is not None:
            self._smoothed = SMOOTHING * self._smoothed + (1 - SMOOTHING) * loss
            self._weight = SMOOTHING * self._weight + (1 - SMOOTHING)
        last = step == self.steps
        train, speed = f"loss {_number(loss)}", f"{tokens_per_s:,.0f} tok/s"
        if self._display is not None:
            now = time.monotonic()
            if last or val_loss is not None or now - self._drawn >= DRAW_INTERVAL:
                self._drawn = now
                self._draw(step, train, f"lr {lr:.2e}", f"grad norm {_number(grad_norm)}", speed,
                           self.flops_per_token * tokens_per_s)  # fmt: skip
        elif last or val_loss is not None or step % self.every == 0:
            left = self._left(step)
            parts = [
                f"step {step:{len(str(self.steps))}d}/{self.steps}",
                train,
                *([] if val_loss is None else [f"val {val_loss:.4f}"]),
                f"lr {lr:.2e}",
                speed,
                *([f"ETA {left}"] if left else []),
            ]
            self.say("  ".join(parts))

    def sample(self, step: int, text: str) -> None:
        """Shows what the model wrote at a step: in the display, else as lines."""
        if self._display is None:
            self.say(f"sample at step {step}:\n{text}")
        else:
            self._frame = self._frame._replace(sample_step=step, sample=self._shown(text))
            self._display.show(self._frame)

    def _draw(
        self, step: int, train: str, lr: str, grad_norm: str, speed: str, flops: float
    ) -> None:
        assert self._display is not None
        losses = [(train, "bold cyan")]
        if self._weight:
            losses.append((f"smoothed {self._smoothed / self._weight:.4f}", "cyan"))
        if self._val_loss is not None:
            losses.append((f"val {self._val_loss:.4f}", "bold yellow"))
        numbers = [(lr, ""), (grad_norm, "")]
        if self._skipped:
            numbers.append((f"skipped {self._skipped}", "bold red"))
        speeds = [(speed, "")]
        if flops:
            speeds.append((f"{flops / 1e9:,.1f} GFLOP/s", ""))
        if self.memory:
            speeds.append((f"memory {self.memory / 2**20:,.1f} MiB", ""))
        rows = (losses, numbers, speeds)
        self._frame = self._frame._replace(step=step, left=self._left(step), rows=rows)
        self._display.show(self._frame)

    def _left(self, step: int) -> str:
        """The time to the end at the pace so far, or nothing where there is no pace yet."""
        done = step - self.start
        if done <= 0:
            return ""
        return duration((time.monotonic() - self._began) / done * (self.steps - step))

    def _shown(self, text: str) -> str:
        return printable(text).encode(self._encoding, errors="replace").decode(self._encoding)

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

    # -------------------------------------------------------------------------- the display

    def __enter__(self) -> Report:
        self._began = time.monotonic()
        if is_terminal(self.stream):
            from treadle.train.live import Display

            self._display = Display(self.stream, self.steps)
        return self

    def close(self) -> None:
        """Leaves the display as it stands; what follows is printed below it."""
        if self._display is not None:
            self._display.stop()
        self._display = None

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
