"""Llama and Gemma as a whole: gradients, sizes, files, and that they learn the same everywhere."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from math import pi
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from test_gpt import fastest, kernels, losses, session
from treadle import models
from treadle.backends import cpu
from treadle.backends.base import Backend
from treadle.backends.numpy import NumpyBackend
from treadle.config import APPLIES, ARCHITECTURES, ROPE_SCALING, ModelConfig, load_config
from treadle.data.sampler import IGNORE
from treadle.errors import CheckpointError, ConfigError
from treadle.generate import Decoder
from treadle.graph.value import from_bfloat16, to_bfloat16
from treadle.models.base import Model
from treadle.models.gemma import Gemma
from treadle.models.gpt2 import GPT2
from treadle.models.llama import Llama
from treadle.models.llama_config import LLAMA3, RopeScaling, frequencies
from treadle.train.program import OptimizerSettings
from treadle.train.session import Session

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
SCALING = RopeScaling(8.0, 1.0, 4.0, 32)
SIZES: dict[str, Any] = {"vocab_size": 29, "n_layer": 2, "n_head": 4, "n_embd": 32, "n_ff": 48}
SMALL: dict[str, Model] = {
    "llama": Llama(**SIZES, n_kv_head=2, block_size=24, rope_scaling=SCALING),
    "llama untied": Llama(**SIZES, head_dim=6, block_size=24, tie_embeddings=False),
    "gemma": Gemma(**SIZES, n_kv_head=1, head_dim=16, block_size=24),
    "gemma 2": Gemma(
        **(SIZES | {"n_layer": 3}),
        n_kv_head=2,
        block_size=24,
        version=2,
        attn_softcap=2.0,
        final_softcap=3.0,
        query_pre_attn_scalar=20.0,
        sliding_window=7,
    ),
}
every_model = pytest.mark.parametrize("model", SMALL.values(), ids=SMALL.keys())


# ---------------------------------------------------------------- gradient


@every_model
def test_gradient_of_every_weight(model: Model) -> None:
    """Against finite differences along a random direction of each weight, in float64."""
    rng = np.random.default_rng(1)
    model = replace(model, block_size=9, n_embd=12)  # type: ignore[type-var]
    run = session(model, NumpyBackend("float64"), batch_size=2).executable  # type: ignore[arg-type]
    weights = {}
    for p in model.parameters():  # far from the start, so that no gradient is tiny
        weights[p.name] = p.initial(0) + 0.3 * rng.standard_normal(p.shape)
        run.write(p.name, weights[p.name])
    targets = rng.integers(0, 29, (2, 9))
    targets[0, 3] = IGNORE
    run.write("tokens", rng.integers(0, 29, (2, 9)))
    run.write("targets", targets)
    run.write("inv_count", 1 / 17)

    def loss() -> float:
        run.run("micro_first")
        return float(run.read("loss")) / 17

    loss()
    grads = {name: run.read(f"{name}.grad") for name in weights}
    h = 1e-6
    for name, w in weights.items():
        direction = rng.standard_normal(w.shape)
        run.write(name, w + h * direction)
        above = loss()
        run.write(name, w - h * direction)
        below = loss()
        run.write(name, w)
        expected = float((grads[name] * direction).sum())
        assert expected != 0, name
        assert (above - below) / (2 * h) == pytest.approx(expected, rel=1e-6, abs=1e-8), name


# ---------------------------------------------------------------- sizes


def test_parameter_counts_of_released_models() -> None:
    three = {"vocab_size": 128256, "n_layer": 32, "n_head": 32, "n_kv_head": 8, "n_embd": 4096}
    llama = Llama(**three, n_ff=14336, tie_embeddings=False)  # type: ignore[arg-type]
    assert llama.n_parameters() == 8_030_261_248
    two = {"vocab_size": 256000, "n_head": 8, "head_dim": 256}
    gemma = Gemma(**two, n_layer=18, n_kv_head=1, n_embd=2048, n_ff=16384)
    assert gemma.n_parameters() == 2_506_172_416
    second = Gemma(**two, n_layer=26, n_kv_head=4, n_embd=2304, n_ff=9216, version=2)
    assert second.n_parameters() == 2_614_341_888


def test_sizes_that_follow_from_others() -> None:
    model = Llama(vocab_size=5, n_layer=1, n_head=4, n_embd=64)
    assert (model.n_kv_head, model.head_dim, model.n_ff) == (4, 16, 192)
    assert Llama(vocab_size=5, n_layer=1, n_head=4, n_embd=128).n_ff == 352


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"n_embd": 30}, "model.n_embd"),
        ({"n_kv_head": 3}, "model.n_kv_head"),
        ({"head_dim": 7}, "model.head_dim"),
        ({"n_layer": 0}, "model.n_layer"),
        ({"version": 3}, "model.version"),
        ({"version": 1, "final_softcap": 3.0}, "model.final_softcap"),
        ({"version": 2, "sliding_window": -1}, "model.sliding_window"),
    ],
)
def test_sizes_that_cannot_be(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Gemma(**(SIZES | sizes))


def test_the_keys_of_the_configuration_are_the_models_sizes() -> None:
    every = set(ModelConfig.model_fields) - {"architecture"}
    for name in ARCHITECTURES:
        known = {f.name for f in fields(models.architecture(name))}  # type: ignore[arg-type]
        applies = {key for key in every if name in APPLIES.get(key, ARCHITECTURES)}
        assert applies == known
    assert set(ROPE_SCALING) == set(LLAMA3)


@pytest.mark.parametrize("name", ["llama-tiny", "gemma-tiny"])
def test_shipped_configurations(name: str) -> None:
    config = load_config(CONFIGS / f"{name}.json", ["model.vocab_size=65"])
    sizes = config.model.model_dump(exclude={"architecture"})
    model = models.build(config.model.architecture, **sizes)
    peer = GPT2(vocab_size=65, n_layer=4, n_head=4, n_embd=128, block_size=64)
    assert model.n_parameters() == pytest.approx(peer.n_parameters(), rel=0.12)


def test_rope_scaling_of_the_configuration() -> None:
    given = 'model.rope_scaling={"factor": 8, "original_max_position_embeddings": 32}'
    config = load_config(None, ["model.architecture=llama", given])
    built = models.build("llama", **SIZES, rope_scaling=config.model.rope_scaling)
    assert isinstance(built, Llama) and built.rope_scaling == SCALING


# ---------------------------------------------------------------- rotary frequencies


def test_frequencies() -> None:
    np.testing.assert_allclose(frequencies(10000.0, 4, None), [1.0, 0.01])
    linear = RopeScaling(4.0, kind="linear")
    np.testing.assert_allclose(frequencies(10000.0, 4, linear), [0.25, 0.0025])


def test_frequencies_of_llama_3_1() -> None:
    """In the terms of the paper's code: wavelengths, and three ranges of them."""
    scaling = RopeScaling(8.0, 1.0, 4.0, 8192)
    plain = frequencies(500000.0, 128, None)
    ranges = set()
    for before, after in zip(plain, frequencies(500000.0, 128, scaling), strict=True):
        wavelength = 2 * pi / before
        if wavelength < 8192 / 4:
            ranges.add("kept")
            assert after == before
        elif wavelength > 8192:
            ranges.add("divided")
            assert after == pytest.approx(before / 8, rel=1e-12)
        else:
            ranges.add("between")
            smooth = (8192 / wavelength - 1) / 3
            assert after == pytest.approx((1 - smooth) * before / 8 + smooth * before, rel=1e-12)
    assert len(ranges) == 3


