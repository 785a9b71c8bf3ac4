"""Write an llm.c model and its debug state from random weights, with PyTorch.

    python tools/make_llmc_state.py MODEL.bin STATE.bin
    treadle check --llmc-state MODEL.bin STATE.bin

The files are those that llm.c's train_gpt2.py writes (model version 3, state version 2), here of
any size. The header of the state also records, from word 4 on, the losses of ten AdamW steps,
which llm.c's test knows for one model alone. PyTorch and NumPy are all that this needs; it shares
no code with Treadle, so that the two can disagree.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

MODEL_MAGIC, STATE_MAGIC = 20240326, 20240327
MODEL_VERSION, STATE_VERSION = 3, 2
PADDING = 128
STEPS = 10


# ---------------------------------------------------------------- the model


class Block(nn.Module):
    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.qkv, self.attproj = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)
        self.fc, self.fcproj = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        q, k, v = (
            part.view(b, t, self.heads, c // self.heads).transpose(1, 2)
            for part in self.qkv(self.ln1(x)).split(c, dim=2)
        )
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attproj(a.transpose(1, 2).reshape(b, t, c))
        return x + self.fcproj(F.gelu(self.fc(self.ln2(x)), approximate="tanh"))


class GPT2(nn.Module):
    """GPT-2 with a head that is the token embedding's transpose."""

    def __init__(self, vocab: int, block: int, layers: int, heads: int, channels: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, channels), nn.Embedding(block, channels)
        self.blocks = nn.ModuleList(Block(channels, heads) for _ in range(layers))
        self.lnf = nn.LayerNorm(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.wte(x) + self.wpe(torch.arange(x.shape[1]))
        for block in self.blocks:
            h = block(h)
        return self.lnf(h) @ self.wte.weight.T

    def in_order(self) -> list[nn.Parameter]:
        """The parameters in the order of llm.c's files: each kind for all layers together."""
        found = [self.wte.weight, self.wpe.weight]
        for part in ("ln1", "qkv", "attproj", "ln2", "fc", "fcproj"):
            for kind in ("weight", "bias"):
                found += [getattr(getattr(block, part), kind) for block in self.blocks]
        return [*found, self.lnf.weight, self.lnf.bias]


def randomise(model: GPT2, layers: int, std: float) -> None:
    """GPT-2's initialisation; norms and biases move too, so that an error in them shows."""
    for name, p in model.named_parameters():
        scale = 1 / math.sqrt(2 * layers) if "proj.weight" in name else 1.0
        nn.init.normal_(p, mean=1.0 if "ln" in name and "weight" in name else 0.0, std=std * scale)


# ---------------------------------------------------------------- files


def header(*words: int) -> np.ndarray:
    found = np.zeros(256, "<i4")
    found[: len(words)] = words
    return found


def padded(tensors: list[torch.Tensor]) -> bytes:
    """The bytes of tensors in float32; the first, wte or its gradient, gets rows of zeros."""
    rows = -tensors[0].shape[0] % PADDING
    first = F.pad(tensors[0], (0, 0, 0, rows))
    return b"".join(t.detach().numpy().astype("<f4").tobytes() for t in (first, *tensors[1:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("state", type=Path)
    for name, default in (
        *(("vocab", 97), ("block", 16), ("layers", 2), ("heads", 2), ("channels", 24)),
        *(("batch", 3), ("time", 12), ("seed", 1337)),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--std", type=float, default=0.1, help="of the weights; default 0.1")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    model = GPT2(args.vocab, args.block, args.layers, args.heads, args.channels)
    randomise(model, args.layers, args.std)
    weights = padded(model.in_order())

    ids = torch.randint(args.vocab, (args.batch, args.time + 1))
    x, y = ids[:, :-1], ids[:, 1:]
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01
    )
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        logits = model(x)
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
        loss.backward()
        if step == 0:
            first = logits.detach()
            gradients = padded([p.grad for p in model.in_order()])
        optimizer.step()
        losses.append(loss.item())

    rows = args.vocab + -args.vocab % PADDING
    sizes = (args.block, args.vocab, args.layers, args.heads, args.channels, rows)
    args.model.write_bytes(header(MODEL_MAGIC, MODEL_VERSION, *sizes).tobytes() + weights)
    top = header(STATE_MAGIC, STATE_VERSION, args.batch, args.time)
    top[4 : 4 + STEPS] = np.array(losses, "<f4").view("<i4")
    args.state.write_bytes(
        top.tobytes()
        + b"".join(t.numpy().astype("<i4").tobytes() for t in (x, y))
        + first.numpy().astype("<f4").tobytes()
        + np.array([losses[0]], "<f4").tobytes()
        + gradients
    )
    print(f"{args.model} and {args.state}: loss {losses[0]:.6f}, after ten steps {losses[-1]:.6f}")


if __name__ == "__main__":
    main()
