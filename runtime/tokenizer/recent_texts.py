"""The tokens of the texts that were tokenized last: prompts that share instructions or a document repeat long texts."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable
from threading import Lock

LEAST_CHARS = 200  # of a text that is kept; shorter ones are tokenized in less than 0.1 ms
MOST_CHARS = 4_000_000  # of all texts that are kept; the tokens of English text take about as many bytes


class RecentTexts:
    """Used on any thread. The text used longest ago is dropped first."""

    def __init__(self, encode: Callable[[str], list[int]], *, most_chars: int = MOST_CHARS) -> None:
        self._encode = encode
        self._most_chars = most_chars
        self._kept: OrderedDict[str, array[int]] = OrderedDict()
        self._num_chars = 0
        self._lock = Lock()

    def encode(self, text: str) -> list[int]:
        """What ``encode`` gives for ``text``; the list is the caller's."""
        if not LEAST_CHARS <= len(text) <= self._most_chars // 4:
            return self._encode(text)
        with self._lock:
            kept = self._kept.get(text)
            if kept is not None:
                self._kept.move_to_end(text)
        if kept is not None:
            return kept.tolist()
        ids = self._encode(text)
        with self._lock:
            if text not in self._kept:  # another thread may have been here
                self._kept[text] = array("i", ids)
                self._num_chars += len(text)
            while self._num_chars > self._most_chars:
                self._num_chars -= len(self._kept.popitem(last=False)[0])
        return ids
