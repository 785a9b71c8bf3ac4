"""GPT-2 124M with random weights: the same numbers as PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import ours
import peer
from treadle.interop.base import Imported
from treadle.interop.hf import read_hf

pytestmark = pytest.mark.parity

BATCH, TIME = 2, 64
LR = 1e-4

Show = Callable[[str], None]
Setting = tuple[Path, Imported, np.ndarray, np.ndarray, ours.Numbers]


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    """The model's directory, as we read it, a batch, and PyTorch's numbers in float32."""
    config = GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    model = peer.randomised(GPT2LMHeadModel(config))
    folder = peer.save(model, tmp_path_factory.mktemp("gpt2"))
    tokens, targets = peer.batch(config.vocab_size, BATCH, TIME)
    wanted = peer.numbers(model, tokens, targets, lr=LR)
    return folder, read_hf(folder), tokens, targets, wanted


def test_fp32(setting: Setting, show: Show) -> None:
    _, imported, tokens, targets, wanted = setting
    found = ours.numbers(imported.model, imported.weights, tokens, targets, lr=LR)
    rows = peer.rows(found, wanted)
    show(peer.table("GPT-2 124M, fp32, against PyTorch's fp32", rows))
    steps = [abs(a - b) for a, b in zip(found.losses, wanted.losses, strict=True)]
    show(f"losses of {len(steps)} AdamW steps: largest difference {max(steps):.2e}")
    assert len(found.grads) == len(wanted.grads) == 148
    assert all(relative <= 1e-5 for *_, relative in rows)
    assert abs(found.loss - wanted.loss) <= 1e-5 * wanted.loss
    assert max(steps) <= 1e-4
    assert wanted.losses[-1] < wanted.losses[0] - 1  # it did train


def test_bf16(setting: Setting, show: Show) -> None:
    """At most twice the error of PyTorch's own bfloat16, both against its float32."""
    folder, imported, tokens, targets, wanted = setting
    model = GPT2LMHeadModel.from_pretrained(folder, dtype=torch.bfloat16).eval()
    theirs = peer.numbers(model, tokens, targets, steps=1)
    found = ours.numbers(
        imported.model, imported.weights, tokens, targets, precision="bf16", steps=1
    )
    mine, other = peer.rows(found, wanted), peer.rows(theirs, wanted)
    show(peer.table("GPT-2 124M, bf16, against PyTorch's fp32", mine))
    show(peer.table("PyTorch's own bf16, against its fp32", other))
    for (name, *_, error), (_, *_, limit) in zip(mine, other, strict=True):
        assert error <= 2 * limit, name
    assert abs(found.loss - wanted.loss) <= 2 * max(abs(theirs.loss - wanted.loss), 1e-3)
