"""GPT-2 (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners").

Weights carry Hugging Face's names and layouts: the linear layers of the blocks are [in, out].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from treadle.errors import CheckpointError, ConfigError
from treadle.files import one_line
from treadle.graph.value import Value
from treadle.models.base import Model, Parameter, Weights
from treadle.models.cache import Cache
from treadle.ops.attention import attention
from treadle.ops.elementwise import add
from treadle.ops.embedding import embedding
from treadle.ops.linear import linear
from treadle.ops.norm import layernorm
from treadle.ops.random import dropout

EPS = 1e-5
STD = 0.02

# What config.json may say of the architecture; Hugging Face's GPT-2 has other variants too.
_VARIANTS: dict[str, tuple[Any, ...]] = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (EPS,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
}


@dataclass(frozen=True)
class GPT2(Model):
    """Sizes of a GPT-2. tie_embeddings: the head is the token embedding's transpose."""

    vocab_size: int
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    block_size: int = 1024
    bias: bool = True
    dropout: float = 0.0
    tie_embeddings: bool = True
    architecture: ClassVar[str] = "gpt2"

    def __post_init__(self) -> None:
        for key in ("vocab_size", "n_layer", "n_head", "n_embd", "block_size"):
            if getattr(self, key) < 1:
                raise ConfigError(f"model.{key} must be at least 1, got {getattr(self, key)}")
        if self.n_embd % self.n_head:
            raise ConfigError(
                f"model.n_embd ({self.n_embd}) must be a multiple of model.n_head ({self.n_head})"
            )

    # ---------------------------------------------------------------- weights

    def parameters(self) -> list[Parameter]:
        c, v = self.n_embd, self.vocab_size
        residual = STD / (2 * self.n_layer) ** 0.5  # so that the residual stream keeps its scale
        found = [
            Parameter("transformer.wte.weight", (v, c), STD),
            Parameter("transformer.wpe.weight", (self.block_size, c), STD),
        ]

        def norm(name: str) -> None:
            found.append(Parameter(f"{name}.weight", (c,), fill=1.0))
            if self.bias:
                found.append(Parameter(f"{name}.bias", (c,)))

        def project(name: str, rows: int, columns: int, std: float = STD) -> None:
            found.append(Parameter(f"{name}.weight", (rows, columns), std))
            if self.bias:
                found.append(Parameter(f"{name}.bias", (columns,)))

        for i in range(self.n_layer):
            h = f"transformer.h.{i}"
            norm(f"{h}.ln_1")
            project(f"{h}.attn.c_attn", c, 3 * c)
            project(f"{h}.attn.c_proj", c, c, residual)
            norm(f"{h}.ln_2")
            project(f"{h}.mlp.c_fc", c, 4 * c)
            project(f"{h}.mlp.c_proj", 4 * c, c, residual)
        norm("transformer.ln_f")
        if not self.tie_embeddings:
            found.append(Parameter("lm_head.weight", (v, c), STD))
        return found

    # ---------------------------------------------------------------- graph

    def hidden(
        self,
        w: Weights,
        tokens: Value,
        random: Value | None = None,
        cache: Cache | None = None,
    ) -> Value:
        g = tokens.graph
        start = None if cache is None else cache.start
        x = embedding(tokens, w["transformer.wte.weight"], w["transformer.wpe.weight"], start)
        x = self._drop(x, random, "embd")
        for i in range(self.n_layer):
            with g.scope(f"h.{i}"):
                x = self._block(w, x, random, cache, i)
        return self._norm(w, x, "transformer.ln_f")

    def _block(
        self, w: Weights, x: Value, random: Value | None, cache: Cache | None, layer: int
    ) -> Value:
        """x + attention(norm(x)), then x + mlp(norm(x)): [B, T, C] to [B, T, C]."""
        h = f"transformer.h.{layer}"
        a = self._linear(w, self._norm(w, x, f"{h}.ln_1"), f"{h}.attn.c_attn")
        if cache is not None:
            a = cache.attend(layer, a, self.n_head, name=f"{h}.attn")
        else:
            dropped = self.dropout if random is not None else 0.0
            a = attention(a, self.n_head, dropout=dropped, random=random, name=f"{h}.attn")
        a = self._linear(w, a, f"{h}.attn.c_proj")
        x = add(x, self._drop(a, random, f"{h}.attn.resid"))
        m = self._linear(w, self._norm(w, x, f"{h}.ln_2"), f"{h}.mlp.c_fc", activation="gelu")
        m = self._linear(w, m, f"{h}.mlp.c_proj")
        return add(x, self._drop(m, random, f"{h}.mlp.resid"))

    def head(self, w: Weights) -> Value:
        return w["transformer.wte.weight" if self.tie_embeddings else "lm_head.weight"]

    def _norm(self, w: Weights, x: Value, name: str) -> Value:
        return layernorm(x, w[f"{name}.weight"], w.get(f"{name}.bias"), eps=EPS)

    def _linear(self, w: Weights, x: Value, name: str, activation: str | None = None) -> Value:
        return linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"), activation)

    def _drop(self, x: Value, random: Value | None, name: str) -> Value:
        return x if random is None else dropout(x, self.dropout, random, name)

    # ---------------------------------------------------------------- files

    def hf_config(self, eos_id: int | None) -> dict[str, Any]:
        return {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "vocab_size": self.vocab_size,
            "n_layer": self.n_layer,
            "n_head": self.n_head,
            "n_embd": self.n_embd,
            "n_positions": self.block_size,
            "n_ctx": self.block_size,
            "n_inner": None,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": EPS,
            "initializer_range": STD,
            "resid_pdrop": self.dropout,
            "embd_pdrop": self.dropout,
            "attn_pdrop": self.dropout,
            "tie_word_embeddings": self.tie_embeddings,
            "bos_token_id": eos_id,
            "eos_token_id": eos_id,
            "torch_dtype": "float32",
            "treadle": {"bias": self.bias},
        }

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> GPT2:
        """The model that a config.json describes; CheckpointError where a size is missing, or where
        it describes a variant of GPT-2 that this model is not."""
        for key, values in _VARIANTS.items():
            if key in config and config[key] not in values:
                raise CheckpointError(
                    f"config.json: {key} is {one_line(repr(config[key]), 60)}; this GPT-2 has "
                    f"{values[0]}"
                )
        try:
            n_embd, own = config["n_embd"], config.get("treadle")
            if config.get("n_inner") not in (None, 4 * n_embd):
                raise CheckpointError(
                    f"config.json: n_inner is {config['n_inner']}; this GPT-2 has 4 n_embd"
                )
            return cls(
                vocab_size=config["vocab_size"],
                n_layer=config["n_layer"],
                n_head=config["n_head"],
                n_embd=n_embd,
                block_size=config["n_positions"],
                bias=own.get("bias") is not False if isinstance(own, Mapping) else True,
                dropout=_probability(config.get("resid_pdrop", 0.0)),
                tie_embeddings=config.get("tie_word_embeddings") is not False,
            )
        except KeyError as error:
            raise CheckpointError(f"config.json has no {error}; it is not a GPT-2's") from None

    def to_hf(self, weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        tensors = dict(weights)
        if not self.bias:  # Hugging Face's GPT-2 has no switch for biases: it gets zeros
            full = GPT2(**{**self.__dict__, "bias": True})
            for p in full.parameters():
                tensors.setdefault(p.name, np.zeros(p.shape, np.float32))
        return tensors

    def from_hf(self, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        weights = {}
        for p in self.parameters():
            if p.name not in tensors:
                raise CheckpointError(f"the checkpoint has no tensor '{p.name}'")
            if tensors[p.name].shape != p.shape:
                raise CheckpointError(
                    f"tensor '{p.name}' has shape {list(tensors[p.name].shape)}, "
                    f"the model wants {list(p.shape)}"
                )
            weights[p.name] = np.asarray(tensors[p.name], np.float32)
        return weights


def _probability(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise CheckpointError(
            f"config.json: resid_pdrop is {one_line(repr(value), 60)}; expected 0 <= p < 1"
        )
    return float(value)
