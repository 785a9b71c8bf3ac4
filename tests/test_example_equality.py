"""examples/gpt2_numpy.py and `treadle train` are one algorithm: the same losses from one start."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import treadle
from runs import metrics, succeed, write_text
from treadle.api import load_data
from treadle.backends.numpy import NumpyBackend
from treadle.data.sampler import Sampler
from treadle.generate import Decoder
from treadle.models.gpt2 import GPT2
from treadle.train.session import Session

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "gpt2_numpy.py"
STEPS, BATCH, SEED = 30, 4, 11
SIZES = {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": 24}
RECIPE = {"lr": 5e-3, "min_lr": 5e-4, "weight_decay": 0.2, "grad_clip": 0.8}


@pytest.fixture(scope="module")
def gpt2() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpt2_numpy", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
def test_losses_are_those_of_treadle_train(
    gpt2: ModuleType, tmp_path: Path, tie: bool, bias: bool
) -> None:
    text, out = write_text(tmp_path / "text.txt"), tmp_path / "run"
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SIZES.items()]
    flags += [f"--set=optimizer.{name}={RECIPE[name]}" for name in ("weight_decay", "grad_clip")]
    flags += [f"--lr={RECIPE['lr']}", f"--set=schedule.min_lr={RECIPE['min_lr']}"]
    flags += ["--set=schedule.warmup_steps=5", "--set=optimizer.betas=[0.9,0.95]"]
    switches = {"tie_embeddings": tie, "bias": bias}
    flags += [f"--set=model.{name}={json.dumps(value)}" for name, value in switches.items()]
    flags += [f"--steps={STEPS}", f"--batch-size={BATCH}", f"--seed={SEED}", "--threads=1"]
    succeed("train", "--data", text, "--tokenizer", "char", *flags, "--out", out)

    data = load_data(text, "char")
    model = GPT2(data.vocab_size, **SIZES, **switches)  # type: ignore[arg-type]
    config = gpt2.Config(data.vocab_size, **SIZES, **switches)
    params = {p.name: p.initial(SEED) for p in model.parameters()}
    sampler = Sampler(data.train, SIZES["block_size"], BATCH, SEED)
    batches = (sampler.batch(step)[:2] for step in range(STEPS))
    recipe = gpt2.Recipe(steps=STEPS, warmup=5, betas=(0.9, 0.95), **RECIPE)
    expected = list(gpt2.train(params, config, batches, recipe))

    lines = metrics(out)
    np.testing.assert_allclose([line["loss"] for line in lines], expected, rtol=0, atol=1e-4)
    assert expected[-1] < expected[0] - 0.5
    rates = [gpt2.learning_rate(step, recipe) for step in range(STEPS)]
    assert [line["lr"] for line in lines] == pytest.approx(rates)
    # And the model that was saved is the one that the example has in its hands.
    trained = treadle.load(out / "checkpoints" / f"step-{STEPS:08d}", threads=1).weights
    assert trained.keys() == params.keys()
    for name, w in params.items():
        np.testing.assert_allclose(trained[name], w, rtol=0, atol=2e-3, err_msg=name)


def test_gradients_and_logits_are_equal_in_float64(gpt2: ModuleType) -> None:
    model = GPT2(13, **SIZES)  # type: ignore[arg-type]
    config = gpt2.Config(13, **SIZES)
    assert asdict(config).keys() <= asdict(model).keys()
    params = {p.name: p.initial(SEED).astype(np.float64) for p in model.parameters()}
    tokens, targets = np.random.default_rng(0).integers(0, 13, (2, 3, 24))
    loss, cache = gpt2.forward(params, config, tokens, targets)
    grads = gpt2.backward(params, config, cache)

    settings = treadle.OptimizerSettings()
    session = Session(model, NumpyBackend("float64"), settings, 3, 24)
    session.load_weights(params)
    assert session.step(0, tokens, targets, 0.0).loss == pytest.approx(loss, abs=1e-12)
    for name, grad in grads.items():
        found = session.executable.read(f"{name}.grad")
        np.testing.assert_allclose(found, grad, rtol=1e-6, atol=1e-9, err_msg=name)
    logits = gpt2.predict(params, config, tokens[:1, :9])[0][0, -1]
    (found,) = Decoder(session.executable, 24).logits([tokens[0, :9].tolist()])
    np.testing.assert_allclose(found, logits, rtol=0, atol=1e-12)
