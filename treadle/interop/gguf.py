"""GGUF, the format of llama.cpp and its relatives: models are written, files are described.

Written by the package `gguf`, whose table of names maps Hugging Face's tensors to GGUF's. What a
file holds beyond names follows llama.cpp's own converter: linear weights are [out, in]; the rows of
Llama's queries and keys are in the order of ggml's rotary embedding, pairs side by side; norms of
Gemma are stored as 1 + weight; Llama 3.1's scaling of frequencies is the tensor `rope_freqs`.
Vectors and position embeddings stay float32 in every file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from treadle.data.tokenizer import Tokenizer
from treadle.errors import CheckpointError, ConfigError
from treadle.files import atomic_file
from treadle.interop.gguf_header import Header, is_gguf, read_header
from treadle.interop.gguf_tokenizer import add_tokenizer
from treadle.models.base import Model

__all__ = ["DTYPES", "describe", "is_gguf", "write_gguf"]

Tensors = Iterator[tuple[str, np.ndarray]]
Config = Mapping[str, Any]

_FILE_TYPES = {"fp32": "ALL_F32", "fp16": "MOSTLY_F16", "q8_0": "MOSTLY_Q8_0"}
DTYPES = tuple(_FILE_TYPES)
_BLOCK = 32  # numbers that one scale of q8_0 serves
_NO_CAP = 1e8  # GGUF's Gemma 2 always has caps; under this one every score is itself


def write_gguf(
    path: str | Path,
    model: Model,
    weights: Mapping[str, np.ndarray],
    tokenizer: Tokenizer | None,
    dtype: str = "fp32",
) -> list[str]:
    """Writes a model with its tokenizer; the same arguments give the same bytes.

    dtype: "fp32", "fp16" or "q8_0" (8-bit integers, a float16 scale for each 32). Returns a note
    for each thing that a person should know of the file.

    Raises:
        ConfigError: another dtype, an architecture that GGUF does not know, or no package `gguf`.
        CheckpointError: a weight that is not finite, or a file that cannot be written.
        TokenizerError: a tokenizer with more tokens than the model.
    """
    try:
        import gguf
    except ImportError:
        raise ConfigError(
            "writing GGUF needs the package gguf: pip install 'treadle[gguf]'"
        ) from None
    if dtype not in DTYPES:
        raise ConfigError(f"GGUF dtype: got {dtype!r}; one of {', '.join(DTYPES)}")
    path = Path(path)
    config = model.hf_config(tokenizer.eos_id if tokenizer else None)
    kind = config["model_type"]
    if kind not in _ARCHITECTURES:
        raise ConfigError(f"GGUF: no architecture for a {kind}; {', '.join(_ARCHITECTURES)} have")
    describe_model, convert = _ARCHITECTURES[kind]
    layers = config.get("n_layer") or config["num_hidden_layers"]
    (arch,) = (key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == kind)
    names = gguf.get_tensor_name_map(arch, layers)
    tensors = dict(_named(convert(config, model.to_hf(weights)), names))
    notes: list[str] = []
    types = {
        name: gguf.GGMLQuantizationType[_type(name, array, dtype, notes)]
        for name, array in tensors.items()
    }
    try:
        with atomic_file(path) as file:
            # The writer opens the same file by its name; here it is synced and renamed.
            writer = gguf.GGUFWriter(file.name, kind)
            writer.add_type("model")
            writer.add_file_type(gguf.LlamaFileType[_FILE_TYPES[dtype]])
            writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
            writer.add_block_count(layers)
            describe_model(writer, config)
            if tokenizer is not None:
                notes += add_tokenizer(writer, tokenizer, model.vocab_size)
            else:
                notes.append("no tokenizer: programs that read the file have ids alone")
                writer.add_tokenizer_model("none")
                writer.add_vocab_size(model.vocab_size)
            for name, array in tensors.items():
                nbytes = math.prod(gguf.quant_shape_to_byte_shape(array.shape, types[name]))
                writer.add_tensor_info(name, array.shape, array.dtype, nbytes, types[name])
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for name, array in tensors.items():
                writer.write_tensor_data(gguf.quantize(np.ascontiguousarray(array), types[name]))
            writer.close()
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror or error}") from error
    return notes


def _named(tensors: Tensors, names: Any) -> Tensors:
    """Tensors under GGUF's names; CheckpointError where a number is not finite."""
    for name, array in tensors:
        if not np.isfinite(array).all():
            raise CheckpointError(f"tensor '{name}' holds NaN or infinite values")
        stem, dot, suffix = name.rpartition(".")
        found = names.get_name(stem)
        yield (name if found is None else found + dot + suffix), array


def _type(name: str, array: np.ndarray, dtype: str, notes: list[str]) -> str:
    """ggml's type for a tensor; a note where it is not the one that was asked for."""
    if dtype == "fp32" or array.ndim == 1 or name.startswith("position_embd"):
        return "F32"
    if np.abs(array).max() > np.finfo(np.float16).max:
        notes.append(f"{name} stays float32: it has numbers beyond the range of float16")
        return "F32"
    if dtype == "q8_0" and array.shape[-1] % _BLOCK == 0:
        return "Q8_0"
    if dtype == "q8_0":
        notes.append(f"{name} is float16: its rows of {array.shape[-1]} are no multiple of 32")
    return "F16"


# ---------------------------------------------------------------- architectures


