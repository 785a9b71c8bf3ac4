"""Checkpoints and their registry: exact bytes, damage of every kind, kills at every instant."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from treadle.errors import (
    CheckpointError,
    CorruptError,
    MismatchError,
    NonFiniteError,
    TreadleError,
)
from treadle.safetensors_io import read_safetensors, write_safetensors
from treadle.train.checkpoint import (
    TOKENIZER_METADATA_LIMIT,
    check_config_match,
    load_checkpoint,
    save_checkpoint,
    verify_checkpoint,
)
from treadle.train.registry import Registry, find_checkpoint

ROOT = Path(__file__).resolve().parent.parent
posix = pytest.mark.skipif(os.name == "nt", reason="SIGKILL and fork are POSIX")

CONFIG = {"architectures": ["GPT2LMHeadModel"], "n_embd": 4, "vocab_size": 3}
TOKENIZER = '{"model": {"vocab": {"ñ": 0, "a": 1}}}'
ALL_FILES = (
    "config.json",
    "model.safetensors",
    "optimizer.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "trainer_state.json",
)


def arguments(step: int = 7, **changes: Any) -> dict[str, Any]:
    weights: dict[str, np.ndarray] = {
        "wte.weight": np.arange(12, dtype=np.float32).reshape(3, 4) + step,
        "ln.bias": np.full(3, step, np.float32),
        "scalar": np.array(step, np.float32),
        "empty": np.zeros((0, 4), np.float32),
    }
    moments = {f"{name}.{kind}": w.copy() for name, w in weights.items() for kind in "mv"}
    base: dict[str, Any] = {
        "config": CONFIG,
        "tensors": weights,
        "optimizer": moments,
        "tokenizer_json": TOKENIZER,
        "tokenizer_config": {"tokenizer_class": "PreTrainedTokenizerFast"},
        "state": {"step": step, "train_loss": 1 / 3, "val_loss": None, "rng": [1, 2**64 - 1]},
    }
    return base | changes


def save(registry: Registry, step: int, *, keep: int = 0, val_loss: float | None = None) -> Path:
    path = registry.path_for(step)
    state = {"step": step, "train_loss": 2.0, "val_loss": val_loss}
    save_checkpoint(path, **arguments(step, state=state))
    registry.add(step, keep=keep)
    return path


def content(path: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(path.iterdir())}


def steps_on_disk(registry: Registry) -> list[int]:
    return sorted(int(p.name[5:]) for p in registry.directory.iterdir())


def one_line_error(error: TreadleError) -> str:
    text = str(error)
    assert "\n" not in text and text.isprintable()
    return text


# ------------------------------------------------------------------------------------ round trip


def test_round_trip_keeps_every_value(tmp_path: Path) -> None:
    wanted = arguments()
    digest = save_checkpoint(tmp_path / "c", **wanted)
    got = load_checkpoint(tmp_path / "c", require_optimizer=True)
    assert sorted(content(tmp_path / "c")) == sorted(ALL_FILES)
    assert got.config == wanted["config"] and got.state == wanted["state"]
    assert got.tokenizer_json == TOKENIZER
    assert got.tokenizer_config == wanted["tokenizer_config"]
    for read, written in ((got.tensors, wanted["tensors"]), (got.optimizer, wanted["optimizer"])):
        assert read is not None and read.keys() == written.keys()
        for name, array in written.items():
            assert read[name].dtype == array.dtype and read[name].shape == array.shape
            assert read[name].tobytes() == array.tobytes()
    state = json.loads((tmp_path / "c" / "trainer_state.json").read_text())
    assert state["digest"] == digest
    for name, entry in state["files"].items():
        data = (tmp_path / "c" / name).read_bytes()
        assert entry == {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}


def test_one_model_file_is_enough(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "c", **arguments())
    shutil.copy(tmp_path / "c" / "model.safetensors", tmp_path / "alone.safetensors")
    got = load_checkpoint(tmp_path / "alone.safetensors")
    assert got.config == CONFIG and got.tokenizer_json == TOKENIZER
    assert got.tensors["ln.bias"].tolist() == [7, 7, 7]
    assert got.optimizer is None and got.state is None
    with pytest.raises(CheckpointError, match=r"no optimizer state.*--init-from"):
        load_checkpoint(tmp_path / "alone.safetensors", require_optimizer=True)


def test_tokenizer_over_the_limit_stays_out_of_the_metadata(tmp_path: Path) -> None:
    for extra, inside in ((0, True), (1, False)):
        text = "x" * (TOKENIZER_METADATA_LIMIT + extra)
        save_checkpoint(tmp_path / "c", **arguments(tokenizer_json=text))
        _, metadata = read_safetensors(tmp_path / "c" / "model.safetensors")
        assert ("treadle.tokenizer" in metadata) is inside
        assert load_checkpoint(tmp_path / "c").tokenizer_json == text


def test_same_state_twice_is_the_same_bytes(tmp_path: Path) -> None:
    first, second = arguments(), arguments()
    for key in ("config", "tensors", "optimizer", "state"):
        second[key] = dict(reversed(first[key].items()))
    second["tensors"] = {name: array.copy(order="F") for name, array in second["tensors"].items()}
    digests = [save_checkpoint(tmp_path / name, **kw) for name, kw in (("a", first), ("b", second))]
    assert content(tmp_path / "a") == content(tmp_path / "b")
    assert digests[0] == digests[1]
    assert content(tmp_path / "a") != content_of_other_step(tmp_path)


def content_of_other_step(tmp_path: Path) -> dict[str, bytes]:
    save_checkpoint(tmp_path / "other", **arguments(8))
    return content(tmp_path / "other")


def test_optimizer_is_left_unread_on_request(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "c", **arguments())
    (tmp_path / "c" / "optimizer.safetensors").write_bytes(b"damaged")
    assert load_checkpoint(tmp_path / "c", with_optimizer=False).optimizer is None
    with pytest.raises(CorruptError, match=r"optimizer\.safetensors"):
        load_checkpoint(tmp_path / "c")


def test_directory_of_weights_without_trainer_state(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "c", **arguments())
    for name in ("trainer_state.json", "optimizer.safetensors", "config.json", "tokenizer.json"):
        (tmp_path / "c" / name).unlink()
    got = load_checkpoint(tmp_path / "c")
    assert (got.config, got.state, got.tokenizer_json) == (CONFIG, None, TOKENIZER)
    write_safetensors(tmp_path / "c" / "model.safetensors", {}, {})
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        load_checkpoint(tmp_path / "c")


# -------------------------------------------------------------------------------- the file format


def test_safetensors_bytes_are_exactly_these(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    tensors: dict[str, np.ndarray] = {
        "b": np.array([[1.0, -2.0]], np.float32),
        "a": np.array([3.0], np.float32),
        "n": np.array([5], np.int64),
    }
    digest = write_safetensors(path, tensors, {"z": "ñ", "format": "pt"})
    header = (
        '{"__metadata__":{"format":"pt","z":"ñ"},'
        '"a":{"data_offsets":[8,12],"dtype":"F32","shape":[1]},'
        '"b":{"data_offsets":[12,20],"dtype":"F32","shape":[1,2]},'
        '"n":{"data_offsets":[0,8],"dtype":"I64","shape":[1]}}'
    ).encode()
    header += b" " * (-len(header) % 8)
    expected = (
        len(header).to_bytes(8, "little")
        + header
        + bytes.fromhex("0500000000000000" + "00004040" + "0000803f" + "000000c0")
    )
    data = path.read_bytes()
    assert data == expected
    assert (8 + len(header)) % 8 == 0
    assert (digest.sha256, digest.size) == (hashlib.sha256(data).hexdigest(), len(data))
    read, metadata = read_safetensors(path)
    assert metadata == {"z": "ñ", "format": "pt"}
    assert {k: v.tolist() for k, v in read.items()} == {"a": [3], "b": [[1, -2]], "n": [5]}


def test_documented_example_is_what_is_written(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "formats.md").read_text(encoding="utf-8")
    length, header, data = text.split("these 68 bytes:\n\n```text\n")[1].split("\n")[:3]
    example = bytes.fromhex(length[:23]) + header[:54].encode() + b"  " + bytes.fromhex(data[:11])
    write_safetensors(tmp_path / "w", {"w": np.ones(1, np.float32)}, {})
    assert (tmp_path / "w").read_bytes() == example and len(example) == 68


def test_layout_and_chunks_do_not_change_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("treadle.safetensors_io.CHUNK_ITEMS", 5)
    base = np.arange(48, dtype=np.float32).reshape(6, 8)
    tensors: dict[str, np.ndarray] = {
        "t": base.T,
        "s": base[::2, 1::3],
        "big": base.astype(">f4"),
        "h": base.astype("e"),
    }
    write_safetensors(tmp_path / "x", tensors, {})
    read, _ = read_safetensors(tmp_path / "x")
    for name, array in tensors.items():
        assert np.array_equal(read[name], array), name


def raw_file(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def tensor(shape: list[int], start: int, end: int, dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


HOSTILE = {
    "empty": b"",
    "seven bytes": b"\0" * 7,
    "header longer than the file": raw_file({}, length=90_000_000),
    "huge header": raw_file({}, length=2**63),
    "header over the limit": raw_file({}, length=100_000_001),
    "not JSON": raw_file(b"{'a': 1}"),
    "not UTF-8": raw_file(b"\xff\xfe{}"),
    "a list": raw_file([]),
    "deep": raw_file(b'{"a":' + b"[" * 100_000),
    "metadata not text": raw_file({"__metadata__": {"a": 1}}),
    "overlap": raw_file({"a": tensor([2], 0, 8), "b": tensor([2], 4, 12)}, bytes(12)),
    "gap": raw_file({"a": tensor([1], 0, 4), "b": tensor([1], 8, 12)}, bytes(12)),
    "same bytes twice": raw_file({"a": tensor([1], 0, 4), "b": tensor([1], 0, 4)}, bytes(4)),
    "negative": raw_file({"a": tensor([1], -4, 0)}, bytes(4)),
    "negative shape": raw_file({"a": tensor([-1], 0, 4)}, bytes(4)),
    "backwards": raw_file({"a": tensor([1], 4, 0)}, bytes(4)),
    "beyond the end": raw_file({"a": tensor([1000], 0, 4000)}, bytes(4)),
    "bytes left over": raw_file({"a": tensor([1], 0, 4)}, bytes(8)),
    "shape that overflows": raw_file({"a": tensor([2**62, 4], 0, 4)}, bytes(4)),
    "shape and length differ": raw_file({"a": tensor([2**40], 0, 4)}, bytes(4)),
    "unknown dtype": raw_file({"a": tensor([1], 0, 4, "Q4")}, bytes(4)),
    "control characters in a name": raw_file({"a\n\x1b[31m": tensor([9], 0, 4)}, bytes(4)),
    "dtype without NumPy": raw_file({"a": tensor([2], 0, 4, "BF16")}, bytes(4)),
    "weights not float32": raw_file(
        {"__metadata__": {"treadle.config": "{}"}, "a": tensor([2], 0, 4, "F16")}, bytes(4)
    ),
    "config not JSON": raw_file({"__metadata__": {"treadle.config": "{]"}}),
    "config not an object": raw_file({"__metadata__": {"treadle.config": "[1]"}}),
    "config too deep": raw_file({"__metadata__": {"treadle.config": "[" * 100_000}}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_file_is_one_line_of_error(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(HOSTILE[name])
    with pytest.raises(CorruptError) as caught:
        load_checkpoint(path)
    text = one_line_error(caught.value)
    assert text.startswith(str(path)) and len(text) < len(str(path)) + 300


@posix
def test_hostile_files_take_no_memory(tmp_path: Path) -> None:
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name, data in HOSTILE.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(CorruptError):
            load_checkpoint(tmp_path / name)
    unit = 1 if sys.platform == "darwin" else 1024
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * unit < 50e6


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"tensors": {"w": np.zeros(2)}}, CheckpointError, "'w'.*float32.*float64"),
        ({"optimizer": {"w.m": np.zeros(2, complex)}}, CheckpointError, r"'w\.m'.*complex128"),
        ({"config": {"x": {1, 2}}}, CheckpointError, "expected text.*set"),
        ({"state": {"step": 1, "loss": float("nan")}}, CheckpointError, "finite"),
    ],
)
def test_what_the_files_cannot_hold_is_refused(
    changes: dict[str, Any], error: type[Exception], text: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=text) as caught:
        save_checkpoint(tmp_path / "c", **arguments(**changes))
    assert isinstance(caught.value, TreadleError) and one_line_error(caught.value)
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------------------------- damage


@pytest.mark.parametrize("name", ALL_FILES)
@pytest.mark.parametrize("damage", ["truncate", "flip", "grow", "empty", "remove", "swap"])
def test_every_damage_to_every_file_is_found(name: str, damage: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "c", **arguments(7))
    save_checkpoint(tmp_path / "other", **arguments(8, config={}, tokenizer_json="{}"))
    path = tmp_path / "c" / name
    data = bytearray(path.read_bytes())
    if damage == "truncate":
        path.write_bytes(data[:-3])
    elif damage == "flip":
        data[data.index(b"7") if b"7" in data else len(data) // 2] ^= 1
        path.write_bytes(data)
    elif damage == "grow":
        path.write_bytes(data + b"}")
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "remove":
        path.unlink()
    elif name == "tokenizer_config.json":
        path.write_bytes((tmp_path / "c" / "config.json").read_bytes())
    else:
        shutil.copy(tmp_path / "other" / name, path)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(tmp_path / "c", require_optimizer=True)
    text = one_line_error(caught.value)
    # A whole trainer_state.json of another checkpoint accuses the files that it does not fit.
    assert damage == "swap" or name in text
    assert isinstance(caught.value, CorruptError) or damage == "remove"


def test_random_flips_never_pass(tmp_path: Path) -> None:
    wanted = arguments()
    save_checkpoint(tmp_path / "c", **wanted)
    rng = random.Random(5)
    originals = content(tmp_path / "c")
    for _ in range(150):
        name = rng.choice(ALL_FILES)
        data = bytearray(originals[name])
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        (tmp_path / "c" / name).write_bytes(data)
        try:
            got = load_checkpoint(tmp_path / "c", require_optimizer=True)
        except CheckpointError as error:
            one_line_error(error)
        else:  # a blank turned into another blank: the same document
            assert name == "trainer_state.json" and got.state == wanted["state"]
        (tmp_path / "c" / name).write_bytes(originals[name])


def test_state_file_may_not_point_elsewhere(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "c", **arguments())
    path = tmp_path / "c" / "trainer_state.json"
    document = json.loads(path.read_text())
    document["files"]["../secret"] = document["files"]["config.json"]
    del document["digest"]
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    document["digest"] = hashlib.sha256(text.encode()).hexdigest()
    path.write_text(json.dumps(document))
    with pytest.raises(CorruptError, match=r"unknown file '\.\./secret'"):
        load_checkpoint(tmp_path / "c")


def test_newer_format_says_upgrade(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "c", **arguments())
    path = tmp_path / "c" / "trainer_state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 2}))
    with pytest.raises(CheckpointError, match=r"format 2 is newer.*upgrade"):
        load_checkpoint(tmp_path / "c")


def test_paths_that_are_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such checkpoint"):
        load_checkpoint(tmp_path / "absent")
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        load_checkpoint(tmp_path)


def test_failure_11_missing_optimizer_is_said(tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    path = save(registry, 5)
    (path / "optimizer.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no optimizer state.*--init-from"):
        load_checkpoint(path, require_optimizer=True)
    assert load_checkpoint(path).optimizer is None
    with pytest.raises(CorruptError, match=r"no intact checkpoint.*optimizer\.safetensors"):
        Registry(tmp_path).latest()
    best = Registry(tmp_path).best()
    assert best is not None and best.path == path


def test_failure_13_mismatch_lists_every_field() -> None:
    saved = {
        "model": {"n_layer": 2, "n_head": 4, "bias": True},
        "optimizer": {"betas": [0.9, 0.99]},
        "train": {"steps": 10, "eval_every": 5},
    }
    wanted = {
        "model": {"n_layer": 3, "n_head": 8, "bias": True, "dropout": 0.1},
        "optimizer": {"betas": (0.9, 0.99)},
        "train": {"steps": 20, "eval_every": 0},
    }
    with pytest.raises(MismatchError) as caught:
        check_config_match(saved, wanted, {"train.steps", "train.eval_*"})
    text = one_line_error(caught.value)
    assert "model.n_layer: saved 2, wanted 3" in text
    assert "model.n_head: saved 4, wanted 8" in text
    assert "model.dropout: saved absent, wanted 0.1" in text
    assert "betas" not in text and "train." not in text
    check_config_match(saved, wanted, {"train.*", "model.*"})


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["tensors", "optimizer"])
def test_failure_17_nan_weights_are_never_saved(bad: float, where: str, tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    path = save(registry, 5)
    before = content(path)
    changed = arguments(5)
    name = next(iter(changed[where]))
    changed[where][name] = np.append(np.zeros(2_000_000, np.float32), np.float32(bad))
    with pytest.raises(NonFiniteError, match=f"'{name}'") as caught:
        save_checkpoint(path, **changed)
    one_line_error(caught.value)
    assert content(path) == before and steps_on_disk(registry) == [5]


def test_largest_floats_are_finite(tmp_path: Path) -> None:
    huge = np.full(8, np.finfo(np.float32).max)
    save_checkpoint(tmp_path / "c", **arguments(tensors={"w": huge}))
    assert np.array_equal(load_checkpoint(tmp_path / "c").tensors["w"], huge)


# -------------------------------------------------------------------------------------- registry


def test_registry_file_and_pruning(tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    assert registry.latest() is None and registry.best() is None
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, 1.0), (5, 4.0)):
        save(registry, step, keep=2, val_loss=loss)
    assert steps_on_disk(registry) == [2, 4, 5]
    written = json.loads((tmp_path / "checkpoints.json").read_text())
    assert written["best"] == "checkpoints/step-00000002"
    assert written["latest"] == "checkpoints/step-00000005"
    assert written["checkpoints"] == [dataclasses.asdict(e) for e in registry.entries]
    entry = written["checkpoints"][0]
    assert (entry["step"], entry["train_loss"], entry["val_loss"]) == (2, 2.0, 1.0)
    assert len(entry["digest"]) == 64 and entry["time"].endswith("+00:00")
    latest, best = registry.latest(), registry.best()
    assert latest is not None and (latest.entry.step, latest.note) == (5, None)
    assert best is not None and (best.entry.step, best.note) == (2, None)


def test_keep_zero_keeps_all(tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    for step in range(1, 6):
        save(registry, step)
    assert steps_on_disk(registry) == [1, 2, 3, 4, 5]


def test_best_without_validation_is_the_newest(tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    save(registry, 1)
    save(registry, 2)
    best = registry.best()
    assert best is not None and best.entry.step == 2


@pytest.mark.parametrize("loss", ["removed", "damaged", "stale"])
def test_registry_file_is_rebuilt(loss: str, tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    save(registry, 1, val_loss=1.0)
    stale = (tmp_path / "checkpoints.json").read_bytes()
    save(registry, 2, val_loss=2.0)
    whole = (tmp_path / "checkpoints.json").read_bytes()
    if loss == "removed":
        (tmp_path / "checkpoints.json").unlink()
    else:
        (tmp_path / "checkpoints.json").write_bytes(stale if loss == "stale" else whole[:-20])
    again = Registry(tmp_path)
    latest = again.latest()
    assert latest is not None and latest.entry.step == 2
    again.recover()
    assert (tmp_path / "checkpoints.json").read_bytes() == whole


@pytest.mark.parametrize("name", ["model.safetensors", "trainer_state.json"])
def test_damaged_newest_falls_back_and_says_so(name: str, tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    old = save(registry, 1, val_loss=2.0)
    new = save(registry, 2, val_loss=1.0)
    data = bytearray((new / name).read_bytes())
    data[-5] ^= 1
    (new / name).write_bytes(data)
    latest = Registry(tmp_path).latest()
    assert latest is not None and latest.path == old
    assert latest.note is not None and name in latest.note and str(old) in latest.note
    best = Registry(tmp_path).best()
    assert best is not None and best.path == old
    shutil.rmtree(old)
    with pytest.raises(CorruptError, match=f"no intact checkpoint.*{name}"):
        Registry(tmp_path).latest()


def test_pruning_spares_what_is_damaged(tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    save(registry, 1)
    damaged = save(registry, 2)
    (damaged / "model.safetensors").write_bytes(b"")
    save(registry, 3, keep=2)
    assert steps_on_disk(registry) == [1, 2, 3]
    save(registry, 4, keep=2)
    assert steps_on_disk(registry) == [2, 3, 4]


def test_renamed_checkpoint_is_not_taken_for_another_step(tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    old = save(registry, 1)
    shutil.copytree(old, registry.path_for(9))
    latest = Registry(tmp_path).latest()
    assert latest is not None and latest.path == old
    assert latest.note is not None and "step-00000009" in latest.note
    with pytest.raises(CheckpointError, match=r"cannot be registered.*holds step 1"):
        registry.add(9)
    with pytest.raises(CheckpointError, match="no such checkpoint"):
        registry.add(10)


def test_recover_clears_leftovers_and_nothing_else(tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    path = save(registry, 1)
    shutil.copytree(path, registry.directory / ".step-00000002.tmp-123")
    shutil.copytree(path, registry.directory / ".step-00000003.del-123")
    shutil.copytree(path, registry.directory / ".step-00000001.old-123")
    (tmp_path / ".checkpoints.json.tmp-9").write_text("half")
    (tmp_path / ".hidden.mine-9").write_text("a person's")
    Registry(tmp_path).recover()
    assert [p.name for p in registry.directory.iterdir()] == ["step-00000001"]
    assert {p.name for p in tmp_path.iterdir()} == {
        "checkpoints",
        "checkpoints.json",
        ".hidden.mine-9",
    }
    os.rename(path, registry.directory / ".step-00000001.old-123")
    again = Registry(tmp_path)
    latest = again.latest()
    assert latest is not None and latest.path.name == ".step-00000001.old-123"
    again.recover()
    latest = again.latest()
    assert latest is not None and latest.path == path


def test_reading_a_registry_writes_nothing(tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    path = save(registry, 1)
    (tmp_path / "checkpoints.json").unlink()
    os.rename(path, registry.directory / ".step-00000001.tmp-5")
    before = sorted(tmp_path.rglob("*"))
    reader = Registry(tmp_path)
    assert reader.latest() is None and reader.best() is None
    assert sorted(tmp_path.rglob("*")) == before


def test_find_checkpoint(tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    old = save(registry, 1, val_loss=1.0)
    new = save(registry, 2, val_loss=2.0)
    assert find_checkpoint(tmp_path, "best") == (old, None)
    assert find_checkpoint(tmp_path, "newest") == (new, None)
    assert find_checkpoint(old, "newest") == (old, None)
    shutil.rmtree(registry.directory)
    registry.directory.mkdir()
    with pytest.raises(CheckpointError, match="no checkpoint yet"):
        find_checkpoint(tmp_path, "best")


def test_directory_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot write .*step-00000002: "):
        save_checkpoint(Registry(tmp_path).path_for(2), **arguments(2))


@posix
@pytest.mark.skipif(os.name != "nt" and os.geteuid() == 0, reason="root may write anywhere")
def test_permission_lost_is_named(tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    path = save(registry, 1)
    registry.directory.chmod(0o500)
    try:
        with pytest.raises(CheckpointError, match=r"cannot write.*Permission denied"):
            save_checkpoint(registry.path_for(2), **arguments(2))
    finally:
        registry.directory.chmod(0o700)
    verify_checkpoint(path)


def test_disk_full_is_named_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = Registry(tmp_path)
    path = save(registry, 1)
    before = content(path)

    def full(name: str) -> None:
        if name == "model.safetensors":
            raise OSError(28, "No space left on device")

    for step in (1, 2):
        with pytest.raises(CheckpointError, match=r"No space left on device.*resume"):
            save_checkpoint(registry.path_for(step), **arguments(step), on_file=full)
    assert steps_on_disk(registry) == [1] and content(path) == before


def test_second_rename_failing_puts_the_first_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = Registry(tmp_path)
    path = save(registry, 1)
    before = content(path)
    rename = os.rename

    def failing(source: Path, target: Path) -> None:
        if ".tmp-" in Path(source).name:
            raise PermissionError(13, "Access is denied")
        rename(source, target)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(CheckpointError, match="Access is denied"):
        save_checkpoint(path, **arguments(1, config={"changed": True}))
    assert content(path) == before and steps_on_disk(registry) == [1]


# ----------------------------------------------------------------------------------------- kills

SAVER = """
    import sys
    import numpy as np
    from treadle.train.checkpoint import save_checkpoint
    from treadle.train.registry import Registry

    def save(registry, step, tag, keep=2):
        fill = np.full(500, step, np.float32)
        save_checkpoint(
            registry.path_for(step), config={"tag": tag}, tensors={"w": fill},
            optimizer={"w.m": fill}, tokenizer_json="{}", tokenizer_config={},
            state={"step": step, "train_loss": 1.0, "val_loss": 1.0 / step, "tag": tag},
        )
        registry.add(step, keep=keep)
