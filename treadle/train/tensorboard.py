"""TensorBoard event files of a run, in its folder `tensorboard`, by the package tensorboardX."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any

from treadle.errors import ConfigError

FOLDER = "tensorboard"
FLUSH_SECONDS = 10
SCALARS = {
    "loss": "loss/train",
    "val_loss": "loss/validation",
    "spike": "loss/spike_zscore",
    "lr": "lr",
    "grad_norm": "grad_norm",
    "skipped": "skipped",
    "tokens_per_s": "speed/tokens_per_s",
    "step_ms": "speed/step_ms",
}
"""The tags of the columns of the metrics."""


class EventFiles:
    """Writes the metrics and samples of a run, as a context manager.

    A file is begun with the first line, so that nothing is written where no step is made. It tells
    TensorBoard to drop what an earlier, killed process wrote of the same steps and later ones.
    ConfigError where the package is missing.
    """

    def __init__(self, run_dir: Path) -> None:
        try:
            self._make = import_module("tensorboardX").SummaryWriter
        except ImportError:
            raise ConfigError(
                "--tensorboard needs the package tensorboardX: pip install 'treadle[tensorboard]', "
                "or set train.tensorboard to false"
            ) from None
        self._folder = run_dir / FOLDER
        self._writer: Any = None

    def scalars(self, line: Mapping[str, Any]) -> None:
        """Add a line of the metrics."""
        writer = self._begun(line["step"])
        for column, tag in SCALARS.items():
            if line.get(column) is not None:
                writer.add_scalar(tag, line[column], line["step"])

    def text(self, step: int, text: str) -> None:
        """Add a sample. TensorBoard shows Markdown, in which indented lines stay as they are."""
        block = "".join(f"    {line}\n" for line in text.split("\n"))
        self._begun(step).add_text("sample", block, step)

    def _begun(self, step: int) -> Any:
        if self._writer is None:
            self._writer = self._make(str(self._folder), purge_step=step, flush_secs=FLUSH_SECONDS)
        return self._writer

    def __enter__(self) -> EventFiles:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._writer is not None:
            self._writer.close()
