"""The configuration: one typed model per section, from which help, schema and docs are made.

A configuration is a JSON object of six sections (`model`, `data`, `train`, `optimizer`, `schedule`,
`checkpoint`); a dotted key such as `train.batch_size` names one value everywhere: in files, in
`--set KEY=VALUE`, in errors and in the docs. A key that is null follows the size of the corpus, by
the table `SIZES`, or another key, as its description says.

    load_config(path, overrides, flags)   file < --set < flags, validated
    fill_from_corpus(config, n_bytes)     the nulls that follow the corpus, filled
    inherit(config, saved)                on resume: what was not given comes from the saved run
    diff_configs(a, b)                    the keys that differ

Every fault is a `ConfigError` of one line: the key, the value, and what is allowed.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Self, Union, get_args, get_origin

import annotated_types
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Strict,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo

from treadle.errors import ConfigError
from treadle.files import one_line, write_atomic

ARCHITECTURES = ("gpt2", "llama", "gemma")
PRECISIONS = ("fp32", "bf16", "tf32")
RECOMPUTE = ("none", "gelu", "block")
TOKENIZERS = ("auto", "char", "byte", "bpe")
ROPE_SCALING = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
)
MODEL_TOKENIZER = "model"  # that of the weights which train.init_from names
NAMED_TOKENIZERS = (*TOKENIZERS, MODEL_TOKENIZER)  # what data.tokenizer says without a path
HUB_PREFIX = "hf:"  # before the name of a model on Hugging Face's hub
FINE_TUNING_LR = 1e-4
MIN_BPE_VOCAB = 257  # 256 byte tokens and the end-of-text token

_DEVICE = re.compile(r"auto|cpu|numpy|opencl(:[^:]+)?|cuda(:\d+)?")


# ---- field types ----------------------------------------------------------------------------


class Allowed(str):
    """The words for "what is allowed" of a field whose type does not say it."""


def _integral(value: Any) -> Any:
    """Takes 1e3 for 1000: JSON has one kind of number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _one_of(names: tuple[str, ...]) -> AfterValidator:
    def check(value: str) -> str:
        if value not in names:
            raise ValueError("not available")
        return value

    return AfterValidator(check)


def _check_device(value: str) -> str:
    if not _DEVICE.fullmatch(value):
        raise ValueError("not a device")
    return value


def _check_tokenizer(value: str) -> str:
    looks_like_a_path = value.endswith(".json") or "/" in value or "\\" in value
    if value not in NAMED_TOKENIZERS and not looks_like_a_path and not Path(value).exists():
        raise ValueError("neither a kind of tokenizer nor a file")
    return value


def _check_rope_scaling(value: dict[str, Any]) -> dict[str, Any]:
    kind, numbers = value.get("kind", "llama3"), {k: v for k, v in value.items() if k != "kind"}
    known = kind in ("linear", "llama3") and not set(numbers) - set(ROPE_SCALING)
    if not known or "factor" not in value:
        raise ValueError("not a scaling")
    if any(isinstance(v, bool) or not isinstance(v, int | float) for v in numbers.values()):
        raise ValueError("not numbers")
    return value


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


