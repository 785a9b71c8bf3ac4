"""`treadle tokenize`, and the fast encoder behind BPE."""

from __future__ import annotations

import io
import json
import os
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from treadle.cli import main
from treadle.data import fastbpe
from treadle.data.alphabet import BYTE_OF_CHARACTER
from treadle.data.choose import SHIPPED
from treadle.data.fastbpe import FastEncoder, fast_encoder, is_proved
from treadle.data.stories import generate_stories
from treadle.data.tokenizer import END_OF_TEXT, Tokenizer
from treadle.errors import TokenizerError
from treadle.train.checkpoint import save_checkpoint

if os.environ.get("CI"):
    import tiktoken
else:
    tiktoken = pytest.importorskip("tiktoken")

# Everything that UTF-8 can hold, and texts whose runs of white space and marks are long.
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]))
WORDY_TEXT = st.lists(
    st.sampled_from(
        [" ", "\n", "\t", "\u00a0", "\u3000", "\u180e", "a", "Ñu", "'s", "'S", "12", "½", "!", "…",
         "😀", "漢字", "e\u0301", "\u0e01\u0e33", "<|", END_OF_TEXT, "lugar", "x" * 40]
    )
).map("".join)  # fmt: skip


@pytest.fixture(scope="module")
def spanish() -> Tokenizer:
    return Tokenizer.load(SHIPPED["spanish"])


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["tokenize", *arguments]) == 0
    return capsys.readouterr().out


# ---- the command ----------------------------------------------------------------------------


def test_a_text_is_shown_token_by_token(
    spanish: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f"En un lugar 😀\n{END_OF_TEXT}"
    lines = shown(capsys, "spanish", text).splitlines()
    ids = spanish.encode(text).tolist()
    assert lines[0].split() == ["id", "text", "bytes"]
    assert [int(line.split()[0]) for line in lines[2:-1]] == ids
    assert lines[4].split(maxsplit=1)[1].split("  ")[0] == '" lugar"'
    assert lines[-2].split() == ["0", '"<|endoftext|>"', "3c", "7c", "65", "6e", "64", "6f", "66",
                                 "74", "65", "78", "74", "7c", "3e"]  # fmt: skip
    size = len(text.encode())
    each = f"{size / len(ids):.2f} bytes a token"
    assert lines[-1] == f"{len(ids)} tokens, {len(text)} characters, {size} bytes, {each}"
    plain = shown(capsys, "spanish", END_OF_TEXT, "--plain")
    assert not plain.startswith("0 ") and int(plain.splitlines()[-1].split()[0]) > 3
    assert shown(capsys, "spanish", "") == "0 tokens, 0 characters, 0 bytes\n"


def test_every_source_of_a_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.txt"
    path.write_bytes(b"\xef\xbb\xbfuno\r\ndos")
    expected = shown(capsys, "spanish", "uno\ndos", "--json")
    assert shown(capsys, "spanish", "--file", str(path), "--json") == expected
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(path.read_bytes())))
    assert shown(capsys, "spanish", "--json") == expected
    for arguments, told in (
        (("x", "--file", str(path)), "drop one"),
        (("--file", str(tmp_path / "nothing")), "cannot read: No such file"),
    ):
        assert main(["tokenize", "spanish", *arguments]) == 2
        assert told in capsys.readouterr().err


def test_every_source_of_a_tokenizer(
    spanish: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = shown(capsys, "spanish", "En un lugar")
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000001"
    checkpoint.parent.mkdir(parents=True)
    weights = {"w": np.zeros(1, np.float32)}
    for folder, text in ((checkpoint, spanish.to_json()), (tmp_path / "bare", None)):
        save_checkpoint(
            folder, config={}, tensors=weights, optimizer=None, tokenizer_json=text,
            tokenizer_config=None, state={"step": 1},
        )  # fmt: skip
    alone = tmp_path / "model.safetensors"
    alone.write_bytes((checkpoint / "model.safetensors").read_bytes())
    for source in (
        SHIPPED["spanish"],
        SHIPPED["spanish"].parent,
        checkpoint,
        tmp_path / "run",
        alone,
    ):
        assert shown(capsys, str(source), "En un lugar") == expected
    for source, told in (
        (tmp_path / "bare", "the checkpoint has no tokenizer"),
        (tmp_path / "nothing", "no such tokenizer"),
    ):
        assert main(["tokenize", str(source), "x"]) == 2
        assert told in capsys.readouterr().err


@given(text=ANY_TEXT | WORDY_TEXT)
def test_pieces_are_the_text(spanish: Tokenizer, text: str) -> None:
    for tokenizer in (spanish, Tokenizer.byte(), Tokenizer.char(text + "x", end_of_text=True)):
        for plain in (False, True):
            ids = tokenizer.encode(text, plain) if tokenizer.kind != "char" or not plain else None
            if ids is not None:
                pieces = b"".join(tokenizer.token_bytes(number) for number in ids.tolist())
                assert pieces.decode() == text == tokenizer.decode(ids)


def test_the_json_of_tokens_holds_their_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        json.loads(line) for line in shown(capsys, "spanish", "ñandú 😀", "--json").splitlines()
    ]
    assert bytes.fromhex("".join(row["bytes"] for row in rows)).decode() == "ñandú 😀"
    assert {"id", "text", "bytes"} == set(rows[0])
    with pytest.raises(TokenizerError):
        Tokenizer.byte().token_bytes(257)


