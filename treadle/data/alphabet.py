"""The alphabet that byte-level vocabularies are written in: a printable character for each byte."""

from __future__ import annotations


def _byte_characters() -> list[str]:
    """The printable stand-in of each byte, by value: itself where printable, else from U+0100 on.

    The mapping of GPT-2's `encoder.py`.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(b) if b in printable else chr(next(others)) for b in range(256)]


BYTE_CHARACTERS = _byte_characters()
BYTE_OF_CHARACTER = {character: byte for byte, character in enumerate(BYTE_CHARACTERS)}


def spelled(token: bytes) -> str:
    """A token as byte-level vocabularies write it."""
    return "".join(BYTE_CHARACTERS[byte] for byte in token)
