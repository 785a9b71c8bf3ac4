"""Data sets rebuilt exactly as llm.c's scripts make them, from its files or one's own.

    tinyshakespeare   One text. A document begins at its start and after each blank line. Of all
                      tokens the first 32,768 are for validation.
    tinystories       Files of JSON, each a list of objects with a `story`, in the order of their
                      names. The first is for validation. The stories of a file are shuffled by
                      Python's generator with the seed 1337 + the number of the file in its split,
                      and the white space around each is cut off. The text of a special token in a
                      story is text.

The end of text stands before each document. Files of tinystories for training follow each other in
order; llm.c's script appends each as soon as it is ready, so there the order differs between runs.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from treadle.data.readers import (
    COMPRESSIONS,
    NotTextError,
    Source,
    find_encoding,
    open_source,
    open_text,
)
from treadle.data.workers import TRAIN, VAL
from treadle.errors import DataError

_SEED = 1337
_BLANK_LINE = "\n\n"


@dataclass(frozen=True)
class Recipe:
    """How the documents of a data set are told apart and split.

    Attributes:
        documents: the documents of a file, given its number, each with where it goes.
        suffix: what the names of its files end in.
        plain: whether special tokens in a text are text like any other.
        val_tokens: the first so many tokens are for validation; None: `documents` says which are.
    """

    documents: Callable[[int, Source, str], Iterator[tuple[str, int]]]
    suffix: str
    plain: bool
    val_tokens: int | None = None

    @property
    def suffixes(self) -> tuple[str, ...]:
        """The endings of its files, compressed ones included."""
        return tuple(self.suffix + packed for packed in ("", *COMPRESSIONS))


def _statements(number: int, source: Source, encoding: str) -> Iterator[tuple[str, int]]:
    if number:
        raise DataError(f"{source.name}: the recipe takes one text, and this is another")
    try:
        found = find_encoding(source, encoding)
    except NotTextError as error:
        raise DataError(f"{source.name}: {error}") from None
    rest = ""
    with open_text(source, found) as (chunks, _):
        for chunk in chunks:
            *whole, rest = (rest + chunk).split(_BLANK_LINE)
            for text in whole:
                yield text + _BLANK_LINE, TRAIN
    yield rest, TRAIN


def _stories(number: int, source: Source, encoding: str) -> Iterator[tuple[str, int]]:
    try:
        with open_source(source) as (stream, _):
            data = stream.read()
        stories = json.loads(data if encoding == "auto" else data.decode(encoding))
        random.Random(_SEED + max(0, number - 1)).shuffle(stories)
        texts = [story["story"].strip() for story in stories]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise DataError(
            f'{source.name}: expected JSON, a list of objects with a text "story"'
        ) from None
    for text in texts:
        yield text, TRAIN if number else VAL


RECIPES = {
    "tinyshakespeare": Recipe(_statements, ".txt", plain=False, val_tokens=32_768),
    "tinystories": Recipe(_stories, ".json", plain=True),
}
