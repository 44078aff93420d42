"""Which running sequence makes way for a more urgent or a shorter one that waits. Never preempts itself.

For one of a more urgent priority the least urgent makes way, the latest come of these, as often as it takes.

Shortest remaining time first: a long one makes way only where it has more than twice to do what the short one has, and
its own return; four times after the first time, eight times after the second, and never a fourth time. Nor does it when
it is due (overtaken as often as may be), of a more urgent deadline, of another tenant that was not served more, one of
several running sequences of its program (they were forked to run together, and a join waits for all), or when another
waits for the tokens it computes.
"""

from __future__ import annotations

from collections import Counter

from ...radix_cache import RadixCache
from .coming import Coming
from .config import SchedulerConfig
from .held import Held
from .lengths import PROMPT_COST, UNKNOWN, Lengths
from .prefix import matched_len
from .sequence import Sequence, slots_missing, slots_to_come
from .waiting import PREEMPTIVE, Waiting

MAX_TIMES = 3  # that a sequence makes way for shorter ones since its submit
LEAST_RATIO = 2.0


class Yielding:
    """Looks at who waits and who runs; ``running`` is sorted from the most urgent and longest waited on."""

    __slots__ = ("_cache", "_held", "_is_by_length", "_least_slots", "_lengths", "_waiting")

    def __init__(
        self, config: SchedulerConfig, cache: RadixCache, *, lengths: Lengths, waiting: Waiting, held: Held
    ) -> None:
        self._cache = cache
        self._is_by_length = config.order in PREEMPTIVE
        self._least_slots = config.decode_reserve
        self._lengths = lengths
        self._waiting = waiting
        self._held = held

    def may_be(self, running: list[Sequence]) -> bool:
        """Whether somebody might make way: is less urgent than one that waits, or the order goes by what is left."""
        if not running or not len(self._waiting):
            return False
        return self._is_by_length or self._waiting.most_urgent < running[-1].priority

    def victim(self, head: Sequence, running: list[Sequence], *, room: float, has_row: bool) -> Sequence | None:
        """Who makes way for ``head``, the next to run; None too where it will have ``room`` and a row, or waits for a
        prompt that is being computed.
        """
        matched = matched_len(head, self._cache)
        prefills = [seq for seq in running if seq.num_pending > 1]
        shortage = head.length - matched + self._slots_to_come([*running, head]) + slots_missing(prefills) - room
        if has_row and shortage <= 0:
            return None
        found = self._least_urgent(head, running)
        if found is None and self._is_by_length:
            found = self._longest(head, running, shortage)
        if found is None or not self._cache.reuse:
            return found
        limit = min(head.length - 1, head.logits_from)
        return found if Coming(prefills).worth_waiting_for(head, limit, matched=matched) is None else None

    def _least_urgent(self, head: Sequence, running: list[Sequence]) -> Sequence | None:
        for seq in reversed(running):
            if seq.priority <= head.priority:
                return None
            if not self._held.is_awaited(seq) and (not seq.program or seq.program != head.program):
                return seq
        return None

    def _longest(self, head: Sequence, running: list[Sequence], shortage: float) -> Sequence | None:
        """The one with most to do of those that may and whose leaving frees ``shortage`` slots."""
        lengths, served = self._lengths, self._waiting.served
        work = lengths.work(head)
        best, most = None, 0.0
        num_running: Counter[str] | None = None
        for seq in running:
            if seq.num_preempted >= MAX_TIMES or seq.priority < head.priority or seq.deadline_s < head.deadline_s:
                continue
            if seq.tenant != head.tenant and served.get(seq.tenant, 0.0) <= served.get(head.tenant, 0.0):
                continue
            left = lengths.left(seq)
            bar = LEAST_RATIO * 2**seq.num_preempted * work + PROMPT_COST * len(seq.tokens)
            if not max(bar, most) < left < UNKNOWN or self._waiting.is_due(seq) or self._held.is_awaited(seq):
                continue
            if seq.program:
                num_running = num_running or Counter(other.program for other in running)
                if seq.program == head.program or num_running[seq.program] > 1:
                    continue
            if shortage > 0:
                assert seq.lease is not None
                if seq.lease.num_sole + self._slots_to_come([seq]) < shortage:
                    continue
            best, most = seq, left
        return best

    def _slots_to_come(self, sequences: list[Sequence]) -> int:
        return slots_to_come(sequences, usual=int(self._lengths.usual), least=self._least_slots)
