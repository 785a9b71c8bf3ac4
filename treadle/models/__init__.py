"""Architectures by name. Adding one means adding a file and a row here."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from treadle.errors import CheckpointError, ConfigError
from treadle.models.base import Model

# architecture: (module, class, model_type of Hugging Face's config.json)
ARCHITECTURES = {"gpt2": ("treadle.models.gpt2", "GPT2", "gpt2")}


def architecture(name: str) -> type[Model]:
    """The model class of that name; ConfigError for an unknown one."""
    if name not in ARCHITECTURES:
        raise ConfigError(
            f"model.architecture: unknown {name!r}; one of {', '.join(ARCHITECTURES)}"
        )
    module, cls, _ = ARCHITECTURES[name]
    return getattr(import_module(module), cls)


def build(name: str, **sizes: Any) -> Model:
    """A model by architecture name and sizes."""
    return architecture(name)(**sizes)


def from_hf_config(config: Mapping[str, Any]) -> Model:
    """The model that a Hugging Face config.json describes."""
    kind = config.get("model_type")
    for name, (_, _, model_type) in ARCHITECTURES.items():
        if model_type == kind:
            return architecture(name).from_hf_config(config)  # type: ignore[attr-defined]
    raise CheckpointError(f"config.json: unknown model_type {kind!r}; this version reads gpt2")
