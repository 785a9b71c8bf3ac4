"""llm.c's files: what its own programs wrote, what we write, and files that lie.

The fixtures are those of

    python tools/make_llmc_state.py tests/fixtures/llmc_model.bin tests/fixtures/llmc_state.bin \
        --vocab 61 --block 8 --channels 12 --batch 2 --time 7
"""

from __future__ import annotations

import re
import shutil
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runs import fail, run, succeed
from treadle.data.shards import HEADER_BYTES, write_tokens
from treadle.data.stories import generate_stories
from treadle.data.tokenizer import Tokenizer
from treadle.errors import ConfigError, CorruptError, TokenizerError, TreadleError
from treadle.graph.value import from_bfloat16, to_bfloat16
from treadle.interop import llmc
from treadle.models.gpt2 import GPT2

FIXTURES = Path(__file__).parent / "fixtures"
MODEL, STATE = FIXTURES / "llmc_model.bin", FIXTURES / "llmc_state.bin"
SIZES = GPT2(vocab_size=61, n_layer=2, n_head=2, n_embd=12, block_size=8)
ROWS = 128  # of the fixture's wte


def changed(source: Path, target: Path, word: int, value: int) -> Path:
    """A copy of a file with another number in its header."""
    data = bytearray(source.read_bytes())
    data[4 * word : 4 * word + 4] = value.to_bytes(4, "little", signed=True)
    target.write_bytes(data)
    return target


def check(model: Path, state: Path, device: str = "cpu") -> tuple[int, str]:
    result = run("check", "--device", device, "--threads", 1, "--llmc-state", model, state)
    return result.code, result.out


# ---------------------------------------------------------------- models


def test_a_model_reads() -> None:
    found = llmc.read_llmc(MODEL)
    assert found.model == SIZES
    data = np.frombuffer(MODEL.read_bytes()[HEADER_BYTES:], "<f4")
    wte = data[: ROWS * 12].reshape(ROWS, 12)
    np.testing.assert_array_equal(found.weights["transformer.wte.weight"], wte[:61])
    # qkvw of both layers: [out, in] in the file, [in, out] here.
    start = (ROWS + 8 + 4) * 12
    qkvw = data[start : start + 2 * 36 * 12].reshape(2, 36, 12)
    weight = found.weights["transformer.h.1.attn.c_attn.weight"]
    np.testing.assert_array_equal(weight, qkvw[1].T)
    assert weight.flags.c_contiguous


def test_writing_gives_the_bytes_that_were_read(tmp_path: Path) -> None:
    found = llmc.read_llmc(MODEL)
    llmc.write_llmc(tmp_path / "m.bin", found.model, found.weights, 3)
    assert (tmp_path / "m.bin").read_bytes() == MODEL.read_bytes()


def test_bfloat16_is_rounded_and_read_back(tmp_path: Path) -> None:
    found = llmc.read_llmc(MODEL)
    llmc.write_llmc(tmp_path / "m.bin", found.model, found.weights, 5)
    size = HEADER_BYTES + (MODEL.stat().st_size - HEADER_BYTES) // 2
    assert (tmp_path / "m.bin").stat().st_size == size
    back = llmc.read_llmc(tmp_path / "m.bin")
    for name, array in found.weights.items():
        rounded = from_bfloat16(to_bfloat16(array))
        np.testing.assert_array_equal(back.weights[name], rounded)


def test_version_1_has_no_padding(tmp_path: Path) -> None:
    data = MODEL.read_bytes()
    old = changed(MODEL, tmp_path / "m.bin", 1, 1)
    padding = slice(HEADER_BYTES + 61 * 12 * 4, HEADER_BYTES + ROWS * 12 * 4)
    old.write_bytes(old.read_bytes()[: padding.start] + data[padding.stop :])
    found, expected = llmc.read_llmc(old), llmc.read_llmc(MODEL)
    for name, array in expected.weights.items():
        np.testing.assert_array_equal(found.weights[name], array)


def test_a_model_without_biases_gets_zeros(tmp_path: Path) -> None:
    model = GPT2(vocab_size=5, n_layer=1, n_head=1, n_embd=4, block_size=3, bias=False)
    weights = {p.name: p.initial(1) for p in model.parameters()}
    llmc.write_llmc(tmp_path / "m.bin", model, weights)
    back = llmc.read_llmc(tmp_path / "m.bin").weights
    assert not back["transformer.h.0.mlp.c_fc.bias"].any()
    for name, array in weights.items():
        np.testing.assert_array_equal(back[name], array)


