"""How tokens spell bytes: GPT-2's printable alphabet of the 256 bytes, and SentencePiece's spaces and byte tokens."""

import re

import numpy as np

SPACE = "▁"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _alphabet() -> dict[str, int]:
    """GPT-2 writes printable Latin-1 bytes as themselves and the others, in order, as U+0100 and up."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTE_OF_CHAR = _alphabet()
_TABLE_LEN, _NO_BYTE = 0x200, 0x100  # no character of the alphabet is as high as the first, no byte as the second


def byte_level_bytes(token: str) -> bytes:
    """``Ġthe`` -> b" the". A token with a character outside the alphabet is plain text, added by hand."""
    try:
        return bytes([BYTE_OF_CHAR[char] for char in token])
    except KeyError:
        return token.encode("utf-8", errors="surrogateescape")


def all_byte_level_bytes(tokens: list[str]) -> list[bytes]:
    """``byte_level_bytes`` of each, for a whole vocabulary."""
    chars = np.frombuffer("".join(tokens).encode("utf-32-le", errors="surrogatepass"), dtype=np.uint32)
    table = np.full(_TABLE_LEN + 1, _NO_BYTE, dtype=np.uint16)
    for char, byte in BYTE_OF_CHAR.items():
        table[ord(char)] = byte
    values = table[np.minimum(chars, _TABLE_LEN)]
    ends = np.cumsum(np.fromiter(map(len, tokens), dtype=np.int64, count=len(tokens))).tolist()
    spelled, found, start = values.astype(np.uint8).tobytes(), [], 0
    for end in ends:
        found.append(spelled[start:end])
        start = end
    for i in np.unique(np.searchsorted(ends, np.flatnonzero(values == _NO_BYTE), side="right")).tolist():
        found[i] = byte_level_bytes(tokens[i])
    return found


def sentencepiece_bytes(token: str) -> bytes:
    """``▁the`` -> b" the", ``<0x0A>`` -> a newline's byte."""
    if byte := _BYTE_TOKEN.fullmatch(token):
        return bytes([int(byte[1], 16)])
    return token.replace(SPACE, " ").encode("utf-8", errors="surrogateescape")


def is_byte_token(token: str) -> bool:
    return _BYTE_TOKEN.fullmatch(token) is not None
