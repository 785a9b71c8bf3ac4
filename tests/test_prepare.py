"""`treadle prepare`, from inputs to a directory of tokens."""

from __future__ import annotations

import errno
import hashlib
import inspect
import json
import os
import random
import re
import shlex
import subprocess
import sys
import time
from collections import Counter
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from typer.models import OptionInfo

from treadle.cli import main
from treadle.cli.prepare import command
from treadle.config import DataConfig
from treadle.data import pipeline, staging
from treadle.data.choose import CORPUS_FILE, SHIPPED, TRAINING_FILE, TokenizerOptions
from treadle.data.clean import Filters
from treadle.data.corpus import load_tokens
from treadle.data.pipeline import Options, Report, prepare
from treadle.data.shards import read_tokens
from treadle.data.stories import generate_stories
from treadle.data.tokenizer import END_OF_TEXT, TOKENIZER_FILE, Tokenizer
from treadle.errors import ConfigError, CorruptError, DataError, TokenizerError

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "corpus.md"
BYTES = TokenizerOptions("byte")
KEEP_ALL = Filters.off()
WORDS = generate_stories("en", 30).split()


def documents_of(path: Path) -> list[str]:
    """The documents of a token file, by its tokenizer."""
    text = Tokenizer.load(path.parent).decode(read_tokens(path))
    first, *documents = text.split(END_OF_TEXT)
    assert first == ""
    return documents


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def stories(count: int, seed: int = 0) -> list[str]:
    """Different short documents."""
    rng = random.Random(seed)
    return [f"Story {seed}.{i}: " + " ".join(rng.choices(WORDS, k=30)) for i in range(count)]


