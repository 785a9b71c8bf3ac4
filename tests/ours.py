"""What Treadle computes for a model and a batch: logits, loss, gradients, ten losses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from treadle import backends
from treadle.backends.base import Backend
from treadle.data.sampler import Sampler
from treadle.generate import write_weight
from treadle.graph.op import cast
from treadle.graph.program import Program
from treadle.models.base import Model, declare, read_weights
from treadle.models.gpt2 import GPT2
from treadle.passes.fuse import fuse
from treadle.train.program import OptimizerSettings
from treadle.train.session import Session

# What the peer's AdamW is given as well.
LEARNING_RATE = 1e-3
OPTIMIZER = OptimizerSettings(betas=(0.9, 0.95), weight_decay=0.1, grad_clip=1.0)
STEPS = 10

Arrays = dict[str, np.ndarray]


@dataclass
class Numbers:
    """logits [B, T, V]; loss: mean cross-entropy; grads of the loss, unclipped, by the names of
    Hugging Face's files; losses before each of STEPS optimizer steps on the same batch."""

    logits: np.ndarray
    loss: float
    grads: Arrays
    losses: list[float]


def logits(
    model: Model,
    weights: Mapping[str, np.ndarray],
    tokens: np.ndarray,
    device: str = "cpu",
    precision: str = "fp32",
) -> np.ndarray:
    """float32 [B, T, V] for tokens int32 [B, T]."""
    program = Program()
    declare(program, model, precision)
    g = program.graph("logits")
    read = g.read(program.buffer("tokens", tokens.shape, "int32", "input"))
    values = read_weights(program, g, model)
    result = cast(model.logits(values, model.hidden(values, read)), "float32")
    g.assign(program.buffer("logits", result.shape, "float32", "output"), result)
    fuse(g)
    run = backends.select(device, None)[0].load(program)
    for p in model.parameters():
        write_weight(run, p.name, weights[p.name])
    run.write("tokens", tokens)
    run.run("logits")
    found = run.read("logits")
    run.close()
    return found


def numbers(
    model: Model,
    weights: Mapping[str, np.ndarray],
    tokens: np.ndarray,
    targets: np.ndarray,
    device: str = "cpu",
    precision: str = "fp32",
    steps: int = STEPS,
    lr: float = LEARNING_RATE,
) -> Numbers:
    """Everything at once; tokens and targets int32 [B, T]."""
    found = logits(model, weights, tokens, device, precision)
    backend = backends.select(device, None)[0]
    batch, time = tokens.shape
    session = Session(model, backend, OPTIMIZER, batch, time, precision=precision)
    session.initialise()
    session.load_weights(weights)
    grads: Arrays = {}
    losses = []
    for step in range(steps):
        losses.append(session.step(step, tokens, targets, lr).loss)
        if step == 0:
            run = session.executable
            read = {p.name: run.read(f"{p.name}.grad") for p in model.parameters()}
            grads = model.to_hf(read)
    session.executable.close()
    return Numbers(found, losses[0], grads, losses)


def losses_on_a_text(
    backend: Backend, text: Path, batch_size: int, steps: int, **sizes: int
) -> np.ndarray:
    """The losses of so many steps of a GPT-2 of these sizes on the characters of a text."""
    read = text.read_text(encoding="utf-8")[:200_000]
    letters = sorted(set(read))
    tokens = np.array([letters.index(c) for c in read], np.int32)
    model = GPT2(len(letters), **sizes)
    session = Session(model, backend, OptimizerSettings(), batch_size, model.block_size, seed=3)
    session.initialise()
    windows = Sampler(tokens, model.block_size, batch_size, seed=1)
    found = []
    for step in range(steps):
        inputs, targets, _ = windows.batch(step)
        found.append(session.step(step, inputs, targets, lr=1e-3).loss)
    session.executable.close()
    return np.array(found)


def relative(found: np.ndarray, wanted: np.ndarray) -> float:
    """The norm of the difference, over the norm of what is wanted."""
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))
