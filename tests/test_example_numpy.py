"""The plain NumPy example: gradients, training, and the script as a person runs it."""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys
from itertools import repeat
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

EXAMPLE = Path(__file__).parents[1] / "examples" / "gpt2_numpy.py"
TEXT = "".join(f"the {a} cat saw the {b} dog.\n" for a in ("red", "old") for b in ("big", "sad"))


def load_example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpt2_numpy", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


gpt2 = load_example()


def run_script(*args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLE), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=120)


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_gradient_of_every_weight(tie: bool, bias: bool) -> None:
    config = gpt2.Config(7, n_layer=2, n_head=2, n_embd=6, block_size=5, bias=bias)
    config = gpt2.Config(**{**vars(config), "tie_embeddings": tie})
    rng = np.random.default_rng(1)
    params = gpt2.init(config, seed=0, dtype=np.float64)
    for w in params.values():
        w += 0.3 * rng.standard_normal(w.shape)  # far from the start, so that no gradient is tiny
    tokens, targets = rng.integers(0, 7, size=(2, 3, 4))

    _, cache = gpt2.forward(params, config, tokens, targets)
    grads = gpt2.backward(params, config, cache)

    assert grads.keys() == params.keys()
    assert ("transformer.h.0.ln_1.bias" in params) is bias
    assert ("lm_head.weight" in params) is not tie
    h = 1e-6
    for name, w in params.items():
        expected = np.empty_like(w)
        for at in np.ndindex(w.shape):
            kept = w[at]
            w[at] = kept + h
            above = gpt2.forward(params, config, tokens, targets)[0]
            w[at] = kept - h
            below = gpt2.forward(params, config, tokens, targets)[0]
            w[at] = kept
            expected[at] = (above - below) / (2 * h)
        np.testing.assert_allclose(grads[name], expected, rtol=1e-5, atol=1e-8, err_msg=name)


def test_the_future_is_hidden() -> None:
    config = gpt2.Config(9, n_layer=2, n_head=2, n_embd=8, block_size=6)
    params = gpt2.init(config, seed=0)
    tokens = np.array([[1, 2, 3, 4, 5, 6]])
    changed = np.array([[1, 2, 3, 8, 7, 0]])
    logits, other = (gpt2.predict(params, config, t)[0] for t in (tokens, changed))
    np.testing.assert_array_equal(logits[:, :3], other[:, :3])
    assert np.abs(logits[:, 3:] - other[:, 3:]).max() > 1e-3


def test_initial_weights() -> None:
    config = gpt2.Config(97, n_layer=2, n_head=2, n_embd=64, block_size=16, tie_embeddings=False)
    params = gpt2.init(config, seed=0)
    assert {w.dtype for w in params.values()} == {np.dtype(np.float32)}
    assert params["transformer.h.1.attn.c_attn.weight"].shape == (64, 192)
    assert params["lm_head.weight"].shape == (97, 64)
    assert params["transformer.h.0.mlp.c_fc.weight"].std() == pytest.approx(0.02, rel=0.03)
    assert params["transformer.h.0.mlp.c_proj.weight"].std() == pytest.approx(0.01, rel=0.03)
    tokens = np.arange(32).reshape(2, 16)
    loss, cache = gpt2.forward(params, config, tokens, tokens + 1)
    assert loss == pytest.approx(math.log(97), abs=0.1)
    assert {g.dtype for g in gpt2.backward(params, config, cache).values()} == {
        np.dtype(np.float32)
    }


