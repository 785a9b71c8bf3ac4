"""From inputs to a directory of tokens, in two passes of bounded memory.

    prepare(["texts/"], "tokens", Options())

1. Every document is read, cleaned, filtered, hashed and kept on disk (`collect`). Then duplicates
   are dropped, documents are split, and the tokenizer is trained where none is given.
2. The documents that are left are encoded and written.

A recipe (`recipes`) has one pass: its documents are encoded as they come.

All is made in a hidden folder inside of the output directory and moved to its place at the end
(`staging`).
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from treadle import __version__
from treadle.data.choose import (
    Choice,
    TokenizerOptions,
    describe,
    finished_tokenizer,
    trained_tokenizer,
)
from treadle.data.clean import Filters
from treadle.data.collect import Collection, collect
from treadle.data.corpus import METADATA_FILE, TRAIN_FILE, VAL_FILE
from treadle.data.datasets import DATASETS, GPT2, Progress, fetch, unpack_shards
from treadle.data.output import Output
from treadle.data.readers import FORMATS, Reader, Source, find_sources, source_of
from treadle.data.recipes import RECIPES, Recipe
from treadle.data.staging import put_in_place, staging_folder
from treadle.data.tokenizer import Tokenizer
from treadle.data.workers import (
    DROPPED,
    TRAIN,
    VAL,
    Cleaning,
    Pool,
    encode_stored,
    encode_texts,
)
from treadle.errors import ConfigError, DataError
from treadle.files import (
    digest_file,
    json_file,
    write_synced,
)

REPORT_FILE = "report.json"
LLM_C, RAW = "llmc", "int32-raw"
BIN_FORMATS = (LLM_C, RAW)
NO_RECIPE = "none"
_FORMAT = 1
_FEW_BYTES = 4 << 20  # less is done before other processes have started
_BATCH_CHARACTERS = 1 << 19
_PACKAGES = ("numpy", "tokenizers", "ftfy", "datasketch", "charset-normalizer", "pyarrow")
_ARCHIVES = (".tar.gz", ".tgz", ".tar")

# What to do about each reason for dropping documents.
_HINTS = {
    "too short": "--min-chars 0",
    "too long": "--max-chars 0",
    "too few letters": "--min-letters 0",
    "repetitive": "--max-repetition 0",
    "duplicate": "--no-dedupe",
    "no text": "--text-key NAME",
    "not text": "--encoding NAME",
}


@dataclass(frozen=True)
class Options:
    """All that the output depends on besides the inputs.

    Attributes:
        recipe: a name of `RECIPES`, "none", or None: that of the data set.
        format: what the inputs hold; "auto" goes by their names.
        text_key: the field or column of the text in `.jsonl` and `.parquet`.
        encoding: of texts; "auto" finds out.
        val_fraction: of the documents, kept for validation.
        dedupe: whether only the first of equal documents is kept.
        near_duplicates: least similarity at which a document is dropped; 0 is off.
        clean, fix_encoding: whether texts are cleaned, and repaired by ftfy.
        bin_format: of `BIN_FORMATS`.
        vocab_merges: whether `vocab.json` and `merges.txt` are written too.
    """

    tokenizer: TokenizerOptions = field(default_factory=TokenizerOptions)
    filters: Filters = field(default_factory=Filters)
    recipe: str | None = None
    format: str = "auto"
    text_key: str = "text"
    encoding: str = "auto"
    val_fraction: float = 0.1
    dedupe: bool = True
    near_duplicates: float = 0.0
    clean: bool = True
    fix_encoding: bool = False
    bin_format: str = LLM_C
    vocab_merges: bool = False

    def check(self) -> None:
        """ConfigError for values that cannot work."""
        for flag, value, allowed in (
            ("--recipe", self.recipe, (None, NO_RECIPE, *RECIPES)),
            ("--format", self.format, FORMATS),
            ("--bin-format", self.bin_format, BIN_FORMATS),
        ):
            if value not in allowed:
                names = ", ".join(name for name in allowed if name is not None)
                raise ConfigError(f"{flag} {value}: expected one of {names}")
        for flag, number, most in (
            ("--val-fraction", self.val_fraction, 0.5),
            ("--near-duplicates", self.near_duplicates, 1),
            ("--min-letters", self.filters.min_letters, 1),
            ("--max-repetition", self.filters.max_repetition, 1),
        ):
            if not 0 <= number <= most:
                raise ConfigError(f"{flag} {number:g}: expected a number from 0 to {most:g}")
        if self.fix_encoding and not self.clean:
            raise ConfigError("--fix-encoding: has no effect with --no-clean; drop one")
        self.tokenizer.check()


@dataclass
class Report:
    """What happened.

    Attributes:
        directory: where the tokens are.
        counts: the numbers that metadata.json has as well, by section.
        examples: documents that were dropped, by reason, as texts with their places.
        notes: lines that the person should read.
    """

    directory: Path
    counts: dict[str, Any]
    examples: dict[str, list[dict[str, str]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def prepare(
    inputs: Sequence[str],
    out: str | os.PathLike[str],
    options: Options | None = None,
    threads: int | None = None,
    urls: Mapping[str, str] | None = None,
    progress: Progress = lambda name, done, total: None,
) -> Report:
    """Makes the tokens of some inputs: files, directories, globs, `-`, or known data sets.

    threads: processes; None takes the processors that this one may use. urls: addresses of known
    data sets to use instead of the known ones.

    Raises:
        ConfigError: options that cannot work.
        DataError: inputs that cannot be used, nothing left to train on, or a place that cannot
            be written.
    """
    options = options or Options()
    options.check()
    threads = threads or _processors()
    out = Path(out)
    try:
        with staging_folder(out) as staging:
            work = _Work(list(inputs), options, threads, urls or {}, progress, staging, out)
            report = work.run()
            put_in_place(staging / "out", out)
            return report
    except OSError as error:
        where = error.filename or out
        raise DataError(f"{where}: cannot write: {error.strerror or error}") from None


def _processors() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# ---- the work -------------------------------------------------------------------------------


@dataclass
class _Work:
    inputs: list[str]
    options: Options
    threads: int
    urls: Mapping[str, str]
    progress: Progress
    staging: Path
    out: Path

    def run(self) -> Report:
        names = [given for given in self.inputs if given in DATASETS and not Path(given).exists()]
        recipe_name = self._recipe_name(names)
        if recipe_name is not None:
            return self._with_recipe(recipe_name, names)
        paths = [
            str(fetch(given, self.urls, self.progress)) if given in names else given
            for given in self.inputs
            if given != "-"
        ]
        sources = find_sources(paths, self.options.format)
        if "-" in self.inputs:
            sources.append(self._standard_input())
        return self._from_documents(sources)

    def _recipe_name(self, names: list[str]) -> str | None:
        asked = self.options.recipe
        if asked is not None:
            return None if asked == NO_RECIPE else asked
        found = {DATASETS[name].recipe for name in names} - {None}
        if found and len(self.inputs) > 1:
            raise DataError(
                f"{', '.join(self.inputs)}: the data set {names[0]} has a recipe of its own; "
                f"prepare it alone, or give --recipe {NO_RECIPE}"
            )
        return found.pop() if found else None

    def _standard_input(self) -> Source:
        path = self.staging / "standard-input"
        with path.open("wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file)
        return source_of(
            path, "-", "text" if self.options.format == "auto" else self.options.format
        )

    # ---- two passes -------------------------------------------------------------------------

    def _from_documents(self, sources: list[Source]) -> Report:
        options = self.options
        tokenizer = finished_tokenizer(options.tokenizer, self.urls, self.progress)
        reader = Reader(sources, self.staging, options.text_key, options.encoding)
        cleaning = Cleaning(
            folder=self.staging / "documents",
            filters=options.filters,
            clean=options.clean,
            fix_encoding=options.fix_encoding,
            signatures=options.near_duplicates > 0,
            characters=tokenizer is None and options.tokenizer.needs_characters,
        )
        with Pool(self.threads if reader.total > _FEW_BYTES else 1) as pool:
            documents = collect(reader, cleaning, pool, self.progress, "reading and cleaning")
            try:
                if options.dedupe:
                    documents.drop_duplicates(options.near_duplicates)
                documents.split(options.val_fraction)
                train_size, val_size = documents.count(TRAIN), documents.count(VAL)
                if not train_size[0]:
                    raise DataError(_nothing_left(documents))
                if tokenizer is not None:
                    choice = Choice(tokenizer)
                else:
                    choice = trained_tokenizer(
                        options.tokenizer, documents, cleaning, pool, self.progress
                    )
                with self._output(choice.tokenizer) as output:
                    job = output.job(documents.folder)
                    done, total = 0, train_size[1] + val_size[1]
                    for stored, encoded in pool.map(encode_stored, job, documents.stored()):
                        output.add(encoded)
                        done += int(stored.sizes[stored.targets != DROPPED].sum())
                        self.progress("encoding", done, total)
                counts = _document_counts(documents) | output.counts(train_size, val_size)
            finally:
                documents.close()
        report = Report(
            self.out,
            counts,
            {
                reason: [asdict(example) for example in examples]
                for reason, examples in sorted(documents.examples.items())
            },
            _notes(documents, options, val_size[0]),
        )
        inputs = [asdict(record) for record in reader.records]
        return self._finish(report, choice, inputs, None)

    # ---- one pass ---------------------------------------------------------------------------

    def _with_recipe(self, name: str, names: list[str]) -> Report:
        options, recipe = self.options, RECIPES[name]
        _refuse_for_recipes(options, name)
        paths = []
        for given in self.inputs:
            path = fetch(given, self.urls, self.progress) if given in names else Path(given)
            if path.is_file() and path.name.endswith(_ARCHIVES):
                path = unpack_shards(path, self.staging)
            paths.append(str(path))
        sources = find_sources(paths, suffixes=recipe.suffixes)
        wanted = options.tokenizer
        if wanted.name == "auto" and wanted.vocab is None:
            wanted = replace(wanted, name=GPT2)
        tokenizer = finished_tokenizer(wanted, self.urls, self.progress)
        if tokenizer is None or tokenizer.eos_id is None:
            raise ConfigError(
                f"--recipe {name}: needs a finished tokenizer with an end of text, such as "
                f"--tokenizer {GPT2}, byte, or a path"
            )
        total = sum(source.path.stat().st_size for source in sources)
        with (
            Pool(self.threads if total > _FEW_BYTES else 1) as pool,
            self._output(tokenizer, recipe) as output,
        ):
            tasks = _recipe_batches(recipe, sources, options.encoding, self.progress)
            for _, encoded in pool.map(encode_texts, output.job(self.staging), tasks):
                output.add(encoded)
        counts = output.counts()
        found = counts[VAL_FILE]["tokens"], counts[TRAIN_FILE]["tokens"]
        expected = DATASETS[names[0]].tokens if names else None
        if wanted.name == GPT2 and expected not in (None, found):
            raise DataError(
                f"{names[0]}: {found[0]:,} validation and {found[1]:,} training tokens, "
                f"expected {expected[0]:,} and {expected[1]:,}; the data set has changed"
            )
        digests = [digest_file(source.path) for source in sources]
        inputs = [
            {"name": source.name, "bytes": digest.size, "sha256": digest.sha256}
            for source, digest in zip(sources, digests, strict=True)
        ]
        return self._finish(Report(self.out, counts), Choice(tokenizer), inputs, name)

    # ---- writing ----------------------------------------------------------------------------

    def _output(self, tokenizer: Tokenizer, recipe: Recipe | None = None) -> Output:
        folder = self.staging / "out"
        folder.mkdir()
        raw = self.options.bin_format == RAW
        return Output(folder, tokenizer, recipe, raw, self.options.vocab_merges)

    def _finish(
        self, report: Report, choice: Choice, inputs: list[dict[str, Any]], recipe: str | None
    ) -> Report:
        """Writes what stands beside the tokens."""
        folder, options, tokenizer = self.staging / "out", self.options, choice.tokenizer
        report.counts["inputs"] = {"files": len(inputs), "bytes": sum(i["bytes"] for i in inputs)}
        report.counts["tokenizer"] = {
            "kind": tokenizer.kind,
            "vocab_size": tokenizer.vocab_size,
            "trained_on": choice.trained_on,
        }
        report_values = {
            "counts": report.counts,
            "examples": report.examples,
            "notes": report.notes,
        }
        write_synced(folder / REPORT_FILE, json_file(report_values))
        asked = asdict(options) | {"tokenizer": describe(options.tokenizer), "recipe": recipe}
        files = {
            path.name: {"sha256": digest_file(path).sha256} for path in sorted(folder.iterdir())
        }
        for name in (TRAIN_FILE, VAL_FILE):
            if name in files:
                files[name] |= report.counts[name]
        metadata = {
            "format": _FORMAT,
            "tokenizer": tokenizer.kind,
            "vocab_size": tokenizer.vocab_size,
            "counts": report.counts,
            "inputs": inputs,
            "options": asked,
            "versions": _versions(),
            **files,
        }
        write_synced(folder / METADATA_FILE, json_file(metadata))
        return report


def _recipe_batches(
    recipe: Recipe, sources: list[Source], encoding: str, progress: Progress
) -> Iterator[list[tuple[str, int]]]:
    total = sum(source.path.stat().st_size for source in sources)
    done = 0
    for number, source in enumerate(sources):
        batch: list[tuple[str, int]] = []
        size = 0
        for text, target in recipe.documents(number, source, encoding):
            batch.append((text, target))
            size += len(text)
            if size >= _BATCH_CHARACTERS:
                yield batch
                batch, size = [], 0
        yield batch
        done += source.path.stat().st_size
        progress("encoding", done, total)


def _refuse_for_recipes(options: Options, name: str) -> None:
    """ConfigError for options that a recipe would not heed."""
    plain = Options(
        tokenizer=options.tokenizer,
        recipe=options.recipe,
        encoding=options.encoding,
        bin_format=options.bin_format,
        vocab_merges=options.vocab_merges,
    )
    if options != plain:
        raise ConfigError(
            f"--recipe {name}: leaves texts as they are and splits them in its own way; drop the "
            f"options for formats, cleaning, filters, duplicates and split, or give "
            f"--recipe {NO_RECIPE}"
        )


# ---- what to say ----------------------------------------------------------------------------


def _document_counts(documents: Collection) -> dict[str, Any]:
    legacy = [record.name for record in documents.reader.records if record.is_legacy]
    unreadable = [record.name for record in documents.reader.records if record.problem]
    return {
        "read": asdict(documents.totals),
        "dropped": dict(sorted(documents.dropped.items())),
        "legacy_files": len(legacy),
        "unreadable_files": len(unreadable),
    }


def _nothing_left(documents: Collection) -> str:
    dropped = documents.dropped
    if not dropped:
        return "the inputs hold no document; give texts to train on"
    reasons = (
        f"{count} {reason}" + (f" ({_HINTS[reason]})" if reason in _HINTS else "")
        for reason, count in dropped.most_common()
    )
    example = next(iter(documents.examples[dropped.most_common(1)[0][0]]))
    return f"every document was dropped: {', '.join(reasons)}; the first is {example.where}"


_SHOWN_FILES = 5


def _notes(documents: Collection, options: Options, val_documents: int) -> list[str]:
    notes = []
    records = documents.reader.records
    for what, lines in (
        ("not in UTF-8", [f"{r.name} ({r.encoding})" for r in records if r.is_legacy]),
        ("left out", [f"{r.name} ({r.problem})" for r in records if r.problem]),
    ):
        if lines:
            more = len(lines) - _SHOWN_FILES
            text = ", ".join(lines[:_SHOWN_FILES]) + (f" and {more} more" if more > 0 else "")
            notes.append(f"{what}: {text}")
    if options.val_fraction and not val_documents:
        notes.append(
            "validation is empty: documents go there by their hash, and of so few none did; give "
            "more text or a larger --val-fraction"
        )
    return notes


def _versions() -> dict[str, str]:
    versions = {
        "treadle": __version__,
        "python": platform.python_version(),
        "unicode": unicodedata.unidata_version,
    }
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions
