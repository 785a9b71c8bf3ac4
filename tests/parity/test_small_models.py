"""Small models that transformers saves: the same logits, losses and tensors, there and back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

import ours
import peer
from models import SMALL, VOCAB
from treadle.interop.hf import read_hf
from treadle.train.source import open_source, save_model

pytestmark = pytest.mark.parity

BATCH, TIME = 3, 17


@pytest.fixture(params=SMALL)
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[PreTrainedModel, Path]:
    """A model, and the directory that transformers wrote."""
    small = SMALL[request.param]
    model = small.model()
    stored = small.model().to(getattr(torch, small.dtype))
    whole = stored.base_model if small.body_only else stored
    return model, peer.save(whole, tmp_path / "theirs", **small.options)


def test_the_same_numbers(saved: tuple[PreTrainedModel, Path]) -> None:
    model, folder = saved
    imported = read_hf(folder)
    tokens, targets = peer.batch(VOCAB, BATCH, TIME)
    found = ours.numbers(imported.model, imported.weights, tokens, targets)
    wanted = peer.numbers(model, tokens, targets)
    assert np.abs(found.logits - wanted.logits).max() <= 1e-4
    assert np.abs(np.subtract(found.losses, wanted.losses)).max() <= 1e-4
    assert wanted.losses[-1] < wanted.losses[0] - 0.1
    for name, _, _, relative in peer.rows(found, wanted):
        assert relative <= 1e-5, name


def test_there_and_back(saved: tuple[PreTrainedModel, Path], tmp_path: Path) -> None:
    """What we write loads in transformers, with the tensors that were read, to the bit."""
    model, folder = saved
    imported = read_hf(folder)
    save_model(tmp_path / "ours", imported.model, imported.weights, None)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert isinstance(again, type(model))
    wanted, found = peer.parameters(model), peer.parameters(again)
    assert wanted.keys() == found.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name
    assert open_source(tmp_path / "ours").model == imported.model
    for name, array in open_source(tmp_path / "ours").weights.items():
        assert np.array_equal(array, imported.weights[name]), name


def test_pytorch_model_bin(tmp_path: Path) -> None:
    """PyTorch's own files, with the buffers and the explicit head that older ones have."""
    model = SMALL["gpt2"].model()
    state = model.state_dict()
    state["transformer.h.0.attn.bias"] = torch.ones(1, 1, 24, 24, dtype=torch.bool).tril()
    state["transformer.h.0.attn.masked_bias"] = torch.tensor(-1e4)
    # A view with strides, as a transposed tensor is saved.
    name = "transformer.h.1.mlp.c_fc.weight"
    state[name] = state[name].t().contiguous().t()
    model.config.save_pretrained(tmp_path)
    torch.save(state, tmp_path / "pytorch_model.bin")
    imported = read_hf(tmp_path)
    assert imported.notes == [] and imported.model.tie_embeddings
    for key, array in imported.weights.items():
        assert np.array_equal(array, state[key].numpy()), key


def test_a_head_that_is_not_the_embedding(tmp_path: Path) -> None:
    """Where both are stored and differ, config.json's word for tying does not count."""
    model = SMALL["gpt2 untied"].model()
    folder = peer.save(model, tmp_path / "theirs")
    config = (folder / "config.json").read_text()
    changed = config.replace('"tie_word_embeddings": false', '"tie_word_embeddings": true')
    assert changed != config
    (folder / "config.json").write_text(changed)
    imported = read_hf(folder)
    assert not imported.model.tie_embeddings and "lm_head.weight" in imported.notes[0]
    theirs = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokens, targets = peer.batch(VOCAB, BATCH, TIME)
    wanted = peer.numbers(theirs, tokens, targets, steps=1).logits
    found = ours.logits(imported.model, imported.weights, tokens)
    assert np.abs(found - wanted).max() <= 1e-4
    assert load_file(folder / "model.safetensors").keys() >= {"lm_head.weight"}
