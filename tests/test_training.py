"""Training as a person meets it: what it says, what it leaves, and what happens when it goes wrong.

The numbers in the names of tests are those of the list of failures that we promise to handle.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from runs import (
    RESUMED_FILES,
    ROOT,
    SMALL,
    TIMEOUT,
    TIMES,
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
from treadle import models
from treadle.data.sampler import eval_windows
from treadle.data.shards import write_tokens
from treadle.errors import BackendError
from treadle.train import trainer
from treadle.train.checkpoint import load_checkpoint
from treadle.train.session import Session
from treadle.train.trainer import Trainer

FLAGS = (
    *SMALL,
    *("--set", "model.dropout=0.1", "--set", "train.grad_accum=2"),
    *("--set", "train.eval_every=10", "--set", "checkpoint.every=5", "--steps", "20"),
)
posix = pytest.mark.skipif(os.name == "nt", reason="Windows has other signals")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture(scope="module")
def twin(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nobody interrupts. No test changes it."""
    out = tmp_path_factory.mktemp("twin") / "run"
    succeed("train", "--data", text, *FLAGS, "--out", out)
    return out


# ---------------------------------------------------------------- a run


def test_failure_18_the_start_says_where_it_runs(text: Path, tmp_path: Path) -> None:
    said = succeed("train", "--data", text, *FLAGS, "--steps", 1, "--out", tmp_path / "run")
    kernels = r"device: cpu, (baseline|avx2|avx512|avx512bf16|neon), 1 thread \("
    assert re.search(rf"^({kernels}|device: numpy )", said)
    assert re.search(r"model: gpt2, [\d,]+ parameters\n", said)
    assert re.search(r"data: [\d,]+ training and [\d,]+ validation tokens, vocabulary \d+\n", said)
    assert re.search(r"run: 1 steps of 64 tokens, 0.\d\d epochs; peak memory \d+\.\d MiB\n", said)


