"""Tokenizers: characters, bytes and byte-level BPE, all in the `tokenizer.json` format.

    Tokenizer.char(text)                  one id per Unicode character, in sorted order
    Tokenizer.byte()                      ids 0 to 255 are the bytes, 256 is the end of text
    Tokenizer.train_bpe(texts, size)      byte-level BPE with GPT-2's way of cutting words
    Tokenizer.load(source)                a tokenizer.json, its directory, or its contents
    Tokenizer.from_vocab_merges(v, m)     GPT-2's pair of files

Ids are exactly those of the `tokenizers` library for the same `tokenizer.json`. Characters and
bytes are looked up by NumPy instead, and a long text is given to the library in pieces:

    Cutting is safe before a space or a line feed that follows a character that is no white space.
    In GPT-2's pattern white space stands only at the start of a word or in a run of white space, so
    a word always ends at such a place, and the pattern looks ahead only inside a run of white
    space. This holds for tokenizers with that pattern and no normalizer; for others the text
    stays whole.

Where tiktoken is installed and gives the same ids (`fastbpe` says when), it encodes the pieces. The
text of a special token (such as `<|endoftext|>`) encodes to its id wherever it stands.
"""

from __future__ import annotations

import codecs
import json
import os
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from treadle.data.alphabet import BYTE_CHARACTERS, BYTE_OF_CHARACTER
from treadle.data.fastbpe import FastEncoder, fast_encoder
from treadle.errors import TokenizerError
from treadle.files import one_line

END_OF_TEXT = "<|endoftext|>"
BLANK_LINE = "\n\n"
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
VOCAB_FILE, MERGES_FILE = "vocab.json", "merges.txt"

_CHUNK = 1 << 16  # characters that one call of the library gets at a time
_CHUNKS_AT_ONCE = 64  # bounds the memory that the results of the library take
_LARGEST_VOCABULARY = 1 << 24
_MIN_FREQUENCY = 2
LARGEST_VOCAB = 1 << 24  # far more than any has
_EOS_NAMES = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>")
_BOS_NAMES = ("<s>", "<|begin_of_text|>", "<bos>")

_ANY_CHARACTER = r"[\s\S]"