def files_of(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


# ---- what it is for -------------------------------------------------------------------------


def test_tinyshakespeare_is_that_of_llm_c(
    shared_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "D"
    arguments = ["--recipe", "tinyshakespeare", "--out", str(out)]
    arguments += ["--tokenizer", str(shared_data / "gpt2-tokenizer.json")]
    assert main(["prepare", str(shared_data / "tinyshakespeare.txt"), *arguments]) == 0
    assert "305,260" in capsys.readouterr().out
    train, val = read_tokens(out / "train.bin"), read_tokens(out / "val.bin")
    assert (len(val), len(train)) == (32_768, 305_260)
    assert ((out / "val.bin").stat().st_size, (out / "train.bin").stat().st_size) == (66560, 611544)
    text = (shared_data / "tinyshakespeare.txt").read_text(encoding="utf-8")
    text = END_OF_TEXT + text.replace("\n\n", "\n\n" + END_OF_TEXT)
    tokenizer = Tokenizer.load(shared_data / "gpt2-tokenizer.json")
    assert np.array_equal(np.concatenate([val, train]), tokenizer.encode(text))
    assert load_tokens(out, DataConfig()).vocab_size == 50257


RUN = """
import sys
from treadle.cli import main
from treadle.data import pipeline
if __name__ == "__main__":
    pipeline._FEW_BYTES = 0
    sys.exit(main(sys.argv[1:]))
"""


def test_failure_8_threads_and_hash_seeds_change_nothing(tmp_path: Path, shared_data: Path) -> None:
    text = (shared_data / "quijote.txt").read_bytes()
    (tmp_path / "quijote.txt").write_bytes(text[:700_000])
    write_jsonl(tmp_path / "more.jsonl", stories(2500))
    (tmp_path / "run.py").write_text(RUN)
    command = [sys.executable, "run.py", "prepare", "quijote.txt", "more.jsonl"]
    command += ["--tokenizer", "bpe", "--vocab-size", "1000"]
    for number, (threads, seed) in enumerate((("1", "0"), ("3", "12345"))):
        done = subprocess.run(
            [*command, "--out", f"D{number}", "--threads", threads],
            cwd=tmp_path,
            env=os.environ
            | {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": seed, "RAYON_NUM_THREADS": threads},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
    assert files_of(tmp_path / "D0") == files_of(tmp_path / "D1")
    assert len(read_tokens(tmp_path / "D0" / "train.bin")) > 200_000


def test_adding_files_never_moves_a_document(tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    write_jsonl(texts / "m.jsonl", stories(300))
    long = "\n\n".join(f"{i} " + " ".join(stories(2, seed=i)) for i in range(1000))
    (texts / "long.txt").write_text(long)
    prepare([str(texts)], tmp_path / "D0", Options(BYTES))
    write_jsonl(texts / "a.jsonl", stories(200, seed=7) + stories(3))
    (texts / "z.txt").write_text(stories(1, seed=8)[0])
    prepare([str(texts)], tmp_path / "D1", Options(BYTES))
    before, after = (
        {
            split: Counter(documents_of(tmp_path / name / f"{split}.bin"))
            for split in ("train", "val")
        }
        for name in ("D0", "D1")
    )
    assert before["train"] <= after["train"] and before["val"] <= after["val"]
    assert not set(after["train"]) & set(after["val"])
    assert 10 < before["val"].total() < 0.2 * before["train"].total()
    whole = " ".join([*before["train"], *before["val"]])
    assert sorted(whole.split()) == sorted(" ".join([*stories(300), long]).split())


def test_sections_follow_each_other_where_both_are_kept(tmp_path: Path) -> None:
    long = "\n\n".join(f"{i} " + " ".join(stories(2, seed=i)) for i in range(1000))
    (tmp_path / "long.txt").write_text("\n\n" + long + "\n\n\n")
    report = prepare([str(tmp_path / "long.txt")], tmp_path / "D", Options(BYTES, val_fraction=0))
    assert documents_of(tmp_path / "D" / "train.bin") == [long]
    assert report.counts["read"]["documents"] == 1 and report.counts["read"]["pieces"] > 30
    third = Options(BYTES, val_fraction=0.3)
    report = prepare([str(tmp_path / "long.txt")], tmp_path / "D", third)
    train = documents_of(tmp_path / "D" / "train.bin")
    assert report.counts["val.bin"]["pieces"] >= len(train) - 1 > 1
    assert all(part in long for part in train)


# ---- cleaning, filters, duplicates ----------------------------------------------------------


def test_what_is_dropped_is_counted_and_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    good = stories(40)
    bad = ["short", "12345 " * 20, "again and again " * 60, "  ", good[3], "\n" + good[4] + "  "]
    write_jsonl(texts / "a.jsonl", good + bad)
    (texts / "b.jsonl").write_text('{"text": 1}\nnothing\n{"text": "' + "Many words. " * 20 + '"}')
    (texts / "c.txt").write_bytes(b"\x7fELF\0\x1b]0;evil\x07")
    out = tmp_path / "D"
    arguments = ["--out", str(out), "--tokenizer", "byte", "--max-chars", "400"]
    assert main(["prepare", str(texts), *arguments]) == 0
    told = json.loads((out / "report.json").read_bytes())
    assert told["counts"]["dropped"] == {
        "duplicate": 2, "empty": 1, "no text": 1, "not JSON": 1, "not text": 1, "repetitive": 1,
        "too few letters": 1, "too long": 1, "too short": 1,
    }  # fmt: skip
    assert told["counts"]["read"]["documents"] == 50
    pieces = sum(told["counts"][name]["pieces"] for name in ("train.bin", "val.bin"))
    assert pieces == 40
    where = texts.as_posix()
    assert told["examples"]["too short"] == [{"where": f"{where}/a.jsonl:41", "text": "short"}]
    assert [e["where"] for e in told["examples"]["duplicate"]] == [
        f"{where}/a.jsonl:45", f"{where}/a.jsonl:46"
    ]  # fmt: skip
    (note,) = told["notes"]
    assert note.startswith(f"left out: {where}/c.txt (zero byte at offset 4")
    said = capsys.readouterr().out
    assert f"too short: {where}/a.jsonl:41  short" in said and "2 duplicate" in said
    assert "\x1b" not in said

    everything = Options(BYTES, KEEP_ALL, dedupe=False, clean=False)
    report = prepare([str(texts / "a.jsonl")], out, everything)
    assert report.counts["dropped"] == {"empty": 1}
    kept = documents_of(out / "train.bin") + documents_of(out / "val.bin")
    assert sorted(kept) == sorted(good + bad[:3] + bad[4:])


def test_a_long_document_is_dropped_as_a_whole(tmp_path: Path) -> None:
    long = "\n\n".join(" ".join(stories(2, seed=i)) for i in range(1000))
    (tmp_path / "a.txt").write_text(
        stories(1)[0] + END_OF_TEXT + long + END_OF_TEXT + stories(1, 5)[0]
    )
    limits = Filters(max_chars=100_000)
    report = prepare(
        [str(tmp_path / "a.txt")], tmp_path / "D", Options(BYTES, limits, val_fraction=0)
    )
    assert documents_of(tmp_path / "D" / "train.bin") == [*stories(1), *stories(1, 5)]
    assert report.counts["dropped"]["too long"] == report.counts["read"]["pieces"] - 2
    assert report.examples["too long"][0]["where"].endswith("a.txt:2")


def test_near_duplicates_are_dropped(tmp_path: Path) -> None:
    if not os.environ.get("CI"):
        pytest.importorskip("datasketch")
    good = [" ".join(pair) for pair in zip(stories(20), stories(20, 1), strict=True)]
    near = good[5].replace("Story", "Tale", 1)
    path = write_jsonl(tmp_path / "a.jsonl", [*good, near, good[0]])
    report = prepare([str(path)], tmp_path / "D", Options(BYTES, near_duplicates=0.8))
    assert report.counts["dropped"] == {"duplicate": 1, "near duplicate": 1}
    assert report.examples["near duplicate"][0]["where"].endswith(":21")
    report = prepare([str(path)], tmp_path / "D", Options(BYTES))
    assert report.counts["dropped"] == {"duplicate": 1}


def test_nothing_left_is_an_error_that_says_why(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["x", "y", "1234567890 " * 9])
    told = r"every document was dropped: 2 too short \(--min-chars 0\), 1 too few letters \(--min-l"
    with pytest.raises(DataError, match=told):
        prepare([str(path)], tmp_path / "D")
    assert not (tmp_path / "D").exists()
    with pytest.raises(DataError, match=r"1 not text \(--encoding NAME\); the first is .*b\.txt:1"):
        (tmp_path / "b.txt").write_bytes(b"\0")
        prepare([str(tmp_path / "b.txt")], tmp_path / "D")


def test_a_few_documents_are_all_for_training_rather_than_none(tmp_path: Path) -> None:
    for seed in range(12):
        (tmp_path / "a.txt").write_text(stories(1, seed)[0])
        report = prepare(
            [str(tmp_path / "a.txt")], tmp_path / "D", Options(BYTES, val_fraction=0.5)
        )
        assert report.counts["train.bin"]["pieces"] == 1
        assert "validation is empty" in report.notes[0]
        assert len(read_tokens(tmp_path / "D" / "val.bin")) == 0


def test_standard_input_and_several_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "b.txt").write_text(stories(1)[0])
    monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(stories(1, 1)[0].encode())))
    options = Options(BYTES, val_fraction=0)
    prepare([str(tmp_path / "*.txt"), "-"], tmp_path / "D", options)
    assert documents_of(tmp_path / "D" / "train.bin") == [*stories(1), *stories(1, 1)]
    inputs = json.loads((tmp_path / "D" / "metadata.json").read_bytes())["inputs"]
    assert [i["name"] for i in inputs] == [(tmp_path / "b.txt").as_posix(), "-"]
    assert inputs[1]["sha256"] == hashlib.sha256(stories(1, 1)[0].encode()).hexdigest()


# ---- tokenizers -----------------------------------------------------------------------------


def prepare_stories(tmp_path: Path, tokenizer: TokenizerOptions, **options: Any) -> Report:
    path = tmp_path / "a.jsonl"
    if not path.exists():
        write_jsonl(path, stories(200))
    return prepare([str(path)], tmp_path / "D", Options(tokenizer, **options))


@pytest.mark.parametrize("name", ["auto", "char", "byte", "bpe"])
def test_kinds_of_tokenizers(name: str, tmp_path: Path) -> None:
    size = 400 if name == "bpe" else None
    report = prepare_stories(tmp_path, TokenizerOptions(name, size, specials=("<|me|>",)))
    tokenizer = Tokenizer.load(tmp_path / "D")
    assert tokenizer.kind == report.counts["tokenizer"]["kind"] == {"auto": "char"}.get(name, name)
    kept = documents_of(tmp_path / "D" / "train.bin") + documents_of(tmp_path / "D" / "val.bin")
    assert sorted(kept) == sorted(stories(200))
    assert tokenizer.encode("<|me|>").tolist() == [tokenizer.eos_id + 1]  # type: ignore[operator]
    assert load_tokens(tmp_path / "D", DataConfig()).vocab_size == tokenizer.vocab_size
    if name == "bpe":
        assert tokenizer.vocab_size == 400


def test_merges_are_learned_from_training_documents_alone(tmp_path: Path) -> None:
    report = prepare_stories(tmp_path, TokenizerOptions("bpe", 400))
    train = documents_of(tmp_path / "D" / "train.bin")
    again = Tokenizer.train_bpe(train, 400).to_json()
    assert (tmp_path / "D" / TOKENIZER_FILE).read_text(encoding="utf-8") == again
    sample = report.counts["tokenizer"]["trained_on"]
    assert sample["texts"] == len(train) < 200
    assert sample["bytes"] == sample["of_bytes"] == sum(map(len, train))
    assert sample["sha256"] == hashlib.sha256(END_OF_TEXT.join(train).encode()).hexdigest()


def test_a_permanent_tokenizer(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    asked = TokenizerOptions("bpe", 400, directory=kept, sample_bytes=9000)
    report = prepare_stories(tmp_path, asked)
    first = files_of(kept)
    assert set(first) == {TOKENIZER_FILE, CORPUS_FILE, TRAINING_FILE}
    sample = report.counts["tokenizer"]["trained_on"]
    assert 6000 < sample["bytes"] < 12000 < sample["of_bytes"]
    text = (kept / CORPUS_FILE).read_text()
    texts = text.split(END_OF_TEXT)
    assert sum(map(len, texts)) == sample["bytes"] and set(texts) < set(stories(200))

    write_jsonl(tmp_path / "a.jsonl", stories(50, seed=3))
    again = prepare_stories(tmp_path, TokenizerOptions("auto", directory=kept))
    assert files_of(kept) == first
    assert (tmp_path / "D" / TOKENIZER_FILE).read_bytes() == (kept / TOKENIZER_FILE).read_bytes()
    assert again.counts["tokenizer"]["trained_on"] == sample
    for other in (
        TokenizerOptions("char", directory=kept),
        TokenizerOptions("bpe", 500, directory=kept),
    ):
        with pytest.raises(
            TokenizerError, match=r"kept: holds a tokenizer with (kind bpe|vocab_size 400), not"
        ):
            prepare_stories(tmp_path, other)

    rebuilt = TokenizerOptions("bpe", 400, train_on=kept / CORPUS_FILE)
    prepare_stories(tmp_path, rebuilt)
    assert (tmp_path / "D" / TOKENIZER_FILE).read_bytes() == (kept / TOKENIZER_FILE).read_bytes()


def test_tokenizers_that_are_there_already(tmp_path: Path) -> None:
    prepare_stories(tmp_path, TokenizerOptions("bpe", 400), vocab_merges=True)
    first = tmp_path / "first"
    (tmp_path / "D").rename(first)
    (first / TOKENIZER_FILE).rename(tmp_path / TOKENIZER_FILE)
    pair = TokenizerOptions("gpt2-files", vocab=first / "vocab.json", merges=first / "merges.txt")
    for name, asked in (
        ("file", TokenizerOptions(str(tmp_path / TOKENIZER_FILE))),
        ("directory", TokenizerOptions(str(tmp_path))),
        ("a directory of the pair", TokenizerOptions(str(first))),
        ("the pair", pair),
    ):
        report = prepare_stories(tmp_path, asked)
        assert report.counts["tokenizer"]["trained_on"] is None
        assert (tmp_path / "D" / "train.bin").read_bytes() == (first / "train.bin").read_bytes(), (
            name
        )
        assert not (tmp_path / "D" / "vocab.json").exists()


def test_a_tokenizer_without_end_of_text_parts_documents_by_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / TOKENIZER_FILE
    path.write_text(Tokenizer.char("\n" + "".join(stories(200))).to_json())
    prepare_stories(tmp_path, TokenizerOptions(str(path)))
    text = Tokenizer.load(path).decode(read_tokens(tmp_path / "D" / "train.bin"))
    assert set(text.split("\n\n")) < set(stories(200)) and not text.startswith("\n")
    path.write_text(Tokenizer.char("abc").to_json())
    with pytest.raises(TokenizerError, match="not in the character vocabulary"):
        prepare_stories(tmp_path, TokenizerOptions(str(path)))


def test_the_spanish_tokenizer_comes_with_the_package(tmp_path: Path, shared_data: Path) -> None:
    prepare([str(shared_data / "quijote.txt")], tmp_path / "D",
            Options(TokenizerOptions("bpe", 16_000)))  # fmt: skip
    made = (tmp_path / "D" / TOKENIZER_FILE).read_bytes()
    assert made == SHIPPED["spanish"].read_bytes()
    assert Tokenizer.load(SHIPPED["spanish"]).vocab_size == 16_000
    prepare_stories(tmp_path, TokenizerOptions("spanish"))
    assert (tmp_path / "D" / TOKENIZER_FILE).read_bytes() == made


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (Options(TokenizerOptions("byte", 300)), "--vocab-size 300"),
        (Options(TokenizerOptions("char", train_on=Path("x"), specials=("a b",))), "special token"),
        (Options(TokenizerOptions("byte", directory=Path("x"))), "--tokenizer-dir"),
        (Options(TokenizerOptions("gpt2-files")), "--vocab and --merges"),
        (Options(TokenizerOptions("auto", merges=Path("x"))), "needs both files"),
        (Options(TokenizerOptions("nothing")), "nothing: no such tokenizer"),
        (Options(TokenizerOptions("spanish", specials=("<|x|>",))), "--special-token"),
        (Options(BYTES, recipe="cake"), "--recipe cake: expected one of none, tinysh"),
        (Options(BYTES, format="pdf"), "--format pdf"),
        (Options(BYTES, bin_format="x"), "--bin-format x"),
        (Options(BYTES, val_fraction=0.9), "--val-fraction 0.9: expected a number from 0 to 0.5"),
        (Options(BYTES, Filters(min_letters=2)), "--min-letters 2"),
        (Options(BYTES, clean=False, fix_encoding=True), "--fix-encoding"),
        (Options(BYTES, vocab_merges=True), "only a BPE has"),
        (Options(BYTES, recipe="tinyshakespeare", dedupe=False), "leaves texts as they are"),
        (Options(TokenizerOptions("bpe"), recipe="tinyshakespeare"), "needs a finished tokenizer"),
        (Options(BYTES, text_key="no"), "every document was dropped"),
    ],
)
def test_what_cannot_work_is_one_line(options: Options, told: str, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", stories(3))
    if told == "special token":
        options = Options(TokenizerOptions("bpe", 400, specials=("a b",)))
    with pytest.raises((ConfigError, DataError)) as caught:
        prepare([str(path)], tmp_path / "D", options)
    assert told in str(caught.value) and "\n" not in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]


# ---- files ----------------------------------------------------------------------------------


def test_the_form_without_header(tmp_path: Path) -> None:
    prepare_stories(tmp_path, BYTES)
    ids = np.array(read_tokens(tmp_path / "D" / "train.bin"))
    prepare_stories(tmp_path, BYTES, bin_format="int32-raw")
    assert (tmp_path / "D" / "train.bin").read_bytes() == ids.astype("<i4").tobytes()
    assert len(load_tokens(tmp_path / "D", DataConfig()).train) == len(ids)
    prepare_stories(tmp_path, BYTES, bin_format="int32-raw", val_fraction=0)
    assert not (tmp_path / "D" / "val.bin").exists()


def test_metadata_is_enough_to_rebuild(tmp_path: Path) -> None:
    prepare_stories(tmp_path, TokenizerOptions("bpe", 300), near_duplicates=0, text_key="text")
    folder = tmp_path / "D"
    metadata = json.loads((folder / "metadata.json").read_bytes())
    for name, digest in files_of(folder).items():
        assert name == "metadata.json" or metadata[name]["sha256"] == digest
    assert metadata["train.bin"]["tokens"] == len(read_tokens(folder / "train.bin"))
    (told,) = metadata["inputs"]
    assert told["sha256"] == hashlib.sha256((tmp_path / "a.jsonl").read_bytes()).hexdigest()
    assert metadata["options"]["tokenizer"]["vocab_size"] == 300
    assert {"treadle", "python", "unicode", "tokenizers", "numpy"} <= set(metadata["versions"])


def test_a_mix_of_two_runs_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare_stories(tmp_path, BYTES)
    write_jsonl(tmp_path / "a.jsonl", stories(150, seed=9))
    real, moved = os.replace, []

    def killed(source: Path, target: Path) -> None:
        moved.append(target.name)
        if target.name == "train.bin":
            raise KeyboardInterrupt
        real(source, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(staging.os, "replace", killed)
        prepare_stories(tmp_path, BYTES)
    assert moved[0] == "metadata.json" and moved[-1] == "train.bin"
    with pytest.raises(
        CorruptError, match=r"train\.bin: is not the file that metadata\.json names"
    ):
        load_tokens(tmp_path / "D", DataConfig())
    prepare_stories(tmp_path, BYTES)
    load_tokens(tmp_path / "D", DataConfig())
    assert not list((tmp_path / "D").glob(".*"))


def test_a_full_disk_is_named_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare_stories(tmp_path, BYTES)
    before = files_of(tmp_path / "D")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(pipeline, "write_synced", full)
    with pytest.raises(DataError, match=r"D: cannot write: No space left on device"):
        prepare_stories(tmp_path, BYTES, val_fraction=0.3)
    assert files_of(tmp_path / "D") == before


STOPPED = """
import sys, time
from treadle.data import pipeline
from treadle.data.choose import TokenizerOptions

def progress(name, done, total):
    if name == sys.argv[1]:
        print("here", flush=True)
        time.sleep(60)

if __name__ == "__main__":
    pipeline._FEW_BYTES = 0
    options = pipeline.Options(TokenizerOptions("bpe", 300))
    pipeline.prepare(["a.jsonl"], "D", options, threads=2, progress=progress)
"""


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("phase", ["reading and cleaning", "training the tokenizer", "encoding"])
def test_kill_9_in_the_middle_loses_only_time(phase: str, tmp_path: Path) -> None:
    out = tmp_path / "D"
    prepare_stories(tmp_path, TokenizerOptions("bpe", 300))
    expected = files_of(out)
    for path in out.iterdir():
        path.unlink()
    (tmp_path / "stopped.py").write_text(STOPPED)
    run = subprocess.Popen(
        [sys.executable, "stopped.py", phase],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
    )
    assert run.stdout is not None and run.stdout.readline() == b"here\n"
    workers = [
        int(path.name)
        for path in Path("/proc").glob("[0-9]*")
        if f"PPid:\t{run.pid}\n" in _text(path / "status")
    ]
    assert workers
    run.kill()
    run.wait()
    run.stdout.close()
    deadline = time.monotonic() + 30
    while any("State:\tZ" not in _text(Path(f"/proc/{w}/status")) != "" for w in workers):
        assert time.monotonic() < deadline, "a worker outlives the one that started it"
        time.sleep(0.01)
    assert [path.name for path in out.iterdir()] == [f".prepare.tmp-{run.pid}"]
    prepare_stories(tmp_path, TokenizerOptions("bpe", 300))
    assert files_of(out) == expected


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


# ---- the page -------------------------------------------------------------------------------


def flags() -> str:
    """The table of the options of a command, from the command itself."""
    lines = ["| option | default | what it does |", "| --- | --- | --- |"]
    for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
        told = parameter.default
        if not isinstance(told, OptionInfo):
            continue
        flag = "--" + name.replace("_", "-")
        is_switch = parameter.annotation is bool
        names = list(told.param_decls or [flag, f"--no-{flag[2:]}"][: 1 + is_switch])
        kind = (*get_args(parameter.annotation), parameter.annotation)[0]
        takes = "" if is_switch else told.metavar or kind.__name__.upper()
        shown = ", ".join(f"`{name}`" for name in names) + (f" `{takes}`" if takes else "")
        hides = any(told.default is nothing for nothing in (None, ..., False)) or told.default == []
        default = "" if hides else f"`{'on' if told.default is True else told.default}`"
        lines.append(f"| {shown} | {default} | {told.help} |".replace("FILE|DIR", "FILE\\|DIR"))
    return "\n".join(lines)


def generated_page() -> str:
    head, marker, rest = PAGE.read_text(encoding="utf-8").partition("<!-- generated: flags -->")
    assert marker
    return f"{head}{marker}\n\n{flags()}\n\n<!-- end -->{rest.partition('<!-- end -->')[2]}"


def test_the_commands_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("texts").mkdir()
    write_jsonl(Path("texts", "a.jsonl"), stories(200))
    Path("quijote.txt").write_text(generate_stories("es", 3), encoding="utf-8")
    blocks = re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    lines = [line for block in blocks for line in block.splitlines()]
    for line in lines:
        program, name, *arguments = shlex.split(line)
        assert program == "treadle"
        if name != "train":  # the pages on training have that
            assert main([name, *arguments]) == 0, line
    assert len(lines) >= 7
    said = capsys.readouterr().out
    assert '" la"' in said and "tokens, 24 characters" in said
    rebuilt = [Path(out, TOKENIZER_FILE).read_bytes() for out in ("words", "again")]
    assert rebuilt[0] == rebuilt[1]


def test_the_table_of_options() -> None:
    assert PAGE.read_text(encoding="utf-8") == generated_page(), "run python tests/test_prepare.py"


if __name__ == "__main__":
    PAGE.write_text(generated_page(), encoding="utf-8", newline="\n")