Integer = Annotated[int, BeforeValidator(_integral)]
Count = Annotated[Integer, Field(ge=1)]
Layers = Annotated[Integer, Field(ge=1, le=1000)]  # the deepest transformer known has 1,000
Period = Annotated[Integer, Field(ge=0)]
Steps = Annotated[Integer, Field(ge=0, lt=2**32), Allowed("integer from 0 to 2^32 - 1")]
Seed = Annotated[Integer, Field(ge=0, lt=2**63), Allowed("integer from 0 to 2^63 - 1")]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]
RopeScaling = Annotated[
    dict[str, Any],
    AfterValidator(_check_rope_scaling),
    Allowed('an object of "factor" and, for Llama 3.1\'s, ' + _quoted(ROPE_SCALING[1:])),
]
Betas = Annotated[
    tuple[Fraction, Fraction], Strict(False), Allowed("two numbers, each >= 0 and < 1")
]
Architecture = Annotated[
    str,
    _one_of(ARCHITECTURES),
    Allowed(_quoted(ARCHITECTURES)),
    Field(json_schema_extra={"enum": list(ARCHITECTURES)}),
]
Precision = Annotated[
    str,
    _one_of(PRECISIONS),
    Allowed(_quoted(PRECISIONS) + " (other precisions are not available yet)"),
    Field(json_schema_extra={"enum": list(PRECISIONS)}),
]
Recompute = Annotated[
    str,
    _one_of(RECOMPUTE),
    Allowed(_quoted(RECOMPUTE)),
    Field(json_schema_extra={"enum": list(RECOMPUTE)}),
]
Device = Annotated[
    str,
    AfterValidator(_check_device),
    Allowed('"auto", "cpu", "numpy", "opencl[:N|:NAME]", "cuda[:N]"'),
    Field(json_schema_extra={"pattern": f"^({_DEVICE.pattern})$"}),
]
TokenizerName = Annotated[
    str,
    AfterValidator(_check_tokenizer),
    Allowed(_quoted(NAMED_TOKENIZERS) + ", or the path of a tokenizer.json or its directory"),
]


# ---- sections -------------------------------------------------------------------------------


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(_explain(error, _section_name(type(self)), values)) from None


def _key(default: Any, description: str) -> Any:
    return Field(default, description=description)


class ModelConfig(_Section):
    """The network."""

    architecture: Architecture = _key("gpt2", "The family of models.")
    vocab_size: Count | None = _key(None, "Number of token ids; null takes the tokenizer's.")
    n_layer: Layers | None = _key(None, "Transformer blocks; null follows the corpus size.")
    n_head: Count | None = _key(
        None, "Attention heads, a divisor of n_embd; null follows the corpus size."
    )
    n_embd: Count | None = _key(None, "Width of the residual stream; null follows the corpus size.")
    block_size: Count | None = _key(None, "Context length in tokens; null follows the corpus size.")
    bias: bool = _key(True, "gpt2: biases in the linear and normalisation layers.")
    dropout: Fraction = _key(0.0, "gpt2: probability of dropping an activation in training.")
    tie_embeddings: bool = _key(True, "The output layer shares the weights of the token embedding.")
    n_kv_head: Count | None = _key(
        None, "llama, gemma: heads of keys and values, a divisor of n_head; null takes n_head."
    )
    head_dim: Count | None = _key(
        None, "llama, gemma: width of a head, an even number; null takes n_embd / n_head."
    )
    n_ff: Count | None = _key(
        None, "llama, gemma: width inside the MLP; null takes 8/3 n_embd, rounded up to whole 32s."
    )
    norm_eps: Positive | None = _key(
        None, "llama, gemma: added to the mean square in norms; null takes 1e-5, gemma 1e-6."
    )
    rope_theta: Positive | None = _key(
        None, "llama, gemma: base of the rotary frequencies; null takes 10000."
    )
    rope_scaling: RopeScaling | None = _key(
        None, "llama, gemma: how rotary frequencies are lowered for a longer context."
    )
    version: Annotated[Integer, Field(ge=1, le=2)] | None = _key(
        None, "gemma: 1 or 2; null takes 1. The keys that follow are those of version 2."
    )
    attn_softcap: Positive | None = _key(
        None, "gemma: attention scores stay between it and its negative; null for no cap."
    )
    final_softcap: Positive | None = _key(
        None, "gemma: logits stay between it and its negative; null for no cap."
    )
    query_pre_attn_scalar: Positive | None = _key(
        None, "gemma: attention scores are divided by its root; null takes head_dim."
    )
    sliding_window: Count | None = _key(
        None, "gemma: tokens that every other layer sees, from the first; null for all."
    )


# The keys of the model that not every architecture has, as their descriptions say.
_ROTARY = ("n_kv_head", "head_dim", "n_ff", "norm_eps", "rope_theta", "rope_scaling")
_SECOND = ("attn_softcap", "final_softcap", "query_pre_attn_scalar", "sliding_window")
APPLIES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("bias", "dropout"), ("gpt2",)),
    **dict.fromkeys(_ROTARY, ("llama", "gemma")),
    **dict.fromkeys(("version", *_SECOND), ("gemma",)),
}


