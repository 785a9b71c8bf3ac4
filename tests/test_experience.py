"""A run that can be left alone: ready configurations, spikes, saving beside the training, twins."""

from __future__ import annotations

import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runs import (
    BUSY,
    EVERYTHING,
    RESUMED_FILES,
    ROOT,
    SMALL,
    SPIKY,
    TIMEOUT,
    assert_same_run,
    checkpoint,
    fail,
    held,
    metrics,
    snapshot,
    steps_of,
    succeed,
    wait_for,
    write_text,
)
from treadle import models
from treadle.backends.base import Backend
from treadle.backends.cpu import CpuBackend, available
from treadle.backends.numpy import NumpyBackend
from treadle.config import CheckpointConfig, json_schema, load_config, to_dict
from treadle.errors import CheckpointError, NonFiniteError
from treadle.models.gpt2 import GPT2
from treadle.train import checkpoint as checkpoint_module
from treadle.train import saver as saver_module
from treadle.train import source as source_module
from treadle.train.checkpoint import load_checkpoint, save_checkpoint
from treadle.train.program import OptimizerSettings
from treadle.train.registry import Registry
from treadle.train.saver import Saver, snapshot_bytes
from treadle.train.session import Session
from treadle.train.spikes import Spikes

CONFIGS = ROOT / "configs"
READY = sorted(path for path in CONFIGS.glob("*.json") if path.name != "schema.json")
posix = pytest.mark.skipif(os.name == "nt", reason="SIGKILL is POSIX")
needs_kernels = pytest.mark.skipif(not available(), reason="the C kernels are not built")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture(scope="module")
def twin(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with everything switched on that nobody interrupts. No test changes it."""
    out = tmp_path_factory.mktemp("twin") / "run"
    succeed("train", "--data", text, *EVERYTHING, "--out", out)
    return out


def session(backend: Backend | None = None, grad_accum: int = 1) -> Session:
    model = GPT2(vocab_size=11, n_layer=1, n_head=2, n_embd=8, block_size=4)
    made = Session(model, backend or NumpyBackend(), OptimizerSettings(), 4, 4, grad_accum)
    made.initialise()
    return made


def batch(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    ids = np.random.default_rng(seed).integers(0, 11, (2, 4, 4)).astype(np.int32)
    return ids[0], ids[1]


# ---------------------------------------------------------------- ready configurations


@pytest.mark.parametrize("path", READY, ids=lambda path: path.stem)
def test_ready_configurations_are_valid_and_name_the_schema(path: Path) -> None:
    config = load_config(path)
    written = json.loads(path.read_text(encoding="utf-8"))
    schema = json.loads((path.parent / written.pop("$schema")).read_text(encoding="utf-8"))
    assert written.keys() <= schema["properties"].keys()
    # What is written is taken as it is: nothing is rounded or replaced.
    effective = to_dict(config)
    for section, values in written.items():
        assert values == {key: effective[section][key] for key in values}
    train, schedule = config.train, config.schedule
    assert train.steps and train.batch_size and config.optimizer.lr
    assert schedule.min_lr is not None and schedule.warmup_steps is not None


def test_the_schema_is_that_of_the_code() -> None:
    written = (CONFIGS / "schema.json").read_text(encoding="utf-8")
    made = json.dumps(json_schema(), indent=2) + "\n"
    assert written == made, "run: treadle config --schema > configs/schema.json"


@pytest.mark.parametrize(
    ("name", "vocab_size", "parameters"),
    [
        ("gpt-5m", None, 5_302_272),
        ("spanish-5m", None, 5_302_272),
        ("char-tiny", 65, 809_856),
        ("gpt2-124m", None, 124_439_808),
    ],
)
def test_parameters_of_the_ready_models(name: str, vocab_size: int | None, parameters: int) -> None:
    sizes = load_config(CONFIGS / f"{name}.json").model.model_dump(exclude={"architecture"})
    sizes["vocab_size"] = vocab_size or sizes["vocab_size"]
    assert models.build("gpt2", **sizes).n_parameters() == parameters
    assert {path.stem for path in READY} >= {name}


def test_a_ready_configuration_trains(text: Path, tmp_path: Path) -> None:
    command = ("train", CONFIGS / "char-tiny.json", "--data", text, "--out", tmp_path)
    succeed(*command, "--threads", 1, "--run-steps", 1)
    assert load_config(tmp_path / "run.json").optimizer.betas == (0.9, 0.99)


# ---------------------------------------------------------------- spikes


def test_the_limit_of_a_window() -> None:
    spikes = Spikes(window=4, zscore=2.0)
    for loss in (9.0, 1.0, 3.0, 1.0):
        assert spikes.limit() == math.inf
        spikes.observe(loss)
    spikes.observe(3.0)  # and 9 has left the window
    assert spikes.limit() == pytest.approx(2.0 + 2.0 * 1.0)
    assert spikes.zscore(5.0) == pytest.approx(3.0)


def test_a_spike_hides_no_other_and_a_lasting_rise_becomes_normal() -> None:
    spikes = Spikes(window=50, zscore=6.0)
    wave = [2.0 + 0.1 * (-1) ** i for i in range(50)]
    for loss in wave:
        spikes.observe(loss)
    spikes.observe(1000.0)
    assert 10.0 > spikes.limit() > 2.6
    high = 0
    while spikes.limit() < 4.0:
        spikes.observe(4.0)
        high += 1
        assert high < 20


def test_equal_losses_have_no_spikes() -> None:
    spikes = Spikes(window=2, zscore=1.0)
    spikes.observe(1.0)
    spikes.observe(1.0)
    assert spikes.limit() == math.inf


def test_the_state_of_spikes_goes_through_json() -> None:
    one, other = Spikes(3, 2.0), Spikes(3, 2.0)
    for loss in (0.1, 0.7, 1 / 3, 2.0):
        one.observe(loss)
    one.skipped, one.in_a_row = 4, 2
    other.restore(json.loads(json.dumps(one.state())))
    assert other.state() == one.state() and other.limit() == one.limit()
    other.restore(None)  # an older checkpoint has none
    assert other.skipped == 0


@pytest.mark.parametrize("device", ["numpy", pytest.param("cpu", marks=needs_kernels)])
@pytest.mark.parametrize("grad_accum", [1, 2])
def test_the_device_leaves_out_a_step_above_the_limit(device: str, grad_accum: int) -> None:
    made = session(CpuBackend(threads=1) if device == "cpu" else NumpyBackend(), grad_accum)
    first = made.step(0, *batch(), 1e-2)
    assert first.applied and not first.spiked
    before = made.weights() | made.optimizer_state()
    loss = made.step(1, *batch(1), 1e-2, apply=False).loss

    spiked = made.step(1, *batch(1), 1e-2, loss_limit=loss - 1e-3)
    assert (spiked.applied, spiked.spiked, spiked.finite) == (False, True, True)
    after = made.weights() | made.optimizer_state()
    assert all(np.array_equal(after[name], array) for name, array in before.items())

    noted = made.step(1, *batch(1), 1e-2, loss_limit=loss - 1e-3, skip_spikes=False)
    assert noted.applied and noted.spiked
    assert made.step(2, *batch(2), 1e-2, loss_limit=100.0).applied


def test_adam_counts_the_updates_that_were_made() -> None:
    one, other = session(), session()
    one.step(0, *batch(0), 1e-2)
    one.step(1, *batch(1), 1e-2, loss_limit=0.0)
    one.step(2, *batch(2), 1e-2, updates=1)
    other.step(0, *batch(0), 1e-2)
    other.step(1, *batch(2), 1e-2)
    for name, array in other.weights().items():
        assert np.array_equal(one.weights()[name], array)


def test_spikes_are_left_out_counted_and_named(twin: Path, text: Path, tmp_path: Path) -> None:
    said = succeed("train", "--data", text, *EVERYTHING, "--out", tmp_path / "run")
    spiked = [line for line in metrics(twin) if "spike" in line]
    assert spiked and all(line["spike"] > 0.5 for line in spiked)
    assert [line["skipped"] for line in spiked] == list(range(1, len(spiked) + 1))
    assert not any("skipped" in line for line in metrics(twin) if "spike" not in line)
    for line in spiked:
        assert re.search(
            rf"step {line['step']}: the loss {line['loss']:.4f} is {line['spike']:.1f} standard "
            rf"deviations above the mean of the 6 before it; its update is left out "
            rf"\({line['skipped']} so far\)",
            said,
        )
    state = load_checkpoint(checkpoint(twin, 40)).state
    assert state is not None and state["spikes"]["skipped"] == len(spiked)


def test_spikes_are_trained_on_by_default(text: Path, tmp_path: Path, twin: Path) -> None:
    flags = (*EVERYTHING, "--set", "train.on_spike=go_on")
    said = succeed("train", "--data", text, *flags, "--out", tmp_path)
    assert "standard deviations" in said and "left out" not in said
    lines, first = metrics(tmp_path), next(x["step"] for x in metrics(twin) if "spike" in x)
    assert any("spike" in line for line in lines)
    assert not any("skipped" in line for line in lines)
    assert lines[first - 1]["loss"] == metrics(twin)[first - 1]["loss"]
    assert lines[first]["loss"] != metrics(twin)[first]["loss"]


def test_a_run_stops_at_a_spike_and_goes_on_past_it(twin: Path, text: Path, tmp_path: Path) -> None:
    command = ("train", "--data", text, *EVERYTHING, "--out", tmp_path)
    stop, skip = ("--set", "train.on_spike=stop"), ("--set", "train.on_spike=skip")
    line = fail(*command, *stop)
    first = next(x["step"] for x in metrics(twin) if "spike" in x)
    assert f"step {first}: the loss" in line and "train.on_spike=skip" in line
    assert str(checkpoint(tmp_path, first - 1)) in line
    assert metrics(tmp_path)[-1]["step"] == steps_of(tmp_path)[-1] == first - 1
    assert f"step {first}: the loss" in fail(*command, *stop)
    succeed(*command, *skip)
    assert_same_run(twin, tmp_path, 40)


def _break_gradients(monkeypatch: pytest.MonkeyPatch, steps: range) -> None:
    """Makes the gradients of some steps, from 0, infinite on the device."""
    begin = Session.begin

    def broken(self: Session, at: int, *args: Any, **kwargs: Any) -> Any:
        write = self.executable.write

        def spoiled(name: str, array: Any) -> None:
            write(name, np.float32(np.inf) if name == "inv_count" and at in steps else array)

        self.executable.write = spoiled  # type: ignore[method-assign]
        try:
            return begin(self, at, *args, **kwargs)
        finally:
            self.executable.write = write  # type: ignore[method-assign]

    monkeypatch.setattr(Session, "begin", broken)


def test_failure_17_steps_that_are_not_finite_can_be_left_out(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _break_gradients(monkeypatch, range(6, 8))
    flags = (*BUSY, "--set", "train.on_nonfinite=skip", "--steps", 20)
    said = succeed("train", "--data", text, *flags, "--out", tmp_path)
    for number, step in enumerate((7, 8), start=1):
        assert f"step {step}: the norm of the gradient is " in said
        assert f"its update is left out ({number} so far)" in said
    lines = metrics(tmp_path)
    assert [line["step"] for line in lines if "skipped" in line] == [7, 8]
    assert [line["step"] for line in lines if line["grad_norm"] is None] == [7, 8]
    last = load_checkpoint(checkpoint(tmp_path, 20))
    assert all(np.isfinite(array).all() for array in last.tensors.values())


def test_failure_17_steps_that_stay_infinite_end_the_run(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _break_gradients(monkeypatch, range(4, 1000))
    flags = (*BUSY, "--set", "train.on_nonfinite=skip", "--steps", 60)
    line = fail("train", "--data", text, *flags, "--out", tmp_path)
    assert "step 25: the norm of the gradient is" in line
    weights = [load_checkpoint(checkpoint(tmp_path, step)).tensors for step in (20, 24)]
    for name, array in weights[0].items():
        assert np.array_equal(array, weights[1][name])


# ---------------------------------------------------------------- saving beside the training


def made_saver(run_dir: Path, **settings: int) -> Saver:
    return Saver(session(), Registry(run_dir), None, CheckpointConfig(**settings))


def state_of(step: int) -> dict[str, Any]:
    return {"step": step, "train_loss": 1.0, "val_loss": 1.0}


def test_a_background_save_is_the_bytes_of_one_in_the_foreground(tmp_path: Path) -> None:
    with made_saver(tmp_path) as saver:
        path = saver.save(state_of(1))
        made, model = saver.session, saver.session.model
        save_checkpoint(
            tmp_path / "foreground",
            config=model.hf_config(None),
            tensors=model.to_hf(made.weights()),
            optimizer=made.optimizer_state(),
            tokenizer_json=None,
            tokenizer_config=None,
            state=state_of(1),
        )
    assert snapshot(path) == snapshot(tmp_path / "foreground")


class Gate:
    """Holds every save until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened, self.entered, self.inside, self.most = threading.Event(), [], 0, 0
        save = source_module.save_model

        def gated(path: Path, *arguments: Any) -> None:
            self.inside += 1
            self.most = max(self.most, self.inside)
            self.entered.append(path)
            assert self.opened.wait(TIMEOUT)
            self.inside -= 1
            save(path, *arguments)

        monkeypatch.setattr(saver_module, "save_model", gated)


def test_steps_go_on_while_a_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    with made_saver(tmp_path) as saver:
        wanted = saver.session.weights()
        path = saver.save(state_of(1))
        saver.session.step(0, *batch(), 1e-1)  # which the copy does not see
        saver.poll()
        assert not path.exists()
        gate.opened.set()
    saved = load_checkpoint(path).tensors
    assert all(np.array_equal(saved[name], array) for name, array in wanted.items())
    assert not np.array_equal(wanted["transformer.wte.weight"],
                              saver.session.weights()["transformer.wte.weight"])  # fmt: skip


def test_one_save_is_in_flight_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    with made_saver(tmp_path) as saver:
        saver.save(state_of(1))
        threading.Timer(0.05, gate.opened.set).start()
        saver.save(state_of(2))
        assert checkpoint(tmp_path, 1).is_dir()
    assert gate.most == 1 and steps_of(tmp_path) == [1, 2]


def test_a_save_that_fails_is_told_at_the_next_step(tmp_path: Path) -> None:
    saver = made_saver(tmp_path)
    (tmp_path / "checkpoints").write_text("in the way")
    saver.save(state_of(1))
    limit = time.monotonic() + TIMEOUT
    with pytest.raises(CheckpointError, match="cannot write"):
        while time.monotonic() < limit:
            saver.poll()
    saver.poll()  # once is enough
    with pytest.raises(CheckpointError, match="cannot write"), saver:
        saver.save(state_of(1))


def test_an_error_of_the_run_is_told_and_not_that_of_the_save(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("in the way")
    with pytest.raises(KeyError), made_saver(tmp_path) as saver:
        saver.save(state_of(1))
        raise KeyError


def test_weights_that_are_not_finite_are_named_with_their_step(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match="step 3: tensor"), made_saver(tmp_path) as saver:
        name = saver.session.model.parameters()[0].name
        saver.session.executable.arrays[name].fill(np.nan)  # type: ignore[attr-defined]
        saver.save(state_of(3))
    assert not list((tmp_path / "checkpoints").iterdir())


def test_the_memory_that_is_printed_holds_the_copy(text: Path, tmp_path: Path) -> None:
    said = succeed("train", "--data", text, *BUSY, "--steps", 1, "--out", tmp_path)
    files = [checkpoint(tmp_path, 1) / name for name in RESUMED_FILES]
    found = re.search(r"memory ([\d.]+) MiB", said)
    made = session()
    arrays = [*made.weights().values(), *made.optimizer_state().values()]
    assert snapshot_bytes(made.program) == sum(array.nbytes for array in arrays)
    assert found is not None and float(found[1]) > sum(f.stat().st_size for f in files) / 2**20


def test_every_nth_checkpoint_is_kept(tmp_path: Path) -> None:
    with made_saver(tmp_path, keep=1, keep_every=4) as saver:
        for step in range(1, 11):
            saver.save(state_of(step) | {"val_loss": 10.0 / step})
    assert steps_of(tmp_path) == [4, 8, 10]


def test_the_kept_checkpoints_of_a_run(twin: Path) -> None:
    best = json.loads((twin / "checkpoints.json").read_text())["best"]
    assert set(steps_of(twin)) == {15, 30, 35, 40, int(best[-8:])}


@posix
def test_failure_14_kills_of_a_run_that_saves_after_every_step(text: Path, tmp_path: Path) -> None:
    """Killed while checkpoints are written beside the training, a run loses steps and no more."""
    one, other = tmp_path / "one", tmp_path / "other"
    settings = ("checkpoint.every=1", "train.eval_every=0", "schedule.name=constant")
    flags = [*map(str, SMALL), "--steps", "100000", *(f"--set={s}" for s in settings), *SPIKY]
    command = ["train", "--data", str(text), *flags, "--out", str(one)]
    draw, reached = random.Random(14), 0
    for _ in range(5):
        with subprocess.Popen(
            [sys.executable, "-m", "treadle", *command], cwd=ROOT, text=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        ) as process:  # fmt: skip
            limit = time.monotonic() + TIMEOUT
            while max(steps_of(one), default=0) <= reached and time.monotonic() < limit:
                time.sleep(0.002)
            time.sleep(draw.uniform(0.0, 0.05))
            process.send_signal(signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL, process.stderr and process.stderr.read()
        registry = Registry(one)
        assert not registry.damaged
        latest = registry.latest()
        assert latest is not None and latest.note is None and latest.entry.step > reached
        reached = latest.entry.step
    said = succeed(*command, "--run-steps", 3)
    assert f"resuming at step {reached} from" in said
    succeed("train", "--data", text, *flags, "--out", other, "--run-steps", reached + 3)
    assert_same_run(one, other, reached + 3)


# ---------------------------------------------------------------- one run and its twin


@posix
def test_a_run_with_everything_on_is_its_twin(twin: Path, text: Path, tmp_path: Path) -> None:
    """Killed, stopped by a signal, stopped by a stint and resumed each time."""
    command = ("train", "--data", text, *EVERYTHING, "--out", tmp_path)
    with held("step", 13, *command) as killed:
        wait_for(tmp_path, 10)
        killed.process.kill()
    with held("evaluate", 1, *command) as interrupted:
        interrupted.process.send_signal(signal.SIGINT)
        interrupted.release()
        assert interrupted.finish().code == 0
    assert steps_of(tmp_path)[-1] == 20
    succeed(*command, "--run-steps", 7)
    succeed(*command)
    assert_same_run(twin, tmp_path, 40)
    assert any("spike" in line for line in metrics(twin)[:20])
    assert any("spike" in line for line in metrics(twin)[20:])
    for name in ("samples.txt", "environment.json"):
        assert (tmp_path / name).read_bytes() == (twin / name).read_bytes()
    for step in (30, 35, 40):
        assert snapshot(checkpoint(tmp_path, step)) == snapshot(checkpoint(twin, step))


def test_a_checkpoint_without_the_newer_keys_resumes(text: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    command = ("train", "--data", text, *BUSY, "--steps", 10)
    for out in (one, two):
        succeed(*command, "--out", out, "--run-steps", 5)
    path = checkpoint(two, 5) / "trainer_state.json"
    document = json.loads(path.read_text())
    del document["state"]["spikes"]
    for key in ("on_nonfinite", "on_spike", "spike_window", "spike_zscore", "tensorboard"):
        del document["state"]["config"]["train"][key]
    del document["state"]["config"]["checkpoint"]["keep_every"]
    document["digest"] = checkpoint_module._document_digest(document)
    path.write_text(json.dumps(document))
    for out in (one, two):
        succeed(*command, "--out", out)
    assert_same_run(one, two, 10)


# ---------------------------------------------------------------- listing checkpoints


def test_checkpoints_are_listed(twin: Path, text: Path, tmp_path: Path) -> None:
    said = succeed("train", "--out", twin, "--list-checkpoints")
    head, _, *rows = said.splitlines()
    assert re.split(r"  +", head.strip()) == [
        "step", "train loss", "val loss", "size", "age", "state",
    ]  # fmt: skip
    assert [int(row.split()[0]) for row in rows] == steps_of(twin)
    last = metrics(twin)[-1]
    assert f"{last['loss']:.4f}" in rows[-1] and rows[-1].endswith("latest")
    assert sum("best" in row for row in rows) == 1 and all("intact" in row for row in rows)
    assert all(re.search(r"\d+ (s|min)  ", row) for row in rows)
    before = snapshot(twin)
    assert "no checkpoints" in fail("train", "--out", tmp_path / "nil", "--list-checkpoints")
    assert not (tmp_path / "nil").exists() and snapshot(twin) == before


@posix
def test_damaged_checkpoints_are_listed_while_the_run_goes_on(text: Path, tmp_path: Path) -> None:
    command = ("train", "--data", text, *BUSY, "--steps", 20, "--out", tmp_path)
    with held("step", 12, *command):
        wait_for(tmp_path, 10)
        model = checkpoint(tmp_path, 5) / "model.safetensors"
        model.write_bytes(model.read_bytes()[:-1] + b"x")
        (checkpoint(tmp_path, 10) / "trainer_state.json").unlink()
        said = succeed("train", "--out", tmp_path, "--list-checkpoints")
    assert said.count("damaged") >= 2 and "intact" not in said and "best" not in said
    assert re.search(r"^step 5: .*SHA-256", said, re.M)
    assert re.search(r"^step 10: .*trainer_state\.json", said, re.M)
