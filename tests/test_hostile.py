"""Files that lie, are cut, or mean harm: one line each, nothing run, no memory taken for them."""

from __future__ import annotations

import io
import json
import pickle
import struct
import tracemalloc
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from test_interop import (
    FIXTURES,
    change_config,
    copied,
    in_shards,
    raw_file,
    refusal,
    rewritten,
)
from treadle.data.tokenizer import Tokenizer
from treadle.errors import CorruptError, NonFiniteError, TokenizerError, TreadleError
from treadle.interop.torch_file import TorchFile
from treadle.safetensors_io import SafetensorsFile

MEMORY = 32 << 20  # bytes; the model itself takes 20 KB


@pytest.fixture(autouse=True)
def _little_memory() -> Iterator[None]:
    tracemalloc.start()
    yield
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < MEMORY


# ---------------------------------------------------------------- safetensors

ONE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
HEADERS: dict[str, tuple[Any, bytes, int | None]] = {
    "length beyond the file": (b"{}", b"", 2**40),
    "length beyond 64 bits of memory": (b"{}", b"", 2**64 - 1),
    "no JSON": (b"not json", b"", None),
    "deep JSON": (b'{"a":' * 5000, b"", None),
    "a list": (b"[]", b"", None),
    "overlapping offsets": ({"a": ONE, "b": ONE}, bytes(8), None),
    "a gap": ({"a": ONE | {"data_offsets": [8, 16]}}, bytes(16), None),
    "past the end": ({"a": ONE | {"shape": [4], "data_offsets": [0, 16]}}, bytes(8), None),
    "backwards": ({"a": ONE | {"data_offsets": [8, 0]}}, bytes(8), None),
    "a shape that is not its bytes": ({"a": ONE | {"shape": [3]}}, bytes(8), None),
    "a shape that overflows": ({"a": ONE | {"shape": [2**40, 2**40]}}, bytes(8), None),
    "a negative shape": ({"a": ONE | {"shape": [-2]}}, bytes(8), None),
    "unknown dtype": ({"a": ONE | {"dtype": "F1024"}}, bytes(8), None),
    "bytes left over": ({"a": ONE}, bytes(9), None),
    "cut": ({"a": ONE}, bytes(7), None),
}


@pytest.mark.parametrize("case", HEADERS)
def test_safetensors_headers(tmp_path: Path, case: str) -> None:
    folder = copied("gpt2", tmp_path)
    header, data, length = HEADERS[case]
    raw_file(folder / "model.safetensors", header, data, length)
    assert "model.safetensors" in refusal(folder, CorruptError)


def test_wrong_dtypes_shapes_and_values(tmp_path: Path) -> None:
    name = "transformer.h.1.ln_2.bias"

    def changed(array: np.ndarray) -> Path:
        return rewritten(
            copied("gpt2", tmp_path / array.dtype.str[1:]), lambda t: t | {name: array}
        )

    assert "I64" in refusal(changed(np.zeros(12, np.int64)), CorruptError)
    assert "U8" in refusal(changed(np.zeros(12, np.uint8)), CorruptError)
    assert "[11]" in refusal(changed(np.zeros(11, np.float32)))
    line = refusal(changed(np.full(12, 1e300)), NonFiniteError)
    assert name in line and "NaN or infinite" in line
    folder = rewritten(
        copied("gpt2", tmp_path), lambda t: {k: a for k, a in t.items() if k != name}
    )
    assert f"no tensor '{name}'" in refusal(folder)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite(tmp_path: Path, value: float) -> None:
    folder = copied("gpt2", tmp_path)
    path = folder / "model.safetensors"
    with SafetensorsFile(path):
        data = bytearray(path.read_bytes())
    data[-4:] = struct.pack("<f", value)
    path.write_bytes(data)
    assert "NaN or infinite" in refusal(folder, NonFiniteError)


# ---------------------------------------------------------------- config.json

CONFIGS: dict[str, dict[str, Any]] = {
    "more layers than memory": {"n_layer": 2**31 - 1},
    "more layers than tensors": {"n_layer": 1000},
    "fewer rows": {"vocab_size": 5},
    "more rows than memory": {"vocab_size": 2**31 - 1},
    "beyond any count": {"vocab_size": 10**30},
    "a text": {"n_layer": "2"},
    "a truth": {"n_embd": True},
    "a fraction": {"n_head": 2.0},
    "nothing": {"n_positions": None},
    "negative": {"n_layer": -1},
    "zero": {"n_head": 0},
    "missing": {"n_embd": ...},
    "not a divisor": {"n_head": 5},
    "another kind": {"model_type": "bert"},
    "no kind": {"model_type": ...},
    "a list of kinds": {"model_type": ["gpt2"]},
    "another activation": {"activation_function": "relu"},
    "another epsilon": {"layer_norm_epsilon": float("nan")},
    "another width": {"n_inner": 13},
    "scaled by layer": {"scale_attn_by_inverse_layer_idx": True},
    "no probability": {"resid_pdrop": "0.1"},
    "dropping all": {"resid_pdrop": 1.0},
}


