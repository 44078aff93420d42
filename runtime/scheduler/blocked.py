"""Sequences that wait for tokens which are being computed by a running sequence, or being read from disk."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ...radix_cache.tree import common_prefix_len
from .sequence import Sequence

if TYPE_CHECKING:
    from ...radix_cache import ReadAhead

FEW = 16  # tokens: computing fewer twice costs less than waiting for them


class RunningPrompts:
    """The prompts being computed, by (namespace, first position still to be computed) and the token there.

    A prompt that is computed from position c on helps a sequence that has the same tokens up to and at c. The index
    leaves few prompts that must be compared in full.
    """

    __slots__ = ("_places",)

    def __init__(self, prefills: list[Sequence]) -> None:
        self._places: dict[tuple[str, int], dict[int, list[Sequence]]] = {}
        for seq in prefills:
            self.add(seq)

    def add(self, seq: Sequence) -> None:
        place = self._places.setdefault((seq.namespace, seq.num_computed), {})
        place.setdefault(seq.tokens.ids.item(seq.num_computed), []).append(seq)

    def worth_waiting_for(self, seq: Sequence, limit: int, *, matched: int) -> tuple[Sequence, int] | None:
        """``longest``, if it ``is_worth_waiting_for``; the cache has ``matched`` tokens already."""
        found = self.longest(seq, limit)
        return found if found is not None and is_worth_waiting_for(seq, found[1], matched=matched) else None

    def longest(self, seq: Sequence, limit: int) -> tuple[Sequence, int] | None:
        """The prompt with most of ``seq``'s first ``limit`` tokens, and how many; None if none computes any of them."""
        best: tuple[Sequence, int] | None = None
        ids = seq.tokens.ids
        for (namespace, start), by_token in self._places.items():
            if namespace != seq.namespace or start >= limit:
                continue
            for other in by_token.get(ids.item(start), ()):
                shared = min(common_prefix_len(ids, other.tokens.ids), limit)
                if shared > start and (best is None or shared > best[1]):
                    best = (other, shared)
        return best


def is_worth_waiting_for(seq: Sequence, length: int, *, matched: int) -> bool:
    """Whether waiting for a running prompt that computes the first ``length`` tokens of ``seq`` costs less than
    computing them again; the cache has ``matched`` of them already.

    Questions that begin with the same word are not blocked on each other: a step's wait, and a last step with few rows,
    cost more than a few tokens. A shared part that is at least half of the sequence's work is always awaited.
    """
    awaited = length - matched
    return awaited >= FEW or 0 < seq.length - matched <= 2 * awaited


class Blocked:
    """Sequences in neither the waiting queue nor a row.

    Once a sequence's dependency completes or is abandoned, the scheduler takes it out and queues it again.
    """

    __slots__ = ("_by_source", "_num_behind", "_reading")

    def __init__(self) -> None:
        self._by_source: dict[int, list[Sequence]] = {}  # by the running sequence that computes their prefix
        self._num_behind = 0
        self._reading: dict[int, tuple[Sequence, ReadAhead]] = {}

    def __len__(self) -> int:
        return self._num_behind + len(self._reading)

    def __iter__(self) -> Iterator[Sequence]:
        for blocked in self._by_source.values():
            yield from blocked
        for seq, _ in self._reading.values():
            yield seq

    @property
    def num_reading(self) -> int:
        return len(self._reading)

    def is_awaited(self, source: Sequence) -> bool:
        """Whether any sequence is blocked on ``source``."""
        return source.seq_id in self._by_source

    def wait_for_sequence(self, seq: Sequence, source: Sequence, length: int) -> None:
        """Block ``seq`` until ``source`` has computed ``length`` tokens."""
        seq.blocked_on = (source, length)
        self._by_source.setdefault(source.seq_id, []).append(seq)
        self._num_behind += 1

    def take_behind(self, source: Sequence, computed: float) -> list[Sequence]:
        """Take out the sequences that wait for at most ``computed`` tokens of ``source`` (infinity: all of them)."""
        blocked = self._by_source.pop(source.seq_id, None)
        if blocked is None:
            return []
        taken, left = [], []
        for seq in blocked:
            assert seq.blocked_on is not None
            if seq.blocked_on[1] > computed:
                left.append(seq)
            else:
                seq.blocked_on = None
                taken.append(seq)
        self._num_behind -= len(taken)
        if left:
            self._by_source[source.seq_id] = left
        return taken

    def wait_for_disk(self, seq: Sequence, reading: ReadAhead) -> None:
        """Block ``seq`` until ``reading`` is done."""
        self._reading[seq.seq_id] = (seq, reading)

    def take_read(self) -> list[Sequence]:
        """Take out the sequences whose tokens have been read."""
        taken = [seq for seq, reading in self._reading.values() if reading.is_done]
        for seq in taken:
            del self._reading[seq.seq_id]
        return taken

    def discard(self, seq: Sequence) -> bool:
        """Take ``seq`` out; False if it was not blocked."""
        if self._reading.pop(seq.seq_id, None) is not None:
            return True
        if seq.blocked_on is None:
            return False
        source = seq.blocked_on[0].seq_id
        self._by_source[source].remove(seq)
        if not self._by_source[source]:
            del self._by_source[source]
        self._num_behind -= 1
        seq.blocked_on = None
        return True
