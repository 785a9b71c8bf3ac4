"""From files to batches; the failure cases of data carry their numbers."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.config import Config, DataConfig
from treadle.data import corpus as corpora
from treadle.data.corpus import load_corpus, open_data, prepare_cached
from treadle.data.sampler import IGNORE, Sampler, eval_windows, permute
from treadle.data.shards import read_tokens, write_tokens
from treadle.data.tokenizer import END_OF_TEXT, Tokenizer
from treadle.errors import ConfigError, CorruptError, DataError
from treadle.files import atomic_file

STORY = "One day a cat saw a red hat.\n\nThe cat said: it is mine!\n" * 30
CHAR = DataConfig(tokenizer="char")


@pytest.fixture
def story(tmp_path: Path) -> Path:
    path = tmp_path / "story.txt"
    path.write_text(STORY, encoding="utf-8", newline="")
    return path


def open_text(path: Path, text: str, **model: int) -> tuple[Config, corpora.Dataset]:
    path.write_text(text, encoding="utf-8", newline="")
    config = Config(model=model, data={"path": str(path), "tokenizer": "char"})
    return open_data(config, path.parent / "cache")


def refusal(path: Path, data: DataConfig = CHAR) -> str:
    with pytest.raises(DataError) as caught:
        prepare_cached(path, data, path.parent / "cache")
    line = str(caught.value)
    assert "\n" not in line and str(path) in line
    return line


# ---- texts ----------------------------------------------------------------------------------


def test_failure_1_corpus_shorter_than_context(tmp_path: Path):
    path = tmp_path / "short.txt"
    for n_tokens in (50, 64):
        with pytest.raises(DataError) as caught:
            open_text(path, ("abcde" * 20)[:n_tokens], block_size=64)
        line = str(caught.value)
        assert f"{n_tokens} tokens" in line and "block_size 64" in line and "\n" not in line
    _, dataset = open_text(path, ("abcde" * 20)[:65], block_size=64)
    inputs, targets, _ = Sampler(dataset.train, 64, 2, seed=1).batch(0)
    assert inputs.shape == targets.shape == (2, 64)
    assert dataset.tokenizer is not None
    assert dataset.tokenizer.decode(inputs[0]) == ("abcde" * 20)[:64]
    assert any("validation is off" in note for note in dataset.notes)


def test_a_short_text_lends_only_what_training_lacks(tmp_path: Path):
    _, dataset = open_text(tmp_path / "short.txt", "abcde" * 14, block_size=64)
    assert (len(dataset.train), len(dataset.val)) == (65, 5)
    assert any("2 tokens of the validation split" in note for note in dataset.notes)


def test_failure_2_validation_split_without_a_whole_batch(tmp_path: Path):
    path = tmp_path / "tiny.txt"
    path.write_text("abcdefghij" * 30)
    data = {"path": str(path), "tokenizer": "char", "val_fraction": 0.01}
    _, dataset = open_data(Config(model={"block_size": 16}, data=data), tmp_path / "cache")
    batches = list(eval_windows(dataset.val, 16, 8))
    assert len(dataset.val) == 3 and [count for *_, count in batches] == [2]
    assert int((batches[0][1] != IGNORE).sum()) == 2
    assert dataset.notes == ()

    data["val_fraction"] = 0.001
    _, dataset = open_data(Config(model={"block_size": 16}, data=data), tmp_path / "cache")
    assert len(dataset.val) == 0 and list(eval_windows(dataset.val, 16, 8)) == []
    assert ["validation is off" in note for note in dataset.notes] == [True]
    assert math.isfinite(corpora.unigram_loss(dataset))


def test_failure_4_one_file_alone_works(story: Path, tmp_path: Path):
    folder = tmp_path / "folder"
    folder.mkdir()
    story.rename(folder / "story.txt")
    assert load_corpus(folder).documents == load_corpus(folder / "story.txt").documents == [STORY]
    dataset = prepare_cached(folder, CHAR, tmp_path / "cache")
    shard = tmp_path / "shard"
    shard.mkdir()
    write_tokens(shard / "train.bin", np.asarray(dataset.train), dataset.vocab_size)
    alone = prepare_cached(shard, DataConfig())
    assert len(alone.train) + len(alone.val) == len(dataset.train)
    assert len(alone.val) == pytest.approx(0.1 * len(dataset.train), abs=1)


@pytest.mark.parametrize(
    ("contents", "parts"),
    [
        (b"", ["empty"]),
        (b" \n\t\r\n", ["white space"]),
        ("\u2003\u00a0\n".encode(), ["white space"]),
        (b"abc\xffdef", ["0xFF", "offset 3"]),
        (b"\xef\xbb\xbfabc\xff", ["0xFF", "offset 6"]),
        (b"ab\xed\xa0\x80c", ["0xED", "offset 2"]),
        (b"abc\xe2\x82", ["0xE2", "offset 3"]),
        (b"\x7fELF\x02\x01\x01\x00\x00", ["zero byte", "offset 7"]),
        ("abc".encode("utf-16-le"), ["zero byte", "offset 1", "UTF-16"]),
        (b"\xff\xfea\x00\x00\xd8", ["offset 4", "UTF-16-LE"]),
        ("\ufeffa\0b".encode("utf-16-be"), ["zero character", "position 1"]),
    ],
)
def test_failure_6_files_that_are_not_text(contents: bytes, parts: list[str], tmp_path: Path):
    path = tmp_path / "corpus.txt"
    path.write_bytes(contents)
    line = refusal(path)
    assert all(part in line for part in parts), line


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
def test_failure_6_wide_encodings_with_a_mark_are_decoded(encoding: str, tmp_path: Path):
    path = tmp_path / "corpus.txt"
    path.write_bytes(("\ufeff" + STORY + "é😀").encode(encoding))
    corpus = load_corpus(path)
    assert corpus.documents == [STORY + "é😀"] and corpus.report.converted_files == 1


@pytest.mark.parametrize(
    "variant",
    [
        STORY.encode("utf-8-sig"),
        STORY.replace("\n", "\r\n").encode(),
        STORY.replace("\n", "\r").encode(),
        STORY.replace("\n", "\r\n").encode("utf-8-sig"),
    ],
)
def test_failure_7_line_ends_and_marks_change_no_token(variant: bytes, story: Path, tmp_path: Path):
    other = tmp_path / "variant.txt"
    other.write_bytes(variant)
    for kind in ("char", "byte", "bpe"):
        data = DataConfig(tokenizer=kind, vocab_size=300 if kind == "bpe" else None)
        plain = prepare_cached(story, data, tmp_path / "cache")
        again = prepare_cached(other, data, tmp_path / "cache")
        assert again.tokenizer is not None and plain.tokenizer is not None
        assert again.tokenizer.to_json() == plain.tokenizer.to_json()
        assert np.array_equal(again.train, plain.train) and np.array_equal(again.val, plain.val)


def test_failure_7_the_locale_has_no_say(tmp_path: Path):
    path = tmp_path / "corpus.txt"
    path.write_bytes("Zoë läuft — 漢字\n".encode() * 20)
    code = (
        "import sys; from treadle.data.corpus import prepare_cached as p;"
        "d = p(sys.argv[1], cache_dir=sys.argv[2]); print(d.train.tobytes().hex())"
    )
    outputs = set()
    for number, locale in enumerate(("C", "C.UTF-8")):
        environment = os.environ | {"LC_ALL": locale, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
        environment["PYTHONPATH"] = str(Path(__file__).resolve().parent.parent)
        command = [sys.executable, "-c", code, str(path), str(tmp_path / f"cache{number}")]
        done = subprocess.run(command, env=environment, capture_output=True, check=True)
        outputs.add(done.stdout)
    assert len(outputs) == 1 and len(outputs.pop()) > 100


def test_a_directory_is_read_in_the_order_of_its_paths(tmp_path: Path):
    folder = tmp_path / "texts"
    for name, text in (
        ("b.txt", "second"),
        ("a/z.MD", "first"),
        ("c/deep/d.md", "third"),
        ("c.py", "code"),
        (".hidden.txt", "hidden"),
        (".git/x.txt", "hidden"),
        ("empty.txt", " \n"),
    ):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    corpus = load_corpus(folder)
    assert corpus.documents == ["first", "second", "third"]
    assert (corpus.report.files, corpus.report.empty_files) == (4, 1)
    assert "1 empty left out" in str(corpus.report)


@pytest.mark.parametrize("kind", ["char", "byte", "bpe"])
def test_documents_are_kept_apart(kind: str, tmp_path: Path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in "abc":
        (folder / f"{name}.txt").write_text(name * 10)
    data = DataConfig(tokenizer=kind, val_fraction=0.5)
    dataset = prepare_cached(folder, data, tmp_path / "cache")
    assert dataset.tokenizer is not None
    between = "\n\n" if kind == "char" else END_OF_TEXT
    assert dataset.tokenizer.decode(dataset.train) == "a" * 10 + between + "b" * 5
    assert dataset.tokenizer.decode(dataset.val) == "b" * 5 + between + "c" * 10


def test_places_without_a_text_are_named(tmp_path: Path):
    assert "no such file" in refusal(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "holds no .txt or .md" in refusal(tmp_path / "empty")
    (tmp_path / "tokens.bin").write_bytes(b"1234")
    assert "not a token file" in refusal(tmp_path / "tokens.bin")
    with pytest.raises(ConfigError, match=r"data.path"):
        open_data(Config())


# ---- datasets and their cache ---------------------------------------------------------------


@pytest.mark.parametrize("kind", ["char", "byte", "bpe"])
def test_every_tokenizer_sees_the_same_two_texts(kind: str, story: Path, tmp_path: Path):
    dataset = prepare_cached(story, DataConfig(tokenizer=kind), tmp_path / "cache")
    cut = int(len(STORY) * 0.9)
    assert dataset.tokenizer is not None and dataset.tokenizer.kind == kind
    assert dataset.tokenizer.decode(dataset.train) == STORY[:cut]
    assert dataset.tokenizer.decode(dataset.val) == STORY[cut:]


def test_the_character_vocabulary_knows_what_only_validation_holds(tmp_path: Path):
    _, dataset = open_text(tmp_path / "corpus.txt", "ab" * 100 + "z" * 5, block_size=8)
    assert dataset.vocab_size == 3


def test_the_merges_are_learned_from_the_training_part_alone(tmp_path: Path):
    path = tmp_path / "corpus.txt"
    data = DataConfig(tokenizer="bpe", vocab_size=300)
    files = set()
    for ending in ("qq" * 50, "vv" * 50):
        path.write_text("ab " * 300 + ending)
        dataset = prepare_cached(path, data, tmp_path / "cache")
        assert dataset.tokenizer is not None
        files.add(dataset.tokenizer.to_json())
    assert len(files) == 1


def test_the_cache_is_used_and_follows_its_inputs(story: Path, tmp_path: Path):
    cache = tmp_path / "cache"
    first = prepare_cached(story, CHAR, cache)
    second = prepare_cached(story, CHAR, cache)
    assert not first.from_cache and second.from_cache
    assert np.array_equal(first.train, second.train) and first.metadata == second.metadata
    assert first.metadata["train.bin"]["tokens"] == len(first.train)
    assert isinstance(second.train, np.memmap) and second.train.dtype == np.uint16
    assert not prepare_cached(story, DataConfig(tokenizer="byte"), cache).from_cache
    assert not prepare_cached(
        story, CHAR.model_copy(update={"val_fraction": 0.2}), cache
    ).from_cache
    story.write_text(STORY.replace("cat", "dog"))
    changed = prepare_cached(story, CHAR, cache)
    assert changed.digest() != first.digest() == second.digest()
    assert not changed.from_cache and not np.array_equal(changed.train, first.train)
    assert not list(cache.rglob("*.tmp"))


def test_a_second_start_does_not_read_the_corpus(
    story: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    os.utime(story, (10**9, 10**9))
    prepare_cached(story, CHAR, tmp_path / "cache")
    monkeypatch.setattr(corpora, "load_corpus", None)
    assert prepare_cached(story, CHAR, tmp_path / "cache").from_cache
    os.utime(story, (10**9, 10**9 + 1))
    with pytest.raises(TypeError):
        prepare_cached(story, CHAR, tmp_path / "cache")


@pytest.mark.parametrize("name", ["train.bin", "val.bin", "tokenizer.json", "metadata.json"])
@pytest.mark.parametrize("damage", ["cut", "changed", "gone"])
def test_a_damaged_cache_is_made_again(name: str, damage: str, story: Path, tmp_path: Path):
    cache = tmp_path / "cache"
    first = prepare_cached(story, CHAR, cache)
    train = np.array(first.train)
    (victim,) = cache.glob(f"tokens/*/{name}")
    data = bytearray(victim.read_bytes())
    victim.unlink()
    if damage == "cut":
        victim.write_bytes(data[:-2])
    elif damage == "changed":
        data[-2] ^= 1
        victim.write_bytes(data)
    again = prepare_cached(story, CHAR, cache)
    assert not again.from_cache
    assert np.array_equal(again.train, train) and again.metadata == first.metadata
    assert prepare_cached(story, CHAR, cache).from_cache


def test_a_copied_cache_is_trusted_by_its_digests(story: Path, tmp_path: Path):
    cache = tmp_path / "cache"
    prepare_cached(story, CHAR, cache)
    (tokens,) = cache.glob("tokens/*/train.bin")
    os.utime(tokens, (1, 1))
    assert prepare_cached(story, CHAR, cache).from_cache


def test_the_place_of_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    assert corpora.cache_directory() == Path(os.environ["TREADLE_CACHE"])
    monkeypatch.delenv("TREADLE_CACHE")
    if os.name == "posix" and sys.platform != "darwin":
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert corpora.cache_directory() == tmp_path / "treadle"
        monkeypatch.setenv("XDG_CACHE_HOME", "relative")
        assert corpora.cache_directory() == Path.home() / ".cache" / "treadle"


def test_a_cache_that_cannot_be_written_is_named(story: Path, tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"TREADLE_CACHE"):
        prepare_cached(story, CHAR, tmp_path / "file")


def test_a_tokenizer_of_ones_own(story: Path, tmp_path: Path):
    own = tmp_path / "own"
    own.mkdir()
    (own / "tokenizer.json").write_text(Tokenizer.char(STORY + "#", True).to_json())
    dataset = prepare_cached(story, DataConfig(tokenizer=str(own)), tmp_path / "cache")
    assert dataset.vocab_size == len(set(STORY)) + 2
    (own / "tokenizer.json").write_text(Tokenizer.char("abc").to_json())
    with pytest.raises(DataError, match=r"'O' .*position 0 "):
        prepare_cached(story, DataConfig(tokenizer=str(own)), tmp_path / "cache")


def test_open_data_fills_the_config(story: Path, tmp_path: Path):
    config, dataset = open_data(Config(data={"path": str(story)}), tmp_path / "cache")
    assert config.data.tokenizer == "char"
    assert config.model.vocab_size == dataset.vocab_size == len(set(STORY))
    assert config.model.n_layer and config.train.steps
    wide = Config(data={"path": str(story)}, model={"vocab_size": 1500})
    assert open_data(wide, tmp_path / "cache")[0].model.vocab_size == 1500
    narrow = Config(data={"path": str(story)}, model={"vocab_size": 3})
    with pytest.raises(ConfigError, match=r"model.vocab_size: 3 is less than"):
        open_data(narrow, tmp_path / "cache")


def test_a_directory_of_tokens_is_used_as_it_is(story: Path, tmp_path: Path):
    made = prepare_cached(story, CHAR, tmp_path / "cache")
    (folder,) = (p.parent for p in tmp_path.glob("cache/tokens/*/train.bin"))
    config, dataset = open_data(Config(data={"path": str(folder)}))
    assert dataset.tokenizer is not None and dataset.tokenizer.kind == "char"
    assert dataset.digest() == made.digest()
    assert config.data.tokenizer == "auto" and config.model.vocab_size == dataset.vocab_size
    assert "bpe cannot be applied" in refusal(folder, DataConfig(tokenizer="bpe"))
    (folder / "tokenizer.json").write_text(Tokenizer.char("abc").to_json())
    assert "the vocabulary has 3 ids" in refusal(folder, DataConfig())


def test_token_files_under_the_names_of_llm_c(tmp_path: Path):
    tokens = np.arange(100, dtype=np.int32)
    for name in ("a_train.bin", "a_val.bin"):
        write_tokens(tmp_path / name, tokens[: 100 if "train" in name else 40], 50257)
    write_tokens(tmp_path / "questions.bin", tokens, 50257)
    for path in (tmp_path, tmp_path / "a_train.bin"):
        dataset = prepare_cached(path)
        assert (len(dataset.train), len(dataset.val)) == (100, 40)
        assert dataset.tokenizer is None and dataset.vocab_size == 100
    # A file of any other name is split.
    assert len(prepare_cached(tmp_path / "questions.bin").val) == 10
    write_tokens(tmp_path / "b_train.bin", tokens[:30], 50257)
    assert "give the path of one of a_train.bin, b_train.bin" in refusal(tmp_path, DataConfig())
    assert len(prepare_cached(tmp_path / "b_train.bin").train) == 27


def test_the_unigram_loss_of_known_frequencies(tmp_path: Path):
    _, dataset = open_text(tmp_path / "ab.txt", "ab" * 500, block_size=8)
    assert corpora.unigram_loss(dataset) == pytest.approx(math.log(2), abs=1e-3)


def test_tinyshakespeare_has_its_known_sizes(shared_data: Path, tmp_path: Path):
    dataset = prepare_cached(shared_data / "tinyshakespeare.txt", CHAR, tmp_path)
    assert (len(dataset.train), len(dataset.val)) == (1_003_854, 111_540)
    assert dataset.vocab_size == 65 and dataset.corpus_bytes == 1_115_394


# ---- token files ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("vocab_size", "magic", "version", "dtype"),
    [(65, 20240520, 1, "<u2"), (65536, 20240520, 1, "<u2"), (65537, 20240801, 7, "<u4")],
)
def test_token_files_are_those_of_llmc(
    vocab_size: int, magic: int, version: int, dtype: str, tmp_path: Path
):
    tokens = np.array([0, 64, vocab_size - 1, 3], np.int32)
    write_tokens(tmp_path / "t.bin", tokens, vocab_size)
    data = (tmp_path / "t.bin").read_bytes()
    header = np.frombuffer(data[:1024], "<i4")
    assert header[:3].tolist() == [magic, version, 4] and not header[3:].any()
    assert data[1024:] == tokens.astype(dtype).tobytes()
    back = read_tokens(tmp_path / "t.bin")
    assert back.dtype == np.dtype(dtype) and back.tolist() == tokens.tolist()
    assert isinstance(back, np.memmap) and not back.flags.writeable


def test_streams_without_header_are_read(tmp_path: Path):
    write_tokens(tmp_path / "raw.bin", np.array([5, 70000, 0]), 70001, raw=True)
    assert (tmp_path / "raw.bin").stat().st_size == 12
    back = read_tokens(tmp_path / "raw.bin")
    assert back.dtype == np.dtype("<i4") and back.tolist() == [5, 70000, 0]


def test_no_tokens_are_a_file_too(tmp_path: Path):
    write_tokens(tmp_path / "none.bin", np.empty(0, np.int32), 10)
    assert read_tokens(tmp_path / "none.bin").tolist() == []


def header(magic: int, version: int, count: int) -> bytes:
    return np.array([magic, version, count, *[0] * 253], "<i4").tobytes()


@pytest.mark.parametrize(
    ("contents", "error", "hint"),
    [
        (header(20240520, 1, 3) + b"12345", CorruptError, "counts 3 tokens"),
        (header(20240520, 1, 3) + b"12345678", CorruptError, "counts 3 tokens"),
        (header(20240520, 1, -1), CorruptError, "counts -1 tokens"),
        (header(20240801, 7, 2) + b"1234", CorruptError, "counts 2 tokens"),
        (header(20240520, 1, 3)[:600], CorruptError, "shorter than its header"),
        (header(20240520, 2, 0), DataError, "version 2"),
        (header(20240522, 1, 0), DataError, "evaluation"),
        (b"", CorruptError, "empty"),
        (b"12345", DataError, "not a token file"),
        (np.arange(50256, dtype="<u2").tobytes(), DataError, "not a token file"),
        (np.array([1, -1], "<i4").tobytes(), DataError, "not a token file"),
    ],
)
def test_bad_token_files_are_refused(
    contents: bytes, error: type[Exception], hint: str, tmp_path: Path
):
    path = tmp_path / "bad.bin"
    path.write_bytes(contents)
    with pytest.raises(error) as caught:
        read_tokens(path)
    line = str(caught.value)
    assert hint in line and str(path) in line and "\n" not in line


def test_ids_outside_of_the_vocabulary_are_not_written(tmp_path: Path):
    for bad in (10, -1):
        with pytest.raises(DataError, match=r"vocabulary of 10"):
            write_tokens(tmp_path / "bad.bin", np.array([1, bad]), 10)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_old_file(tmp_path: Path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(KeyError), atomic_file(path) as file:
        file.write(b"half")
        raise KeyError
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


# ---- sampling -------------------------------------------------------------------------------


@given(size=st.integers(1, 300), keys=st.lists(st.integers(0, 2**64 - 1), min_size=4, max_size=6))
def test_a_keyed_permutation_hits_every_place_once(size: int, keys: list[int]):
    images = permute(np.arange(size), size, [np.uint64(key) for key in keys])
    assert sorted(images.tolist()) == list(range(size))


@given(
    n_tokens=st.integers(2, 200),
    block_size=st.integers(1, 20),
    batch_size=st.integers(1, 9),
    seed=st.integers(0, 2**63 - 1),
)
def test_an_epoch_holds_every_window_once(
    n_tokens: int, block_size: int, batch_size: int, seed: int
):
    if n_tokens < block_size + 1:
        return
    sampler = Sampler(np.arange(n_tokens), block_size, batch_size, seed)
    windows = sampler.windows_per_epoch
    assert windows == (n_tokens - 1) // block_size
    n_steps = -(-3 * windows // batch_size)
    starts = np.concatenate([sampler.starts(step) for step in range(n_steps)])
    for epoch in range(3):
        of_epoch = np.sort(starts[epoch * windows : (epoch + 1) * windows])
        assert len(set(of_epoch.tolist())) == windows
        assert of_epoch[0] >= 0 and of_epoch[-1] + block_size + 1 <= n_tokens
        # Only the first window may begin earlier than the cut says, at the start of the text.
        assert (np.diff(of_epoch)[1:] == block_size).all()
        assert windows == 1 or of_epoch[1] - of_epoch[0] == block_size or of_epoch[0] == 0


def test_targets_are_the_inputs_one_token_later():
    sampler = Sampler(np.arange(1000, dtype=np.uint16), 16, 4, seed=3)
    inputs, targets, epoch = sampler.batch(5)
    assert inputs.dtype == targets.dtype == np.int32 and epoch == 0
    assert inputs.flags.c_contiguous and targets.flags.c_contiguous
    assert np.array_equal(inputs + 1, targets) and (np.diff(inputs) == 1).all()
    assert np.array_equal(inputs[:, 0], sampler.starts(5))


def test_failure_3_a_remainder_is_trained_on():
    sampler = Sampler(np.arange(41), 4, 4, seed=1)
    assert sampler.windows_per_epoch == 10
    rows = np.concatenate([sampler.starts(step) for step in range(5)])
    for epoch in (rows[:10], rows[10:]):
        assert len(set(epoch.tolist())) == 10
    targets = np.concatenate([sampler.batch(step)[1] for step in range(40)])
    assert set(targets.ravel().tolist()) == set(range(1, 41))


def test_failure_5_steps_beyond_an_epoch_wrap_to_a_new_order():
    sampler = Sampler(np.arange(41), 4, 4, seed=1)
    assert [sampler.epoch(step) for step in range(8)] == [0, 0, 0, 1, 1, 2, 2, 2]
    assert [sampler.batch(step)[2] for step in range(8)] == [0, 0, 0, 1, 1, 2, 2, 2]
    rows = np.concatenate([sampler.starts(step) for step in range(50)]).reshape(20, 10)
    orders = {tuple(np.argsort(row).tolist()) for row in rows}
    assert len(orders) == 20
    assert len({int(row.min() + row.max()) for row in rows}) > 1, "every epoch has its own cut"


def test_a_batch_may_hold_several_epochs():
    sampler = Sampler(np.arange(9), 4, 7, seed=1)
    starts = sampler.starts(1)
    assert sampler.windows_per_epoch == 2 and sampler.epoch(1) == 3
    places = np.arange(7, 14)
    for epoch in (4, 5, 6):
        assert len(set(starts[places // 2 == epoch].tolist())) == (2 if epoch < 7 else 1)


def test_the_order_depends_on_seed_and_step_alone():
    tokens = np.arange(5000)
    one, other = Sampler(tokens, 8, 6, seed=7), Sampler(tokens, 8, 6, seed=7)
    forward = [one.starts(step).tolist() for step in range(30)]
    backward = [other.starts(step).tolist() for step in reversed(range(30))][::-1]
    assert forward == backward
    assert forward[0] != Sampler(tokens, 8, 6, seed=8).starts(0).tolist()


def test_the_order_is_fixed_for_ever():
    sampler = Sampler(np.arange(10_000), 64, 4, seed=1337)
    assert sampler.starts(0).tolist() == [4, 1540, 2756, 3588]


def test_a_text_of_one_window_is_always_that_window():
    sampler = Sampler(np.arange(5), 4, 3, seed=1)
    assert sampler.windows_per_epoch == 1
    assert sampler.starts(9).tolist() == [0, 0, 0] and sampler.epoch(9) == 27
    with pytest.raises(DataError, match=r"4 tokens.*block_size 4 .*at least 5"):
        Sampler(np.arange(4), 4, 3, seed=1)


@given(n_tokens=st.integers(0, 100), block_size=st.integers(1, 9), batch_size=st.integers(1, 5))
def test_evaluation_sees_every_prediction_once(n_tokens: int, block_size: int, batch_size: int):
    tokens = np.arange(n_tokens, dtype=np.uint16)
    seen: list[int] = []
    total = 0
    for inputs, targets, count in eval_windows(tokens, block_size, batch_size):
        assert inputs.shape == targets.shape == (batch_size, block_size)
        assert inputs.dtype == targets.dtype == np.int32
        counted = targets != IGNORE
        assert counted.sum() == count > 0 and np.array_equal(inputs[counted] + 1, targets[counted])
        seen += targets[counted].tolist()
        total += count
    assert seen == list(range(1, n_tokens)) and total == max(0, n_tokens - 1)


@pytest.mark.parametrize("n_characters", [65, 1500])
def test_failure_9_vocabularies_of_any_size(n_characters: int, tmp_path: Path):
    text = "".join(chr(0x4E00 + i) for i in range(n_characters)) * 2
    config, dataset = open_text(tmp_path / "corpus.txt", text, block_size=8)
    assert config.model.vocab_size == dataset.vocab_size == n_characters
    assert int(max(dataset.train.max(), dataset.val.max())) == n_characters - 1


def test_metadata_names_what_was_made(story: Path, tmp_path: Path):
    dataset = prepare_cached(story, CHAR, tmp_path / "cache")
    metadata = json.loads(json.dumps(dataset.metadata))
    assert metadata["corpus"]["characters"] == len(STORY)
    sizes = [metadata[name]["text_bytes"] for name in ("train.bin", "val.bin")]
    assert sum(sizes) == len(STORY.encode())
    assert f"{len(dataset.train):,} tokens to train on" in str(dataset)
