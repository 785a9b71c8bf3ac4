"""Models from elsewhere: numbers of PyTorch's that are stored here, and files that are hostile.

`tests/parity` compares with PyTorch itself; the fixtures are made there, by make_fixtures.py.
"""

from __future__ import annotations

import json
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ours
import treadle
from runs import fail, metrics, run, succeed, write_text
from treadle.data.tokenizer import Tokenizer
from treadle.errors import CheckpointError, TreadleError
from treadle.interop import hub
from treadle.interop.hf import read_hf
from treadle.safetensors_io import read_safetensors, write_safetensors

FIXTURES = Path(__file__).resolve().parent / "fixtures"
STORED = sorted(path.parent.name for path in FIXTURES.glob("*/expected.safetensors"))


def copied(name: str, to: Path) -> Path:
    """A copy of a fixture, to be changed."""
    folder = to / name
    shutil.copytree(FIXTURES / name, folder)
    return folder


def change_config(folder: Path, **values: Any) -> None:
    """Sets keys of config.json; a value of ... drops its key."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | values
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


def refusal(folder: Path, kind: type[TreadleError] = CheckpointError) -> str:
    """The one line that reading a directory ends with."""
    with pytest.raises(kind) as caught:
        read_hf(folder)
    line = str(caught.value)
    assert "\n" not in line and len(line) < 600
    return line


# ---------------------------------------------------------------- stored numbers


@pytest.mark.parametrize("device", ["numpy", "cpu"])
@pytest.mark.parametrize("name", STORED)
def test_numbers_of_pytorch(name: str, device: str) -> None:
    imported = read_hf(FIXTURES / name)
    wanted, _ = read_safetensors(FIXTURES / name / "expected.safetensors")
    found = ours.numbers(
        imported.model, imported.weights, wanted["tokens"], wanted["targets"], device
    )
    assert ours.relative(found.logits, wanted["logits"]) <= 1e-5
    assert np.abs(np.subtract(found.losses, wanted["losses"])).max() <= 1e-4
    assert wanted["losses"][-1] < wanted["losses"][0] - 0.1
    gradients = {key[2:]: array for key, array in wanted.items() if key.startswith("d ")}
    assert gradients.keys() == found.grads.keys()
    for key, array in gradients.items():
        assert ours.relative(found.grads[key], array) <= 1e-5, key


def test_pytorch_model_bin() -> None:
    one, other = read_hf(FIXTURES / "gpt2"), read_hf(FIXTURES / "pytorch")
    assert one.model == other.model and other.notes == []
    for name, array in one.weights.items():
        assert np.array_equal(array, other.weights[name]), name


# ---------------------------------------------------------------- forms of the same model


def rewritten(folder: Path, change: Callable[[dict[str, np.ndarray]], dict[str, Any]]) -> Path:
    """The directory with other tensors in its file."""
    tensors, metadata = read_safetensors(folder / "model.safetensors")
    write_safetensors(folder / "model.safetensors", change(tensors), metadata)
    return folder


def test_names_without_the_body_and_old_buffers(tmp_path: Path) -> None:
    def change(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        bare = {name.removeprefix("transformer."): array for name, array in tensors.items()}
        masks = {
            "h.0.attn.bias": np.tril(np.ones((1, 1, 12, 12), np.uint8)),
            "h.0.attn.masked_bias": np.float32([-1e4]),
        }
        return bare | masks | {"lm_head.weight": tensors["transformer.wte.weight"]}

    imported = read_hf(rewritten(copied("gpt2", tmp_path), change))
    assert imported.notes == [] and imported.model.tie_embeddings
    wanted = read_hf(FIXTURES / "gpt2").weights
    assert imported.weights.keys() == wanted.keys()
    for name, array in wanted.items():
        assert np.array_equal(imported.weights[name], array), name


def test_a_tensor_without_a_place_is_noted(tmp_path: Path) -> None:
    folder = rewritten(copied("gpt2", tmp_path), lambda t: t | {"extra.weight": np.ones(3, "f4")})
    assert read_hf(folder).notes == [
        "tensors that the model has no place for were left out: extra.weight"
    ]


def as_bfloat16(folder: Path) -> None:
    """Replaces the weights by the upper halves of their bits, as a file of dtype BF16."""
    tensors, _ = read_safetensors(folder / "model.safetensors")
    header, data = {}, b""
    for name, array in tensors.items():
        bits = (array.view(np.uint32) >> 16).astype("<u2").tobytes()
        header[name] = {
            "dtype": "BF16",
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + len(bits)],
        }
        data += bits
    raw_file(folder / "model.safetensors", header, data)


def raw_file(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> None:
    """A file that says what it is told to."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def test_dtypes_of_stored_weights(tmp_path: Path) -> None:
    wanted = read_hf(FIXTURES / "gpt2").weights
    for dtype, error in (("<f2", 2**-11), ("<f8", 0.0)):
        folder = copied("gpt2", tmp_path / dtype[1:])
        rewritten(folder, lambda t, d=dtype: {k: a.astype(d) for k, a in t.items()})
        for name, array in read_hf(folder).weights.items():
            assert array.dtype == np.float32
            assert np.abs(array - wanted[name]).max() <= error * np.abs(wanted[name]).max()
    folder = copied("gpt2", tmp_path / "bf16")
    as_bfloat16(folder)
    for name, array in read_hf(folder).weights.items():
        assert np.array_equal(array.view(np.uint32), wanted[name].view(np.uint32) & 0xFFFF0000)


