"""A faster encoder for byte-level BPE: tiktoken, where its ids are proved to be the same.

`tokenizers` looks a pair of tokens up in a table of merges; tiktoken joins two tokens whenever the
joined bytes are a token, the lowest rank first. Both cut words by GPT-2's pattern. The ids are the
same for every text when

1. ranks are in the order of the merges, and each merge makes a token of its own;
2. every token that a merge makes encodes, by itself, to itself. For the first step in which the
   two could differ joins neighbours a and b to a token t that no merge makes from them. What
   happened between the ends of a and b until then is what happens to the bytes of t alone, so
   these would come to a and b as well and end there, or in another way than by the merge of t;
3. every character has the same class (letter, number, white space, other) for both. Versions of
   Unicode differ in that for few characters: those that have been given a meaning since, and those
   that may yet be. A text with one of them goes to the library.

The first two are checked when an encoder is made. `tokenizers` remains the definition of the ids:
without tiktoken they are the same and take longer.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Mapping
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np

# GPT-2's pattern as tiktoken's engine runs it fastest: runs are never given back.
_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
_LONGEST = 1 << 18  # characters; a longer run of white space would overflow the engine's stack
_TABLED = 0x20000  # the code points looked at one by one; the rare ones beyond go to the library


class FastEncoder:
    """Ids of plain text, exactly those of the library's byte-level BPE."""

    def __init__(self, ranks: dict[bytes, int]) -> None:
        import tiktoken

        self._encode = tiktoken.Encoding(
            "treadle", pat_str=_PATTERN, mergeable_ranks=ranks, special_tokens={}
        ).encode_ordinary

    def __call__(self, text: str) -> np.ndarray | None:
        """The ids of a text without lone surrogates, int32 [N], or None: ask the library."""
        if len(text) > _LONGEST or not is_proved(text):
            return None
        return np.array(self._encode(text), np.int32)


def fast_encoder(
    model: Mapping[str, Any], tokenize: Callable[[str], Any], byte_of: Mapping[str, int]
) -> FastEncoder | None:
    """The fast encoder of a byte-level BPE with GPT-2's pattern, or None where there is none.

    model: the `model` of its tokenizer.json. tokenize: what the library makes of one word.
    byte_of: the byte that each character of a token stands for.
    """
    try:
        import tiktoken  # noqa: F401  an optional dependency
    except ImportError:
        return None
    others = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "ignore_merges")
    vocab = model["vocab"]
    if any(model.get(name) for name in others) or any(c not in vocab for c in byte_of):
        return None
    pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
    made = [left + right for left, right in pairs]
    in_order = all(vocab[a] < vocab[b] for a, b in pairwise(made))
    if not in_order or not all(c in byte_of for token in made for c in token):
        return None
    if any([t.id for t in tokenize(token)] != [vocab[token]] for token in made):
        return None
    ranks = {bytes(byte_of[c] for c in token): vocab[token] for token in (*byte_of, *made)}
    return FastEncoder(ranks)


def is_proved(text: str) -> bool:
    """Whether every character has one class in all versions of Unicode."""
    if text.isascii():
        return True
    codes = np.frombuffer(text.encode("utf-32-le"), "<u4")
    return not _unproved()[np.minimum(codes, _TABLED)].any()


@cache
def _unproved() -> np.ndarray:
    """Of each code point, whether its class is not the same in Unicode 3.2 and in Python's
    version, or neither knows it yet; bool [_TABLED + 1], the last for all beyond."""
    old, new = unicodedata.ucd_3_2_0, unicodedata
    unproved = np.ones(_TABLED + 1, bool)
    for code in range(_TABLED):
        category = new.category(chr(code))
        same = _class(category) == _class(old.category(chr(code)))
        unproved[code] = category == "Cn" or not same
    unproved[0x180E] = True  # white space in Unicode 4.0 to 6.2, and neither before nor after
    return unproved


def _class(category: str) -> str:
    return category[0] if category[0] in "LNZ" else "other"
