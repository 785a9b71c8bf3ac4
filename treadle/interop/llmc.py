"""llm.c's files: models, debug states and tokenizers, little-endian after a header of 256 int32.

| magic    | kind        | versions                                                        |
| -------- | ----------- | --------------------------------------------------------------- |
| 20240326 | model       | 1 float32; 3 float32 and 5 bfloat16, with a padded vocabulary   |
| 20240327 | debug state | 1; 2 with a padded vocabulary                                   |
| 20240328 | tokenizer   | 1; 2 with the end of text in the header                         |
| 20240520 | tokens      | 1, uint16; the magic 20240801 with version 7 for uint32         |

Tokens are `treadle.data.shards`' part. llm.c stores a linear layer's weight as [out, in], and the
tensors of one kind of all layers together; our GPT-2 has Hugging Face's [in, out]. The layouts
are those of `write_model`, `write_state` and `write_tokenizer` in llm.c's `train_gpt2.py`;
`docs/formats.md` has them byte by byte.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np

from treadle.data.alphabet import spelled
from treadle.data.shards import HEADER_BYTES, HEADER_INTS, read_tokens
from treadle.data.tokenizer import END_OF_TEXT, Tokenizer
from treadle.errors import CheckpointError, ConfigError, CorruptError, TokenizerError
from treadle.files import atomic_file, one_line, read_bytes
from treadle.graph.value import Shape, from_bfloat16, to_bfloat16
from treadle.interop.base import Imported
from treadle.models.base import Model
from treadle.models.gpt2 import GPT2

MODEL, STATE, TOKENIZER = 20240326, 20240327, 20240328
_KINDS = {
    MODEL: "model",
    STATE: "debug state",
    TOKENIZER: "tokenizer",
    20240520: "tokens",
    20240801: "tokens",
    20240522: "evaluation questions",
    20240527: "optimizer state",
    20240803: "model of train_llama3.py",
}


class _Form(NamedTuple):
    dtype: np.dtype
    padded: bool


_FORMS = {
    1: _Form(np.dtype("<f4"), False),
    3: _Form(np.dtype("<f4"), True),
    5: _Form(np.dtype("<u2"), True),
}
WRITABLE = (3, 5)
_PADDING = 128  # llm.c rounds the rows of wte up to a multiple of this
_MOST_LAYERS = 10_000
_MOST_TOKENS = 1 << 24
_BYTES = [bytes([byte]) for byte in range(256)]
STEPS = 10  # losses that a debug state may record
_FIRST_LOSS = 4  # header word

# llm.c's name of a tensor and ours, in the order of the files.
_TENSORS = (
    ("wte", "transformer.wte.weight"),
    ("wpe", "transformer.wpe.weight"),
    ("ln1w", "transformer.h.{}.ln_1.weight"),
    ("ln1b", "transformer.h.{}.ln_1.bias"),
    ("qkvw", "transformer.h.{}.attn.c_attn.weight"),
    ("qkvb", "transformer.h.{}.attn.c_attn.bias"),
    ("attprojw", "transformer.h.{}.attn.c_proj.weight"),
    ("attprojb", "transformer.h.{}.attn.c_proj.bias"),
    ("ln2w", "transformer.h.{}.ln_2.weight"),
    ("ln2b", "transformer.h.{}.ln_2.bias"),
    ("fcw", "transformer.h.{}.mlp.c_fc.weight"),
    ("fcb", "transformer.h.{}.mlp.c_fc.bias"),
    ("fcprojw", "transformer.h.{}.mlp.c_proj.weight"),
    ("fcprojb", "transformer.h.{}.mlp.c_proj.bias"),
    ("lnfw", "transformer.ln_f.weight"),
    ("lnfb", "transformer.ln_f.bias"),
)
TENSORS = tuple(name for name, _ in _TENSORS)
_TRANSPOSED = ("qkvw", "attprojw", "fcw", "fcprojw")


def is_llmc(path: Path) -> bool:
    """Whether a file begins with one of llm.c's magic numbers."""
    try:
        with open(path, "rb") as file:
            return int.from_bytes(file.read(4), "little") in _KINDS
    except OSError:
        return False


# ---------------------------------------------------------------- headers


