"""Known data sets: where they are, how they are fetched, and what must come out.

    fetch("tinyshakespeare")   the files, downloaded at the first call and verified at each

A download that breaks off goes on where it stopped, also in another run. A file is what it must be
by a digest that is known, else by the one of the first download, which is kept beside it.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import tarfile
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from treadle.data.corpus import cache_directory
from treadle.errors import ConfigError, DataError
from treadle.files import digest_file, one_line, temporary_sibling, write_atomic

Progress = Callable[[str, int, int], None]
"""Called with the name of a pass, what is done of it, and the whole."""

_TRIES = 5  # in a row that bring nothing new
_TIMEOUT = 60  # seconds
_READ = 1 << 18


@dataclass(frozen=True)
class KnownDataset:
    """A file on the net.

    Attributes:
        url: where it is.
        file: its name in the cache.
        sha256: its digest, or None: what the first download had.
        recipe: how it is prepared, where not as any other text.
        tokens: of validation and of training, with the recipe and GPT-2's tokenizer.
        unpack: makes the files to read, given the file and a folder; None: the file itself.
    """

    url: str
    file: str
    sha256: str | None = None
    recipe: str | None = None
    tokens: tuple[int, int] | None = None
    unpack: Callable[[Path, Path], Path] | None = None


def unpack_shards(archive: Path, folder: Path) -> Path:
    """The folder of the `.json` files of a tar archive, whatever folders they are in there."""
    shards = folder / "shards"
    if shards.is_dir():
        return shards
    temporary = temporary_sibling(shards, "tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                name = Path(member.name).name
                content = tar.extractfile(member) if member.isfile() else None
                if content is not None and name.endswith(".json") and not name.startswith("."):
                    with (temporary / name).open("wb") as file:
                        shutil.copyfileobj(content, file, _READ)
        temporary.rename(shards)
    except (tarfile.TarError, EOFError) as error:
        raise DataError(f"{archive}: not a tar archive: {one_line(error)}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return shards


def strip_gutenberg(book: Path, folder: Path) -> Path:
    """A text of Project Gutenberg without what it says about itself before and after the book."""
    lines = book.read_bytes().decode("utf-8-sig", "replace").splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith("*** START OF")]
    ends = [i for i, line in enumerate(lines) if line.startswith("*** END OF")]
    if not starts or not ends or ends[-1] < starts[0]:
        raise DataError(f"{book}: has no lines *** START OF and *** END OF; not that book")
    text = "\n".join(lines[starts[0] + 1 : ends[-1]]).strip("\n") + "\n"
    target = folder / "book.txt"
    write_atomic(target, text.encode())
    return target


DATASETS = {
    "tinyshakespeare": KnownDataset(
        url="https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
        file="input.txt",
        sha256="86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
        recipe="tinyshakespeare",
        tokens=(32_768, 305_260),
    ),
    "tinystories": KnownDataset(
        url="https://huggingface.co/datasets/roneneldan/TinyStories/resolve/main/TinyStories_all_data.tar.gz",
        file="TinyStories_all_data.tar.gz",
        recipe="tinystories",
        tokens=(19_043_638, 925_653_391),
        unpack=unpack_shards,
    ),
    "quijote": KnownDataset(
        url="https://www.gutenberg.org/cache/epub/2000/pg2000.txt",
        file="pg2000.txt",
        unpack=strip_gutenberg,
    ),
}
GPT2 = "gpt2"
_TOKENIZERS = {
    GPT2: KnownDataset(
        url="https://huggingface.co/openai-community/gpt2/resolve/main/tokenizer.json",
        file="tokenizer.json",
    )
}
_KNOWN = DATASETS | _TOKENIZERS


def read_urls(given: list[str]) -> dict[str, str]:
    """The addresses of `NAME=URL` texts by name.

    Raises:
        ConfigError: another form, or a name that is not known.
    """
    urls = {}
    for text in given:
        name, _, url = text.partition("=")
        if name not in _KNOWN or not url:
            raise ConfigError(f"--url {text}: expected NAME=URL, NAME one of {', '.join(_KNOWN)}")
        urls[name] = url
    return urls


def fetch(name: str, urls: Mapping[str, str], progress: Progress) -> Path:
    """The file or folder of a known data set or tokenizer, from the cache where it is there.

    urls: addresses to use instead of the known ones, by name.

    Raises:
        DataError: no connection, no such file, or not the file that it must be.
    """
    known = _KNOWN[name]
    folder = cache_directory() / "datasets" / name
    target, record = folder / known.file, folder / f"{known.file}.sha256"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        expected = known.sha256 or (record.read_text().strip() if record.exists() else None)
        if not (target.exists() and digest_file(target).sha256 == expected):
            shutil.rmtree(folder / "shards", ignore_errors=True)
            _download(urls.get(name, known.url), target, expected, progress)
        try:
            made = known.unpack(target, folder) if known.unpack else target
        except DataError:
            target.unlink()
            raise
        if expected is None:  # and only now, as the first download might have been anything
            write_atomic(record, (digest_file(target).sha256 + "\n").encode())
        return made
    except OSError as error:
        raise DataError(
            f"{folder}: cannot keep the download: {error.strerror or one_line(error)}; name "
            "another place with TREADLE_CACHE"
        ) from None


# ---- downloading ----------------------------------------------------------------------------


def _download(url: str, target: Path, sha256: str | None, progress: Progress) -> None:
    """Fetches a file to `target`, in one rename once its digest is right."""
    part, note = (
        target.with_name(target.name + ".part"),
        target.with_name(target.name + ".part.json"),
    )
    misses = 0
    while True:
        before = part.stat().st_size if part.exists() else 0
        try:
            if _receive(url, part, note, progress):
                break
            reason = "the connection broke off"
        except urllib.error.HTTPError as error:
            if error.code == 416 and before:  # the part is not of the file that is there now
                part.unlink()
                continue
            raise DataError(f"{url}: {error.code} {error.reason}") from None
        except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError,
                ValueError) as error:  # fmt: skip
            reason = one_line(getattr(error, "reason", error))
        after = part.stat().st_size if part.exists() else 0
        misses = 0 if after > before else misses + 1
        if misses == _TRIES:
            raise DataError(f"{url}: cannot download: {reason}; run again to go on from here")
    found = digest_file(part).sha256
    if sha256 is not None and found != sha256:
        part.unlink()
        note.unlink(missing_ok=True)
        raise DataError(
            f"{url}: the file has SHA-256 {found}, expected {sha256}; it was changed or damaged, "
            "and is not kept"
        )
    os.replace(part, target)
    note.unlink(missing_ok=True)


def _receive(url: str, part: Path, note: Path, progress: Progress) -> bool:
    """Adds to `part` what it lacks; whether it is whole now. `note` remembers which version of
    the file it is a part of."""
    request = urllib.request.Request(url, headers={"Accept-Encoding": "identity"})
    start = part.stat().st_size if part.exists() else 0
    version = None
    with contextlib.suppress(OSError, ValueError):
        version = json.loads(note.read_bytes()).get(url)
    if start and version:
        request.add_header("Range", f"bytes={start}-")
        request.add_header("If-Range", version)
    with urllib.request.urlopen(request, timeout=_TIMEOUT) as response:
        going_on = response.status == 206 and response.headers.get("Content-Range", "").startswith(
            f"bytes {start}-"
        )
        start = start if going_on else 0
        length = response.headers.get("Content-Length")
        total = start + int(length) if length else 0
        version = response.headers.get("ETag") or response.headers.get("Last-Modified")
        weak = version is None or version.startswith("W/")
        write_atomic(note, json.dumps({} if weak else {url: version}).encode())
        with part.open("ab" if going_on else "wb") as file:
            while data := response.read(_READ):
                file.write(data)
                start += len(data)
                progress("downloading", start, total)
            file.flush()
            os.fsync(file.fileno())
    return not length or start == total
