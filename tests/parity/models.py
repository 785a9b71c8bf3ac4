"""The small models that are compared, one of each kind that files come in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import peer
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedConfig, PreTrainedModel

VOCAB = 67
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
IDS = {"bos_token_id": 0, "eos_token_id": 0}


@dataclass(frozen=True)
class Small:
    """A configuration, and how its model is saved. dtype: of the saved weights."""

    config: PreTrainedConfig
    dtype: str = "float32"
    body_only: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def model(self, seed: int = 0) -> PreTrainedModel:
        """The model, float32, with weights of the saved dtype's precision."""
        import torch

        torch.manual_seed(seed)
        model = peer.randomised(AutoModelForCausalLM.from_config(self.config), std=0.05, seed=seed)
        return model.to(getattr(torch, self.dtype)).float()


def _gpt2(**changes: Any) -> GPT2Config:
    sizes = {"n_positions": 24, "n_embd": 24, "n_layer": 2, "n_head": 3}
    return GPT2Config(vocab_size=VOCAB, **(sizes | NO_DROPOUT | IDS | changes))


SMALL = {
    "gpt2": Small(_gpt2()),
    "gpt2 untied": Small(_gpt2(tie_word_embeddings=False)),
    "gpt2 fp16": Small(_gpt2(), "float16"),
    "gpt2 bf16": Small(_gpt2(), "bfloat16"),
    "gpt2 in shards": Small(_gpt2(), options={"max_shard_size": "20KB"}),
    "gpt2 without its head": Small(_gpt2(), body_only=True),
}

# Those of which tests/fixtures holds the numbers.
STORED = {"gpt2": Small(_gpt2(n_positions=12, n_embd=12, n_head=2))}
