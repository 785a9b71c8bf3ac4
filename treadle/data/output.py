"""The files of tokens and of their tokenizer, as they are being written."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from treadle.data.corpus import TRAIN_FILE, VAL_FILE
from treadle.data.recipes import Recipe
from treadle.data.shards import TokenWriter
from treadle.data.tokenizer import MERGES_FILE, TOKENIZER_FILE, VOCAB_FILE, Tokenizer
from treadle.data.workers import Encoded, Encoding
from treadle.files import write_synced


class Output:
    """The files of tokens and of the tokenizer, as they are being written."""

    def __init__(
        self,
        folder: Path,
        tokenizer: Tokenizer,
        recipe: Recipe | None = None,
        raw: bool = False,
        vocab_merges: bool = False,
    ) -> None:
        """Opens the files in `folder`. raw: without headers. vocab_merges: writes GPT-2's pair of
        files as well."""
        self.folder, self._recipe, self._raw = folder, recipe, raw
        self._left = recipe.val_tokens if recipe and recipe.val_tokens else 0
        # A blank line parts documents; only an end of text stands before the first one too.
        is_mark = tokenizer.separator == tokenizer.eos_token
        self._skip = 0 if is_mark else len(tokenizer.encode(tokenizer.separator))
        self._stack = ExitStack()
        self._files, self._writers = {}, {}
        for name in (TRAIN_FILE, VAL_FILE):
            file = self._files[name] = self._stack.enter_context((folder / name).open("wb"))
            self._writers[name] = TokenWriter(file, name, tokenizer.vocab_size, raw)
        self.path = folder / TOKENIZER_FILE
        self.sha256 = write_synced(self.path, tokenizer.to_json().encode()).sha256
        if vocab_merges:
            for name, text in zip((VOCAB_FILE, MERGES_FILE), tokenizer.vocab_merges(), strict=True):
                write_synced(folder / name, text.encode())

    def job(self, folder: Path) -> Encoding:
        """What the processes need to know; `folder` holds the clean texts."""
        plain = self._recipe is not None and self._recipe.plain
        return Encoding(self.path, self.sha256, folder, plain)

    def add(self, encoded: Encoded) -> None:
        """Writes the ids of a batch."""
        train, val = encoded.train, encoded.val
        if self._left:
            val, train = train[: self._left], train[self._left :]
            self._left -= len(val)
        for name, ids in ((TRAIN_FILE, train), (VAL_FILE, val)):
            writer = self._writers[name]
            writer.append(ids if writer.count else ids[self._skip :])

    def finish(self) -> None:
        """Completes the files of tokens."""
        for name, writer in self._writers.items():
            writer.finish()
            self._files[name].flush()
            os.fsync(self._files[name].fileno())
        self._stack.close()
        if self._raw and not self._writers[VAL_FILE].count:
            (self.folder / VAL_FILE).unlink()  # without a header, an empty file says nothing

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.finish()
        self._stack.close()

    def counts(self, *sizes: tuple[int, int]) -> dict[str, Any]:
        """The number of tokens of each file; with the sizes of the training and the validation
        part, (pieces, bytes), those as well."""
        counts = {}
        for number, name in enumerate((TRAIN_FILE, VAL_FILE)):
            counts[name] = {"tokens": self._writers[name].count}
            if sizes:
                counts[name] |= {"pieces": sizes[number][0], "text_bytes": sizes[number][1]}
        return counts