class DataConfig(_Section):
    """The corpus and its tokens."""

    path: str | None = _key(
        None, "A text file, a directory of texts, or a file or directory of tokens (train.bin)."
    )
    tokenizer: TokenizerName = _key(
        "auto",
        "Kind or file of the tokenizer; auto takes that of the weights which train.init_from names "
        "(model), else follows the corpus size.",
    )
    vocab_path: str | None = _key(
        None, "vocab.json of a byte-level BPE, together with merges_path."
    )
    merges_path: str | None = _key(
        None, "merges.txt of a byte-level BPE, together with vocab_path."
    )
    vocab_size: Count | None = _key(
        None, "Entries of a BPE to train; null follows the corpus size."
    )
    val_fraction: Annotated[float, Field(ge=0, le=0.5)] = _key(
        0.1, "The last part of the text, kept for validation; 0 turns it off."
    )


class TrainConfig(_Section):
    """The loop."""

    steps: Steps | None = _key(None, "Optimizer steps in all; null follows the corpus size.")
    batch_size: Count | None = _key(
        None, "Windows per step, in all micro-steps; null follows the corpus size."
    )
    window: Count | None = _key(
        None, "Tokens of a training window; null takes the model's context, model.block_size."
    )
    grad_accum: Count = _key(1, "Micro-steps that a step is cut into, a divisor of batch_size.")
    init_from: str | None = _key(
        None,
        "Weights that a new run starts from: a run, a checkpoint, a Hugging Face directory, or "
        "hf:NAME; its sizes and its tokenizer come from there.",
    )
    seed: Seed = _key(1337, "Seed of the initial weights, the data order, dropout and samples.")
    device: Device = _key(
        "auto", "Where to compute, as `treadle devices` lists it; auto takes the fastest."
    )
    threads: Count | None = _key(
        None, "CPU threads; null takes OMP_NUM_THREADS, else the physical cores."
    )
    precision: Precision = _key(
        "fp32",
        "Activations and matrix operands; weights, moments and sums stay float32. tf32 is fp32 "
        "with the operands of matrix products rounded to 10 bits, on CUDA alone.",
    )
    recompute: Recompute = _key(
        "none",
        "What the backward pass computes again to save memory: nothing, activations, or the inside "
        "of each block; the results have the same bits.",
    )
    deterministic: bool = _key(
        True,
        "The same bits on every run; false lets NVIDIA's libraries add in any order, for speed.",
    )
    eval_every: Period = _key(250, "Steps between evaluations; 0 turns them off.")
    eval_batches: Count | None = _key(
        50, "Batches of a periodic evaluation; null takes the whole split."
    )
    sample_every: Period = _key(500, "Steps between samples; 0 turns them off.")
    on_nonfinite: Literal["stop", "skip"] = _key(
        "stop",
        "At a loss or gradient that is NaN or infinite: stop, or leave the update out and go on.",
    )
    on_spike: Literal["stop", "skip", "go_on"] = _key(
        "go_on",
        "At a loss that spikes: stop, leave the update out, or train on it; it is named always.",
    )
    spike_window: Annotated[Integer, Field(ge=2)] = _key(
        100, "Losses before a step that decide whether its own is a spike."
    )
    spike_zscore: Annotated[float, Field(gt=0)] = _key(
        6.0, "A spike is so many standard deviations above the mean of the window."
    )
    rank_timeout: Annotated[float, Field(gt=0)] = _key(
        300.0, "Seconds that a step waits for another rank before the job is ended."
    )
    tensorboard: bool = _key(
        False, "Write TensorBoard event files beside the metrics; needs the extra tensorboard."
    )


