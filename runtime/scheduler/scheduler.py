"""The scheduler: which sequences run, how many of their tokens, on which slots. No torch, no sockets.

    submit -> waiting -> (admitted: lease, row) running -> park -> parked -> submit ...     remove -> ended
                 ^---------- preempted: KV given to the cache, lease released ---'

A parked sequence keeps its KV until somebody needs the slots; then it finds what is left of it in the cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ...radix_cache import OutOfSlots, RadixCache
from .plan import PlanRow, StepPlan
from .sequence import Sequence


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Sizes in tokens. ``decode_reserve``: slots kept free for each running sequence when another is admitted."""

    max_running: int = 64
    max_step_tokens: int = 512
    prefill_chunk: int = 256
    decode_reserve: int = 16


class PoolTooSmall(Exception):
    """One sequence alone needs more slots than the pool has."""

    def __init__(self, need: int, have: int) -> None:
        super().__init__(f"the sequence needs {need:,} KV slots, but the pool has {have:,}")
        self.need = need
        self.have = have


class Scheduler:
    """Owns every sequence's lease, row and computed length. One plan is in flight at a time."""

    def __init__(
        self, config: SchedulerConfig, cache: RadixCache, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.config = config
        self.cache = cache
        self.clock = clock
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.parked: dict[int, Sequence] = {}
        self.num_preemptions = 0
        self.failed: list[tuple[Sequence, PoolTooSmall]] = []
        self._free_rows = list(range(config.max_running - 1, -1, -1))
        self._step = 0
        self._order = 0

    # -- what the engine says -----------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def submit(self, seq: Sequence) -> None:
        """``seq`` has pending tokens, or wants logits of computed ones (from ``logits_from`` on)."""
        assert seq.state in ("new", "parked"), seq
        assert len(seq.tokens) > 0, seq
        if seq.state == "parked":
            del self.parked[seq.seq_id]
        self._order += 1
        seq.order = self._order
        seq.arrival_s = self.clock()
        seq.admitted_s = 0.0
        seq.num_cached = seq.num_run = seq.num_forwards = 0
        seq.state = "waiting"
        seq.blocked_on = None
        self.waiting.append(seq)

    def park(self, seq: Sequence) -> None:
        """``seq`` has nothing to compute for now; its KV goes to the cache, locked while nobody needs the room."""
        if seq.state == "running":
            self.running.remove(seq)
            self._leave_row(seq)
            self.commit(seq)
        elif seq.state == "waiting":
            self.waiting.remove(seq)
        seq.state = "parked"
        self.parked[seq.seq_id] = seq

    def remove(self, seq: Sequence) -> None:
        """``seq`` is over; what was computed stays in the cache."""
        if seq.state in ("running", "waiting"):
            self.park(seq)
        self.parked.pop(seq.seq_id, None)
        self.drop_lease(seq)
        seq.state = "ended"

    def commit(self, seq: Sequence) -> None:
        """Give what ``seq`` has computed to the cache, so that others find it."""
        if seq.lease is not None:
            seq.lease.commit(seq.tokens.ids[: seq.num_computed])

    def truncate(self, seq: Sequence, length: int) -> None:
        """Take back the tokens from ``length`` on, and their KV."""
        seq.tokens.truncate(length)
        if seq.num_computed > length:
            seq.num_computed = length
        seq.synced = min(seq.synced, length)
        if seq.lease is not None and len(seq.lease.slot_ids) > length:
            seq.lease.truncate(length)

    def drop_lease(self, seq: Sequence) -> None:
        """Release the slots of a sequence that is not running; the cache keeps what was computed while it can."""
        assert seq.state != "running", seq
        if seq.lease is not None:
            self.commit(seq)
            seq.lease.release()
            seq.lease = None
        seq.num_computed = 0

    # -- one step -----------------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step, or None when nothing can run. Sequences that can never run are put in ``failed``."""
        budget = self.config.max_step_tokens
        rows: dict[int, PlanRow] = {}
        # Decodes first: they are short and somebody is reading along.
        for seq in sorted(self.running, key=_running_order):
            if budget <= 0:
                break
            if seq.state != "running":
                continue  # preempted for one before it
            n = min(seq.num_pending, budget, self.config.prefill_chunk)
            if n <= 0 or not self._make_room(seq, n, rows):
                continue
            rows[seq.seq_id] = self._row(seq, n)
            budget -= n
        budget = self._admit(budget, rows)
        if not rows:
            return None
        self._step += 1
        return StepPlan(self._step, tuple(rows.values()))

    def complete(self, plan: StepPlan, sequences: dict[int, Sequence]) -> None:
        """The KV of ``plan`` is in its slots."""
        for row in plan.rows:
            seq = sequences[row.seq_id]
            seq.num_forwards += 1
            seq.num_run += len(row.token_ids)
            seq.num_computed = row.end
            if seq.lease is not None and (len(row.token_ids) > 1 or seq.num_pending > 0):
                self.commit(seq)  # a prompt's chunk: siblings may be waiting for it

    # -- inside a step ------------------------------------------------------------------------------------------------

    def _admit(self, budget: int, rows: dict[int, PlanRow]) -> int:
        if not self.waiting or budget <= 0 or not self._free_rows:
            return budget
        self.waiting.sort(key=lambda seq: (seq.priority, seq.order))
        left: list[Sequence] = []
        for i, seq in enumerate(self.waiting):
            if budget <= 0 or not self._free_rows:
                left.extend(self.waiting[i:])
                break
            if self._waits_for_prefix(seq):
                left.append(seq)
                continue
            n = self._try_admit(seq, budget)
            if n > 0:
                rows[seq.seq_id] = self._row(seq, n)
                budget -= n
            elif seq.state == "waiting":
                left.extend(self.waiting[i:])  # no room: a smaller one behind must not starve it
                break
        self.waiting = left
        return budget

    def _try_admit(self, seq: Sequence, budget: int) -> int:
        """Tokens that ``seq`` runs in this step; 0 when there is no room for it yet, or (state ``ended``) never."""
        self._attach(seq)
        assert seq.lease is not None
        n = min(seq.num_pending, budget, self.config.prefill_chunk)
        need = len(seq.tokens) - len(seq.lease.slot_ids)
        if len(seq.tokens) > self.cache.num_slots:
            self._fail(seq, len(seq.tokens))
            return 0
        reserve = self.config.decode_reserve * len(self.running)
        if need + reserve > self.cache.num_free + self.cache.num_evictable:
            self._release_parked(need + reserve)
            if self.running and need + reserve > self.cache.num_free + self.cache.num_evictable:
                self.drop_lease(seq)
                return 0
        try:
            self._extend(seq, seq.num_computed + n)
        except OutOfSlots:
            self.drop_lease(seq)
            return 0
        if seq.admitted_s == 0.0:
            seq.admitted_s = self.clock()
            seq.num_cached = seq.num_computed
        seq.state = "running"
        seq.row_id = self._free_rows.pop()
        seq.synced = 0
        self.running.append(seq)
        return n

    def _attach(self, seq: Sequence) -> None:
        """Give a waiting sequence the longest usable KV: its own lease's, or the cache's."""
        limit = min(len(seq.tokens) - 1, seq.logits_from)
        if seq.lease is None:
            seq.lease = self.cache.acquire(
                seq.tokens.ids, namespace=seq.namespace, limit=limit, program=seq.program, priority=seq.priority
            )
            seq.num_computed = seq.lease.num_cached
        elif seq.num_computed < limit:
            # A sibling may have computed more of our tokens than we hold.
            self.commit(seq)
            seq.num_computed += seq.lease.rematch(seq.tokens.ids, limit=limit)
        elif seq.num_computed > limit:
            self.commit(seq)
            seq.lease.truncate(limit)
            seq.num_computed = limit

    def _waits_for_prefix(self, seq: Sequence) -> bool:
        """True while a running sequence is about to compute tokens that ``seq`` needs as well."""
        if not self.cache.reuse:
            return False
        if seq.blocked_on is not None:
            other, until = seq.blocked_on
            if other.state == "running" and other.num_computed < until:
                return True
            seq.blocked_on = None
        limit = min(len(seq.tokens) - 1, seq.logits_from)
        have = -1
        for other in self.running:
            if other.num_pending <= 1 or other.namespace != seq.namespace:
                continue
            shared = min(common_prefix_len(seq.tokens.ids, other.tokens.ids), limit)
            if shared <= other.num_computed:
                continue
            if have < 0:
                have = max(seq.num_computed, self.cache.peek(seq.tokens.ids, namespace=seq.namespace))
            if shared > have:
                seq.blocked_on = (other, shared)
                return True
        return False

    def _make_room(self, seq: Sequence, n: int, rows: dict[int, PlanRow]) -> bool:
        """Slots for ``n`` more tokens of a running sequence, preempting later ones if need be."""
        while True:
            try:
                self._extend(seq, seq.num_computed + n)
                return True
            except OutOfSlots as error:
                if self._release_parked(error.need):
                    continue
                victim = self._victim(seq, rows)
                if victim is not None:
                    self._preempt(victim)
                    continue
                if all(other is seq for other in self.running):
                    self._fail(seq, seq.num_computed + n)
                    return False
                self._preempt(seq)
                return False

    def _extend(self, seq: Sequence, length: int) -> None:
        assert seq.lease is not None
        missing = length - len(seq.lease.slot_ids)
        if missing > 0:
            seq.lease.extend(missing)

    def _release_parked(self, need: int) -> bool:
        """Let go of parked sequences' locks, oldest first, until ``need`` slots could be had."""
        released = False
        for other in list(self.parked.values()):
            if self.cache.num_free + self.cache.num_evictable >= need:
                break
            if other.lease is not None:
                self.drop_lease(other)
                released = True
        return released

    def _victim(self, seq: Sequence, rows: dict[int, PlanRow]) -> Sequence | None:
        """The running sequence to preempt for ``seq``: the least urgent, latest come, not planned in this step."""
        others = [o for o in self.running if o is not seq and o.seq_id not in rows]
        worst = max(others, key=lambda o: (o.priority, o.order), default=None)
        if worst is not None and (worst.priority, worst.order) > (seq.priority, seq.order):
            return worst
        return None

    def _preempt(self, seq: Sequence) -> None:
        self.num_preemptions += 1
        self.running.remove(seq)
        self._leave_row(seq)
        seq.state = "waiting"
        self.drop_lease(seq)
        self.waiting.append(seq)

    def _fail(self, seq: Sequence, need: int) -> None:
        if seq in self.running:
            self.running.remove(seq)
            self._leave_row(seq)
        seq.state = "ended"
        if seq.lease is not None:
            self.drop_lease(seq)
        self.failed.append((seq, PoolTooSmall(need, self.cache.num_slots)))

    def _leave_row(self, seq: Sequence) -> None:
        self._free_rows.append(seq.row_id)
        seq.row_id = -1

    def _row(self, seq: Sequence, n: int) -> PlanRow:
        lease = seq.lease
        assert lease is not None
        start, end = seq.num_computed, seq.num_computed + n
        stale_from = min(seq.synced, lease.stale_from, start)
        seq.synced = end
        lease.mark_fresh()
        wanted = max(seq.logits_from, start)
        return PlanRow(
            seq_id=seq.seq_id,
            row_id=seq.row_id,
            start=start,
            token_ids=seq.tokens.ids[start:end],
            slot_ids=lease.slot_ids[:end],
            stale_from=stale_from,
            num_logits=max(0, end - wanted),
        )


def _running_order(seq: Sequence) -> tuple[bool, int, int]:
    return (seq.num_pending > 1, seq.priority, seq.order)


def common_prefix_len(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the longest common prefix of two int32 arrays; looks at little when they part early."""
    n = min(len(a), len(b))
    start, block = 0, 64
    while start < n:
        end = min(n, start + block)
        differ = np.flatnonzero(a[start:end] != b[start:end])
        if len(differ):
            return start + int(differ[0])
        start, block = end, block * 8
    return n
