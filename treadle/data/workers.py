"""What the processes of `prepare` do: clean batches of documents, and encode them.

    with Pool(threads) as pool:
        for result in pool.map(clean_batch, job, batches): ...

Results come in the order of the batches, so nothing depends on how many processes there are. A
process is started anew (spawned), not forked, and ends when the one that started it is gone.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np

from treadle.data.clean import Filters, Piece, clean_text, storable
from treadle.data.dedupe import signature
from treadle.data.shards import token_dtype
from treadle.data.tokenizer import Tokenizer
from treadle.errors import DataError

Task = TypeVar("Task")
Result = TypeVar("Result")
Job = TypeVar("Job")

_AHEAD = 3  # batches under way for each process, which bounds the memory they take


# ---- processes ------------------------------------------------------------------------------


class Pool:
    """Runs functions on batches in `threads` processes; with one, in this process."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._executor: ProcessPoolExecutor | None = None

    def map(
        self, function: Callable[[Job, Task], Result], job: Job, tasks: Iterable[Task]
    ) -> Iterator[tuple[Task, Result]]:
        """Each task with its result, in order; few tasks are taken before they are needed.

        Raises:
            DataError: a process was ended from outside, as the system does when memory is short.
        """
        if self.threads == 1:
            for task in tasks:
                yield task, function(job, task)
            return
        if self._executor is None:
            context = multiprocessing.get_context("spawn")
            self._executor = ProcessPoolExecutor(self.threads, context, _start_process)
        waiting: deque[tuple[Task, Future[Result]]] = deque()
        try:
            for task in tasks:
                waiting.append((task, self._executor.submit(function, job, task)))
                if len(waiting) >= _AHEAD * self.threads:
                    first, future = waiting.popleft()
                    yield first, future.result()
            while waiting:
                first, future = waiting.popleft()
                yield first, future.result()
        except BrokenProcessPool:
            raise DataError(
                "a worker process was ended from outside, perhaps for want of memory; try again "
                "with fewer --threads"
            ) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)


def _start_process() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group
    os.environ["RAYON_NUM_THREADS"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: Any) -> None:
    parent.join()
    os._exit(1)


# ---- cleaning -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cleaning:
    """What is done to every document.

    Attributes:
        folder: where clean texts are kept.
        clean: whether the texts are changed at all.
        signatures: whether near duplicates are looked for.
        characters: whether the characters in use are collected.
    """

    folder: Path
    filters: Filters
    clean: bool = True
    fix_encoding: bool = False
    signatures: bool = False
    characters: bool = False


@dataclass
class Cleaned:
    """A batch after cleaning. The texts that are kept lie one after another in a file of the
    folder, which is named after the process that wrote it.

    Attributes:
        reasons: why each text of the batch was dropped, or None.
        process, offset: which file, and where in it the first text lies.
        sizes: bytes of each text kept, uint32 [N].
        lengths: characters of each text kept, uint32 [N].
        digests: two halves of the 128-bit hash of each text kept, uint64 [N, 2].
        signatures: MinHash of each text kept, uint32 [N, 128], where asked for.
        examples: the beginning of each text dropped, by its place in the batch.
        changed: how many texts cleaning changed.
        characters: those in use, where asked for.
    """

    reasons: list[str | None]
    process: int
    offset: int
    sizes: np.ndarray
    lengths: np.ndarray
    digests: np.ndarray
    signatures: np.ndarray | None
    examples: dict[int, str] = field(default_factory=dict)
    changed: int = 0
    characters: frozenset[str] = frozenset()


EXAMPLE_LENGTH = 80


