"""The suffix automaton of a growing text (Blumer et al., 1985): finds the longest suffix that occurred before.

Appending and matching a token costs O(1) amortised.

    text   a b c d . . a b c     matched: 3 tokens, last seen ending at position 2; what followed them: d . . a b c ...
"""

from typing import NamedTuple

import numpy as np

from ...kernels.cpu.arrays import address_of, int32_rows, int32s, int64s
from ...kernels.cpu.entry import entry
from ...kernels.cpu.machine_code import helper

# Columns of a state and of an edge, and the entries of the header.
_LINK, _LEN, _FIRST_EDGE, _END = 0, 1, 2, 3
_FROM, _TOKEN, _TO, _NEXT = 0, 1, 2, 3
_STATES, _EDGES, _LAST, _MATCH, _MATCH_LEN, _MATCH_END, _TEXT_LEN, _HEADER = 0, 1, 2, 3, 4, 5, 6, 7
_REFRESHED = 4  # shorter suffixes whose last position is updated as well


class SuffixAutomaton:
    """The text's last ``match_len`` tokens occurred before, ending at ``match_end``. Takes about 150 bytes a token."""

    __slots__ = ("_arrays", "_edges", "_header", "_states", "_table", "_text")

    def __init__(self) -> None:
        self._header = np.zeros(_HEADER, np.int64)
        self._header[_STATES] = 1
        self._states = np.zeros((128, 4), np.int32)
        self._states[0] = (-1, 0, -1, -1)
        self._edges = np.zeros((192, 4), np.int32)
        self._table = np.full(512, -1, np.int32)
        self._text = np.zeros(64, np.int32)
        self._arrays = self._addresses()

    def _addresses(self) -> tuple[int, int, int, int, int, int, int]:
        state, text = (address_of(self._header), address_of(self._states)), address_of(self._text)
        return *state, address_of(self._edges), address_of(self._table), text, len(self._table), len(self._text)

    def __len__(self) -> int:
        return self._header.item(_TEXT_LEN)

    @property
    def text(self) -> np.ndarray:
        return self._text[: len(self)]

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in (self._text, self._states, self._edges, self._table))

    @property
    def match_len(self) -> int:
        return self._header.item(_MATCH_LEN)

    @property
    def match_end(self) -> int:
        return self._header.item(_MATCH_END)

    def extend(self, tokens: np.ndarray) -> None:
        """Append ``tokens`` (int32) to the text."""
        self._reserve(len(self) + len(tokens))
        tokens = np.ascontiguousarray(tokens, np.int32)
        _extend_text(ExtendCall(*self._arrays, address_of(tokens), len(tokens)))

    def continuation(self, limit: int) -> np.ndarray:
        """A copy of the tokens that followed the matched suffix at its last occurrence, at most ``limit``.

        If they reach the end of the text, they are repeated up to ``limit`` tokens.
        """
        if self.match_len == 0 or limit <= 0:
            return np.zeros(0, np.int32)
        start, end = self.match_end + 1, len(self)
        if start + limit <= end:
            return self._text[start : start + limit].copy()
        return np.resize(self._text[start:end], limit)

    def _reserve(self, length: int) -> None:
        if length <= len(self._text):
            return
        size = max(length, 2 * len(self._text))
        self._text = _grown(self._text, size)
        self._states = _grown(self._states, 2 * size)
        self._edges = _grown(self._edges, 3 * size)
        self._table = np.full(1 << (8 * size - 1).bit_length(), -1, np.int32)
        self._arrays = self._addresses()
        _fill_hash_table(ExtendCall(*self._arrays, 0, 0))


class ExtendCall(NamedTuple):
    """The addresses of an automaton's arrays, their sizes, and the tokens to append."""

    header: int  # int64
    states: int  # int32 [2 * text_len, 4]
    edges: int  # int32 [3 * text_len, 4]
    table: int  # int32 [table_len]
    text: int  # int32 [text_len]
    table_len: int
    text_len: int  # of the array, not of the text
    tokens: int  # int32 [num_tokens]
    num_tokens: int


@entry  # loaded from disk without numba's compiler, unlike a dispatcher, whose first call takes 0.1 s
def _extend_text(call: ExtendCall) -> None:
    _extend(
        int64s(call.header, _HEADER),
        int32_rows(call.states, 2 * call.text_len, 4),
        int32_rows(call.edges, 3 * call.text_len, 4),
        int32s(call.table, call.table_len),
        int32s(call.text, call.text_len),
        int32s(call.tokens, call.num_tokens),
    )


