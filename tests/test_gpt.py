"""GPT-2 as a whole: its gradient, its sizes, and that it learns the same everywhere."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from treadle.backends import cpu
from treadle.backends.base import Backend
from treadle.backends.numpy import NumpyBackend
from treadle.data.sampler import IGNORE, Sampler
from treadle.errors import CheckpointError, ConfigError, OutOfMemoryError
from treadle.generate import Decoder
from treadle.models import build, from_hf_config
from treadle.models.gpt2 import GPT2
from treadle.train.program import OptimizerSettings
from treadle.train.session import Session

TINY = GPT2(vocab_size=7, n_layer=2, n_head=2, n_embd=6, block_size=5)
SMALL = GPT2(vocab_size=29, n_layer=2, n_head=2, n_embd=32, block_size=24)
ADAMW = OptimizerSettings(betas=(0.9, 0.95))

kernels = pytest.mark.skipif(not cpu.available(), reason="the C kernels are not built")


def fastest() -> Backend:
    return cpu.CpuBackend(1) if cpu.available() else NumpyBackend()


def session(
    model: GPT2, backend: Backend, batch_size: int, grad_accum: int = 1, seed: int = 3
) -> Session:
    made = Session(model, backend, ADAMW, batch_size, model.block_size, grad_accum, seed)
    made.initialise()
    return made


def batches(model: GPT2, batch_size: int, period: int = 11) -> Sampler:
    """Windows of a text that can be learned: a fixed sequence of tokens, again and again."""
    tokens = np.random.default_rng(5).integers(0, model.vocab_size, period)
    return Sampler(np.tile(tokens, 60), model.block_size, batch_size, seed=1)


def losses(run: Session, steps: int, lr: float = 3e-3) -> list[float]:
    sampler = batches(run.model, run.micro_batch * run.grad_accum)  # type: ignore[arg-type]
    return [run.step(step, *sampler.batch(step)[:2], lr).loss for step in range(steps)]


# ---------------------------------------------------------------- gradient


@pytest.mark.parametrize("dropout", [0.0, 0.3], ids=["no dropout", "dropout"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
def test_gradient_of_every_weight(tie: bool, bias: bool, dropout: float) -> None:
    """Against finite differences along two random directions of each weight, in float64."""
    model = replace(TINY, tie_embeddings=tie, bias=bias, dropout=dropout)
    rng = np.random.default_rng(1)
    run = session(model, NumpyBackend("float64"), batch_size=2).executable
    weights = {}
    for p in model.parameters():  # far from the start, so that no gradient is tiny
        weights[p.name] = p.initial(0) + 0.3 * rng.standard_normal(p.shape)
        run.write(p.name, weights[p.name])
    targets = rng.integers(0, 7, (2, 5))
    targets[0, 3] = IGNORE
    run.write("tokens", rng.integers(0, 7, (2, 5)))
    run.write("targets", targets)
    run.write("random", np.array([9, 4, 6, 0], np.uint32))  # one mask for all the losses below
    run.write("inv_count", 1 / 9)

    def loss() -> float:
        run.run("micro_first")
        return float(run.read("loss")) / 9

    loss()
    grads = {name: run.read(f"{name}.grad") for name in weights}
    assert ("transformer.h.0.ln_1.bias" in grads) is bias
    assert ("lm_head.weight" in grads) is not tie
    h = 1e-6
    for name, w in weights.items():
        for _ in range(2):
            direction = rng.standard_normal(w.shape)
            run.write(name, w + h * direction)
            above = loss()
            run.write(name, w - h * direction)
            below = loss()
            run.write(name, w)
            expected = float((grads[name] * direction).sum())
            assert (above - below) / (2 * h) == pytest.approx(expected, rel=1e-6, abs=1e-8), name


def test_dropout_changes_the_loss_of_training_only() -> None:
    plain, dropped = (replace(SMALL, dropout=p) for p in (0.0, 0.5))
    inputs, targets, _ = batches(SMALL, 4).batch(0)
    results = []
    for model in (plain, dropped):
        run = session(model, fastest(), 4)
        evaluated = run.evaluate([(inputs, targets, targets.size)])
        results.append((evaluated, run.step(0, inputs, targets, 0.0).loss))
    (evaluated, trained), (evaluated_too, trained_otherwise) = results
    assert evaluated == evaluated_too == pytest.approx(trained, abs=1e-6)
    assert abs(trained - trained_otherwise) > 1e-4


def test_dropout_differs_from_step_to_step_and_by_seed() -> None:
    model = replace(SMALL, dropout=0.5)
    inputs, targets, _ = batches(SMALL, 4).batch(0)
    run = session(model, fastest(), 4)
    same, again, other = (run.step(step, inputs, targets, 0.0).loss for step in (0, 0, 1))
    assert same == again != other
    weights = run.weights()
    run = session(model, fastest(), 4, seed=4)
    run.load_weights(weights)
    assert run.step(0, inputs, targets, 0.0).loss != same


# ---------------------------------------------------------------- sizes and initial weights


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_parameter_count(tie: bool, bias: bool) -> None:
    v, t, c, n_layer = 29, 24, 32, 2
    model = replace(SMALL, tie_embeddings=tie, bias=bias)
    matrices, biases = 12 * c * c, 3 * c + c + 4 * c + c
    norms = 2 * c * (2 if bias else 1)
    block = matrices + norms + (biases if bias else 0)
    expected = v * c + t * c + n_layer * block + norms // 2 + (0 if tie else v * c)
    assert model.n_parameters() == expected
    assert len({p.name for p in model.parameters()}) == len(model.parameters())


def test_the_smallest_released_gpt2_has_124_million_parameters() -> None:
    assert GPT2(vocab_size=50257).n_parameters() == 124_439_808


def test_initial_weights() -> None:
    model = replace(SMALL, n_embd=64, n_layer=8)
    weights = {p.name: p.initial(1) for p in model.parameters()}
    for name, w in weights.items():
        if name.endswith("bias"):
            assert not w.any(), name
        elif ".ln_" in name:
            assert (w == 1).all(), name
        else:
            std = 0.02 / (4 if name.endswith("c_proj.weight") else 1)  # 4 = sqrt(2 * 8 layers)
            assert w.std() == pytest.approx(std, rel=0.05), name
            assert abs(w.mean()) < 0.1 * std, name
    other = {p.name: p.initial(2) for p in model.parameters()}
    name = "transformer.h.3.attn.c_attn.weight"
    assert not np.array_equal(weights[name], other[name])
    again = {p.name: p.initial(1) for p in model.parameters()}
    assert all(np.array_equal(weights[key], again[key]) for key in weights)


def test_the_first_loss_is_that_of_guessing() -> None:
    first = losses(session(SMALL, fastest(), 4), 1)[0]
    assert first == pytest.approx(math.log(SMALL.vocab_size), abs=0.1)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [({"n_embd": 30, "n_head": 4}, "model.n_embd"), ({"n_layer": 0}, "model.n_layer")],
)
def test_sizes_that_cannot_be(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(SMALL, **sizes)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="gpt2"):
        build("gpt3", vocab_size=5)


def test_the_future_is_hidden() -> None:
    run = session(SMALL, fastest(), 1).executable
    ids = [3, 1, 4, 1, 5, 9, 2, 6]
    decoder = Decoder(run, 24)
    logits = decoder.logits([ids])
    for filling in (0, 7):
        run.write("prompt_16", [ids + [filling] * 8])
        run.run("prefill_16")
        np.testing.assert_array_equal(run.read("logits"), logits)
    assert np.abs(decoder.logits([[*ids[:-1], 7]]) - logits).max() > 1e-4
    assert np.abs(decoder.logits([[7, *ids[1:]]]) - logits).max() > 1e-5


def test_logits_do_not_depend_on_the_length_of_the_graph() -> None:
    """Lengths 15 to 17 run in graphs of 16 and 24 positions; a causal model cannot tell."""
    run = session(SMALL, NumpyBackend("float64"), 1)
    ids = np.arange(24) % SMALL.vocab_size
    for n in (1, 15, 16, 17, 24):
        targets = np.full((1, 24), IGNORE)
        targets[0, n - 1] = 5
        loss = run.evaluate([(ids[None], targets, 1)])
        (logits,) = Decoder(run.executable, 24).logits([ids[:n].tolist()])
        assert np.log(np.exp(logits).sum()) - logits[5] == pytest.approx(loss, abs=1e-12)


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_weights_survive_hugging_faces_form(tie: bool, bias: bool) -> None:
    model = replace(SMALL, tie_embeddings=tie, bias=bias, dropout=0.25)
    assert from_hf_config(model.hf_config(eos_id=None)) == model
    weights = {p.name: p.initial(1) for p in model.parameters()}
    tensors = model.to_hf(weights)
    assert "transformer.h.0.attn.c_attn.bias" in tensors  # zeros where the model has none
    back = model.from_hf(tensors)
    assert back.keys() == weights.keys()
    assert all(np.array_equal(back[name], weights[name]) for name in weights)
    del tensors["transformer.h.1.mlp.c_fc.weight"]
    with pytest.raises(CheckpointError, match=r"transformer\.h\.1\.mlp\.c_fc\.weight"):
        model.from_hf(tensors)
    with pytest.raises(CheckpointError, match="bert"):
        from_hf_config({"model_type": "bert"})
    with pytest.raises(CheckpointError, match="n_embd"):
        from_hf_config({"model_type": "gpt2", "vocab_size": 3, "n_layer": 1, "n_head": 1})


# ---------------------------------------------------------------- learning


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_loss_falls(tie: bool, bias: bool) -> None:
    found = losses(session(replace(SMALL, tie_embeddings=tie, bias=bias), fastest(), 4), 40)
    assert np.mean(found[-5:]) < 0.5 * found[0]
    assert np.mean(found[10:20]) < np.mean(found[:10])


@pytest.mark.parametrize("name", ["cpu", "numpy"])
def test_one_batch_is_learned_by_heart(name: str) -> None:
    if name == "cpu" and not cpu.available():
        pytest.skip("the C kernels are not built")
    backend = NumpyBackend() if name == "numpy" else cpu.CpuBackend(1)
    run = session(SMALL, backend, 4)
    tokens = np.random.default_rng(0).integers(0, SMALL.vocab_size, (4, 25))
    for step in range(120):
        loss = run.step(step, tokens[:, :-1], tokens[:, 1:], 1e-2).loss
    assert loss < 0.05


def test_a_step_that_is_not_applied_changes_nothing() -> None:
    run = session(SMALL, fastest(), 4)
    inputs, targets, _ = batches(SMALL, 4).batch(0)
    before = run.weights() | run.optimizer_state()
    assert not run.step(0, inputs, targets, 1e-2, apply=False).applied
    after = run.weights() | run.optimizer_state()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    run.executable.write("transformer.ln_f.weight", np.full(32, np.nan))
    result = run.step(0, inputs, targets, 1e-2)
    assert math.isnan(result.loss) and not result.applied
    assert np.array_equal(run.weights()["transformer.wte.weight"], before["transformer.wte.weight"])
    assert run.step(0, inputs, targets, 1e-2).applied is False


def test_grad_norm_is_that_before_clipping() -> None:
    inputs, targets, _ = batches(SMALL, 4).batch(0)
    run = session(SMALL, fastest(), 4)
    norm = run.step(0, inputs, targets, 0.0).grad_norm
    grads = [run.executable.read(f"{p.name}.grad") for p in SMALL.parameters()]
    assert norm == pytest.approx(math.sqrt(sum(float((g**2).sum()) for g in grads)), rel=1e-5)
    assert norm > 1  # so that it is not the clipped one


# ---------------------------------------------------------------- the same everywhere


@kernels
@pytest.mark.parametrize(
    ("dropout", "tie", "bias"), [(0.0, True, True), (0.2, True, True), (0.0, False, False)]
)
def test_numpy_and_cpu_lose_alike_over_50_steps(dropout: float, tie: bool, bias: bool) -> None:
    model = replace(SMALL, dropout=dropout, tie_embeddings=tie, bias=bias)
    reference = losses(session(model, NumpyBackend(), 4), 50)
    found = losses(session(model, cpu.CpuBackend(1), 4), 50)
    assert np.isfinite(found).all() and found[-1] < found[0] - 0.5
    np.testing.assert_allclose(found, reference, rtol=0, atol=1e-4)


@kernels
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_threads_do_not_change_a_bit(dropout: float) -> None:
    # Large enough that every kernel has several tasks to deal out.
    model = GPT2(300, n_layer=2, n_head=4, n_embd=64, block_size=96, dropout=dropout)
    results = []
    for threads in (1, 2, 3):
        run = session(model, cpu.CpuBackend(threads), 6, grad_accum=2)
        found = losses(run, 4)
        results.append((found, run.weights() | run.optimizer_state()))
    (found, state), *others = results
    for other, other_state in others:
        assert other == found
        for name, array in state.items():
            assert array.tobytes() == other_state[name].tobytes(), name


@pytest.mark.parametrize("grad_accum", [2, 4])
def test_accumulation_is_exact_up_to_rounding(grad_accum: int) -> None:
    """In float64, dropout included: so the masks are those of the whole batch."""
    model = replace(SMALL, dropout=0.3, n_layer=1)
    inputs, targets, _ = batches(model, 4).batch(0)
    targets[1, 5:] = IGNORE  # so that the micro-steps count unequal numbers of targets
    whole, parts = (session(model, NumpyBackend("float64"), 4, n) for n in (1, grad_accum))
    for step in range(2):
        one, other = (run.step(step, inputs, targets, 1e-2) for run in (whole, parts))
        assert one.loss == pytest.approx(other.loss, abs=1e-12)
        assert one.grad_norm == pytest.approx(other.grad_norm, abs=1e-11)
        for p in model.parameters():
            left, right = (r.executable.read(f"{p.name}.grad") for r in (whole, parts))
            np.testing.assert_allclose(left, right, rtol=1e-9, atol=1e-12, err_msg=p.name)


@kernels
def test_accumulation_on_the_cpu() -> None:
    model = replace(SMALL, dropout=0.3)
    runs = [session(model, cpu.CpuBackend(1), 4, n) for n in (1, 2, 4)]
    whole, *parts = (losses(run, 10) for run in runs)
    for found in parts:
        np.testing.assert_allclose(found, whole, rtol=0, atol=1e-5)
    for run in runs[1:]:
        for p in model.parameters():
            left, right = (r.executable.read(f"{p.name}.grad") for r in (runs[0], run))
            np.testing.assert_allclose(left, right, rtol=1e-3, atol=1e-5, err_msg=p.name)


@kernels
def test_what_does_not_fit_names_the_batch_that_does(monkeypatch: pytest.MonkeyPatch) -> None:
    made = session(SMALL, cpu.CpuBackend(1), 12, grad_accum=2)
    room = float(made.executable.memory().total)
    monkeypatch.setattr(cpu, "physical_memory", lambda: room)
    session(SMALL, cpu.CpuBackend(1), 12, grad_accum=2)
    with pytest.raises(OutOfMemoryError, match=r"; a train\.batch_size of 12 fits$"):
        session(SMALL, cpu.CpuBackend(1), 64, grad_accum=2)
    monkeypatch.setattr(cpu, "physical_memory", lambda: 4e5)
    with pytest.raises(OutOfMemoryError, match=r"; not even one window fits$"):
        session(SMALL, cpu.CpuBackend(1), 64, grad_accum=2)