def test_learning_rate() -> None:
    recipe = gpt2.Recipe(steps=104, lr=1.0, min_lr=0.2, warmup=4)
    rates = [gpt2.learning_rate(step, recipe) for step in range(105)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[54] == pytest.approx(0.6)
    assert rates[104] == pytest.approx(0.2)
    assert rates[4:] == sorted(rates[4:], reverse=True)


def test_adamw_by_hand() -> None:
    recipe = gpt2.Recipe(lr=0.1, warmup=0, betas=(0.9, 0.99), weight_decay=0.5, eps=0.0)
    params = {"matrix": np.array([[2.0]]), "vector": np.array([2.0])}
    grads = {"matrix": np.array([[-3.0]]), "vector": np.array([-3.0])}
    m, v = ({name: np.zeros_like(w) for name, w in params.items()} for _ in range(2))
    gpt2.adamw(params, grads, m, v, 0, recipe)
    assert m["vector"] == pytest.approx(-0.3) and v["vector"] == pytest.approx(0.09)
    # The corrected averages of a first step are g and g^2, so that it goes lr against the sign.
    assert params["vector"] == pytest.approx(2.0 + 0.1)
    assert params["matrix"] == pytest.approx(2.0 - 0.1 * 0.5 * 2.0 + 0.1)


def test_clipping() -> None:
    grads = {"a": np.array([3.0]), "b": np.array([[0.0, 4.0]])}
    gpt2.clip(grads, 0.0)
    gpt2.clip(grads, 6.0)
    assert grads["b"][0, 1] == 4.0
    gpt2.clip(grads, 1.0)
    assert grads["a"][0] == pytest.approx(0.6) and grads["b"][0, 1] == pytest.approx(0.8)


def test_training_overfits_one_batch_and_repeats_it() -> None:
    chars = sorted(set(TEXT))
    data = np.array([chars.index(char) for char in TEXT])
    config = gpt2.Config(len(chars), n_layer=2, n_head=2, n_embd=32, block_size=24)
    params = gpt2.init(config, seed=0)
    batch = gpt2.windows(data, np.array([0, 25, 50]), 24)
    recipe = gpt2.Recipe(steps=150, lr=1e-2, min_lr=1e-3, warmup=10)

    losses = list(gpt2.train(params, config, repeat(batch), recipe))

    assert len(losses) == 150
    assert losses[0] > 2.0 and losses[-1] < 0.1
    rng = np.random.default_rng(0)
    written = list(gpt2.generate(params, config, data[:12].tolist(), 12, rng, temperature=0.0))
    assert written == data[12:24].tolist()
    drawn = list(gpt2.generate(params, config, [0], 2 * config.block_size, rng, temperature=1.0))
    assert len(drawn) == 2 * config.block_size and set(drawn) <= set(range(len(chars)))


def test_evaluation_is_the_mean_over_windows() -> None:
    config = gpt2.Config(5, n_layer=1, n_head=1, n_embd=4, block_size=3)
    params = gpt2.init(config, seed=0, dtype=np.float64)
    data = np.array([0, 1, 2, 3, 4, 0, 2, 4, 1])
    both = gpt2.forward(params, config, *gpt2.windows(data, np.array([0, 3]), 3))[0]
    assert gpt2.evaluate(params, config, data) == pytest.approx(both)


def test_script(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(20 * TEXT, encoding="utf-8")
    sizes = ["--n-layer", 1, "--n-head", 2, "--n-embd", 16, "--block-size", 16, "--batch-size", 8]
    run = run_script(text, *sizes, "--steps", 60, "--lr", 0.01, "--warmup", 5, "--sample", 40)
    assert run.returncode == 0, run.stderr
    losses = [float(line.split()[3]) for line in run.stdout.splitlines() if line[:4] == "step"]
    assert len(losses) == 3 and losses[-1] < losses[0] - 1.0
    written = run.stdout.partition("validation loss ")[2].partition("\n\n")[2]
    assert len(written) == len("\n") + 40 + len("\n") and set(written) <= set(TEXT)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--prompt", "Z"], "--prompt needs"),
        (["--n-embd", 10, "--n-head", 4], "--n-embd 10 is not a multiple"),
        (["--block-size", 10_000], "is too short for --block-size"),
    ],
)
def test_script_names_the_mistake(tmp_path: Path, args: list[object], message: str) -> None:
    text = tmp_path / "text.txt"
    text.write_text(20 * TEXT, encoding="utf-8")
    run = run_script(text, *args)
    assert run.returncode == 2 and message in run.stderr and "Traceback" not in run.stderr


def test_script_names_an_unreadable_file(tmp_path: Path) -> None:
    missing = tmp_path / "missing.txt"
    run = run_script(missing)
    assert run.returncode == 2 and str(missing) in run.stderr and "Traceback" not in run.stderr


@pytest.mark.parametrize(("given", "used"), [(None, "1"), ("3", "3")])
def test_blas_threads_are_limited_unless_they_are_given(given: str | None, used: str) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "OPENBLAS_NUM_THREADS"}
    environment |= {} if given is None else {"OPENBLAS_NUM_THREADS": given}
    code = "import os, gpt2_numpy; print(os.environ['OPENBLAS_NUM_THREADS'])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=EXAMPLE.parent,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == used


def test_one_file_of_at_most_500_lines_without_the_package() -> None:
    source = EXAMPLE.read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 500
    assert "import treadle" not in source and "from treadle" not in source
