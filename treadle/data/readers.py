"""From inputs to documents, as a stream of bounded memory.

    find_sources(inputs)     the files of paths, directories and globs, in a fixed order
    Reader(sources).pieces() their documents; a long one comes as several pieces in order

What a document is: a `.txt` or `.md` file, a line of `.jsonl`, a row of `.parquet`. Inside of each,
`<|endoftext|>` ends a document too. A document of more than `LONG` characters is cut into sections
of about `SECTION`, each at a paragraph's end where there is one; where a cut falls depends on the
text before it alone, so a text that grows at its end keeps its first sections.

Files ending in `.gz` or `.zst` besides are decompressed as they are read.
"""

from __future__ import annotations

import codecs
import glob
import gzip
import io
import json
import re
import shutil
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from treadle.data.clean import NO_TEXT, NOT_JSON, NOT_TEXT, Piece
from treadle.data.corpus import byte_order_mark, files_under
from treadle.data.extras import require
from treadle.data.tokenizer import END_OF_TEXT
from treadle.errors import ConfigError, DataError
from treadle.files import FileDigest, digest_file, one_line

KINDS = {".txt": "text", ".md": "text", ".jsonl": "jsonl", ".parquet": "parquet"}
FORMATS = ("auto", *dict.fromkeys(KINDS.values()))
COMPRESSIONS = (".gz", ".zst")
SUFFIXES = tuple(kind + packed for kind in KINDS for packed in ("", *COMPRESSIONS))

LONG = 1 << 14
SECTION = 1 << 12
_SLACK = 1 << 11  # characters after a section's length in which a good place to cut is looked for
_READ = 1 << 19
_WESTERN, _AS_TIDY = "cp1252", 0.01
_SAMPLE = 1 << 16  # bytes around the first bad one that a legacy encoding is guessed from


# ---- which files ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """A file to read: where it is, its name in reports, what it holds, how it is compressed."""

    path: Path
    name: str
    kind: str
    compression: str = ""


