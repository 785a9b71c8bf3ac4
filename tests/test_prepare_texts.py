"""Reading, cleaning and comparing documents, before there are tokens."""

from __future__ import annotations

import gzip
import io
import json
import os
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from treadle.data import dedupe, readers
from treadle.data.clean import Filters, clean_text, letter_fraction, repetition, storable
from treadle.data.readers import (
    LONG,
    SECTION,
    Encoding,
    Reader,
    find_encoding,
    find_sources,
    source_of,
    split_documents,
)
from treadle.data.stories import generate_stories
from treadle.data.tokenizer import END_OF_TEXT
from treadle.errors import ConfigError, DataError


def needs(module: str) -> None:
    """Skips a test without an optional package, but not where CI should have it."""
    if os.environ.get("CI"):
        __import__(module)
    else:
        pytest.importorskip(module)


def read(folder: Path, *inputs: str | Path, key: str = "text", encoding: str = "auto") -> Reader:
    return Reader(find_sources(map(str, inputs or [folder])), folder, key, encoding)


def texts(reader: Reader) -> list[str]:
    return [piece.text for piece in reader.pieces() if piece.problem is None]


# ---- finding files --------------------------------------------------------------------------


def test_inputs_become_files_in_a_fixed_order(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.md", "a/.hidden.txt", "c.jsonl.gz", "d.py", ".git/x.txt", "e.ZST"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("x")

    def names(*inputs: str) -> list[str]:
        return [s.path.relative_to(tmp_path).as_posix() for s in find_sources(inputs)]

    assert names(str(tmp_path)) == ["a/z.md", "b.txt", "c.jsonl.gz"]
    assert names(str(tmp_path / "d.py"), str(tmp_path)) == ["d.py", "a/z.md", "b.txt", "c.jsonl.gz"]
    assert names(str(tmp_path / "**/*.[tm][xd]*")) == ["a/z.md", "b.txt"]
    assert names(*[str(tmp_path / "b.txt")] * 2) == ["b.txt"]
    kinds = [(s.kind, s.compression) for s in find_sources([str(tmp_path)])]
    assert kinds == [("text", ""), ("text", ""), ("jsonl", ".gz")]
    assert source_of(Path("x.gz")).kind == "text"
    for bad, told in (("nowhere", "no such file"), ("*.nothing", "no such file")):
        with pytest.raises(DataError, match=told):
            find_sources([str(tmp_path / bad)])
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"holds no file ending in \.txt, \.md, \.jsonl, \.parquet"):
        find_sources([str(tmp_path / "empty")])


# ---- formats --------------------------------------------------------------------------------

STORIES = ["One fish.\n", "Two ñandúes\r\nran.", "Three 😀"]
PLAIN = ["One fish.\n", "Two ñandúes\nran.", "Three 😀"]


def packed(name: str, data: bytes) -> bytes:
    if name.endswith(".gz"):
        return gzip.compress(data)
    if name.endswith(".zst"):
        needs("zstandard")
        import zstandard

        half = len(data) // 2  # two frames, as from two files joined
        return b"".join(map(zstandard.ZstdCompressor().compress, (data[:half], data[half:])))
    return data


