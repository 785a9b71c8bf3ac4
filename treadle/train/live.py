"""The display of a run on a terminal: progress, numbers and the last sample, drawn by rich."""

from __future__ import annotations

from typing import IO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from treadle.train.report import Frame

BAR_WIDTH = 32
SAMPLE_LINES = 6
REFRESHES_A_SECOND = 5


class Display:
    """Redraws a frame in place; lines that are said scroll by above it."""

    def __init__(self, stream: IO[str], steps: int) -> None:
        self.steps = steps
        self.console = Console(file=stream, highlight=False)
        self._live = Live(
            console=self.console,
            refresh_per_second=REFRESHES_A_SECOND,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start()

    def say(self, line: str) -> None:
        """Print a line above the frame."""
        self.console.print(line, markup=False, highlight=False, emoji=False, soft_wrap=True)

    def show(self, frame: Frame) -> None:
        """Put a frame in place of the last one; it is drawn at the next refresh."""
        self._live.update(self._drawn(frame))

    def stop(self) -> None:
        """Leave the last frame as it stands."""
        self._live.stop()

    def _drawn(self, frame: Frame) -> RenderableType:
        bar = Table.grid(padding=(0, 1))
        bar.add_row(
            Text(f"step {frame.step}/{self.steps}"),
            ProgressBar(total=max(1, self.steps), completed=frame.step, width=BAR_WIDTH),
            Text(f"{frame.step / max(1, self.steps):4.0%}"),
            Text(f"ETA {frame.left}" if frame.left else ""),
        )
        parts: list[RenderableType] = [bar]
        parts += [Text("  ").join(Text(*cell) for cell in row) for row in frame.rows]
        if frame.sample:
            lines = frame.sample.strip("\n").split("\n")
            parts.append(Rule(f"sample at step {frame.sample_step}", align="left", style="dim"))
            text = Text("\n".join(lines[:SAMPLE_LINES]), style="italic")
            wrapped = text.wrap(self.console, self.console.width)
            parts += wrapped[:SAMPLE_LINES]
        return Group(*parts)