def source_of(path: Path, name: str | None = None, kind: str = "auto") -> Source:
    """What the suffixes of a file tell; a file with none that is known is text."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    compression = suffixes.pop() if suffixes and suffixes[-1] in COMPRESSIONS else ""
    if kind == "auto":
        kind = KINDS.get(suffixes[-1] if suffixes else "", "text")
    return Source(path, name or path.as_posix(), kind, compression)


def find_sources(
    inputs: Iterable[str], kind: str = "auto", suffixes: tuple[str, ...] = SUFFIXES
) -> list[Source]:
    """The files of some inputs, each once: a file as it is, a directory's files at any depth whose
    names end in one of `suffixes` sorted by path, a glob's matches sorted.

    Raises:
        DataError: an input that names nothing.
    """
    found: dict[Path, Source] = {}
    for given in inputs:
        if not given:
            raise DataError("an input is empty; give a file, a directory or a glob")
        path = Path(given)
        if path.is_dir():
            files = files_under(path, suffixes)
            if not files:
                endings = (s for s in suffixes if not s.endswith(COMPRESSIONS))
                raise DataError(f"{given}: holds no file ending in {', '.join(endings)}")
        elif path.exists():
            files = [path]
        else:
            matches = glob.glob(given, recursive=True) if glob.has_magic(given) else []
            files = sorted((Path(m) for m in matches if Path(m).is_file()), key=lambda f: f.parts)
            if not files:
                raise DataError(
                    f"{given}: no such file or directory, and no known data set of that name"
                )
        for file in files:
            found.setdefault(file.resolve(), source_of(file, kind=kind))
    return list(found.values())


# ---- opening --------------------------------------------------------------------------------


@contextmanager
def open_source(source: Source) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """The decompressed stream of a file, and the file itself, whose position tells how far it is.

    Raises:
        DataError: a file that cannot be read or decompressed, also while it is being read.
    """
    damage: tuple[type[Exception], ...] = (OSError, EOFError, zlib.error)
    if source.compression == ".zst":
        zstandard = require("zstandard", f"{source.name}: reading .zst")
        damage += (zstandard.ZstdError,)
    try:
        with source.path.open("rb") as raw:
            if source.compression == ".gz":
                with gzip.GzipFile(fileobj=raw) as unpacked:
                    yield unpacked, raw  # type: ignore[misc]
            elif source.compression == ".zst":
                reader = zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True)
                yield io.BufferedReader(reader, _READ), raw
            else:
                yield raw, raw
    except damage as error:
        reason = getattr(error, "strerror", None) or one_line(error)
        raise DataError(f"{source.name}: cannot read: {reason}") from None


# ---- encodings ------------------------------------------------------------------------------


class NotTextError(Exception):
    """Says what is wrong with the bytes of a file."""


class Encoding(NamedTuple):
    """How the bytes of a file are read: past its mark, with what is done about bad bytes."""

    name: str
    mark: bytes = b""
    errors: str = "strict"

    def __str__(self) -> str:
        return self.name if self.errors == "strict" else f"{self.name} with damaged bytes"


def check_encoding(name: str) -> None:
    """ConfigError for a name that is neither "auto" nor an encoding of texts."""
    try:
        "".encode("ascii" if name == "auto" else name)
    except LookupError:
        raise ConfigError(
            f"--encoding {name}: no such encoding; try auto, utf-8, cp1252 or latin-1"
        ) from None


def find_encoding(source: Source, asked: str) -> Encoding:
    """The encoding in which the whole of a file is text.

    With "auto": what a byte-order mark tells; UTF-8; UTF-8 with some damaged bytes; else the
    best guess of charset-normalizer. A name is taken as it is.

    Raises:
        DataError: bytes that are not in the encoding asked for, with the offset of the first.
        NotTextError: the same where the encoding was left open.
    """
    with open_source(source) as (stream, _):
        mark, name = byte_order_mark(stream.read(4))
    if asked != "auto":
        if not (mark and codecs.lookup(asked).name.startswith("utf")):
            mark, name = b"", asked
        if fault := _first_fault(source, name, len(mark)):
            raise DataError(f"{source.name}: {fault[1]}; use --encoding auto, or convert the file")
        return Encoding(name, mark)
    fault = _first_fault(source, name, len(mark))
    if fault is None:
        return Encoding(name, mark)
    offset, problem = fault
    if name != "utf-8" or problem.startswith("zero"):
        raise NotTextError(problem)
    with open_source(source) as (stream, _):
        _skip(stream, max(0, offset - _SAMPLE // 2))
        sample = stream.read(_SAMPLE)
    # One bad byte among many good letters of UTF-8 is damage; no other encoding looks like that.
    text = sample.decode("utf-8", "replace")
    bad = text.count("\ufffd")
    if len(text) - len(text.encode("ascii", "ignore")) > 5 * bad:
        return Encoding("utf-8", mark, "replace")
    if mark:
        raise NotTextError(problem)
    detector = require("charset_normalizer", f"{source.name}: {problem}; guessing its encoding")
    guesses = detector.from_bytes(sample)
    best = guesses.best()
    if best is None:
        raise NotTextError(problem)
    # Western texts look as tidy in the neighbours of their code page, and these come first.
    close = [g.encoding for g in guesses if g.chaos <= best.chaos + _AS_TIDY]
    guess = _WESTERN if _WESTERN in close else best.encoding
    if fault := _first_fault(source, guess, 0):
        raise NotTextError(fault[1])
    return Encoding(guess)


@contextmanager
def open_text(source: Source, encoding: Encoding) -> Iterator[tuple[Iterator[str], IO[bytes]]]:
    """The text of a file in chunks, with LF line ends, and the file itself."""
    with open_source(source) as (stream, raw):
        _skip(stream, len(encoding.mark))
        # Universal line ends: CRLF and a lone CR come out as LF.
        reader = io.TextIOWrapper(stream, encoding.name, encoding.errors)
        yield iter(lambda: reader.read(_READ), ""), raw


def _first_fault(source: Source, encoding: str, skip: int) -> tuple[int, str] | None:
    """The offset of the first byte that is not text in an encoding, and what it is."""
    decoder = codecs.getincrementaldecoder(encoding)()
    narrow = not codecs.lookup(encoding).name.startswith(("utf-16", "utf-32"))
    with open_source(source) as (stream, _):
        done = len(_skip(stream, skip))
        while True:
            data = stream.read(_READ)
            if narrow and b"\0" in data:
                offset = done + data.index(0)
                return offset, (
                    f"zero byte at offset {offset}: a binary file, or UTF-16 without byte-order "
                    "mark"
                )
            held = decoder.getstate()[0]
            try:
                decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                offset = done - len(held) + error.start
                byte = (held + data)[error.start]
                return offset, f"byte 0x{byte:02X} at offset {offset} is not {encoding.upper()}"
            if not data:
                return None
            done += len(data)


def _skip(stream: IO[bytes], count: int) -> bytes:
    """Reads on; returns the last bytes passed."""
    data = b""
    while count > 0 and (data := stream.read(min(count, _READ))):
        count -= len(data)
    return data


# ---- cutting --------------------------------------------------------------------------------


def split_documents(chunks: Iterable[str]) -> Iterator[tuple[str, bool, bool]]:
    """Cuts a text that comes in chunks into (piece, whether it begins, whether it ends) of
    documents, whatever the chunks."""
    rest, first, is_long, found = "", True, False, False
    for part, ends in _at_end_of_text(chunks):
        rest = rest + part if rest else part
        start = 0
        is_long = is_long or len(rest) > LONG
        while is_long and len(rest) - start > SECTION + _SLACK:
            cut = _section_end(rest, start)
            yield rest[start:cut], first, False
            first, start = False, cut
        rest = rest[start:]
        if ends:
            # Nothing before, between or after two markers is no document.
            if rest.strip() or not first:
                found = True
                yield rest, first, True
            rest, first, is_long = "", True, False
    if not found:
        yield "", True, True


def _at_end_of_text(chunks: Iterable[str]) -> Iterator[tuple[str, bool]]:
    tail = ""
    for chunk in chunks:
        *whole, tail = (tail + chunk).split(END_OF_TEXT)
        for text in whole:
            yield text, True
        keep = len(END_OF_TEXT) - 1  # what may be the beginning of the marker
        if len(tail) > keep:
            yield tail[:-keep], False
            tail = tail[-keep:]
    yield tail, True


_PLACES = tuple(map(re.compile, (r"\n\n+", r"\n", r"(?<=[.!?]) ", r" ")))


def _section_end(text: str, start: int) -> int:
    """Where the section that begins at `start` ends, by the next SECTION + _SLACK characters."""
    low, high = start + SECTION, start + SECTION + _SLACK
    for place in _PLACES:
        if match := place.search(text, low, high):
            return match.end()
    return high


# ---- reading --------------------------------------------------------------------------------


_WAITING = 64  # files whose digests may be behind


@dataclass
class FileRecord:
    """What is known of a file once it is read."""

    name: str
    bytes: int
    sha256: str
    encoding: str | None = None
    problem: str | None = None

    @property
    def is_legacy(self) -> bool:
        """Whether its bytes were not plain UTF-8."""
        return self.encoding not in (None, "utf-8")


def _note_digest(record: FileRecord, future: Future[FileDigest]) -> None:
    digest = future.result()
    record.bytes, record.sha256 = digest.size, digest.sha256


class Reader:
    """Reads the documents of some files.

    Attributes:
        sources: the files in order.
        records: what is known of each, complete once `pieces` is exhausted.
        total, position: bytes of all files, and how many of them were read.
    """

    def __init__(
        self, sources: list[Source], folder: Path, text_key: str = "text", encoding: str = "auto"
    ) -> None:
        """`folder` takes files that must be decompressed before they are read."""
        check_encoding(encoding)
        self.sources, self.folder = sources, folder
        self.text_key, self.encoding = text_key, encoding
        self.records: list[FileRecord] = []
        try:
            sizes = [source.path.stat().st_size for source in sources]
        except OSError as error:
            raise DataError(f"{error.filename}: cannot read: {error.strerror}") from None
        self.total, self.position = sum(sizes), 0

    def pieces(self) -> Iterator[Piece]:
        """The documents of all files.

        Raises:
            DataError: a file that cannot be read, or is not in the encoding asked for.
        """
        read = {"text": self._text, "jsonl": self._jsonl, "parquet": self._parquet}
        waiting: deque[tuple[FileRecord, Future[FileDigest]]] = deque()
        # Hashing leaves Python's lock alone, so it costs this thread nothing.
        with ThreadPoolExecutor(1) as hasher:
            before = 0
            for number, source in enumerate(self.sources):
                self.records.append(FileRecord(source.name, 0, ""))
                waiting.append((self.records[-1], hasher.submit(digest_file, source.path)))
                yield from read[source.kind](number, source)
                before += source.path.stat().st_size
                self.position = before
                while waiting and (waiting[0][1].done() or len(waiting) == _WAITING):
                    _note_digest(*waiting.popleft())
            while waiting:
                _note_digest(*waiting.popleft())

    def _text(self, number: int, source: Source) -> Iterator[Piece]:
        try:
            encoding = find_encoding(source, self.encoding)
        except NotTextError as error:
            self.records[number].problem = str(error)
            yield Piece("", number, 1, problem=NOT_TEXT)
            return
        self.records[number].encoding = str(encoding)
        with open_text(source, encoding) as (chunks, raw):
            yield from self._cut(number, 1, self._followed(chunks, raw))

    def _jsonl(self, number: int, source: Source) -> Iterator[Piece]:
        with open_source(source) as (stream, raw):
            for row, line in enumerate(self._followed(stream, raw), 1):
                if not line.strip():
                    continue
                try:
                    named = line if self.encoding == "auto" else line.decode(self.encoding)
                    values = json.loads(named)
                except (ValueError, RecursionError):
                    yield Piece("", number, row, problem=NOT_JSON)
                    continue
                text = values.get(self.text_key) if isinstance(values, dict) else None
                yield from self._field(number, row, text)

    def _parquet(self, number: int, source: Source) -> Iterator[Piece]:
        parquet = require("pyarrow.parquet", f"{source.name}: reading .parquet")
        path, key = source.path, self.text_key
        if source.compression:
            path = self.folder / "unpacked.parquet"
            with open_source(source) as (stream, _), path.open("wb") as unpacked:
                shutil.copyfileobj(stream, unpacked, _READ)
        try:
            with parquet.ParquetFile(path) as file:
                names = file.schema_arrow.names
                if key not in names:
                    raise DataError(
                        f"{source.name}: no column {key}; it has {', '.join(names)} (--text-key)"
                    )
                row = 0
                for batch in file.iter_batches(batch_size=256, columns=[key]):
                    for text in batch.column(0).to_pylist():
                        row += 1
                        yield from self._field(number, row, text)
        except (OSError, ValueError) as error:  # the library's errors derive from these
            raise DataError(f"{source.name}: not a Parquet file: {one_line(error)}") from None
        finally:
            if source.compression:
                path.unlink()

    def _field(self, number: int, row: int, text: Any) -> Iterator[Piece]:
        if not isinstance(text, str):
            yield Piece("", number, row, problem=NO_TEXT)
        elif len(text) <= LONG and END_OF_TEXT not in text and "\r" not in text:
            yield Piece(text, number, row)
        else:
            yield from self._cut(number, row, [text.replace("\r\n", "\n").replace("\r", "\n")])

    def _cut(self, number: int, record: int, chunks: Iterable[str]) -> Iterator[Piece]:
        step = 1 if self.sources[number].kind == "text" else 0
        for text, first, last in split_documents(chunks):
            yield Piece(text, number, record, first, last)
            record += step * last

    def _followed(self, items: Iterable[Any], raw: IO[bytes]) -> Iterator[Any]:
        before = self.position
        for item in items:
            self.position = before + raw.tell()
            yield item
