"""Architectures by name. Adding one means adding a file and a row here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from importlib import import_module
from typing import Any

from treadle.errors import CheckpointError, ConfigError
from treadle.files import one_line
from treadle.models.base import Model

# architecture: (module, class, each model_type of Hugging Face's config.json)
ARCHITECTURES = {
    "gpt2": ("treadle.models.gpt2", "GPT2", ("gpt2",)),
    "llama": ("treadle.models.llama", "Llama", ("llama",)),
    "gemma": ("treadle.models.gemma", "Gemma", ("gemma", "gemma2")),
}

# Keys of Hugging Face's config.json that count something.
_COUNTS = frozenset(
    {
        *("vocab_size", "n_layer", "n_head", "n_embd", "n_positions", "n_inner", "hidden_size"),
        *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
        *("intermediate_size", "max_position_embeddings", "sliding_window"),
    }
)
MAX_COUNT = 1 << 31


def architecture(name: str) -> type[Model]:
    """The model class of that name; ConfigError for an unknown one."""
    if name not in ARCHITECTURES:
        raise ConfigError(
            f"model.architecture: unknown {name!r}; one of {', '.join(ARCHITECTURES)}"
        )
    module, cls, _ = ARCHITECTURES[name]
    return getattr(import_module(module), cls)


def build(name: str, **sizes: Any) -> Model:
    """A model by architecture name and sizes; a size that is None, or that such a model does not
    have, is left out (config.py refuses what would make a difference)."""
    cls = architecture(name)
    known = {f.name for f in fields(cls)}  # type: ignore[arg-type]
    return cls(**{k: v for k, v in sizes.items() if k in known and v is not None})


def from_hf_config(config: Mapping[str, Any]) -> Model:
    """The model that a Hugging Face config.json describes; CheckpointError where it describes none
    that this version has, or holds values that cannot be."""
    kind = config.get("model_type")
    known = {
        model_type: name for name, (*_, kinds) in ARCHITECTURES.items() for model_type in kinds
    }
    if not isinstance(kind, str) or kind not in known:
        raise CheckpointError(
            f"config.json: unknown model_type {one_line(repr(kind), 60)}; this version reads "
            f"{', '.join(known)}"
        )
    for key in _COUNTS & config.keys():
        value = config[key]
        if value is not None and not (type(value) is int and 0 < value < MAX_COUNT):
            raise CheckpointError(
                f"config.json: {key} is {one_line(repr(value), 60)}; expected a whole number from "
                f"1 to {MAX_COUNT - 1}"
            )
    present = {key: value for key, value in config.items() if value is not None}
    try:
        return architecture(known[kind]).from_hf_config(present)  # type: ignore[attr-defined]
    except ConfigError as error:  # the sizes do not fit each other
        raise CheckpointError(f"config.json: {error}") from None
    except (TypeError, ValueError, AttributeError, OverflowError, KeyError) as error:
        raise CheckpointError(f"config.json: a value of another kind ({one_line(error)})") from None


def check_layers(model: Model, tensors: int) -> None:
    """CheckpointError where config.json says more layers than there are tensors: a model is listed
    parameter by parameter, so a number alone must not make a long list."""
    if model.n_layer > tensors:
        raise CheckpointError(
            f"config.json says {model.n_layer} layers, but there are only {tensors} tensors"
        )
