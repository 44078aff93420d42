"""Token ids in, text out, one token at a time: whole characters, up to where a stop string may begin.

    bytes:  [whole characters | an incomplete one: kept by the UTF-8 decoder]
    text:   [released | held: may begin a stop string]

Each token is decoded once, so a push costs as much as its own bytes.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence

from .stop_patterns import StopPattern, StopScan
from .stop_strings import StopStrings

_UTF8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """``pieces[id]`` are the bytes to show for a token; an id beyond them shows nothing.

    The stop string or pattern that is complete first ends the text; of several that are complete at one character, the
    longest does. Bytes that are not UTF-8 become U+FFFD, as in ``bytes.decode(errors="replace")``. The first
    ``num_hidden`` bytes repeat the end of the prompt: they are neither shown nor searched for stops.
    """

    __slots__ = (
        "_decoder",
        "_held",
        "_num_chars",
        "_num_released",
        "_pieces",
        "_released",
        "_scan",
        "_state",
        "_stops",
        "boundaries",
        "is_hidden",
        "matched_stop",
        "num_hidden",
        "num_tokens",
        "num_whole_tokens",
        "remainder",
    )

    def __init__(
        self,
        pieces: Sequence[bytes],
        stop: Sequence[str] = (),
        patterns: Sequence[StopPattern] = (),
        *,
        num_hidden: int = 0,
    ) -> None:
        self._pieces = pieces
        self.num_hidden = num_hidden
        self.is_hidden = False
        self._stops = StopStrings(tuple(stop)) if stop or patterns else None
        self._scan = StopScan(tuple(patterns)) if patterns else None
        self._decoder = _UTF8(errors="replace")
        self._state = 0
        self._held = ""
        self._num_chars = 0  # decoded characters: released and held
        self._num_released = 0
        self._released: list[str] = []
        # Points where a token and a character end together, as (tokens, characters), as far back as a cut may still go.
        self.boundaries: deque[tuple[int, int]] = deque([(0, 0)])
        self.num_tokens = 0
        self.num_whole_tokens = 0
        self.matched_stop: str | None = None
        self.remainder = ""

    @property
    def text(self) -> str:
        """All released text."""
        if len(self._released) > 1:
            self._released = ["".join(self._released)]
        return self._released[0] if self._released else ""

    @property
    def is_mid_character(self) -> bool:
        return bool(self._decoder.getstate()[0])

    def text_of(self, token_id: int) -> str:
        """What ``push`` would return for a token after a whole character; "" where the token ends within one."""
        try:
            return self._pieces[token_id].decode() if token_id < len(self._pieces) else ""
        except UnicodeDecodeError:
            return ""

    def push(self, token_id: int) -> str:
        """Takes a token; returns the text that can now be shown."""
        assert self.matched_stop is None, "the text has ended at a stop string"
        self.num_tokens += 1
        piece = self._pieces[token_id] if token_id < len(self._pieces) else b""
        self.is_hidden = False
        if self.num_hidden:
            hidden = min(self.num_hidden, len(piece))
            self.num_hidden -= hidden
            self.is_hidden = hidden == len(piece)  # the whole token
            piece = piece[hidden:]
        return self._take(self._decoder.decode(piece))

    def extend(self, token_ids: Sequence[int]) -> str:
        """``push`` for many tokens at once, where no bytes are hidden and there are no stops."""
        assert self._stops is None and not self.num_hidden
        self.num_tokens += len(token_ids)
        self.is_hidden = False
        pieces = self._pieces
        joined = b"".join([pieces[i] for i in token_ids if i < len(pieces)])
        return self._take(self._decoder.decode(joined))

    def finish(self) -> str:
        """Ends the text; returns the rest of it."""
        if self.matched_stop is not None:
            return ""
        text = self._take(self._decoder.decode(b"", final=True))
        if self.matched_stop is None:
            text += self._release(self._held)
            self._held = ""
        return text

    def _take(self, new: str) -> str:
        if self._stops is None:
            self.num_whole_tokens = self.num_tokens
            return self._release(new)
        stops, scan, state = self._stops, self._scan, self._state
        for i, char in enumerate(new, start=1):
            state = stops.step(state, char)
            stop = stops.match[state]
            length = 0 if stop is None else len(stop)
            if scan is not None:
                longest, pattern = scan.step(char)
                if longest > length:
                    length, stop = longest, pattern
            if stop is not None:
                return self._cut(self._held + new[:i], stop, length)
        self._state = state
        self._num_chars += len(new)
        text = self._held + new
        safe = len(text) - max(stops.depth[state], 0 if scan is None else scan.held)
        self._held = text[safe:]
        self._mark_boundary()
        return self._release(text[:safe])

    def _mark_boundary(self) -> None:
        self.num_whole_tokens = self.num_tokens
        if not self._decoder.getstate()[0]:
            self.boundaries.append((self.num_tokens, self._num_chars))
        # A cut falls at or after the released text: of the points before that, only the last one is needed.
        while len(self.boundaries) > 1 and self.boundaries[1][1] <= self._num_released:
            self.boundaries.popleft()

    def _cut(self, text: str, stop: str, length: int) -> str:
        released = self._release(text[: len(text) - length])
        while self.boundaries[-1][1] > self._num_released:
            self.boundaries.pop()
        self.num_whole_tokens, whole_chars = self.boundaries[-1]
        self.remainder = self.text[whole_chars:]
        self.matched_stop = stop
        self._held = ""
        return released

    def _release(self, text: str) -> str:
        if text:
            self._released.append(text)
            self._num_released += len(text)
        return text
