"""A run that is cut and resumed is the run at a stretch, to the bit; what may differ is told."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import numpy as np
import pytest

import treadle
from runs import (
    RESUMED_FILES,
    SMALL,
    assert_same_run,
    checkpoint,
    fail,
    held,
    metrics,
    run,
    snapshot,
    steps_of,
    succeed,
    wait_for,
    write_text,
)
from treadle.backends import cpu
from treadle.data.tokenizer import Tokenizer
from treadle.train.checkpoint import load_checkpoint

# Dropout, accumulation and clipping, so that all the state there is takes part.
FLAGS = (
    *SMALL,
    *("--set", "model.dropout=0.1", "--set", "train.grad_accum=2"),
    *("--set", "optimizer.grad_clip=0.5", "--set", "train.eval_every=20"),
    *("--set", "checkpoint.every=10", "--set", "checkpoint.keep=0"),
)
kernels = pytest.mark.skipif(not cpu.available(), reason="threads belong to the C kernels")
posix = pytest.mark.skipif(os.name == "nt", reason="SIGKILL is POSIX")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture(scope="module")
def stretch(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 60 steps without a stop. No test changes it."""
    out = tmp_path_factory.mktemp("stretch") / "run"
    succeed("train", "--data", text, *FLAGS, "--steps", 60, "--out", out)
    return out


@pytest.fixture
def short(text: Path, tmp_path: Path) -> Path:
    """The first 30 steps of the same run."""
    out = tmp_path / "short"
    succeed("train", "--data", text, *FLAGS, "--steps", 60, "--out", out, "--run-steps", 30)
    return out


def resume(out: Path, *args: object) -> str:
    """Goes on with a run of `text`, whose configuration need not be repeated."""
    text = treadle.load_config(out / "run.json").data.path
    return succeed("train", "--data", text, "--out", out, *args)


# ---------------------------------------------------------------- kills


@posix
@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param((), (), id="1 thread"),
        pytest.param((), ("--threads", 2), id="1 and 2 threads", marks=kernels),
        pytest.param(("--threads", 2), (), id="2 and 1 threads", marks=kernels),
    ],
)
def test_failure_10_killed_and_resumed(
    stretch: Path,
    text: Path,
    tmp_path: Path,
    before: tuple[object, ...],
    after: tuple[object, ...],
) -> None:
    out = tmp_path / "run"
    command = ("train", "--data", text, *FLAGS, "--steps", 60, "--out", out)
    with held("step", 36, *command, *before) as one:
        # The line of step 36 is written beside the next step.
        assert metrics(out)[-1]["step"] == 35
        wait_for(out, 30)
        assert f"in use by process {one.process.pid}" in fail(*command)
        one.process.kill()
        one.finish()
        assert one.process.returncode == -signal.SIGKILL
    assert steps_of(out) == [10, 20, 30]

    said = succeed(*command, *after)

    assert f"resuming at step 30 from {checkpoint(out, 30)}" in said
    assert_same_run(stretch, out, 60)
    for step in (40, 50):
        for name in RESUMED_FILES:
            left, right = checkpoint(stretch, step) / name, checkpoint(out, step) / name
            assert left.read_bytes() == right.read_bytes()
    greedy = ("--prompt", "the cat", "--tokens", 40, "--temperature", 0, "--threads", 1)
    assert run("generate", out, *greedy).out == run("generate", stretch, *greedy).out


