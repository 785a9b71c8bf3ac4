"""Cleaning documents, and what tells that one is not worth keeping.

    clean_text(text)              the same text in one form of Unicode, white space and line ends
    Filters(...).reason(text)     why a document should be dropped, or None

Cleaning twice changes nothing more. In this order:

- `ftfy` repairs text that was decoded in the wrong encoding, where asked for;
- CRLF, CR, vertical tab, form feed, U+0085, U+2028 and U+2029 become LF; other control characters,
  zero-width spaces and byte-order marks go, half surrogates become U+FFFD, wide and no-break spaces
  become spaces;
- Unicode NFC;
- blanks at the ends of lines go, more than one blank line becomes one, and so do blank lines at
  both ends of a document.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, Self

import numpy as np

from treadle.data.extras import require

EMPTY, SHORT, LONG, FEW_LETTERS, REPETITIVE = (
    "empty",
    "too short",
    "too long",
    "too few letters",
    "repetitive",
)
NOT_TEXT, NOT_JSON, NO_TEXT = "not text", "not JSON", "no text"

# ---- documents ------------------------------------------------------------------------------


class Piece(NamedTuple):
    """A document, or a section of a long one.

    Attributes:
        file: index of its file in `Reader.sources`.
        record: which document of the file, from 1: its line or row, for `.jsonl` and `.parquet`.
        first, last: whether it begins and whether it ends a document.
        problem: why there is no text, else None.
    """

    text: str
    file: int
    record: int
    first: bool = True
    last: bool = True
    problem: str | None = None


# ---- cleaning -------------------------------------------------------------------------------

_LINE_ENDS = "\r\x0b\x0c\x85\u2028\u2029"
_SPACES = "\xa0\u1680\u2000-\u200a\u202f\u205f\u3000"
_SURROGATES = "\ud800-\udfff"
_GONE = "\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f\u200b\ufeff\ufffe\uffff"
_ODD = re.compile(f"[{_GONE}{_SURROGATES}{_SPACES}{_LINE_ENDS}]")
_REPLACED = (
    (re.compile(f"[{_GONE}]"), ""),
    (re.compile(f"[{_SURROGATES}]"), "\ufffd"),
    (re.compile(f"[{_SPACES}]"), " "),
    (re.compile(f"[{_LINE_ENDS}]"), "\n"),
)
_BLANK_LINES = re.compile("\n{3,}")
_COMPOSING = re.compile("[^\x00-\u02ff]")  # NFC leaves what lies below alone


def storable(text: str) -> str:
    """The text with half surrogates, which no file can hold, as U+FFFD."""
    return _REPLACED[1][0].sub("\ufffd", text)


def clean_text(text: str, first: bool = True, last: bool = True, fix_encoding: bool = False) -> str:
    """A document, or a section of one, in its clean form.

    first, last: whether the text begins and whether it ends its document; a section in the middle
    keeps the line ends that part it from the next.

    Raises:
        DataError: `fix_encoding` without ftfy.
    """
    if fix_encoding:
        text = require("ftfy", "--fix-encoding").fix_encoding(text)
    if "\r\n" in text:
        text = text.replace("\r\n", "\n")
    if _ODD.search(text):
        for pattern, replacement in _REPLACED:
            text = pattern.sub(replacement, text)
    if not text.isascii() and _COMPOSING.search(text):
        text = unicodedata.normalize("NFC", text)
    if " \n" in text or "\t\n" in text or text.endswith((" ", "\t")):
        # Not a regular expression, which would take quadratic time on long runs of blanks.
        text = "\n".join([line.rstrip(" \t") for line in text.split("\n")])
    if "\n\n\n" in text:
        text = _BLANK_LINES.sub("\n\n", text)
    if first:
        text = text.lstrip("\n")
    return text.rstrip("\n") if last else text


# ---- measures -------------------------------------------------------------------------------

_OTHER, _LETTER, _SPACE = 0, 1, 2
_TABLED = 0x20000  # from here on: ideographs and what is very rare
_HEAD = 1 << 14  # bytes of a document that repetition is looked for in
_WINDOW = 16
_FEWEST_WINDOWS = 64
_MIX = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F))


@cache
def _character_kinds() -> np.ndarray:
    kinds = np.zeros(_TABLED + 1, np.uint8)
    for code in range(_TABLED):
        character = chr(code)
        if character.isalpha():
            kinds[code] = _LETTER
        elif character.isspace():
            kinds[code] = _SPACE
    kinds[_TABLED] = _LETTER
    return kinds


def letter_fraction(text: str) -> float:
    """Which part of the characters that are no white space are letters of any script."""
    codes = np.frombuffer(text.encode("utf-32-le"), "<u4")
    kinds = _character_kinds()[np.minimum(codes, _TABLED)]
    letters = int(np.count_nonzero(kinds == _LETTER))
    others = int(np.count_nonzero(kinds == _OTHER))
    return letters / max(1, letters + others)


def repetition(text: str) -> float:
    """Which part of the 16-byte windows of a text, in its first 16 KiB, occurred before in it.

    Ordinary prose has a few hundredths, one line over and over nearly 1. 0 for texts too short to
    tell. Where there are many windows, those whose first half has a hash divisible by eight stand
    for all: equal windows are in or out together.
    """
    data = np.frombuffer(text[:_HEAD].encode()[:_HEAD], np.uint8)
    count = len(data) - _WINDOW + 1
    if count < _FEWEST_WINDOWS:
        return 0.0
    halves = np.lib.stride_tricks.sliding_window_view(data, 8).copy().view("<u8").ravel()
    mixed = halves * _MIX[0]
    chosen = np.flatnonzero(mixed[:count] >> np.uint64(61) == 0)
    if len(chosen) < _FEWEST_WINDOWS:
        chosen = np.arange(count)
    hashes = (
        mixed[chosen] + (halves[chosen + _WINDOW // 2] ^ (mixed[chosen] >> np.uint64(29))) * _MIX[1]
    )
    return 1 - len(np.unique(hashes)) / len(hashes)


@dataclass(frozen=True)
class Filters:
    """Which documents are kept; 0 turns a filter off.

    Attributes:
        min_chars, max_chars: fewest and most characters of a document.
        min_letters: least fraction of letters, as `letter_fraction` measures it.
        max_repetition: largest fraction that repeats, as `repetition` measures it.
    """

    min_chars: int = 20
    max_chars: int = 0
    min_letters: float = 0.25
    max_repetition: float = 0.9

    @classmethod
    def off(cls) -> Self:
        """No filter at all, but for empty documents."""
        return cls(0, 0, 0, 0)

    def reason(self, text: str, whole: bool = True) -> str | None:
        """Why a clean text should be dropped, or None.

        `whole`: it is a document, and no section of one, whose length is not known here.
        """
        if not text or text.isspace():
            return EMPTY
        if whole and len(text) < self.min_chars:
            return SHORT
        if whole and self.max_chars and len(text) > self.max_chars:
            return LONG
        if self.min_letters and letter_fraction(text) < self.min_letters:
            return FEW_LETTERS
        if self.max_repetition and repetition(text) > self.max_repetition:
            return REPETITIVE
        return None
