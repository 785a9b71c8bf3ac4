"""What a person sees of runs: evaluation, the display, samples, TensorBoard, plots, reports."""

from __future__ import annotations

import io
import math
import re
import struct
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from runs import (
    BUSY,
    EVERYTHING,
    checkpoint,
    fail,
    metrics,
    snapshot,
    succeed,
    write_text,
)
from treadle.data.shards import write_tokens
from treadle.train.curves import points, smoothed, thinned, ticks
from treadle.train.report import Report
from treadle.train.samples import append_sample, cut_samples, read_samples


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture(scope="module")
def twin(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with everything switched on that nobody interrupts. No test changes it."""
    out = tmp_path_factory.mktemp("twin") / "run"
    succeed("train", "--data", text, *EVERYTHING, "--out", out)
    return out


# ---------------------------------------------------------------- evaluation


def rows_of(said: str) -> dict[str, str]:
    pairs = (re.split(r"  +", line, maxsplit=1) for line in said.splitlines())
    return dict(pairs)


def test_eval_gives_the_loss_of_the_run(twin: Path, text: Path) -> None:
    found = rows_of(succeed("eval", twin, "--data", text, "--threads", 1))
    dataset = treadle.load_data(text, "char")
    best = treadle.load(twin, threads=1).loss(dataset.val)
    assert found["loss"] == f"{best:.4f} nats per token"
    assert found["tokens predicted"] == f"{len(dataset.val) - 1:,}"
    assert float(found["perplexity"]) == pytest.approx(math.exp(best), rel=1e-3)
    # A character of this text is one byte.
    assert float(found["bits per byte"]) == pytest.approx(best / math.log(2), abs=1e-4)
    last = rows_of(succeed("eval", checkpoint(twin, 40), "--data", text, "--threads", 1))
    assert last["loss"].split()[0] == f"{metrics(twin)[-1]['val_loss']:.4f}"


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_eval_is_exact_to_the_last_window(twin: Path, tmp_path: Path, batch_size: int) -> None:
    """Against one next-token distribution after the other."""
    short = tmp_path / "short.txt"
    short.write_text("the cat sat on a red mat and his old dog ran far an")
    model = treadle.load(twin, device="numpy")
    assert model.tokenizer is not None
    ids = [int(i) for i in model.tokenizer.encode(short.read_text())]
    block, nats = model.model.block_size, 0.0
    assert (len(ids) - 1) % block not in (0, block - 1)
    decoder = model._decoder_of(1, "fp32")
    for at in range(1, len(ids)):
        window = ids[(at - 1) // block * block : at]
        logits = decoder.logits([window])[0].astype(np.float64)
        nats += float(np.log(np.exp(logits - logits.max()).sum()) + logits.max() - logits[ids[at]])
    flags = ("--split", "all", "--batch-size", batch_size, "--device", "numpy")
    found = rows_of(succeed("eval", twin, "--data", short, *flags))
    assert float(found["loss"].split()[0]) == pytest.approx(nats / (len(ids) - 1), abs=1.01e-4)
    assert found["bytes of text"] == str(len(ids) - 1)


def test_eval_of_splits_adds_up(twin: Path, text: Path, tmp_path: Path) -> None:
    """On token files, whose splits are apart."""
    dataset = treadle.load_data(text, "char")
    assert dataset.tokenizer is not None
    for name, tokens in (("train", dataset.train[:900]), ("val", dataset.val[:333])):
        write_tokens(tmp_path / f"{name}.bin", tokens, dataset.vocab_size)
    (tmp_path / "tokenizer.json").write_text(dataset.tokenizer.to_json(), encoding="utf-8")
    found = {
        split: rows_of(succeed("eval", twin, "--data", tmp_path, "--split", split, "--threads", 1))
        for split in ("train", "val", "all")
    }
    counts = {split: int(f["tokens predicted"].replace(",", "")) for split, f in found.items()}
    assert counts == {"train": 899, "val": 332, "all": 899 + 332}
    losses = {split: float(f["loss"].split()[0]) for split, f in found.items()}
    mean = (losses["train"] * 899 + losses["val"] * 332) / counts["all"]
    assert losses["all"] == pytest.approx(mean, abs=2e-4)


def test_bytes_are_counted_without_end_of_text(tmp_path: Path) -> None:
    from treadle.cli.eval import count_bytes

    tokenizer = treadle.Tokenizer.byte()
    words = "año <|endoftext|> ≤ x"
    ids = tokenizer.encode(words)
    assert tokenizer.eos_id in ids
    assert count_bytes(ids, tokenizer) == len(words.replace("<|endoftext|>", "").encode())


def test_eval_refuses_what_cannot_be(twin: Path, text: Path, tmp_path: Path) -> None:
    assert "one of val, train, all" in fail("eval", twin, "--data", text, "--split", "test")
    assert "no such file" in fail("eval", twin, "--data", tmp_path / "nil")
    strange = tmp_path / "strange.txt"
    strange.write_text("the cat Ω sat")
    assert "Ω" in fail("eval", twin, "--data", strange)
    tiny = tmp_path / "tiny.txt"
    tiny.write_text("the cat")
    assert "--split all" in fail("eval", twin, "--data", tiny)

    tokens = tmp_path / "tokens"
    tokens.mkdir()
    write_tokens(tokens / "train.bin", np.arange(300) % 200, 200)
    assert "200 token ids" in fail("eval", twin, "--data", tokens)
    write_tokens(tokens / "train.bin", np.arange(300) % 5, 5)
    other = treadle.Tokenizer.char("abcde")
    (tokens / "tokenizer.json").write_text(other.to_json(), encoding="utf-8")
    assert "another tokenizer" in fail("eval", twin, "--data", tokens)


def test_eval_of_a_file_of_weights_alone(twin: Path, text: Path, tmp_path: Path) -> None:
    model = tmp_path / "model.safetensors"
    model.write_bytes((checkpoint(twin, 40) / model.name).read_bytes())
    assert "loss" in rows_of(succeed("eval", model, "--data", text, "--threads", 1))


# ---------------------------------------------------------------- the display


class Terminal(io.TextIOWrapper):
    """A terminal in memory."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8", newline="\n")

    def isatty(self) -> bool:
        return True

    def text(self) -> str:
        self.flush()
        self.seek(0)
        return self.read()


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    for name, value in (("TERM", "xterm"), ("COLUMNS", "100"), ("LINES", "40"), ("NO_COLOR", "1")):
        monkeypatch.setenv(name, value)
    return Terminal()