def in_shards(folder: Path, number: int = 3) -> Path:
    """The weights in several files, with the index; returns it."""
    tensors, _ = read_safetensors(folder / "model.safetensors")
    names, table = sorted(tensors), {}
    for i in range(number):
        shard = f"model-{i + 1:05d}-of-{number:05d}.safetensors"
        part = {name: tensors[name] for name in names[i::number]}
        write_safetensors(folder / shard, part, {"format": "pt"})
        table |= dict.fromkeys(part, shard)
    (folder / "model.safetensors").unlink()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": table}))
    return index


def test_shards(tmp_path: Path) -> None:
    folder = copied("gpt2", tmp_path)
    in_shards(folder)
    wanted = read_hf(FIXTURES / "gpt2").weights
    found = read_hf(folder).weights
    assert all(np.array_equal(found[name], wanted[name]) for name in wanted)


# ---------------------------------------------------------------- commands


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A Hugging Face directory with a tokenizer of characters."""
    folder = copied("gpt2", tmp_path)
    text = "".join(map(chr, range(58, 123))) + " \n"  # as many as the model has ids
    (folder / "tokenizer.json").write_text(Tokenizer.char(text).to_json())
    return folder


def test_import_info_export_and_back(model: Path, tmp_path: Path) -> None:
    said = succeed("import", model, "--out", tmp_path / "mine")
    parameters = sum(array.size for array in read_hf(model).weights.values())
    assert "gpt2" in said and f"{parameters:,}" in said and "char, 67 ids" in said
    said = succeed("info", tmp_path / "mine")
    assert re.search(r"intact +yes: 4 files", said) and "transformer.h.*.ln_1.weight" in said
    succeed("export", tmp_path / "mine", "--to", "hf", "--out", tmp_path / "theirs")
    wanted = read_hf(model).weights
    found = read_hf(tmp_path / "theirs").weights
    assert all(np.array_equal(found[name], wanted[name]) for name in wanted)
    one = succeed("generate", model, "--prompt", "AB", "--tokens", 8, "--temperature", 0)
    assert one == succeed("generate", tmp_path / "theirs", "--prompt", "AB", "--tokens", 8,
                          "--temperature", 0)  # fmt: skip
    assert "choose another --out" in fail("import", model, "--out", tmp_path / "mine")
    assert "one of hf, gguf, llmc" in fail("export", model, "--to", "onnx", "--out", tmp_path / "x")
    assert "takes fp32" in fail("export", model, "--to", "hf", "--out", tmp_path / "x",
                                "--dtype", "int4")  # fmt: skip


def test_info_of_what_there_is(model: Path, tmp_path: Path) -> None:
    text = write_text(tmp_path / "text.txt")
    succeed("train", "--data", text, "--out", tmp_path / "run", "--steps", 2, "--n-layer", 1,
            "--n-embd", 8, "--n-head", 1, "--block-size", 8, "--batch-size", 2)  # fmt: skip
    succeed("prepare", text, "--out", tmp_path / "tokens")
    np.arange(9, dtype=np.int32).tofile(tmp_path / "raw.bin")
    weights = tmp_path / "run" / "checkpoints" / "step-00000002" / "model.safetensors"
    for path, words in {
        tmp_path / "run": ("run", "char", "the best"),
        weights.parent: ("checkpoint", "step", "val_loss"),
        weights: ("safetensors file", "char", "parameters"),
        model: ("Hugging Face directory", "no digests"),
        FIXTURES / "pytorch" / "pytorch_model.bin": ("PyTorch file", "lm_head.weight"),
        tmp_path / "tokens": ("tokens", "vocabulary"),
        tmp_path / "tokens" / "train.bin": ("llm.c", "uint16"),
        tmp_path / "raw.bin": ("token file", "int32"),
        model / "tokenizer.json": ("tokenizer", "67 ids"),
    }.items():
        said = succeed("info", path)
        assert re.search(rf"^kind +{words[0]}$", said, re.M), said
        assert all(word in said for word in words) and re.search(r"^intact +yes", said, re.M)
    assert "no such file" in fail("info", tmp_path / "nothing")
    assert "not a run" in fail("info", text)


def test_export_to_llmc(model: Path, tmp_path: Path) -> None:
    said = succeed("export", model, "--to", "llmc", "--out", tmp_path / "new" / "m.bin")
    assert "m_tokenizer.bin" in said and "fp32" in said
    succeed("import", tmp_path / "new" / "m.bin", "--out", tmp_path / "mine")
    wanted, again = read_hf(model), treadle.load(tmp_path / "mine")
    assert all(np.array_equal(again.weights[name], wanted.weights[name]) for name in wanted.weights)
    assert again.tokenizer is not None and again.tokenizer.vocab_size == 67
    assert re.search(r"^kind +llm.c$", succeed("info", tmp_path / "new" / "m.bin"), re.M)


def test_export_to_gguf(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    succeed("export", model, "--to", "gguf", "--out", tmp_path / "m.gguf", "--dtype", "fp16")
    assert re.search(r"^kind +GGUF$", succeed("info", tmp_path / "m.gguf"), re.M)


def test_info_names_damage(model: Path, tmp_path: Path) -> None:
    succeed("import", model, "--out", tmp_path / "mine")
    weights = tmp_path / "mine" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    result = run("info", tmp_path / "mine")
    assert result.code == 1 and "SHA-256" in result.out
    weights.write_bytes(data[:-4])
    assert run("info", tmp_path / "mine").code == 1
    (tmp_path / "mine" / "trainer_state.json").unlink()
    assert "whole safetensors" in run("info", tmp_path / "mine").out


def test_fine_tuning(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes and tokenizer come from the model; windows may be shorter than its context."""
    monkeypatch.chdir(tmp_path)
    text, out = write_text(tmp_path / "text.txt"), tmp_path / "tuned"
    command = ("train", "--data", text, "--init-from", "gpt2", "--out", out, "--steps", 6)
    command += ("--batch-size", 4, "--set", "train.window=5", "--set", "train.eval_every=3")
    said = succeed(*command, "--run-steps", 3)
    assert "starting from the weights" in said and "20 tokens" in said
    config = json.loads((out / "run.json").read_text())
    assert config["model"]["block_size"] == 12 and config["model"]["n_embd"] == 12
    assert config["data"]["tokenizer"] == "model" and config["optimizer"]["lr"] == 1e-4
    assert config["train"]["init_from"] == str(model)
    shutil.rmtree(model)  # a run that has begun needs its source no more
    assert "resuming at step 3" in succeed(*command)
    assert "finished at step 6" in succeed("train", "--out", out)
    assert [line["step"] for line in metrics(out)] == [1, 2, 3, 4, 5, 6]
    tuned = treadle.load(out)
    assert tuned.model.block_size == 12 and tuned.tokenizer is not None
    assert tuned.tokenizer.vocab_size == 67


