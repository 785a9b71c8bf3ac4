"""From a path to tokens: texts are read, split, tokenised, and kept in a cache.

    load_corpus(path)                    the texts of a file or a directory
    prepare_cached(path, data)           their tokens, from the cache where it has them
    open_data(config)                    both ends at once: the filled config and its dataset

What a text is. Files are read as bytes and decoded here, so the locale has no say:

- UTF-8, with or without a byte-order mark; UTF-16 and UTF-32 with one.
- CRLF and a lone CR become LF.
- Bytes that are not UTF-8 (lone surrogates included) and zero bytes are refused, with the name of
  the file and the offset of the byte; so is a file of nothing but white space.
- A directory is its `.txt` and `.md` files at any depth, sorted by path; names that begin with a
  dot and files of white space are left out. Each is a document.

The last part of the text, by characters, is for validation, so that every tokenizer sees the same
two texts. The cache is a directory for each digest of (input bytes, settings):

    <cache>/tokens/<key>/   train.bin  val.bin  tokenizer.json  metadata.json  stamp.json
    <cache>/tokens/index/   size and time of the inputs -> their digest

`TREADLE_CACHE` names the cache; its default is `treadle` in the user's cache directory.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import os
import secrets
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from treadle.config import (
    MODEL_TOKENIZER,
    TOKENIZERS,
    Config,
    DataConfig,
    fill_from_corpus,
    with_values,
)
from treadle.data.sampler import too_short
from treadle.data.shards import id_range, pieces, read_tokens, write_tokens
from treadle.data.tokenizer import BLANK_LINE, TOKENIZER_FILE, Tokenizer
from treadle.errors import ConfigError, CorruptError, DataError
from treadle.files import sync_directory, write_atomic

TEXT_SUFFIXES = (".txt", ".md")
TRAIN_FILE, VAL_FILE, METADATA_FILE = "train.bin", "val.bin", "metadata.json"
_STAMP_FILE = "stamp.json"
_CACHE_FORMAT = 1
_FRESH_NS = 2_000_000_000  # file times may be this coarse, so a younger file is not trusted

# UTF-32 stands first, because its little-endian mark begins with that of UTF-16.
_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)


# ---- texts ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class CorpusReport:
    """What was read."""

    files: int
    bytes: int
    characters: int
    empty_files: int
    converted_files: int
    sha256: str

    def __str__(self) -> str:
        line = f"{self.files} file{'s' * (self.files != 1)}, {self.characters:,} characters"
        if self.empty_files:
            line += f", {self.empty_files} empty left out"
        if self.converted_files:
            line += f", {self.converted_files} converted to UTF-8 with LF"
        return line


@dataclass(frozen=True)
class Corpus:
    """Documents, each a text of UTF-8 characters with LF line ends, and the report on them."""

    documents: list[str]
    report: CorpusReport

    def split(self, val_fraction: float) -> tuple[list[str], list[str]]:
        """The documents for training and for validation, cut by characters."""
        cut = int(self.report.characters * (1 - val_fraction))
        train, val = [], []
        for text in self.documents:
            train.append(text[:cut])
            val.append(text[cut:])
            cut = max(0, cut - len(text))
        return [text for text in train if text], [text for text in val if text]


def load_corpus(path: str | os.PathLike[str]) -> Corpus:
    """The documents of a text file, or of a directory of them.

    Raises:
        DataError: nothing to read, or a file that is not text; the policy stands above.
    """
    documents = []
    digest = hashlib.sha256()
    files = text_files(path)
    size = converted = 0
    for file in files:
        data = _read_bytes(file)
        text = decode_text(data, str(file))
        # Lengths keep apart what concatenation would not.
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
        size += len(data)
        converted += data != text.encode()
        if text and not text.isspace():
            documents.append(text)
    if not documents:
        what = f"all {len(files)} text files are" if Path(path).is_dir() else "the file is"
        raise DataError(f"{path}: {what} empty or white space; give a text to train on")
    report = CorpusReport(
        files=len(files),
        bytes=size,
        characters=sum(map(len, documents)),
        empty_files=len(files) - len(documents),
        converted_files=converted,
        sha256=digest.hexdigest(),
    )
    return Corpus(documents, report)


def text_files(path: str | os.PathLike[str]) -> list[Path]:
    """The files of a corpus in the order in which they are read.

    Raises:
        DataError: no such path, or a directory without texts.
    """
    path = Path(path)
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise DataError(f"{path}: no such file or directory; give a text file or a directory")
    found = files_under(path, TEXT_SUFFIXES)
    if not found:
        raise DataError(f"{path}: holds no {' or '.join(TEXT_SUFFIXES)} file and no {TRAIN_FILE}")
    return found


def files_under(folder: str | os.PathLike[str], suffixes: tuple[str, ...]) -> list[Path]:
    """The files at any depth whose names end in one of `suffixes`, sorted by path; names that
    begin with a dot are left out.

    Raises:
        DataError: a folder that cannot be read.
    """
    found = []
    for inside, folders, names in os.walk(folder, onerror=_cannot_read):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [
            Path(inside, name)
            for name in names
            if name.lower().endswith(suffixes) and not name.startswith(".")
        ]
    return sorted((file for file in found if file.is_file()), key=lambda file: file.parts)


def byte_order_mark(data: bytes) -> tuple[bytes, str]:
    """The mark that some bytes begin with and the encoding it tells; no mark tells UTF-8."""
    return next(((mark, name) for mark, name in _MARKS if data.startswith(mark)), (b"", "utf-8"))


def decode_text(data: bytes, where: str) -> str:
    """The text of some bytes, by the policy above; `where` names them in errors.

    Raises:
        DataError: not text, with the offset of the first bad byte.
    """
    mark, encoding = byte_order_mark(data)
    if encoding == "utf-8" and b"\0" in data:
        raise DataError(
            f"{where}: zero byte at offset {data.index(0)}: a binary file, or UTF-16 without "
            "byte-order mark; give UTF-8 text"
        )
    try:
        text = data[len(mark) :].decode(encoding)
    except UnicodeDecodeError as error:
        start = len(mark) + error.start
        raise DataError(
            f"{where}: byte 0x{data[start]:02X} at offset {start} is not {encoding.upper()}; "
            "convert the file to UTF-8"
        ) from None
    if "\0" in text:
        raise DataError(f"{where}: zero character at position {text.index(chr(0))}: not a text")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot read: {error.strerror}") from None


def _cannot_read(error: OSError) -> NoReturn:
    raise DataError(f"{error.filename}: cannot read: {error.strerror}") from None


# ---- datasets -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dataset:
    """The tokens of a run.

    Attributes:
        train, val: ids [N], memory maps of uint16, uint32 or int32; `val` may be empty.
        tokenizer: the tokenizer of the ids, or None where token files came without one.
        vocab_size: one more than the largest id that may occur.
        corpus_bytes: size of the text, or of the token files where that is not known.
        file_digests: SHA-256 of each token file.
        metadata: the contents of metadata.json.
        from_cache: whether the tokens were there already.
        notes: lines that the person should see before training.
    """

    train: np.ndarray
    val: np.ndarray
    tokenizer: Tokenizer | None
    vocab_size: int
    corpus_bytes: int
    file_digests: tuple[str, ...]
    metadata: dict[str, Any] = field(default_factory=dict)
    from_cache: bool = False
    notes: tuple[str, ...] = ()

    def digest(self) -> str:
        """Names the tokens, so that a resumed run knows whether its data are the same."""
        return _sha256("".join(self.file_digests).encode())

    def __str__(self) -> str:
        kind = self.tokenizer.kind if self.tokenizer else "no"
        return (
            f"{kind} tokenizer, {self.vocab_size:,} ids; {len(self.train):,} tokens to train on, "
            f"{len(self.val):,} for validation"
        )


def open_data(
    config: Config,
    cache_dir: str | os.PathLike[str] | None = None,
    tokenizer: Tokenizer | None = None,
) -> tuple[Config, Dataset]:
    """The dataset that a config names, and the config with every null that depends on it filled.

    tokenizer: the one that `data.tokenizer` "model" stands for.

    Raises:
        ConfigError: no `data.path`, or values that cannot work together.
        DataError: a corpus that cannot be used, or is too short for one window.
    """
    path = config.data.path
    if not path:
        raise ConfigError("data.path: null; give a text file or a directory (--data PATH)")
    config = fill_from_corpus(config, corpus_size(path), tokenised=is_tokenised(path))
    dataset = prepare_cached(path, config.data, cache_dir, tokenizer)
    if config.model.vocab_size is None:
        config = with_values(config, {"model.vocab_size": dataset.vocab_size})
    vocab_size = config.model.vocab_size
    assert vocab_size is not None
    if vocab_size < dataset.vocab_size:
        raise ConfigError(
            f"model.vocab_size: {vocab_size} is less than the {dataset.vocab_size} ids of the "
            "tokenizer; leave it null, or take the tokenizer that belongs to the model"
        )
    return config, fit_to_context(dataset, config.window)


def is_tokenised(path: str | os.PathLike[str]) -> bool:
    """Whether a path holds, or is, a file of tokens."""
    return bool(token_files(path))


def token_files(path: str | os.PathLike[str]) -> list[Path]:
    """The file of training tokens at a path and that of validation, if there is one; or none.

    They are `train.bin` and `val.bin` of a directory, or llm.c's `NAME_train.bin` and
    `NAME_val.bin`; the path of a `.bin` file names the one for training itself.

    Raises:
        DataError: a directory with the tokens of several data sets.
    """
    path = Path(path)
    if path.suffix == ".bin" and path.is_file():
        train = path
    elif (path / TRAIN_FILE).is_file():
        train = path / TRAIN_FILE
    else:
        found = sorted(path.glob(f"*_{TRAIN_FILE}")) if path.is_dir() else []
        if len(found) > 1:
            names = ", ".join(file.name for file in found)
            raise DataError(f"{path}: holds several data sets; give the path of one of {names}")
        if not found:
            return []
        (train,) = found
    if not train.name.endswith(TRAIN_FILE):
        return [train]
    val = train.with_name(train.name.removesuffix(TRAIN_FILE) + VAL_FILE)
    return [train, val] if val.is_file() else [train]


def corpus_size(path: str | os.PathLike[str]) -> int:
    """Bytes of a corpus, without reading it."""
    files = token_files(path)[:1] or text_files(path)
    return sum(file.stat().st_size for file in files)


def fit_to_context(dataset: Dataset, block_size: int) -> Dataset:
    """The dataset with splits that windows of `block_size` + 1 tokens fit into.

    Where the training split alone is too short but the whole is not, training takes from the
    validation split what it lacks, and a note says so. A validation split of fewer than 2 tokens
    has nothing to predict: it becomes empty, and a note says that validation is off.

    Raises:
        DataError: the whole corpus is shorter than one window.
    """
    train, val, notes = dataset.train, dataset.val, dataset.notes
    lacking = block_size + 1 - len(train)
    if lacking > len(val):
        raise DataError(too_short(len(train) + len(val), block_size))
    if lacking > 0:
        train, val = np.concatenate([train, val[:lacking]]), val[lacking:]
        notes += (
            f"the text is short: {lacking} tokens of the validation split went to training, "
            "to fill one window",
        )
    if len(val) < 2:
        val = val[:0]
        notes += ("validation is off: its split has no two tokens to predict from each other",)
    return replace(dataset, train=train, val=val, notes=notes)


def unigram_loss(dataset: Dataset) -> float:
    """Cross-entropy in nats per token of the frequencies of single tokens, on validation.

    What a model reaches that ignores the context: frequencies of the training split, each id
    counted once more so that none is impossible. On the training split where validation is off.
    """
    counts = _frequencies(dataset.train, dataset.vocab_size) + 1.0
    split = dataset.val if len(dataset.val) else dataset.train
    asked = _frequencies(split, dataset.vocab_size)
    return float(-(asked @ np.log(counts / counts.sum())) / asked.sum())


def _frequencies(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    total = np.zeros(vocab_size, np.int64)
    for piece in pieces(tokens):
        total += np.bincount(piece, minlength=vocab_size)
    return total


# ---- token files ----------------------------------------------------------------------------


def load_tokens(
    path: str | os.PathLike[str], data: DataConfig, model_tokenizer: Tokenizer | None = None
) -> Dataset:
    """The dataset of `token_files`.

    Without a file for validation the last `data.val_fraction` of the tokens is held out. Beside
    them may stand `tokenizer.json` and `metadata.json`. Without the former, model_tokenizer is
    taken where `data.tokenizer` is "model".

    Raises:
        DataError: files that cannot be used, or ids outside of the vocabulary.
        CorruptError: token files that are not those which metadata.json names.
    """
    files = token_files(path)
    if not files:
        raise DataError(f"{path}: holds no {TRAIN_FILE}")
    folder = files[0].parent
    train, *rest = map(read_tokens, files)
    if rest:
        (val,) = rest
    else:
        cut = int(len(train) * (1 - data.val_fraction))
        train, val = train[:cut], train[cut:]
    of_model = data.tokenizer == MODEL_TOKENIZER
    tokenizer = None if of_model else _given_tokenizer(data)
    if tokenizer is None and (folder / TOKENIZER_FILE).is_file():
        tokenizer = Tokenizer.load(folder)
    elif of_model:
        tokenizer = _given_tokenizer(data, model_tokenizer)
    if data.tokenizer in TOKENIZERS[1:] and (tokenizer is None or tokenizer.kind != data.tokenizer):
        raise DataError(
            f"{path}: holds tokens already, so data.tokenizer {data.tokenizer} cannot be applied; "
            f"drop it, or name their {TOKENIZER_FILE}"
        )
    metadata = _read_object(folder / METADATA_FILE) or {}
    largest = max((id_range(split)[1] for split in (train, val) if len(split)), default=0)
    vocab_size = tokenizer.vocab_size if tokenizer else metadata.get("vocab_size") or largest + 1
    if not isinstance(vocab_size, int) or largest >= vocab_size:
        raise DataError(
            f"{path}: a token is {largest}, but the vocabulary has {vocab_size} ids; "
            "the tokenizer belongs to other tokens"
        )
    digests = {file.name: _file_sha256(file) for file in files}
    for name in (TRAIN_FILE, VAL_FILE) if TRAIN_FILE in digests else ():
        told = metadata.get(name)
        if isinstance(told, dict) and told.get("sha256") != digests.get(name):
            raise CorruptError(
                f"{folder / name}: is not the file that {METADATA_FILE} names; prepare it again, "
                f"or delete {METADATA_FILE} to use it as it is"
            )
    return Dataset(
        train, val, tokenizer, vocab_size, corpus_size(path), tuple(digests.values()), metadata
    )


def _given_tokenizer(data: DataConfig, of_model: Tokenizer | None = None) -> Tokenizer | None:
    """The tokenizer that the settings name, if they name one; `of_model` is what "model" means."""
    if data.tokenizer == MODEL_TOKENIZER:
        if of_model is None:
            raise ConfigError(
                f"data.tokenizer: {MODEL_TOKENIZER} is that of the weights of train.init_from, and "
                "here there is none; name a kind or a file"
            )
        return of_model
    if data.vocab_path is not None and data.merges_path is not None:
        return Tokenizer.from_vocab_merges(data.vocab_path, data.merges_path)
    return None if data.tokenizer in TOKENIZERS else Tokenizer.load(data.tokenizer)


# ---- the cache ------------------------------------------------------------------------------


def cache_directory() -> Path:
    """Where Treadle keeps what it can make again.

    `TREADLE_CACHE`, else `treadle` in the user's cache directory: `XDG_CACHE_HOME` or `~/.cache`,
    `~/Library/Caches` on macOS, `LOCALAPPDATA` on Windows.
    """
    if named := os.environ.get("TREADLE_CACHE"):
        return Path(named).absolute()
    home = Path("~").expanduser()
    if os.name == "nt":
        base = Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = home / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME", ""))
        base = base if base.is_absolute() else home / ".cache"  # as the XDG specification asks
    return base / "treadle"


def prepare_cached(
    path: str | os.PathLike[str],
    data: DataConfig | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    model_tokenizer: Tokenizer | None = None,
) -> Dataset:
    """The tokens of a corpus, made at the first call and mapped from the cache afterwards.

    Token files are used as they are. The tokenizer and the fraction for validation come from
    `data`, where "auto" follows the size of the corpus and "model" is model_tokenizer. `cache_dir`
    replaces `cache_directory()`. Damaged files in the cache are made again.

    Raises:
        DataError: a corpus that cannot be used, or a cache that cannot be written.
    """
    data = data if data is not None else DataConfig()
    if is_tokenised(path):
        return load_tokens(path, data, model_tokenizer)
    data = fill_from_corpus(Config(data=data), corpus_size(path)).data
    root = Path(cache_dir if cache_dir is not None else cache_directory(), "tokens")
    tokenizer = _given_tokenizer(data, model_tokenizer)
    settings = {
        "format": _CACHE_FORMAT,
        "tokenizer": data.tokenizer if tokenizer is None else _sha256(tokenizer.to_json().encode()),
        "vocab_size": data.vocab_size,
        "val_fraction": data.val_fraction,
    }
    index = root / "index" / f"{_quick_key(text_files(path))}.json"
    known = _read_object(index) or {}
    directory = root / _key(str(known.get("sha256")), settings)
    if _is_intact(directory):
        return _open(directory, tokenizer)
    before = time.time_ns()
    corpus = load_corpus(path)
    directory = root / _key(corpus.report.sha256, settings)
    intact = _is_intact(directory)
    try:
        if not intact:
            _build(directory, corpus, tokenizer, data)
        if all(before - file.stat().st_mtime_ns > _FRESH_NS for file in text_files(path)):
            index.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(index, _dumps({"sha256": corpus.report.sha256}))
    except OSError as error:
        raise DataError(
            f"{root}: cannot write the token cache: {error.strerror}; "
            "name another place with TREADLE_CACHE"
        ) from None
    return replace(_open(directory, tokenizer), from_cache=intact)


def _quick_key(files: Sequence[Path]) -> str:
    rows = []
    for file in files:
        status = file.stat()
        rows.append([str(file.absolute()), status.st_size, status.st_mtime_ns])
    return _sha256(_dumps(rows))


def _key(inputs: str, settings: dict[str, Any]) -> str:
    return _sha256(_dumps({"inputs": inputs, **settings}))[:32]


def _build(directory: Path, corpus: Corpus, tokenizer: Tokenizer | None, data: DataConfig) -> None:
    """Writes the files of one key beside their place, then renames the directory."""
    train, val = corpus.split(data.val_fraction)
    if tokenizer is None:
        tokenizer = _make_tokenizer(corpus.documents, train, data)
    temporary = directory.with_name(f"{directory.name}.{secrets.token_hex(4)}.tmp")
    temporary.mkdir(parents=True)
    try:
        metadata: dict[str, Any] = {
            "format": _CACHE_FORMAT,
            "corpus": asdict(corpus.report),
            "tokenizer": tokenizer.kind,
            "vocab_size": tokenizer.vocab_size,
            "val_fraction": data.val_fraction,
        }
        write_atomic(temporary / TOKENIZER_FILE, tokenizer.to_json().encode())
        metadata[TOKENIZER_FILE] = {"sha256": _file_sha256(temporary / TOKENIZER_FILE)}
        for name, documents in ((TRAIN_FILE, train), (VAL_FILE, val)):
            text = tokenizer.separator.join(documents)
            tokens = tokenizer.encode(text)
            write_tokens(temporary / name, tokens, tokenizer.vocab_size)
            metadata[name] = {
                "tokens": len(tokens),
                "text_bytes": len(text.encode()),
                "sha256": _file_sha256(temporary / name),
            }
        write_atomic(temporary / METADATA_FILE, _dumps(metadata))
        write_atomic(temporary / _STAMP_FILE, _dumps(_stamp(temporary)))
        _put_in_place(temporary, directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _make_tokenizer(documents: list[str], train: list[str], data: DataConfig) -> Tokenizer:
    if data.tokenizer == "byte":
        return Tokenizer.byte()
    if data.tokenizer == "bpe":
        assert data.vocab_size is not None
        # The merges are fitted parameters, so they must not see the validation text.
        return Tokenizer.train_bpe(train, data.vocab_size)
    # A character has no frequency here, and one that only validation holds would be an error.
    return Tokenizer.char(BLANK_LINE.join(documents))


def _put_in_place(temporary: Path, directory: Path) -> None:
    """Renames; a damaged predecessor goes, and what another process has just made stays."""
    if directory.exists() and not _is_intact(directory):
        damaged = temporary.with_suffix(".damaged")
        directory.replace(damaged)
        shutil.rmtree(damaged, ignore_errors=True)
    try:
        temporary.rename(directory)
    except OSError:
        if not _is_intact(directory):
            raise
    sync_directory(directory.parent)


def _is_intact(directory: Path) -> bool:
    """Whether the files are those that were written: by size and time, else by digest."""
    stamp, metadata = _read_object(directory / _STAMP_FILE), _read_object(directory / METADATA_FILE)
    if stamp is None or metadata is None:
        return False
    try:
        now = _stamp(directory)
        return all(
            now[name] == stamp[name] or _file_sha256(directory / name) == metadata[name]["sha256"]
            for name in now
        )
    except (OSError, KeyError, TypeError):
        return False


def _stamp(directory: Path) -> dict[str, list[int]]:
    names = TRAIN_FILE, VAL_FILE, TOKENIZER_FILE, METADATA_FILE
    status = {name: (directory / name).stat() for name in names}
    return {name: [s.st_size, s.st_mtime_ns] for name, s in status.items()}


def _open(directory: Path, tokenizer: Tokenizer | None) -> Dataset:
    metadata = _read_object(directory / METADATA_FILE)
    assert metadata is not None
    # The file has the same ids, but not the names that a tokenizer_config.json gave to some.
    tokenizer = tokenizer or Tokenizer.load(directory)
    return Dataset(
        train=read_tokens(directory / TRAIN_FILE),
        val=read_tokens(directory / VAL_FILE),
        tokenizer=tokenizer,
        vocab_size=tokenizer.vocab_size,
        corpus_bytes=metadata["corpus"]["bytes"],
        file_digests=tuple(metadata[name]["sha256"] for name in (TRAIN_FILE, VAL_FILE)),
        metadata=metadata,
        from_cache=True,
    )


def _read_object(path: Path) -> dict[str, Any] | None:
    """A JSON object, or None where there is none."""
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) else None


def _dumps(values: Any) -> bytes:
    return (json.dumps(values, indent=2, sort_keys=True) + "\n").encode()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
