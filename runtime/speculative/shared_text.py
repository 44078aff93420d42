"""Tokens of other sequences: a ring buffer, and the last place of each n-gram in it. One for each namespace."""

from typing import NamedTuple

import numpy as np

from ...kernels.cpu.arrays import address_of, int32s, int64s
from ...kernels.cpu.entry import entry
from ...kernels.cpu.machine_code import helper

_LONG, _SHORT = 6, 3  # lengths of the n-grams that are looked up, the longer first
_LONGEST = 64  # tokens of a match that are compared
SEAM = -1  # between texts; equals no token


class SharedText:
    """At most ``capacity`` tokens (a power of two); the oldest are overwritten. About 12 bytes a token."""

    __slots__ = ("_arrays", "_long", "_ring", "_short", "capacity", "num_added")

    def __init__(self, capacity: int = 1 << 18) -> None:
        assert capacity & (capacity - 1) == 0, capacity
        self.capacity = capacity
        self.num_added = 0
        self._ring = np.full(capacity, SEAM, np.int32)
        self._long = np.full(capacity, -1, np.int64)
        self._short = np.full(capacity, -1, np.int64)
        self._arrays = address_of(self._ring), address_of(self._long), address_of(self._short), capacity

    def add(self, tokens: np.ndarray) -> None:
        """Add a text (int32), or the next part of one, which begins with the last ``_LONG`` tokens added before."""
        tokens = tokens[-self.capacity // 2 :]
        if len(tokens):
            tokens = np.ascontiguousarray(tokens, np.int32)
            _add_text(TextCall(*self._arrays, self.num_added, address_of(tokens), len(tokens), 0, 0, 0))
            self.num_added += len(tokens) + 1

    def continuation(self, tail: np.ndarray, limit: int) -> tuple[np.ndarray, int]:
        """The tokens that followed the last occurrence of ``tail``'s end (int32), and the length of that match."""
        if not self.num_added or len(tail) < _SHORT or limit <= 0:
            return _NOTHING, 0
        out, result = np.empty(limit, np.int32), np.empty(2, np.int64)
        tail = np.ascontiguousarray(tail[-_LONGEST:], np.int32)
        tokens, written = (address_of(tail), len(tail)), (address_of(out), limit, address_of(result))
        _look_up_text(TextCall(*self._arrays, self.num_added, *tokens, *written))
        return out[: result.item(0)], result.item(1)


_NOTHING = np.zeros(0, np.int32)


class TextCall(NamedTuple):
    """The addresses of a shared text's arrays, all of ``capacity`` numbers, and what is added or looked up."""

    ring: int  # int32
    long: int  # int64
    short: int  # int64
    capacity: int
    num_added: int
    tokens: int  # int32 [num_tokens]
    num_tokens: int
    out: int  # int32 [limit], written by a look-up
    limit: int
    result: int  # int64 [2]: the numbers of tokens that were written and that matched


@entry
def _add_text(call: TextCall) -> None:
    size, tokens = call.capacity, int32s(call.tokens, call.num_tokens)
    _add(int32s(call.ring, size), int64s(call.long, size), int64s(call.short, size), call.num_added, tokens)


@entry
def _look_up_text(call: TextCall) -> None:
    size, tail, out = call.capacity, int32s(call.tokens, call.num_tokens), int32s(call.out, call.limit)
    ring, long, short = int32s(call.ring, size), int64s(call.long, size), int64s(call.short, size)
    result = int64s(call.result, 2)
    result[0], result[1] = _look_up(ring, long, short, call.num_added, tail, out)


@helper
def _place(tokens: np.ndarray, end: int, count: int, mask: int) -> int:
    value = np.uint64(count)
    for i in range(end - count, end):
        value = (value ^ np.uint64(tokens[i & mask])) * np.uint64(0x9E3779B97F4A7C15)
        value ^= value >> np.uint64(29)
    return int(value >> np.uint64(1))


@helper
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


@helper
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
