"""Tokenizers: exact ids, exact round trips, files that are the same on every run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from treadle.data import tokenizer as module
from treadle.data.tokenizer import END_OF_TEXT, Tokenizer
from treadle.errors import TokenizerError

STORY = (
    "The cat's hat isn't red.\n\n  It was  blue!\tWe'll see 123 cats\r\n— said Zoë 🐈‍⬛ 漢字.\n" * 4
)
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]))
# Mostly what decides where a word ends, so that cuts meet every neighbour.
WORDY_TEXT = st.text(st.sampled_from(" \n\t\r\u00a0\u2028\u180e\x1c'stve ab1.,!é漢"))


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return Tokenizer.train_bpe([STORY], 320)


def library(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(tokenizer.to_json())


# ---- characters -----------------------------------------------------------------------------


def test_characters_get_ids_in_sorted_order():
    tokenizer = Tokenizer.char("banana\n\t é😀")
    assert tokenizer.kind == "char" and tokenizer.vocab_size == 8
    ids = tokenizer.encode("\t\n abné😀")
    assert ids.dtype == np.int32 and ids.tolist() == list(range(8))
    assert tokenizer.bos_id is None and tokenizer.eos_id is None


@given(ANY_TEXT)
def test_characters_round_trip_also_through_the_plain_library(text: str):
    tokenizer = Tokenizer.char(text + "x")
    ids = tokenizer.encode(text)
    assert len(ids) == len(text) and tokenizer.decode(ids) == text
    plain = library(tokenizer)
    assert plain.encode(text).ids == ids.tolist()
    assert plain.decode(ids.tolist()) == text


def test_an_unknown_character_is_named_with_its_place():
    tokenizer = Tokenizer.char("abc", end_of_text=True)
    for text, position in (("abéc", 2), (f"ab{END_OF_TEXT}é", 2 + len(END_OF_TEXT))):
        with pytest.raises(TokenizerError) as caught:
            tokenizer.encode(text)
        assert "'é' (U+00E9" in str(caught.value) and f"position {position} " in str(caught.value)
    with pytest.raises(Exception, match=r"UNK"):
        library(tokenizer).encode("abé")


def test_characters_have_an_end_of_text_only_when_asked():
    tokenizer = Tokenizer.char("ab", end_of_text=True)
    assert tokenizer.eos_id == tokenizer.bos_id == 2 and tokenizer.vocab_size == 3
    assert tokenizer.encode(f"a{END_OF_TEXT}b").tolist() == [0, 2, 1]
    assert library(tokenizer).encode(f"a{END_OF_TEXT}b").ids == [0, 2, 1]
    assert tokenizer.separator == END_OF_TEXT and Tokenizer.char("ab").separator == "\n\n"


def test_no_characters_are_refused():
    with pytest.raises(TokenizerError, match=r"at least one character"):
        Tokenizer.char("")


# ---- bytes ----------------------------------------------------------------------------------


def test_bytes_are_their_own_ids():
    tokenizer = Tokenizer.byte()
    assert tokenizer.kind == "byte" and tokenizer.vocab_size == 257
    assert tokenizer.eos_id == tokenizer.bos_id == 256
    assert tokenizer.encode("aé\n").tolist() == list("aé\n".encode())
    assert tokenizer.encode(END_OF_TEXT).tolist() == [256]
    assert tokenizer.decode(range(128)) == "".join(map(chr, range(128)))


@given(ANY_TEXT)
def test_bytes_agree_with_the_plain_library(text: str):
    tokenizer = Tokenizer.byte()
    ids = tokenizer.encode(text).tolist()
    assert ids == library(tokenizer).encode(text).ids
    assert tokenizer.decode(ids) == text


# ---- BPE ------------------------------------------------------------------------------------


def test_a_bpe_learns_merges(bpe: Tokenizer):
    assert bpe.kind == "bpe" and 257 < bpe.vocab_size <= 320
    assert len(bpe.encode(STORY)) < len(STORY.encode()) / 1.3
    assert bpe.eos_id == bpe.bos_id and bpe.encode(END_OF_TEXT).tolist() == [bpe.eos_id]
    with pytest.raises(TokenizerError, match=r"256 .*257|257"):
        Tokenizer.train_bpe([STORY], 256)


@given(ANY_TEXT | WORDY_TEXT)
def test_a_bpe_round_trips_and_agrees_with_the_plain_library(bpe: Tokenizer, text: str):
    ids = bpe.encode(text).tolist()
    assert ids == library(bpe).encode(text).ids
    assert bpe.decode(ids) == text == library(bpe).decode(ids, skip_special_tokens=False)


@given(text=st.lists(WORDY_TEXT | st.just(END_OF_TEXT)).map("".join))
def test_cutting_a_text_does_not_change_its_ids(bpe: Tokenizer, text: str):
    whole = library(bpe).encode(text).ids
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_CHUNK", 1)
        patch.setattr(module, "_CHUNKS_AT_ONCE", 2)
        assert "".join(module._safe_pieces(text)) == text
        assert bpe.encode(text).tolist() == whole


def test_cutting_a_real_text_does_not_change_its_ids(shared_data: Path):
    tokenizer = Tokenizer.load(shared_data / "gpt2-tokenizer.json")
    text = (shared_data / "quijote.txt").read_bytes().decode()[:200_000]
    assert sum(1 for _ in module._safe_pieces(text)) > 2
    plain = tokenizers.Tokenizer.from_file(str(shared_data / "gpt2-tokenizer.json"))
    assert tokenizer.encode(text).tolist() == plain.encode(text).ids


def test_the_end_of_text_is_not_learned_from():
    with_ends = Tokenizer.train_bpe(["ab ab" + END_OF_TEXT + "ab ab"] * 9, 300)
    assert with_ends.to_json() == Tokenizer.train_bpe(["ab ab", "ab ab"] * 9, 300).to_json()


TRAIN = """
import sys
from treadle.data.tokenizer import Tokenizer
text = open(sys.argv[1], encoding="utf-8").read()
sys.stdout.buffer.write(Tokenizer.train_bpe([text], 700).to_json().encode())
sys.stdout.buffer.write(Tokenizer.char(text).to_json().encode())
"""


def test_failure_8_training_twice_gives_the_same_bytes(tmp_path: Path):
    # Many pairs of the same frequency, so that ties decide.
    words = [f"{a}{b}{c}" for a in "abcdé" for b in "xyzw" for c in "mnop"]
    corpus = tmp_path / "corpus.txt"
    corpus.write_text(" ".join(words * 3), encoding="utf-8")
    outputs = set()
    for seed, threads in (("0", "1"), ("1", "2"), ("12345", "4")):
        environment = os.environ | {"PYTHONHASHSEED": seed, "RAYON_NUM_THREADS": threads}
        environment["PYTHONPATH"] = str(Path(__file__).resolve().parent.parent)
        done = subprocess.run(
            [sys.executable, "-c", TRAIN, str(corpus)],
            env=environment,
            capture_output=True,
            check=True,
        )
        outputs.add(done.stdout)
    assert len(outputs) == 1 and len(outputs.pop()) > 1000


# ---- decoding -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["char", "byte", "bpe"])
def test_failure_9_ids_of_padding_rows_are_never_decoded(kind: str, bpe: Tokenizer):
    tokenizer = {"char": Tokenizer.char("ab"), "byte": Tokenizer.byte(), "bpe": bpe}[kind]
    for bad in (tokenizer.vocab_size, -1):
        with pytest.raises(TokenizerError, match=f"id {bad} is not in the vocabulary"):
            tokenizer.decode([0, bad])
        with pytest.raises(TokenizerError, match=f"id {bad} "):
            tokenizer.stream().push(bad)


@given(ANY_TEXT)
def test_a_stream_yields_whole_characters(bpe: Tokenizer, text: str):
    for tokenizer in (Tokenizer.byte(), bpe, Tokenizer.char(text + "x")):
        stream = tokenizer.stream()
        pieces = [stream.push(int(i)) for i in tokenizer.encode(text)]
        assert "".join(pieces) == text and stream.finish() == ""
        assert not any("\ufffd" in piece for piece in pieces) or "\ufffd" in text


@given(st.lists(st.integers(0, 255)))
def test_a_stream_of_any_bytes_equals_decoding_them(ids: list[int]):
    tokenizer = Tokenizer.byte()
    stream = tokenizer.stream()
    streamed = "".join(map(stream.push, ids)) + stream.finish()
    assert streamed == tokenizer.decode(ids) == library(tokenizer).decode(ids)


def test_a_character_that_never_ends_is_told_at_the_end():
    stream = Tokenizer.byte().stream()
    assert stream.push(0xF0) == "" and stream.push(0x9F) == ""
    assert stream.finish() == "\ufffd"


# ---- files ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["char", "byte", "bpe"])
def test_loading_gives_the_same_tokenizer(kind: str, bpe: Tokenizer, tmp_path: Path):
    tokenizer = {"char": Tokenizer.char(STORY), "byte": Tokenizer.byte(), "bpe": bpe}[kind]
    path = tmp_path / "tokenizer.json"
    path.write_bytes(tokenizer.to_json().encode())
    for source in (path, tmp_path, str(tmp_path), tokenizer.to_json(), path.read_bytes()):
        again = Tokenizer.load(source)
        assert again.kind == kind and again.to_json() == tokenizer.to_json()
        assert again.eos_id == tokenizer.eos_id
        assert again.encode(STORY).tolist() == tokenizer.encode(STORY).tolist()


def test_hf_config_keeps_spaces(bpe: Tokenizer):
    config = bpe.hf_config(block_size=64)
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert config["clean_up_tokenization_spaces"] is False
    assert config["model_max_length"] == 64
    assert config["bos_token"] == config["eos_token"] == END_OF_TEXT
    assert "eos_token" not in Tokenizer.char("ab").hf_config()
    json.dumps(config)


def test_gpt2_from_its_two_files(shared_data: Path, tmp_path: Path):
    gpt2 = Tokenizer.load(shared_data / "gpt2-tokenizer.json")
    assert gpt2.kind == "bpe" and gpt2.vocab_size == 50257 and gpt2.eos_id == 50256
    assert gpt2.encode("Hello world<|endoftext|>").tolist() == [15496, 995, 50256]
    model = json.loads(gpt2.to_json())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]), encoding="utf-8")
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    text = "\n".join(["#version: 0.2", *merges, ""])
    (tmp_path / "merges.txt").write_text(text, encoding="utf-8")
    pair = Tokenizer.from_vocab_merges(tmp_path / "vocab.json", tmp_path / "merges.txt")
    assert pair.eos_id == 50256
    assert pair.encode(STORY).tolist() == gpt2.encode(STORY).tolist()


def test_the_special_tokens_of_another_project_are_found(tmp_path: Path):
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"hi": 0}, unk_token="hi"))
    backend.add_special_tokens(["<start>", "<stop>"])
    backend.enable_truncation(1)
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        '{"bos_token": {"content": "<start>"}, "eos_token": "<stop>"}'
    )
    tokenizer = Tokenizer.load(tmp_path)
    assert (tokenizer.kind, tokenizer.bos_id, tokenizer.eos_id) == ("other", 1, 2)
    ids = tokenizer.encode("hi<stop>hi")
    assert ids.tolist() == [0, 2, 0], "truncation settings must not cut a text"
    stream = tokenizer.stream()
    streamed = "".join(stream.push(int(i)) for i in ids) + stream.finish()
    assert streamed == tokenizer.decode(ids)


@pytest.mark.parametrize(
    "contents", [b"{}", b"{", b"\xff", b"[]", b'{"version": "1.0", "model": {"type": "x"}}']
)
def test_a_bad_file_is_one_line(contents: bytes, tmp_path: Path):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(contents)
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.load(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_missing_and_unfitting_files_are_named(tmp_path: Path):
    with pytest.raises(TokenizerError, match=r"tokenizer.json: cannot read"):
        Tokenizer.load(tmp_path)
    vocab, merges = tmp_path / "vocab.json", tmp_path / "merges.txt"
    vocab.write_text('{"a": 0, "b": 1}')
    for text, hint in (("a c\n", "do not fit"), ("#version: 0.2\na b c\n", "line 2")):
        merges.write_text(text)
        with pytest.raises(TokenizerError, match=hint):
            Tokenizer.from_vocab_merges(vocab, merges)
    merges.write_text("")
    with pytest.raises(TokenizerError, match=r"byte 0x63 at byte 2"):
        Tokenizer.from_vocab_merges(vocab, merges).encode("abc")


@pytest.mark.parametrize("kind", ["char", "byte", "bpe"])
def test_failure_6_lone_surrogates_are_named(kind: str, bpe: Tokenizer):
    tokenizer = {"char": Tokenizer.char("ab"), "byte": Tokenizer.byte(), "bpe": bpe}[kind]
    with pytest.raises(TokenizerError, match=r"U\+D800.* at position 2 "):
        tokenizer.encode("ab\ud800")
    with pytest.raises(TokenizerError, match=r"U\+DFFF"):
        Tokenizer.char("a\udfff")
