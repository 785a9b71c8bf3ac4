"""Metrics files, the learning-rate schedules, and what a run prints."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from treadle.errors import CheckpointError, ConfigError, CorruptError, TrainingError
from treadle.train.metrics import ALWAYS, COLUMNS, MetricsWriter, read_metrics
from treadle.train.report import Report, duration, loss_curve, printable
from treadle.train.schedule import SCHEDULES, learning_rate

ROOT = Path(__file__).resolve().parent.parent


def line(step: int, **changes: Any) -> dict[str, Any]:
    base = {
        "step": step,
        "epoch": step // 4,
        "loss": 1 / (step + 2),
        "lr": 1e-3,
        "grad_norm": 0.1 + 0.2,
        "tokens_per_s": 1234.5,
        "step_ms": 1e-7,
    }
    return base | changes


def write(run: Path, *steps: int) -> None:
    with MetricsWriter(run) as writer:
        for step in steps:
            writer.write(**line(step))


def steps_of(run: Path) -> list[int]:
    return [record["step"] for record in read_metrics(run)]


def csv_steps(run: Path) -> list[int]:
    with open(run / "metrics.csv", newline="") as file:
        return [int(row["step"]) for row in csv.DictReader(file)]


# --------------------------------------------------------------------------------------- metrics


def test_both_files_hold_every_number_exactly(tmp_path: Path) -> None:
    all_columns = {"val_loss": math.pi, "epoch": 0.5, "spike": 6.5, "skipped": 2}
    wanted = [line(1), line(2, **all_columns), line(3, loss=5e-324)]
    with MetricsWriter(tmp_path) as writer:
        for record in wanted:
            writer.write(**record)
        assert read_metrics(tmp_path) == wanted  # readable while the run goes on
    assert read_metrics(tmp_path / "metrics.jsonl") == wanted
    raw = (tmp_path / "metrics.jsonl").read_bytes().splitlines()
    assert list(json.loads(raw[0])) == list(ALWAYS)
    assert list(json.loads(raw[1])) == list(COLUMNS)
    with open(tmp_path / "metrics.csv", newline="") as file:
        rows = list(csv.reader(file))
    assert tuple(rows[0]) == COLUMNS
    for row, record in zip(rows[1:], wanted, strict=True):
        assert [float(x) if x else None for x in row] == [record.get(c) for c in COLUMNS]


def test_numbers_that_are_not_finite_stay_valid_json(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write(**line(1, loss=math.nan, grad_norm=math.inf))

    def refuse(name: str) -> None:
        raise AssertionError(name)

    record = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert record["loss"] is None and record["grad_norm"] is None
    assert math.isnan(read_metrics(tmp_path)[0]["loss"])


def test_numpy_numbers_are_taken(tmp_path: Path) -> None:
    import numpy as np

    with MetricsWriter(tmp_path) as writer:
        writer.write(**line(np.int64(3), loss=np.float32(0.1), epoch=np.int64(2)))  # type: ignore[arg-type]
    record = read_metrics(tmp_path)[0]
    assert record["step"] == 3 and record["loss"] == float(np.float32(0.1))


def test_truncate_and_go_on(tmp_path: Path) -> None:
    write(tmp_path, 1, 2, 3, 4, 5)
    whole = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with MetricsWriter(tmp_path) as writer:
        writer.truncate_to(3)
        assert steps_of(tmp_path) == csv_steps(tmp_path) == [1, 2, 3]
        writer.write(**line(4))
        writer.write(**line(5))
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == whole


@pytest.mark.parametrize("step", [0, 99])
def test_truncate_to_nothing_or_to_all(step: int, tmp_path: Path) -> None:
    write(tmp_path, 1, 2)
    with MetricsWriter(tmp_path) as writer:
        writer.truncate_to(step)
    assert steps_of(tmp_path) == csv_steps(tmp_path) == ([] if step == 0 else [1, 2])


@pytest.mark.parametrize("cut", range(1, 40, 3))
def test_half_written_last_line_is_skipped_then_dropped(cut: int, tmp_path: Path) -> None:
    write(tmp_path, 1, 2, 3)
    for name in ("metrics.jsonl", "metrics.csv"):
        data = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(data[:-cut])
    assert steps_of(tmp_path) == [1, 2]
    write(tmp_path, 3, 4)
    assert steps_of(tmp_path) == csv_steps(tmp_path) == [1, 2, 3, 4]


def test_csv_that_missed_a_line_is_made_whole(tmp_path: Path) -> None:
    write(tmp_path, 1, 2, 3)
    whole = (tmp_path / "metrics.csv").read_bytes()
    (tmp_path / "metrics.csv").write_bytes(b"".join(whole.splitlines(keepends=True)[:-1]))
    MetricsWriter(tmp_path).close()
    assert (tmp_path / "metrics.csv").read_bytes() == whole
    (tmp_path / "metrics.csv").unlink()
    MetricsWriter(tmp_path).close()
    assert (tmp_path / "metrics.csv").read_bytes() == whole


@pytest.mark.parametrize(
    "bad", [b"\0\0\0", b"[1]", b'{"loss": 1}', b'{"step": 2, "loss": "x"}', b"[" * 100_000]
)
def test_damaged_line_in_the_middle(bad: bytes, tmp_path: Path) -> None:
    write(tmp_path, 1, 2, 3)
    path = tmp_path / "metrics.jsonl"
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([lines[0], bad, lines[2]]) + b"\n")
    with pytest.raises(CorruptError, match=r"metrics\.jsonl: line 2"):
        read_metrics(tmp_path)
    write(tmp_path, 4)
    assert steps_of(tmp_path) == csv_steps(tmp_path) == [1, 3, 4]


def test_truncation_killed_halfway_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 1, 2, 3)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}

    class Kill(BaseException):
        pass

    def killed(*_: object) -> None:
        raise Kill

    with MetricsWriter(tmp_path) as writer:
        monkeypatch.setattr(os, "replace", killed)
        with pytest.raises(Kill):
            writer.truncate_to(1)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainingError, match=r"cannot write .*metrics\.jsonl.*resume"):
        MetricsWriter(tmp_path / "file")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_disk_full_is_named(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        full = open("/dev/full", "ab", buffering=0)  # noqa: SIM115 (closed by the writer)
        writer._files[0].close()
        writer._files[0] = full
        with pytest.raises(TrainingError, match="No space left on device; make room"):
            writer.write(**line(1))


def test_missing_metrics_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl: No such file"):
        read_metrics(tmp_path)


# -------------------------------------------------------------------------------------- schedule

KEYS: dict[str, Any] = {"lr": 1.0, "min_lr": 0.1, "warmup_steps": 4, "steps": 12}


@pytest.mark.parametrize("name", SCHEDULES)
def test_warmup_rises_evenly_to_lr(name: str) -> None:
    rates = [learning_rate(step, name=name, **KEYS) for step in range(5)]
    assert rates == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0], abs=1e-15)


@pytest.mark.parametrize(
    ("name", "quarter", "half", "end"),
    [
        ("cosine", 0.55 + 0.45 * math.sqrt(0.5), 0.55, 0.1),
        ("linear", 0.775, 0.55, 0.1),
        ("constant", 1.0, 1.0, 1.0),
    ],
)
def test_decay(name: str, quarter: float, half: float, end: float) -> None:
    rates = [learning_rate(step, name=name, **KEYS) for step in (6, 8, 12, 1000)]
    assert rates == pytest.approx([quarter, half, end, end], abs=1e-15)


@pytest.mark.parametrize("name", SCHEDULES)
def test_warmup_as_long_as_the_run_and_no_warmup(name: str) -> None:
    assert learning_rate(0, name=name, **KEYS | {"warmup_steps": 0}) == 1.0
    for step in range(14):
        rate = learning_rate(step, name=name, **KEYS | {"warmup_steps": 12})
        assert 0.0 < rate <= 1.0


def test_unknown_schedule_is_named() -> None:
    with pytest.raises(ConfigError, match="cosine, linear, constant, got 'step'"):
        learning_rate(0, name="step", **KEYS)


# ---------------------------------------------------------------------------------------- report


class Stream(io.TextIOWrapper):
    """A stream in memory with an encoding, that says whether it is a terminal."""

    def __init__(self, encoding: str = "utf-8", terminal: bool = False) -> None:
        super().__init__(io.BytesIO(), encoding=encoding, newline="\n")
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal

    def text(self) -> str:
        self.flush()
        self.seek(0)
        return self.read()


def report(stream: Stream, steps: int = 30, **options: Any) -> str:
    with Report(steps, stream=stream, **options) as out:
        for step in range(out.start + 1, steps + 1):
            val = 2.5 if step == 15 else None
            out.step(step, loss=3.0, lr=1e-3, tokens_per_s=12345.6, val_loss=val)
        out.say("sample: \x1b[31mred\x07 \x9b [bold]ñ[/bold]\tend")
    return stream.text()


@pytest.mark.parametrize(("steps", "lines"), [(30, 3), (400, 40), (4000, 40), (4030, 41)])
def test_a_run_of_any_length_has_about_40_plain_lines(steps: int, lines: int) -> None:
    stream = Stream()
    out = Report(steps, stream=stream)
    for step in range(1, steps + 1):
        out.step(step, loss=3.0, lr=1e-3, tokens_per_s=1.0)
    assert stream.text().count("\n") == lines


def test_plain_lines_once_an_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    text = report(Stream(), every=10)
    lines = text.splitlines()
    assert [x.split("/")[0] for x in lines[:-1]] == ["step 10", "step 15", "step 20", "step 30"]
    assert "loss 3.0000" in lines[0] and "lr 1.00e-03" in lines[0]
    assert "12,346 tok/s" in lines[0] and "ETA 0:00" in lines[0]
    assert ["val 2.5000" in x for x in lines[:-1]] == [False, True, False, False]
    assert lines[-1] == "sample: \\x1b[31mred\\x07 \\x9b [bold]ñ[/bold]\tend"
    assert all(c.isprintable() or c in "\n\t" for c in text)


def test_terminal_shows_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    text = report(Stream(terminal=True))
    assert "30/30" in text and "val 2.5000" in text and "\x1b[" in text
    assert "[bold]ñ[/bold]" in text and "\x1b[31m" not in text and "\\x1b[31m" in text


def test_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b" not in report(Stream(terminal=True))


def test_resumed_run_counts_from_its_start() -> None:
    lines = report(Stream(), start=20, every=5).splitlines()
    assert [x.split("/")[0] for x in lines[:-1]] == ["step 25", "step 30"]


def test_encoding_that_is_not_utf8(monkeypatch: pytest.MonkeyPatch) -> None:
    for terminal in (False, True):
        monkeypatch.setenv("TERM", "xterm")
        stream = Stream("ascii", terminal)
        assert "[bold]?[/bold]" in report(stream)
        out = Report(1, stream=(stream := Stream("ascii", terminal)))
        out.curve(RUN)
        assert "training loss" in stream.text() and stream.text().isascii()


def test_closed_pipe_does_not_stop_the_run() -> None:
    class Closed(Stream):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    Report(1, stream=Closed()).say("hello")


def test_rich_is_loaded_for_terminals_only() -> None:
    code = (
        "import sys; from treadle.train.report import Report\n"
        "with Report(1) as out: out.step(1, loss=1.0, lr=1.0, tokens_per_s=1.0)\n"
        "assert 'rich' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("step 1/1  loss")


def test_duration_and_printable() -> None:
    assert [duration(s) for s in (0, 59.6, 3599, 3600, 90_061)] == [
        "0:00",
        "1:00",
        "59:59",
        "1:00:00",
        "25:01:01",
    ]
    assert printable("a\x00b\x7f\r\n") == "a\\x00b\\x7f\\x0d\n"


RUN = [{"step": step, "loss": 5.0 - step / 25} for step in range(101)]
RUN[50] |= {"val_loss": 4.0}


def test_curve_is_drawn_where_the_losses_are() -> None:
    text = loss_curve(RUN, 112, 20, unicode=False)
    lines = text.splitlines()
    assert len(lines) == 20 and max(map(len, lines)) <= 112 and text.isascii()
    assert lines[0].split()[0] == "5" and lines[16].split()[0] == "1"
    rows = [x[11:] for x in lines[:17]]
    assert rows[0].startswith("*") and rows[-1].endswith("*") and len(rows[-1]) == 101
    left = [row.index("*") for row in rows if "*" in row]
    assert left == sorted(left) and len(left) == 17
    row, column = next((i, x.index("o")) for i, x in enumerate(rows) if "o" in x)
    assert column == 50 and row == round((5 - 4) / 4 * 16)
    assert "step 100" in lines[18] and lines[18].split()[0] == "0"
    assert lines[19].split("   ")[-1] == "o validation loss"


def test_braille_curve_is_finer_and_coloured_on_request() -> None:
    text = loss_curve(RUN, 60, 20)
    drawn = {c for c in text if 0x2800 < ord(c) < 0x2900}
    assert len(drawn) > 3 and text.count("●") == 2 and "\x1b" not in text
    assert "\x1b[" in loss_curve(RUN, 60, 20, color=True)


@pytest.mark.parametrize("unicode", [True, False])
@pytest.mark.parametrize(
    "records",
    [
        [],
        [{"step": 1, "loss": math.nan}],
        [{"step": 1, "loss": 2.0}],
        [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 2.0}],
        [{"step": 1, "loss": 2.0}, {"step": 2, "loss": math.nan, "val_loss": 1.0}],
        [{"step": 0, "val_loss": 1.0}],
        [{"step": s, "loss": 1e30 if s == 5 else 1e-30} for s in range(10)],
    ],
)
def test_curve_of_odd_runs(records: list[dict[str, Any]], unicode: bool) -> None:
    finite = any(math.isfinite(r.get("loss", 1.0)) for r in records)
    for width, height in ((72, 14), (1, 1), (20, 5)):
        text = loss_curve(records, width, height, unicode=unicode)
        assert ("step" in text) if finite else text == "no finite loss to draw"


def test_no_color_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for no_color, expected in (("1", False), ("", True)):
        monkeypatch.setenv("NO_COLOR", no_color)
        stream = Stream(terminal=True)
        Report(1, stream=stream).curve(RUN)
        assert ("\x1b[" in stream.text()) is expected