class Tokenizer:
    """Text to ids and back.

    Attributes:
        kind: "char", "byte", "bpe" (byte-level with GPT-2's pattern) or "other".
        vocab_size: one more than the largest id.
        bos_id, eos_id: the ids that begin and end a text, or None.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, bos: str | None = None, eos: str | None = None
    ) -> None:
        """Wraps a tokenizer of the library; `bos` and `eos` name tokens, else they are found."""
        # Files of other projects may hold these settings, which would cut or pad a corpus.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        spec = json.loads(backend.to_str())
        vocab = backend.get_vocab(with_added_tokens=True)
        if not vocab:
            raise TokenizerError("the tokenizer has no tokens; give a text or a file with some")
        self.vocab_size: int = max(vocab.values()) + 1
        if self.vocab_size > _LARGEST_VOCABULARY:  # what follows is as long as the largest id
            raise TokenizerError(
                f"the tokenizer has an id {self.vocab_size - 1:,}; ids are below "
                f"{_LARGEST_VOCABULARY:,}"
            )
        self._specials: dict[str, int] = {
            token["content"]: token["id"] for token in spec["added_tokens"]
        }
        self._is_byte_level = (spec["decoder"] or {}).get("type") == "ByteLevel"
        self.kind = _kind(spec, self._is_byte_level)
        self._can_be_cut = self.kind == "bpe" and all(
            not (token["lstrip"] or token["rstrip"] or token["single_word"])
            and not any(map(str.isspace, token["content"]))
            for token in spec["added_tokens"]
        )
        # The library drops a byte that a vocabulary lacks without a word, so we look ourselves.
        self._missing_bytes = [
            byte
            for character, byte in BYTE_OF_CHARACTER.items()
            if self.kind == "bpe" and character not in vocab
        ]
        self._id_of_code = _code_table(vocab, self._specials) if self.kind == "char" else None
        self._bytes_of_id: list[bytes | None] = [None] * self.vocab_size
        for token, index in vocab.items():
            self._bytes_of_id[index] = self._token_bytes(token)
        self.eos_token = _first_known(vocab, (eos, *_EOS_NAMES))
        self.bos_token = _first_known(vocab, (bos, *_BOS_NAMES, self.eos_token))
        self.eos_id = None if self.eos_token is None else vocab[self.eos_token]
        self.bos_id = None if self.bos_token is None else vocab[self.bos_token]

    # ---- making one -------------------------------------------------------------------------

    @classmethod
    def char(cls, text: str, end_of_text: bool = False, specials: Sequence[str] = ()) -> Tokenizer:
        """One id per character of `text`, in the order of code points.

        With `end_of_text`, one more id stands for the end of a text; then come the `specials`.

        Raises:
            TokenizerError: an empty text, or a lone surrogate, which no file can hold.
        """
        _utf8(text)
        characters = sorted(set(text))
        if not characters:
            raise TokenizerError("a character tokenizer needs a text with at least one character")
        vocab = {character: index for index, character in enumerate(characters)}
        backend = tokenizers.Tokenizer(models.WordLevel(vocab=vocab))
        backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(_ANY_CHARACTER), "isolated")
        backend.decoder = decoders.Fuse()
        _add_specials(backend, [END_OF_TEXT, *specials] if end_of_text else specials)
        return cls(backend)

    @classmethod
    def byte(cls, specials: Sequence[str] = ()) -> Tokenizer:
        """Ids 0 to 255 are the bytes of UTF-8; 256 is the end of text, then come the `specials`."""
        vocab = {character: byte for byte, character in enumerate(BYTE_CHARACTERS)}
        backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        _add_specials(backend, [END_OF_TEXT, *specials])
        return cls(backend)

    @classmethod
    def train_bpe(
        cls, texts: Iterable[str], vocab_size: int, specials: Sequence[str] = ()
    ) -> Tokenizer:
        """Byte-level BPE (Sennrich et al. 2016, on bytes as in GPT-2), trained on `texts`.

        The vocabulary has at most `vocab_size` entries: the end of text, the `specials`, the 256
        bytes, and the most frequent merges, each seen at least twice. The same texts give the same
        file, byte for byte, whatever the number of threads and the hash seed.

        Raises:
            TokenizerError: fewer entries than the bytes and the special tokens need, or more than
                any vocabulary has.
        """
        special_tokens = _checked_specials([END_OF_TEXT, *specials])
        smallest = len(BYTE_CHARACTERS) + len(special_tokens)
        if vocab_size < smallest:
            raise TokenizerError(
                f"a BPE of {vocab_size} entries is too small; the bytes and special tokens alone "
                f"need {smallest}"
            )
        if vocab_size > LARGEST_VOCAB:
            raise TokenizerError(
                f"a BPE of {vocab_size} entries is too large; the most is {LARGEST_VOCAB:,}"
            )
        backend = tokenizers.Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            min_frequency=_MIN_FREQUENCY,
            special_tokens=special_tokens,
            initial_alphabet=sorted(BYTE_CHARACTERS),
            show_progress=False,
        )
        # The trainer does not know special tokens inside a text, so they are cut out here.
        marker = re.compile("|".join(map(re.escape, special_tokens)))
        pieces = (
            piece
            for text in texts
            for document in marker.split(text)
            for piece in _safe_pieces(document)
        )
        backend.train_from_iterator(pieces, trainer)
        return cls(backend)

    @classmethod
    def load(cls, source: str | bytes | os.PathLike[str]) -> Tokenizer:
        """A tokenizer from a `tokenizer.json`, a directory that holds one, or its contents.

        `bytes`, or a string that begins with a brace, are contents. Beside the file, a
        `tokenizer_config.json` names the tokens that begin and end a text.

        Raises:
            TokenizerError: no such file, or not a tokenizer.
        """
        if isinstance(source, str) and source.lstrip().startswith("{"):
            source = source.encode()
        if isinstance(source, bytes):
            return cls(_parse(source, "tokenizer"))
        path = Path(source)
        if path.is_dir():
            path = path / TOKENIZER_FILE
        backend = _parse(_read(path), str(path))
        beside = path.with_name(TOKENIZER_CONFIG_FILE)
        names = _special_names(beside) if path.name == TOKENIZER_FILE and beside.exists() else {}
        return cls(backend, bos=names.get("bos_token"), eos=names.get("eos_token"))

    @classmethod
    def from_vocab_merges(
        cls, vocab_path: str | os.PathLike[str], merges_path: str | os.PathLike[str]
    ) -> Tokenizer:
        """A byte-level BPE from GPT-2's `vocab.json` and `merges.txt`.

        Raises:
            TokenizerError: a file that is missing, or that does not fit the other.
        """
        vocab = _json_object(_read(Path(vocab_path)), str(vocab_path))
        lines = _decoded(_read(Path(merges_path)), str(merges_path)).splitlines()
        merges = []
        for number, line in enumerate(lines, 1):
            if (number == 1 and line.startswith("#version")) or not line:
                continue
            parts = line.split(" ")
            if len(parts) != 2:
                raise TokenizerError(
                    f"{merges_path}: line {number} is not a merge of two tokens: {line[:40]!r}"
                )
            merges.append((parts[0], parts[1]))
        specials = [END_OF_TEXT] if END_OF_TEXT in vocab else []
        return cls.from_bpe(vocab, merges, specials, f"{vocab_path} and {merges_path}")

    @classmethod
    def from_bpe(
        cls,
        vocab: dict[str, int],
        merges: list[tuple[str, str]],
        specials: Sequence[str],
        where: str,
    ) -> Tokenizer:
        """A byte-level BPE from ids by token and the merges in their order, both as `spelled`.

        The `specials` are in the vocabulary too, as they are. `where` names the source in errors.

        Raises:
            TokenizerError: merges that do not fit the vocabulary.
        """
        try:
            backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
        except Exception as error:
            raise TokenizerError(f"{where} do not fit each other: {one_line(error)}") from None
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        backend.decoder = decoders.ByteLevel()
        _add_specials(backend, specials)
        return cls(backend)

    # ---- text to ids ------------------------------------------------------------------------

    def encode(self, text: str, plain: bool = False) -> np.ndarray:
        """The ids of `text`, int32 [N]. With `plain`, special tokens in it are text like any other.

        Raises:
            TokenizerError: a character that the tokenizer does not know (named, with its
                position), or a lone surrogate.
        """
        if self.kind in ("char", "byte"):
            return self._encode_by_table(text, plain)
        data = _utf8(text)
        for byte in self._missing_bytes:
            if byte in data:
                raise TokenizerError(
                    f"byte 0x{byte:02X} at byte {data.index(byte)} of the text is not in the "
                    "vocabulary; use a byte-level vocabulary with all 256 bytes"
                )
        del data
        ids: list[np.ndarray] = []
        waiting: list[str] = []
        for piece in _safe_pieces(text) if self._can_be_cut else [text]:
            known = self._encode_fast(piece, plain)
            if known is None:
                waiting.append(piece)
            if known is not None or len(waiting) == _CHUNKS_AT_ONCE:
                ids += self._encode_batch(waiting, plain)
                waiting = []
            if known is not None:
                ids.append(known)
        ids += self._encode_batch(waiting, plain)
        return np.concatenate(ids) if ids else np.empty(0, np.int32)

    @cached_property
    def _fast(self) -> FastEncoder | None:
        if not self._can_be_cut:
            return None
        model = json.loads(self._backend.to_str())["model"]
        return fast_encoder(model, self._backend.model.tokenize, BYTE_OF_CHARACTER)

    def _encode_fast(self, piece: str, plain: bool) -> np.ndarray | None:
        if self._fast is None or not (plain or not any(s in piece for s in self._specials)):
            return None
        return self._fast(piece)

    def _encode_batch(self, pieces: list[str], plain: bool) -> list[np.ndarray]:
        if not pieces:
            return []
        try:
            self._backend.encode_special_tokens = plain
            encodings = self._backend.encode_batch_fast(pieces, add_special_tokens=False)
        except Exception as error:
            raise TokenizerError(f"the tokenizer cannot encode: {one_line(error)}") from None
        finally:
            self._backend.encode_special_tokens = False
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def _encode_by_table(self, text: str, plain: bool) -> np.ndarray:
        parts: list[np.ndarray] = []
        position = 0
        for piece in [text] if plain else self._cut_at_specials(text):
            if piece in self._specials and not plain:
                parts.append(np.array([self._specials[piece]], np.int32))
            elif self._id_of_code is not None:
                parts.append(_lookup(self._id_of_code, piece, position))
            else:
                parts.append(np.frombuffer(_utf8(piece, position), np.uint8).astype(np.int32))
            position += len(piece)
        return np.concatenate(parts) if parts else np.empty(0, np.int32)

    def _cut_at_specials(self, text: str) -> list[str]:
        if not any(special in text for special in self._specials):
            return [text] if text else []
        # The longest first, as the library matches them.
        names = sorted(self._specials, key=lambda name: (-len(name), name))
        pieces = re.split("(" + "|".join(map(re.escape, names)) + ")", text)
        return [piece for piece in pieces if piece]

    @property
    def separator(self) -> str:
        """What stands between two documents of a text: the end of text, else a blank line."""
        return self.eos_token if self.eos_token in self._specials else BLANK_LINE

    # ---- ids to text ------------------------------------------------------------------------

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD.

        Raises:
            TokenizerError: an id outside of the vocabulary, such as one of a padding row.
        """
        numbers = self._checked(ids)
        if self.kind == "other":
            return self._backend.decode(numbers, skip_special_tokens=False)
        return b"".join(self._bytes_of_id[i] or b"" for i in numbers).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of UTF-8 that an id stands for; of a token as it is spelled where the kind of
        tokenizer is "other".

        Raises:
            TokenizerError: an id outside of the vocabulary.
        """
        (number,) = self._checked([token_id])
        return self._bytes_of_id[number] or b""

    @property
    def has_token_bytes(self) -> bool:
        """Whether the texts of ids are the bytes of their tokens, one after another."""
        return self.kind != "other" or self._is_byte_level

    def stream(self) -> TextStream:
        """A decoder that takes ids one at a time."""
        return TextStream(self)

    def _checked(self, ids: Sequence[int] | np.ndarray) -> list[int]:
        numbers = [int(i) for i in ids]
        for number in numbers:
            if not 0 <= number < self.vocab_size or self._bytes_of_id[number] is None:
                raise TokenizerError(
                    f"id {number} is not in the vocabulary of {self.vocab_size} tokens; "
                    "was the model trained with another tokenizer?"
                )
        return numbers

    def _token_bytes(self, token: str) -> bytes:
        spelled = self._is_byte_level and token not in self._specials
        if spelled and all(c in BYTE_OF_CHARACTER for c in token):
            return bytes(BYTE_OF_CHARACTER[c] for c in token)
        return token.encode()

    # ---- files ------------------------------------------------------------------------------

    def to_json(self) -> str:
        """The text of `tokenizer.json`; equal tokenizers give equal texts."""
        return self._backend.to_str()

    def vocab_merges(self) -> tuple[str, str]:
        """The texts of GPT-2's `vocab.json` and `merges.txt`.

        Raises:
            TokenizerError: not a byte-level BPE.
        """
        if self.kind != "bpe":
            raise TokenizerError(
                f"a {self.kind} tokenizer has no {VOCAB_FILE} and {MERGES_FILE}; only a BPE has"
            )
        model = json.loads(self._backend.to_str())["model"]
        vocab = dict(sorted((model["vocab"] | self._specials).items(), key=lambda item: item[1]))
        merges = (m if isinstance(m, str) else " ".join(m) for m in model["merges"])
        lines = ["#version: 0.2", *merges]
        return json.dumps(vocab, ensure_ascii=False), "\n".join(lines) + "\n"

    def hf_config(self, block_size: int | None = None) -> dict[str, Any]:
        """The contents of `tokenizer_config.json`, with which AutoTokenizer keeps every space."""
        config: dict[str, Any] = {
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "tokenizer_class": "PreTrainedTokenizerFast",
        }
        if block_size is not None:
            config["model_max_length"] = block_size
        if self.bos_token is not None:
            config["bos_token"] = self.bos_token
        if self.eos_token is not None:
            config["eos_token"] = self.eos_token
        return dict(sorted(config.items()))


class TextStream:
    """Turns ids into text as they come, holding back what is not yet a whole character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._library = decoders.DecodeStream(skip_special_tokens=False)
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes, which may be empty.

        Raises:
            TokenizerError: an id outside of the vocabulary.
        """
        tokenizer = self._tokenizer
        (number,) = tokenizer._checked([token_id])
        if tokenizer.kind != "other":
            return self._utf8.decode(tokenizer._bytes_of_id[number] or b"")
        text = self._library.step(tokenizer._backend, number)
        self._pending = [] if text is not None else [*self._pending, number]
        return text or ""

    def finish(self) -> str:
        """What was held back, with U+FFFD for the bytes of a character that never ended."""
        if self._tokenizer.kind != "other":
            return self._utf8.decode(b"", final=True)
        return self._tokenizer.decode(self._pending) if self._pending else ""


# ---- details --------------------------------------------------------------------------------


def _kind(spec: dict[str, Any], is_byte_level: bool) -> str:
    """Which of ours the contents of a `tokenizer.json` are, by what decides the ids."""
    model, cut = spec["model"], spec["pre_tokenizer"] or {}
    if spec["normalizer"] is not None:
        return "other"
    if model["type"] == "WordLevel":
        ours = (
            cut.get("type") == "Split"
            and cut["pattern"] == {"Regex": _ANY_CHARACTER}
            and cut["behavior"] == "Isolated"
            and (spec["decoder"] or {}).get("type") == "Fuse"
            and all(len(token) == 1 for token in model["vocab"])
        )
        return "char" if ours else "other"
    if model["type"] != "BPE" or cut.get("type") != "ByteLevel" or not is_byte_level:
        return "other"
    if cut["add_prefix_space"]:
        return "other"
    if cut["use_regex"]:
        return "bpe"
    in_order = list(model["vocab"]) == BYTE_CHARACTERS
    return "byte" if in_order and not model["merges"] else "other"


def _checked_specials(names: Sequence[str]) -> list[str]:
    """Special tokens that can be told from text.

    Raises:
        TokenizerError: an empty one, one with white space, or the same one twice.
    """
    for position, name in enumerate(names):
        if not name or any(map(str.isspace, name)) or name in names[:position]:
            raise TokenizerError(
                f"special token {name!r}: expected text without white space, given once"
            )
        _utf8(name)
    return list(names)


def _add_specials(backend: tokenizers.Tokenizer, names: Sequence[str]) -> None:
    tokens = [tokenizers.AddedToken(name, special=True) for name in _checked_specials(names)]
    backend.add_special_tokens(tokens)


def _code_table(vocab: dict[str, int], specials: dict[str, int]) -> np.ndarray:
    """Code point to id, int32; -1 where there is none, also in the last entry."""
    codes = {ord(token): index for token, index in vocab.items() if token not in specials}
    table = np.full(max(codes) + 2, -1, np.int32)
    table[list(codes)] = list(codes.values())
    return table


def _lookup(table: np.ndarray, text: str, position: int) -> np.ndarray:
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
    ids = table[np.minimum(codes, len(table) - 1)]
    missing = np.flatnonzero(ids < 0)
    if missing.size:
        first = int(missing[0])
        raise TokenizerError(
            f"{_named(text[first])} at position {position + first} is not in the character "
            "vocabulary; use only characters of the training text"
        )
    return ids


def _named(character: str) -> str:
    name = unicodedata.name(character, "")
    return f"character {character!r} (U+{ord(character):04X}{' ' + name if name else ''})"


def _utf8(text: str, position: int = 0) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise TokenizerError(
            f"{_named(text[error.start])} at position {position + error.start} is half of a "
            "surrogate pair and no character; remove it"
        ) from None


_CUT = re.compile(r"(?<=[^\s\u180e])[ \n]")


def _safe_pieces(text: str) -> Iterator[str]:
    """Cuts a text into pieces of about `_CHUNK` characters, at places that no word spans."""
    start = 0
    while len(text) - start > _CHUNK:
        cut = _CUT.search(text, start + _CHUNK)
        if cut is None:
            break
        yield text[start : cut.start()]
        start = cut.start()
    if start < len(text):
        yield text[start:]


def _first_known(vocab: dict[str, int], names: Iterable[str | None]) -> str | None:
    return next((name for name in names if name in vocab), None)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TokenizerError(f"{path}: cannot read the tokenizer: {error.strerror}") from None


def _decoded(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{where}: not UTF-8 at byte {error.start}") from None


def _json_object(data: bytes, where: str) -> dict[str, Any]:
    try:
        values = json.loads(_decoded(data, where))
    except json.JSONDecodeError as error:
        raise TokenizerError(f"{where}: not JSON at line {error.lineno}: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{where}: not JSON: {one_line(error)}") from None
    if not isinstance(values, dict):
        raise TokenizerError(f"{where}: expected a JSON object")
    return values


def _parse(data: bytes, where: str) -> tokenizers.Tokenizer:
    text = _decoded(data, where)
    try:
        return tokenizers.Tokenizer.from_str(text)
    except Exception as error:
        raise TokenizerError(f"{where}: not a tokenizer.json: {one_line(error)}") from None


def _special_names(path: Path) -> dict[str, str]:
    """`bos_token` and `eos_token` of a `tokenizer_config.json`, as texts."""
    values = _json_object(_read(path), str(path))
    names = {}
    for key in ("bos_token", "eos_token"):
        token = values.get(key)
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            names[key] = token
    return names