def test_what_llmc_cannot_hold_is_refused(tmp_path: Path) -> None:
    untied = GPT2(vocab_size=5, n_layer=1, n_head=1, n_embd=4, block_size=3, tie_embeddings=False)
    weights = {p.name: p.initial(1) for p in untied.parameters()}
    with pytest.raises(ConfigError, match="output layer of its own"):
        llmc.write_llmc(tmp_path / "m.bin", untied, weights)
    found = llmc.read_llmc(MODEL)
    with pytest.raises(ConfigError, match="writes 3"):
        llmc.write_llmc(tmp_path / "m.bin", found.model, found.weights, 2)
    broken = dict(found.weights)
    broken["transformer.ln_f.bias"] = np.full(12, np.nan, np.float32)
    with pytest.raises(TreadleError, match="'lnfb' holds NaN"):
        llmc.write_llmc(tmp_path / "m.bin", found.model, broken)
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- debug states


@pytest.mark.parametrize("device", ["cpu", "numpy"])
def test_the_debug_state_agrees_with_pytorch(device: str) -> None:
    code, out = check(MODEL, STATE, device)
    assert code == 0 and out.endswith("overall okay: 1\n"), out
    differences = [float(x) for x in re.findall(r"max_?diff = (\S+)", out)]
    assert len(differences) == 1 + len(llmc.TENSORS)
    assert max(differences) < 2e-6  # far inside of llm.c's tolerances
    recorded = llmc.read_state(STATE, SIZES).losses
    losses = [float(x) for x in re.findall(r"^step \d: loss (\S+)", out, re.M)]
    np.testing.assert_allclose(losses, recorded, atol=2e-6)


def test_a_bfloat16_model_is_compared_in_bfloat16(tmp_path: Path) -> None:
    found = llmc.read_llmc(MODEL)
    llmc.write_llmc(tmp_path / "m.bin", found.model, found.weights, 5)
    code, out = check(tmp_path / "m.bin", STATE)
    assert code == 0, out
    assert max(float(x) for x in re.findall(r"maxdiff = (\S+)", out)) > 1e-4


GRADIENT = HEADER_BYTES + 4 * (2 * 14 + 14 * 61 + 1)


@pytest.mark.parametrize(
    ("place", "line"),
    [
        (HEADER_BYTES + 4 * (28 + 3 * 61 + 5), "MISMATCH AT INDEX 3,5: "),
        (GRADIENT - 4, "LOSS MISMATCH: "),
        (GRADIENT + 4 * ROWS * 12, "dwpe\nNOT OK "),
        (-4, "TENSOR NOT OK, maxdiff = nan"),
        (4 * 13, "OK = 0"),
    ],
    ids=["logits", "loss", "gradient", "last gradient", "last step"],
)
def test_a_difference_fails_the_check(tmp_path: Path, place: int, line: str) -> None:
    data = bytearray(STATE.read_bytes())
    end = len(data) if place == -4 else place + 4
    value = float("nan") if place == -4 else 3.25
    data[place % len(data) : end] = np.array([value], "<f4").tobytes()
    (tmp_path / "s.bin").write_bytes(data)
    code, out = check(MODEL, tmp_path / "s.bin")
    assert code == 1 and line in out and out.endswith("overall okay: 0\n"), out


def test_a_state_without_recorded_losses(tmp_path: Path) -> None:
    data = bytearray(STATE.read_bytes())
    data[16:56] = bytes(40)
    (tmp_path / "s.bin").write_bytes(data)
    code, out = check(MODEL, tmp_path / "s.bin")
    assert code == 0 and "records no losses" in out and "OK = " not in out


def test_version_1_of_the_state(tmp_path: Path) -> None:
    old = changed(STATE, tmp_path / "s.bin", 1, 1)
    data = old.read_bytes()
    old.write_bytes(data[: GRADIENT + 61 * 12 * 4] + data[GRADIENT + ROWS * 12 * 4 :])
    assert check(MODEL, old)[0] == 0


