"""GPT-2 in tinygrad, the other framework that trains through OpenCL.

Names and layouts of the weights are Hugging Face's, which are Treadle's too.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from tinygrad import Tensor

from treadle.models.gpt2 import EPS
from treadle.models.gpt2 import GPT2 as Sizes


class GPT2:
    """Tokens and targets, int32 [B, T], to the mean cross-entropy. Without dropout."""

    def __init__(self, sizes: Sizes, weights: Mapping[str, np.ndarray]) -> None:
        self.sizes = sizes
        self.weights = {name: Tensor(w).realize() for name, w in weights.items()}

    def _linear(self, x: Tensor, name: str) -> Tensor:
        y = x @ self.weights[f"{name}.weight"]
        bias = self.weights.get(f"{name}.bias")
        return y if bias is None else y + bias

    def _norm(self, x: Tensor, name: str) -> Tensor:
        y = x.layernorm(eps=EPS) * self.weights[f"{name}.weight"]
        bias = self.weights.get(f"{name}.bias")
        return y if bias is None else y + bias

    def _attention(self, x: Tensor, name: str) -> Tensor:
        b, t, c = x.shape
        heads = self.sizes.n_head
        q, k, v = (
            y.reshape(b, t, heads, c // heads).transpose(1, 2)
            for y in self._linear(x, f"{name}.c_attn").split(c, dim=2)
        )
        y = q.scaled_dot_product_attention(k, v, is_causal=True)
        return self._linear(y.transpose(1, 2).reshape(b, t, c), f"{name}.c_proj")

    def __call__(self, tokens: Tensor, targets: Tensor) -> Tensor:
        wte, wpe = self.weights["transformer.wte.weight"], self.weights["transformer.wpe.weight"]
        x = wte[tokens] + wpe[: tokens.shape[1]]
        for i in range(self.sizes.n_layer):
            name = f"transformer.h.{i}"
            x = x + self._attention(self._norm(x, f"{name}.ln_1"), f"{name}.attn")
            inner = self._linear(self._norm(x, f"{name}.ln_2"), f"{name}.mlp.c_fc").gelu()
            x = x + self._linear(inner, f"{name}.mlp.c_proj")
        head = self.weights.get("lm_head.weight", wte)
        logits = self._norm(x, "transformer.ln_f") @ head.T
        return logits.reshape(-1, logits.shape[-1]).sparse_categorical_crossentropy(
            targets.reshape(-1)
        )