def clean_batch(job: Cleaning, pieces: Sequence[Piece]) -> Cleaned:
    """Cleans texts, drops those that the filters refuse, and keeps the others in the folder."""
    reasons: list[str | None] = []
    kept: list[bytes] = []
    lengths: list[int] = []
    digests = bytearray()
    signatures: list[np.ndarray] = []
    examples: dict[int, str] = {}
    changed = 0
    characters: set[str] = set()
    for place, piece in enumerate(pieces):
        if job.clean:
            clean = clean_text(piece.text, piece.first, piece.last, job.fix_encoding)
        else:
            clean = storable(piece.text)
        changed += clean != piece.text
        reason = job.filters.reason(clean, whole=piece.first and piece.last)
        reasons.append(reason)
        if reason is not None:
            examples[place] = piece.text[:EXAMPLE_LENGTH]
            continue
        data = clean.encode()
        kept.append(data)
        lengths.append(len(clean))
        # Line ends between sections do not make two equal texts differ.
        digests += blake2b(data.strip(), digest_size=16).digest()
        if job.signatures:
            signatures.append(signature(clean))
        if job.characters:
            characters.update(clean)
    with spool_path(job.folder, os.getpid()).open("ab") as spool:
        offset = spool.tell()
        spool.write(b"".join(kept))
    return Cleaned(
        reasons=reasons,
        process=os.getpid(),
        offset=offset,
        sizes=np.array([len(data) for data in kept], np.uint32),
        lengths=np.array(lengths, np.uint32),
        digests=np.frombuffer(bytes(digests), "<u8").reshape(-1, 2),
        signatures=np.stack(signatures) if signatures else None,
        examples=examples,
        changed=changed,
        characters=frozenset(characters),
    )


def spool_path(folder: Path, process: int) -> Path:
    """The file of clean texts that a process writes."""
    return folder / f"texts-{process}"


def read_texts(folder: Path, process: int, offset: int, sizes: np.ndarray) -> Iterator[str]:
    """Texts that lie one after another in a file of clean texts."""
    with spool_path(folder, process).open("rb") as spool:
        spool.seek(offset)
        for size in sizes.tolist():
            yield spool.read(size).decode()


# ---- encoding -------------------------------------------------------------------------------

DROPPED, TRAIN, VAL = 0, 1, 2


@dataclass(frozen=True)
class Encoding:
    """How texts become ids.

    Attributes:
        tokenizer, sha256: the path of its tokenizer.json, and the digest of that.
        folder: where the clean texts are.
        plain: whether special tokens in a text are text like any other.
    """

    tokenizer: Path
    sha256: str
    folder: Path
    plain: bool = False


class Stored(NamedTuple):
    """Clean texts that lie one after another: where, the bytes of each, where each goes (`DROPPED`,
    `TRAIN` or `VAL`, uint8 [N]), and whether it begins a document there (bool [N])."""

    process: int
    offset: int
    sizes: np.ndarray
    targets: np.ndarray
    begins: np.ndarray


class Encoded(NamedTuple):
    """The ids for training and for validation, and the bytes of text that each stands for."""

    train: np.ndarray
    val: np.ndarray
    train_bytes: int
    val_bytes: int


def encode_stored(job: Encoding, stored: Stored) -> Encoded:
    """The ids of clean texts, with the separator before each that begins a document."""
    texts = read_texts(job.folder, stored.process, stored.offset, stored.sizes)
    rows = zip(texts, stored.targets.tolist(), stored.begins.tolist(), strict=True)
    return _encode(job, rows)


def encode_texts(job: Encoding, texts: Sequence[tuple[str, int]]) -> Encoded:
    """The ids of documents, each with where it goes and the separator before it."""
    return _encode(job, ((text, target, True) for text, target in texts))


def _encode(job: Encoding, rows: Iterable[tuple[str, int, bool]]) -> Encoded:
    tokenizer, separator = _tokenizer(job.tokenizer, job.sha256)
    ids: dict[int, list[np.ndarray]] = {TRAIN: [], VAL: []}
    size = {TRAIN: 0, VAL: 0}
    for text, target, begins in rows:
        if target == DROPPED:
            continue
        if begins:
            ids[target].append(separator)
        ids[target].append(tokenizer.encode(text, job.plain))
        size[target] += len(text) if text.isascii() else len(text.encode())
    dtype = token_dtype(tokenizer.vocab_size)
    train, val = (
        np.concatenate(ids[target]).astype(dtype) if ids[target] else np.empty(0, dtype)
        for target in (TRAIN, VAL)
    )
    return Encoded(train, val, size[TRAIN], size[VAL])


@lru_cache(1)
def _tokenizer(path: Path, sha256: str) -> tuple[Tokenizer, np.ndarray]:
    tokenizer = Tokenizer.load(path)
    return tokenizer, tokenizer.encode(tokenizer.separator)