@entry
def _fill_hash_table(call: ExtendCall) -> None:
    edges, table = int32_rows(call.edges, 3 * call.text_len, 4), int32s(call.table, call.table_len)
    _fill_table(table, edges, int64s(call.header, _HEADER)[_EDGES])


def _grown(array: np.ndarray, size: int) -> np.ndarray:
    grown = np.zeros((size, *array.shape[1:]), array.dtype)
    grown[: len(array)] = array
    return grown


@helper
def _find(table: np.ndarray, edges: np.ndarray, state: int, token: int) -> int:
    """The edge's number, or -1 - place, with the place in the hash table where it belongs."""
    mask = len(table) - 1
    place = ((state * 0x9E3779B1) ^ (token * 0x85EBCA6B)) & 0x7FFFFFFF
    place = (place ^ (place >> 15)) & mask
    while True:
        edge = table[place]
        if edge < 0:
            return -1 - place
        if edges[edge, _FROM] == state and edges[edge, _TOKEN] == token:
            return edge
        place = (place + 1) & mask


@helper
def _fill_table(table: np.ndarray, edges: np.ndarray, count: int) -> None:
    for edge in range(count):
        place = -1 - _find(table, edges, edges[edge, _FROM], edges[edge, _TOKEN])
        table[place] = edge


@helper
def _add_edge(
    header: np.ndarray, states: np.ndarray, edges: np.ndarray, table: np.ndarray, state: int, token: int, to: int
) -> None:
    place = -1 - _find(table, edges, state, token)
    edge = header[_EDGES]
    header[_EDGES] += 1
    edges[edge, _FROM] = state
    edges[edge, _TOKEN] = token
    edges[edge, _TO] = to
    edges[edge, _NEXT] = states[state, _FIRST_EDGE]
    states[state, _FIRST_EDGE] = edge
    table[place] = edge


@helper
def _extend(
    header: np.ndarray, states: np.ndarray, edges: np.ndarray, table: np.ndarray, text: np.ndarray, tokens: np.ndarray
) -> None:
    match, match_len = header[_MATCH], header[_MATCH_LEN]
    for i in range(len(tokens)):
        token = tokens[i]
        position = header[_TEXT_LEN]
        # The match in the automaton of the text so far: shorten it until the token follows it.
        edge = _find(table, edges, match, token)
        while edge < 0 and match != 0:
            match = states[match, _LINK]
            match_len = states[match, _LEN]
            edge = _find(table, edges, match, token)
        if edge >= 0:
            match = edges[edge, _TO]
            match_len += 1
            header[_MATCH_END] = states[match, _END]
        else:
            match_len = 0
        _append(header, states, edges, table, token)
        text[position] = token
        header[_TEXT_LEN] = position + 1
        # After a split the matched suffix may belong to the new state.
        while match != 0 and states[states[match, _LINK], _LEN] >= match_len:
            match = states[match, _LINK]
        state = match
        for _ in range(_REFRESHED):
            if state <= 0:
                break
            states[state, _END] = position
            state = states[state, _LINK]
    header[_MATCH], header[_MATCH_LEN] = match, match_len


@helper
def _append(header: np.ndarray, states: np.ndarray, edges: np.ndarray, table: np.ndarray, token: int) -> None:
    new = header[_STATES]
    header[_STATES] += 1
    last = header[_LAST]
    states[new, _LEN] = states[last, _LEN] + 1
    states[new, _FIRST_EDGE] = -1
    states[new, _END] = header[_TEXT_LEN]
    at = last
    edge = -1
    while at >= 0:
        edge = _find(table, edges, at, token)
        if edge >= 0:
            break
        _add_edge(header, states, edges, table, at, token, new)
        at = states[at, _LINK]
    if at < 0:
        states[new, _LINK] = 0
    else:
        to = edges[edge, _TO]
        if states[to, _LEN] == states[at, _LEN] + 1:
            states[new, _LINK] = to
        else:
            half = header[_STATES]
            header[_STATES] += 1
            states[half, _LEN] = states[at, _LEN] + 1
            states[half, _LINK] = states[to, _LINK]
            states[half, _END] = states[to, _END]
            states[half, _FIRST_EDGE] = -1
            copied = states[to, _FIRST_EDGE]
            while copied >= 0:
                _add_edge(header, states, edges, table, half, edges[copied, _TOKEN], edges[copied, _TO])
                copied = edges[copied, _NEXT]
            while at >= 0:
                edge = _find(table, edges, at, token)
                if edge < 0 or edges[edge, _TO] != to:
                    break
                edges[edge, _TO] = half
                at = states[at, _LINK]
            states[to, _LINK] = half
            states[new, _LINK] = half
    header[_LAST] = new
