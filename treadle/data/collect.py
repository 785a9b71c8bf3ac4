"""The first pass over a corpus: its documents are read, cleaned, kept on disk, and counted.

    with Pool(threads) as pool:
        documents = collect(reader, cleaning, pool)
        documents.drop_duplicates(threshold)
        documents.split(0.1)

What a `Collection` holds grows on disk, never in memory: the clean texts, a row of `ROW` for each,
and a byte for each that says where it goes (`DROPPED`, `TRAIN` or `VAL`).

A document goes to validation when its hash, as a fraction of the largest, is below the fraction
asked for. So it stays on its side whatever other documents there are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import IO

import numpy as np

from treadle.data.clean import LONG, Piece
from treadle.data.datasets import Progress
from treadle.data.dedupe import MINIMA, equal_pairs, near_pairs
from treadle.data.readers import Reader
from treadle.data.workers import (
    DROPPED,
    EXAMPLE_LENGTH,
    TRAIN,
    VAL,
    Cleaned,
    Cleaning,
    Pool,
    Stored,
    clean_batch,
    spool_path,
)

DUPLICATE, NEAR_DUPLICATE = "duplicate", "near duplicate"
EXAMPLES = 3  # of each reason for dropping a document
_BATCH_CHARACTERS, _BATCH_PIECES = 1 << 19, 2048
_PIECE = 1 << 16

ROW = np.dtype(
    [
        ("digest", "<u8", (2,)),
        ("offset", "<u8"),
        ("process", "<u4"),
        ("size", "<u4"),
        ("file", "<u4"),
        ("record", "<u4"),
        ("follows", "?"),  # goes on where the row before ends
    ]
)


@dataclass
class Example:
    """A document that was dropped: where it stood, and its beginning."""

    where: str
    text: str


@dataclass
class Totals:
    """What was read: `documents`, of which long ones count once; `pieces`, after long ones were
    cut; `characters` and `bytes` that were kept; how many `pieces` cleaning changed."""

    documents: int = 0
    pieces: int = 0
    characters: int = 0
    bytes: int = 0
    changed: int = 0


@dataclass
class Collection:
    """The clean documents of a corpus.

    Attributes:
        folder: holds the files.
        reader: with the records of the input files.
        totals: what was read and kept, before duplicates were dropped.
        dropped: how many pieces were dropped, by reason.
        examples: some of them, by reason.
        batches: the rows where one batch ends and the next begins.
        characters: those in use, where the cleaning collects them.
        rows: memory map of ROW [N].
        targets: memory map of uint8 [N]: where each row goes.
    """

    folder: Path
    reader: Reader
    totals: Totals = field(default_factory=Totals)
    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[Example]] = field(default_factory=dict)
    batches: list[int] = field(default_factory=lambda: [0])
    characters: set[str] = field(default_factory=set)
    rows: np.ndarray = field(default_factory=lambda: np.empty(0, ROW))
    targets: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint8))

    # ---- filling ----------------------------------------------------------------------------

    def _note(self, reason: str, file: int, record: int, text: str) -> None:
        self.dropped[reason] += 1
        found = self.examples.setdefault(reason, [])
        if len(found) < EXAMPLES:
            name = self.reader.sources[file].name
            found.append(Example(f"{name}:{record}", text[:EXAMPLE_LENGTH]))

    def _add(
        self, pieces: list[Piece], cleaned: Cleaned, last_kept: bool
    ) -> tuple[np.ndarray, bool]:
        """The rows of a batch; `last_kept` says whether the last piece of the batch before was."""
        self.totals.pieces += len(pieces)
        self.totals.documents += sum(piece.first for piece in pieces)
        self.totals.characters += int(cleaned.lengths.sum())
        self.totals.bytes += int(cleaned.sizes.sum())
        self.totals.changed += cleaned.changed
        self.characters |= cleaned.characters
        rows = np.zeros(len(cleaned.sizes), ROW)
        rows["digest"], rows["size"] = cleaned.digests, cleaned.sizes
        rows["process"] = cleaned.process
        rows["offset"] = cleaned.offset + np.cumsum(cleaned.sizes, dtype=np.uint64)
        rows["offset"] -= cleaned.sizes
        kept = 0
        for place, (piece, reason) in enumerate(zip(pieces, cleaned.reasons, strict=True)):
            if reason is None:
                rows[kept]["file"], rows[kept]["record"] = piece.file, piece.record
                rows[kept]["follows"] = last_kept and not piece.first
                kept += 1
            else:
                self._note(reason, piece.file, piece.record, cleaned.examples[place])
            last_kept = reason is None
        return rows, last_kept

    def _map(self) -> None:
        count = self.batches[-1]
        if count:
            self.rows = np.memmap(self.folder / "rows", ROW, "r", shape=count)
            self.targets = np.memmap(self.folder / "targets", np.uint8, "w+", shape=count)
            self.targets[:] = TRAIN

    def close(self) -> None:
        """Lets go of the files, so that they can be deleted."""
        self.rows, self.targets = np.empty(0, ROW), np.empty(0, np.uint8)

    # ---- dropping and splitting -------------------------------------------------------------

    def drop_long(self, ranges: list[tuple[int, int]]) -> None:
        """Drops the documents of some ranges of rows, for being too long."""
        for start, stop in ranges:
            self.targets[start:stop] = DROPPED
            self._note_row(LONG, start)
            self.dropped[LONG] += stop - start - 1

    def drop_duplicates(self, near: float = 0) -> None:
        """Drops all but the first of equal documents; with `near` above 0, also those whose
        estimated similarity to an earlier one is at least that."""
        digests = self.rows["digest"]
        for later, _ in equal_pairs(digests[:, 0], digests[:, 1]):
            self._drop(DUPLICATE, later)
        if near and len(self.rows):
            path = self.folder / "signatures"
            signatures = np.memmap(path, np.uint32, "r", shape=(len(self.rows), MINIMA))
            for later, _ in near_pairs(signatures, near, self.folder):
                self._drop(NEAR_DUPLICATE, later)

    def _drop(self, reason: str, places: np.ndarray) -> None:
        places = np.unique(places[self.targets[places] != DROPPED])
        if not len(places):
            return
        self.targets[places] = DROPPED
        for place in places[:EXAMPLES].tolist():
            self._note_row(reason, place)
        self.dropped[reason] += len(places[EXAMPLES:])

    def _note_row(self, reason: str, place: int) -> None:
        row = self.rows[place]
        (text,) = self.texts(np.array([place]))
        self._note(reason, int(row["file"]), int(row["record"]), text)

    def split(self, fraction: float) -> None:
        """Says of each document whether it is for training or for validation.

        Where every single one would be for validation, all are for training.
        """
        limit = np.uint64(min(int(fraction * 2**64), 2**64 - 1))
        for _ in range(2):
            count = 0
            for start in range(0, len(self.rows), _PIECE):
                targets = self.targets[start : start + _PIECE]
                is_val = self.rows["digest"][start : start + _PIECE, 0] < limit
                targets[targets != DROPPED] = TRAIN
                targets[(targets != DROPPED) & is_val] = VAL
                count += int(np.count_nonzero(targets == TRAIN))
            if count:
                return
            limit = np.uint64(0)

    # ---- reading ----------------------------------------------------------------------------

    def count(self, target: int) -> tuple[int, int]:
        """How many rows go somewhere, and their bytes."""
        count = size = 0
        for start in range(0, len(self.rows), _PIECE):
            chosen = self.targets[start : start + _PIECE] == target
            count += int(np.count_nonzero(chosen))
            size += int(self.rows["size"][start : start + _PIECE][chosen].sum(dtype=np.uint64))
        return count, size

    def texts(self, places: np.ndarray) -> Iterator[str]:
        """The texts of some rows."""
        with ExitStack() as stack:
            files: dict[int, IO[bytes]] = {}
            for row in self.rows[places]:
                process = int(row["process"])
                if process not in files:
                    file = spool_path(self.folder, process).open("rb")
                    files[process] = stack.enter_context(file)
                files[process].seek(int(row["offset"]))
                yield files[process].read(int(row["size"])).decode()

    def sample(self, limit: int) -> Iterator[str]:
        """Texts for training of about `limit` bytes in all, in order: all of them where they are
        no more, else those whose hash is low, without the line ends around them.

        The half of the hash that decides is not the one that splits.
        """
        _, size = self.count(TRAIN)
        share = np.uint64(min(int(limit / max(size, 1) * 2**64), 2**64 - 1))
        for start in range(0, len(self.rows), _PIECE):
            piece = slice(start, start + _PIECE)
            chosen = self.targets[piece] == TRAIN
            if size > limit:
                chosen &= self.rows["digest"][piece, 1] < share
            for text in self.texts(start + np.flatnonzero(chosen)):
                yield text.strip("\n")

    def stored(self) -> Iterator[Stored]:
        """The texts in order, in batches to be encoded."""
        previous = DROPPED
        for start, stop in pairwise(self.batches):
            if start == stop:
                continue
            rows, targets = self.rows[start:stop], np.array(self.targets[start:stop])
            before = np.concatenate([[previous], targets[:-1]])
            begins = ~rows["follows"] | (before != targets)
            previous = int(targets[-1])
            yield Stored(
                process=int(rows["process"][0]),
                offset=int(rows["offset"][0]),
                sizes=np.array(rows["size"]),
                targets=targets,
                begins=begins,
            )


def collect(
    reader: Reader, cleaning: Cleaning, pool: Pool, progress: Progress, name: str
) -> Collection:
    """Reads, cleans and keeps the documents of a reader.

    `name` is what the pass is called in calls of `progress`.

    Raises:
        DataError: files that cannot be read.
    """
    collection = Collection(cleaning.folder, reader)
    cleaning.folder.mkdir(parents=True, exist_ok=True)
    long_documents = _LongDocuments(cleaning.filters.max_chars)
    last_kept = False
    with (
        (cleaning.folder / "rows").open("wb") as rows_file,
        (cleaning.folder / "signatures").open("wb") as signatures_file,
    ):
        tasks = _batches(collection, reader)
        for pieces, cleaned in pool.map(clean_batch, cleaning, tasks):
            rows, last_kept = collection._add(pieces, cleaned, last_kept)
            long_documents.add(collection.batches[-1], pieces, cleaned)
            rows_file.write(rows.tobytes())
            _write(signatures_file, cleaned.signatures)
            collection.batches.append(collection.batches[-1] + len(rows))
            progress(name, reader.position, reader.total)
    collection._map()
    collection.drop_long(long_documents.found)
    return collection


def _write(file: IO[bytes], signatures: np.ndarray | None) -> None:
    if signatures is not None:
        file.write(signatures.tobytes())


def _batches(collection: Collection, reader: Reader) -> Iterator[list[Piece]]:
    """Pieces in batches; those without a text are counted at once."""
    batch: list[Piece] = []
    size = 0
    for piece in reader.pieces():
        if piece.problem is not None:
            collection.totals.documents += 1
            detail = reader.records[piece.file].problem or ""
            collection._note(piece.problem, piece.file, piece.record, detail)
            continue
        batch.append(piece)
        size += len(piece.text)
        if size >= _BATCH_CHARACTERS or len(batch) == _BATCH_PIECES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class _LongDocuments:
    """Finds the rows of documents that came as several pieces and are too long in all.

    Attributes:
        found: ranges of rows.
    """

    def __init__(self, limit: int) -> None:
        self.found: list[tuple[int, int]] = []
        self._limit = limit
        self._start = self._length = 0

    def add(self, row: int, pieces: list[Piece], cleaned: Cleaned) -> None:
        """Takes a batch; `row` is the place of its first row."""
        if not self._limit:
            return
        lengths = iter(cleaned.lengths.tolist())
        for piece, reason in zip(pieces, cleaned.reasons, strict=True):
            if piece.first:
                self._start, self._length = row, 0
            if reason is None:
                row += 1
                self._length += next(lengths)
            if piece.last and self._length > self._limit and row > self._start:
                self.found.append((self._start, row))
