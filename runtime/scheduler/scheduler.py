"""The scheduler: which sequences run, how many of their tokens, on which slots. No torch, no sockets.

    submit -> waiting -> (admitted: lease, row) running -> park -> parked -> submit ...     remove -> ended
                 ^---------- preempted: KV given to the cache, lease released ---'

A parked sequence keeps its KV until somebody needs the slots; then it finds what is left of it in the cache.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np

from ...radix_cache import OutOfSlots, RadixCache
from .coming import Coming
from .config import SchedulerConfig
from .counters import SchedulerCounters
from .draft import Draft
from .drain import Drain
from .held import Held
from .lengths import PROMPT_COST, Lengths
from .parked import Parked
from .plan import DecodePart, PlanRow, StepPlan
from .prefix import attach, commit, matched_len, read_ahead, shorten
from .rows import drafted_row, plan_row
from .sequence import PoolTooSmall, Sequence, slots_missing, slots_to_come, urgency
from .waiting import ORDERS, Waiting
from .yielding import Yielding


class VectorisedRows(Protocol):
    """The running sequences whose state the engine keeps as arrays by row: each takes one token a step.

    ``plan`` gives their rows of the next step, ``complete`` returns how many tokens each tenant has run in it, and
    ``remove`` synchronises a sequence, which is then planned by itself.
    """

    def __len__(self) -> int: ...
    def plan(self) -> DecodePart | None: ...
    def complete(self, part: DecodePart) -> dict[str, int]: ...
    def slots_to_come(self, *, usual: int, least: int) -> int: ...
    def remove(self, seq: Sequence) -> None: ...


class Scheduler:
    """Owns every sequence's lease, row and computed length. One plan is in flight at a time."""

    def __init__(
        self, config: SchedulerConfig, cache: RadixCache, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.config = config
        self.cache = cache
        self.clock = clock
        self.lengths = Lengths()
        self.drain = Drain()
        self.waiting = Waiting(
            ORDERS[config.order],
            lengths=self.lengths,
            max_overtaken=config.max_overtaken,
            tenant_weights=config.tenant_weights,
        )
        self.vectorised: VectorisedRows | None = None  # set by the engine; its sequences are in ``running`` too
        self.running: list[Sequence] = []  # most urgent, then longest waited, first
        self.parked = Parked()
        self.counters = SchedulerCounters()
        self.failed: list[tuple[Sequence, PoolTooSmall]] = []
        self._held = Held()
        self._yielding = Yielding(config, cache, lengths=self.lengths, waiting=self.waiting, held=self._held)
        self._holding: dict[int, Sequence] = {}  # waiting sequences that still have the lease they were parked with
        self._program_orders: dict[str, int] = {}
        self._free_rows = list(range(config.max_running - 1, -1, -1))
        self._stuck = (-1, 0, 0)  # who found no room, how much there was, and how many ran
        self._step = 0
        self._order = 0

    # -- what the engine says -----------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for room, for a prefix that another computes, or for one that is read from disk."""
        return len(self.waiting) + len(self._held)

    @property
    def num_preemptions(self) -> int:
        return self.counters.num_preemptions

    @property
    def num_reading(self) -> int:
        return self._held.num_reading

    @property
    def has_work(self) -> bool:
        return bool(self.running or len(self.waiting) or len(self._held))

    def drained_in_s(self) -> float:
        """Seconds until what runs and waits now has probably ended, from ``drain.LEAST_S`` to ``drain.MOST_S``."""
        return self.drain.wait_s((*self.running, *self.waiting, *self._held), self.lengths, step=self._step)

    def submit(self, seq: Sequence, *, max_new: int = -1, min_new: int = 0) -> None:
        """``seq`` has pending tokens, or wants logits of computed ones (from ``logits_from`` on).

        At most ``max_new`` tokens will be added to it (-1: nobody knows), and ``min_new`` at least if nobody stops it.
        """
        assert seq.state in ("new", "parked"), seq
        assert len(seq.tokens) > 0, seq
        if seq.state == "parked":
            self.parked.take(seq, self.clock(), came_back=True)
        if seq.lease is not None:
            self._holding[seq.seq_id] = seq
        self._order += 1
        seq.order = self._order
        seq.program_order = self._program_orders.setdefault(seq.program, seq.order) if seq.program else seq.order
        seq.due = -1
        seq.max_new, seq.min_new = max_new, min_new
        seq.prompt_len = len(seq.tokens)
        seq.arrival_s = self.clock()
        self.drain.begin(seq.arrival_s)
        seq.admitted_s = 0.0
        seq.num_cached = seq.num_run = 0
        seq.state = "waiting"
        seq.blocked_on = None
        seq.has_asked = False
        seq.num_restored = seq.num_preempted = 0
        reading = read_ahead(seq, self.cache)
        if reading is None:
            self.waiting.add(seq)
        else:
            self._held.hold_for_disk(seq, reading)

    def park(self, seq: Sequence) -> None:
        """``seq`` has nothing to compute for now; its KV goes to the cache, locked while nobody needs the room."""
        if seq.is_vectorised:
            assert self.vectorised is not None
            self.vectorised.remove(seq)
        seq.coming = 0
        seq.num_computed = min(seq.num_computed, len(seq.tokens))
        if seq.state == "running":
            self.lengths.note(seq)
            self._leave(seq)
            self.commit(seq)
            if seq.lease is not None:
                seq.lease.truncate(min(seq.num_computed, seq.lease.num_slots))
        elif seq.state == "waiting":
            if not self._held.discard(seq):
                self.waiting.discard(seq)
            self._holding.pop(seq.seq_id, None)
        seq.state = "parked"
        self.parked.add(seq, self.clock())

    def remove(self, seq: Sequence) -> None:
        """``seq`` is over; what was computed stays in the cache."""
        if seq.state in ("running", "waiting"):
            self.park(seq)
        self.parked.take(seq, self.clock(), came_back=False)
        self.drop_lease(seq)
        seq.state = "ended"

    def end_program(self, program: str) -> None:
        """``program`` will submit nothing more: what only it used may be evicted."""
        self._program_orders.pop(program, None)
        self.cache.end_program(program)

    def expect(self, seq: Sequence, draw: int) -> None:
        """The next token of ``seq`` is draw number ``draw`` of the step being computed: it may be planned on."""
        assert seq.state == "running" and seq.num_computed == len(seq.tokens), seq
        seq.coming = -1 - draw
        seq.tokens.foresee(seq.coming)
        seq.logits_from = len(seq.tokens)

    def settle(self, seq: Sequence) -> None:
        """The draw that was expected is known: whoever calls appends it now, or parks ``seq`` without it."""
        seq.coming = 0

    def commit(self, seq: Sequence) -> None:
        """Give what ``seq`` has computed to the cache, so that others find it."""
        commit(seq)

    def truncate(self, seq: Sequence, length: int) -> None:
        """Take back the tokens from ``length`` on, and their KV."""
        seq.tokens.truncate(length)
        if seq.num_computed > length:
            seq.num_computed = length
        seq.table_len = min(seq.table_len, length)
        if seq.lease is not None and len(seq.lease.slot_ids) > length:
            seq.lease.truncate(length)

    def drop_lease(self, seq: Sequence) -> None:
        """Release the slots of a sequence that is not running; the cache keeps what was computed while it can."""
        assert seq.state != "running", seq
        if seq.lease is not None:
            self.commit(seq)
            seq.lease.release()
            seq.lease = None
            self._holding.pop(seq.seq_id, None)
            self.parked.note_released(seq)
        seq.num_computed = 0

    # -- one step -----------------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step, or None when nothing can run. Sequences that can never run are put in ``failed``."""
        budget, chunk = self.config.max_step_tokens, self.config.prefill_chunk
        if self._held.num_reading:
            for seq in self._held.take_read():
                self.waiting.add(seq)
        rows: dict[int, PlanRow] = {}
        prefills: list[Sequence] = []
        num_vectorised = 0 if self.vectorised is None else len(self.vectorised)
        if not num_vectorised and self._yielding.may_be(self.running):
            self._make_way()
        self.cache.free_up(len(self.running))  # what decodes take of slots in a step, by the chunk, on average
        # Decodes first: they are short and somebody is reading along.
        vectorised = self.vectorised.plan() if self.vectorised is not None and num_vectorised else None
        budget -= 0 if vectorised is None else len(vectorised)
        others = [seq for seq in self.running if not seq.is_vectorised] if num_vectorised < len(self.running) else ()
        for seq in others:
            pending = seq.num_pending
            if pending > 1:
                prefills.append(seq)
            elif pending == 1 and budget > 0 and seq.state == "running" and self._make_room(seq, 1, rows):
                rows[seq.seq_id] = plan_row(seq, 1)
                budget -= 1
        for seq in prefills:
            n = min(seq.num_pending, budget, chunk)
            if n > 0 and seq.state == "running" and self._make_room(seq, n, rows):
                rows[seq.seq_id] = plan_row(seq, n)
                budget -= n
        if budget > 0 and self._free_rows and len(self.waiting):
            self._admit(budget, rows, [seq for seq in prefills if seq.state == "running"])
        if not rows and vectorised is None:
            self.drain.pause()
            return None
        self._step += 1
        return StepPlan(self._step, tuple(rows.values()), vectorised)

    @property
    def can_vectorise(self) -> bool:
        """Whether nobody that runs can be preempted in the next step, nor run short of its tokens."""
        config, num_running = self.config, len(self.running)
        if num_running > config.max_step_tokens or self._yielding.may_be(self.running):
            return False
        return self._room > config.max_step_tokens + 2 * config.slot_chunk * (num_running + 2)

    def complete(self, plan: StepPlan, sequences: dict[int, Sequence]) -> None:
        """The KV of ``plan`` is in its slots."""
        num_tokens: dict[str, int] = {}
        if plan.vectorised is not None:
            assert self.vectorised is not None
            num_tokens = self.vectorised.complete(plan.vectorised)
        are_some_held = len(self._held) > 0
        work = float(plan.num_vectorised)
        for row in plan.rows:
            seq = sequences[row.seq_id]
            n = len(row.token_ids) - row.num_draft
            seq.num_run += n
            seq.num_computed = computed = row.start + n
            work += 1.0 if n == 1 else PROMPT_COST * n
            num_tokens[seq.tenant] = num_tokens.get(seq.tenant, 0) + n
            if seq.lease is not None and (n > 1 or computed < seq.length):
                self.commit(seq)  # a prompt's chunk: siblings may be waiting for it
            if are_some_held:
                self._release_held(seq, computed)
        self.drain.note(work, self.clock())
        for tenant, n in num_tokens.items():
            self.waiting.charge(tenant, n)

    # -- drafts -------------------------------------------------------------------------------------------------------

    def room_for_draft(self, seq: Sequence, length: int) -> int:
        """How many draft tokens of ``length`` could have slots at no one's cost but that of cached text long unused."""
        lease = seq.lease
        if lease is None:
            return 0
        spare = lease.num_slots - len(seq.tokens)
        if spare >= length:
            return length
        # What all who run would want next comes first: a draft takes what is left.
        reserve = (self.config.decode_reserve + self.config.slot_chunk) * len(self.running)
        return min(length, max(spare, 0) + max(0, self._room - reserve))

    def add_drafts(self, plan: StepPlan, sequences: Mapping[int, Sequence], drafts: Mapping[int, Draft]) -> StepPlan:
        """``plan`` with these guesses (by sequence id) run along, cut to the tokens of a step and to the room there is.

        Only for rows that reach their sequence's end and want its last logits.
        """
        budget = self.config.max_step_tokens - plan.num_tokens
        rows = list(plan.rows)
        for i, row in enumerate(rows):
            draft = drafts.get(row.seq_id)
            if draft is None:
                continue
            seq = sequences[row.seq_id]
            assert row.end == len(seq.tokens) and row.num_logits > 0, (row, seq)
            length = self.room_for_draft(seq, min(len(draft), budget))
            if length > 0:
                rows[i] = drafted_row(row, seq, draft.cut(length).in_preorder())
                budget -= length
        return StepPlan(plan.step, tuple(rows), plan.vectorised)

    def accept_draft(self, row: PlanRow, seq: Sequence, path: list[int]) -> None:
        """Of ``row``'s draft the tokens ``path``, each the child of the one before, came true: their KV is computed.

        They have been appended to its tokens already, and more may have been.
        """
        if not path:
            return
        lease, start = seq.lease, row.tokens_end
        assert lease is not None and seq.num_computed == start and len(seq.tokens) >= start + len(path), seq
        if path[-1] != len(path) - 1:
            rest = np.setdiff1d(np.arange(row.num_draft), path)
            lease.reorder(start, np.concatenate((np.array(path, dtype=np.int64), rest)))
        seq.num_computed = start + len(path)
        seq.num_run += len(path)
        self.waiting.charge(seq.tenant, len(path))
        self._release_held(seq, seq.num_computed)

    # -- inside a step ------------------------------------------------------------------------------------------------

    def _admit(self, budget: int, rows: dict[int, PlanRow], prefills: list[Sequence]) -> None:
        """Start waiting sequences while there are tokens, rows and slots for them. ``prefills`` run already."""
        coming = Coming(prefills) if self.cache.reuse else None
        reserve, usual, least = -1, int(self.lengths.usual), self.config.decode_reserve
        while budget > 0 and self._free_rows:
            seq = self._head()
            if seq is None:
                return
            limit, matched = min(seq.length - 1, seq.logits_from), matched_len(seq, self.cache)
            found = None if coming is None else coming.worth_waiting_for(seq, limit, matched=matched)
            if found is not None:
                self.waiting.discard(seq)  # a running sequence is about to compute tokens that it needs as well
                self._held.hold_behind(seq, *found)
                continue
            stuck_id, room, num_running = self._stuck
            if seq.seq_id == stuck_id and len(self.running) >= num_running > 0 and self._room <= room:
                return  # nothing has become better since it found no room
            if reserve < 0:
                others = [other for other in self.running if not other.is_vectorised]
                reserve = slots_to_come(others, usual=usual, least=least)
                if self.vectorised is not None:
                    reserve += self.vectorised.slots_to_come(usual=usual, least=least)
            n = self._try_admit(seq, budget, reserve + slots_missing(prefills))
            if n > 0:
                rows[seq.seq_id] = plan_row(seq, n)
                budget -= n
                reserve += slots_to_come((seq,), usual=usual, least=least)
                if seq.num_pending > 1:
                    prefills.append(seq)
                    if coming is not None:
                        coming.add(seq)
            elif seq.state == "waiting":
                # No room: a smaller one behind must not starve it.
                self._stuck = (seq.seq_id, self._room, len(self.running))
                return

    def _head(self) -> Sequence | None:
        return self.waiting.head(self.config.match_window, lambda seq: matched_len(seq, self.cache))

    def _make_way(self) -> None:
        """Where the next to run finds no row or no slots, preempt one that is less urgent or has much more to do."""
        head = self._head()
        if head is None or (self._free_rows and self._stuck[0] != head.seq_id):
            return
        room = math.inf if self.parked.have_slots else self._room  # these make room first
        victim = self._yielding.victim(head, self.running, room=room, has_row=len(self._free_rows) > 0)
        if victim is not None:
            self.counters.num_yields += 1
            self._preempt(victim)

    @property
    def _room(self) -> int:
        return self.cache.num_free + self.cache.num_evictable

    def _try_admit(self, seq: Sequence, budget: int, reserve: int) -> int:
        """Tokens that ``seq`` runs in this step; 0 when there is no room for it yet, or (state ``ended``) never.

        ``reserve`` slots are for those that run.
        """
        cache = self.cache
        if seq.length > cache.num_slots:
            if not seq.coming:  # else the token may be its last one, and needs no slot
                self._fail(seq, seq.length)
            return 0
        num_restored = attach(seq, cache)
        assert seq.lease is not None
        if num_restored and seq.num_preempted:
            self.counters.num_swapped_back += 1
        n = min(seq.num_pending, budget, self.config.prefill_chunk)
        need = seq.length - seq.lease.num_slots + reserve
        if need > self._room:
            self._release_idle(need, seq)
            if self.running and need > self._room:
                self.drop_lease(seq)
                return 0
        try:
            self._extend(seq, seq.num_computed + n)
        except OutOfSlots as error:
            if self.running or not self.cache.end_pins(error.need):
                self.drop_lease(seq)
                return 0
            self._extend(seq, seq.num_computed + n)
        if seq.admitted_s == 0.0:
            seq.admitted_s = self.clock()
            seq.num_cached = seq.num_computed
            self.counters.queue_time.add(seq.admitted_s - seq.arrival_s)
            self.counters.admitted_tokens += len(seq.tokens)
            self.counters.cached_tokens += seq.num_cached
        self.waiting.discard(seq)
        self._holding.pop(seq.seq_id, None)
        seq.state = "running"
        seq.row_id = self._free_rows.pop()
        seq.table_len = 0
        insort(self.running, seq, key=urgency)
        return n

    def _make_room(self, seq: Sequence, n: int, rows: dict[int, PlanRow]) -> bool:
        """Slots for ``n`` more tokens of a running sequence, preempting later ones if need be."""
        while True:
            try:
                self._extend(seq, seq.num_computed + n)
                return True
            except OutOfSlots as error:
                if self._release_idle(error.need, seq):
                    continue
                if seq.coming:
                    return False  # its token may be the last; if not, it asks again when that is known
                victim = self._victim(seq, rows)
                if victim is not None:
                    self._preempt(victim)
                    continue
                if all(other is seq for other in self.running):
                    if self.cache.end_pins(error.need):
                        continue
                    self._fail(seq, seq.num_computed + n)
                    return False
                self._preempt(seq)
                return False

    def _extend(self, seq: Sequence, length: int) -> None:
        lease = seq.lease
        assert lease is not None
        missing = length - lease.num_slots
        if missing <= 0:
            return
        # A decoding sequence takes a chunk: most steps then need no slot. Not when slots are short.
        ahead = self.config.slot_chunk - 1
        if length >= seq.length and ahead and self._room > missing + 2 * ahead * (1 + len(self.running)):
            missing += ahead if seq.num_run else seq.seq_id % (ahead + 1)  # not all in the same step
        lease.extend(missing)

    def _release_idle(self, need: int, seq: Sequence) -> bool:
        """Let go of what idle sequences but ``seq`` hold until ``need`` slots could be had.

        Of the parked first, whose slots bring least, no more than is missing; then of those that wait, the last come.
        """
        if self._room >= need:
            return False
        released = False
        now_s = self.clock()
        while (missing := need - self._room) > 0 and (parked := self.parked.first_to_go(now_s)) is not None:
            if not shorten(parked, missing):
                self.drop_lease(parked)
            released = True
        for other in tuple(reversed(self._holding.values())):
            if self._room >= need:
                break
            if other is not seq:
                self.drop_lease(other)
                released = True
        return released

    def _victim(self, seq: Sequence, rows: dict[int, PlanRow]) -> Sequence | None:
        """The running sequence to preempt for ``seq``: the least urgent, latest come, not planned in this step."""
        for worst in reversed(self.running):
            if worst is seq:
                return None
            if worst.seq_id not in rows:
                return worst
        return None

    def _preempt(self, seq: Sequence) -> None:
        self.counters.num_preemptions += 1
        seq.num_preempted += 1
        self._leave(seq)
        seq.state = "waiting"
        self.drop_lease(seq)
        self.waiting.add(seq)

    def _fail(self, seq: Sequence, need: int) -> None:
        if seq.state == "running":
            self._leave(seq)
        elif seq.state == "waiting":
            self.waiting.discard(seq)
        seq.state = "ended"
        if seq.lease is not None:
            self.drop_lease(seq)
        self.failed.append((seq, PoolTooSmall(need, self.cache.num_slots)))

    def _leave(self, seq: Sequence) -> None:
        """Give up the row; whoever waited for this sequence's tokens waits no more."""
        assert not seq.is_vectorised, seq
        index = bisect_left(self.running, urgency(seq), key=urgency)
        assert self.running[index] is seq, seq
        del self.running[index]
        self._free_rows.append(seq.row_id)
        seq.row_id = -1
        seq.state = "parked"
        self._release_held(seq, math.inf)

    def _release_held(self, seq: Sequence, computed: float) -> None:
        """Those who waited for at most ``computed`` tokens of ``seq`` wait for room now."""
        for other in self._held.take_behind(seq, computed):
            self.waiting.add(other)