class OptimizerConfig(_Section):
    """The update of the weights."""

    name: Literal["adamw", "sgd"] = _key("adamw", "The optimizer.")
    lr: Annotated[float, Field(gt=0)] | None = _key(
        None,
        "Peak learning rate; null follows the corpus size, or is "
        f"{FINE_TUNING_LR:g} with train.init_from.",
    )
    betas: Betas = _key((0.9, 0.99), "AdamW: decay of the two moments.")
    eps: Annotated[float, Field(gt=0)] = _key(
        1e-8, "AdamW: added to the root of the second moment."
    )
    weight_decay: Annotated[float, Field(ge=0)] = _key(
        0.1, "Decoupled weight decay of the matrices."
    )
    momentum: Fraction = _key(0.9, "SGD: momentum.")
    grad_clip: Annotated[float, Field(ge=0)] = _key(
        1.0, "Largest global norm of the gradient; 0 turns clipping off."
    )


class ScheduleConfig(_Section):
    """The learning rate over the steps."""

    name: Literal["cosine", "linear", "constant"] = _key(
        "cosine", "Shape of the decay after the warmup."
    )
    warmup_steps: Period | None = _key(
        None, "Steps of linear warmup; null takes a tenth of the steps, at most 100 (constant: 0)."
    )
    min_lr: Annotated[float, Field(ge=0)] | None = _key(
        None, "Learning rate at the end of the decay; null takes a tenth of lr."
    )


class CheckpointConfig(_Section):
    """What is kept on disk."""

    every: Period = _key(500, "Steps between checkpoints; 0 writes only the one at the end.")
    keep: Period = _key(3, "Newest checkpoints to keep beside the best one; 0 keeps all.")
    keep_every: Period = _key(
        0, "Keep each checkpoint whose step is a multiple of this as well; 0 keeps none for that."
    )


class Config(_Section):
    """All that a run depends on.

    `Config(model={"n_layer": 2}, train={"steps": 100})` validates as a file would be and raises
    `ConfigError`.
    """

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        for problem in _conflicts(self):
            raise ConfigError(problem)
        return self

    @property
    def window(self) -> int:
        """Tokens of a training window, of a configuration that has its nulls filled."""
        assert self.model.block_size is not None
        return self.train.window or self.model.block_size


def _conflicts(config: Config) -> Iterable[str]:
    """The combinations of values that cannot work, one line each."""
    model, data, train = config.model, config.data, config.train
    if model.n_embd and model.n_head and model.n_embd % model.n_head:
        heads = _nearest_divisor(model.n_embd, model.n_head)
        yield (
            f"model.n_embd: {model.n_embd} is not a multiple of model.n_head {model.n_head}; "
            f"n_head {heads} divides it"
        )
    for key, architectures in APPLIES.items():
        value, default = getattr(model, key), ModelConfig.model_fields[key].default
        if model.architecture not in architectures and value != default:
            yield (
                f"model.{key}: does not apply to {model.architecture}, only to "
                f"{' and '.join(architectures)}; drop it"
            )
    for key in _SECOND:
        if getattr(model, key) is not None and model.version != 2:
            yield f"model.{key}: applies to version 2 of gemma; drop it or set model.version to 2"
    if model.n_head and model.n_kv_head and model.n_head % model.n_kv_head:
        heads = _nearest_divisor(model.n_head, model.n_kv_head)
        yield (
            f"model.n_kv_head: {model.n_kv_head} does not divide model.n_head {model.n_head}; the "
            f"nearest that does is {heads}"
        )
    if model.head_dim and model.head_dim % 2:
        yield f"model.head_dim: {model.head_dim} is odd; the pairs that rotate need an even number"
    if train.batch_size and train.batch_size % train.grad_accum:
        nearest = _nearest_divisor(train.batch_size, train.grad_accum)
        yield (
            f"train.grad_accum: {train.grad_accum} does not divide train.batch_size "
            f"{train.batch_size}; the nearest that does is {nearest}"
        )
    if train.window and model.block_size and train.window > model.block_size:
        yield (
            f"train.window: {train.window} is more than model.block_size {model.block_size}; lower "
            "it"
        )
    warmup, steps = config.schedule.warmup_steps, train.steps
    if warmup is not None and steps is not None and warmup > steps:
        yield f"schedule.warmup_steps: {warmup} is more than train.steps {steps}; lower it"
    lr, min_lr = config.optimizer.lr, config.schedule.min_lr
    if lr is not None and min_lr is not None and min_lr > lr:
        yield f"schedule.min_lr: {min_lr:g} is more than optimizer.lr {lr:g}; lower it"
    if (data.vocab_path is None) != (data.merges_path is None):
        given, missing = ("vocab_path", "merges_path")[:: 1 if data.vocab_path else -1]
        yield f"data.{given}: given without data.{missing}; a BPE needs both files"
    if data.vocab_path is not None and data.tokenizer != "auto":
        yield f"data.tokenizer: {data.tokenizer!r} is given and data.vocab_path too; drop one"
    if data.vocab_size is not None:
        if data.tokenizer not in ("auto", "bpe") or data.vocab_path is not None:
            yield (
                f"data.vocab_size: {data.vocab_size} applies only to a BPE that is trained; "
                "drop it or set data.tokenizer to bpe"
            )
        if data.vocab_size < MIN_BPE_VOCAB:
            yield f"data.vocab_size: got {data.vocab_size}; a BPE needs >= {MIN_BPE_VOCAB}"


