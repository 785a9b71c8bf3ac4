"""Sizes of Llama and its relatives as Hugging Face's config.json states them, and the frequencies
of their rotary position embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import pi
from typing import Any

from treadle.errors import CheckpointError, ConfigError
from treadle.files import one_line

KINDS = ("linear", "llama3")
# What a kind is described by, in RopeScaling and in config.json.
LINEAR = ("factor",)
LLAMA3 = (*LINEAR, "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass(frozen=True)
class RopeScaling:
    """Frequencies lowered, so that a model reads longer texts than those it was trained on.

    kind "linear": all are divided by `factor` (Chen et al. 2023, "Extending Context Window of Large
    Language Models via Positional Interpolation").  kind "llama3", of Llama 3.1: so are those that
    turn at most low_freq_factor times in original_max_position_embeddings positions; those that
    turn high_freq_factor times or more stay; between them it goes over smoothly.
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    kind: str = "llama3"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(
                f"model.rope_scaling: unknown kind {self.kind!r}; one of {', '.join(KINDS)}"
            )
        if self.factor <= 0 or not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ConfigError(
                "model.rope_scaling: expected a factor above 0, and 0 < low_freq_factor < "
                f"high_freq_factor, got {self}"
            )

    def scaled(self, frequency: float) -> float:
        """A frequency, in radians a position, as the scaled model has it."""
        if self.kind == "linear":
            return frequency / self.factor
        turns = self.original_max_position_embeddings * frequency / (2 * pi)
        low, high = self.low_freq_factor, self.high_freq_factor
        kept = min(max((turns - low) / (high - low), 0.0), 1.0)
        return frequency * (kept + (1 - kept) / self.factor)


def frequencies(theta: float, size: int, scaling: RopeScaling | None) -> list[float]:
    """Radians a position of the size/2 pairs of a head: theta^(-2d/size), scaled where wanted."""
    plain = [theta ** (-d / size) for d in range(0, size, 2)]
    return plain if scaling is None else [scaling.scaled(f) for f in plain]


# ---------------------------------------------------------------- sizes


def complete(model: Any) -> None:
    """Give the sizes that are 0, and follow from others, their values; ConfigError where sizes
    do not fit. For the __post_init__ of a frozen dataclass."""
    for key in ("vocab_size", "n_layer", "n_head", "n_embd", "block_size"):
        if getattr(model, key) < 1:
            raise ConfigError(f"model.{key} must be at least 1, got {getattr(model, key)}")
    if isinstance(model.rope_scaling, Mapping):  # as a configuration has it
        object.__setattr__(model, "rope_scaling", RopeScaling(**model.rope_scaling))
    derived = {
        "n_kv_head": model.n_head,
        "head_dim": model.n_embd // model.n_head,
        "n_ff": -(-8 * model.n_embd // 96) * 32,
    }
    for key, value in derived.items():
        object.__setattr__(model, key, getattr(model, key) or value)
    for whole, part in (("n_embd", "n_head"), ("n_head", "n_kv_head")):
        if getattr(model, whole) % getattr(model, part):
            raise ConfigError(
                f"model.{whole} ({getattr(model, whole)}) must be a multiple of model.{part} "
                f"({getattr(model, part)})"
            )
    if model.head_dim % 2:
        raise ConfigError(f"model.head_dim must be even, for pairs to turn: {model.head_dim}")


# ---------------------------------------------------------------- config.json

MAX_NUMBER = 1e30
KEYS = {  # sizes as config.json names them
    "vocab_size": "vocab_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_kv_head": "num_key_value_heads",
    "head_dim": "head_dim",
    "n_embd": "hidden_size",
    "n_ff": "intermediate_size",
    "block_size": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
}


def write_sizes(model: Any, eos_id: int | None) -> dict[str, Any]:
    """What config.json says of a model's sizes, and of its tokens.

    The rotary keys are in the form that all versions of transformers read.
    """
    scaling: RopeScaling | None = model.rope_scaling
    stated = None
    if scaling is not None:
        names = LLAMA3 if scaling.kind == "llama3" else LINEAR
        stated = {"rope_type": scaling.kind, **{name: getattr(scaling, name) for name in names}}
    return {
        **{key: getattr(model, name) for name, key in KEYS.items()},
        "rope_theta": model.rope_theta,
        "rope_scaling": stated,
        "bos_token_id": eos_id,
        "eos_token_id": eos_id,
        "torch_dtype": "float32",
    }


def read_sizes(config: Mapping[str, Any], activation: str, tied: bool) -> dict[str, Any]:
    """Sizes of a model from its config.json; CheckpointError where one is missing, or where it
    states what no model here has.

    activation: the one that it must name, if any.  tied: whether embeddings are by default.
    """
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key):
            raise CheckpointError(f"config.json: {key} is not supported")
    named = config.get("hidden_activation") or config.get("hidden_act") or activation
    if named != activation:
        raise CheckpointError(
            f"config.json: expected the activation {activation}, got {one_line(str(named), 60)}"
        )
    optional = {"num_key_value_heads": 0, "head_dim": 0, "tie_word_embeddings": tied}
    found = {name: config.get(key, optional.get(key)) for name, key in KEYS.items()}
    for name, value in found.items():
        if value is None and KEYS[name] not in optional:
            raise CheckpointError(f"config.json has no {KEYS[name]!r}; such a model needs it")
    found |= {name: found[name] or 0 for name in ("n_kv_head", "head_dim")}
    found["norm_eps"] = number(config, KEYS["norm_eps"])
    found["tie_embeddings"] = bool(found["tie_embeddings"])
    return found | _read_rope(config)


def number(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """A number above 0 of config.json, `default` where it has none; else CheckpointError."""
    value: Any = default if config.get(key) is None else config[key]
    if not (type(value) in (int, float) and 0 < value < MAX_NUMBER):
        raise CheckpointError(
            f"config.json: {key} is {one_line(repr(value), 60)}; expected a number above 0"
        )
    return float(value)


def _read_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """transformers 5 writes one object, `rope_parameters`, in place of two keys."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        raise CheckpointError(
            f"config.json: rope scaling is {one_line(repr(given), 60)}; expected an object or null"
        )
    theta = number(given, "rope_theta", number(config, "rope_theta", 10000.0))
    kind, scaling = given.get("rope_type", given.get("type", "default")), None
    if kind != "default":
        if kind not in KINDS:
            raise CheckpointError(
                f"config.json: rope scaling {one_line(repr(kind), 60)} is not supported; "
                f"{', '.join(KINDS)} are"
            )
        names = LLAMA3 if kind == "llama3" else LINEAR
        values: dict[str, Any] = {name: number(given, name) for name in names}
        if kind == "llama3":
            values[LLAMA3[-1]] = int(values[LLAMA3[-1]])
        scaling = RopeScaling(**values, kind=kind)
    return {"rope_theta": theta, "rope_scaling": scaling}