@pytest.mark.parametrize("case", CONFIGS)
def test_configs(tmp_path: Path, case: str) -> None:
    folder = copied("gpt2", tmp_path)
    change_config(folder, **CONFIGS[case])
    refusal(folder)


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b"\xff\xfe", b'{"a":' * 9999, b"nul"])
def test_configs_that_are_no_objects(tmp_path: Path, text: bytes) -> None:
    folder = copied("gpt2", tmp_path)
    (folder / "config.json").write_bytes(text)
    assert "config.json" in refusal(folder, CorruptError)


def test_a_config_of_many_bytes(tmp_path: Path) -> None:
    folder = copied("gpt2", tmp_path)
    with open(folder / "config.json", "ab") as file:
        file.truncate(1 << 34)  # no bytes on the disk
    assert "too many" in refusal(folder, CorruptError)


# ---------------------------------------------------------------- indices

SHARDS = [
    "../model.safetensors",
    "/etc/passwd",
    "sub/model.safetensors",
    "..\\model.safetensors",
    ".hidden.safetensors",
    "C:model.safetensors",
    "model.safetensors\0",
    "model.bin",
    "absent.safetensors",
    "",
    None,
    7,
    ["model.safetensors"],
]


@pytest.mark.parametrize("shard", SHARDS, ids=repr)
def test_an_index_stays_in_its_directory(tmp_path: Path, shard: object) -> None:
    folder = copied("gpt2", tmp_path)
    index = in_shards(folder)
    (tmp_path / "model.safetensors").write_bytes(
        (FIXTURES / "gpt2" / "model.safetensors").read_bytes()
    )
    table = json.loads(index.read_text())
    table["weight_map"]["transformer.wte.weight"] = shard
    index.write_text(json.dumps(table))
    refusal(folder)


@pytest.mark.parametrize(
    "table", [{}, {"weight_map": {}}, {"weight_map": ["a"]}, {"weight_map": 1}]
)
def test_an_index_without_a_map(tmp_path: Path, table: object) -> None:
    folder = copied("gpt2", tmp_path)
    in_shards(folder).write_text(json.dumps(table))
    assert "weight_map" in refusal(folder, CorruptError)


def test_an_index_that_names_the_wrong_shard(tmp_path: Path) -> None:
    folder = copied("gpt2", tmp_path)
    index = in_shards(folder)
    table = json.loads(index.read_text())["weight_map"]
    first = table["transformer.wte.weight"]
    table["transformer.wte.weight"] = next(shard for shard in table.values() if shard != first)
    index.write_text(json.dumps({"weight_map": table}))
    assert "'transformer.wte.weight' is not in" in refusal(folder, CorruptError)


# ---------------------------------------------------------------- pytorch_model.bin


class _Persistent:
    def __init__(self, *identity: Any) -> None:
        self.identity = identity


class _Global:
    """Pickles as a global of any name, called with any arguments."""

    def __init__(self, name: str, *arguments: Any) -> None:
        self.name, self.arguments = name, arguments


class _Pickler(pickle._Pickler):  # type: ignore[name-defined]
    """Writes globals that need not exist, as PyTorch's pickles have them."""

    def save(self, value: Any, save_persistent_id: bool = True) -> None:
        if isinstance(value, _Global):
            module, _, name = value.name.rpartition(".")
            self.write(pickle.GLOBAL + f"{module}\n{name}\n".encode())
            if value.arguments:
                self.save(value.arguments[0])
                self.write(pickle.REDUCE)
            return
        super().save(value, save_persistent_id)

    def persistent_id(self, value: Any) -> Any:
        return value.identity if isinstance(value, _Persistent) else None


def pickled(value: Any) -> bytes:
    out = io.BytesIO()
    _Pickler(out, 2).dump(value)
    return out.getvalue()


def archive(path: Path, pickle_bytes: bytes, compression: int = zipfile.ZIP_STORED,
            **entries: bytes) -> Path:  # fmt: skip
    """A file as torch.save lays it out, with one storage of eight floats."""
    entries = {"data/0": bytes(32), "data.pkl": pickle_bytes} | entries
    with zipfile.ZipFile(path, "w", compression) as file:
        for name, content in entries.items():
            file.writestr(f"model/{name}", content)
    return path


def tensor(shape: Any = (8,), strides: Any = (1,), offset: Any = 0, items: Any = 8,
           kind: str = "FloatStorage", key: Any = "0") -> _Global:  # fmt: skip
    storage = _Persistent("storage", _Global(f"torch.{kind}"), key, "cpu", items)
    rebuilt = (storage, offset, shape, strides, False, OrderedDict())
    return _Global("torch._utils._rebuild_tensor_v2", rebuilt)