def _nearest_divisor(number: int, wanted: int) -> int:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return min(small + [number // d for d in small], key=lambda d: (abs(d - wanted), d))


# ---- keys -----------------------------------------------------------------------------------


class Key(NamedTuple):
    """One row of the table of keys."""

    name: str
    type: str
    default: Any
    description: str


def _sections() -> dict[str, type[BaseModel]]:
    return {name: field.annotation for name, field in Config.model_fields.items()}  # type: ignore[misc]


def _section_name(model: type[BaseModel]) -> str | None:
    return next((name for name, section in _sections().items() if section is model), None)


def _fields() -> dict[str, FieldInfo]:
    return {
        f"{section}.{name}": field
        for section, model in _sections().items()
        for name, field in model.model_fields.items()
    }


def key_table() -> list[Key]:
    """Every dotted key with the words for its type, its default and its description, in order."""
    return [
        Key(key, _type_text(field), field.default, field.description or "")
        for key, field in _fields().items()
    ]


def _type_text(field: FieldInfo) -> str:
    """What a field allows, in words: `integer >= 1 or null`."""
    return _words(field.annotation, field.metadata)


def _words(annotation: Any, metadata: Iterable[Any]) -> str:
    metadata = list(metadata)
    if get_origin(annotation) in (Union, UnionType):
        kinds = [_words(kind, metadata) for kind in get_args(annotation)]
        return " or ".join(kinds)
    if get_origin(annotation) is Annotated:
        annotation, *inner = get_args(annotation)
        return _words(annotation, [*_flat(inner), *metadata])
    for item in metadata:
        if isinstance(item, Allowed):
            return str(item)
    if annotation is type(None):
        return "null"
    if get_origin(annotation) is Literal:
        return _quoted(get_args(annotation))
    base = {int: "integer", float: "number", bool: "true or false", str: "text"}[annotation]
    limits = [
        f"{sign} {getattr(item, attribute):g}"
        for item in _flat(metadata)
        for kind, sign, attribute in (
            (annotated_types.Ge, ">=", "ge"),
            (annotated_types.Gt, ">", "gt"),
            (annotated_types.Le, "<=", "le"),
            (annotated_types.Lt, "<", "lt"),
        )
        if isinstance(item, kind)
    ]
    return " ".join([base, " and ".join(limits)]).strip()


def _flat(metadata: Iterable[Any]) -> list[Any]:
    flat: list[Any] = []
    for item in metadata:
        flat.extend(item.metadata if isinstance(item, FieldInfo) else [item])
    return flat


def _unknown(key: str) -> str:
    """The line for a key that does not exist, with the nearest one by its whole or last part."""
    if key in _sections():
        return f"{key} is a section; set one of its keys, such as {_example(key)}"
    known = list(_fields())
    candidates = known if "." in key else [*known, *_sections()]
    close = difflib.get_close_matches(key, candidates, n=1, cutoff=0.75)
    if not close:
        tails: dict[str, str] = {}
        for name in known:
            tails.setdefault(name.rpartition(".")[2], name)
        tail = difflib.get_close_matches(key.rpartition(".")[2], tails, n=1, cutoff=0.6)
        close = [tails[tail[0]]] if tail else difflib.get_close_matches(key, known, n=1)
    if close:
        return f'unknown key {key}; did you mean "{close[0]}"?'
    return f"unknown key {key}; the sections are {', '.join(_sections())}"


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _explain(error: ValidationError, section: str | None, values: Mapping[str, Any]) -> str:
    """The first fault of a validation of `section` (None: of the whole), as a line to read."""
    prefix = [section] if section else []
    depth = 2 - len(prefix)
    faults = error.errors(include_url=False)
    # An unknown key is the likelier cause of all the others, so it is told first.
    fault = min(faults, key=lambda f: f["type"] != "extra_forbidden")
    path = [str(part) for part in fault["loc"][:depth]]
    key = ".".join(prefix + path)
    if fault["type"] == "extra_forbidden":
        return _unknown(key)
    got: Any = values
    for part in path:
        got = got[part]
    if key in _sections():
        return f"{key}: got {_shown(got)}; expected an object of keys such as {_example(key)}"
    line = f"{key}: got {_shown(got)}; allowed: {_type_text(_fields()[key])}"
    others = len({tuple(f["loc"][:depth]) for f in faults}) - 1
    return line + (f" (and {others} more)" if others else "")


def _example(section: str) -> str:
    return f"{section}.{next(iter(_sections()[section].model_fields))}"


# ---- loading and saving ---------------------------------------------------------------------


def load_config(
    path: str | os.PathLike[str] | None = None,
    overrides: Iterable[str] = (),
    flags: Mapping[str, Any] | None = None,
) -> Config:
    """The configuration of a file, of `--set` and of flags, the later winning.

    Args:
        path: a JSON file, or None for the defaults. A `$schema` key in it is ignored.
        overrides: `KEY=VALUE` texts with dotted keys; VALUE is JSON, else a string.
        flags: dotted key to value; a None means that the flag was not given.

    Raises:
        ConfigError: an unreadable file, an unknown key or a bad value, in one line.
    """
    values = _read_json(Path(path)) if path is not None else {}
    for text in overrides:
        key, equals, raw = text.partition("=")
        if not equals:
            raise ConfigError(f"--set {text!r}: expected KEY=VALUE, such as train.steps=1000")
        _put(values, key.strip(), _parse(key.strip(), raw))
    for key, value in (flags or {}).items():
        if value is not None:
            _put(values, key, value)
    return Config(**values)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_bytes().decode("utf-8-sig"), object_pairs_hook=_no_repeats)
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the config: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 at byte {error.start}{_text_hint(path)}") from None
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{path}: not JSON at line {error.lineno} column {error.colno}: {error.msg}"
            f"{_text_hint(path)}"
        ) from None
    except (ConfigError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {one_line(error)}") from None
    if not isinstance(values, dict):
        raise ConfigError(
            f"{path}: expected a JSON object of the sections {', '.join(_sections())}"
        )
    values.pop("$schema", None)
    return values


def _text_hint(path: Path) -> str:
    return "" if path.suffix == ".json" else f"; to train on a text: --data {path}"


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f'the key "{repeated}" stands twice; keep one')
    return values