def test_the_display_shows_every_number_and_the_last_sample(terminal: Terminal) -> None:
    with Report(100, stream=terminal, flops_per_token=3e6, memory=5 << 20) as out:
        numbers: dict[str, Any] = {"lr": 1e-3, "tokens_per_s": 2000.0, "grad_norm": 0.25}
        out.step(1, loss=4.0, **numbers)
        out.step(2, loss=2.0, val_loss=2.5, **numbers)
        out.sample(2, "first")
        out.say("said above")
        out.step(99, loss=None, skipped=3, **(numbers | {"grad_norm": None}))
        out.step(100, loss=1.0, val_loss=2.25, **numbers)
        out.sample(100, "second \x1b[31m[bold]\n" + "line\n" * 50)
    said = terminal.text()
    last = said[said.rindex("step 100/100") :]
    for shown in (
        *("100%", "loss 1.0000", "val 2.2500", "lr 1.00e-03", "grad norm 0.2500", "skipped 3"),
        *("2,000 tok/s", "6.0 GFLOP/s", "memory 5.0 MiB", "sample at step 100", "ETA 0:00"),
        "second \\x1b[31m[bold]",
    ):
        assert shown in last, shown
    smoothed_loss = re.search(r"smoothed (\S+)", last)
    assert smoothed_loss is not None and 1.0 < float(smoothed_loss[1]) < 4.0
    assert last.count("line") <= 6 and "first" not in last and "said above" in said
    assert "\x1b[31m" not in said


def test_plain_lines_have_the_sample_and_what_is_not_finite() -> None:
    stream = io.StringIO()
    with Report(10, stream=stream, every=1) as out:
        out.step(1, loss=None, lr=1e-3, tokens_per_s=1.0)
        out.sample(1, "a\nb")
    assert "loss not finite" in stream.getvalue()
    assert stream.getvalue().endswith("sample at step 1:\na\nb\n")


# ---------------------------------------------------------------- samples


def test_samples_are_read_and_cut(tmp_path: Path) -> None:
    assert read_samples(tmp_path) == []
    written = [(5, "one\n\ntwo"), (10, ""), (15, "--- step x\n"), (20, "ñ\r\n")]
    for step, sample in written:
        append_sample(tmp_path, step, sample)
    assert read_samples(tmp_path) == written
    cut_samples(tmp_path, 10)
    assert read_samples(tmp_path) == written[:2]
    append_sample(tmp_path, *written[2])
    cut_samples(tmp_path, 15)
    assert read_samples(tmp_path) == written[:3]


# ---------------------------------------------------------------- TensorBoard


