"""Running sequences that take one token a step, as arrays by row: a step of hundreds is a few calls of numpy.

    tokens:  [0, told) in the sequence's own buffer   [told, known) kept here   next_ids: at ``computed``, if any

A sequence's own numbers and tokens lag behind until it is told. Never decides who is in, and never preempts.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...radix_cache import RadixCache
from .plan import DecodePart
from .sequence import Sequence

UNTOLD = 64  # tokens that a sequence is told of at once, at most
WINDOW = 64  # slots that are looked up in a lease at once, at most


class SteadyRows:
    """Which rows there are, and all that a step changes of them.

    ``on_told(seq, ids)`` is called when ``seq`` has been told of its last tokens (int32, perhaps none, to be copied if
    kept), ``on_left(seq)`` when it is not steady any more. A row of no steady sequence has the id -1. ``is_next``:
    whether a row's next token, or the draw that makes it, is known.
    """

    def __init__(self, max_rows: int, cache: RadixCache, *, slot_chunk: int) -> None:
        self.on_told: Callable[[Sequence, np.ndarray], None] = lambda seq, ids: None
        self.on_left: Callable[[Sequence], None] = lambda seq: None
        self.seq_ids = np.full(max_rows, -1, np.int64)
        self.known = np.zeros(max_rows, np.int64)  # tokens whose value is known
        self.is_next = np.zeros(max_rows, np.bool_)
        self._cache = cache
        self._slot_chunk = slot_chunk
        self._sequences: dict[int, Sequence] = {}  # by row
        self._told = np.zeros(max_rows, np.int64)
        self._tape = np.zeros((max_rows, UNTOLD), np.int32)
        self._computed = np.zeros(max_rows, np.int64)
        self._next_ids = np.zeros(max_rows, np.int32)
        self._slots = np.zeros((max_rows, max(WINDOW, slot_chunk)), np.int32)
        self._slots_start = np.zeros(max_rows, np.int64)
        self._slots_end = np.zeros(max_rows, np.int64)
        self._prompt_lens = np.zeros(max_rows, np.int64)
        self._max_new = np.zeros(max_rows, np.int64)
        self._tenant_ids = np.zeros(max_rows, np.int64)
        self._tenants: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def sequences(self) -> list[Sequence]:
        return list(self._sequences.values())

    def sequence(self, row: int) -> Sequence:
        return self._sequences[row]

    # -- in and out ---------------------------------------------------------------------------------------------------

    def enter(self, seq: Sequence) -> bool:
        """Take ``seq``, which runs, has no more than one token to be computed, and whose slots the executor has.

        False, and nothing changed, where it is otherwise.
        """
        lease, row, known = seq.lease, seq.row_id, len(seq.tokens)
        if seq.state != "running" or seq.coming or lease is None or not 0 <= known - seq.num_computed <= 1:
            return False
        if min(seq.synced, lease.stale_from) < seq.num_computed:
            return False
        seq.is_steady = True
        self._sequences[row] = seq
        self.seq_ids[row] = seq.seq_id
        self.known[row] = self._told[row] = known
        self._computed[row] = self._slots_start[row] = self._slots_end[row] = seq.num_computed
        self.is_next[row] = seq.num_computed < known
        self._next_ids[row] = seq.tokens.ids[-1]
        self._prompt_lens[row] = seq.prompt_len
        self._max_new[row] = seq.max_new
        self._tenant_ids[row] = self._tenants.setdefault(seq.tenant, len(self._tenants))
        return True

    def leave(self, seq: Sequence) -> None:
        """``seq`` is as if it had never been here."""
        self.tell(seq)
        row = seq.row_id
        del self._sequences[row]
        self.seq_ids[row] = -1
        self.is_next[row] = False
        seq.is_steady = False
        seq.logits_from = len(seq.tokens) - 1
        self.on_left(seq)
        if not self._sequences:
            self._tenants.clear()

    def tell(self, seq: Sequence) -> None:
        """Bring ``seq`` up to date."""
        lease, row = seq.lease, seq.row_id
        assert lease is not None and seq.is_steady
        computed, told, known = self._computed.item(row), self._told.item(row), self.known.item(row)
        num_run = computed - seq.num_computed
        seq.num_forwards += num_run
        seq.num_run += num_run
        seq.num_computed = seq.synced = computed
        lease.mark_fresh()
        ids = self._tape[row, : known - told]
        if told < known:
            seq.tokens.extend(ids)
            self._told[row] = known
        self.on_told(seq, ids)

    def resume(self, seq: Sequence) -> None:
        """``seq`` has been told, and has got one more token from whoever calls."""
        row = seq.row_id
        known = len(seq.tokens)
        assert known == self.known[row] + 1
        self.known[row] = self._told[row] = known
        self._next_ids[row] = seq.tokens.ids[-1]
        self.is_next[row] = self._computed[row] < known

    # -- a step -------------------------------------------------------------------------------------------------------

    def expect(self, rows: np.ndarray, draws: np.ndarray) -> None:
        """The next token of each of ``rows`` is this draw of the step being computed."""
        self._next_ids[rows] = -1 - draws
        self.is_next[rows] = True

    def num_untold(self, rows: np.ndarray) -> np.ndarray:
        """How many tokens ``rows`` have that their sequences were not told of."""
        return self.known[rows] - self._told[rows]

    def record(self, rows: np.ndarray, token_ids: np.ndarray) -> None:
        """The next tokens of ``rows`` are known."""
        known, told = self.known[rows], self._told[rows]
        num_untold = known - told
        self._tape[rows, num_untold] = token_ids
        known += 1
        self.known[rows] = known
        waiting = self._computed[rows] < known
        if waiting.any():
            self._next_ids[rows] = token_ids
            self.is_next[rows] = waiting
        if num_untold.max(initial=0) + 1 >= UNTOLD:
            for row in rows[num_untold + 1 >= UNTOLD].tolist():
                self.tell(self._sequences[row])

    def plan(self) -> DecodePart | None:
        """All rows whose next token is known; takes the slots that they need, for which there has to be room."""
        rows = np.flatnonzero(self.is_next)
        if not len(rows):
            return None
        starts = self._computed[rows]
        short = starts >= self._slots_end[rows]
        if short.any():
            self._fetch_slots(rows[short])
        slots = self._slots[rows, starts - self._slots_start[rows]]
        return DecodePart(self.seq_ids[rows], rows, starts, self._next_ids[rows], slots)

    def complete(self, part: DecodePart) -> dict[str, int]:
        """The KV of ``part`` is in its slots; returns how many tokens each tenant has run."""
        rows = part.row_ids
        self._computed[rows] = part.starts + 1
        self.is_next[rows] = False
        if len(self._tenants) == 1:
            return dict.fromkeys(self._tenants, len(rows))
        counts = np.bincount(self._tenant_ids[rows], minlength=len(self._tenants)).tolist()
        return {tenant: n for tenant, n in zip(self._tenants, counts, strict=True) if n}

    def slots_to_come(self, *, usual: int, least: int) -> int:
        """See ``sequence.slots_to_come``."""
        rows = np.fromiter(self._sequences, np.int64, len(self._sequences))
        made, most = self.known[rows] - self._prompt_lens[rows], self._max_new[rows]
        expected = np.maximum(usual - made, least)
        bounded = (most >= 0) & (most < made + expected)
        return int(np.where(bounded, np.maximum(most - made, 0), expected).sum())

    def _fetch_slots(self, rows: np.ndarray) -> None:
        """Look the slots up that ``rows`` already hold; all others take a chunk each."""
        leases, places = [], []
        for row in rows.tolist():
            lease = self._sequences[row].lease
            assert lease is not None
            start = self._computed.item(row)
            held = lease.slot_ids[start : start + self._slots.shape[1]]
            if len(held):
                self._slots[row, : len(held)] = held
                self._slots_start[row], self._slots_end[row] = start, start + len(held)
            else:
                leases.append(lease)
                places.append(row)
        if leases:
            n = self._slot_chunk
            self._slots[places, :n] = self._cache.extend_all(leases, n)
            self._slots_start[places] = self._computed[places]
            self._slots_end[places] = self._computed[places] + n