def test_a_state_of_another_model_is_refused(tmp_path: Path) -> None:
    other = GPT2(vocab_size=61, n_layer=3, n_head=2, n_embd=12, block_size=8)
    weights = {p.name: p.initial(1) for p in other.parameters()}
    llmc.write_llmc(tmp_path / "m.bin", other, weights)
    assert "of another model or cut off" in fail("check", "--llmc-state", tmp_path / "m.bin", STATE)
    assert "a debug state of llm.c" in fail("check", "--llmc-state", STATE, STATE)
    bad = changed(STATE, tmp_path / "s.bin", HEADER_BYTES // 4 + 2, 61)
    assert "x has ids from" in fail("check", "--llmc-state", MODEL, bad)


# ---------------------------------------------------------------- tokenizers

TEXT = generate_stories("en", 40)
TOKENIZERS = {
    "char": Tokenizer.char(TEXT),
    "char with end": Tokenizer.char("añb\n😀", end_of_text=True, specials=["<|x|>"]),
    "byte": Tokenizer.byte(["<|x|>"]),
    "bpe": Tokenizer.train_bpe([TEXT], 500, ["<|x|>"]),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_tokenizer_comes_back(name: str, tmp_path: Path) -> None:
    tokenizer, path = TOKENIZERS[name], tmp_path / "t.bin"
    llmc.write_tokenizer(path, tokenizer)
    header = np.frombuffer(path.read_bytes()[:16], "<i4")
    newline = int(tokenizer.encode("\n")[0])
    end = newline if tokenizer.eos_id is None else tokenizer.eos_id
    assert header.tolist() == [20240328, 2, tokenizer.vocab_size, end]
    back = llmc.read_tokenizer(path)
    assert (back.kind, back.eos_id) == (tokenizer.kind, tokenizer.eos_id)
    assert back.to_json() == tokenizer.to_json()


def test_version_1_of_the_tokenizer(tmp_path: Path) -> None:
    llmc.write_tokenizer(tmp_path / "t.bin", Tokenizer.byte())
    old = changed(tmp_path / "t.bin", tmp_path / "old.bin", 1, 1)
    changed(old, old, 3, 0)
    assert llmc.read_tokenizer(old).eos_id == 256


def test_the_tokenizer_beside_a_model_is_taken(tmp_path: Path) -> None:
    shutil.copy(MODEL, tmp_path / "m.bin")
    small = Tokenizer.char(TEXT[:2000])
    assert small.vocab_size <= 61
    llmc.write_tokenizer(tmp_path / "gpt2_tokenizer.bin", small)
    found = llmc.read_llmc(tmp_path / "m.bin")
    assert found.tokenizer is not None and found.tokenizer.to_json() == small.to_json()
    llmc.write_tokenizer(tmp_path / "m_tokenizer.bin", TOKENIZERS["bpe"])
    found = llmc.read_llmc(tmp_path / "m.bin")
    assert found.tokenizer is None and "has 500 tokens, the model 61" in found.notes[0]


def test_tokens_that_llmc_cannot_hold_are_refused(tmp_path: Path) -> None:
    long = Tokenizer.byte(["<|" + "x" * 300 + "|>"])
    with pytest.raises(TokenizerError, match="token 257 has 304 bytes"):
        llmc.write_tokenizer(tmp_path / "t.bin", long)
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- files that lie


def test_lengths_are_checked_before_anything_is_read(tmp_path: Path) -> None:
    """Sizes of petabytes in a header take no memory and no time."""
    huge = 2**31 - 1
    tracemalloc.start()
    for word in (2, 3, 4, 6, 7):
        with pytest.raises(CorruptError):
            llmc.read_llmc(changed(MODEL, tmp_path / "m.bin", word, huge))
    for word in (2, 3):
        with pytest.raises(CorruptError):
            llmc.read_state(changed(STATE, tmp_path / "s.bin", word, huge), SIZES)
    llmc.write_tokenizer(tmp_path / "t.bin", TOKENIZERS["bpe"])
    with pytest.raises(CorruptError):
        llmc.read_tokenizer(changed(tmp_path / "t.bin", tmp_path / "t.bin", 2, huge))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (float("nan"), "'transformer.wte.weight' holds NaN"),
        (float("inf"), "'transformer.wte.weight' holds NaN or infinite"),
    ],
)
def test_weights_that_are_no_numbers(tmp_path: Path, value: float, message: str) -> None:
    data = bytearray(MODEL.read_bytes())
    data[HEADER_BYTES + 40 : HEADER_BYTES + 44] = np.array([value], "<f4").tobytes()
    (tmp_path / "m.bin").write_bytes(data)
    with pytest.raises(CorruptError, match=message):
        llmc.read_llmc(tmp_path / "m.bin")


