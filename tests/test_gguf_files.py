"""GGUF: what the package `gguf` reads of our files, and headers that lie.

`tests/parity/test_gguf.py` loads the files with transformers and compares logits and texts.
"""

from __future__ import annotations

import os
import struct
import tracemalloc
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.data.alphabet import spelled
from treadle.data.stories import generate_stories
from treadle.data.tokenizer import Tokenizer
from treadle.errors import CheckpointError, ConfigError, CorruptError, TokenizerError, TreadleError
from treadle.interop.gguf import describe, is_gguf, write_gguf
from treadle.models.base import Model
from treadle.models.gpt2 import GPT2

TEXT = generate_stories("en", 40)
BPE = Tokenizer.train_bpe([TEXT], 400)
TINY = GPT2(vocab_size=400, n_layer=2, n_head=2, n_embd=32, block_size=16)


@pytest.fixture(scope="module")
def package() -> ModuleType:
    """The package that reads and writes GGUF, of the extra `dev`."""
    try:
        import gguf
    except ImportError:
        if os.environ.get("CI"):
            raise
        pytest.skip("the package gguf is not installed")
    return gguf


def weights_of(model: Model, seed: int = 1) -> dict[str, np.ndarray]:
    """Random weights, also where the initial ones are zeros or ones."""
    rng = np.random.default_rng(seed)
    return {
        p.name: p.initial(seed) + rng.normal(0, 0.1, p.shape).astype(np.float32)
        for p in model.parameters()
    }


