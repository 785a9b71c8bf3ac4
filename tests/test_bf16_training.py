"""Training in bfloat16 follows training in float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import treadle
from treadle.backends import cpu
from treadle.data.corpus import Dataset
from treadle.data.sampler import Sampler
from treadle.models.gpt2 import GPT2
from treadle.train.program import OptimizerSettings
from treadle.train.session import Session

STEPS, WARMUP, WINDOW = 500, 50, 10
BATCH, TIME, RATE = 4, 32, 2e-3


def curve(data: Dataset, precision: str) -> np.ndarray:
    """The loss of each step of a small model, as means of WINDOW steps."""
    model = GPT2(data.vocab_size, n_layer=1, n_head=2, n_embd=64, block_size=TIME)
    sampler = Sampler(data.train, TIME, BATCH, seed=1)
    session = Session(
        *(model, cpu.CpuBackend(2), OptimizerSettings(), BATCH, TIME), seed=1, precision=precision
    )
    session.initialise()
    losses = []
    for step in range(STEPS):
        inputs, targets, _ = sampler.batch(step)
        losses.append(session.step(step, inputs, targets, RATE * min(1, (step + 1) / WARMUP)).loss)
    session.executable.close()
    return np.array(losses).reshape(-1, WINDOW).mean(axis=1)


@pytest.mark.skipif(not cpu.available(), reason="the C kernels are not built")
def test_the_loss_curve_of_bf16_stays_within_a_hundredth_of_that_of_fp32(shared_data: Path) -> None:
    data = treadle.load_data(shared_data / "tinyshakespeare.txt", tokenizer="char")
    wide, narrow = curve(data, "fp32"), curve(data, "bf16")
    assert wide[-1] < 2.55 < wide[0], "the model learns"
    assert np.any(wide != narrow)
    assert np.abs(narrow / wide - 1).max() < 0.01
