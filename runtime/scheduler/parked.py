"""Parked sequences, which have nothing to compute but keep their KV, and which of them gives up its slots first.

Ordered by expected reuse, lowest first: evict from the front. Expected reuse is returns per second of keeping the slots
until the sequence returns or ends, learned by kind (a program's name). If all pauses are bounded, as those of tools,
the sequence parked longest returns next and the one parked last goes first; if some pauses never end, the reverse.
"""

from __future__ import annotations

from bisect import bisect_right

from .sequence import Sequence

BOUNDS_S = tuple(0.01 * 1.4**i for i in range(48))  # up to a day
MIN_PAUSES = 20  # with fewer, a kind is estimated from all pauses
MAX_PAUSES = 2000  # then all counts are halved, so that a change is learned
MAX_KINDS = 64


class Pauses:
    """A histogram of pauses: of all parked sequences, and of those that came back."""

    __slots__ = ("_all", "_came_back", "num")

    def __init__(self) -> None:
        self._came_back = [0.0] * (len(BOUNDS_S) + 1)
        self._all = [0.0] * (len(BOUNDS_S) + 1)
        self.num = 0.0

    def note(self, pause_s: float, *, came_back: bool) -> None:
        if self.num >= MAX_PAUSES:
            self._came_back = [n / 2 for n in self._came_back]
            self._all = [n / 2 for n in self._all]
            self.num /= 2
        i = bisect_right(BOUNDS_S, pause_s)
        self._all[i] += 1
        self._came_back[i] += came_back
        self.num += 1

    def worth(self, elapsed_s: float) -> float:
        """Expected returns per second of keeping the slots of a sequence that has paused for ``elapsed_s``."""
        first = bisect_right(BOUNDS_S, elapsed_s)
        returns = seconds = 0.0
        for i in range(first, len(BOUNDS_S)):
            low, high = BOUNDS_S[i - 1] if i else 0.0, BOUNDS_S[i]
            share = 1.0
            if i == first:
                share, low = (high - elapsed_s) / (high - low), elapsed_s
            returns += share * self._came_back[i]
            seconds += share * self._all[i] * ((low + high) / 2 - elapsed_s)
        return returns / seconds if seconds > 0 else 0.0


class Parked:
    """All parked sequences; those with slots by kind, in the order of parking."""

    __slots__ = ("_all_pauses", "_by_id", "pauses_of", "with_slots")

    def __init__(self) -> None:
        self._by_id: dict[int, Sequence] = {}
        self.with_slots: dict[str, dict[int, Sequence]] = {}
        self.pauses_of: dict[str, Pauses] = {}
        self._all_pauses = Pauses()

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def have_slots(self) -> bool:
        return bool(self.with_slots)

    def add(self, seq: Sequence, now_s: float) -> None:
        seq.parked_s = now_s
        self._by_id[seq.seq_id] = seq
        if seq.lease is not None:
            self.with_slots.setdefault(self._kind(seq), {})[seq.seq_id] = seq

    def take(self, seq: Sequence, now_s: float, *, came_back: bool) -> None:
        """Remove ``seq``, which has tokens to compute again (``came_back``) or has ended."""
        if self._by_id.pop(seq.seq_id, None) is None:
            return
        self.note_released(seq)
        for pauses in (self._all_pauses, self.pauses_of[self._kind(seq)]):
            pauses.note(now_s - seq.parked_s, came_back=came_back)

    def note_released(self, seq: Sequence) -> None:
        """``seq`` has released its slots."""
        kind = self._kind(seq)
        here = self.with_slots.get(kind)
        if here is not None and here.pop(seq.seq_id, None) is not None and not here:
            del self.with_slots[kind]

    def first_to_go(self, now_s: float) -> Sequence | None:
        """The sequence with the lowest expected reuse, among the first and the last parked of each kind.

        While too few pauses are known, the one parked longest. None if no parked sequence has slots.
        """
        best: tuple[float, float, int] | None = None
        for kind, here in self.with_slots.items():
            pauses = self.pauses_of[kind]
            if pauses.num < MIN_PAUSES:
                pauses = self._all_pauses
            for seq in (next(iter(here.values())), next(reversed(here.values()))):
                worth = pauses.worth(now_s - seq.parked_s) if pauses.num >= MIN_PAUSES else 0.0
                place = (worth, seq.parked_s, seq.seq_id)
                best = place if best is None or place < best else best
        return None if best is None else self._by_id[best[2]]

    def _kind(self, seq: Sequence) -> str:
        """The sequence's kind, or "" for a new kind when ``MAX_KINDS`` are known."""
        kind = seq.kind if seq.kind in self.pauses_of or len(self.pauses_of) < MAX_KINDS else ""
        self.pauses_of.setdefault(kind, Pauses())
        return kind