def events_of(run_dir: Path) -> list[Any]:
    """The events of all files of a run, in the order of writing."""
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for path in sorted((run_dir / "tensorboard").iterdir()):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            found.append(Event.FromString(data[at + 12 : at + 12 + length]))
            at += length + 16
    return found


def test_event_files_hold_the_metrics_and_the_samples(twin: Path) -> None:
    scalars: dict[str, list[tuple[int, float]]] = {}
    texts = []
    for event in events_of(twin):
        for value in event.summary.value:
            if value.HasField("simple_value"):
                scalars.setdefault(value.tag, []).append((event.step, value.simple_value))
            else:
                texts.append((event.step, value.tensor.string_val[0].decode()))
    lines = metrics(twin)
    for column, tag in (("loss", "loss/train"), ("val_loss", "loss/validation"), ("lr", "lr")):
        wanted = [(line["step"], line[column]) for line in lines if column in line]
        assert scalars[tag] == [(step, pytest.approx(value)) for step, value in wanted]
    assert [x for x, _ in scalars["skipped"]] == [x["step"] for x in lines if "skipped" in x]
    assert [step for step, _ in texts] == [10, 20, 30, 40]
    assert texts[0][1].startswith("    ")


def test_event_files_of_a_resumed_run_replace_later_steps(text: Path, tmp_path: Path) -> None:
    command = ("train", "--data", text, *BUSY, "--steps", 10, "--tensorboard")
    succeed(*command, "--out", tmp_path, "--run-steps", 5)
    files = set((tmp_path / "tensorboard").iterdir())
    time.sleep(1.1)  # their names hold the second
    succeed("train", "--out", tmp_path)
    (added,) = set((tmp_path / "tensorboard").iterdir()) - files
    starts = [e.step for e in events_of(tmp_path) if e.HasField("session_log")]
    assert starts == [1, 6] and added.stat().st_size
    before = snapshot(tmp_path)
    succeed("train", "--out", tmp_path)  # nothing is left to do
    assert snapshot(tmp_path) == before