def test_scalings_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="yarn"):
        RopeScaling(8.0, kind="yarn")
    with pytest.raises(ConfigError, match="low_freq_factor"):
        RopeScaling(8.0, 4.0, 1.0)


# ---------------------------------------------------------------- files


@every_model
def test_weights_survive_hugging_faces_form(model: Model) -> None:
    stated = json.loads(json.dumps(model.hf_config(eos_id=None)))
    assert models.from_hf_config(stated) == model
    weights = {p.name: p.initial(1) for p in model.parameters()}
    tensors = model.to_hf(weights)
    d = model.head_dim  # type: ignore[attr-defined]
    name = "model.layers.1.self_attn.k_proj.weight"
    assert tensors[name].shape == (model.n_kv_head * d, 32)  # type: ignore[attr-defined]
    packed = weights["model.layers.1.self_attn.qkv_proj.weight"]
    np.testing.assert_array_equal(tensors[name], packed[4 * d :][: len(tensors[name])])
    assert sum(t.size for t in tensors.values()) == model.n_parameters()
    assert ("lm_head.weight" in tensors) is not model.tie_embeddings  # type: ignore[attr-defined]
    back = model.from_hf(tensors)
    assert back.keys() == weights.keys()
    assert all(np.array_equal(back[key], weights[key]) for key in weights)
    with pytest.raises(CheckpointError, match=r"k_proj\.weight' has shape \[3, 32\]"):
        model.from_hf(tensors | {name: tensors[name][:3]})
    del tensors[name]
    with pytest.raises(CheckpointError, match=r"no tensor 'model\.layers\.1\.self_attn\.k_proj"):
        model.from_hf(tensors)