# ---- the fast encoder -----------------------------------------------------------------------


@cache
def library(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(tokenizer.to_json())


def fast(tokenizer: Tokenizer) -> FastEncoder:
    encoder = tokenizer._fast
    assert encoder is not None
    return encoder


@given(text=ANY_TEXT | WORDY_TEXT)
def test_ids_are_those_of_the_library(spanish: Tokenizer, text: str) -> None:
    plain = library(spanish)
    assert spanish.encode(text).tolist() == plain.encode(text).ids
    plain.encode_special_tokens = True
    expected = plain.encode(text).ids
    plain.encode_special_tokens = False
    assert spanish.encode(text, plain=True).tolist() == expected
    if is_proved(text):
        ids = fast(spanish)(text)
        assert ids is not None and ids.dtype == np.int32 and ids.tolist() == expected


def test_real_texts_have_the_ids_of_the_library(spanish: Tokenizer, shared_data: Path) -> None:
    gpt2 = Tokenizer.load(shared_data / "gpt2-tokenizer.json")
    for tokenizer, name in (
        (spanish, "quijote.txt"),
        (gpt2, "quijote.txt"),
        (gpt2, "tinyshakespeare.txt"),
    ):
        text = (shared_data / name).read_text(encoding="utf-8")[:300_000]
        ids = fast(tokenizer)(text[:200_000])
        assert ids is not None
        assert ids.tolist() == library(tokenizer).encode(text[:200_000]).ids


def test_every_proved_character_has_one_class(spanish: Tokenizer) -> None:
    """Each among letters, digits, marks and spaces, so that its class decides where words end."""
    plain = library(spanish)
    codes = [code for code in range(fastbpe._TABLED) if not 0xD800 <= code < 0xE000]
    proved = [chr(code) for code in codes if is_proved(chr(code))]
    assert len(proved) > 0.8 * sum(chr(code).isprintable() for code in codes)
    for start in range(0, len(proved), 2000):
        text = "".join(f"a{c}a1{c}1!{c}! {c}{c} " for c in proved[start : start + 2000])
        ids = fast(spanish)(text)
        assert ids is not None and ids.tolist() == plain.encode(text).ids


def test_what_is_not_proved_goes_to_the_library(spanish: Tokenizer) -> None:
    for text in ("\u180e", "a\U0001e900", "\U0002f800", "x \ua7cb"):
        assert fast(spanish)(text) is None
        assert spanish.encode(text).tolist() == library(spanish).encode(text).ids
    blanks = "a" + " \n" * (1 << 18) + "b"
    assert fast(spanish)(blanks) is None
    assert spanish.decode(spanish.encode(blanks)) == blanks


def made_of(merges: list[tuple[str, str]], **changes: object) -> FastEncoder | None:
    vocab = {character: i for i, character in enumerate(BYTE_OF_CHARACTER)}
    for left, right in merges:
        vocab.setdefault(left + right, len(vocab))
    model = tokenizers.models.BPE(vocab=vocab, merges=merges)
    spec = {"vocab": vocab, "merges": [list(pair) for pair in merges], **changes}
    return fast_encoder(spec, model.tokenize, BYTE_OF_CHARACTER)


def test_merges_that_could_differ_are_refused() -> None:
    assert made_of([("a", "b"), ("ab", "c")]) is not None
    # By itself "abc" is a + bc for the library, but one token for tiktoken.
    assert made_of([("b", "c"), ("a", "b"), ("ab", "c")]) is None
    # Two ways to one token: its rank is that of the first, whichever is there.
    assert made_of([("a", "b"), ("b", "c"), ("a", "bc"), ("ab", "c")]) is None
    assert made_of([("a", "b")], dropout=0.1) is None
    assert made_of([("a", "b")], ignore_merges=True) is None


def test_without_tiktoken_the_ids_are_the_same(
    spanish: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = generate_stories("es", 3)
    ids = spanish.encode(text)
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    slow = Tokenizer.load(SHIPPED["spanish"])
    assert slow._fast is None
    assert np.array_equal(slow.encode(text), ids)
    assert fast(spanish) and tiktoken is not None


def test_other_tokenizers_have_no_fast_encoder() -> None:
    assert Tokenizer.byte()._fast is None
    assert Tokenizer.char("abc")._fast is None