def _parse(key: str, raw: str) -> Any:
    """JSON where it is JSON; a key of plain text takes `2024` as text too."""
    field = _fields().get(key)
    takes_text = field is not None and str in (field.annotation, *get_args(field.annotation))
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return raw
    return raw if takes_text and not isinstance(value, str | None) else value


def _put(values: dict[str, Any], key: str, value: Any) -> None:
    section, _, name = key.partition(".")
    if key not in _fields():
        raise ConfigError(_unknown(key))
    inside = values.setdefault(section, {})
    if not isinstance(inside, dict):
        raise ConfigError(
            f"{section}: got {_shown(inside)}; expected an object of keys such as {key}"
        )
    inside[name] = value


def to_dict(config: Config) -> dict[str, dict[str, Any]]:
    """The sections as plain JSON values, every key present, in the order of declaration."""
    return config.model_dump(mode="json")


def dumps_config(config: Config) -> str:
    """The configuration as the text of a JSON file: the same text for equal configurations."""
    return json.dumps(to_dict(config), indent=2, ensure_ascii=False) + "\n"


def dump_config(config: Config, path: str | os.PathLike[str]) -> None:
    """Writes `dumps_config` to `path` in one rename, so that a reader never sees half a file."""
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(target, dumps_config(config).encode())
    except OSError as error:
        raise ConfigError(f"{target}: cannot write the config: {error.strerror}") from None