@pytest.mark.parametrize("packing", ["", ".gz", ".zst"])
@pytest.mark.parametrize("kind", ["txt", "md", "jsonl", "parquet"])
def test_every_format_and_compression(kind: str, packing: str, tmp_path: Path) -> None:
    path = tmp_path / f"stories.{kind}{packing}"
    if kind == "jsonl":
        lines = [json.dumps({"id": 7, "body": text}) for text in STORIES]
        data = "\n\n".join(lines).encode()
    elif kind == "parquet":
        needs("pyarrow")
        import pyarrow
        import pyarrow.parquet

        buffer = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.table({"id": [1, 2, 3], "body": STORIES}), buffer)
        data = buffer.getvalue()
    else:
        data = END_OF_TEXT.join(STORIES).encode()
    path.write_bytes(packed(path.name, data))
    reader = read(tmp_path, path, key="body")
    pieces = list(reader.pieces())
    assert [piece.text for piece in pieces] == PLAIN
    assert [piece.record for piece in pieces] == ([1, 3, 5] if kind == "jsonl" else [1, 2, 3])
    assert all(piece.first and piece.last for piece in pieces)
    (record,) = reader.records
    assert record.bytes == path.stat().st_size == reader.total == reader.position
    assert len(record.sha256) == 64
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_records_without_a_text_are_told(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(
        b'{"text": "good"}\n{"text": 3}\n{bad\n["a"]\n{"other": "x"}\n{"text": "\xff"}'
    )
    problems = [(piece.record, piece.problem) for piece in read(tmp_path, path).pieces()]
    no_text, no_json = "no text", "not JSON"
    told = [None, no_text, no_json, no_text, no_text, no_json]
    assert problems == list(enumerate(told, 1))


def test_a_parquet_file_without_the_column(tmp_path: Path) -> None:
    needs("pyarrow")
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "x.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"a": [1], "b": [None]}), path)
    with pytest.raises(DataError, match=r"no column text; it has a, b \(--text-key\)"):
        texts(read(tmp_path, path))
    assert [p.problem for p in read(tmp_path, path, key="a").pieces()] == ["no text"]
    path.write_bytes(b"no such thing")
    with pytest.raises(DataError, match=r"x\.parquet: not a Parquet file"):
        texts(read(tmp_path, path))


@pytest.mark.parametrize("name", ["x.txt.gz", "x.txt.zst"])
def test_a_damaged_file_is_one_line(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(packed(name, os.urandom(4000).hex().encode())[:-700])
    if name.endswith(".zst"):
        path.write_bytes(b"(\xb5/\xfd" + b"\xff" * 99)
    with pytest.raises(DataError, match=rf"{name}: cannot read: ") as caught:
        texts(read(tmp_path, path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("module", "name"), [("zstandard", "x.txt.zst"), ("pyarrow.parquet", "x.parquet")]
)
def test_missing_packages_are_named(
    module: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(DataError, match=r"pip install 'treadle\[corpus\]'"):
        texts(read(tmp_path, tmp_path / name))


# ---- encodings ------------------------------------------------------------------------------

SPANISH = "Había una vez un niño que soñaba con montañas y pingüinos; cantó su canción.\n" * 20


@pytest.mark.parametrize(
    ("data", "encoding", "text"),
    [
        (SPANISH.encode(), "utf-8", SPANISH),
        (SPANISH.encode("utf-8-sig"), "utf-8", SPANISH),
        (("\ufeff" + SPANISH).encode("utf-16-be"), "utf-16-be", SPANISH),
        (("\ufeff" + SPANISH).encode("utf-32-le"), "utf-32-le", SPANISH),
        (SPANISH.encode() + b"\xff", "utf-8 with damaged bytes", SPANISH + "\ufffd"),
    ],
)
def test_encodings_are_found(data: bytes, encoding: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_bytes(data.replace(b"\n", b"\r\n") if encoding == "utf-8" else data)
    reader = read(tmp_path, path)
    assert texts(reader) == [text]
    assert reader.records[0].encoding == encoding
    assert reader.records[0].is_legacy == (encoding != "utf-8")


def test_a_legacy_encoding_is_guessed(tmp_path: Path) -> None:
    needs("charset_normalizer")
    path = tmp_path / "x.txt"
    czech = "Žluťoučký kůň úpěl ďábelské ódy, protože se toho stalo příliš mnoho.\n" * 10
    greek = "Μια φορά κι έναν καιρό η γάτα είδε ένα κόκκινο καπέλο στον δρόμο.\n" * 10  # noqa: RUF001
    for text, encoding in ((czech, "cp1250"), (greek, "cp1253"), (SPANISH, "cp1252")):
        path.write_bytes(text.encode(encoding))
        reader = read(tmp_path, path)
        assert texts(reader) == [text]
        assert reader.records[0].encoding == encoding and reader.records[0].is_legacy
    assert texts(read(tmp_path, path, encoding="latin-1")) == [SPANISH]
    with pytest.raises(DataError, match=r"x\.txt: byte 0xED at offset 3 is not UTF-8"):
        texts(read(tmp_path, path, encoding="utf-8"))


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"\x7fELF\x02\x01\x01\0\0", "zero byte at offset 7"),
        (SPANISH.encode("utf-16-le"), "zero byte at offset 1"),
        (b"\xff\xfea\0\0\xd8", "byte 0x00 at offset 4 is not UTF-16-LE"),
    ],
)
def test_failure_6_files_that_are_not_text_are_told(
    data: bytes, problem: str, tmp_path: Path
) -> None:
    path = tmp_path / "x.txt"
    path.write_bytes(data)
    reader = read(tmp_path, path)
    assert [piece.problem for piece in reader.pieces()] == ["not text"]
    assert problem in (reader.records[0].problem or "")


@given(data=st.binary(max_size=60), size=st.integers(1, 7))
def test_the_first_bad_byte_is_found_whatever_the_pieces(data: bytes, size: int) -> None:
    path = Path(os.environ["TREADLE_CACHE"]) / "bytes.txt"
    path.parent.mkdir(exist_ok=True)
    data = data.replace(b"\0", b"")
    path.write_bytes(data)
    try:
        data.decode()
        expected = None
    except UnicodeDecodeError as error:
        expected = error.start
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "_READ", size)
        fault = readers._first_fault(source_of(path), "utf-8", 0)
    assert (fault and fault[0]) == expected


def test_unknown_encodings_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("x")
    with pytest.raises(ConfigError, match=r"--encoding klingon: no such encoding"):
        read(tmp_path, encoding="klingon")
    source = source_of(tmp_path / "x.txt")
    with pytest.raises(DataError, match=r"byte 0x78 at offset 0 is not UTF-16-LE"):
        find_encoding(source, "utf-16-le")
    assert find_encoding(source, "utf-8") == Encoding("utf-8")


# ---- cutting --------------------------------------------------------------------------------


@pytest.fixture
def small_sections() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("LONG", 40), ("SECTION", 12), ("_SLACK", 8)):
            patch.setattr(readers, name, value)
        yield