@pytest.mark.parametrize("version", [0, 2, 4, 6])
def test_other_versions_are_named(tmp_path: Path, version: int) -> None:
    with pytest.raises(TreadleError, match=f"version {version} of llm.c's model"):
        llmc.read_llmc(changed(MODEL, tmp_path / "m.bin", 1, version))


@pytest.fixture(scope="module")
def contents(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Whole files by kind."""
    path = tmp_path_factory.mktemp("tables") / "t.bin"
    found = {"model": MODEL.read_bytes(), "state": STATE.read_bytes()}
    for name in ("char with end", "bpe"):
        llmc.write_tokenizer(path, TOKENIZERS[name])
        found[name] = path.read_bytes()
    return found


@settings(max_examples=80)
@given(data=st.data(), kind=st.sampled_from(["model", "state", "char with end", "bpe"]))
def test_fuzzed_files_give_a_line_or_a_model(
    data: st.DataObject,
    kind: str,
    contents: dict[str, bytes],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    content = bytearray(contents[kind])
    for _ in range(data.draw(st.integers(0, 3))):
        word = data.draw(st.integers(1, 9) | st.integers(1, len(content) // 4 - 1))
        small = st.integers(-2, 300).map(lambda x: x.to_bytes(4, "little", signed=True))
        content[4 * word : 4 * word + 4] = data.draw(small | st.binary(min_size=4, max_size=4))
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content))) :]
    path = tmp_path_factory.getbasetemp() / "fuzz.bin"
    path.write_bytes(content)
    try:
        if kind == "model":
            assert llmc.read_llmc(path).model.n_parameters() > 0
        elif kind == "state":
            assert llmc.read_state(path, SIZES).tokens.max() < 61
        else:
            assert llmc.read_tokenizer(path).vocab_size > 0
    except TreadleError as error:
        assert "\n" not in str(error)


# ---------------------------------------------------------------- what a file is


def test_files_are_described(tmp_path: Path) -> None:
    assert ("version", "3 (float32)") in llmc.describe(MODEL)
    assert ("vocabulary", "61, padded to 128") in llmc.describe(MODEL)
    assert ("batch", "2 windows of 7 tokens") in llmc.describe(STATE)
    llmc.write_tokenizer(tmp_path / "t.bin", TOKENIZERS["bpe"])
    assert ("end of text", "0") in llmc.describe(tmp_path / "t.bin")
    for vocab, dtype in ((61, "uint16"), (100_000, "uint32")):
        write_tokens(tmp_path / "x.bin", np.arange(50), vocab)
        assert llmc.is_llmc(tmp_path / "x.bin")
        assert ("dtype", dtype) in llmc.describe(tmp_path / "x.bin")
    assert not llmc.is_llmc(Path(__file__)) and not llmc.is_llmc(tmp_path / "missing")


# ---------------------------------------------------------------- commands


def test_import_and_export_give_the_file_back(tmp_path: Path) -> None:
    source = tmp_path / "m.bin"
    shutil.copy(MODEL, source)
    small = Tokenizer.char(TEXT[:2000])
    llmc.write_tokenizer(tmp_path / "m_tokenizer.bin", small)
    succeed("import", source, "--out", tmp_path / "checkpoint")
    out = tmp_path / "back.bin"
    succeed("export", tmp_path / "checkpoint", "--to", "llmc", "--out", out)
    assert out.read_bytes() == source.read_bytes()
    words = (tmp_path / "back_tokenizer.bin").read_bytes()
    assert words == (tmp_path / "m_tokenizer.bin").read_bytes()
    assert "61, padded to 128" in succeed("info", out)
    out.unlink()
    line = fail("export", tmp_path / "checkpoint", "--to", "llmc", "--out", out)
    assert "back_tokenizer.bin is there already" in line and not out.exists()
    assert "tokens" in succeed("info", tmp_path / "back_tokenizer.bin")
    assert "expected its model" in fail("import", STATE, "--out", tmp_path / "no")
