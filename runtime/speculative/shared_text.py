"""Tokens of other sequences: a ring buffer, and the last place of each n-gram in it. One for each namespace."""

import numba as nb
import numpy as np

_LONG, _SHORT = 6, 3  # lengths of the n-grams that are looked up, the longer first
_LONGEST = 64  # tokens of a match that are compared
SEAM = -1  # between texts; equals no token


class SharedText:
    """At most ``capacity`` tokens (a power of two); the oldest are overwritten. About 12 bytes a token."""

    __slots__ = ("_long", "_ring", "_short", "capacity", "num_added")

    def __init__(self, capacity: int = 1 << 18) -> None:
        assert capacity & (capacity - 1) == 0, capacity
        self.capacity = capacity
        self.num_added = 0
        self._ring = np.full(capacity, SEAM, np.int32)
        self._long = np.full(capacity, -1, np.int64)
        self._short = np.full(capacity, -1, np.int64)

    def add(self, tokens: np.ndarray) -> None:
        """Add a text (int32), or the next part of one, which begins with the last ``_LONG`` tokens added before."""
        tokens = tokens[-self.capacity // 2 :]
        if len(tokens):
            self.num_added = _add(self._ring, self._long, self._short, self.num_added, tokens)

    def continuation(self, tail: np.ndarray, limit: int) -> tuple[np.ndarray, int]:
        """The tokens that followed the last occurrence of ``tail``'s end (int32), and the length of that match."""
        if not self.num_added or len(tail) < _SHORT or limit <= 0:
            return _NOTHING, 0
        out = np.empty(limit, np.int32)
        count, matched = _look_up(self._ring, self._long, self._short, self.num_added, tail[-_LONGEST:], out)
        return out[:count], matched


_NOTHING = np.zeros(0, np.int32)


@nb.njit(cache=True)
def _place(tokens: np.ndarray, end: int, count: int, mask: int) -> int:
    value = np.uint64(count)
    for i in range(end - count, end):
        value = (value ^ np.uint64(tokens[i & mask])) * np.uint64(0x9E3779B97F4A7C15)
        value ^= value >> np.uint64(29)
    return int(value >> np.uint64(1))


@nb.njit(cache=True)
def _add(ring: np.ndarray, long: np.ndarray, short: np.ndarray, added: int, tokens: np.ndarray) -> int:
    mask = len(ring) - 1
    for i in range(len(tokens)):
        ring[added & mask] = tokens[i]
        added += 1
        if i + 1 >= _SHORT:
            short[_place(ring, added, _SHORT, mask) & mask] = added
        if i + 1 >= _LONG:
            long[_place(ring, added, _LONG, mask) & mask] = added
    ring[added & mask] = SEAM
    return added + 1


@nb.njit(cache=True)
def _look_up(
    ring: np.ndarray, long: np.ndarray, short: np.ndarray, added: int, tail: np.ndarray, out: np.ndarray
) -> tuple[int, int]:
    mask, whole = len(ring) - 1, 0x7FFFFFFF
    for count in (_LONG, _SHORT):
        if len(tail) < count:
            continue
        table = long if count == _LONG else short
        end = table[_place(tail, len(tail), count, whole) & mask]
        if end < 0 or end + len(out) <= added - len(ring):
            continue
        matched = 0
        oldest = max(0, added - len(ring))
        while matched < len(tail) and end - 1 - matched >= oldest:
            if ring[(end - 1 - matched) & mask] != tail[len(tail) - 1 - matched]:
                break
            matched += 1
        if matched < count:
            continue
        found = 0
        while found < len(out) and end + found < added and end + found >= oldest:
            token = ring[(end + found) & mask]
            if token < 0:
                break
            out[found] = token
            found += 1
        if found:
            return found, matched
    return 0, 0