"""

FOREVER = """
    registry = Registry(sys.argv[1])
    registry.recover()
    found = registry.latest()
    step = found.entry.step if found else 0
    print(step, flush=True)
    while True:
        step += 1
        save(registry, step, "run")
        print(step, flush=True)
"""

EVERY_EVENT = """
    import os, signal
    run, kill_at, step, tag = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]

    def one_save(kill_at):
        events = 0
        def hook(event, args):
            nonlocal events
            if event in WATCHED:
                events += 1
                if events == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
        registry = Registry(run)
        sys.addaudithook(hook)
        save(registry, step, tag, keep=1)

    WATCHED = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}
    while True:
        child = os.fork()
        if child == 0:
            one_save(kill_at)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print("done" if os.waitstatus_to_exitcode(status) == 0 else "killed", flush=True)
        line = sys.stdin.readline().split()
        if not line:
            break
        kill_at, step, tag = int(line[0]), int(line[1]), line[2]
"""


def saver(script: str, *args: object) -> subprocess.Popen[str]:
    code = textwrap.dedent(SAVER) + textwrap.dedent(script)
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, args)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def check_whole(run: Path, at_least: int) -> int:
    """The newest step, after checking that each checkpoint under a final name is whole."""
    registry = Registry(run)
    assert not registry.damaged
    for entry in registry.entries:
        got = load_checkpoint(run / entry.path, require_optimizer=True)
        assert got.tensors["w"].tolist() == [entry.step] * 500
        assert got.optimizer is not None
        assert got.optimizer["w.m"].tobytes() == got.tensors["w"].tobytes()
        assert got.state is not None and got.state["tag"] == got.config["tag"]
    latest = registry.latest()
    step = 0 if latest is None else latest.entry.step
    assert latest is None or latest.note is None
    assert step >= at_least
    return step


@posix
def test_failure_14_kill_at_random_instants(tmp_path: Path) -> None:
    rng = random.Random(14)
    reached = 0
    for _ in range(20):
        process = saver(FOREVER, tmp_path)
        assert process.stdout is not None
        assert int(process.stdout.readline()) == reached
        for _ in range(rng.randrange(1, 4)):  # saves are counted, not timed: machines differ
            reached = int(process.stdout.readline())
        time.sleep(rng.uniform(0.0, 0.02))
        process.send_signal(signal.SIGKILL)
        printed = process.communicate()[0].split()
        assert process.returncode == -signal.SIGKILL
        reached = check_whole(tmp_path, int(printed[-1]) if printed else reached)
    assert reached >= 20
    registry = Registry(tmp_path)
    registry.recover()
    assert len(steps_on_disk(registry)) <= 4


@posix
def test_failure_14_kill_at_every_file_operation(tmp_path: Path) -> None:
    """Saves a new step, and replaces it, killed before its 1st, 2nd, … file operation."""
    first = tmp_path / "1"
    registry = Registry(first)
    process = saver(EVERY_EVENT, first, 0, 1, "old")
    assert process.stdin is not None and process.stdout is not None
    assert process.stdout.readline() == "done\n"
    pristine = tmp_path / "pristine"
    shutil.copytree(first, pristine)
    kills = {1: 0, 2: 0}
    for step in kills:  # 1 replaces the checkpoint of step 1, 2 is new and prunes it
        for kill_at in range(1, 200):
            shutil.rmtree(first)
            shutil.copytree(pristine, first)
            process.stdin.write(f"{kill_at} {step} new\n")
            process.stdin.flush()
            outcome = process.stdout.readline()
            check_whole(first, 1)
            registry.recover()
            newest = check_whole(first, 1)
            assert newest in (1, step)
            written = json.loads((first / "checkpoints.json").read_text())
            assert written["latest"] == f"checkpoints/step-{newest:08d}"
            assert not list(first.rglob(".*"))
            if outcome == "done\n":
                tag = load_checkpoint(registry.path_for(step)).config["tag"]
                assert (newest, tag, steps_on_disk(registry)) == (step, "new", [step])
                break
            assert outcome == "killed\n"
            kills[step] += 1
    process.stdin.close()
    assert process.wait(timeout=20) == 0
    process.stdout.close()
    assert min(kills.values()) > 15
