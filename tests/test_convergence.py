"""Models of one's own, through `treadle.compile`: a line, and exclusive or."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import treadle
from treadle import ops
from treadle.backends import cpu
from treadle.errors import BackendError, ConfigError
from treadle.graph.value import Value

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ("linear_regression", "xor")


@pytest.fixture(params=["numpy", "cpu"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "cpu" and not cpu.available():
        pytest.skip("the C kernels are not built")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return str(request.param)


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def output(name: str, device: str) -> list[str]:
    """The lines of an example that is run as a person runs it."""
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / f"{name}.py", device],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_adamw_finds_the_line(device: str) -> None:
    w, b = example("linear_regression").fit(device)
    assert w == pytest.approx(2, abs=1e-3) and b == pytest.approx(1, abs=1e-3)
    lines = output("linear_regression", device)
    assert lines[-1] == "y = 2.000 x + 1.000" and lines[0].startswith("step   0   loss 2.4")


def test_xor_4_of_4(device: str) -> None:
    answers = example("xor").fit(device)
    np.testing.assert_allclose(answers, [[0], [1], [1], [0]], atol=0.1)
    answers = [line.partition("   ")[0] for line in output("xor", device)[-4:]]
    assert answers == ["0 xor 0 = 0", "0 xor 1 = 1", "1 xor 0 = 1", "1 xor 1 = 0"]


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_are_short(name: str) -> None:
    lines = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8").splitlines()
    assert len(lines) < 40


def test_sgd_by_hand(device: str) -> None:
    """loss = w², so w ← w - lr (2 w + momentum of the step before)."""

    def loss(w: Value, zero: Value) -> tuple[Value, Value]:
        return ops.mean_squared_error(w, zero)

    settings = treadle.OptimizerSettings("sgd", momentum=0.5, weight_decay=0.0, grad_clip=0.0)
    step = treadle.compile(
        loss, {"w": np.array([4.0])}, {"zero": (1,)}, settings, lr=0.1, device=device
    )
    assert step(zero=[0.0]) == 16
    assert step["w"].item() == pytest.approx(4 - 0.1 * 8)
    assert step(zero=[0.0]) == pytest.approx(3.2**2)
    assert step["w"].item() == pytest.approx(3.2 - 0.1 * (6.4 + 0.5 * 8))
    step["w"] = np.array([2.0])
    assert step.loss(zero=[0.0]) == pytest.approx(4) and step["w"].item() == 2


def test_token_inputs_and_the_mean_of_a_loss(device: str) -> None:
    """A table of logits learns which of three tokens follows which; one target is ignored."""

    def loss(table: Value, tokens: Value, targets: Value) -> tuple[Value, Value]:
        return ops.cross_entropy(ops.embedding(tokens, table), targets)

    integers = ((1, 4), "int32")
    inputs = {"tokens": integers, "targets": integers}
    step = treadle.compile(loss, {"table": np.zeros((3, 3))}, inputs, lr=0.1, device=device)
    batch = {"tokens": [[0, 1, 2, 0]], "targets": [[1, 2, 0, -1]]}
    assert step(**batch) == pytest.approx(np.log(3), abs=1e-6)
    for _ in range(100):
        value = step(**batch)
    assert value < 0.01 and step["table"].argmax(axis=1).tolist() == [1, 2, 0]


def test_wrong_inputs_are_named() -> None:
    line = example("linear_regression")
    start = {"w": np.zeros((1, 1)), "b": np.zeros(1)}
    sizes = {"x": (4, 1), "y": (4, 1)}
    step = treadle.compile(line.loss, start, sizes, device="numpy")
    assert repr(step) == "TrainingStep(inputs x, y; params w, b; adamw, lr 0.01, 0 steps done)"
    with pytest.raises(ConfigError, match="no parameter 'q'; one of w, b"):
        step["q"]
    with pytest.raises(ConfigError, match="no parameter 'x'"):
        step["x"] = np.zeros((4, 1))
    for call in (step, step.loss):
        with pytest.raises(ConfigError, match=r"by name: step\(x=..., y=...\)"):
            call(np.zeros((4, 1)), np.zeros((4, 1)))
    with pytest.raises(ConfigError, match="missing a required argument: 'b'; given are w, x, y"):
        treadle.compile(line.loss, {"w": start["w"]}, sizes, device="numpy")
    with pytest.raises(ConfigError, match="expected the inputs x, y; got x"):
        step(x=np.zeros((4, 1)))
    with pytest.raises(treadle.TreadleError, match=r"\(3, 1\) to @x of shape \(4, 1\)"):
        step(x=np.zeros((3, 1)), y=np.zeros((4, 1)))


def test_a_program_larger_than_memory_is_refused_before_it_is_allocated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not cpu.available():
        pytest.skip("the C kernels are not built")
    monkeypatch.setattr(cpu, "physical_memory", lambda: 1000.0)
    with pytest.raises(BackendError, match=r"out of memory.*batch_size"):
        treadle.compile(
            lambda w, x: ops.mean_squared_error(ops.mul(x, w), x),
            params={"w": np.ones(1000, np.float32)},
            inputs={"x": (1000,)},
            device="cpu",
        )
