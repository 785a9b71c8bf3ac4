"""The small models that are compared, one of each kind that files come in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GemmaConfig,
    GPT2Config,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

import peer

VOCAB = 67
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
IDS = {"bos_token_id": 0, "eos_token_id": 0}


@dataclass(frozen=True)
class Small:
    """A configuration, and how its model is saved. dtype: of the saved weights.

    A token for padding would have no gradient in PyTorch's embedding, so there is none.
    """

    config: PreTrainedConfig
    dtype: str = "float32"
    body_only: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def model(self, seed: int = 0) -> PreTrainedModel:
        """The model, float32, with weights of the saved dtype's precision."""
        import torch

        torch.manual_seed(seed)
        model = peer.randomised(self.fresh(), std=0.05, seed=seed)
        with torch.no_grad():  # of the parameters alone, since the buffers are never stored
            for p in model.parameters():
                p.copy_(p.to(getattr(torch, self.dtype)))
        return model

    def fresh(self) -> PreTrainedModel:
        """The model with its usual weights. Scores are computed plainly, since PyTorch's fused
        attention knows no soft cap."""
        return AutoModelForCausalLM.from_config(self.config, attn_implementation="eager")


def _gpt2(**changes: Any) -> GPT2Config:
    sizes = {"n_positions": 24, "n_embd": 24, "n_layer": 2, "n_head": 3}
    return GPT2Config(vocab_size=VOCAB, **(sizes | NO_DROPOUT | IDS | changes))


def _llama(**changes: Any) -> LlamaConfig:
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 24}
    return LlamaConfig(vocab_size=VOCAB, **(sizes | heads | IDS | changes))


def _gemma(kind: type[GemmaConfig | Gemma2Config], **changes: Any) -> PreTrainedConfig:
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1, "max_position_embeddings": 24}
    return kind(vocab_size=VOCAB, **(sizes | heads | IDS | {"pad_token_id": None} | changes))


def _rope(kind: str, **values: float) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 500.0, **values}


# Of Llama 3.1: frequencies of a context of 8 tokens, stretched.
LLAMA3 = _rope(
    "llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8,
)
GEMMA2 = _gemma(
    Gemma2Config,
    sliding_window=5,
    query_pre_attn_scalar=6,
    attn_logit_softcapping=2.0,
    final_logit_softcapping=1.5,
    num_key_value_heads=2,
)

SMALL = {
    "gpt2": Small(_gpt2()),
    "gpt2 untied": Small(_gpt2(tie_word_embeddings=False)),
    "gpt2 fp16": Small(_gpt2(), "float16"),
    "gpt2 bf16": Small(_gpt2(), "bfloat16"),
    "gpt2 in shards": Small(_gpt2(), options={"max_shard_size": "20KB"}),
    "gpt2 without its head": Small(_gpt2(), body_only=True),
    "llama": Small(_llama()),
    "llama tied": Small(_llama(tie_word_embeddings=True, num_key_value_heads=4)),
    "llama with one key head": Small(_llama(num_key_value_heads=1, head_dim=10)),
    "llama 3.1": Small(_llama(rope_parameters=LLAMA3)),
    "llama stretched": Small(_llama(rope_parameters=_rope("linear", factor=3.0))),
    "llama bf16 in shards": Small(_llama(), "bfloat16", options={"max_shard_size": "10KB"}),
    "llama without its head": Small(_llama(tie_word_embeddings=True), body_only=True),
    "gemma": Small(_gemma(GemmaConfig)),
    "gemma 2": Small(GEMMA2),
    "gemma 2 fp16": Small(GEMMA2, "float16"),
}

# Those of which tests/fixtures holds the numbers.
STORED = {
    "gpt2": Small(_gpt2(n_positions=12, n_embd=12, n_head=2)),
    "llama": Small(
        _llama(hidden_size=16, intermediate_size=24, num_attention_heads=2, num_key_value_heads=1,
               max_position_embeddings=12, rope_parameters=LLAMA3)
    ),
    "gemma": Small(_gemma(GemmaConfig, hidden_size=16, intermediate_size=24, head_dim=6)),
    "gemma2": Small(GEMMA2),
}  # fmt: skip
