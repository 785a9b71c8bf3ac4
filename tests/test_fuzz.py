"""Damage of any kind to the files of a model: it is read, or refused in one line."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from test_hostile import CONFIGS
from test_interop import FIXTURES, change_config, copied
from treadle.data.tokenizer import Tokenizer
from treadle.errors import TreadleError
from treadle.interop.hf import read_hf

FILES = ["config.json", "model.safetensors", "pytorch_model.bin", "tokenizer.json"]
CONFIG_KEYS = sorted({key for values in CONFIGS.values() for key in values} | {"treadle"})
EXAMPLES = settings(max_examples=60)


def read_or_refuse(folder: Path) -> None:
    try:
        read_hf(folder)
    except TreadleError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize("name", FILES)
@EXAMPLES
@given(data=st.data())
def test_damaged_bytes(name: str, data: st.DataObject) -> None:
    """Bytes are changed, cut out or put in anywhere."""
    source = FIXTURES / ("pytorch" if name == "pytorch_model.bin" else "gpt2")
    files = {file: (source / file).read_bytes() for file in FILES if (source / file).is_file()}
    files["tokenizer.json"] = Tokenizer.char("abc").to_json().encode()
    content = bytearray(files[name])
    # The beginnings and the ends are where files say what they are.
    places = st.one_of(
        st.integers(0, min(300, len(content) - 1)),
        st.integers(max(0, len(content) - 300), len(content) - 1),
        st.integers(0, len(content) - 1),
    )
    for _ in range(data.draw(st.integers(1, 3))):
        at, size = data.draw(places), data.draw(st.sampled_from([0, 1, 1, 4, 50]))
        content[at : at + size] = data.draw(st.binary(max_size=8))
    with tempfile.TemporaryDirectory() as folder:
        for file, intact in files.items():
            Path(folder, file).write_bytes(content if file == name else intact)
        read_or_refuse(Path(folder))


VALUES = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=3), st.none()),
)


@EXAMPLES
@given(values=st.dictionaries(st.sampled_from(CONFIG_KEYS), VALUES, min_size=1, max_size=3))
def test_values_of_any_kind_in_a_config(values: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = copied("gpt2", Path(folder))
        change_config(model, **values)
        read_or_refuse(model)