def test_rotary_keys_of_transformers_5() -> None:
    stated = SMALL["llama"].hf_config(eos_id=None)
    theta, scaling = stated.pop("rope_theta"), stated.pop("rope_scaling")
    stated["rope_parameters"] = {"rope_theta": theta, **scaling}
    assert models.from_hf_config(stated) == SMALL["llama"]


@pytest.mark.parametrize(
    ("name", "key", "value", "message"),
    [
        ("llama", "attention_bias", True, "attention_bias"),
        ("llama", "hidden_act", "relu", "relu"),
        ("llama", "hidden_size", None, "hidden_size"),
        ("llama", "rope_scaling", {"rope_type": "yarn", "factor": 2.0}, "yarn"),
        ("llama", "rope_scaling", {"rope_type": "llama3", "factor": 2.0}, "low_freq_factor"),
        ("gemma 2", "layer_types", ["full_attention", "sliding_attention"], "layer_types"),
        ("gemma 2", "use_bidirectional_attention", True, "bidirectional"),
    ],
)
def test_models_that_are_not_supported(name: str, key: str, value: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        models.from_hf_config({**SMALL[name].hf_config(eos_id=None), key: value})


@pytest.mark.parametrize("name", ["llama", "gemma 2"])
def test_values_of_any_kind_are_named_or_read(name: str) -> None:
    stated = SMALL[name].hf_config(eos_id=None)
    odd: list[Any] = ["x", None, [], {}, -1, 0, 1.5, float("nan"), float("inf"), 10**400, True]
    odd += [{"rope_type": [1]}, {"rope_type": "llama3", "factor": "x"}, ["x"], {"x": 1}]
    refused = 0
    for key in stated:
        for value in odd:
            try:
                models.from_hf_config({**stated, key: value})
            except CheckpointError as error:
                refused += 1
                assert "\n" not in str(error) and len(str(error)) < 300
    assert refused > 100


def test_a_gemma_2_that_sees_everything() -> None:
    model = replace(SMALL["gemma 2"], sliding_window=None)  # type: ignore[type-var]
    stated = model.hf_config(eos_id=None)
    assert set(stated["layer_types"]) == {"full_attention"}
    assert models.from_hf_config(stated) == model


# ---------------------------------------------------------------- learning


def steep(model: Model, backend: Backend) -> Session:
    """A session whose weights are away from the start, where attention sees all tokens alike."""
    run = session(model, backend, 1)  # type: ignore[arg-type]
    drawn = {p.name: (5 if len(p.shape) > 1 else 1) * p.initial(3) for p in model.parameters()}
    run.load_weights(drawn)
    return run


@every_model
def test_the_future_is_hidden_and_order_counts(model: Model) -> None:
    run = steep(model, fastest()).executable
    ids, decoder = [3, 1, 4, 1, 5, 9, 2, 6], Decoder(run, 24)
    logits = decoder.logits([ids])
    for filling in (0, 7):
        run.write("prompt_16", [ids + [filling] * 8])
        run.run("prefill_16")
        np.testing.assert_array_equal(run.read("logits"), logits)
    for other in ([7, *ids[1:]], [1, 3, *ids[2:]]):
        assert np.abs(decoder.logits([other]) - logits).max() > 1e-5
    cap = model.final_softcap
    assert cap is None or np.abs(logits).max() < cap


@every_model
@pytest.mark.parametrize(
    "backend", [NumpyBackend("float64"), pytest.param("cpu", marks=kernels)], ids=["f64", "cpu"]
)
def test_a_cache_gives_what_the_whole_text_gives(model: Model, backend: NumpyBackend | str) -> None:
    """Read at once and token by token, against the loss that evaluation computes."""
    device = cpu.CpuBackend(1) if isinstance(backend, str) else backend
    run, ids = steep(model, device), np.arange(24) * 7 % 29
    decoder, tolerance = Decoder(run.executable, 24), 1e-5 if isinstance(backend, str) else 1e-12
    for n in (1, 9, 10, 11, 17, 18, 24):
        targets = np.full((1, 24), IGNORE)
        targets[0, n - 1] = 5
        loss = run.evaluate([(ids[None], targets, 1)])
        (logits,) = decoder.logits([ids[:n].tolist()])
        found = np.log(np.exp(logits.astype(float)).sum()) - logits[5]
        assert found == pytest.approx(loss, abs=tolerance)


@kernels
@every_model
def test_numpy_and_cpu_lose_alike(model: Model) -> None:
    found = [
        losses(session(model, backend, 4), 30)  # type: ignore[arg-type]
        for backend in (NumpyBackend(), cpu.CpuBackend(1))
    ]
    assert np.isfinite(found).all() and found[1][-1] < found[1][0] - 0.5
    np.testing.assert_allclose(found[1], found[0], rtol=0, atol=1e-4)


@kernels
@every_model
def test_gradients_in_bf16(model: Model) -> None:
    """Of both backends against float64, at weights that bfloat16 can hold."""
    rng = np.random.default_rng(7)
    inputs, targets = rng.integers(0, 29, (2, 4, 24))
    weights = {}
    for p in model.parameters():
        drawn = p.initial(0) + 0.1 * rng.standard_normal(p.shape).astype(np.float32)
        weights[p.name] = from_bfloat16(to_bfloat16(drawn))
    grads = []
    for backend, precision in (
        (NumpyBackend("float64"), "fp32"),
        (NumpyBackend(), "bf16"),
        (cpu.CpuBackend(2), "bf16"),
    ):
        made = Session(model, backend, OptimizerSettings(), 4, 24, 1, 3, precision)
        made.initialise()
        made.load_weights(weights)
        made.step(0, inputs, targets, 0.0)
        grads.append({name: made.executable.read(f"{name}.grad") for name in weights})
    for name, exact in grads[0].items():
        naive, ours = (np.linalg.norm(g[name] - exact) / np.linalg.norm(exact) for g in grads[1:])
        assert ours < min(0.03, 1.5 * naive + 1e-3), (name, naive, ours)


@kernels
@pytest.mark.parametrize("name", ["llama", "gemma 2"])
def test_threads_do_not_change_a_bit(name: str) -> None:
    # Large enough that every kernel has several tasks to deal out.
    large = {"vocab_size": 300, "n_embd": 64, "n_ff": 176, "block_size": 96}
    model = replace(SMALL[name], **large)  # type: ignore[type-var]
    results = []
    for threads in (1, 2, 3):
        run = session(model, cpu.CpuBackend(threads), 6, grad_accum=2)
        results.append((losses(run, 4), run.weights() | run.optimizer_state()))
    (found, state), *others = results
    for other, other_state in others:
        assert other == found
        for key, array in state.items():
            assert array.tobytes() == other_state[key].tobytes(), key