LINES = st.lists(
    st.sampled_from(["a", "bb ", "ccc. ", "\n", "\n\n", END_OF_TEXT, "<|end", "é", "x" * 30])
).map("".join)


def chunks(text: str, size: int) -> list[str]:
    return [text[i : i + size] for i in range(0, len(text), size)]


@given(text=LINES, size=st.integers(1, 50))
@example(text="x" * 100 + END_OF_TEXT + "\n" * 100, size=3)
def test_cutting_does_not_depend_on_the_chunks(text: str, size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("LONG", 40), ("SECTION", 12), ("_SLACK", 8)):
            patch.setattr(readers, name, value)
        pieces = list(split_documents([text]))
        assert list(split_documents(chunks(text, size))) == pieces
    documents, current = [], ""
    for piece, first, last in pieces:
        assert first == (not current) or not piece
        current += piece
        if last:
            documents.append(current)
            current = ""
    kept = [part for part in text.split(END_OF_TEXT) if part.strip()]
    assert [d for d in documents if d.strip()] == kept
    assert all(len(piece) <= 40 for piece, *_ in pieces)


@pytest.mark.usefixtures("small_sections")
@given(text=LINES, more=LINES)
def test_a_text_that_grows_keeps_its_first_sections(text: str, more: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("LONG", 40), ("SECTION", 12), ("_SLACK", 8)):
            patch.setattr(readers, name, value)
        text, more = text.replace(END_OF_TEXT, ""), more.replace(END_OF_TEXT, "")
        before = [piece for piece, *_ in split_documents([text])]
        after = [piece for piece, *_ in split_documents([text + more])]
    if len(text) > 40 and "<|end" not in text:
        assert after[: len(before) - 1] == before[:-1]


def test_long_texts_are_cut_at_paragraphs(tmp_path: Path) -> None:
    text = "".join(f"Paragraph {i} " + "of words " * 40 + "ends.\n\n" for i in range(400))
    (tmp_path / "x.txt").write_text(text)
    pieces = list(read(tmp_path).pieces())
    assert "".join(piece.text for piece in pieces) == text and len(text) > LONG
    assert all(piece.text.endswith(".\n\n") for piece in pieces)
    assert all(SECTION <= len(piece.text) < SECTION + 500 for piece in pieces[:-1])
    assert [piece.first for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    assert [piece.last for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert {piece.record for piece in pieces} == {1}


# ---- cleaning -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("a\r\nb\rc\u2028d\x0ce", "a\nb\nc\nd\ne"),
        ("a  \nb\t \n  c ", "a\nb\n  c"),
        ("\n\n a\n\n\n\nb\n\n", " a\n\nb"),
        ("e\u0301\x00\u200b\ufeff\x1b[0m", "é[0m"),
        ("a\u00a0b\u3000c\td", "a b c\td"),
        ("ab\ud800", "ab\ufffd"),
        ("\u1e9b\u0323 ﬁ", unicodedata.normalize("NFC", "\u1e9b\u0323") + " ﬁ"),
        (" \t\n \n", ""),
    ],
)
def test_cleaning(text: str, clean: str) -> None:
    assert clean_text(text) == clean


MESSY = st.text(
    st.one_of(
        st.sampled_from("ab \t\n\r\x0b\u0301\u0308\ufeff\u00a0\ud800\x00\u1100\u1161\u2126"),
        st.characters(),
    )
)


