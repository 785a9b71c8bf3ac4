"""Which tokenizer a corpus gets: one that is there already, or one that is trained on it.

A tokenizer directory makes a trained tokenizer permanent: the first run writes there

    tokenizer.json   the tokenizer
    corpus.txt       the very text that it was trained on, `<|endoftext|>` between its parts
    training.json    what was asked for, and how much text there was

and later runs take it from there, whatever their corpus. `--train-tokenizer corpus.txt` with the
same settings makes the same file again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import IO, Any

from treadle.config import TOKENIZERS, size_for
from treadle.data.clean import Filters
from treadle.data.collect import Collection, collect
from treadle.data.datasets import GPT2, Progress, fetch
from treadle.data.readers import Reader, find_sources
from treadle.data.tokenizer import (
    END_OF_TEXT,
    MERGES_FILE,
    TOKENIZER_FILE,
    VOCAB_FILE,
    Tokenizer,
)
from treadle.data.workers import TRAIN, Cleaning, Pool
from treadle.errors import ConfigError, CorruptError, DataError, TokenizerError
from treadle.files import atomic_file, json_file, parse_json, write_atomic

GPT2_FILES = "gpt2-files"
SPANISH = "spanish"
SHIPPED = {SPANISH: Path(__file__).parent / "spanish" / TOKENIZER_FILE}
CORPUS_FILE, TRAINING_FILE = "corpus.txt", "training.json"
_TRAINED = ("char", "bpe")


@dataclass(frozen=True)
class TokenizerOptions:
    """Which tokenizer is asked for.

    Attributes:
        name: a kind ("auto", "char", "byte", "bpe"), "gpt2", "gpt2-files", "spanish", or a path.
        vocab_size: entries of a BPE to train; None follows the size of the corpus.
        vocab, merges: the pair of files of "gpt2-files".
        train_on: texts to train on instead of the corpus.
        directory: where a trained tokenizer is kept.
        specials: special tokens besides the end of text.
        sample_bytes: most text that a tokenizer is trained on.
    """

    name: str = "auto"
    vocab_size: int | None = None
    vocab: Path | None = None
    merges: Path | None = None
    train_on: Path | None = None
    directory: Path | None = None
    specials: tuple[str, ...] = ()
    sample_bytes: int = 64 << 20

    def check(self) -> None:
        """ConfigError for options that do not go together."""
        is_kind = self.name in TOKENIZERS
        files = self.vocab is not None and self.merges is not None
        if (self.vocab is None) != (self.merges is None):
            raise ConfigError("--vocab and --merges: a BPE needs both files")
        if self.name == GPT2_FILES and not files:
            raise ConfigError(f"--tokenizer {GPT2_FILES}: give --vocab and --merges")
        if files and self.name not in ("auto", GPT2_FILES):
            raise ConfigError(f"--tokenizer {self.name}: drop it, or --vocab and --merges")
        finished = files or not is_kind
        trained = self.name in ("auto", *_TRAINED) and not finished
        for flag, given in (
            ("--train-tokenizer", self.train_on is not None),
            ("--tokenizer-dir", self.directory is not None),
        ):
            if given and not trained:
                raise ConfigError(f"{flag}: the tokenizer {self.name} is not trained; drop one")
        if self.vocab_size is not None and (finished or self.name not in ("auto", "bpe")):
            raise ConfigError(
                f"--vocab-size {self.vocab_size}: applies only to a BPE that is trained; use "
                "--tokenizer bpe, or drop it"
            )
        if self.specials and finished:
            raise ConfigError("--special-token: the tokenizer is finished and takes no more")

    @property
    def needs_characters(self) -> bool:
        """Whether the characters of a corpus may be asked for."""
        return self.name in ("auto", "char") and self.vocab_size is None and self.vocab is None


@dataclass(frozen=True)
class Choice:
    """A tokenizer, and what it was trained on, if it was."""

    tokenizer: Tokenizer
    trained_on: Mapping[str, Any] | None = None


def finished_tokenizer(
    options: TokenizerOptions, urls: Mapping[str, str], progress: Progress
) -> Tokenizer | None:
    """The tokenizer that needs no text, or None where one must be trained.

    Raises:
        TokenizerError: no such tokenizer, or files that are none.
    """
    options.check()
    name = options.name
    if options.vocab is not None and options.merges is not None:
        return Tokenizer.from_vocab_merges(options.vocab, options.merges)
    if name == "byte":
        return Tokenizer.byte(options.specials)
    if name in TOKENIZERS:
        return None
    return load_tokenizer(name, urls, progress)


def load_tokenizer(name: str, urls: Mapping[str, str], progress: Progress) -> Tokenizer:
    """The tokenizer of a path, of GPT-2, or one that comes with the package.

    Raises:
        TokenizerError: no such tokenizer, or files that are none.
    """
    path = Path(name)
    if path.is_dir() and not (path / TOKENIZER_FILE).exists() and (path / VOCAB_FILE).exists():
        return Tokenizer.from_vocab_merges(path / VOCAB_FILE, path / MERGES_FILE)
    if path.exists():
        return Tokenizer.load(path)
    if name in SHIPPED:
        return Tokenizer.load(SHIPPED[name])
    if name == GPT2:
        return Tokenizer.load(fetch(GPT2, urls, progress))
    kinds = ", ".join([*TOKENIZERS, GPT2, GPT2_FILES, *SHIPPED])
    raise TokenizerError(f"{name}: no such tokenizer; give {kinds}, or a path")


def trained_tokenizer(
    options: TokenizerOptions,
    documents: Collection,
    cleaning: Cleaning,
    pool: Pool,
    progress: Progress,
) -> Choice:
    """The tokenizer of the directory, or a new one trained on the corpus or on other texts.

    Raises:
        DataError: texts that cannot be read, or a directory whose tokenizer is another.
    """
    if kept := _kept(options):
        return kept
    other = None
    if options.train_on is not None:
        folder = cleaning.folder.with_name("tokenizer-texts")
        asked = replace(cleaning, folder=folder, filters=Filters.off(), signatures=False)
        reader = Reader(find_sources([str(options.train_on)]), folder)
        other = collect(reader, asked, pool, progress, "reading for the tokenizer")
        if not len(other.rows):
            raise DataError(f"{options.train_on}: no text to train a tokenizer on")
        documents = other
    try:
        return _train(options, documents, progress)
    finally:
        if other is not None:
            other.close()


def _train(options: TokenizerOptions, documents: Collection, progress: Progress) -> Choice:
    _, total = documents.count(TRAIN)
    kind = options.name
    size = size_for(total)
    if kind == "auto":
        kind = size.tokenizer if options.vocab_size is None else "bpe"
    settings: dict[str, Any] = {"kind": kind, "specials": list(options.specials)}
    if kind == "bpe":
        settings["vocab_size"] = options.vocab_size or size.vocab_size
    source = str(options.train_on.as_posix()) if options.train_on else "the corpus"
    directory = options.directory
    with ExitStack() as stack:
        copy = None
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
            copy = stack.enter_context(atomic_file(directory / CORPUS_FILE))
        sample = _Sample(documents.sample(options.sample_bytes), copy, progress, total, options)
        if kind == "bpe":
            tokenizer = Tokenizer.train_bpe(sample, settings["vocab_size"], options.specials)
        else:
            # Each character of the corpus has an id, whether or not it is in the sample.
            characters = "".join(sorted(documents.characters))
            tokenizer = Tokenizer.char(characters, True, options.specials)
            for _ in sample:
                pass
    trained_on = {
        "source": source,
        "bytes": sample.bytes,
        "texts": sample.texts,
        "sha256": sample.digest.hexdigest(),
        "of_bytes": total,
    }
    if directory is not None:
        write_atomic(directory / TRAINING_FILE, json_file(settings | {"trained_on": trained_on}))
        write_atomic(directory / TOKENIZER_FILE, tokenizer.to_json().encode())
    return Choice(tokenizer, trained_on)


class _Sample:
    """Texts on their way to a trainer, counted, hashed and copied."""

    def __init__(
        self,
        texts: Iterator[str],
        copy: IO[bytes] | None,
        progress: Progress,
        total: int,
        options: TokenizerOptions,
    ) -> None:
        self.bytes = self.texts = 0
        self.digest = sha256()
        self._texts, self._copy, self._progress = texts, copy, progress
        self._total = min(total, options.sample_bytes)

    def __iter__(self) -> Iterator[str]:
        for text in self._texts:
            data = text.encode()
            marked = END_OF_TEXT.encode() + data if self.texts else data
            self.digest.update(marked)
            self.bytes += len(data)
            self.texts += 1
            if self._copy is not None:
                self._copy.write(marked)
            self._progress("training the tokenizer", self.bytes, max(self._total, self.bytes))
            yield text


def _kept(options: TokenizerOptions) -> Choice | None:
    """The tokenizer that a directory holds already."""
    directory = options.directory
    if directory is None or not (directory / TOKENIZER_FILE).exists():
        return None
    tokenizer = Tokenizer.load(directory)
    try:
        training = parse_json((directory / TRAINING_FILE).read_bytes(), TRAINING_FILE)
    except (OSError, CorruptError):
        training = {"kind": tokenizer.kind}
    asked = {
        "kind": None if options.name == "auto" else options.name,
        "vocab_size": options.vocab_size,
        "specials": list(options.specials) or None,
    }
    for key, value in asked.items():
        if value is not None and training.get(key) != value:
            raise TokenizerError(
                f"{directory}: holds a tokenizer with {key} {training.get(key)}, not {value}; "
                "choose another --tokenizer-dir, or drop the option"
            )
    return Choice(tokenizer, training.get("trained_on"))


def describe(options: TokenizerOptions) -> dict[str, Any]:
    """The options as JSON values."""
    values = asdict(options)
    return {
        key: value.as_posix() if isinstance(value, Path) else value for key, value in values.items()
    }