def test_stints_are_one_stretch(stretch: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = ("train", "--data", text, *FLAGS, "--steps", 60, "--out", out, "--run-steps", 17)
    for step in (17, 34, 51):
        said = succeed(*command)
        assert f"stopped at step {step} of 60; the same command resumes" in said
        assert checkpoint(out, step).is_dir()
    said = succeed(*command)
    assert "treadle generate" in said and "stopped" not in said
    assert_same_run(stretch, out, 60)


def test_a_finished_run_is_left_as_it_is(short: Path) -> None:
    resume(short)
    before = snapshot(short)
    assert "this run is finished at step 60" in resume(short)
    assert snapshot(short) == before


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_momentum_is_resumed(text: Path, tmp_path: Path, optimizer: str) -> None:
    flags = (*SMALL, "--lr", 0.01, "--steps", 12, "--set", f"optimizer.name={optimizer}")
    succeed("train", "--data", text, *flags, "--out", tmp_path / "one")
    for _ in range(2):
        succeed("train", "--data", text, *flags, "--out", tmp_path / "two", "--run-steps", 6)
    assert_same_run(tmp_path / "one", tmp_path / "two", 12)
    state = load_checkpoint(checkpoint(tmp_path / "one", 12)).optimizer
    assert state is not None
    suffixes = {name.rpartition(".")[2] for name in state}
    assert suffixes == ({"m", "v"} if optimizer == "adamw" else {"momentum"})
    assert all(np.any(array) for array in state.values())


# ---------------------------------------------------------------- the same bytes


def test_equal_runs_write_equal_checkpoints(short: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "again"
    succeed("train", "--data", text, *FLAGS, "--steps", 60, "--out", out, "--run-steps", 30)
    for step in (10, 20, 30):
        assert snapshot(checkpoint(out, step)) == snapshot(checkpoint(short, step))


def test_one_state_saved_twice_is_the_same_bytes(short: Path, tmp_path: Path) -> None:
    model = treadle.load(short, threads=1)
    model.save(tmp_path / "one")
    model.save(tmp_path / "two")
    treadle.load(tmp_path / "one", threads=1).save(tmp_path / "three")
    saved = snapshot(tmp_path / "one")
    assert saved == snapshot(tmp_path / "two") == snapshot(tmp_path / "three")
    best = (checkpoint(short, 20) / "model.safetensors").read_bytes()
    assert saved["model.safetensors"] == best


# ---------------------------------------------------------------- what may differ, and what not


def test_failure_13_another_configuration_is_listed_and_refused(short: Path) -> None:
    before = snapshot(short)
    flags = ("--n-head", 4, "--n-layer", 3, "--seed", 7, "--set", "optimizer.betas=[0.9,0.95]")
    line = fail("train", "--data", treadle.load_config(short / "run.json").data.path, *flags,
                "--out", short)  # fmt: skip
    for difference in (
        "model.n_head: saved 2, wanted 4",
        "model.n_layer: saved 1, wanted 3",
        "train.seed: saved 1337, wanted 7",
        "optimizer.betas: saved [0.9, 0.99], wanted [0.9, 0.95]",
    ):
        assert difference in line
    assert "--out" in line and "n_embd" not in line
    assert snapshot(short) == before


def test_other_data_are_refused(short: Path, tmp_path: Path) -> None:
    before = snapshot(short)
    other = write_text(tmp_path / "other.txt", seed=1)
    line = fail("train", "--data", other, "--out", short)
    assert str(other) in line and f"--out {short}2" in line and "--init-from" not in line
    assert snapshot(short) == before


def test_fewer_steps_than_are_done_are_refused(short: Path) -> None:
    before, text = snapshot(short), treadle.load_config(short / "run.json").data.path
    line = fail("train", "--data", text, "--out", short, "--steps", 20)
    assert "train.steps: 20" in line and "step 30" in line and "--out" in line
    assert snapshot(short) == before


def test_a_given_key_is_told_before_what_follows_from_it(short: Path) -> None:
    text = treadle.load_config(short / "run.json").data.path
    line = fail("train", "--data", text, "--out", short, "--lr", 1e-7)
    assert "optimizer.lr: saved" in line and "min_lr" not in line


def test_a_run_goes_on_from_another_folder(
    short: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    monkeypatch.chdir(text.parent)
    succeed("train", "--data", text.name, *FLAGS, "--steps", 4, "--out", out, "--run-steps", 2)
    assert treadle.load_config(out / "run.json").data.path == str(text)
    monkeypatch.chdir(tmp_path)
    assert "resuming at step 2" in succeed("train", out / "run.json", "--out", out)
    assert "finished at step 4" in succeed("train", "--out", out)


@pytest.mark.parametrize("form", ["file", "folder", "pair"])
def test_a_tokenizer_file_is_found_from_another_folder(
    form: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, words = tmp_path / "run", tmp_path / "words"
    words.mkdir()
    tokenizer = Tokenizer.train_bpe([text.read_text()], 300)
    (words / "tokenizer.json").write_text(tokenizer.to_json())
    for name, content in zip(("vocab.json", "merges.txt"), tokenizer.vocab_merges(), strict=True):
        (words / name).write_text(content)
    given = {
        "file": ("--tokenizer", "words/tokenizer.json"),
        "folder": ("--tokenizer", "words"),
        "pair": ("--vocab", "words/vocab.json", "--merges", "words/merges.txt"),
    }[form]
    monkeypatch.chdir(tmp_path)
    flags = (*FLAGS[: FLAGS.index("--tokenizer")], "--steps", 6, "--threads", 1)
    succeed("train", "--data", text, *flags, *given, "--out", out, "--run-steps", 2)
    monkeypatch.chdir(text.parent)
    assert "resuming at step 2" in succeed("train", "--out", out, "--run-steps", 2)
    # Wherever they are, the same files serve; others do not.
    words.rename(tmp_path / "elsewhere")
    monkeypatch.chdir(tmp_path)
    moved = [str(value).replace("words", "elsewhere") for value in given]
    assert "resuming at step 4" in succeed("train", "--out", out, *moved, "--run-steps", 1)
    other = Tokenizer.train_bpe([text.read_text()], 270)
    (tmp_path / "other.json").write_text(other.to_json())
    if form != "pair":
        told = fail("train", "--out", out, "--tokenizer", "other.json", "--run-steps", 1)
        assert "its tokenizer is not that of" in told and steps_of(out)[-1] == 5


def test_the_same_data_elsewhere_are_the_same(short: Path, stretch: Path, tmp_path: Path) -> None:
    moved = write_text(tmp_path / "moved.txt")
    succeed("train", "--data", moved, "--out", short)
    assert_same_run(stretch, short, 60)


def test_what_may_change_changes(short: Path, stretch: Path) -> None:
    said = resume(
        short,
        *("--device", "numpy", "--set", "train.eval_every=7", "--set", "train.eval_batches=1"),
        *("--set", "train.sample_every=50", "--set", "checkpoint.every=25"),
        *("--set", "checkpoint.keep=1"),
    )
    assert "device: numpy" in said and "sample at step 50" in said
    if cpu.available():
        assert re.search(r"the run began elsewhere \(backend cpu is now numpy, ", said)
    assert [line["step"] for line in metrics(short) if "val_loss" in line] == [
        20, 35, 42, 49, 56, 60,
    ]  # fmt: skip
    assert 60 in steps_of(short) and len(steps_of(short)) <= 2
    ours, theirs = ([line["loss"] for line in metrics(out)] for out in (short, stretch))
    assert ours == pytest.approx(theirs, abs=1e-4)
    assert treadle.load_config(short / "run.json").checkpoint.keep == 1


def test_recomputation_may_change_and_changes_no_bit(short: Path, stretch: Path) -> None:
    resume(short, "--recompute", "block", "--run-steps", 15)
    assert treadle.load_config(short / "run.json").train.recompute == "block"
    resume(short, "--recompute", "gelu")
    assert_same_run(stretch, short, 60)


def test_more_steps_are_exact_under_a_constant_schedule(text: Path, tmp_path: Path) -> None:
    flags = (*FLAGS, "--set", "schedule.name=constant", "--set", "schedule.warmup_steps=4")
    one, two = tmp_path / "one", tmp_path / "two"
    succeed("train", "--data", text, *flags, "--steps", 30, "--out", one)
    succeed("train", "--data", text, *flags, "--steps", 15, "--out", two)
    said = succeed("train", "--data", text, *flags, "--steps", 30, "--out", two)
    assert "train.steps changed" not in said
    for name in RESUMED_FILES:
        left, right = checkpoint(one, 30) / name, checkpoint(two, 30) / name
        assert left.read_bytes() == right.read_bytes()


def test_more_steps_are_announced_under_another_schedule(text: Path, tmp_path: Path) -> None:
    command = ("train", "--data", text, *SMALL, "--out", tmp_path / "run")
    succeed(*command, "--steps", 10)
    said = succeed(*command, "--steps", 20)
    assert "train.steps changed from 10 to 20: the cosine schedule" in said
    rates = [line["lr"] for line in metrics(tmp_path / "run")]
    assert len(rates) == 20 and rates[10] > rates[9]
    assert "train.steps changed" not in succeed(*command, "--steps", 20)


# ---------------------------------------------------------------- where to go on from


def test_resume_never_starts_only_where_there_is_nothing(short: Path, text: Path) -> None:
    before = snapshot(short)
    line = fail("train", "--data", text, *FLAGS, "--out", short, "--resume", "never")
    assert "holds a run already" in line and "--out" in line
    assert snapshot(short) == before
    fresh = short.parent / "fresh"
    flags = (*FLAGS, "--steps", 3, "--resume", "never")
    assert "resuming" not in succeed("train", "--data", text, *flags, "--out", fresh)


def test_resume_from_a_path(short: Path, stretch: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "from 20"
    said = succeed("train", "--data", text, "--out", out, "--resume", checkpoint(short, 20))
    assert f"resuming at step 20 from {checkpoint(short, 20)}" in said
    assert metrics(out) == metrics(stretch)[20:]
    for name in RESUMED_FILES:
        left, right = checkpoint(out, 60) / name, checkpoint(stretch, 60) / name
        assert left.read_bytes() == right.read_bytes()

    whole_run = tmp_path / "from the run"
    said = succeed("train", "--data", text, "--out", whole_run, "--resume", short)
    assert f"resuming at step 30 from {checkpoint(short, 30)}" in said

    # Going back in place would leave newer checkpoints of another history behind.
    line = fail("train", "--data", text, "--out", short, "--resume", checkpoint(short, 20))
    assert "up to step 30" in line
    assert "no such checkpoint" in fail("train", "--data", text, "--out", out, "--resume", "nil")


def test_start_from_weights(short: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "tuned"
    start = checkpoint(short, 30)
    command = ("train", "--data", text, *SMALL, "--steps", 3, "--out", out, "--init-from")
    said = succeed(*command, start)
    assert "starting from the weights" in said and "resuming" not in said
    assert [line["step"] for line in metrics(out)] == [1, 2, 3]
    # The first loss is one that a model from nothing does not have.
    assert metrics(out)[0]["loss"] < metrics(short)[0]["loss"] - 0.3
    assert "this run is finished at step 3" in succeed(*command, start)
    assert "train.init_from" in fail(*command, checkpoint(short, 20))
    assert "train.init_from" in fail(*command, start, "--resume", start)
    misfit = fail("train", "--data", text, *SMALL, "--n-embd", 32, "--out", tmp_path / "misfit",
                  "--init-from", start)  # fmt: skip
    assert "model.n_embd: 32 is given" in misfit and not (tmp_path / "misfit").exists()


# ---------------------------------------------------------------- damage


def test_failure_11_the_optimizer_is_missing(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = ("train", "--data", text, *SMALL, "--steps", 8)
    succeed(*command, "--out", out, "--run-steps", 4)
    (checkpoint(out, 4) / "optimizer.safetensors").unlink()
    before = snapshot(out)
    for args in ((), ("--resume", checkpoint(out, 4))):
        line = fail(*command, "--out", out, *args)
        assert "optimizer.safetensors" in line and "missing" in line and "--init-from" in line
    assert snapshot(out) == before
    said = succeed(*command, "--out", tmp_path / "new", "--init-from", out)
    assert "starting from the weights" in said


@pytest.mark.parametrize("damage", ["cut", "flipped", "no optimizer", "no state"])
def test_a_damaged_newest_checkpoint_is_passed_over(
    short: Path, stretch: Path, damage: str
) -> None:
    newest = checkpoint(short, 30)
    model = newest / "model.safetensors"
    data = model.read_bytes()
    if damage == "cut":
        model.write_bytes(data[: len(data) // 2])
    elif damage == "flipped":
        model.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    elif damage == "no optimizer":
        (newest / "optimizer.safetensors").unlink()
    else:
        (newest / "trainer_state.json").unlink()
    said = resume(short)
    assert f"using {checkpoint(short, 20)}" in said
    assert f"resuming at step 20 from {checkpoint(short, 20)}" in said
    assert_same_run(stretch, short, 60)


def test_half_a_metrics_line_and_later_lines_are_cut(short: Path, stretch: Path) -> None:
    with (short / "metrics.jsonl").open("a") as file:
        file.write('{"step": 31, "epoch": 0, "loss": 1.0}\n{"step": 32, "lo')
    resume(short)
    assert_same_run(stretch, short, 60)
    rows = (short / "metrics.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows] == ["step", *map(str, range(1, 61))]


def test_a_lost_registry_is_rebuilt(short: Path, stretch: Path) -> None:
    (short / "checkpoints.json").unlink()
    resume(short)
    assert_same_run(stretch, short, 60)
    one, two = ((out / "checkpoints.json").read_text() for out in (short, stretch))
    times = re.compile(r'"time": "[^"]*"')
    assert times.sub("", one) == times.sub("", two)
