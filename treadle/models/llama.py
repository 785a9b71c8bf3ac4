"""Llama (Touvron et al. 2023, "LLaMA: Open and Efficient Foundation Language Models"; Llama Team
2024, "The Llama 3 Herd of Models").

Weights carry Hugging Face's names and layouts: linear layers are [out, in]. Only the projections to
queries, keys and values are one weight here, `qkv_proj`, and three in files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from treadle.graph.value import Value
from treadle.models.base import Model, Parameter, Weights
from treadle.models.cache import Cache
from treadle.models.llama_config import RopeScaling, complete, frequencies, read_sizes, write_sizes
from treadle.ops.attention import attention
from treadle.ops.elementwise import add, gated
from treadle.ops.embedding import embedding
from treadle.ops.linear import linear
from treadle.ops.norm import rmsnorm
from treadle.ops.rope import rope

STD = 0.02


@dataclass(frozen=True)
class Llama(Model):
    """Sizes of a Llama. 0 stands for what follows from other sizes: n_kv_head for n_head, head_dim
    for n_embd / n_head, n_ff for 8/3 n_embd in whole 32s."""

    vocab_size: int
    n_layer: int = 12
    n_head: int = 12
    n_kv_head: int = 0
    head_dim: int = 0
    n_embd: int = 768
    n_ff: int = 0
    block_size: int = 1024
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_embeddings: bool = True
    architecture: ClassVar[str] = "llama"
    activation: ClassVar[str] = "silu"  # of the gate
    norm_offset: ClassVar[float] = 0.0  # what a norm adds to its weight

    def __post_init__(self) -> None:
        complete(self)

    # ---------------------------------------------------------------- weights

    def parameters(self) -> list[Parameter]:
        c, v, f, d = self.n_embd, self.vocab_size, self.n_ff, self.head_dim
        residual = STD / (2 * self.n_layer) ** 0.5  # so that the residual stream keeps its scale
        found = [Parameter("model.embed_tokens.weight", (v, c), STD)]
        for i in range(self.n_layer):
            h = f"model.layers.{i}"
            rows = {"q": self.n_head * d, "k": self.n_kv_head * d, "v": self.n_kv_head * d}
            parts = tuple((f"{h}.self_attn.{n}_proj.weight", rows[n]) for n in rows)
            packed = (sum(rows.values()), c)
            found += [self._gain(f"{h}.{name}") for name in self.norms()]
            found += [
                Parameter(f"{h}.self_attn.qkv_proj.weight", packed, STD, parts=parts),
                Parameter(f"{h}.self_attn.o_proj.weight", (c, self.n_head * d), residual),
                Parameter(f"{h}.mlp.gate_proj.weight", (f, c), STD),
                Parameter(f"{h}.mlp.up_proj.weight", (f, c), STD),
                Parameter(f"{h}.mlp.down_proj.weight", (c, f), residual),
            ]
        found.append(self._gain("model.norm"))
        if not self.tie_embeddings:
            found.append(Parameter("lm_head.weight", (v, c), STD))
        return found

    def norms(self) -> list[str]:
        """The norms of a block."""
        return ["input_layernorm", "post_attention_layernorm"]

    def _gain(self, name: str) -> Parameter:
        return Parameter(f"{name}.weight", (self.n_embd,), fill=1.0 - self.norm_offset)

    # ---------------------------------------------------------------- graph

    def hidden(
        self,
        w: Weights,
        tokens: Value,
        random: Value | None = None,
        cache: Cache | None = None,
    ) -> Value:
        x = self._embed(w, tokens)
        for i in range(self.n_layer):
            with tokens.graph.scope(f"h.{i}"):
                x = self._block(w, x, i, cache)
        return self._norm(w, x, "model.norm")

    def _embed(self, w: Weights, tokens: Value) -> Value:
        return embedding(tokens, w["model.embed_tokens.weight"])

    def _block(self, w: Weights, x: Value, i: int, cache: Cache | None) -> Value:
        """x + attention(norm(x)), then x + mlp(norm(x)): [B, T, C] to [B, T, C]."""
        h = f"model.layers.{i}"
        x = add(x, self._attention(w, self._norm(w, x, f"{h}.input_layernorm"), i, cache))
        return add(x, self._mlp(w, self._norm(w, x, f"{h}.post_attention_layernorm"), i))

    def _attention(self, w: Weights, x: Value, i: int, cache: Cache | None) -> Value:
        h, heads = f"model.layers.{i}.self_attn", (self.n_head, self.n_kv_head)
        qkv = self._linear(w, x, f"{h}.qkv_proj")
        turns = frequencies(self.rope_theta, self.head_dim, self.rope_scaling)
        qkv = rope(qkv, *heads, turns, start=None if cache is None else cache.start)
        if cache is None:
            a = attention(qkv, *heads, **self.scores(i), name=f"{h}.attn")
        else:
            a = cache.attend(i, qkv, *heads, **self.scores(i), name=f"{h}.attn")
        return self._linear(w, a, f"{h}.o_proj")

    def scores(self, i: int) -> dict[str, Any]:
        """Scale, window and soft cap of a layer's attention, where it has other than the usual."""
        return {}

    def _mlp(self, w: Weights, x: Value, i: int) -> Value:
        h = f"model.layers.{i}.mlp"
        gate, up = (self._linear(w, x, f"{h}.{name}_proj") for name in ("gate", "up"))
        return self._linear(w, gated(gate, up, self.activation), f"{h}.down_proj")

    def head(self, w: Weights) -> Value:
        return w["model.embed_tokens.weight" if self.tie_embeddings else "lm_head.weight"]

    def _norm(self, w: Weights, x: Value, name: str) -> Value:
        return rmsnorm(x, w[f"{name}.weight"], self.norm_eps, self.norm_offset)

    def _linear(self, w: Weights, x: Value, name: str) -> Value:
        return linear(x, w[f"{name}.weight"], transpose_weight=True)

    # ---------------------------------------------------------------- files

    def hf_config(self, eos_id: int | None) -> dict[str, Any]:
        kind = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"}
        return kind | write_sizes(self, eos_id)

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> Llama:
        """The model that a config.json describes; CheckpointError where that is not possible."""
        return cls(**read_sizes(config, "silu", tied=False))
