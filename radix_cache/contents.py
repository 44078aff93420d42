"""Token ids that stand for contents, such as images: numbers beyond every vocabulary, one run of them for each content.

An engine gives each content its own run of ids, so the radix tree shares a content's KV between the sequences that hold
it, and never between two contents. The ids are this engine's alone. Names of blocks, which engines and disks share, are
made of the content's digest and the position in it instead (see ``Contents.described``).
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

FIRST_CONTENT_ID = 1 << 24  # no vocabulary is that large
_END = (1 << 31) - 1  # ids are int32


class OutOfContentIds(Exception):
    """This cache has given away all ids: it has seen 2 billion tokens of different contents."""


class Contents:
    """Which content each run of ids stands for. Runs are never taken back: 50 bytes for each content stay."""

    def __init__(self) -> None:
        self._next = FIRST_CONTENT_ID
        self._firsts: list[int] = []
        self._digests: list[bytes] = []
        self._first_of: dict[bytes, int] = {}

    def first_id(self, digest: bytes, length: int) -> int:
        """The id of the first of ``length`` tokens of the content ``digest``; the others follow it.

        ``digest`` names the content and all that its tokens follow from, so its length is always the same.
        """
        found = self._first_of.get(digest)
        if found is not None:
            return found
        if self._next + length > _END:
            raise OutOfContentIds
        first, self._next = self._next, self._next + length
        self._firsts.append(first)
        self._digests.append(digest)
        self._first_of[digest] = first
        return first

    def described(self, tokens: np.ndarray) -> bytes:
        """Bytes that are equal in every engine exactly for equal tokens of equal contents.

        A content's token becomes its position in the content. What follows is, for each run of tokens of one content,
        where the run begins and the content's digest.
        """
        held = np.flatnonzero(tokens >= FIRST_CONTENT_ID)
        shown, digests, last = tokens.astype("<i4", copy=True), [], -1
        for i in held.tolist():
            run = bisect_right(self._firsts, int(tokens[i])) - 1
            shown[i] = FIRST_CONTENT_ID + int(tokens[i]) - self._firsts[run]
            if run != last:
                digests.append(i.to_bytes(4, "little") + self._digests[run])
                last = run
        return shown.tobytes() + b"".join(digests)


def in_vocabulary(tokens: np.ndarray, placeholder: int) -> np.ndarray:
    """``tokens`` with ``placeholder`` in the places of contents; the same array where there are none."""
    is_content = tokens >= FIRST_CONTENT_ID
    return np.where(is_content, np.int32(placeholder), tokens) if is_content.any() else tokens
