"""The bytes that each token stands for, by the two ways in which vocabularies spell bytes.

Byte-level (GPT-2): every byte has a printable character of its own. SentencePiece: words start with "▁", and bytes
without a piece are tokens "<0x00>" to "<0xFF>".
"""

import re
from typing import Literal

ByteSpelling = Literal["byte-level", "sentencepiece"]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_of_char() -> dict[str, int]:
    """Byte for each character of the byte-level alphabet (GPT-2, Radford et al. 2019).

    Printable Latin-1 characters stand for themselves; the other bytes take the characters from U+0100 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + place): byte for place, byte in enumerate(hidden)}


_BYTE_OF_CHAR = _byte_of_char()


def bytes_of_piece(piece: str, spelling: ByteSpelling) -> bytes:
    """Bytes of an ordinary token; one that isn't spelled in the alphabet stands for its own text."""
    if spelling == "byte-level":
        if all(char in _BYTE_OF_CHAR for char in piece):
            return bytes(_BYTE_OF_CHAR[char] for char in piece)
        return piece.encode()
    byte_token = _BYTE_TOKEN.fullmatch(piece)
    if byte_token:
        return bytes([int(byte_token[1], 16)])
    return piece.replace("▁", " ").encode()