def read(package: ModuleType, path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Values by key, and tensors in float32 by name, as the package reads them."""
    reader = package.GGUFReader(path)
    values = {key: field.contents() for key, field in reader.fields.items()}
    tensors = {t.name: package.dequantize(t.data, t.tensor_type) for t in reader.tensors}
    return values, tensors


# ---------------------------------------------------------------- models


def test_a_gpt2_is_what_llama_cpp_expects(package: ModuleType, tmp_path: Path) -> None:
    weights = weights_of(TINY)
    assert write_gguf(tmp_path / "m.gguf", TINY, weights, BPE) == []
    values, tensors = read(package, tmp_path / "m.gguf")
    stated = {
        "general.architecture": "gpt2",
        "general.file_type": 0,
        "gpt2.block_count": 2,
        "gpt2.context_length": 16,
        "gpt2.embedding_length": 32,
        "gpt2.feed_forward_length": 128,
        "gpt2.attention.head_count": 2,
        "gpt2.attention.layer_norm_epsilon": np.float32(1e-5),
    }
    assert {key: values[key] for key in stated} == stated
    for ours, theirs in (
        ("transformer.wte.weight", "token_embd.weight"),
        ("transformer.wpe.weight", "position_embd.weight"),
        ("transformer.ln_f.bias", "output_norm.bias"),
        ("transformer.h.1.ln_2.weight", "blk.1.ffn_norm.weight"),
        ("transformer.h.0.attn.c_attn.bias", "blk.0.attn_qkv.bias"),
    ):
        np.testing.assert_array_equal(tensors[theirs], weights[ours])
    for ours, theirs in (
        ("transformer.h.0.attn.c_attn.weight", "blk.0.attn_qkv.weight"),
        ("transformer.h.1.attn.c_proj.weight", "blk.1.attn_output.weight"),
        ("transformer.h.1.mlp.c_fc.weight", "blk.1.ffn_up.weight"),
        ("transformer.h.0.mlp.c_proj.weight", "blk.0.ffn_down.weight"),
    ):
        np.testing.assert_array_equal(tensors[theirs], weights[ours].T)
    assert len(tensors) == len(weights)


def test_a_head_of_its_own_and_missing_biases(package: ModuleType, tmp_path: Path) -> None:
    model = GPT2(400, 1, 2, 32, 16, bias=False, tie_embeddings=False)
    weights = weights_of(model)
    write_gguf(tmp_path / "m.gguf", model, weights, BPE)
    _, tensors = read(package, tmp_path / "m.gguf")
    np.testing.assert_array_equal(tensors["output.weight"], weights["lm_head.weight"])
    assert tensors["blk.0.ffn_up.bias"].shape == (128,)
    assert not tensors["blk.0.ffn_up.bias"].any()


def test_narrow_dtypes(package: ModuleType, tmp_path: Path) -> None:
    weights = weights_of(TINY)
    for dtype, error in (("fp16", 2**-11), ("q8_0", 1 / 254 + 2**-10)):
        assert write_gguf(tmp_path / "m.gguf", TINY, weights, BPE, dtype) == []
        _, tensors = read(package, tmp_path / "m.gguf")
        for name, ours in (("token_embd", "wte"), ("position_embd", "wpe")):
            exact = weights[f"transformer.{ours}.weight"]
            worst = np.abs(tensors[f"{name}.weight"] - exact).max() / np.abs(exact).max()
            assert worst <= error if name == "token_embd" else worst == 0
            assert worst > 0 or name == "position_embd"
        np.testing.assert_array_equal(
            tensors["blk.0.attn_norm.weight"], weights["transformer.h.0.ln_1.weight"]
        )
    assert ("tensors", "19 F32, 9 Q8_0") in describe(tmp_path / "m.gguf")


def test_what_a_dtype_cannot_hold_stays_wide(package: ModuleType, tmp_path: Path) -> None:
    odd = GPT2(vocab_size=400, n_layer=1, n_head=1, n_embd=24, block_size=8)
    weights = weights_of(odd)
    weights["transformer.wte.weight"][3, 4] = 1e5
    notes = write_gguf(tmp_path / "m.gguf", odd, weights, BPE, "q8_0")
    assert notes[0].startswith("token_embd.weight stays float32")
    assert "blk.0.attn_qkv.weight is float16: its rows of 24" in " ".join(notes)
    _, tensors = read(package, tmp_path / "m.gguf")
    assert tensors["token_embd.weight"][3, 4] == 1e5


def test_the_same_model_gives_the_same_bytes(package: ModuleType, tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        write_gguf(tmp_path / name, TINY, weights_of(TINY), BPE, "q8_0")
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.gguf", "b.gguf"]


def test_what_cannot_be_written_is_refused(package: ModuleType, tmp_path: Path) -> None:
    weights = weights_of(TINY)
    with pytest.raises(ConfigError, match="one of fp32, fp16, q8_0"):
        write_gguf(tmp_path / "m.gguf", TINY, weights, BPE, "q4")
    with pytest.raises(TokenizerError, match="has 400 tokens, the model 300"):
        small = GPT2(vocab_size=300, n_layer=1, n_head=1, n_embd=8, block_size=8)
        write_gguf(tmp_path / "m.gguf", small, weights_of(small), BPE)
    weights["transformer.ln_f.bias"][1] = np.nan
    with pytest.raises(CheckpointError, match=r"ln_f\.bias' holds NaN"):
        write_gguf(tmp_path / "m.gguf", TINY, weights, BPE)
    with pytest.raises(CheckpointError, match="cannot write"):
        write_gguf(tmp_path / "no" / "m.gguf", TINY, weights_of(TINY), BPE)
    assert not list(tmp_path.iterdir())


def test_without_the_package_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(ConfigError, match=r"pip install 'treadle\[gguf\]'"):
        write_gguf(tmp_path / "m.gguf", TINY, weights_of(TINY), BPE)


# ---------------------------------------------------------------- tokenizers


def tokens_of(package: ModuleType, path: Path, tokenizer: Tokenizer | None) -> dict[str, Any]:
    model = GPT2(vocab_size=402, n_layer=1, n_head=1, n_embd=4, block_size=4)
    write_gguf(path, model, weights_of(model), tokenizer)
    values, _ = read(package, path)
    prefix = "tokenizer.ggml."
    return {k.removeprefix(prefix): v for k, v in values.items() if k.startswith(prefix)}


def test_byte_level_bpe(package: ModuleType, tmp_path: Path) -> None:
    found = tokens_of(package, tmp_path / "m.gguf", BPE)
    assert (found["model"], found["pre"]) == ("gpt2", "gpt-2")
    assert (found["bos_token_id"], found["eos_token_id"]) == (0, 0)
    assert found["tokens"][0] == "<|endoftext|>" and found["tokens"][400:] == [
        "[PAD400]",
        "[PAD401]",
    ]
    control, normal, unused = 3, 1, 5
    assert found["token_type"] == [control, *[normal] * 399, *[unused] * 2]
    for i in (1, 33, 257, 399):
        assert found["tokens"][i] == spelled(BPE.token_bytes(i))
    _, merges = BPE.vocab_merges()
    assert found["merges"] == merges.splitlines()[1:]


def bpe_ids(found: dict[str, Any], text: str) -> list[int]:
    """Ids by llama.cpp's rule: merges by rank, and only what is left in the end is looked up."""
    ranks = {tuple(merge.split(" ")): i for i, merge in enumerate(found["merges"])}
    parts = list(spelled(text.encode()))
    while True:
        pairs = list(pairwise(parts))
        best = min((p for p in pairs if p in ranks), key=ranks.__getitem__, default=None)
        if best is None:
            return [found["tokens"].index(part) for part in parts]
        at = pairs.index(best)
        parts[at : at + 2] = ["".join(best)]


@pytest.mark.parametrize("kind", ["char", "byte"])
def test_characters_and_bytes_become_a_bpe(kind: str, package: ModuleType, tmp_path: Path) -> None:
    text = "aé€😀\nñ é😁b\u00ff\u0100"
    tokenizer = Tokenizer.char(text) if kind == "char" else Tokenizer.byte()
    found = tokens_of(package, tmp_path / "m.gguf", tokenizer)
    assert bpe_ids(found, text) == tokenizer.encode(text).tolist()
    notes = write_gguf(tmp_path / "m.gguf", TINY, weights_of(TINY), tokenizer)
    assert "BPE of bytes" in notes[0]
    assert (tokenizer.eos_id is None) == any("no end of text" in note for note in notes)


def test_a_tokenizer_that_gguf_has_not_is_left_out(package: ModuleType, tmp_path: Path) -> None:
    import tokenizers

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    notes = write_gguf(tmp_path / "m.gguf", TINY, weights_of(TINY), Tokenizer(words))
    assert "the tokenizer is left out" in notes[0]
    assert tokens_of(package, tmp_path / "m.gguf", None)["model"] == "none"


# ---------------------------------------------------------------- headers


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def header(pairs: int = 0, tensors: int = 0, rest: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, pairs) + rest


def tensor(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return string(name) + dims + struct.pack("<IQ", kind, offset)


HUGE = 2**62
LIES = {
    "pairs": (header(pairs=HUGE), "do not fit"),
    "tensors": (header(tensors=HUGE), "do not fit"),
    "key": (header(1, 0, struct.pack("<Q", HUGE) + bytes(16)), "cut off"),
    "string": (header(1, 0, string("k") + struct.pack("<IQ", 8, HUGE) + bytes(8)), "cut off"),
    "strings": (header(1, 0, string("k") + struct.pack("<IIQ", 9, 8, HUGE)), "does not fit"),
    "numbers": (header(1, 0, string("k") + struct.pack("<IIQ", 9, 6, HUGE)), "cut off"),
    "nested": (header(1, 0, string("k") + struct.pack("<IIQ", 9, 9, 1)), "values of type 9"),
    "value": (header(1, 0, string("k") + struct.pack("<IQ", 77, 0)), "unknown type 77"),
    "twice": (header(2, 0, 2 * (string("k") + struct.pack("<IB", 7, 1)) + bytes(9)), "'k' is"),
    "dimensions": (header(0, 1, string("t") + struct.pack("<I", 1 << 22) + bytes(40)), "dimens"),
    "shape": (header(0, 1, tensor("t", (HUGE, HUGE)) + bytes(64)), "ends at byte"),
    "offset": (header(0, 1, tensor("t", (2,), 0, 64) + bytes(32)), "ends at byte"),
    "odd offset": (header(0, 1, tensor("t", (2,), 0, 8) + bytes(99)), "ends at byte"),
    "blocks": (header(0, 1, tensor("t", (33,), 8) + bytes(99)), "rows of 33 in blocks of 32"),
    "overlap": (header(0, 2, tensor("a", (16,)) + tensor("b", (8,)) + bytes(199)), "overlap"),
    "same": (header(0, 2, 2 * tensor("a", (8,)) + bytes(199)), "is there twice"),
    "alignment": (
        header(1, 0, string("general.alignment") + struct.pack("<II", 4, 0) + bytes(32)),
        "general.alignment is 0",
    ),
    "version": (header(version=1), "version 1"),
    "big-endian": (header(version=3 << 24), "big-endian"),
    "short": (b"GGUF\3\0\0\0\1", "cut off"),
    "other": (b"\x80\x02}q\x00", "not a GGUF file"),
}  # fmt: skip


@pytest.mark.parametrize("name", LIES)
def test_headers_that_lie(name: str, tmp_path: Path) -> None:
    content, message = LIES[name]
    (tmp_path / "m.gguf").write_bytes(content)
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=message) as error:
        describe(tmp_path / "m.gguf")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20 and "\n" not in str(error.value)


@pytest.fixture(scope="module")
def whole(package: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Iterator[bytes]:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    write_gguf(path, TINY, weights_of(TINY), BPE, "q8_0")
    assert is_gguf(path)
    yield path.read_bytes()


@settings(max_examples=60)
@given(data=st.data())
def test_fuzzed_headers_give_a_line_or_a_description(
    data: st.DataObject, whole: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = bytearray(whole)
    for _ in range(data.draw(st.integers(0, 4))):
        place = data.draw(st.integers(4, 500) | st.integers(4, len(content) - 9))
        value = data.draw(st.integers(0, 255) | st.integers(0, 2**64 - 1))
        new = value.to_bytes(1 if value < 256 else 8, "little")
        content[place : place + len(new)] = new
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content))) :]
    path = tmp_path_factory.getbasetemp() / "fuzz.gguf"
    path.write_bytes(content)
    try:
        assert describe(path)[0][1].startswith("GGUF")
    except TreadleError as error:
        assert "\n" not in str(error)


def test_a_cut_file_is_damaged(whole: bytes, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(whole[:-200])
    with pytest.raises(CorruptError, match="ends at byte"):
        describe(tmp_path / "m.gguf")