def test_the_end_compares_with_frequencies(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    said = succeed("train", "--data", text, *FLAGS, "--lr", 0.01, "--steps", 60, "--out", out)
    found = re.search(r"validation loss (\S+); guessing by frequency alone: (\S+)\n", said)
    assert found is not None and float(found[1]) < float(found[2])
    assert f"checkpoint: {checkpoint(out, 60)}\n" in said
    assert f"generate text with: treadle generate {out} --prompt TEXT\n" in said
    assert f"{metrics(out)[-1]['val_loss']:.4f}" == found[1]
    assert "turned upward" not in said


def test_the_end_says_that_validation_turned_upward(text: Path, tmp_path: Path) -> None:
    # A model without regularisation on few windows: it learns them by heart.
    short, out = write_text(tmp_path / "short.txt", words=24), tmp_path / "run"
    flags = ("--set", "train.eval_every=20", "--set", "data.val_fraction=0.4", "--lr", 0.02)
    command = ("train", "--data", short, *SMALL, *flags, "--steps", 120, "--out", out)
    succeed(*command, "--run-steps", 100)  # the lowest loss is in the stint before
    said = succeed(*command)
    losses = {m["step"]: m["val_loss"] for m in metrics(out) if "val_loss" in m}
    lowest = min(losses, key=lambda step: losses[step])
    assert lowest < 100
    assert (
        f"validation turned upward: it was lowest, {losses[lowest]:.4f}, at step {lowest}" in said
    )


def test_metrics_have_every_key_and_the_epoch(text: Path, tmp_path: Path) -> None:
    short, out = write_text(tmp_path / "short.txt", words=60), tmp_path / "run"
    succeed("train", "--data", short, *FLAGS, "--out", out)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    always = ["step", "epoch", "loss", "lr", "grad_norm", *TIMES]
    assert [line["step"] for line in lines] == list(range(1, 21))
    for line in lines:
        assert list(line) == always + (["val_loss"] if line["step"] in (10, 20) else [])
    train = treadle.load_data(short, "char").train
    windows = (len(train) - 1) // 16
    assert [line["epoch"] for line in lines] == [4 * step // windows for step in range(20)]
    assert lines[-1]["epoch"] >= 2
    table = (out / "metrics.csv").read_text().splitlines()
    assert table[0].split(",") == [*always, "val_loss", "spike", "skipped"] and len(table) == 21


def test_the_checkpoint_holds_what_was_trained(twin: Path) -> None:
    assert steps_of(twin)[-3:] == [10, 15, 20]
    index = json.loads((twin / "checkpoints.json").read_text())
    assert index["latest"] == "checkpoints/step-00000020"
    by_step = {entry["step"]: entry for entry in index["checkpoints"]}
    lines = {line["step"]: line for line in metrics(twin)}
    assert set(by_step) == set(steps_of(twin))
    for step, entry in by_step.items():
        assert entry["train_loss"] == lines[step]["loss"]
        assert entry["val_loss"] == lines[step].get("val_loss")
    evaluated = {step: entry["val_loss"] for step, entry in by_step.items() if entry["val_loss"]}
    best = min(evaluated, key=lambda step: evaluated[step])
    assert index["best"] == f"checkpoints/step-{best:08d}"


def test_a_stint_that_ends_with_an_evaluation_keeps_its_loss(text: Path, tmp_path: Path) -> None:
    command = ("train", "--data", text, *FLAGS, "--set", "checkpoint.every=0")
    succeed(*command, "--run-steps", 10, "--out", tmp_path)
    state = load_checkpoint(checkpoint(tmp_path, 10)).state
    assert state is not None and state["val_loss"] == metrics(tmp_path)[-1]["val_loss"]


def test_the_final_loss_is_that_of_the_whole_split(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    succeed("train", "--data", text, *FLAGS, "--set", "train.eval_batches=1", "--out", out)
    val = treadle.load_data(text, "char").val
    model = treadle.load(checkpoint(out, 20), threads=1)
    assert metrics(out)[-1]["val_loss"] == pytest.approx(model.loss(val), abs=1e-5)


@pytest.mark.parametrize("grad_accum", [2, 4])
def test_accumulation_does_not_change_a_run(text: Path, tmp_path: Path, grad_accum: int) -> None:
    """Nor what is evaluated, dropout and the last, partial batch included."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    flags = (*FLAGS, "--set", "train.eval_batches=3")
    for out, parts_of_a_step in ((whole, 1), (parts, grad_accum)):
        accumulation = ("--set", f"train.grad_accum={parts_of_a_step}")
        succeed("train", "--data", text, *flags, *accumulation, "--out", out)
    for one, other in zip(metrics(whole), metrics(parts), strict=True):
        assert one == pytest.approx(other, abs=2e-5)


def test_steps_0_still_leaves_a_model(text: Path, tmp_path: Path) -> None:
    succeed("train", "--data", text, *SMALL, "--steps", 0, "--out", tmp_path)
    assert steps_of(tmp_path) == [0]
    assert len(succeed("generate", tmp_path, "--tokens", 5, "--threads", 1)) == 5 + len("\n")


# ---------------------------------------------------------------- data


@pytest.mark.parametrize("length", [50, 64])
def test_failure_1_a_corpus_shorter_than_the_context(
    tmp_path: Path, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "build", lambda *a, **k: pytest.fail("a model was built"))
    short = tmp_path / "short.txt"
    short.write_text("ab" * (length // 2))
    line = fail("train", "--data", short, "--block-size", 64, "--out", tmp_path / "run")
    assert f"{length} tokens" in line and "64" in line and "65" in line


def test_failure_1_one_token_more_than_the_context_trains(tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("ab" * 32 + "a")
    flags = (*SMALL, "--block-size", 64, "--steps", 3)
    said = succeed("train", "--data", short, *flags, "--out", tmp_path / "run")
    assert "validation is off" in said and len(metrics(tmp_path / "run")) == 3


def test_token_files_without_a_tokenizer_train(tmp_path: Path) -> None:
    data = tmp_path / "tokens"
    data.mkdir()
    ids = np.random.default_rng(0).integers(0, 40, 500)
    write_tokens(data / "train.bin", ids[:400], 40)
    write_tokens(data / "val.bin", ids[400:], 40)
    flags = (*SMALL, "--tokenizer", "auto", "--set", "train.sample_every=2", "--steps", 4)
    said = succeed("train", "--data", data, *flags, "--out", tmp_path / "run")
    assert "vocabulary 40" in said and "sample" not in said
    assert "--tokenizer" in fail("generate", tmp_path / "run")


# ---------------------------------------------------------------- interruptions


@posix
@pytest.mark.parametrize(
    ("moment", "number", "stopped_at"),
    [
        pytest.param("step", 7, 8, id="in mid-step"),
        pytest.param("accumulate", 12, 13, id="in mid-accumulation"),
        pytest.param("evaluate", 1, 10, id="in evaluation"),
        pytest.param("evaluate", 2, 20, id="in the final evaluation"),
    ],
)
def test_failure_15_ctrl_c_once(
    twin: Path, text: Path, tmp_path: Path, moment: str, number: int, stopped_at: int
) -> None:
    out = tmp_path / "run"
    command = ("train", "--data", text, *FLAGS, "--out", out)
    with held(moment, number, *command) as interrupted:
        interrupted.process.send_signal(signal.SIGINT)
        interrupted.release()
        result = interrupted.finish()
    assert result.code == 0, result.err
    assert "stopping after this step and saving" in result.err and "Trace" not in result.err
    assert f"stopped at step {stopped_at} of 20; the same command resumes" in result.out
    assert max(steps_of(out)) == stopped_at
    finished = 10 * (stopped_at // 10)
    evaluated = [line["step"] for line in metrics(out) if "val_loss" in line]
    assert evaluated == [10, 20][: finished // 10 - (moment == "evaluate")]

    succeed(*command)

    assert_same_run(twin, out, 20)
    for step in (15, 20) if stopped_at <= 15 else (20,):
        one, other = (load_checkpoint(checkpoint(r, step)).state for r in (twin, out))
        assert one is not None and one == other


@posix
def test_killed_after_an_interrupted_evaluation(twin: Path, text: Path, tmp_path: Path) -> None:
    """The step's line stands in its checkpoint and in the metrics too, and must not be doubled."""
    out = tmp_path / "run"
    command = ("train", "--data", text, *FLAGS, "--set", "checkpoint.every=0", "--out", out)
    with held("evaluate", 1, *command) as interrupted:
        interrupted.process.send_signal(signal.SIGINT)
        interrupted.release()
        assert interrupted.finish().code == 0
    assert steps_of(out) == [10] and metrics(out)[-1]["step"] == 9
    with held("step", 12, *command) as killed:
        killed.process.kill()
    assert steps_of(out) == [10] and metrics(out)[-1]["step"] == 11
    succeed(*command)
    assert_same_run(twin, out, 20)


def test_ctrl_c_does_not_wait_for_an_evaluation(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked_for = 0

    def windows(*args: Any) -> Iterator[Any]:
        nonlocal asked_for
        for batch in eval_windows(*args):
            asked_for += 1
            if asked_for == 2:
                signal.raise_signal(signal.SIGINT)
            yield batch

    monkeypatch.setattr(trainer, "eval_windows", windows)
    succeed("train", "--data", text, *FLAGS, "--out", tmp_path)
    assert asked_for == 2 and steps_of(tmp_path)[-1] == 10


@posix
def test_failure_15_ctrl_c_twice(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = ("train", "--data", text, *FLAGS, "--out", out)
    with held("step", 7, *command) as interrupted:
        before = snapshot(wait_for(out, 5))
        interrupted.process.send_signal(signal.SIGINT)
        assert interrupted.process.stderr is not None
        for line in interrupted.process.stderr:
            if "once more to leave at once" in line:
                break
        assert interrupted.process.poll() is None
        interrupted.process.send_signal(signal.SIGINT)  # and nobody releases the step
        result = interrupted.finish()
    assert result.code == 130 and "stopped at once" in result.err and "Trace" not in result.err
    assert steps_of(out) == [5] and snapshot(checkpoint(out, 5)) == before
    assert "resuming at step 5" in succeed(*command)


@posix
def test_ctrl_c_at_any_moment(text: Path, tmp_path: Path) -> None:
    """A run that nothing slows down is stopped from outside, and its twin stops at that step."""
    settings = ("checkpoint.every=0", "schedule.name=constant", "train.eval_every=100")
    flags = (*SMALL, "--steps", 1_000_000, *(f"--set={setting}" for setting in settings))
    one, other = tmp_path / "one", tmp_path / "other"
    command = ["train", "--data", str(text), *map(str, flags), "--out", str(one)]
    with subprocess.Popen(
        [sys.executable, "-m", "treadle", *command], cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        limit = time.monotonic() + TIMEOUT
        lines = one / "metrics.jsonl"
        while not (lines.exists() and lines.stat().st_size) and time.monotonic() < limit:
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0, err
    (step,) = steps_of(one)
    assert f"stopped at step {step} of 1000000" in out and step >= 1
    succeed("train", "--data", text, *flags, "--out", other, "--run-steps", step)
    assert_same_run(one, other, step)


def test_failure_12_saving_before_the_first_evaluation_after_a_resume(
    text: Path, tmp_path: Path
) -> None:
    command = ("train", "--data", text, *FLAGS, "--set", "train.eval_every=50", "--out", tmp_path)
    succeed(*command, "--run-steps", 3)
    succeed(*command, "--run-steps", 4)
    assert steps_of(tmp_path) == [3, 5, 7]
    assert not any("val_loss" in line for line in metrics(tmp_path))
    state = load_checkpoint(checkpoint(tmp_path, 7)).state
    assert state is not None and state["val_loss"] is None


# ---------------------------------------------------------------- faults


def test_failure_16_the_final_evaluation_fails(
    text: Path, twin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate = Session.evaluate

    def broken(self: Session, batches: Any) -> float:
        if checkpoint(tmp_path, 20).exists():
            raise BackendError("the device is gone")
        return evaluate(self, batches)

    command = ("train", "--data", text, *FLAGS, "--out", tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Session, "evaluate", broken)
        assert "the device is gone" in fail(*command)
    for name in RESUMED_FILES:
        left, right = checkpoint(tmp_path, 20) / name, checkpoint(twin, 20) / name
        assert left.read_bytes() == right.read_bytes()
    succeed(*command)
    assert_same_run(twin, tmp_path, 20)


@pytest.mark.parametrize("error", [BackendError("no sample today"), RuntimeError("a bug")])
def test_failure_16_sampling_fails(
    text: Path, twin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def broken(self: Trainer) -> str:
        raise error

    monkeypatch.setattr(Trainer, "sample_text", broken)
    flags = (*FLAGS, "--set", "train.sample_every=20")
    result = run("train", "--data", text, *flags, "--out", tmp_path)
    if isinstance(error, BackendError):
        assert result.code == 0 and "no sample at step 20: no sample today" in result.out
    else:
        assert result.code == 1 and result.err.count("\n") == 1 and "a bug" in result.err
    assert_same_run(twin, tmp_path, 20)
    state = load_checkpoint(checkpoint(tmp_path, 20)).state
    assert state is not None and state["val_loss"] is not None


@pytest.mark.parametrize("device", ["auto", "numpy"])
def test_failure_17_a_loss_that_is_not_finite(text: Path, tmp_path: Path, device: str) -> None:
    flags = (*SMALL, "--steps", 50, "--lr", 1e6, "--set", "checkpoint.every=1")
    command = ("train", "--data", text, *flags, "--device", device, "--out", tmp_path)
    line = fail(*command)
    found = re.search(r"step (\d+): the (loss|norm of the gradient) is (nan|inf); ", line)
    assert found is not None and "optimizer.lr (now 1e+06)" in line
    step = int(found[1])
    # The step that failed changed nothing, and is nowhere.
    assert max(steps_of(tmp_path)) == step - 1 == metrics(tmp_path)[-1]["step"]
    assert str(checkpoint(tmp_path, step - 1)) in line
    for saved in steps_of(tmp_path):
        kept = load_checkpoint(checkpoint(tmp_path, saved))
        assert all(np.isfinite(array).all() for array in kept.tensors.values())
        assert kept.optimizer is not None
        assert all(np.isfinite(array).all() for array in kept.optimizer.values())
    assert fail(*command).startswith(f"treadle: error: step {step}: ")


def test_failure_17_a_validation_loss_that_is_not_finite(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Session, "evaluate", lambda self, batches: float("nan"))
    line = fail("train", "--data", text, *FLAGS, "--out", tmp_path)
    assert "step 10: the validation loss is nan" in line
    state = load_checkpoint(checkpoint(tmp_path, 10)).state
    assert state is not None and state["val_loss"] is None


def test_failure_17_weights_that_are_not_finite(text: Path, tmp_path: Path) -> None:
    """An update by a finite gradient can overflow; such weights never become a checkpoint."""
    command = ("train", "--data", text, *SMALL, "--steps", 5, "--out", tmp_path, "--lr", 1e300)
    with np.errstate(over="ignore"):
        line = fail(*command, "--set", "checkpoint.every=1", "--set", "schedule.warmup_steps=0")
    assert "step 1: tensor" in line and "NaN or infinite" in line
    assert steps_of(tmp_path) == []


def test_a_run_directory_that_cannot_be(text: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    line = fail("train", "--data", text, *SMALL, "--out", file / "run")
    assert str(file) in line and "--out" in line


@posix
def test_a_full_disk(text: Path, tmp_path: Path) -> None:
    """Writing fails in the middle of a checkpoint; the one before stays, and the run resumes."""
    import resource

    out = tmp_path / "run"
    command = ("train", "--data", text, *FLAGS, "--out", out)
    succeed(*command, "--run-steps", 5)
    before = snapshot(checkpoint(out, 5))
    limit = (checkpoint(out, 5) / "model.safetensors").stat().st_size - 1000
    result = subprocess.run(
        [sys.executable, "-m", "treadle", *map(str, command)], cwd=ROOT, text=True,
        capture_output=True, timeout=TIMEOUT,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )  # fmt: skip
    assert result.returncode == 2, result
    (line,) = result.stderr.splitlines()
    assert str(checkpoint(out, 10)) in line and "cannot write" in line
    assert steps_of(out) == [5] and snapshot(checkpoint(out, 5)) == before
    assert "resuming at step 5" in succeed(*command)