def _header(path: Path, magic: int) -> np.ndarray:
    """The 256 int32 of a file of one kind; CheckpointError where it is of another."""
    try:
        with open(path, "rb") as file:
            data = file.read(HEADER_BYTES)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or one_line(error)}") from error
    found = int.from_bytes(data[:4], "little")
    if found != magic:
        kind = f"a {_KINDS[found]}" if found in _KINDS else "not a file"
        raise CheckpointError(f"{path}: {kind} of llm.c; expected its {_KINDS[magic]}")
    if len(data) < HEADER_BYTES:
        raise CorruptError(
            f"{path}: {len(data)} bytes, shorter than its header of {HEADER_BYTES}; it is cut off"
        )
    return np.frombuffer(data, "<i4")


def _expect_size(path: Path, expected: int) -> None:
    size = path.stat().st_size
    if size != expected:
        raise CorruptError(
            f"{path}: its header asks for {expected} bytes, the file has {size}; it is damaged or "
            "cut off"
        )


def _new_header(magic: int, version: int, *words: int) -> bytes:
    header = np.zeros(HEADER_INTS, "<i4")
    values = (magic, version, *words)
    header[: len(values)] = values
    return header.tobytes()


# ---------------------------------------------------------------- layout


def _shapes(model: GPT2, rows: int) -> dict[str, Shape]:
    """The shape of each tensor in a file whose wte has `rows` rows; all layers together."""
    c, layers = model.n_embd, model.n_layer
    return {
        "wte": (rows, c),
        "wpe": (model.block_size, c),
        "ln1w": (layers, c),
        "ln1b": (layers, c),
        "qkvw": (layers, 3 * c, c),
        "qkvb": (layers, 3 * c),
        "attprojw": (layers, c, c),
        "attprojb": (layers, c),
        "ln2w": (layers, c),
        "ln2b": (layers, c),
        "fcw": (layers, 4 * c, c),
        "fcb": (layers, 4 * c),
        "fcprojw": (layers, c, 4 * c),
        "fcprojb": (layers, c),
        "lnfw": (c,),
        "lnfb": (c,),
    }