def test_fine_tuning_begins_with_the_loss_of_the_model(model: Path, tmp_path: Path) -> None:
    text, out = write_text(tmp_path / "text.txt"), tmp_path / "tuned"
    succeed("train", "--data", text, "--init-from", model, "--out", out, "--steps", 1,
            "--batch-size", 1, "--lr", 1e-9, "--set", "train.eval_batches=null")  # fmt: skip
    data = treadle.load_data(text, tokenizer=str(model / "tokenizer.json"))
    loss = treadle.load(model).loss(data.val)
    assert abs(metrics(out)[0]["val_loss"] - loss) < 1e-4


def test_what_does_not_fit_the_weights_is_refused(model: Path, tmp_path: Path) -> None:
    text = write_text(tmp_path / "text.txt")
    command = ("train", "--data", text, "--init-from", model, "--out", tmp_path / "run")
    assert "model.n_embd: 64 is given" in fail(*command, "--n-embd", 64)
    assert "train.window" in fail(*command, "--block-size", 8)
    assert "train.window: 13 is more" in fail(*command, "--set", "train.window=13")
    (model / "tokenizer.json").unlink()
    assert "no tokenizer" in fail(*command)
    assert not (tmp_path / "run").exists()
    assert "data.tokenizer: model" in fail("train", "--data", text, "--tokenizer", "model")


# ---------------------------------------------------------------- the hub


def test_the_hub(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked = []

    def snapshot(name: str, allow_patterns: list[str], ignore_patterns: str) -> str:
        asked.append((name, allow_patterns, ignore_patterns))
        return str(model)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    monkeypatch.chdir(tmp_path)  # where `gpt2` is a directory, and `org/gpt2` none
    succeed("import", "org/gpt2", "--out", tmp_path / "a")
    succeed("generate", "hf:gpt2", "--prompt", "AB", "--tokens", 2)
    succeed("import", "gpt2", "--out", tmp_path / "b")
    assert [name for name, *_ in asked] == ["org/gpt2", "gpt2"]
    assert "model.safetensors.index.json" in asked[0][1] and asked[0][2] == "*/*"


def test_the_hub_out_of_reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def offline(*args: Any, **options: Any) -> str:
        raise OSError("Name or service not known\nmany\nlines")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    line = fail("import", "hf:gpt2", "--out", tmp_path / "a")
    assert "cannot be downloaded (Name or service not known)" in line and "network" in line
    assert "expected a name" in fail("import", "hf:../../etc", "--out", tmp_path / "a")
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    assert "pip install" in fail("import", "hf:gpt2", "--out", tmp_path / "a")
    assert not hub.is_name("a/b/c") and not hub.is_name("..") and hub.is_name("org/my.model-2")
