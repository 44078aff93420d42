"""Which rows of a step share a prefix of their contexts, found by comparing slots.

A slot holds one position of one text, so two rows with the same slot at a chunk's end share the whole text up to
there. Sorted by the slots at their chunks' ends, rows stand next to the rows they share most with. A run is a set of
neighbours that share chunks; attention reads the chunks of a run once, in pieces:

ends of chunks   r0  7 4 9     in common with the next      runs   r0 r1 r2   chunk 0
                 r1  7 4 2          2 chunks                       r0 r1      chunk 1
                 r2  7 5            1 chunk
                 r3  3              none
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ...kernels import Sharing
from ...kernels.shared import PIECE_FIELDS
from ..layers.batch import StepArrays
from ..scheduler import MAX_DRAFT_TOKENS

PIECES_A_ROW = 2  # on average at most: there are fewer runs than rows, but a long run is several pieces


@dataclass(frozen=True, slots=True)
class Prefixes:
    """``kernels.SharedPrefixes`` on the host, all int32; pieces are [P, PIECE_FIELDS]."""

    order: np.ndarray
    pieces: np.ndarray
    own_from: np.ndarray

    def padded(self, num_tokens: int) -> np.ndarray:
        """One int32 array [shared_size(num_tokens)]: order, own_from and pieces, each padded with zeros."""
        packed, n = np.zeros(shared_size(num_tokens), np.int32), aligned(num_tokens)
        packed[: len(self.order)] = self.order
        packed[n : n + len(self.own_from)] = self.own_from
        packed[2 * n : 2 * n + self.pieces.size] = self.pieces.reshape(-1)
        return packed


def shared_size(num_tokens: int) -> int:
    return aligned(num_tokens) * (2 + PIECES_A_ROW * PIECE_FIELDS)


def aligned(num_tokens: int) -> int:
    """At least ``num_tokens``; as many int32 are a multiple of 16 bytes."""
    return -(-num_tokens // 4) * 4


class PrefixFinder:
    """Owns the slots at the chunk ends of each row of the slot table, and the result for the last decode step, which
    usually holds for the next one too.
    """

    def __init__(self, sharing: Sharing, *, key_bytes: int, num_rows: int, max_len: int) -> None:
        """``key_bytes``: size of one position's keys and values in a layer."""
        self._sharing, self._key_bytes = sharing, key_bytes
        self._ends = np.zeros((num_rows, max_len // sharing.chunk_len), np.int32)
        self._last: tuple[tuple[bytes, bytes] | None, Prefixes | None] = (None, None)

    def note(self, changes: Iterable[tuple[int, int, np.ndarray]]) -> None:
        """Record slots written to the table: (row, first position, slots)."""
        chunk_len = self._sharing.chunk_len
        for row, start, slots in changes:
            first = start // chunk_len
            found = slots[(first + 1) * chunk_len - 1 - start :: chunk_len]
            if len(found):
                self._ends[row, first : first + len(found)] = found
                self._last = (None, None)

    def note_step(self, step: StepArrays) -> None:
        """Record the slots that a step brings. A decode step only makes rows longer, so the last result stays."""
        self.note(step.earlier)
        count, rest = np.divmod(step.positions + 1, self._sharing.chunk_len)
        whole = rest == 0
        if whole.any():
            self._ends[step.token_rows[whole], count[whole] - 1] = step.out_slots[whole]
            if not step.is_decode:
                self._last = (None, None)

    def of_decode(self, step: StepArrays) -> Prefixes | None:
        """The prefixes of a decode step; the same object as for the last step if nothing has changed."""
        whole = step.positions // self._sharing.chunk_len
        if np.count_nonzero(whole) < 2:
            return None
        key = (step.row_ids.tobytes(), whole.tobytes())
        if key != self._last[0]:
            self._last = (key, self._found(step.row_ids, whole, np.ones(len(whole), np.int64)))
        return self._last[1]

    def of(self, row_ids: np.ndarray, ends: np.ndarray, counts: np.ndarray) -> Prefixes | None:
        """The prefixes of rows whose last ``counts`` of ``ends`` positions are new.

        None if a row has more new positions than a draft: a prompt's chunk reads its context once for many tokens.
        """
        if len(counts) < 2 or counts.max() > MAX_DRAFT_TOKENS + 1:
            return None
        return self._found(row_ids, (ends - counts) // self._sharing.chunk_len, counts)

    def _found(self, row_ids: np.ndarray, whole: np.ndarray, counts: np.ndarray) -> Prefixes | None:
        chunk_len, piece_len = self._sharing.chunk_len, self._sharing.piece_len
        num_rows, most = len(whole), int(whole.max())
        has = np.arange(most) < whole[:, None]
        ends = np.where(
            has, self._ends[row_ids, :most], -1 - np.arange(num_rows)[:, None]
        )  # a row without this chunk equals no other row
        rows = np.lexsort(ends.T[::-1]) if most else np.arange(num_rows)
        ends = ends[rows]
        common = np.cumprod(ends[1:] == ends[:-1], axis=1).sum(axis=1)  # chunks shared by each row and the next
        places = np.concatenate(([0], np.cumsum(counts[rows])))
        pieces: list[tuple[int, int, int, int, int]] = []
        saved = 0
        for begin, end, first, last in _runs(common.tolist()):
            cuts = [*range(int(places[begin]), int(places[end]), piece_len), int(places[end])]
            pieces += [(cut, until, int(rows[begin]), first, last) for cut, until in pairwise(cuts)]
            saved += (end - begin - (len(cuts) - 1)) * (last - first)
        if saved * chunk_len * self._key_bytes < self._sharing.least_bytes or not pieces:
            return None
        return _prefixes(pieces, rows, common, counts, most=PIECES_A_ROW * num_rows)


def _prefixes(
    pieces: list[tuple[int, int, int, int, int]], rows: np.ndarray, common: np.ndarray, counts: np.ndarray, *, most: int
) -> Prefixes:
    """At most ``most`` pieces, those nearest to the beginning; tokens of the others read the rest for themselves. A run
    keeps all of its pieces or none, as the kernel takes one ``own_from`` for all of a row's tokens.
    """
    starts = np.cumsum(counts) - counts
    order = np.concatenate([np.arange(starts[row], starts[row] + counts[row]) for row in rows])
    own = np.repeat(np.maximum(np.append(common, 0), np.append(0, common)), counts[rows])  # in order
    pieces.sort(key=lambda piece: piece[3])
    while 0 < most < len(pieces) and pieces[most - 1][2:] == pieces[most][2:]:
        most -= 1
    for begin, end, _, first, _ in pieces[most:]:
        own[begin:end] = np.minimum(own[begin:end], first)
    own_from = np.empty(len(order), np.int32)
    own_from[order] = own
    return Prefixes(order.astype(np.int32), np.array(pieces[:most], np.int32), own_from)


def _runs(common: list[int]) -> Iterator[tuple[int, int, int, int]]:
    """(begin, end, first, last): exactly the neighbours [begin, end) share chunks [first, last).

    ``common[i]`` is the number of chunks that i and i + 1 share. (LCP intervals: Abouelhoda et al., 2004.)
    """
    open_runs = [(0, 0)]  # (shared chunks, begin), ascending
    for i, depth in enumerate([*common, 0]):
        begin = i
        while open_runs[-1][0] > depth:
            last, begin = open_runs.pop()
            yield begin, i + 1, max(depth, open_runs[-1][0]), last
        if open_runs[-1][0] < depth:
            open_runs.append((depth, begin))