@given(text=MESSY, first=st.booleans(), last=st.booleans())
def test_cleaning_twice_changes_nothing_more(text: str, first: bool, last: bool) -> None:
    clean = clean_text(text, first, last)
    assert clean_text(clean, first, last) == clean
    assert unicodedata.is_normalized("NFC", clean)
    assert not any(unicodedata.category(c) in ("Cc", "Cs") and c not in "\n\t" for c in clean)
    clean.encode()
    storable(text).encode()


def test_long_runs_of_blanks_take_no_quadratic_time() -> None:
    text = (" " * 100_000 + "x") * 3 + " \n"
    assert clean_text(text) == text.rstrip()


def test_wrongly_decoded_text_is_repaired() -> None:
    needs("ftfy")
    assert clean_text("sueÃ±o", fix_encoding=True) == "sueño" != clean_text("sueÃ±o")


# ---- filters --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "empty"),
        ("  \n ", "empty"),
        ("too little", "too short"),
        ("x " * 2000, "too long"),
        ("1, 2, 3, 4, 5, 6, 7, 8, 9, 10: ten", "too few letters"),
        ("Buy this fine thing now! " * 30, "repetitive"),
        ("ab" * 400, "repetitive"),
        ("这是一个关于一只小猫和一只小狗的故事它们住在一起", None),
        ("नमस्ते दुनिया, यह एक छोटी कहानी है।", None),
        (generate_stories("es", 1), None),
    ],
)
def test_filters(text: str, reason: str | None) -> None:
    assert Filters(max_chars=3000).reason(text) == reason
    assert Filters.off().reason(text) == (reason if reason == "empty" else None)


def test_a_section_is_neither_short_nor_long() -> None:
    filters = Filters(min_chars=20, max_chars=30)
    assert filters.reason("a short one", whole=False) is None
    assert filters.reason("a good deal longer than all that", whole=False) is None


def test_measures(shared_data: Path) -> None:
    assert letter_fraction("ab 1 ñ😀") == pytest.approx(3 / 5)
    assert letter_fraction(" \n") == 0
    for name in ("quijote.txt", "tinyshakespeare.txt"):
        prose = (shared_data / name).read_text(encoding="utf-8")
        assert letter_fraction(prose) > 0.9
        assert repetition(prose) < 0.05
    data = os.urandom(3000).hex()
    assert repetition(data) == 0
    # Half of it stands there twice, so a third of all windows has occurred before.
    assert repetition(data[:2000] + data[2000:4000] + data[:2000]) == pytest.approx(1 / 3, abs=0.05)


# ---- duplicates -----------------------------------------------------------------------------


@given(keys=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3))), part=st.integers(1, 5))
def test_equal_keys_are_found_in_any_parts(keys: list[tuple[int, int]], part: int) -> None:
    high = np.array([a << 62 for a, _ in keys], np.uint64)
    low = np.array([b for _, b in keys], np.uint64)
    expected, first = {}, {}
    for place, key in enumerate(keys):
        if key in first:
            expected[place] = first[key]
        first.setdefault(key, place)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dedupe, "_PART", part)
        found = dict(
            pair
            for later, earlier in dedupe.equal_pairs(high, low)
            for pair in zip(later.tolist(), earlier.tolist(), strict=True)
        )
    assert found == expected


def test_near_duplicates_are_found(tmp_path: Path) -> None:
    needs("datasketch")
    words = generate_stories("en", 40).split()
    stories = [" ".join(words[i : i + 100]) for i in range(0, 2000, 100)]
    stories.append(" ".join([*words[300:396], "and", "so", "it", "ended"]))  # like the fourth
    stories.append(" ".join([*words[500:550], *words[700:750]]))  # half of one, half of another
    signatures = np.stack([dedupe.signature(story) for story in stories])

    def found(threshold: float) -> set[tuple[int, int]]:
        return {
            pair
            for later, earlier in dedupe.near_pairs(signatures, threshold, tmp_path)
            for pair in zip(later.tolist(), earlier.tolist(), strict=True)
        }

    assert (20, 3) in found(0.8)
    assert not any(21 in pair for pair in found(0.8))
    assert {(21, 5), (21, 7)} & found(0.25)
    for threshold in (0.1, 0.5, 0.8, 0.95, 1.0):
        bands, rows = dedupe._bands(threshold)
        assert 1 <= bands * rows <= dedupe.MINIMA
        assert 1 - (1 - threshold**rows) ** bands > 0.9
