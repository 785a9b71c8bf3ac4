"""The numbers of a run: `metrics.jsonl`, and the same lines for spreadsheets in `metrics.csv`."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from treadle.errors import CorruptError, TrainingError
from treadle.files import one_line, read_bytes, write_atomic

JSONL_NAME = "metrics.jsonl"
CSV_NAME = "metrics.csv"
ALWAYS = ("step", "epoch", "loss", "lr", "grad_norm", "tokens_per_s", "step_ms")
SOMETIMES = ("val_loss", "spike", "skipped")
COLUMNS = (*ALWAYS, *SOMETIMES)

Number = int | float


def _float(value: float | None) -> float | None:
    """A number as JSON holds it: None where it is not finite."""
    return float(value) if value is not None and math.isfinite(value) else None


def _json_line(record: dict[str, Number | None]) -> bytes:
    return json.dumps(record, separators=(", ", ": "), allow_nan=False).encode() + b"\n"


def _csv_line(record: dict[str, Any]) -> bytes:
    cells = (record.get(name) for name in COLUMNS)
    return ",".join("" if cell is None else repr(cell) for cell in cells).encode() + b"\n"


def _parse(line: bytes) -> dict[str, Any] | None:
    """The record of one line, or None when the line is half-written or damaged."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or type(record.get("step")) is not int:
        return None
    numbers = (value is None or type(value) in (int, float) for value in record.values())
    return record if all(numbers) else None


def _whole_lines(data: bytes) -> Iterator[bytes]:
    """Lines that end in a newline; what a kill left behind the last newline is skipped."""
    for line in data.splitlines(keepends=True):
        if line.endswith(b"\n"):
            yield line


class MetricsWriter:
    """Appends to the two metrics files of a run directory, one whole line at a time.

    Each line is handed to the operating system before `write` returns, so that a killed process
    loses none. Opening a run again drops a last line that was only half written.
    `metrics.jsonl` is the source: `metrics.csv` is made again from it whenever lines are cut.
    """

    def __init__(self, run_dir: str | os.PathLike[str]) -> None:
        self._jsonl_path = Path(run_dir) / JSONL_NAME
        self._csv_path = Path(run_dir) / CSV_NAME
        self._files: list[IO[bytes]] = []
        self._rewrite(math.inf)

    def write(
        self,
        *,
        step: int,
        epoch: Number,
        loss: float | None,
        lr: float,
        grad_norm: float | None,
        tokens_per_s: float,
        step_ms: float,
        val_loss: float | None = None,
        spike: float | None = None,
        skipped: int | None = None,
    ) -> None:
        """Appends one line; numbers that are not finite become null, as JSON has none.

        `step` counts finished optimizer steps, `epoch` passes over the training windows, losses
        are nats per token. Absent from the line where None: `val_loss`, where nothing was
        evaluated; `spike`, the z-score of a loss that spiked; `skipped`, where the update was left
        out, how many were so far.
        """
        whole = (int(step), epoch if isinstance(epoch, int) else float(epoch))
        values = (*whole, *map(_float, (loss, lr, grad_norm, tokens_per_s, step_ms)))
        record: dict[str, Number | None] = dict(zip(ALWAYS, values, strict=True))
        extras = (val_loss, spike, skipped)
        for name, extra in zip(SOMETIMES, extras, strict=True):
            if extra is not None:
                record[name] = int(extra) if name == "skipped" else _float(extra)
        try:
            for file, line in zip(
                self._files, (_json_line(record), _csv_line(record)), strict=True
            ):
                file.write(line)
        except OSError as error:
            raise self._failure(error) from error

    def truncate_to(self, step: int) -> None:
        """Keeps the lines with step <= `step`, atomically for each file, and appends after them.

        Damaged and half-written lines are dropped.
        """
        self._rewrite(step)

    def close(self) -> None:
        """Closes both files."""
        for file in self._files:
            file.close()
        self._files = []

    def _failure(self, error: OSError) -> TrainingError:
        return TrainingError(
            f"cannot write {self._jsonl_path} or its .csv: {error.strerror or one_line(error)}; "
            "make room or set the permissions and resume"
        )

    def _rewrite(self, last_step: float) -> None:
        self.close()
        data = read_bytes(self._jsonl_path) if self._jsonl_path.exists() else b""
        kept, records = [], []
        for line in _whole_lines(data):
            record = _parse(line)
            if record is not None and record["step"] <= last_step:
                kept.append(line)
                records.append(record)
        table = ",".join(COLUMNS).encode() + b"\n" + b"".join(map(_csv_line, records))
        try:
            self._jsonl_path.parent.mkdir(parents=True, exist_ok=True)
            for path, content in ((self._jsonl_path, b"".join(kept)), (self._csv_path, table)):
                if not path.exists() or path.read_bytes() != content:
                    write_atomic(path, content)
                # Unbuffered, so that one line is one write and no line is ever held back.
                self._files.append(open(path, "ab", buffering=0))  # noqa: SIM115 (kept open)
        except OSError as error:
            raise self._failure(error) from error

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of a `metrics.jsonl`, or of the one in a run directory, as dicts, oldest first.

    A last line without a newline is still being written and is skipped; null reads as NaN.
    Raises CorruptError naming the first line that is not a metrics line.
    """
    source = Path(path)
    if source.is_dir():
        source = source / JSONL_NAME
    records = []
    for number, line in enumerate(_whole_lines(read_bytes(source)), start=1):
        record = _parse(line)
        if record is None:
            raise CorruptError(
                f"{source}: line {number} is not a metrics line; remove it, or resume the run, "
                "which drops it"
            )
        records.append({key: math.nan if v is None else v for key, v in record.items()})
    return records
