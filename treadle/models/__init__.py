"""Architectures by name. Adding one means adding a file and a row here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from importlib import import_module
from typing import Any

from treadle.errors import CheckpointError, ConfigError
from treadle.models.base import Model

# architecture: (module, class, each model_type of Hugging Face's config.json)
ARCHITECTURES = {
    "gpt2": ("treadle.models.gpt2", "GPT2", ("gpt2",)),
    "llama": ("treadle.models.llama", "Llama", ("llama",)),
    "gemma": ("treadle.models.gemma", "Gemma", ("gemma", "gemma2")),
}


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
    """The model that a Hugging Face config.json describes."""
    kind = config.get("model_type")
    for name, (_, _, model_types) in ARCHITECTURES.items():
        if kind in model_types:
            return architecture(name).from_hf_config(config)  # type: ignore[attr-defined]
    known = ", ".join(t for _, _, model_types in ARCHITECTURES.values() for t in model_types)
    raise CheckpointError(f"config.json: unknown model_type {kind!r}; this version reads {known}")
