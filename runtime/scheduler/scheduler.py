"""The scheduler: which sequences run in the next step, how many of their tokens, on which slots.

    submit -> waiting -> (admitted: lease, row) running -> park -> parked -> submit ...     remove -> ended
                 ^-------- preempted: KV committed to the cache, lease released --------'

A parked sequence keeps its KV until another sequence needs the slots. When it is submitted again, it finds in the cache
the part that was not evicted. A waiting sequence is *blocked* while another one computes its prefix or while its prefix
is read from disk.

The step that computes the last tokens of the prefix also runs the sequences that share it, in later rows: in each layer
the keys and values of a step's tokens are written before attention reads them. These tokens are *committed ahead*: the
cache holds them from the plan on, so that the sequences find them, and forgets them if the step is not run.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np

from ...radix_cache import OutOfSlots, RadixCache
from .blocked import Blocked, RunningPrompts, is_worth_waiting_for
from .config import SchedulerConfig
from .counters import SchedulerCounters
from .drain import Drain
from .lengths import PROMPT_COST, UNKNOWN, Lengths
from .parked import Parked
from .plan import DecodePart, Draft, PlanRow, StepPlan, drafted_row, plan_row
from .prefix import CommittedAhead, attach, commit, commit_ahead, matched_len, read_ahead, shorten
from .sequence import PoolTooSmall, Sequence, slots_missing, slots_to_come, urgency
from .waiting import ORDERS, PREEMPTIVE, Waiting

MAX_PREEMPTED = 3  # times since its submit that a sequence is preempted for shorter ones
LEAST_RATIO = 2.0  # of the work that is left, the longer sequence's to the shorter one's


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
    """Owns every sequence's lease, row and computed length. One plan is executed at a time."""

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
        self._blocked = Blocked()
        self._ahead: list[CommittedAhead] = []  # for the plan that is not complete yet
        self._waiting_with_lease: dict[int, Sequence] = {}  # they were parked with it
        self._program_orders: dict[str, int] = {}
        self._free_rows = list(range(config.max_running - 1, -1, -1))
        self._no_room = (-1, 0, 0)  # the sequence that found no room, the free slots then, and how many ran
        self._step = 0
        self._order = 0

    # -- what the engine calls ----------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for room or are blocked."""
        return len(self.waiting) + len(self._blocked)

    @property
    def num_preemptions(self) -> int:
        return self.counters.num_preemptions

    @property
    def num_reading(self) -> int:
        """Sequences whose prefix is being read from disk."""
        return self._blocked.num_reading

    @property
    def has_work(self) -> bool:
        return bool(self.running or len(self.waiting) or len(self._blocked))

    def drained_in_s(self) -> float:
        """Expected seconds until all present sequences have ended, from ``drain.LEAST_S`` to ``drain.MOST_S``."""
        return self.drain.wait_s((*self.running, *self.waiting, *self._blocked), self.lengths, step=self._step)

    def submit(self, seq: Sequence, *, max_new: int = -1, min_new: int = 0) -> None:
        """Queue ``seq``, which has pending tokens or wants logits of computed ones (from ``logits_from`` on).

        It will generate at most ``max_new`` tokens (-1: not known), and at least ``min_new`` unless it is cancelled.
        """
        assert seq.state in ("new", "parked"), seq
        assert len(seq.tokens) > 0, seq
        if seq.state == "parked":
            self.parked.take(seq, self.clock(), came_back=True)
        if seq.lease is not None:
            self._waiting_with_lease[seq.seq_id] = seq
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
        seq.is_looked_up = False
        seq.num_restored = seq.num_preempted = 0
        reading = read_ahead(seq, self.cache)
        if reading is None:
            self.waiting.add(seq)
        else:
            self._blocked.wait_for_disk(seq, reading)

    def park(self, seq: Sequence) -> None:
        """Take ``seq`` off its row: it has nothing to compute for now. Its KV is committed and stays locked for it."""
        if seq.is_vectorised:
            assert self.vectorised is not None
            self.vectorised.remove(seq)
        seq.next_draw = 0
        seq.num_computed = min(seq.num_computed, len(seq.tokens))
        if seq.state == "running":
            self.lengths.note(seq)
            self._leave(seq)
            self.commit(seq)
            if seq.lease is not None:
                seq.lease.truncate(min(seq.num_computed, seq.lease.num_slots))
        elif seq.state == "waiting":
            if not self._blocked.discard(seq):
                self.waiting.discard(seq)
            self._waiting_with_lease.pop(seq.seq_id, None)
        seq.state = "parked"
        self.parked.add(seq, self.clock())

    def remove(self, seq: Sequence) -> None:
        """End ``seq``; what was computed stays in the cache."""
        if seq.state in ("running", "waiting"):
            self.park(seq)
        self.parked.take(seq, self.clock(), came_back=False)
        self.drop_lease(seq)
        seq.state = "ended"

    def end_program(self, program: str) -> None:
        """``program`` will submit nothing more: prefixes that only it used may be evicted."""
        self._program_orders.pop(program, None)
        self.cache.end_program(program)

    def expect(self, seq: Sequence, draw: int) -> None:
        """The next token of ``seq`` is draw ``draw`` of the step being computed: plan on it before it is known."""
        assert seq.state == "running" and seq.num_computed == len(seq.tokens), seq
        seq.next_draw = -1 - draw
        seq.tokens.write_ahead(seq.next_draw)
        seq.logits_from = len(seq.tokens)

    def settle(self, seq: Sequence) -> None:
        """The expected draw is known: the caller appends it now, postpones it, or parks ``seq`` without it."""
        seq.next_draw = 0

    def postpone(self, seq: Sequence) -> None:
        """The caller appends the draw later; ``seq`` keeps its row, its slots and its place, and sits out steps."""
        seq.num_computed = min(seq.num_computed, len(seq.tokens))

    def commit(self, seq: Sequence) -> None:
        """Give what ``seq`` has computed to the cache, so that others find it."""
        commit(seq)

    def commit_computed(self, seq: Sequence) -> None:
        """As ``commit``, between two steps of a sequence that goes on running with the slots that it has.

        A vectorised one must be synchronised. What a step in flight computes of tokens not known yet is left out.
        """
        if seq.lease is not None:
            seq.lease.commit_new(seq.tokens.ids[: min(seq.num_computed, len(seq.tokens))])

    def truncate(self, seq: Sequence, length: int) -> None:
        """Remove the tokens from ``length`` on, and their KV."""
        seq.tokens.truncate(length)
        if seq.num_computed > length:
            seq.num_computed = length
        seq.table_len = min(seq.table_len, length)
        if seq.lease is not None and len(seq.lease.slot_ids) > length:
            seq.lease.truncate(length)

    def drop_lease(self, seq: Sequence) -> None:
        """Release the slots of a sequence that is not running; what was computed is committed to the cache first."""
        assert seq.state != "running", seq
        if seq.lease is not None:
            self.commit(seq)
            seq.lease.release()
            seq.lease = None
            self._waiting_with_lease.pop(seq.seq_id, None)
            self.parked.note_released(seq)
        seq.num_computed = 0

    # -- one step -----------------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step, or None when nothing can run. Sequences that need more slots than exist go to ``failed``.

        A row may read slots that an earlier row of the plan writes. So a step runs all rows, in the plan's
        order. ``without_ended`` takes rows out of a plan; ``drop_plan`` is called where a plan is not run.
        """
        assert not self._ahead, "the plan before is neither complete nor dropped"
        budget, chunk = self.config.max_step_tokens, self.config.prefill_chunk
        if self._blocked.num_reading:
            for seq in self._blocked.take_read():
                self.waiting.add(seq)
        rows: dict[int, PlanRow] = {}
        prefills: list[Sequence] = []
        num_vectorised = 0 if self.vectorised is None else len(self.vectorised)
        if not num_vectorised and self._may_preempt_for_waiting:
            self._preempt_for_waiting()
        self.cache.free_up(len(self.running))  # the slots that decodes take in a step, on average: chunks are rare
        # Decodes first: they are short, and users read their tokens as they come.
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
                rows[seq.seq_id] = row = plan_row(seq, n)
                budget -= n
                self._unblock(seq, row.end)
        if budget > 0 and self._free_rows and len(self.waiting):
            self._admit(budget, rows, [seq for seq in prefills if seq.state == "running"])
        if not rows and vectorised is None:
            self.drain.pause()
            return None
        self._step += 1
        return StepPlan(self._step, tuple(rows.values()), vectorised)

    @property
    def can_vectorise(self) -> bool:
        """Whether in the next step no running sequence can be preempted or exceed the step's tokens."""
        config, num_running = self.config, len(self.running)
        if num_running > config.max_step_tokens or self._may_preempt_for_waiting:
            return False
        return self._room > config.max_step_tokens + 2 * config.slot_chunk * (num_running + 2)

    def complete(self, plan: StepPlan, sequences: dict[int, Sequence]) -> None:
        """The KV of ``plan`` is in its slots."""
        self._ahead.clear()
        num_tokens: dict[str, int] = {}
        if plan.vectorised is not None:
            assert self.vectorised is not None
            num_tokens = self.vectorised.complete(plan.vectorised)
        is_any_blocked = len(self._blocked) > 0
        work = float(plan.num_vectorised)
        for row in plan.rows:
            seq = sequences[row.seq_id]
            n = len(row.token_ids) - row.num_draft
            seq.num_run += n
            seq.num_computed = computed = row.start + n
            work += 1.0 if n == 1 else PROMPT_COST * n
            num_tokens[seq.tenant] = num_tokens.get(seq.tenant, 0) + n
            if seq.lease is not None and (n > 1 or computed < seq.length):
                self.commit(seq)  # a chunk of a prompt: other sequences may be blocked on it
            if is_any_blocked:
                self._unblock(seq, computed)
        self.drain.note(work, self.clock())
        for tenant, n in num_tokens.items():
            self.waiting.charge(tenant, n)

    def without_ended(self, plan: StepPlan, sequences: Mapping[int, Sequence]) -> StepPlan | None:
        """``plan`` without the rows of sequences that do not run any more, and without the rows that read what those
        were to compute; the sequences of the latter wait again. None if no row is left.
        """
        kept: list[PlanRow] = []
        lost_rows: set[int] = set()
        lost_slots = np.zeros(0, np.int32)
        for row in plan.rows:
            seq = sequences.get(row.seq_id)
            is_running = seq is not None and seq.state == "running"
            reads_lost = len(lost_slots) > 0 and bool(np.isin(row.slot_ids[: row.start], lost_slots).any())
            if is_running and not reads_lost:
                kept.append(row)
                continue
            lost_rows.add(row.seq_id)
            lost_slots = np.concatenate((lost_slots, row.slot_ids[row.start : row.end]))
            if seq is not None and is_running:
                self._requeue(seq)
            elif seq is not None and reads_lost:
                self.drop_lease(seq)
        for ahead in self._ahead:
            if ahead.seq_id in lost_rows:
                self._forget(ahead)
        self._ahead = [ahead for ahead in self._ahead if ahead.seq_id not in lost_rows]
        return StepPlan(plan.step, tuple(kept), plan.vectorised) if kept or plan.vectorised is not None else None

    @property
    def is_ahead(self) -> bool:
        """Whether the cache holds tokens that a step has still to compute."""
        return bool(self._ahead)

    def drop_plan(self) -> None:
        """The last plan is not run, unless it is complete. All of its sequences have ended."""
        for ahead in self._ahead:
            self._forget(ahead)
        self._ahead.clear()

    def _forget(self, ahead: CommittedAhead) -> None:
        self.cache.forget(ahead.tokens, start=ahead.start, namespace=ahead.namespace)

    def run_ahead(self, num_steps: int) -> None:
        """As ``num_steps`` steps in which every running sequence decodes one token, for a simulator.

        The caller has appended the tokens. Nothing waits, and the slots suffice for all of them.
        """
        for seq in self.running:
            seq.num_computed += num_steps
            seq.num_run += num_steps
            assert seq.lease is not None and seq.num_pending == 1, seq
            missing = seq.num_computed - seq.lease.num_slots
            if missing > 0:
                seq.lease.extend(-(-missing // self.config.slot_chunk) * self.config.slot_chunk)
            self.waiting.charge(seq.tenant, num_steps)
        self._step += num_steps
        self.drain.note(float(num_steps * len(self.running)), self.clock())
        self.cache.free_up(len(self.running))

    # -- drafts -------------------------------------------------------------------------------------------------------

    @property
    def spare_room(self) -> int:
        """Slots that are free or evictable, beyond those that the running sequences are expected to need soon."""
        reserve = (self.config.decode_reserve + self.config.slot_chunk) * len(self.running)
        return max(0, self._room - reserve)

    def room_for_draft(self, seq: Sequence, length: int) -> int:
        """How many of ``length`` draft tokens can have slots without taking any that running sequences will need."""
        lease = seq.lease
        if lease is None:
            return 0
        spare = lease.num_slots - len(seq.tokens)
        if spare >= length:
            return length
        return min(length, max(spare, 0) + self.spare_room)

    def add_drafts(self, plan: StepPlan, sequences: Mapping[int, Sequence], drafts: Mapping[int, Draft]) -> StepPlan:
        """``plan`` with ``drafts`` (by sequence id) on its rows, cut to the tokens of a step and to the free slots.

        A drafted row must reach its sequence's end and want its last logits.
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
                rows[i] = drafted_row(row, seq, draft.cut(length))
                budget -= length
        return StepPlan(plan.step, tuple(rows), plan.vectorised)

    def accept_draft(self, row: PlanRow, seq: Sequence, num_accepted: int) -> None:
        """Keep the KV of the first ``num_accepted`` tokens of ``row``'s draft.

        The caller has appended these tokens to ``seq`` already, and perhaps more.
        """
        if num_accepted == 0:
            return
        end = row.tokens_end + num_accepted
        assert seq.lease is not None and seq.num_computed == row.tokens_end and len(seq.tokens) >= end, seq
        seq.num_computed = end
        seq.num_run += num_accepted
        self.waiting.charge(seq.tenant, num_accepted)
        self._unblock(seq, end)

    # -- inside a step ------------------------------------------------------------------------------------------------

    def _admit(self, budget: int, rows: dict[int, PlanRow], prefills: list[Sequence]) -> None:
        """Admit waiting sequences while there are tokens, rows and slots for them. ``prefills`` run already."""
        prompts = RunningPrompts(prefills) if self.cache.reuse else None
        reserve, usual, least = -1, int(self.lengths.usual), self.config.decode_reserve
        while budget > 0 and self._free_rows:
            seq = self._head()
            if seq is None:
                return
            limit, matched = min(seq.length - 1, seq.logits_from), matched_len(seq, self.cache)
            found = None if prompts is None else prompts.longest(seq, limit)
            if (
                found is not None
                and found[1] > matched
                and not self._commit_ahead(*found, rows)
                and is_worth_waiting_for(seq, found[1], matched=matched)
            ):
                self.waiting.discard(seq)
                self._blocked.wait_for_sequence(seq, *found)
                continue
            no_room_id, room, num_running = self._no_room
            if seq.seq_id == no_room_id and len(self.running) >= num_running > 0 and self._room <= room:
                return  # no slots have become free since it found no room
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
                    if prompts is not None:
                        prompts.add(seq)
            elif seq.state == "waiting":
                # No room: nobody behind it is admitted, or smaller sequences would starve it.
                self._no_room = (seq.seq_id, self._room, len(self.running))
                return

    def _commit_ahead(self, source: Sequence, length: int, rows: dict[int, PlanRow]) -> bool:
        """Whether this step computes the first ``length`` tokens of ``source``; the cache holds them then."""
        row = rows.get(source.seq_id)
        if row is None or row.end < length:
            return False
        assert source.lease is not None
        if source.lease.num_shared < length:
            ahead = commit_ahead(source, row.end)
            if ahead is None:
                return False
            self._ahead.append(ahead)
        return True

    def _head(self) -> Sequence | None:
        return self.waiting.head(self.config.match_window, lambda seq: matched_len(seq, self.cache))

    @property
    def _may_preempt_for_waiting(self) -> bool:
        """Whether a running sequence is less urgent than a waiting one, or the order is by what is left to do."""
        if not self.running or not len(self.waiting):
            return False
        return self.config.order in PREEMPTIVE or self.waiting.most_urgent < self.running[-1].priority

    def _preempt_for_waiting(self) -> None:
        """If the next to be admitted finds no row or no slots, preempt a less urgent or much longer sequence."""
        head = self._head()
        if head is None or (self._free_rows and self._no_room[0] != head.seq_id):
            return
        room = math.inf if self.parked.have_slots else self._room  # parked sequences give up their slots first
        victim = self._victim_for_waiting(head, room)
        if victim is not None:
            self.counters.num_yields += 1
            self._preempt(victim)

    def _victim_for_waiting(self, head: Sequence, room: float) -> Sequence | None:
        """The running sequence to preempt for ``head``.

        None if ``head`` has a row and fits into ``room``, or will be blocked on a prompt that is being computed.
        """
        matched = matched_len(head, self.cache)
        prefills = [seq for seq in self.running if seq.num_pending > 1]
        shortage = head.length - matched + self._slots_to_come([*self.running, head]) + slots_missing(prefills) - room
        if self._free_rows and shortage <= 0:
            return None
        found = self._least_urgent(head)
        if found is None and self.config.order in PREEMPTIVE:
            found = self._longest(head, shortage)
        if found is None or not self.cache.reuse:
            return found
        limit = min(head.length - 1, head.logits_from)
        return found if RunningPrompts(prefills).worth_waiting_for(head, limit, matched=matched) is None else None

    def _least_urgent(self, head: Sequence) -> Sequence | None:
        """The latest running sequence of the least urgent priority, if that is less urgent than ``head``'s."""
        for seq in reversed(self.running):
            if seq.priority <= head.priority:
                return None
            if not self._blocked.is_awaited(seq) and (not seq.program or seq.program != head.program):
                return seq
        return None

    def _longest(self, head: Sequence, shortage: float) -> Sequence | None:
        """Shortest remaining time first: the running sequence with most left to do whose slots cover ``shortage``.

        It must have more left to do than its own return costs, plus twice what ``head`` has to do: four times if it was
        preempted before, eight times after that, and never a fourth time. Exempt are sequences that are due (see
        ``Waiting``), have a more urgent priority or deadline, belong to another tenant that was not served more, or
        compute tokens that another sequence is blocked on. Exempt are also several running sequences of one program:
        they were forked to run together, and a join waits for all.
        """
        lengths, served = self.lengths, self.waiting.served
        work = lengths.work(head)
        best, most = None, 0.0
        num_running: Counter[str] | None = None
        for seq in self.running:
            if seq.num_preempted >= MAX_PREEMPTED or seq.priority < head.priority or seq.deadline_s < head.deadline_s:
                continue
            if seq.tenant != head.tenant and served.get(seq.tenant, 0.0) <= served.get(head.tenant, 0.0):
                continue
            left = lengths.left(seq)
            bar = LEAST_RATIO * 2**seq.num_preempted * work + PROMPT_COST * len(seq.tokens)
            if not max(bar, most) < left < UNKNOWN or self.waiting.is_due(seq) or self._blocked.is_awaited(seq):
                continue
            if seq.program:
                num_running = num_running or Counter(other.program for other in self.running)
                if seq.program == head.program or num_running[seq.program] > 1:
                    continue
            if shortage > 0:
                assert seq.lease is not None
                if seq.lease.num_sole + self._slots_to_come([seq]) < shortage:
                    continue
            best, most = seq, left
        return best

    def _slots_to_come(self, sequences: list[Sequence]) -> int:
        return slots_to_come(sequences, usual=int(self.lengths.usual), least=self.config.decode_reserve)

    @property
    def _room(self) -> int:
        """Slots that are free or evictable."""
        return self.cache.num_free + self.cache.num_evictable

    def _try_admit(self, seq: Sequence, budget: int, reserve: int) -> int:
        """Admit ``seq`` and return how many tokens it runs in this step.

        0 when there is no room beside ``reserve`` slots for the running sequences, or (state ``ended``) when it needs
        more slots than exist.
        """
        cache = self.cache
        if seq.length > cache.num_slots:
            if not seq.next_draw:  # else the token being drawn may be its last one, which needs no slot
                self._fail(seq, seq.length)
            return 0
        if cache.tiers is not None and seq.lease is None:  # blocks that come back from host memory need slots
            self._release_idle(seq.length - matched_len(seq, cache) + reserve, seq)
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
        self._waiting_with_lease.pop(seq.seq_id, None)
        seq.state = "running"
        seq.row_id = self._free_rows.pop()
        seq.table_len = 0
        insort(self.running, seq, key=urgency)
        return n

    def _make_room(self, seq: Sequence, n: int, rows: dict[int, PlanRow]) -> bool:
        """Take slots for ``n`` more tokens of ``seq``, if need be from parked and less urgent sequences."""
        while True:
            try:
                self._extend(seq, seq.num_computed + n)
                return True
            except OutOfSlots as error:
                if self._release_idle(error.need, seq):
                    continue
                if seq.next_draw:
                    return False  # the token being drawn may be its last; if not, it asks again in the next step
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
        # A decoding sequence takes a chunk, so that most steps need no slot; when slots are short, one slot.
        ahead = self.config.slot_chunk - 1
        if length >= seq.length and ahead and self._room > missing + 2 * ahead * (1 + len(self.running)):
            missing += ahead if seq.num_run else seq.seq_id % (ahead + 1)  # so that not all take chunks in one step
        lease.extend(missing)

    def _release_idle(self, need: int, seq: Sequence) -> bool:
        """Release slots of idle sequences other than ``seq`` until ``need`` slots are free or evictable.

        Parked sequences go first, in ``Parked``'s order, and give up no more slots than are missing. Waiting sequences
        that still have a lease follow, the latest first. Returns whether any slot was released.
        """
        if self._room >= need:
            return False
        released = False
        now_s = self.clock()
        while (missing := need - self._room) > 0 and (parked := self.parked.first_to_go(now_s)) is not None:
            if not shorten(parked, missing):
                self.drop_lease(parked)
            released = True
        for other in tuple(reversed(self._waiting_with_lease.values())):
            if self._room >= need:
                break
            if other is not seq:
                self.drop_lease(other)
                released = True
        return released

    def _victim(self, seq: Sequence, rows: dict[int, PlanRow]) -> Sequence | None:
        """The sequence to preempt for the running ``seq``: the least urgent, latest one without a row in this step."""
        for worst in reversed(self.running):
            if worst is seq:
                return None
            if worst.seq_id not in rows:
                return worst
        return None

    def _preempt(self, seq: Sequence) -> None:
        self.counters.num_preemptions += 1
        seq.num_preempted += 1
        self._requeue(seq)

    def _requeue(self, seq: Sequence) -> None:
        """Take ``seq`` off its row: it waits again, at its old place."""
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
        """Give up the row; sequences that are blocked on this one's tokens are queued again."""
        assert not seq.is_vectorised, seq
        index = bisect_left(self.running, urgency(seq), key=urgency)
        assert self.running[index] is seq, seq
        del self.running[index]
        self._free_rows.append(seq.row_id)
        seq.row_id = -1
        seq.state = "parked"
        self._unblock(seq, math.inf)

    def _unblock(self, seq: Sequence, computed: float) -> None:
        """Queue again the sequences that are blocked on at most ``computed`` tokens of ``seq``."""
        for other in self._blocked.take_behind(seq, computed):
            self.waiting.add(other)
