"""Checkpoints trained here, loaded by transformers as they are: the same ids, the same text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import treadle
from runs import succeed, write_text

pytestmark = pytest.mark.parity

TOKENS = 64
TEXT = "the cat sat on  a red mat  and his old dog ran far "
KINDS = {
    "char": ("--tokenizer", "char"),
    "byte": ("--tokenizer", "byte"),
    "bpe": ("--tokenizer", "bpe", "--set", "data.vocab_size=300"),
    "without biases": ("--tokenizer", "char", "--set", "model.bias=false"),
    "untied": ("--tokenizer", "char", "--set", "model.tie_embeddings=false"),
    "padded vocabulary": ("--tokenizer", "char", "--set", "model.vocab_size=64"),
}


@pytest.mark.parametrize("flags", KINDS.values(), ids=KINDS)
def test_transformers_goes_on_with_the_same_text(tmp_path: Path, flags: tuple[str, ...]) -> None:
    run = tmp_path / "run"
    succeed(
        *("train", "--data", write_text(tmp_path / "text.txt"), "--out", run, *flags),
        *("--n-layer", 2, "--n-head", 2, "--n-embd", 32, "--block-size", 128),
        *("--batch-size", 4, "--steps", 60, "--lr", 3e-3, "--set", "train.sample_every=0"),
    )
    folder = run / "checkpoints" / "step-00000060"
    mine = treadle.load(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert mine.tokenizer is not None
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    assert ids == mine.tokenizer.encode(TEXT).tolist()
    assert tokenizer.decode(ids) == TEXT
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    prompt = tokenizer.encode("the cat", add_special_tokens=False, return_tensors="pt")
    with torch.no_grad():
        # With a mask, lest generate takes a token of the prompt for padding.
        theirs = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=TOKENS,
            do_sample=False,
            pad_token_id=0,
        )
    text = mine.generate("the cat", TOKENS, temperature=0)
    new = theirs[0, prompt.shape[1] :].tolist()
    expected = "the cat" + tokenizer.decode(new, skip_special_tokens=True)
    assert text == expected
    assert len(new) == TOKENS or new[-1] == mine.tokenizer.eos_id
    logits = model(prompt).logits[0, -1].detach().numpy()
    assert np.isfinite(logits).all()