def tensors(model: GPT2, weights: Mapping[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """Weights, or gradients, by llm.c's names, in its order and layouts; without padding rows."""
    for name, ours in _TENSORS:
        if "{}" not in ours:
            yield name, weights[ours]
            continue
        layers = (weights[ours.format(i)] for i in range(model.n_layer))
        yield name, np.stack([x.T if name in _TRANSPOSED else x for x in layers])


def _ours(model: GPT2, stored: Mapping[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """Weights by our names, in our layouts; the opposite of `tensors`."""
    for name, ours in _TENSORS:
        array = stored[name][: model.vocab_size] if name == "wte" else stored[name]
        if "{}" not in ours:
            yield ours, array
            continue
        for i in range(model.n_layer):
            yield ours.format(i), array[i].T if name in _TRANSPOSED else array[i]


def _map(path: Path, shapes: Mapping[str, Shape], dtype: np.dtype, offset: int) -> dict:
    """Views of a file's tensors, read by memory map."""
    found = {}
    for name, shape in shapes.items():
        found[name] = np.memmap(path, dtype, "r", offset, shape)
        offset += prod(shape) * dtype.itemsize
    return found


# ---------------------------------------------------------------- models


class _Sizes(NamedTuple):
    model: GPT2
    version: int
    rows: int  # of wte


def _sizes(path: Path) -> _Sizes:
    """What the header of a model says, checked against the length of the file."""
    header = _header(path, MODEL)
    version, block, vocab, layers, heads, channels, rows = (int(x) for x in header[1:8])
    if version not in _FORMS:
        raise CheckpointError(
            f"{path}: version {version} of llm.c's model; this reads "
            f"{', '.join(map(str, _FORMS))}: export it again with llm.c's train_gpt2.py"
        )
    form = _FORMS[version]
    rows = rows if form.padded else vocab
    if layers > _MOST_LAYERS:
        raise CorruptError(f"{path}: its header has {layers} layers; it is damaged")
    try:
        model = GPT2(vocab, layers, heads, channels, block)
    except ConfigError as error:
        raise CorruptError(f"{path}: its header is damaged: {error}") from None
    if rows < vocab:
        raise CorruptError(
            f"{path}: its header pads the vocabulary from {vocab} to {rows}; it is damaged"
        )
    numbers = sum(map(prod, _shapes(model, rows).values()))
    _expect_size(path, HEADER_BYTES + numbers * form.dtype.itemsize)
    return _Sizes(model, version, rows)


def model_version(path: str | Path) -> int:
    """The version of a model's file: 1, 3 or 5; errors as `read_llmc` raises them."""
    return _sizes(Path(path)).version


def read_llmc(path: str | Path) -> Imported:
    """A model of version 1 or 3 (float32) or 5 (bfloat16), its padding rows cut.

    The tokenizer is `<name>_tokenizer.bin` or `gpt2_tokenizer.bin` beside it, where one is.

    Raises:
        CheckpointError: not a model of llm.c, or of another version.
        CorruptError: the length is not what the header asks for, or a weight is not finite.
    """
    path = Path(path)
    model, version, rows = _sizes(path)
    stored = _map(path, _shapes(model, rows), _FORMS[version].dtype, HEADER_BYTES)
    weights = {}
    for name, array in _ours(model, stored):
        wide = from_bfloat16(array) if version == 5 else array
        weights[name] = np.array(wide, np.float32, order="C")
        if not np.isfinite(weights[name]).all():
            raise CorruptError(f"{path}: tensor '{name}' holds NaN or infinite values")
    tokenizer, notes = _tokenizer_beside(path, model.vocab_size)
    return Imported(model, weights, tokenizer, notes)


def _tokenizer_beside(path: Path, vocab_size: int) -> tuple[Tokenizer | None, list[str]]:
    for name in (f"{path.stem}_tokenizer.bin", "gpt2_tokenizer.bin"):
        candidate = path.with_name(name)
        if not candidate.is_file():
            continue
        tokenizer = read_tokenizer(candidate)
        if tokenizer.vocab_size <= vocab_size:
            return tokenizer, [f"the tokenizer is {candidate}"]
        return None, [
            f"{candidate} has {tokenizer.vocab_size} tokens, the model {vocab_size}: left out"
        ]
    return None, ["no tokenizer beside the model; give one when it is used"]


def write_llmc(
    path: str | Path, model: Model, weights: Mapping[str, np.ndarray], version: int = 3
) -> None:
    """Writes a model for llm.c: version 3 (float32) or 5 (bfloat16, rounded to nearest even).

    Raises:
        ConfigError: another version, or a model that llm.c cannot hold.
        CheckpointError: a weight that is not finite, or a file that cannot be written.
    """
    path = Path(path)
    if version not in WRITABLE:
        raise ConfigError(f"llm.c's model version {version}; this writes 3 (fp32) and 5 (bf16)")
    if not isinstance(model, GPT2):
        raise ConfigError(f"llm.c's files hold GPT-2 models, this is a {model.architecture}")
    if not model.tie_embeddings:
        raise ConfigError(
            "llm.c's GPT-2 has no output layer of its own, and this model has; "
            "train with model.tie_embeddings true, or export to hf or gguf"
        )
    rows = -(-model.vocab_size // _PADDING) * _PADDING
    sizes = (model.block_size, model.vocab_size, model.n_layer, model.n_head, model.n_embd, rows)
    full = model.to_hf(weights)  # with the biases that llm.c always has
    try:
        with atomic_file(path) as file:
            file.write(_new_header(MODEL, version, *sizes))
            for name, array in tensors(model, full):
                if not np.isfinite(array).all():
                    raise CheckpointError(f"tensor '{name}' holds NaN or infinite values")
                stored = to_bfloat16(array) if version == 5 else array
                file.write(np.ascontiguousarray(stored, _FORMS[version].dtype).data)
                if name == "wte":
                    file.write(bytes((rows - model.vocab_size) * model.n_embd * stored.itemsize))
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror or error}") from error


# ---------------------------------------------------------------- debug states


@dataclass(frozen=True)
class State:
    """What PyTorch computed for one batch. B windows of T tokens, vocabulary V.

    tokens, targets: int32 [B, T]. logits: float32 [B, T, V]. loss: mean cross-entropy. gradients:
    of that loss, by llm.c's names and in its layouts, without padding rows. losses: of ten
    steps on the batch; empty where the file has none (llm.c's own have none).
    """

    tokens: np.ndarray
    targets: np.ndarray
    logits: np.ndarray
    loss: float
    gradients: Mapping[str, np.ndarray]
    losses: tuple[float, ...]


def read_state(path: str | Path, model: GPT2) -> State:
    """The debug state of a model, read by memory map.

    Raises:
        CheckpointError: not a debug state, or of another version.
        CorruptError: it does not fit the model, or its length is not what its header asks for.
    """
    path = Path(path)
    header = _header(path, STATE)
    version, batch, time = (int(x) for x in header[1:4])
    if version not in (1, 2):
        raise CheckpointError(f"{path}: version {version} of llm.c's debug state; this reads 1, 2")
    if batch < 1 or not 1 <= time <= model.block_size:
        raise CorruptError(
            f"{path}: {batch} windows of {time} tokens, the model takes 1 to {model.block_size}; "
            "it is of another model or damaged"
        )
    # Whatever else is there are the padding rows of wte's gradient.
    places, vocab = batch * time, model.vocab_size
    before = 2 * places + places * vocab + 1
    numbers = before + sum(map(prod, _shapes(model, vocab).values()))
    rest = path.stat().st_size - HEADER_BYTES - 4 * numbers
    padding = rest // (4 * model.n_embd) if version == 2 else 0
    if rest < 0 or rest != 4 * model.n_embd * padding:
        raise CorruptError(
            f"{path}: {path.stat().st_size} bytes, {batch} windows of {time} tokens of this model "
            f"take {HEADER_BYTES + 4 * numbers}; it is of another model or cut off"
        )
    parts = {"x": (batch, time), "y": (batch, time)}
    ids = _map(path, parts, np.dtype("<i4"), HEADER_BYTES)
    for name, array in ids.items():
        if array.min() < 0 or array.max() >= vocab:
            raise CorruptError(
                f"{path}: {name} has ids from {array.min()} to {array.max()}, "
                f"the vocabulary {vocab}; it is of another model or damaged"
            )
    shapes = {"logits": (batch, time, vocab), "loss": (1,), **_shapes(model, vocab + padding)}
    found = _map(path, shapes, np.dtype("<f4"), HEADER_BYTES + 8 * places)
    logits, loss = found.pop("logits"), found.pop("loss")
    found["wte"] = found["wte"][:vocab]
    losses = header[_FIRST_LOSS : _FIRST_LOSS + STEPS].view("<f4")
    return State(
        np.array(ids["x"]),
        np.array(ids["y"]),
        logits,
        float(loss[0]),
        found,
        tuple(map(float, losses)) if losses.any() else (),
    )


# ---------------------------------------------------------------- tokenizers


def read_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a file, which holds the bytes of every token and nothing else.

    Characters and bytes are told by their tokens. Otherwise it is GPT-2's kind of BPE: the merge
    that makes a token is found by encoding it with the tokens before it, so the ids are those of
    the original where each token is made by one merge, in the order of the ids. A token that no
    merge makes is a special one.

    Raises:
        CheckpointError: not a tokenizer of llm.c, or of another version.
        CorruptError: a token of no bytes, one that is there twice, or bytes left over.
        TokenizerError: tokens that make no tokenizer.
    """
    path = Path(path)
    table, eot = _token_table(path)
    if len(set(table)) < len(table):
        raise CorruptError(f"{path}: a token is there twice; it is damaged")
    made = _char_tokenizer(table, eot) or _bpe_tokenizer(path, table, eot)
    if any(made.token_bytes(i) != token for i, token in enumerate(table)):
        raise TokenizerError(f"{path}: its tokens are neither characters nor a byte-level BPE")
    return made


def _token_table(path: Path) -> tuple[list[bytes], int]:
    """The bytes of each token, and the id of the end of text."""
    header = _header(path, TOKENIZER)
    version, count, eot = (int(x) for x in header[1:4])
    if version not in (1, 2):
        raise CheckpointError(f"{path}: version {version} of llm.c's tokenizer; this reads 1, 2")
    eot = count - 1 if version == 1 else eot
    size = path.stat().st_size - HEADER_BYTES
    if not (1 <= count <= _MOST_TOKENS and 2 * count <= size <= 256 * count and 0 <= eot < count):
        raise CorruptError(
            f"{path}: its header has {count} tokens and the end of text {eot}, {size} bytes "
            "follow; it is damaged"
        )
    data = read_bytes(path)[HEADER_BYTES:]
    table, place = [], 0
    for i in range(count):
        length = data[place] if place < len(data) else 0
        token = data[place + 1 : place + 1 + length]
        if not length or len(token) < length:
            raise CorruptError(f"{path}: token {i} is empty or cut off; it is damaged")
        table.append(token)
        place += 1 + length
    if place != len(data):
        raise CorruptError(f"{path}: {len(data) - place} bytes after its last token")
    return table, eot


def _char_tokenizer(table: list[bytes], eot: int) -> Tokenizer | None:
    """A character tokenizer with these tokens, or None where they are no characters."""
    try:
        texts = [token.decode() for token in table]
    except UnicodeDecodeError:
        return None
    count = next((i for i, text in enumerate(texts) if len(text) > 1), len(texts))
    characters, specials = texts[:count], texts[count:]
    if not count or characters != sorted(characters) or not all(len(t) > 1 for t in specials):
        return None
    if not specials:
        return Tokenizer.char("".join(characters))
    if eot != count or specials[0] != END_OF_TEXT:
        return None
    return Tokenizer.char("".join(characters), end_of_text=True, specials=specials[1:])


def _bpe_tokenizer(path: Path, table: list[bytes], eot: int) -> Tokenizer:
    ranks = {token: i for i, token in enumerate(table)}
    merges: list[tuple[str, str]] = []
    specials: dict[int, str] = {}
    for i, token in enumerate(table):
        if len(token) == 1:
            continue
        parts = [token] if i == eot else _merged(token, ranks, i)
        if len(parts) == 2:
            merges.append((spelled(parts[0]), spelled(parts[1])))
        else:
            specials[i] = _text(path, i, token)
    names = list(specials.values())
    if not merges and table[:256] == _BYTES and names[:1] == [END_OF_TEXT]:
        return Tokenizer.byte(names[1:])
    vocab = {specials.get(i, spelled(token)): i for i, token in enumerate(table)}
    return Tokenizer.from_bpe(vocab, merges, names, str(path))


def _text(path: Path, index: int, token: bytes) -> str:
    try:
        return token.decode()
    except UnicodeDecodeError:
        raise TokenizerError(f"{path}: no merge makes token {index}, {token[:20]!r}") from None


def _merged(token: bytes, ranks: Mapping[bytes, int], limit: int) -> list[bytes]:
    """What BPE makes of a token's bytes with the tokens below `limit`, the lowest first."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        joined = [ranks.get(a + b, limit) for a, b in pairwise(parts)]
        best = min(range(len(joined)), key=joined.__getitem__)
        if joined[best] >= limit:
            break
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    return parts if all(ranks.get(part, limit) < limit for part in parts) else [token]


def write_tokenizer(path: str | Path, tokenizer: Tokenizer) -> None:
    """Writes the bytes of every token, version 2, with which llm.c shows what a model writes.

    The end of text in the header is what llm.c begins a text with. Where the tokenizer has none,
    the line feed stands there, or id 0.

    Raises:
        TokenizerError: a kind of tokenizer whose tokens are not bytes, an id without a token, or
            one of no or more than 255 bytes.
        CheckpointError: a file that cannot be written.
    """
    path = Path(path)
    if not tokenizer.has_token_bytes:
        raise TokenizerError("llm.c's tokenizer holds tokens as bytes, and this one has other ones")
    table = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
    for i, token in enumerate(table):
        if not 1 <= len(token) <= 255:
            raise TokenizerError(f"token {i} has {len(token)} bytes, llm.c's have 1 to 255")
    start = table.index(b"\n") if b"\n" in table else 0
    eot = start if tokenizer.eos_id is None else tokenizer.eos_id
    try:
        with atomic_file(path) as file:
            file.write(_new_header(TOKENIZER, 2, len(table), eot))
            for token in table:
                file.write(bytes([len(token)]) + token)
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror or error}") from error


# ---------------------------------------------------------------- what a file is


def describe(path: str | Path) -> list[tuple[str, str]]:
    """(what, value) for each thing to know of a file that `is_llmc` knows.

    Raises:
        CheckpointError, CorruptError, DataError: what the file's reader would raise.
    """
    path = Path(path)
    with open(path, "rb") as file:
        magic = int.from_bytes(file.read(4), "little")
    kind = _KINDS.get(magic, "not a file")
    rows = [("format", f"llm.c, {kind}")]
    if magic == MODEL:
        model, version, padded = _sizes(path)
        return [
            *rows,
            ("version", f"{version} ({'bfloat16' if version == 5 else 'float32'})"),
            ("architecture", model.architecture),
            ("parameters", f"{model.n_parameters():,}"),
            ("layers", str(model.n_layer)),
            ("heads", str(model.n_head)),
            ("width", str(model.n_embd)),
            ("context", str(model.block_size)),
            ("vocabulary", f"{model.vocab_size:,}, padded to {padded:,}"),
            ("intact", "yes: its size is what its header says"),
        ]
    if magic == STATE:
        _, version, batch, time = (int(x) for x in _header(path, STATE)[:4])
        return [*rows, ("version", str(version)), ("batch", f"{batch} windows of {time} tokens")]
    if magic == TOKENIZER:
        table, eot = _token_table(path)
        return [*rows, ("tokens", f"{len(table):,}"), ("end of text", str(eot))]
    if kind == "tokens":
        tokens = read_tokens(path)
        return [*rows, ("tokens", f"{len(tokens):,}"), ("dtype", str(tokens.dtype))]
    return rows
