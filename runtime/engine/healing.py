"""Token healing: a prompt's last tokens are removed, and the generated text has to begin with their text.

    prompt:  ... | The | url | is | http | :          ":" is removed, since the vocabulary has "://" too
    output:                             | :// | ...   drawn from tokens that begin with ":" or are a prefix of it

Without it a prompt that ends inside a longer token forces a token boundary that the model has not seen in training.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ..tokenizer import Tokenizer

MAX_TOKENS = 4  # given back at most


class Healer:
    """Finds tokens by their prefix. One per engine."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.token_bytes = tokenizer.token_bytes
        self._special = tokenizer.special_ids
        self.num_words = (len(self.token_bytes) + 31) // 32

    @cached_property
    def _order(self) -> np.ndarray:
        """Text tokens by their bytes."""
        ids = [i for i, piece in enumerate(self.token_bytes) if piece and i not in self._special]
        return np.array(sorted(ids, key=self.token_bytes.__getitem__), dtype=np.int64)

    @cached_property
    def _sorted(self) -> list[bytes]:
        return [self.token_bytes[i] for i in self._order]

    def to_give_back(self, ids: list[int]) -> tuple[int, bytes]:
        """How many of the last tokens to give back, and their bytes: the most that are a prefix of a longer token."""
        found, text, joined = 0, b"", b""
        for count in range(1, min(MAX_TOKENS, len(ids)) + 1):
            joined = self.token_bytes[ids[-count]] + joined
            start, end = self._beginning_with(joined)
            same = bisect_left(self._sorted, joined + b"\0", start)
            if same < end and _is_text(joined):
                found, text = count, joined
        return found, text

    def _beginning_with(self, text: bytes) -> tuple[int, int]:
        """The range of ``_sorted`` that begins with ``text``."""
        start = bisect_left(self._sorted, text)
        head = text.rstrip(b"\xff")
        end = bisect_left(self._sorted, head[:-1] + bytes([head[-1] + 1])) if head else len(self._sorted)
        return start, end

    def mask(self, text: bytes) -> np.ndarray:
        """The tokens allowed next: those that begin with ``text``, and those that are a prefix of it."""
        start, end = self._beginning_with(text)
        allowed = [self._order[start:end]]
        for size in range(1, len(text)):
            low = bisect_left(self._sorted, text[:size])
            high = bisect_left(self._sorted, text[:size] + b"\0", low)
            allowed.append(self._order[low:high])
        ids = np.concatenate(allowed)
        row = np.zeros(self.num_words, dtype=np.uint32)
        np.bitwise_or.at(row, ids >> 5, np.left_shift(np.uint32(1), (ids & 31).astype(np.uint32)))
        return row


class HealMatcher:
    """Allows texts that begin with ``text``. Dropped once ``text`` is written."""

    __slots__ = ("_healer", "error", "text")

    def __init__(self, healer: Healer, text: bytes) -> None:
        self._healer = healer
        self.text = text  # the part that is not written yet
        self.error: str | None = None

    def mask(self) -> np.ndarray:
        return self._healer.mask(self.text)

    def accept(self, token_id: int) -> bool:
        piece = self._healer.token_bytes[token_id]
        if not (piece.startswith(self.text) or self.text.startswith(piece)):
            self.error = f"token {token_id} ({piece!r}) does not continue {self.text!r}"
            return False
        self.text = self.text[len(piece) :]
        return True


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
