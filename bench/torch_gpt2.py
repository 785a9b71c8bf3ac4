"""GPT-2 in PyTorch, as the reference to agree with and to outrun.

Names and layouts of the weights are Hugging Face's, which are Treadle's too.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from treadle.models.gpt2 import EPS
from treadle.models.gpt2 import GPT2 as Sizes


class Conv1D(nn.Module):
    """x · W + b, with W [in, out]."""

    def __init__(self, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.t(), self.bias)


class Attention(nn.Module):
    """Causal self-attention: [B, T, C] to [B, T, C]."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        c = sizes.n_embd
        self.n_head = sizes.n_head
        self.c_attn = Conv1D(c, 3 * c, sizes.bias)
        self.c_proj = Conv1D(c, c, sizes.bias)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (
            y.view(b, t, self.n_head, c // self.n_head).transpose(1, 2)
            for y in self.c_attn(x).split(c, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(b, t, c))


class MLP(nn.Module):
    """Two linear layers with GELU in its tanh form between them."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        c = sizes.n_embd
        self.c_fc = Conv1D(c, 4 * c, sizes.bias)
        self.c_proj = Conv1D(4 * c, c, sizes.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(sizes.n_embd, EPS, bias=sizes.bias)
        self.attn = Attention(sizes)
        self.ln_2 = nn.LayerNorm(sizes.n_embd, EPS, bias=sizes.bias)
        self.mlp = MLP(sizes)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT2(nn.Module):
    """Tokens and targets, int64 [B, T], to the mean cross-entropy. Without dropout."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(sizes.vocab_size, sizes.n_embd),
                "wpe": nn.Embedding(sizes.block_size, sizes.n_embd),
                "h": nn.ModuleList(Block(sizes) for _ in range(sizes.n_layer)),
                "ln_f": nn.LayerNorm(sizes.n_embd, EPS, bias=sizes.bias),
            }
        )
        self.lm_head = None
        if not sizes.tie_embeddings:
            self.lm_head = nn.Linear(sizes.n_embd, sizes.vocab_size, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        wte, wpe = self.transformer["wte"], self.transformer["wpe"]
        x = wte(tokens) + wpe.weight[: tokens.shape[1]]
        for block in self.transformer["h"]:
            x = block(x)
        head = wte if self.lm_head is None else self.lm_head
        logits = F.linear(self.transformer["ln_f"](x), head.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
