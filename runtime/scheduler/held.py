"""Sequences that wait for tokens which others bring: a running sequence, or the disk. Never looks at slots or rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from .sequence import Sequence

if TYPE_CHECKING:
    from ...radix_cache import ReadAhead


class Held:
    """Who is in neither the waiting queue nor a row. What it needs is there, or comes no more: then it waits again."""

    __slots__ = ("_by_source", "_num_behind", "_reading")

    def __init__(self) -> None:
        self._by_source: dict[int, list[Sequence]] = {}  # by the running sequence that computes their prefix
        self._num_behind = 0
        self._reading: dict[int, tuple[Sequence, ReadAhead]] = {}

    def __len__(self) -> int:
        return self._num_behind + len(self._reading)

    def __iter__(self) -> Iterator[Sequence]:
        for held in self._by_source.values():
            yield from held
        for seq, _ in self._reading.values():
            yield seq

    @property
    def num_reading(self) -> int:
        return len(self._reading)

    def is_awaited(self, source: Sequence) -> bool:
        """Whether somebody waits for what ``source`` computes."""
        return source.seq_id in self._by_source

    def hold_behind(self, seq: Sequence, source: Sequence, length: int) -> None:
        """``seq`` waits until ``source`` has computed ``length`` tokens."""
        seq.blocked_on = (source, length)
        self._by_source.setdefault(source.seq_id, []).append(seq)
        self._num_behind += 1

    def take_behind(self, source: Sequence, computed: float) -> list[Sequence]:
        """Those who wait no longer, now that ``source`` has ``computed`` tokens (infinity: it will bring no more)."""
        held = self._by_source.pop(source.seq_id, None)
        if held is None:
            return []
        taken, left = [], []
        for seq in held:
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

    def hold_for_disk(self, seq: Sequence, reading: ReadAhead) -> None:
        self._reading[seq.seq_id] = (seq, reading)

    def take_read(self) -> list[Sequence]:
        """Those whose tokens have been read."""
        taken = [seq for seq, reading in self._reading.values() if reading.is_done]
        for seq in taken:
            del self._reading[seq.seq_id]
        return taken

    def discard(self, seq: Sequence) -> bool:
        """Hold ``seq`` no longer; False where it was not held."""
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
