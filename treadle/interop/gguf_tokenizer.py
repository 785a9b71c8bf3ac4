"""The tokenizer in a GGUF file, by tokenizer.ggml.model.

"gpt2" is a BPE of bytes: tokens in the byte alphabet of GPT-2, merges, and the name of the pattern
that cuts words. It serves byte-level BPE as it is. Characters and bytes become such a BPE, too: a
character of several bytes is put together by merges whose first pieces are no tokens of the
vocabulary. llama.cpp looks up whole results alone, so it gives our ids. Readers that want every
piece in the vocabulary (transformers) refuse the tokenizer, not the model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from treadle.data.alphabet import spelled
from treadle.data.tokenizer import Tokenizer
from treadle.errors import TokenizerError

# The pattern that a tokenizer.json cuts words by, and what GGUF calls it.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PATTERNS = {
    _LLAMA3: "llama-bpe",
    _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"): "qwen2",
}
_GPT2 = "gpt-2"
# A merge that never happens, since UTF-8 has no such bytes: readers want a list that is not empty.
_NEVER = " ".join((spelled(b"\xff"), spelled(b"\xff")))


def add_tokenizer(writer: Any, tokenizer: Tokenizer, vocab_size: int) -> list[str]:
    """Adds a tokenizer to a GGUFWriter; returns notes.

    Raises:
        TokenizerError: more tokens than the model's vocabulary has.
    """
    import gguf

    if tokenizer.vocab_size > vocab_size:
        raise TokenizerError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model {vocab_size}; it belongs "
            "to another model"
        )
    spec = json.loads(tokenizer.to_json())
    pattern = _pattern(tokenizer, spec)
    if pattern is None:
        writer.add_tokenizer_model("none")
        writer.add_vocab_size(vocab_size)
        return [
            "the tokenizer is left out: GGUF has byte-level BPE, bytes and characters here, and "
            "this one is another kind"
        ]
    notes = []
    normal = gguf.TokenType.NORMAL
    tokens = [f"[PAD{i}]" for i in range(vocab_size)]
    types = [gguf.TokenType.UNUSED] * vocab_size
    for token, index in spec["model"]["vocab"].items():
        tokens[index] = spelled(token.encode()) if tokenizer.kind == "char" else token
        types[index] = normal
    for added in spec["added_tokens"]:
        kind = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
        tokens[added["id"]], types[added["id"]] = added["content"], kind
    if tokenizer.kind in ("char", "byte"):
        merges = list(_character_merges(tokenizer, spec)) or [_NEVER]
        notes.append(
            "the tokenizer is written as a BPE of bytes: llama.cpp reads it and drops characters "
            "that it lacks; transformers' GGUF reader takes the model but not this tokenizer"
        )
    else:
        pairs = spec["model"]["merges"]
        merges = [m if isinstance(m, str) else " ".join(m) for m in pairs] or [_NEVER]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pattern)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    if tokenizer.bos_id is not None:
        writer.add_bos_token_id(tokenizer.bos_id)
    if tokenizer.eos_id is not None:
        writer.add_eos_token_id(tokenizer.eos_id)
    else:
        notes.append(
            "the tokenizer has no end of text, which GGUF cannot say: llama.cpp takes token 11 "
            "for it unless it is run with --ignore-eos"
        )
    writer.add_add_bos_token(False)
    return notes


def _pattern(tokenizer: Tokenizer, spec: dict[str, Any]) -> str | None:
    """GGUF's name of the way that words are cut; None where the tokenizer is of another kind."""
    if tokenizer.kind in ("bpe", "byte", "char"):
        return _GPT2
    if spec["model"]["type"] != "BPE" or not tokenizer.has_token_bytes or spec["normalizer"]:
        return None
    cut = spec["pre_tokenizer"] or {}
    steps = cut.get("pretokenizers", [cut])
    patterns = [step["pattern"].get("Regex") for step in steps if step.get("type") == "Split"]
    return _PATTERNS.get(patterns[0]) if len(patterns) == 1 else None


def _character_merges(tokenizer: Tokenizer, spec: dict[str, Any]) -> Iterable[str]:
    """Merges that put the bytes of each character together, from its first byte on."""
    if tokenizer.kind != "char":
        return
    known = set()
    for character in spec["model"]["vocab"]:
        data = character.encode()
        for end in range(2, len(data) + 1):
            merge = f"{spelled(data[: end - 1])} {spelled(data[end - 1 : end])}"
            if merge not in known:
                known.add(merge)
                yield merge
