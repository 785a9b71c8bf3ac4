"""The same numbers from PyTorch and transformers, on the CPU."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from ours import LEARNING_RATE, OPTIMIZER, STEPS, Numbers, relative

Row = tuple[str, int, float, float]  # tensor, how many, largest error, relative error in norm


def randomised(model: PreTrainedModel, std: float = 0.02, seed: int = 0) -> PreTrainedModel:
    """The model with noise on every parameter, so that no bias is 0 and no norm 1."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=draw), alpha=std)
    return model.eval()


def batch(vocab_size: int, rows: int, columns: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and targets, int32 [rows, columns]."""
    ids = np.random.default_rng(seed).integers(0, vocab_size, (rows, columns + 1), np.int32)
    return ids[:, :-1].copy(), ids[:, 1:].copy()


def parameters(model: PreTrainedModel) -> dict[str, torch.nn.Parameter]:
    """The parameters by name; a head that is tied to the embedding has none of its own."""
    return dict(model.named_parameters())


def numbers(
    model: PreTrainedModel,
    tokens: np.ndarray,
    targets: np.ndarray,
    steps: int = STEPS,
    lr: float = LEARNING_RATE,
) -> Numbers:
    """As `ours.numbers`; changes the model."""
    x, y = torch.from_numpy(tokens).long(), torch.from_numpy(targets).long()
    named = parameters(model)
    decays = [p for p in named.values() if p.dim() >= 2]
    others = [p for p in named.values() if p.dim() < 2]
    groups = [
        {"params": decays, "weight_decay": OPTIMIZER.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr, OPTIMIZER.betas, OPTIMIZER.eps)
    losses: list[float] = []
    logits, grads = np.empty(0), {}
    for step in range(steps):
        found = model(input_ids=x, use_cache=False).logits.float()
        loss = cross_entropy(found.flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.item())
        if step == 0:
            logits = found.detach().numpy()
            grads = {name: p.grad.float().numpy().copy() for name, p in named.items()}
        torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.grad_clip)
        optimizer.step()
    return Numbers(logits, losses[0], grads, losses)


def rows(found: Numbers, wanted: Numbers) -> list[Row]:
    """The errors of logits and gradients, a row for tensors that differ in the layer alone: the
    largest of their errors."""
    pairs = {"logits": (found.logits, wanted.logits)}
    pairs |= {f"d {name}": (found.grads[name], dw) for name, dw in wanted.grads.items()}
    groups: dict[str, list[tuple[float, float]]] = {}
    for name, (a, b) in pairs.items():
        key = re.sub(r"\.\d+\.", ".*.", name)
        groups.setdefault(key, []).append((float(np.abs(a - b).max()), relative(a, b)))
    return [(key, len(v), max(a for a, _ in v), max(b for _, b in v)) for key, v in groups.items()]


def table(title: str, lines: Iterable[Row]) -> str:
    """The rows as text."""
    head = f"{title}\n{'tensor':<52}{'number':>7}{'max error':>12}{'relative':>12}"
    return "\n".join([head, *(f"{k:<52}{n:>7}{a:>12.2e}{r:>12.2e}" for k, n, a, r in lines)])


def save(model: PreTrainedModel, folder: Path, **options: object) -> Path:
    """The model as transformers writes it."""
    model.save_pretrained(folder, **options)
    return folder
