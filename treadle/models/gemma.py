"""Gemma (Gemma Team 2024, "Gemma: Open Models Based on Gemini Research and Technology") and Gemma 2
(Gemma Team 2024, "Gemma 2: Improving Open Language Models at a Practical Size").

A Llama with scaled embeddings, norms whose weights are kept around 0, and GeGLU. Version 2 also
norms what attention and MLP give, lets every other layer see a window only, and caps scores and
logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from treadle.errors import CheckpointError, ConfigError
from treadle.graph.value import Value
from treadle.models.base import Weights
from treadle.models.cache import Cache
from treadle.models.llama import Llama
from treadle.models.llama_config import number, read_sizes
from treadle.ops.elementwise import add, scale

GELU = "gelu_pytorch_tanh"  # in config.json
SECOND = {  # what version 2 alone has, as config.json names it
    "attn_softcap": "attn_logit_softcapping",
    "final_softcap": "final_logit_softcapping",
    "query_pre_attn_scalar": "query_pre_attn_scalar",
    "sliding_window": "sliding_window",
}
LAYERS = ("sliding_attention", "full_attention")  # of layers 0, 2, 4 … and 1, 3, 5 …


@dataclass(frozen=True)
class Gemma(Llama):
    """Sizes of a Gemma; see Llama. version: 1 or 2; the sizes behind it are those of version 2.

    query_pre_attn_scalar: scores are divided by its root; head_dim when None.  sliding_window: what
    layers 0, 2, 4 … see; everything when None.  attn_softcap, final_softcap: None for no cap.
    """

    norm_eps: float = 1e-6
    version: int = 1
    attn_softcap: float | None = None
    final_softcap: float | None = None
    query_pre_attn_scalar: float | None = None
    sliding_window: int | None = None
    architecture: ClassVar[str] = "gemma"
    activation: ClassVar[str] = "gelu"
    norm_offset: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.version not in (1, 2):
            raise ConfigError(f"model.version of a gemma must be 1 or 2, got {self.version}")
        for key in SECOND:
            value = getattr(self, key)
            if value is not None and self.version == 1:
                raise ConfigError(f"model.{key} does not apply to version 1 of gemma; drop it")
            if value is not None and value <= 0:
                raise ConfigError(f"model.{key} must be above 0, got {value}")

    # ---------------------------------------------------------------- graph

    def norms(self) -> list[str]:
        second = ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        return [*super().norms(), *(second if self.version == 2 else ())]

    def _embed(self, w: Weights, tokens: Value) -> Value:
        return scale(super()._embed(w, tokens), self.n_embd**0.5)

    def _block(self, w: Weights, x: Value, i: int, cache: Cache | None) -> Value:
        """In version 2 x + norm(attention(norm(x))), then x + norm(mlp(norm(x)))."""
        if self.version == 1:
            return super()._block(w, x, i, cache)
        h = f"model.layers.{i}"
        a = self._attention(w, self._norm(w, x, f"{h}.input_layernorm"), i, cache)
        x = add(x, self._norm(w, a, f"{h}.post_attention_layernorm"))
        m = self._mlp(w, self._norm(w, x, f"{h}.pre_feedforward_layernorm"), i)
        return add(x, self._norm(w, m, f"{h}.post_feedforward_layernorm"))

    def scores(self, i: int) -> dict[str, Any]:
        return {
            "scale": (self.query_pre_attn_scalar or self.head_dim) ** -0.5,
            "window": self.sliding_window if i % 2 == 0 else None,
            "softcap": self.attn_softcap,
        }

    # ---------------------------------------------------------------- files

    def hf_config(self, eos_id: int | None) -> dict[str, Any]:
        second = {}
        if self.version == 2:
            second = {key: getattr(self, name) for name, key in SECOND.items()}
            scalar = self.query_pre_attn_scalar or self.head_dim
            # An integer where it is one: transformers refuses 6.0 there.
            second["query_pre_attn_scalar"] = int(scalar) if scalar == int(scalar) else scalar
            # Without a window all layers see everything; the reader wants a number all the same.
            kinds = LAYERS if self.sliding_window else LAYERS[1:] * 2
            second["sliding_window"] = self.sliding_window or self.block_size
            second["layer_types"] = [kinds[i % 2] for i in range(self.n_layer)]
        return {
            **super().hf_config(eos_id),
            "architectures": ["Gemma2ForCausalLM" if self.version == 2 else "GemmaForCausalLM"],
            "model_type": "gemma2" if self.version == 2 else "gemma",
            "hidden_act": GELU,
            "hidden_activation": GELU,
            **second,
        }

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> Gemma:
        """The model that a config.json describes; CheckpointError as Llama's."""
        if config.get("hidden_activation") is None and config.get("hidden_act") == "gelu":
            config = {**config, "hidden_act": GELU}  # what older files mean by it
        sizes = read_sizes(config, GELU, tied=True)
        if config.get("model_type") != "gemma2":
            return cls(**sizes)
        if config.get("use_bidirectional_attention"):
            raise CheckpointError("config.json: use_bidirectional_attention is not supported")
        caps = [key for name, key in SECOND.items() if name != "sliding_window"]
        stated = {k: number(config, k) for k in caps if config.get(k) is not None}
        second: dict[str, Any] = {n: stated.get(k, config.get(k)) for n, k in SECOND.items()}
        n_layer = sizes["n_layer"]
        kinds = config.get("layer_types") or [LAYERS[i % 2] for i in range(n_layer)]
        if kinds == [LAYERS[1]] * n_layer:
            second["sliding_window"] = None
        elif kinds != [LAYERS[i % 2] for i in range(n_layer)]:
            raise CheckpointError(
                f"config.json: expected layer_types {' and '.join(LAYERS)} in turn"
            )
        return cls(version=2, **second, **sizes)