def test_packages_that_are_missing_are_named(
    twin: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("tensorboardX", "matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    line = fail("train", "--data", text, *BUSY, "--tensorboard", "--out", tmp_path)
    assert "pip install 'treadle[tensorboard]'" in line
    assert "pip install 'treadle[plot]'" in fail("plot", twin, "-o", tmp_path / "x.png")


# ---------------------------------------------------------------- plots


BEGINS = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}


@pytest.mark.parametrize(("suffix", "x"), [("png", "step"), ("svg", "tokens"), ("pdf", "minutes")])
def test_plots_compare_runs(twin: Path, text: Path, tmp_path: Path, suffix: str, x: str) -> None:
    other, target = tmp_path / "other", tmp_path / f"loss.{suffix}"
    succeed("train", "--data", text, *BUSY, "--steps", 2, "--out", other)
    assert f"wrote {target}" in succeed("plot", twin, other, "-o", target, "--x", x)
    assert target.read_bytes().startswith(BEGINS[suffix])


def test_places_on_the_axes() -> None:
    from treadle.train.plot import _places

    lines = [{"step": step, "tokens_per_s": 1000.0, "step_ms": 30_000.0} for step in (5, 6, 7)]
    assert _places(lines, "step") == {5: 5.0, 6: 6.0, 7: 7.0}
    assert _places(lines, "tokens") == {5: 30_000.0, 6: 60_000.0, 7: 90_000.0}
    assert _places(lines, "minutes") == {5: 0.5, 6: 1.0, 7: 1.5}


def test_plots_refuse_what_cannot_be(twin: Path, tmp_path: Path) -> None:
    assert "one of step, tokens, minutes" in fail("plot", twin, "--x", "hours")
    assert "metrics.jsonl" in fail("plot", tmp_path, "-o", tmp_path / "x.png")
    assert "x.docx" in fail("plot", twin, "-o", tmp_path / "x.docx")
    assert "nil" in fail("plot", twin, "-o", tmp_path / "nil" / "x.png")
    (tmp_path / "metrics.jsonl").write_text("")
    assert "no losses yet" in fail("plot", tmp_path, "-o", tmp_path / "x.png")


# ---------------------------------------------------------------- reports


class Page(HTMLParser):
    """The words of a page, its tags, and whether they are closed in order."""

    VOID = ("meta",)

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def report_of(run_dir: Path, target: Path) -> tuple[str, Page]:
    assert succeed("report", run_dir, "-o", target) == f"wrote {target}\n"
    text = target.read_text(encoding="utf-8")
    return text, Page(text)


def test_a_report_is_one_whole_page(twin: Path, tmp_path: Path) -> None:
    text, page = report_of(twin, tmp_path / "report.html")
    assert not re.search(r"https?://|@import|\bsrc=|href=|<script", text)
    headings = {page.words[i] for i, word in enumerate(page.words)}
    assert headings >= {
        "Loss, nats per token", "Learning rate", "Norm of the gradient, before clipping",
        "Tokens a second", "Samples", "Checkpoints", "Settings", "Environment",
    }  # fmt: skip
    shown = " ".join(page.words)
    lines = metrics(twin)
    best = min(line["val_loss"] for line in lines if "val_loss" in line)
    skipped = max(line["skipped"] for line in lines if "skipped" in line)
    for part in (f"{best:.4f}", "finished", "train.spike_zscore", "latest", "numpy"):
        assert part in shown, part
    assert f"<b>{skipped}</b><span>updates left out" in text
    marks = [attributes for tag, attributes in page.tags if tag == "circle"]
    assert len(marks) == len({line["step"] for line in lines if "val_loss" in line})
    for attributes in marks:
        assert 0 < float(attributes["cx"] or 0) < 760 and 0 < float(attributes["cy"] or 0) < 300
    assert read_samples(twin)[-1][1].split("\n")[0] in shown


def test_a_report_escapes_and_stays_small(twin: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "<b>run"
    run_dir.mkdir()
    (run_dir / "run.json").write_bytes((twin / "run.json").read_bytes())
    append_sample(run_dir, 1, "<script>alert(1)</script> & \x1b[31m")
    line = '{"step": %d, "epoch": 0, "loss": %r, "lr": 1e-3, "grad_norm": null, '
    line += '"tokens_per_s": 1.0, "step_ms": 1.0}\n'
    losses = (5.0 + math.sin(i) if i != 700 else 1e9 for i in range(1, 20_001))
    (run_dir / "metrics.jsonl").write_text(
        "".join(line % (i, loss) for i, loss in enumerate(losses, start=1))
    )
    text, page = report_of(run_dir, tmp_path / "r.html")
    assert "<script" not in text and "&lt;script&gt;" in text and "\x1b" not in text
    assert len(text) < 200_000
    assert "&lt;b&gt;run" in text and "Checkpoints" not in page.words
    # One loss of a billion does not flatten the others.
    ticks_shown = [w for w in page.words if re.fullmatch(r"[\d.]+", w)]
    assert "5" in ticks_shown or "5.5" in ticks_shown


def test_a_report_of_a_run_that_goes_on(text: Path, tmp_path: Path) -> None:
    flags = (*BUSY, "--steps", 50, "--out", tmp_path)
    succeed("train", "--data", text, *flags, "--run-steps", 5)
    (checkpoint(tmp_path, 5) / "model.safetensors").unlink()
    succeed("report", tmp_path)
    shown = " ".join(Page((tmp_path / "report.html").read_text(encoding="utf-8")).words)
    assert "at step 5 of 50" in shown and "damaged: " in shown


def test_reports_refuse_what_cannot_be(twin: Path, tmp_path: Path) -> None:
    assert "not a run directory" in fail("report", tmp_path)
    assert "cannot write" in fail("report", twin, "-o", tmp_path / "nil" / "r.html")


# ---------------------------------------------------------------- curves


def test_smoothed_curves_follow_and_are_never_ahead() -> None:
    falling = [(float(i), 100.0 - i) for i in range(1, 101)]
    means = smoothed(falling)
    assert [x for x, _ in means] == [x for x, _ in falling]
    assert all(y >= true for (_, y), (_, true) in zip(means, falling, strict=True))
    assert means[0] == falling[0] and means[-1][1] == pytest.approx(falling[-1][1] + 9.5)
    assert smoothed([]) == []


def test_points_and_groups() -> None:
    lines = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": math.nan}, {"step": 3}]
    assert points(lines, "loss") == [(1.0, 2.0)]
    groups = thinned([(float(i), float(i % 3)) for i in range(9)], 3)
    assert groups == [(1.0, 1.0, 0.0, 2.0), (4.0, 1.0, 0.0, 2.0), (7.0, 1.0, 0.0, 2.0)]


@pytest.mark.parametrize(
    ("low", "high", "wanted"),
    [
        (0.0, 1.0, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (2.3, 4.2, [2.5, 3.0, 3.5, 4.0]),
        (1.0, 600.0, [100.0, 200.0, 300.0, 400.0, 500.0, 600.0]),
        (5.0, 5.0, [5.0]),
        (1e-5, 3e-3, [0.0005, 0.001, 0.0015, 0.002, 0.0025, 0.003]),
    ],
)
def test_ticks_are_round(low: float, high: float, wanted: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(wanted)
