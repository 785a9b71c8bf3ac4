"""Known data sets: downloading them from a server on this machine, and llm.c's recipes."""

from __future__ import annotations

import hashlib
import io
import json
import random
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from treadle.cli import main
from treadle.data import datasets
from treadle.data.choose import TokenizerOptions
from treadle.data.datasets import DATASETS, KnownDataset, fetch, read_urls
from treadle.data.pipeline import Options, prepare
from treadle.data.shards import read_tokens
from treadle.data.tokenizer import END_OF_TEXT, Tokenizer
from treadle.errors import ConfigError, DataError

# ---- a server -------------------------------------------------------------------------------


@dataclass
class Server:
    """Serves `files`; `cut` says how many bytes an answer may have before it breaks off, `ranges`
    whether parts can be asked for. `asked` holds (path, Range header) of each request."""

    files: dict[str, bytes] = field(default_factory=dict)
    cut: int | None = None
    ranges: bool = True
    tag: str | None = '"one"'
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    address: str = ""

    def url(self, name: str) -> str:
        return f"{self.address}/{name}"


@pytest.fixture
def server() -> Iterator[Server]:
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            wanted = self.headers.get("Range")
            state.asked.append((self.path, wanted))
            data = state.files.get(self.path[1:])
            if data is None:
                self.send_error(404)
                return
            start = 0
            same = self.headers.get("If-Range") == state.tag
            if wanted and state.ranges and same:
                start = int(wanted.removeprefix("bytes=").removesuffix("-"))
            if start and start >= len(data):
                self.send_error(416)
                return
            self.send_response(206 if start else 200)
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
            self.send_header("Content-Length", str(len(data) - start))
            if state.tag:
                self.send_header("ETag", state.tag)
            self.end_headers()
            self.wfile.write(data[start:][: state.cut])

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        state.address = f"http://127.0.0.1:{http.server_port}"
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        yield state
        http.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def known(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Puts a data set "sample" among the known ones."""
    sample = replace(KnownDataset(url="http://127.0.0.1:9/nowhere", file="sample.txt"), **changes)
    monkeypatch.setitem(datasets.DATASETS, "sample", sample)
    monkeypatch.setitem(datasets._KNOWN, "sample", sample)


def silent(*_: object) -> None:
    pass


DATA = bytes(range(256)) * 400


# ---- downloading ----------------------------------------------------------------------------


def test_a_download_is_kept_and_verified(
    server: Server, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known(monkeypatch)
    server.files["x"] = DATA
    urls = {"sample": server.url("x")}
    seen: list[tuple[str, int, int]] = []
    path = fetch("sample", urls, lambda *step: seen.append(step))
    assert path == cache / "datasets" / "sample" / "sample.txt" and path.read_bytes() == DATA
    assert seen[-1] == ("downloading", len(DATA), len(DATA))
    digest = hashlib.sha256(DATA).hexdigest()
    assert path.with_name("sample.txt.sha256").read_text() == digest + "\n"
    assert fetch("sample", urls, silent) == path and len(server.asked) == 1
    assert sorted(p.name for p in path.parent.iterdir()) == ["sample.txt", "sample.txt.sha256"]

    path.write_bytes(DATA[:-1])
    fetch("sample", urls, silent)
    assert path.read_bytes() == DATA and len(server.asked) == 2

    path.unlink()
    server.files["x"] = DATA + b"changed"
    with pytest.raises(DataError, match=rf"/x: the file has SHA-256 \w+, expected {digest}"):
        fetch("sample", urls, silent)
    assert [p.name for p in path.parent.iterdir()] == ["sample.txt.sha256"]


def test_a_download_that_breaks_off_goes_on(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    known(monkeypatch, sha256=hashlib.sha256(DATA).hexdigest())
    server.files["x"], server.cut = DATA, 30_000
    path = fetch("sample", {"sample": server.url("x")}, silent)
    assert path.read_bytes() == DATA
    ranges = [wanted for _, wanted in server.asked]
    assert ranges == [None, *(f"bytes={n}-" for n in (30_000, 60_000, 90_000))]


def test_a_download_goes_on_in_the_next_run(
    server: Server, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known(monkeypatch)
    server.files["x"], server.cut = DATA, 50_000
    urls = {"sample": server.url("x")}

    def stop(name: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch("sample", urls, stop)
    server.cut = None
    part = cache / "datasets" / "sample" / "sample.txt.part"
    size = part.stat().st_size
    assert 0 < size < len(DATA) and not part.with_name("sample.txt").exists()
    assert fetch("sample", urls, silent).read_bytes() == DATA
    assert server.asked[-1][1] == f"bytes={size}-"


@pytest.mark.parametrize("change", ["another file", "no ranges", "no tag"])
def test_a_part_of_another_file_is_not_gone_on_with(
    change: str, server: Server, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known(monkeypatch)
    server.files["x"], server.cut = DATA, 0
    server.tag = None if change == "no tag" else server.tag
    urls = {"sample": server.url("x")}
    with pytest.raises(DataError, match=r"/x: cannot download: .*; run again to go on from here"):
        fetch("sample", urls, silent)
    assert len(server.asked) == datasets._TRIES
    part = cache / "datasets" / "sample" / "sample.txt.part"
    part.write_bytes(b"old part")
    server.cut = None
    if change == "another file":
        server.files["x"], server.tag = DATA[::-1], '"two"'
    server.ranges = change != "no ranges"
    assert fetch("sample", urls, silent).read_bytes() == server.files["x"]


def test_a_part_that_is_longer_than_the_file_is_dropped(
    server: Server, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known(monkeypatch)
    server.files["x"], server.cut = DATA, 10
    urls = {"sample": server.url("x")}

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch("sample", urls, stop)
    part = cache / "datasets" / "sample" / "sample.txt.part"
    part.write_bytes(DATA * 2)
    server.cut = None
    assert fetch("sample", urls, silent).read_bytes() == DATA


def test_what_is_not_there_is_one_line(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    known(monkeypatch)
    with pytest.raises(DataError, match=r"/x: 404 Not Found"):
        fetch("sample", {"sample": server.url("x")}, silent)
    with pytest.raises(DataError, match=r"cannot download: .*refused") as caught:
        fetch("sample", {}, silent)
    assert "\n" not in str(caught.value)
    assert read_urls(["gpt2=http://x/?a=b"]) == {"gpt2": "http://x/?a=b"}
    for bad in ("gpt2", "gpt3=http://x", "gpt2="):
        with pytest.raises(ConfigError, match="expected NAME=URL"):
            read_urls([bad])


# ---- the known ones -------------------------------------------------------------------------


def test_tinyshakespeare_from_a_mirror(
    server: Server, shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.files["input.txt"] = (shared_data / "tinyshakespeare.txt").read_bytes()
    server.files["gpt2"] = (shared_data / "gpt2-tokenizer.json").read_bytes()
    out = tmp_path / "D"
    arguments = ["--url", f"tinyshakespeare={server.url('input.txt')}"]
    arguments += ["--url", f"gpt2={server.url('gpt2')}", "--out", str(out)]
    assert main(["prepare", "tinyshakespeare", *arguments]) == 0
    assert len(read_tokens(out / "val.bin")) == 32_768
    assert len(read_tokens(out / "train.bin")) == 305_260
    metadata = json.loads((out / "metadata.json").read_bytes())
    assert metadata["options"]["recipe"] == "tinyshakespeare"

    wrong = replace(DATASETS["tinyshakespeare"], tokens=(32_768, 305_261))
    monkeypatch.setitem(datasets.DATASETS, "tinyshakespeare", wrong)
    urls = read_urls(arguments[1:4:2])
    with pytest.raises(DataError, match=r"32,768 validation and 305,260 training tokens, expected"):
        prepare(["tinyshakespeare"], tmp_path / "E", urls=urls)
    assert not (tmp_path / "E").exists()
    with pytest.raises(DataError, match=r"prepare it alone, or give --recipe none"):
        prepare(["tinyshakespeare", str(out)], tmp_path / "E", urls=urls)
    plain = Options(TokenizerOptions("byte"), recipe="none")
    report = prepare(["tinyshakespeare"], tmp_path / "E", plain, urls=urls)
    assert report.counts["read"]["documents"] == 1 and report.counts["val.bin"]["pieces"] > 1


def test_quijote_without_the_notes_of_its_publisher(server: Server, tmp_path: Path) -> None:
    book = "En un lugar de la Mancha,\r\nde cuyo nombre no quiero acordarme"
    text = (
        "\ufeffThe Project Gutenberg eBook of Don Quijote\r\n\r\n*** START OF THE PROJECT "
        f"GUTENBERG EBOOK DON QUIJOTE ***\r\n\r\n\r\n{book}\r\n\r\n*** END OF THE PROJECT "
        "GUTENBERG EBOOK DON QUIJOTE ***\r\nLicense\r\n"
    )
    server.files["book"] = text.encode()
    urls = {"quijote": server.url("book")}
    prepare(
        ["quijote"], tmp_path / "D", Options(TokenizerOptions("byte"), val_fraction=0), urls=urls
    )
    told = Tokenizer.byte().decode(read_tokens(tmp_path / "D" / "train.bin"))
    assert told == END_OF_TEXT + book.replace("\r\n", "\n")


def test_a_page_that_is_no_book_is_not_kept(server: Server, cache: Path) -> None:
    server.files["book"] = b"Try again later"
    with pytest.raises(DataError, match=r"pg2000\.txt: has no lines \*\*\* START OF"):
        fetch("quijote", {"quijote": server.url("book")}, silent)
    assert list((cache / "datasets" / "quijote").iterdir()) == []


def shards(seed: int = 0) -> list[list[dict[str, Any]]]:
    rng = random.Random(seed)
    words = ["cat", "sat", "a", "mat", "Once", "día", END_OF_TEXT, "end.", "\n"]
    return [
        [
            {"story": "\n " + " ".join(rng.choices(words, k=20)) + " \n", "source": "GPT-4"}
            for _ in range(40)
        ]
        for _ in range(4)
    ]


def as_llm_c_does(files: list[list[dict[str, Any]]], gpt2: tokenizers.Tokenizer) -> list[list[int]]:
    """Ids for validation and for training."""
    gpt2.encode_special_tokens = True
    splits = []
    for split in (files[:1], files[1:]):
        ids = []
        for index, data in enumerate(split):
            shuffled = list(data)
            random.Random(1337 + index).shuffle(shuffled)
            for record in shuffled:
                ids += [50256, *gpt2.encode(record["story"].strip()).ids]
        splits.append(ids)
    return splits


@pytest.mark.parametrize("source", ["folder", "archive", "server"])
def test_tinystories_is_that_of_llm_c(
    source: str, server: Server, shared_data: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "shards"
    folder.mkdir()
    for number in (2, 0, 3, 1):
        (folder / f"data{number:02d}.json").write_text(json.dumps(shards()[number]))
    (folder / "README.txt").write_text("not a shard")
    archive = tmp_path / "all.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, "TinyStories/folder")
        link = tarfile.TarInfo("../evil.json")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
        outside = tarfile.TarInfo("../../.hidden.json")
        tar.addfile(outside, io.BytesIO())
    server.files["all"] = archive.read_bytes()
    gpt2 = str(shared_data / "gpt2-tokenizer.json")
    given = {"folder": str(folder), "archive": str(archive), "server": "tinystories"}[source]
    urls = {"tinystories": server.url("all")}
    options = Options(TokenizerOptions(gpt2), recipe=None if source == "server" else "tinystories")
    prepare([given], tmp_path / "D", options, urls=urls)
    val, train = as_llm_c_does(shards(), tokenizers.Tokenizer.from_file(gpt2))
    assert read_tokens(tmp_path / "D" / "val.bin").tolist() == val
    assert read_tokens(tmp_path / "D" / "train.bin").tolist() == train
    if source == "server":
        prepare([given], tmp_path / "D", options, urls=urls)  # from the cache
        assert len(server.asked) == 1
        with pytest.raises(DataError, match=r"expected 19,043,638 and 925,653,391"):
            urls["gpt2"] = server.url("gpt2")
            server.files["gpt2"] = Path(gpt2).read_bytes()
            prepare([given], tmp_path / "D", urls=urls)


def test_more_than_one_batch_keeps_the_order(shared_data: Path, tmp_path: Path) -> None:
    gpt2 = str(shared_data / "gpt2-tokenizer.json")
    text = "\n\n".join(f"Speaker {i}:\nWords of no weight, {i * i}." for i in range(15_000))
    (tmp_path / "a.txt").write_text(text + "\n\n\n\nEnd\n")
    options = Options(TokenizerOptions(gpt2), recipe="tinyshakespeare")
    prepare([str(tmp_path / "a.txt")], tmp_path / "D", options, threads=1)
    ids = np.concatenate([read_tokens(tmp_path / "D" / f"{s}.bin") for s in ("val", "train")])
    whole = (END_OF_TEXT + text + "\n\n\n\nEnd\n").replace("\n\n", "\n\n" + END_OF_TEXT)
    assert np.array_equal(ids, Tokenizer.load(gpt2).encode(whole))


@pytest.mark.parametrize(
    ("recipe", "name", "data", "told"),
    [
        ("tinystories", "a.json", b'[{"text": "x"}]', r"a\.json: expected JSON, a list of objects"),
        ("tinystories", "a.json", b"{", r"a\.json: expected JSON"),
        ("tinystories", "a.tar.gz", b"no archive", r"a\.tar\.gz: not a tar archive"),
        ("tinyshakespeare", "a.txt", b"a\0b", r"a\.txt: zero byte at offset 1"),
    ],
)
def test_files_that_are_not_of_the_recipe(
    recipe: str, name: str, data: bytes, told: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=told):
        prepare(
            [str(tmp_path / name)], tmp_path / "D", Options(TokenizerOptions("byte"), recipe=recipe)
        )


def test_a_recipe_of_one_text_refuses_a_second(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(name)
    options = Options(TokenizerOptions("byte"), recipe="tinyshakespeare")
    with pytest.raises(DataError, match=r"b\.txt: the recipe takes one text"):
        prepare([str(tmp_path)], tmp_path / "D", options)
