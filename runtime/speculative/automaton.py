"""The longest suffix of a growing text that occurred before: by search, and by the text's suffix automaton.

    text   a b c d . . a b c     matched: 3 tokens, last seen ending at position 2; what followed them: d . . a b c ...

A search reads the whole text. The automaton (Blumer et al., 1985) appends and matches a token in O(1) amortised, but
first it has to index the text, which takes as long as many searches. Many texts get only a few tokens more. So
``SeenText`` indexes a text once its searches have taken about as long.
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
_SEARCHES = 64  # of a whole text take about as long as to index it
_REFRESHED = 4  # shorter suffixes whose last position is updated as well


class SeenText:
    """The text's last ``match_len`` tokens occurred before, ending at ``match_end``."""

    __slots__ = ("_automaton", "_found", "_length", "_searched", "_text")

    def __init__(self) -> None:
        self._text = np.empty(0, np.int32)
        self._length = 0
        self._searched = 0  # tokens, in all searches
        self._found: tuple[int, int] | None = (0, 0)  # None: not known for the text as it is now
        self._automaton: SuffixAutomaton | None = None

    def __len__(self) -> int:
        return self._length

    @property
    def text(self) -> np.ndarray:
        return self._text[: self._length]

    @property
    def is_indexed(self) -> bool:
        return self._automaton is not None

    @property
    def match_len(self) -> int:
        return self._match()[0]

    @property
    def match_end(self) -> int:
        return self._match()[1]

    def extend(self, tokens: np.ndarray) -> None:
        """Append ``tokens`` (int32) to the text."""
        start, end = self._length, self._length + len(tokens)
        if end > len(self._text):
            self._text = _grown(self._text, max(end + 32, 2 * start))
        self._text[start:end] = tokens
        self._length, self._found = end, None

    def continuation(self, limit: int) -> np.ndarray:
        """A copy of the tokens that followed the matched suffix at its last occurrence, at most ``limit``.

        If they reach the end of the text, they are repeated up to ``limit`` tokens.
        """
        match_len, match_end = self._match()
        if match_len == 0 or limit <= 0:
            return np.zeros(0, np.int32)
        start, end = match_end + 1, self._length
        if start + limit <= end:
            return self._text[start : start + limit].copy()
        return np.resize(self._text[start:end], limit)

    def _match(self) -> tuple[int, int]:
        """``match_len`` and ``match_end``."""
        if self._found is None:
            self._found = self._searched_for() if self._automaton is None else None
        if self._found is None:
            if self._automaton is None:
                self._automaton = SuffixAutomaton()
            self._automaton.extend(self._text[len(self._automaton) : self._length])
            self._found = self._automaton.match_len, self._automaton.match_end
        return self._found

    def _searched_for(self) -> tuple[int, int] | None:
        """The same by search; None where searches would take longer than to index the text."""
        limit = _SEARCHES * self._length - self._searched
        if limit < self._length:
            return None
        result = np.empty(3, np.int64)
        _search_text(SearchCall(address_of(self._text), self._length, limit, address_of(result)))
        match_len, match_end, num_read = result.tolist()
        self._searched += num_read
        return (match_len, match_end) if num_read < limit else None


class SuffixAutomaton:
    """The text's last ``match_len`` tokens occurred before, ending at ``match_end``. Takes about 150 bytes a token."""

    __slots__ = ("_arrays", "_capacity", "_edges", "_header", "_states", "_table")

    def __init__(self) -> None:
        self._header = np.zeros(_HEADER, np.int64)
        self._header[_STATES] = 1
        self._capacity = 64  # tokens
        self._states = np.zeros((128, 4), np.int32)
        self._states[0] = (-1, 0, -1, -1)
        self._edges = np.zeros((192, 4), np.int32)
        self._table = np.full(512, -1, np.int32)
        self._arrays = self._addresses()

    def _addresses(self) -> tuple[int, int, int, int, int, int]:
        state = address_of(self._header), address_of(self._states)
        return *state, address_of(self._edges), address_of(self._table), len(self._table), self._capacity

    def __len__(self) -> int:
        """Tokens of the text."""
        return self._header.item(_TEXT_LEN)

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in (self._states, self._edges, self._table))

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

    def _reserve(self, length: int) -> None:
        if length <= self._capacity:
            return
        self._capacity = size = max(length, 2 * self._capacity)
        self._states = _grown(self._states, 2 * size)
        self._edges = _grown(self._edges, 3 * size)
        self._table = np.full(1 << (8 * size - 1).bit_length(), -1, np.int32)
        self._arrays = self._addresses()
        _fill_hash_table(ExtendCall(*self._arrays, 0, 0))


class SearchCall(NamedTuple):
    """The address of a text, and how many of its tokens a search may read."""

    text: int  # int32 [text_len]
    text_len: int
    limit: int
    result: int  # int64 [3], written: the match's length and end, and how many tokens were read


class ExtendCall(NamedTuple):
    """The addresses of an automaton's arrays, their sizes, and the tokens to append."""

    header: int  # int64
    states: int  # int32 [2 * capacity, 4]
    edges: int  # int32 [3 * capacity, 4]
    table: int  # int32 [table_len]
    table_len: int
    capacity: int  # tokens
    tokens: int  # int32 [num_tokens]
    num_tokens: int


@entry
def _search_text(call: SearchCall) -> None:
    result = int64s(call.result, 3)
    result[0], result[1], result[2] = _search(int32s(call.text, call.text_len), call.limit)


@entry  # loaded from disk without numba's compiler, unlike a dispatcher, whose first call takes 0.1 s
def _extend_text(call: ExtendCall) -> None:
    _extend(
        int64s(call.header, _HEADER),
        int32_rows(call.states, 2 * call.capacity, 4),
        int32_rows(call.edges, 3 * call.capacity, 4),
        int32s(call.table, call.table_len),
        int32s(call.tokens, call.num_tokens),
    )


@entry
def _fill_hash_table(call: ExtendCall) -> None:
    edges, table = int32_rows(call.edges, 3 * call.capacity, 4), int32s(call.table, call.table_len)
    _fill_table(table, edges, int64s(call.header, _HEADER)[_EDGES])


def _grown(array: np.ndarray, size: int) -> np.ndarray:
    grown = np.zeros((size, *array.shape[1:]), array.dtype)
    grown[: len(array)] = array
    return grown


@helper
def _search(text: np.ndarray, limit: int) -> tuple[int, int, int]:
    """The longest suffix's length, its last end before the text's, and the tokens read; ``limit`` where it gave up."""
    last = len(text) - 1
    length, found, num_read = 0, 0, last
    for end in range(last - 1, -1, -1):
        if end < length:
            break  # no room for a longer one
        if text[end] != text[last] or text[end - length] != text[last - length]:
            continue
        count = 1
        while count <= end and text[end - count] == text[last - count]:
            count += 1
        num_read += count
        if num_read >= limit:
            return 0, 0, limit
        if count > length:
            length, found = count, end
    return length, found, num_read


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
def _extend(header: np.ndarray, states: np.ndarray, edges: np.ndarray, table: np.ndarray, tokens: np.ndarray) -> None:
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
