"""Inputs that cannot work, for every command that reads or writes files: one line, nothing lost."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from runs import SMALL, fail, run, snapshot, succeed, write_text
from treadle.files import atomic_file

TINY_PLAN = (
    *("--n-layer", 1, "--n-head", 2, "--n-embd", 16, "--block-size", 16, "--batch-size", 4),
    *("--set", "model.vocab_size=65"),
)
LONG = "x" * 5000
posix = pytest.mark.skipif(os.name == "nt", reason="devices and pipes as files")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text, a run on it, and what is none; no test changes it."""
    folder = tmp_path_factory.mktemp("inputs")
    text = write_text(folder / "text.txt")
    succeed("train", "--data", text, *SMALL, "--steps", 2, "--out", folder / "run")
    (folder / "bytes").write_bytes(bytes(range(255, -1, -1)) * 4)
    (folder / "deep.json").write_text("[" * 100_000)
    (folder / "digits.json").write_text('{"train": {"steps": ' + "9" * 5000 + "}}")
    return folder


@pytest.mark.parametrize("path", ["bytes", "", "a\nb", LONG])
@pytest.mark.parametrize(
    "command",
    [
        ("prepare", "PATH", "--out", "OUT"),
        ("train", "--data", "PATH", "--out", "OUT"),
        ("train", "PATH", "--data", "text.txt", "--out", "OUT"),
        ("train", "--data", "text.txt", "--init-from", "PATH", "--out", "OUT"),
        ("eval", "PATH", "--data", "text.txt"),
        ("eval", "run", "--data", "PATH"),
        ("generate", "PATH"),
        ("report", "PATH"),
        ("plot", "PATH", "-o", "OUT"),
        ("tokenize", "PATH", "text"),
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_a_path_that_is_nothing_of_use(
    command: tuple[str, ...],
    path: str,
    trained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if path == "" and command in (("eval", "run", "--data", "PATH"),):
        pytest.skip("the folder itself, which holds a text")
    monkeypatch.chdir(trained)
    before = snapshot(trained)
    out = tmp_path / "out.png"
    fail(*(path if word == "PATH" else out if word == "OUT" else word for word in command))
    assert not out.exists() and snapshot(trained) == before


@pytest.mark.parametrize("name", ["deep.json", "digits.json"])
def test_json_that_no_parser_takes(name: str, trained: Path, tmp_path: Path) -> None:
    assert str(trained / name) in fail("train", trained / name, "--data", trained / "text.txt")
    assert name in fail("tokenize", trained / name, "text")


@pytest.mark.parametrize(
    ("key", "told"),
    [
        ("model.n_layer=1000000", "allowed: integer >= 1 and <= 1000"),
        ("model.n_embd=1e9", "out of memory"),
        ("model.vocab_size=1e15", "out of memory"),
        ("train.batch_size=1e9", "make train.batch_size smaller"),
        ("train.steps=1e12", "2^32 - 1"),
    ],
)
def test_sizes_that_no_machine_holds(key: str, told: str) -> None:
    """They are refused at once: before a graph is built, which would take hours."""
    name = key.partition("=")[0]
    flag = "--" + name.rpartition(".")[2].replace("_", "-")
    words = list(TINY_PLAN)
    if flag in words:
        del words[words.index(flag) : words.index(flag) + 2]
    assert told in fail("plan", *words, "--set", key)


def test_a_vocabulary_that_no_tokenizer_has(trained: Path, tmp_path: Path) -> None:
    text, bpe = trained / "text.txt", ("--tokenizer", "bpe")
    told = fail("prepare", text, *bpe, "--vocab-size", 10**20, "--out", tmp_path / "tokens")
    assert "too large" in told
    told = fail("train", "--data", text, *bpe, "--set", "data.vocab_size=1e18")
    assert "too large" in told
    assert not any(tmp_path.iterdir())


def test_a_batch_larger_than_the_split(trained: Path) -> None:
    asked = ("eval", trained / "run", "--data", trained / "text.txt", "--threads", 1)
    assert succeed(*asked, "--batch-size", 10**14) == succeed(*asked)


def test_a_picture_without_a_suffix(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    told = fail("plot", trained / "run", "-o", "loss")
    assert "expected a name that ends in .png" in told and not any(tmp_path.iterdir())


def test_a_folder_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    result = run("train", "--data", "text.txt")
    assert result.code == 2 and len(result.err.splitlines()) == 1, result


@posix
def test_links_and_pipes_stay_what_they_are(tmp_path: Path) -> None:
    """Also where the person may replace them, as root may replace /dev/null."""
    target, link, pipe = tmp_path / "target", tmp_path / "link", tmp_path / "pipe"
    target.write_bytes(b"old")
    link.symlink_to(target)
    with atomic_file(link) as file:
        file.write(b"new")
    assert link.is_symlink() and target.read_bytes() == b"new"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with atomic_file(pipe) as file:
        file.write(b"all of it")
    assert os.read(reader, 100) == b"all of it" and stat.S_ISFIFO(pipe.stat().st_mode)
    os.close(reader)