def _describe_gpt2(writer: Any, config: Config) -> None:
    writer.add_context_length(config["n_positions"])
    writer.add_embedding_length(config["n_embd"])
    writer.add_feed_forward_length(config.get("n_inner") or 4 * config["n_embd"])
    writer.add_head_count(config["n_head"])
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])


def _convert_gpt2(config: Config, tensors: Mapping[str, np.ndarray]) -> Tensors:
    linear = (".c_attn.weight", ".c_proj.weight", ".c_fc.weight")
    for name, array in tensors.items():
        yield name, array.T if name.endswith(linear) else array


def _describe_llama(writer: Any, config: Config) -> None:
    rope = _rope(config)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        import gguf

        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])


def _describe_gemma2(writer: Any, config: Config) -> None:
    _describe_llama(writer, config)
    writer.add_attn_logit_softcapping(config["attn_logit_softcapping"] or _NO_CAP)
    writer.add_final_logit_softcapping(config["final_logit_softcapping"] or _NO_CAP)
    writer.add_sliding_window(config["sliding_window"])


def _rope(config: Config) -> dict[str, Any]:
    """rope_theta, rope_type and the numbers of the scaling."""
    plain = {"rope_type": "default", "rope_theta": config.get("rope_theta", 10000.0)}
    return plain | (config.get("rope_parameters") or config.get("rope_scaling") or {})


def _convert_llama(config: Config, tensors: Mapping[str, np.ndarray]) -> Tensors:
    for name, array in tensors.items():
        if name.endswith(".q_proj.weight"):
            array = _paired(array, config["num_attention_heads"])
        elif name.endswith(".k_proj.weight"):
            array = _paired(array, config["num_key_value_heads"])
        yield name, array
    rope = _rope(config)
    if rope["rope_type"] == "llama3":
        yield "rope_freqs.weight", _divisors(rope, config["head_dim"])


def _convert_gemma(config: Config, tensors: Mapping[str, np.ndarray]) -> Tensors:
    if _rope(config)["rope_type"] == "llama3":
        raise ConfigError("GGUF's Gemma has no rope scaling of Llama 3's kind, and this model has")
    scalar = _score_scalar(config)
    for name, array in tensors.items():
        if name.endswith("norm.weight"):
            array = array + np.float32(1)
        elif name.endswith(".q_proj.weight") and scalar != 1:
            array = array * np.float32(scalar)
        yield name, array


def _score_scalar(config: Config) -> float:
    """What queries are multiplied by, so that GGUF's fixed scale of the scores is the model's.

    llama.cpp divides Gemma's scores by the root of the head size; of n_embd / n_head in the
    largest Gemma 2, which it knows by its 46 layers.
    """
    theirs = config["head_dim"]
    if config["model_type"] == "gemma2" and config["num_hidden_layers"] == 46:
        theirs = config["hidden_size"] / config["num_attention_heads"]
    return float(math.sqrt(theirs / config.get("query_pre_attn_scalar", theirs)))


def _paired(weight: np.ndarray, heads: int) -> np.ndarray:
    """[H · D, C]: from Hugging Face's halves of a head to pairs side by side."""
    rows, columns = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


def _divisors(rope: Mapping[str, Any], size: int) -> np.ndarray:
    """What each of the size/2 frequencies is divided by in Llama 3.1's scaling; float32."""
    frequencies = rope["rope_theta"] ** (-np.arange(0, size, 2) / size)
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * np.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / (kept + (1 - kept) / rope["factor"])).astype(np.float32)


_Describe = Callable[[Any, Config], None]
_Convert = Callable[[Config, Mapping[str, np.ndarray]], Tensors]
_ARCHITECTURES: dict[str, tuple[_Describe, _Convert]] = {
    "gpt2": (_describe_gpt2, _convert_gpt2),
    "llama": (_describe_llama, _convert_llama),
    "gemma": (_describe_llama, _convert_gemma),
    "gemma2": (_describe_gemma2, _convert_gemma),
}


# ---------------------------------------------------------------- what a file is


def describe(path: str | Path) -> list[tuple[str, str]]:
    """(what, value) for each thing to know of a file; no package is needed.

    Raises:
        CheckpointError: not a GGUF file, or one that cannot be read.
        CorruptError: a header that is damaged, or tensors beyond the end of the file.
    """
    header = read_header(Path(path))
    return [("format", f"GGUF, version {header.version}"), *_rows(header)]


def _rows(header: Header) -> Iterator[tuple[str, str]]:
    arch = str(header.values.get("general.architecture", "not stated"))
    yield "architecture", arch
    sizes = {
        "layers": "block_count",
        "width": "embedding_length",
        "heads": "attention.head_count",
        "key and value heads": "attention.head_count_kv",
        "context": "context_length",
    }
    for what, key in sizes.items():
        if (value := header.values.get(f"{arch}.{key}")) is not None:
            yield what, str(value)
    weights = [t for t in header.tensors if not t.name.startswith("rope_freqs")]
    yield "parameters", f"{sum(math.prod(t.shape) for t in weights):,}"
    types: dict[str, int] = {}
    for tensor in header.tensors:
        types[tensor.type] = types.get(tensor.type, 0) + 1
    yield "tensors", ", ".join(f"{n} {kind}" for kind, n in sorted(types.items())) or "none"
    if (model := header.values.get("tokenizer.ggml.model")) is not None:
        tokens = header.values.get("tokenizer.ggml.tokens", 0)
        yield "tokenizer", f"{model}, {tokens:,} tokens"