def json_schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) of a config file, for editors and for validation elsewhere."""
    schema = Config.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "Treadle configuration"
    schema["properties"] = {
        "$schema": {"type": "string", "description": "The address of this schema, for editors."},
        **schema["properties"],
    }
    return schema


# ---- comparing and changing -----------------------------------------------------------------

RESUMABLE_KEYS = frozenset(
    {
        "train.steps",
        "train.device",
        "train.threads",
        "train.recompute",
        "train.eval_every",
        "train.eval_batches",
        "train.sample_every",
        "train.on_nonfinite",
        "train.on_spike",
        "train.spike_window",
        "train.spike_zscore",
        "train.rank_timeout",
        "train.tensorboard",
        "checkpoint.every",
        "checkpoint.keep",
        "checkpoint.keep_every",
    }
)
"""The keys that may differ between a run and its resumption."""


def _flatten(sections: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {
        f"{s}.{name}": value for s, inside in sections.items() for name, value in inside.items()
    }


def diff_configs(a: Config, b: Config) -> list[tuple[str, Any, Any]]:
    """The (dotted key, value in a, value in b) that differ, in the order of declaration."""
    left, right = _flatten(to_dict(a)), _flatten(to_dict(b))
    return [(key, left[key], right[key]) for key in left if left[key] != right[key]]


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """A copy with the values of some dotted keys changed, validated again."""
    nested: dict[str, Any] = config.model_dump(mode="json", exclude_unset=True)
    for key, value in values.items():
        _put(nested, key, value)
    return Config(**nested)


def with_absolute_paths(config: Config) -> Config:
    """A copy whose paths of data, tokenizer and first weights hold in every directory."""
    data, start = config.data, config.train.init_from
    keys = {"path": data.path, "vocab_path": data.vocab_path, "merges_path": data.merges_path}
    if data.tokenizer not in NAMED_TOKENIZERS:
        keys["tokenizer"] = data.tokenizer
    paths = {f"data.{name}": path for name, path in keys.items()}
    if start is not None and not start.startswith(HUB_PREFIX):
        paths["train.init_from"] = start
    return with_values(
        config, {name: str(Path(path).absolute()) for name, path in paths.items() if path}
    )


def inherit(config: Config, saved: Config) -> Config:
    """`config` with every key that was not given, or is null, taken from the `saved` run.

    For resuming: a person repeats only what should change. Call it before `fill_from_corpus`,
    which gives every null a value.
    """
    given = _flatten(config.model_dump(mode="json", exclude_unset=True))
    return with_values(saved, {key: value for key, value in given.items() if value is not None})


# ---- sizes that follow the corpus -----------------------------------------------------------


@dataclass(frozen=True)
class Size:
    """What a corpus of up to `max_bytes` gets where the config says null."""

    max_bytes: float
    tokenizer: str
    vocab_size: int
    n_layer: int
    n_head: int
    n_embd: int
    block_size: int
    batch_size: int
    steps: int
    lr: float


# Each row is a run of a few minutes at the 200 GFLOP/s that two cores sustain; the vocabulary
# counts only where a BPE is trained.
SIZES = (
    Size(2 << 10, "char", 257, 2, 2, 32, 16, 8, 500, 3e-3),
    Size(64 << 10, "char", 512, 2, 2, 64, 64, 8, 1000, 2e-3),
    Size(2 << 20, "char", 1024, 4, 4, 128, 128, 12, 2000, 1e-3),
    Size(20 << 20, "bpe", 4096, 6, 6, 192, 128, 8, 3000, 1e-3),
    Size(float("inf"), "bpe", 16000, 6, 8, 256, 128, 8, 4000, 1e-3),
)
MAX_WARMUP_STEPS = 100

_FROM_SIZE = {
    "model.n_layer": "n_layer",
    "model.n_head": "n_head",
    "model.n_embd": "n_embd",
    "model.block_size": "block_size",
    "train.steps": "steps",
    "train.batch_size": "batch_size",
    "optimizer.lr": "lr",
}


def size_for(corpus_bytes: int) -> Size:
    """The row of `SIZES` for a corpus of that many bytes."""
    return next(size for size in SIZES if corpus_bytes <= size.max_bytes)


def fill_from_corpus(config: Config, corpus_bytes: int, tokenised: bool = False) -> Config:
    """A config in which every null that follows the corpus or another key has its value.

    Values that were given are never touched: n_embd is rounded to a multiple of a given n_head,
    n_head to a divisor of a given n_embd, batch_size up to a multiple of grad_accum. What stays
    null: `model.vocab_size` (known once the tokenizer is), `data.vocab_size` unless a BPE is to
    be trained, and the keys for which null is a choice. With `tokenised`, the corpus is token
    files already and the keys of the tokenizer stay as they are.

    Raises:
        ConfigError: a given value cannot work with the value that the table holds for another.
    """
    size, model, train = size_for(corpus_bytes), config.model, config.train
    current = _flatten(to_dict(config))
    filled = {key: getattr(size, name) for key, name in _FROM_SIZE.items() if current[key] is None}
    if "model.n_head" in filled and model.n_embd is not None:
        filled["model.n_head"] = max(
            heads for heads in range(1, size.n_head + 1) if model.n_embd % heads == 0
        )
    if "model.n_embd" in filled and model.n_head is not None:
        head_size = max(8, round(size.n_embd / model.n_head / 8) * 8)
        filled["model.n_embd"] = model.n_head * head_size
    if "train.batch_size" in filled:
        micro_batch = -(-size.batch_size // train.grad_accum)
        filled["train.batch_size"] = micro_batch * train.grad_accum

    data = config.data
    if not tokenised:
        if data.tokenizer == "auto" and data.vocab_path is None:
            filled["data.tokenizer"] = size.tokenizer if data.vocab_size is None else "bpe"
        if "bpe" in (data.tokenizer, filled.get("data.tokenizer")) and data.vocab_size is None:
            filled["data.vocab_size"] = size.vocab_size

    values = current | filled
    if config.schedule.warmup_steps is None:
        # A constant schedule must not depend on `steps`, so that a longer run begins like a
        # shorter one.
        constant = config.schedule.name == "constant"
        warmup = 0 if constant else min(MAX_WARMUP_STEPS, values["train.steps"] // 10)
        filled["schedule.warmup_steps"] = warmup
    if config.schedule.min_lr is None:
        filled["schedule.min_lr"] = values["optimizer.lr"] / 10
    return with_values(config, filled)


def size_table() -> list[dict[str, str]]:
    """The rows of `SIZES` as texts by column, for the docs."""
    rows = []
    for size in SIZES:
        row = {"corpus": _size_text(size.max_bytes), "tokenizer": size.tokenizer}
        row["vocab_size"] = str(size.vocab_size) if size.tokenizer == "bpe" else "its characters"
        row |= {key: f"{getattr(size, name):g}" for key, name in _FROM_SIZE.items()}
        rows.append(row)
    return rows


def _size_text(max_bytes: float) -> str:
    if max_bytes == float("inf"):
        return "larger"
    for unit, scale in (("MB", 1 << 20), ("KB", 1 << 10)):
        if max_bytes >= scale:
            return f"up to {max_bytes / scale:g} {unit}"
    return f"up to {max_bytes:g} bytes"