def test_the_archive_of_these_tests_is_one(tmp_path: Path) -> None:
    path = archive(tmp_path / "a.bin", pickled({"w": tensor((4, 2), (1, 4))}))
    with TorchFile(path) as file:
        assert file.shapes == {"w": (4, 2)} and not file.read("w").any()


BINS: dict[str, Callable[[], bytes]] = {
    "a command": lambda: pickled({"w": _Global("posix.system", ("touch /tmp/x",))}),
    "eval": lambda: pickled(_Global("builtins.eval", ("1",))),
    "getattr": lambda: pickled(_Global("builtins.getattr", ("", "join"))),
    "torch.load again": lambda: pickled(_Global("torch.load", ("x",))),
    "a class of torch's": lambda: pickled(_Global("torch.nn.Linear", (1, 1))),
    "another module's OrderedDict": lambda: pickled(_Global("os.OrderedDict", ())),
    "a memo of many": lambda: b"\x80\x02}r\xff\xff\xff\xff.",
    "a memo of more": lambda: b"\x80\x02}p99999999999\n.",
    "cut": lambda: pickled({"w": tensor()})[:-9],
    "no dict": lambda: pickled([tensor()]),
    "no tensors": lambda: pickled({"w": 1}),
    "beyond its storage": lambda: pickled({"w": tensor((9,))}),
    "beyond by its offset": lambda: pickled({"w": tensor((8,), (1,), 1)}),
    "before its storage": lambda: pickled({"w": tensor((8,), (1,), -1)}),
    "strides beyond": lambda: pickled({"w": tensor((2, 2), (7, 2))}),
    "strides backwards": lambda: pickled({"w": tensor((8,), (-1,), 7)}),
    "one number a thousand times": lambda: pickled({"w": tensor((10**9,), (0,))}),
    "one number in two dimensions": lambda: pickled({"w": tensor((10**9, 10**9), (0, 0))}),
    "a storage that claims more": lambda: pickled({"w": tensor((10**12,), items=10**12)}),
    "no storage": lambda: pickled({"w": tensor(key="7")}),
    "a storage elsewhere": lambda: pickled({"w": tensor(key="../data.pkl")}),
    "no shape": lambda: pickled({"w": tensor(None)}),
    "texts for numbers": lambda: pickled({"w": tensor(("8",), ("1",))}),
    "truths for numbers": lambda: pickled({"w": tensor((True,), (True,))}),
    "an unknown storage": lambda: pickled({"w": tensor(kind="QInt8Storage")}),
    "a name that is none": lambda: pickled({7: tensor()}),
    "nested deep": lambda: b"\x80\x02" + b"(" * 100_000 + b"t" * 100_000 + b".",
}


@pytest.mark.parametrize("case", BINS)
def test_pickles(tmp_path: Path, case: str) -> None:
    path = archive(tmp_path / "pytorch_model.bin", BINS[case]())
    with pytest.raises(TreadleError) as caught, TorchFile(path) as file:
        for name in file.codes:
            file.read(name)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


def test_a_pickle_runs_nothing(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    for name in ("os.system", "posix.system", "subprocess.check_output", "builtins.exec"):
        code = pickled({"w": _Global(name, (f"touch {victim}",))})
        with pytest.raises(CorruptError, match="not part of a state dict"):
            TorchFile(archive(tmp_path / "a.bin", code))
    assert not victim.exists()


def test_archives(tmp_path: Path) -> None:
    path, good = tmp_path / "pytorch_model.bin", pickled({"w": tensor()})

    def line(*read: str) -> str:
        with pytest.raises(TreadleError) as caught, TorchFile(path) as file:
            for name in read:
                file.read(name)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    path.write_bytes(pickle.dumps({"w": 1}))
    assert "save_pretrained" in line()
    path.write_bytes(b"")
    assert "not a zip" in line()
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("a", "b")
    assert "not PyTorch's" in line()
    archive(path, good, zipfile.ZIP_DEFLATED, **{"data/0": bytes(1 << 24)})
    assert "compressed" in line()
    archive(path, good, byteorder=b"big")
    assert "little-endian" in line()
    archive(path, good, **{"data/0": bytes(31)})
    assert "does not fit its storage" in line("w")
    data = archive(path, good).read_bytes()
    path.write_bytes(data[:-30])
    assert "zip" in line()
    path.write_bytes(data.replace(bytes(32), b"\1" + bytes(31), 1))
    assert "damaged" in line("w")


# ---------------------------------------------------------------- tokenizers


def test_a_tokenizer_with_an_id_beyond_reason() -> None:
    text = json.loads(Tokenizer.char("ab").to_json())
    text["model"]["vocab"]["b"] = 2**32 - 1
    with pytest.raises(TokenizerError, match="4,294,967,295"):
        Tokenizer.load(json.dumps(text).encode())
