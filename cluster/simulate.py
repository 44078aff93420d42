"""A fleet without models: discrete events over real schedulers, caches, index and placement, with predicted step times.

An engine that only decodes is not run step by step. Its next change (a sequence ends, or a call arrives) is known, so
the steps until then are taken at once:

    exact:    step | step | step | step | step        plan and complete for each
    skipped:  |<-------- n steps -------->|           one event; an arrival cuts it at the end of the step under way

With prefill engines a call may begin on one of them and go on at another one after its first token, once its KV was
copied. Here it stands still meanwhile, and the copy delays a step of the other engine; real engines decode on.

Faults: an engine dies (its calls are repeated elsewhere with the tokens they had), is slow, or its events are lost.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np

from ..radix_cache import POLICIES, Contents, RadixCache, block_names
from ..runtime.engine.cache_feed import CacheFeed
from ..runtime.scheduler import Scheduler, SchedulerConfig, StepPlan, TokenBuffer
from ..runtime.scheduler import Sequence as ScheduledSequence
from .autoscale import ReplicaWork, steps_to
from .index import CacheIndex
from .loads import Booking, OutputLengths, Rates
from .placement import Choice, Demand, Placement
from .rebalance import Rebalancing, Room, Shift, Work
from .roles import Role
from .step_clock import NO_TAPES, StepClock, TapeCosts, Tapes
from .traces import TimedCall, Trace, tokens_of

BLOCK_LEN = 64
REBALANCE_S = 0.5  # between two looks at the loads
MODEL = "simulated"


class _TraceIds(Contents):
    """A long trace has more tokens than there are ids below those of contents. All of its ids name themselves."""

    def described(self, tokens: np.ndarray) -> bytes:
        return tokens.astype("<i4", copy=False).tobytes()


TRACE_IDS = _TraceIds()


@dataclass(frozen=True, slots=True)
class EngineFault:
    """From ``at_s`` on the engine of number ``engine`` is dead for ``for_s`` seconds, or its steps take ``slowness``
    times as long for that time, or it loses each frame of events with probability ``loss``.
    """

    engine: int
    at_s: float
    for_s: float
    kind: str  # dies | slow | loses_events
    slowness: float = 4.0
    loss: float = 0.5

    def __post_init__(self) -> None:
        if self.kind not in ("dies", "slow", "loses_events"):
            raise ValueError(f"kind={self.kind!r} of a fault is not one of: dies, slow, loses_events")


@dataclass(frozen=True, slots=True)
class FleetShape:
    """Equal engines. ``skips`` False runs every step. A dead engine is noticed after ``notice_s``; a snapshot of an
    engine's blocks takes ``snapshot_s``. ``tape_costs``: of engines on a CPU.
    """

    num_engines: int
    num_slots: int
    max_running: int = 64
    max_step_tokens: int = 2048
    prefill_chunk: int = 1024
    skips: bool = True
    notice_s: float = 0.1
    snapshot_s: float = 0.01
    tape_costs: TapeCosts = NO_TAPES


class Ask:
    """A call that is to be placed: its tokens so far, and what is known of its program."""

    def __init__(self, call: TimedCall, tokens: np.ndarray, *, home: str, history_tokens: int, may_move: bool) -> None:
        self.call = call
        self.tokens = tokens
        self.home = home
        self.history_tokens = history_tokens
        self.may_move = may_move

    @cached_property
    def names(self) -> list[bytes]:
        return block_names(self.tokens, block_len=BLOCK_LEN, contents=TRACE_IDS)


class PlacementRule(Protocol):
    """Chooses an engine for each call. With ``keeps_programs`` a program's sequences stay parked between its calls;
    without it every call is a request of its own.
    """

    @property
    def index(self) -> CacheIndex | None:
        """Told of the engines' cache events; None if the rule needs none."""
        ...

    @property
    def keeps_programs(self) -> bool: ...

    def join(self, engine: str, rates: Rates, max_rows: int) -> None: ...
    def leave(self, engine: str) -> None: ...
    def place(self, ask: Ask, now_s: float) -> str: ...
    def ended(self, call: TimedCall, engine: str, now_s: float, *, is_done: bool) -> None:
        """A placed call has ended, or (``is_done`` False) its engine was lost."""
        ...


class FleetRule:
    """Our own: ``Placement`` over ``CacheIndex``. Output lengths are predicted from those of programs of one kind.

    ``roles``: of engines; the others have ``both``. KV is copied from one engine to another at ``copy_s_per_token``.
    ``max_rebalanced``: running calls that are moved at once to even out the loads.
    """

    keeps_programs = True

    def __init__(
        self,
        *,
        seed: int = 0,
        near: float | None = None,
        roles: Mapping[str, Role] | None = None,
        copy_s_per_token: float = 0.0,
        max_rebalanced: int = 0,
    ) -> None:
        self.max_rebalanced = max_rebalanced
        self._rebalancing = Rebalancing()
        self.copy_s_per_token = copy_s_per_token
        self._roles = dict(roles or {})
        self._handed_off: set[int] = set()  # calls that are to go on elsewhere
        self.index: CacheIndex = CacheIndex()
        self.placement = Placement(rng=random.Random(seed))
        if near is not None:
            self.placement.near = near
        self.lengths = OutputLengths()
        self.reasons: dict[str, int] = {}
        self._bookings: dict[int, Booking] = {}

    def join(self, engine: str, rates: Rates, max_rows: int) -> None:
        self.placement.loads.add(engine, rates=rates, max_rows=max_rows)
        self._roles.setdefault(engine, "both")

    def leave(self, engine: str) -> None:
        self.placement.loads.remove(engine)
        self.index.remove(engine)

    def place(self, ask: Ask, now_s: float) -> str:
        call = ask.call
        output = self.lengths.predict(call.program.kind, -1)
        demand = Demand(len(ask.tokens), output, home=ask.home, history_tokens=ask.history_tokens)
        matches = self.index.match(ask.names)
        booking: Booking | None = None
        if not ask.home and not call.after and len(ask.tokens) == call.prompt_len:
            choice, booking = self.placement.place_new(
                demand,
                matches,
                now_s,
                roles=self._roles,
                copy_s_per_token=self.copy_s_per_token,
                among=self.placement.loads.names,
            )
            if choice.reason == "prefill":
                self._handed_off.add(id(call))
        elif ask.may_move or ask.home not in self.placement.loads:
            choice = self.placement.choose(demand, matches, now_s, among=self._that_generate(ask.home))
        else:
            held = matches[ask.home].tokens if ask.home in matches else 0
            choice = Choice(ask.home, 0.0, min(max(held, ask.history_tokens), len(ask.tokens) - 1), "home")
        self.reasons[choice.reason] = self.reasons.get(choice.reason, 0) + 1
        self._bookings[id(call)] = booking or self.placement.book(demand, choice, matches, now_s)
        return choice.engine

    def hands_off(self, call: TimedCall) -> bool:
        """Whether a call that was placed is to leave its engine after its first token."""
        return id(call) in self._handed_off

    def rebalance(self, works: Sequence[Work], rooms: Mapping[str, Room], now_s: float) -> list[Shift]:
        """The calls that are to move, named by their programs."""
        loads = self.placement.loads
        return self._rebalancing.plan(
            works,
            loads,
            among=self._that_generate("") or loads.names,
            rooms=rooms,
            copy_s_per_token=self.copy_s_per_token,
            most=self.max_rebalanced,
            now_s=now_s,
        )

    def left(self, call: TimedCall, made: int) -> float:
        return self.lengths.predict(call.program.kind, -1, made=made)

    def take_over(self, call: TimedCall, now_s: float, *, made: int, to: str = "") -> str:
        """The engine where a call goes on that has ``made`` tokens of output; ``to``: it is decided."""
        demand = Demand(1, self.left(call, made))
        among = [to] if to else self._that_generate("")
        choice, self._bookings[id(call)] = self.placement.place(demand, {}, now_s, among=among)
        return choice.engine

    def _that_generate(self, home: str) -> list[str] | None:
        names = self.placement.loads.names
        return [name for name in names if self._roles[name] != "prefill" or name == home] or None

    def ended(self, call: TimedCall, engine: str, now_s: float, *, is_done: bool) -> None:
        self._handed_off.discard(id(call))
        self.placement.loads.finish(self._bookings.pop(id(call)), now_s, made=call.num_new if is_done else 0)
        if is_done:
            self.lengths.note(call.program.kind, call.num_new)


class ReplicaRule(Protocol):
    """Says every ``look_s`` how many engines are wanted. One that is ordered takes calls ``start_s`` later."""

    @property
    def look_s(self) -> float: ...
    @property
    def start_s(self) -> float: ...
    def arrived(self, call: TimedCall, now_s: float) -> None: ...
    def ended(self, call: TimedCall, now_s: float) -> None: ...

    def wanted(
        self, now_s: float, *, waiting: Mapping[str, int], ready_in_s: Sequence[float], running: Mapping[str, int]
    ) -> int:
        """``waiting``: calls that no engine has begun, by kind. ``running``: calls by engine, of those that are ready.
        ``ready_in_s``: seconds until each engine is ready.
        """
        ...


class _Job:
    """A call in a sequence: done when that has ``end`` tokens; the token id at position p is ``first + p``."""

    __slots__ = ("call", "end", "first")

    def __init__(self, call: TimedCall) -> None:
        self.call = call
        prompt_len = call.prompt_len
        self.end = prompt_len + call.num_new
        self.first = call.output[-1].first - prompt_len


class SimulatedEngine:
    """One engine: its scheduler and cache, and the step or the run of decode steps under way.

    ``slowness``: of its next steps. ``loss``: probability that a frame of its cache events is lost.
    """

    def __init__(self, name: str, shape: FleetShape, clock: StepClock, *, has_events: bool) -> None:
        self.name = name
        self.shape = shape
        self.clock = clock
        self.now_s = 0.0
        self.busy_s = 0.0
        self.num_steps = 0
        self.slowness = 1.0
        self.loss = 0.0
        self.is_alive = True
        self.version = 0  # of the event that ends what is under way; others are void
        self.stall_s = 0.0  # of its next step: KV that it loads
        self.inbox: list[tuple[ScheduledSequence, _Job]] = []
        self._has_events = has_events
        self.begin()

    def begin(self) -> None:
        """Start, or start again with an empty cache."""
        shape = self.shape
        self.tapes = Tapes(shape.tape_costs)
        self.feed = CacheFeed(block_len=BLOCK_LEN, model=MODEL) if self._has_events else None
        self.cache = RadixCache(
            shape.num_slots,
            policy=POLICIES["program_aware"],
            clock=lambda: self.now_s,
            on_event=None if self.feed is None else self.feed.note,
            block_len=BLOCK_LEN,
            contents=TRACE_IDS,
        )
        config = SchedulerConfig(
            max_running=shape.max_running, max_step_tokens=shape.max_step_tokens, prefill_chunk=shape.prefill_chunk
        )
        self.scheduler = Scheduler(config, self.cache, clock=lambda: self.now_s)
        self.live: dict[int, ScheduledSequence] = {}
        self.plan: StepPlan | None = None
        self.ahead = 0  # decode steps under way that are taken at once
        self.begun_s = 0.0
        self._rows = self._context = 0
        self._factor = 1.0  # the slowness of what is under way
        self.leaving: dict[int, str] = {}  # calls that go on elsewhere after the step under way, and where
        self.inbox.clear()

    @property
    def is_busy(self) -> bool:
        return self.plan is not None or self.ahead > 0

    def start(self) -> float | None:
        """Begin the next step, or several, at ``now_s``; returns when they end, None if there is nothing to do."""
        scheduler = self.scheduler
        for seq, job in self.inbox:
            seq.tag = job
            seq.logits_from = len(seq.tokens) - 1
            scheduler.submit(seq)
        self.inbox.clear()
        self.begun_s, self._factor = self.now_s, self.slowness
        if self.shape.skips and (n := self._steady_steps()) > 1:
            self.ahead = n
            return self.begun_s + self._factor * self.clock.decodes_s(self._rows, self._context, n)
        self.plan = scheduler.plan()
        if scheduler.failed:
            seq, error = scheduler.failed[0]
            raise ValueError(f"{self.name}: {error}; a call of {seq.tag} fits into no engine of this fleet")
        if self.plan is None:
            assert not scheduler.has_work, "sequences wait, but none runs"
            return None
        stall_s, self.stall_s = self.stall_s, 0.0
        return self.begun_s + self._factor * (self.clock.plan_s(self.plan) + self.tapes.extra_s(self.plan) + stall_s)

    def _steady_steps(self) -> int:
        """Steps in which every running sequence only decodes, until the first one ends; 0 if the next is none such."""
        scheduler = self.scheduler
        running = scheduler.running
        if not running or scheduler.num_waiting or not self.tapes.has_decode(len(running)):
            return 0
        n, context = 1 << 30, 0
        for seq in running:
            if seq.num_pending != 1 or seq.num_run == 0:
                return 0
            n = min(n, _left(seq))
            context += seq.num_computed
        chunk = scheduler.config.slot_chunk
        if self.cache.num_free + self.cache.num_evictable <= (n + 2 * chunk) * (len(running) + 1):
            return 0  # a sequence may be preempted
        self._rows, self._context = len(running), context
        return n

    def cut(self) -> float | None:
        """A call has arrived: end the run of steps with the one under way; returns its end, None if it stays."""
        if self.ahead <= 1:
            return None
        elapsed_s = (self.now_s - self.begun_s) / self._factor
        n = max(1, self.clock.steps_until(self._rows, self._context, elapsed_s))
        if n >= self.ahead:
            return None
        self.ahead = n
        return self.begun_s + self._factor * self.clock.decodes_s(self._rows, self._context, n)

    def finish(self) -> list[ScheduledSequence]:
        """The step or steps have ended at ``now_s``; returns the sequences that have their last token."""
        ended = []
        self.busy_s += self.now_s - self.begun_s
        if self.ahead:
            n, self.ahead = self.ahead, 0
            self.num_steps += n
            running = self.scheduler.running
            for seq in running:
                _draw(seq, n)
            self.scheduler.run_ahead(n)
            ended = [seq for seq in running if _left(seq) == 0]
        elif self.plan is not None:
            plan, self.plan = self.plan, None
            self.num_steps += 1
            self.scheduler.complete(plan, self.live)
            for row in plan.rows:
                seq = self.live[row.seq_id]
                if row.end == len(seq.tokens):
                    call = _job(seq).call
                    if call.first_s < 0:
                        call.first_s = self.now_s
                    _draw(seq, 1)
                    if _left(seq) == 0:
                        ended.append(seq)
        return ended


def _job(seq: ScheduledSequence) -> _Job:
    job = seq.tag
    assert isinstance(job, _Job)
    return job


def _left(seq: ScheduledSequence) -> int:
    """Tokens that the sequence's call is still to make."""
    return _job(seq).end - len(seq.tokens)


def _draw(seq: ScheduledSequence, n: int) -> None:
    """Append the next ``n`` tokens of the call's output."""
    first = _job(seq).first + len(seq.tokens)
    seq.tokens.extend(np.arange(first, first + n, dtype=np.int32))
    seq.logits_from = len(seq.tokens) - 1


@dataclass(slots=True)
class FleetRun:
    """What came of a simulation: ``calls`` in the order of arrival, with their times and the prompt tokens computed.

    ``reasons``: how often ``FleetRule`` decided for which; of other rules none. ``shifts``: calls that it moved, by the
    names of their programs, and when. ``wanted``: the number of engines at
    each look of a ``ReplicaRule``; ``paid_s``: seconds of engines that ran or started.
    """

    calls: list[TimedCall]
    end_s: float
    busy_s: list[float]
    num_steps: int
    num_events: int
    num_replayed: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    shifts: list[tuple[float, Shift]] = field(default_factory=list)
    wanted: list[tuple[float, int]] = field(default_factory=list)
    paid_s: float = 0.0


class FleetSimulation:
    """Runs ``trace`` once. A call arrives when the calls before it have ended, and is placed by ``rule``.

    ``scaling``: the number of engines that run changes, up to those of ``shape``; at first one runs. An engine that is
    not wanted is drained: its calls go elsewhere with the tokens that they had.
    """

    def __init__(
        self,
        trace: Trace,
        rule: PlacementRule,
        shape: FleetShape,
        clock: StepClock,
        *,
        faults: Iterable[EngineFault] = (),
        scaling: ReplicaRule | None = None,
        seed: int = 0,
    ) -> None:
        self.rule = rule
        self.scaling = scaling
        self.shape = shape
        self.trace = trace
        self.now_s = 0.0
        self.num_replayed = 0
        self.arrived: list[TimedCall] = []
        self._rng = random.Random(seed)
        self._clock = clock
        self._events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._num_events = self._num_sequences = 0
        self._asked: set[str] = set()  # engines of which a snapshot is under way
        self._homes: dict[str, str] = {}  # of running programs
        self._active: dict[str, int] = {}  # calls of a program that are placed
        self._lines: dict[str, dict[int, ScheduledSequence]] = {}  # by program: parked, on its home
        self._where: dict[int, tuple[SimulatedEngine, ScheduledSequence, _Job]] = {}  # by call
        self._unplaced: list[tuple[TimedCall, np.ndarray]] = []  # no engine is alive
        self._num_left = {program.name: len(program.calls) for program in trace.programs}
        has_events = rule.index is not None
        self.engines = [
            SimulatedEngine(f"engine {i}", shape, clock, has_events=has_events) for i in range(shape.num_engines)
        ]
        self._by_name = {engine.name: engine for engine in self.engines}
        self._starting: dict[str, float] = {}  # engines, and when they are ready
        self._wanted: list[tuple[float, int]] = []
        self._paid_s = 0.0
        self._shifts: list[tuple[float, Shift]] = []
        if isinstance(rule, FleetRule) and rule.max_rebalanced:
            self._at(REBALANCE_S, self._rebalance, rule)
        for engine in self.engines if scaling is None else self.engines[:1]:
            rule.join(engine.name, clock.rates(), shape.max_running)
        if scaling is not None:
            for engine in self.engines[1:]:
                engine.is_alive = False
            self._at(scaling.look_s, self._look, scaling)
        for fault in faults:
            self._at(fault.at_s, self._begin_fault, fault)
        for program in trace.programs:
            for call in program.calls:
                call.before, call.num_open, call.end_s, call.first_s, call.computed = [], len(call.after), -1.0, -1.0, 0
            for call in program.calls:
                for earlier in call.after:
                    earlier.before.append(call)
                if not call.after:
                    self._at(program.start_s, self._arrive, call)

    def run(self) -> FleetRun:
        num_events = 0
        events = self._events
        while events:
            self.now_s, _, act, args = heapq.heappop(events)
            act(*args)
            num_events += 1
        assert not self._unplaced, "calls are left, but no engine is alive"
        return FleetRun(
            self.arrived,
            self.now_s,
            [engine.busy_s for engine in self.engines],
            sum(engine.num_steps for engine in self.engines),
            num_events,
            self.num_replayed,
            dict(self.rule.reasons) if isinstance(self.rule, FleetRule) else {},
            self._shifts,
            self._wanted,
            self._paid_s,
        )

    # -- calls --------------------------------------------------------------------------------------------------------

    def _at(self, when_s: float, act: Callable[..., None], *args: object) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (when_s, self._num_events, act, args))

    def _arrive(self, call: TimedCall) -> None:
        call.arrival_s = self.now_s
        self.arrived.append(call)
        if self.scaling is not None:
            self.scaling.arrived(call, self.now_s)
        self._place(call, tokens_of(call.prompt))

    def _place(self, call: TimedCall, tokens: np.ndarray) -> None:
        """Hand a call to an engine; ``tokens`` are its prompt, and what it has generated already."""
        program = call.program.name
        keeps = self.rule.keeps_programs
        home = self._homes.get(program, "") if keeps else ""
        line = self._lines.get(program, {}).get(call.line)
        if not any(engine.is_alive for engine in self.engines):
            self._unplaced.append((call, tokens))
            return
        ask = Ask(
            call,
            tokens,
            home=home,
            history_tokens=0 if line is None else len(line.tokens),
            may_move=not self._active.get(program, 0),
        )
        engine = self._by_name[self.rule.place(ask, self.now_s)]
        if keeps:
            if home and home != engine.name:
                self._leave_home(program)
                line = None
            self._homes[program] = engine.name
            self._active[program] = self._active.get(program, 0) + 1
        job = _Job(call)
        if isinstance(self.rule, FleetRule) and self.rule.hands_off(call):
            job.end = min(job.end, len(tokens) + 1)
        self._begin(engine, job, tokens, line)

    def _begin(
        self, engine: SimulatedEngine, job: _Job, tokens: np.ndarray, line: ScheduledSequence | None = None
    ) -> None:
        """Submit a call that is placed; ``line``: the parked sequence that it continues."""
        call = job.call
        program, keeps = call.program.name, self.rule.keeps_programs
        if line is None:
            self._num_sequences += 1
            seq = ScheduledSequence(
                self._num_sequences,
                TokenBuffer(tokens),
                program=program if keeps else "",
                kind=call.program.kind,
                tenant=call.program.tenant,
            )
            engine.live[seq.seq_id] = seq
        else:
            seq = line
            del self._lines[program][call.line]
            seq.tokens.extend(tokens[len(seq.tokens) :])
        self._where[id(call)] = (engine, seq, job)
        engine.inbox.append((seq, job))
        if not engine.is_alive:
            return  # nobody has noticed yet
        engine.now_s = self.now_s
        if not engine.is_busy:
            self._step(engine)
        else:
            end_s = engine.cut()
            if end_s is not None:
                self._end_at(engine, end_s)

    def _leave_home(self, program: str) -> None:
        """Drop what the program's home keeps for it: its next calls go elsewhere."""
        old = self._by_name[self._homes[program]]
        for seq in self._lines.pop(program, {}).values():
            del old.live[seq.seq_id]
            old.scheduler.remove(seq)
        old.scheduler.end_program(program)

    def _ended(self, engine: SimulatedEngine, seq: ScheduledSequence) -> None:
        call = _job(seq).call
        program = call.program
        if _job(seq).end < call.prompt_len + call.num_new:
            self._hand_over(engine, seq)
            return
        call.end_s = self.now_s
        call.computed += seq.num_run - (len(seq.tokens) - seq.prompt_len)
        del self._where[id(call)]
        self._num_left[program.name] -= 1
        goes_on = any(later.program is program and later.line == call.line for later in call.before)
        if self.rule.keeps_programs:
            self._active[program.name] -= 1
        if self.rule.keeps_programs and goes_on:
            engine.scheduler.park(seq)
            self._lines.setdefault(program.name, {})[call.line] = seq
        else:
            engine.scheduler.remove(seq)
            del engine.live[seq.seq_id]
        if self._num_left[program.name] == 0 and self.rule.keeps_programs:
            engine.scheduler.end_program(program.name)
            self._homes.pop(program.name, None)
            self._lines.pop(program.name, None)
            self._active.pop(program.name, None)
        self.rule.ended(call, engine.name, self.now_s, is_done=True)
        if self.scaling is not None:
            self.scaling.ended(call, self.now_s)
        for later in call.before:
            later.num_open -= 1
            if later.num_open == 0:
                self._at(self.now_s + later.delay_s, self._arrive, later)

    def _hand_over(self, engine: SimulatedEngine, seq: ScheduledSequence, *, to: str = "") -> None:
        """A call goes on elsewhere as soon as its KV is there: a prefill engine has computed its prompt, or the loads
        are to be evened out.
        """
        rule, call = self.rule, _job(seq).call
        assert isinstance(rule, FleetRule)
        tokens, num_held = seq.tokens.ids.copy(), seq.num_computed
        call.computed += max(seq.num_run - (len(seq.tokens) - seq.prompt_len), 0)
        del self._where[id(call)], engine.live[seq.seq_id]
        engine.scheduler.remove(seq)
        engine.scheduler.end_program(call.program.name)
        rule.ended(call, engine.name, self.now_s, is_done=False)
        made = len(tokens) - call.prompt_len
        target = self._homes[call.program.name] = rule.take_over(call, self.now_s, made=made, to=to)
        copied_s = self.now_s + rule.copy_s_per_token * num_held
        self._at(copied_s, self._take_over, self._by_name[target], call, tokens, num_held)

    def _take_over(self, engine: SimulatedEngine, call: TimedCall, tokens: np.ndarray, num_held: int) -> None:
        """``num_held``: tokens whose KV the other engine had."""
        rule = self.rule
        assert isinstance(rule, FleetRule)
        if not engine.is_alive:
            rule.ended(call, engine.name, self.now_s, is_done=False)
            self._place(call, tokens)
            return
        engine.now_s = self.now_s
        copied = tokens[: min(len(tokens) - 1, num_held) // BLOCK_LEN * BLOCK_LEN]
        held = engine.cache.peek(copied) // BLOCK_LEN * BLOCK_LEN
        if len(copied) > held and engine.cache.insert(copied, start=held, namespace="", load=lambda slots: None):
            engine.stall_s += rule.copy_s_per_token * (len(copied) - held)
        self._begin(engine, _Job(call), tokens)

    # -- engines ------------------------------------------------------------------------------------------------------

    def _step(self, engine: SimulatedEngine) -> None:
        end_s = engine.start()
        if end_s is not None:
            self._end_at(engine, end_s)

    def _end_at(self, engine: SimulatedEngine, end_s: float) -> None:
        engine.version += 1
        self._at(end_s, self._end, engine, engine.version)

    def _end(self, engine: SimulatedEngine, version: int) -> None:
        if version != engine.version:
            return
        engine.now_s = self.now_s
        for seq in engine.finish():
            self._ended(engine, seq)
        self._let_go(engine)
        self._publish(engine)
        if not engine.is_busy:
            self._step(engine)

    def _publish(self, engine: SimulatedEngine) -> None:
        index = self.rule.index
        if index is None or engine.feed is None:
            return
        events = engine.feed.take()
        if events is None or (engine.loss and self._rng.random() < engine.loss):
            return
        if index.apply(engine.name, events) != "ok" and engine.name not in self._asked:
            self._asked.add(engine.name)
            self._at(self.now_s + self.shape.snapshot_s, self._snapshot, engine, engine.feed)

    def _snapshot(self, engine: SimulatedEngine, feed: CacheFeed) -> None:
        self._asked.discard(engine.name)
        if engine.feed is feed and self.rule.index is not None:
            self.rule.index.restore(engine.name, feed.snapshot(engine.cache))

    # -- even loads ---------------------------------------------------------------------------------------------------

    def _rebalance(self, rule: FleetRule) -> None:
        """Calls that are to move leave their engines at the end of the step under way."""
        works = [self._work_of(rule, engine, seq, job) for engine, seq, job in self._where.values() if engine.is_alive]
        rooms = {}
        for engine in self.engines:
            cache, scheduler = engine.cache, engine.scheduler
            is_full = scheduler.num_waiting and scheduler.running
            max_rows = len(scheduler.running) if is_full else self.shape.max_running
            rooms[engine.name] = Room(max_rows, cache.num_slots - cache.num_leased - cache.num_locked)
        calls = {job.call.program.name: job.call for _, _, job in self._where.values()}
        for shift in rule.rebalance(works, rooms, self.now_s):
            self._shifts.append((self.now_s, shift))
            engine = self._by_name[shift.source]
            engine.leaving[id(calls[shift.program])] = shift.target
            engine.now_s = self.now_s
            if (end_s := engine.cut()) is not None:
                self._end_at(engine, end_s)
        if any(self._num_left.values()):
            self._at(self.now_s + REBALANCE_S, self._rebalance, rule)

    def _work_of(self, rule: FleetRule, engine: SimulatedEngine, seq: ScheduledSequence, job: _Job) -> Work:
        call = job.call
        is_submitted = seq.tag is job
        made = len(seq.tokens) - call.prompt_len if is_submitted else 0
        return Work(
            call.program.name,
            engine.name,
            1.0,
            rule.left(call, made),
            len(seq.tokens),
            call.arrival_s,
            is_running=is_submitted and seq.state == "running",
            may_move=is_submitted and self._active[call.program.name] == 1,
        )

    def _let_go(self, engine: SimulatedEngine) -> None:
        """Calls that are to go on elsewhere leave, unless they have ended."""
        leaving, engine.leaving = engine.leaving, {}
        for call, target in leaving.items():
            where, seq, _ = self._where.get(call, (None, None, None))
            if where is engine and seq is not None and self._by_name[target].is_alive:
                self._leave_home(_job(seq).call.program.name)
                self._hand_over(engine, seq, to=target)

    # -- faults -------------------------------------------------------------------------------------------------------

    def _begin_fault(self, fault: EngineFault) -> None:
        engine = self.engines[fault.engine]
        match fault.kind:
            case "slow":
                self._set_slowness(engine, fault.slowness)
            case "loses_events":
                engine.loss = fault.loss
            case "dies" if engine.is_alive:
                self._stop(engine)
                self._at(self.now_s + self.shape.notice_s, self._lose, engine)
        self._at(self.now_s + max(fault.for_s, 2 * self.shape.notice_s), self._end_fault, fault)

    def _end_fault(self, fault: EngineFault) -> None:
        engine = self.engines[fault.engine]
        match fault.kind:
            case "slow":
                self._set_slowness(engine, 1.0)
            case "loses_events":
                engine.loss = 0.0
            case "dies" if not engine.is_alive:
                self._join(engine)

    def _join(self, engine: SimulatedEngine) -> None:
        """The engine runs, with an empty cache, and takes the calls that wait for one."""
        engine.begin()
        engine.is_alive = True
        self.rule.join(engine.name, self._clock.rates(), self.shape.max_running)
        waiting, self._unplaced = self._unplaced, []
        for call, tokens in waiting:
            self._place(call, tokens)

    def _stop(self, engine: SimulatedEngine) -> None:
        engine.is_alive = False
        engine.version += 1
        engine.plan, engine.ahead = None, 0

    def _set_slowness(self, engine: SimulatedEngine, slowness: float) -> None:
        """From the next step on; a run of steps is cut first."""
        engine.now_s = self.now_s
        end_s = engine.cut()
        if end_s is not None:
            self._end_at(engine, end_s)
        engine.slowness = slowness

    def _lose(self, engine: SimulatedEngine) -> None:
        """The loss of an engine is noticed: its calls go elsewhere with the tokens that they had."""
        self.rule.leave(engine.name)
        self._asked.discard(engine.name)
        lost = [(job.call, seq, seq.tag is job) for where, seq, job in self._where.values() if where is engine]
        for program in [program for program, home in self._homes.items() if home == engine.name]:
            self._lines.pop(program, None)
            del self._homes[program]
            self._active[program] = 0
        engine.begin()
        for call, seq, was_submitted in lost:
            del self._where[id(call)]
            self.num_replayed += 1
            if was_submitted:
                call.computed += seq.num_run - min(len(seq.tokens) - seq.prompt_len, seq.num_run)
            self.rule.ended(call, engine.name, self.now_s, is_done=False)
            self._place(call, seq.tokens.ids.copy())

    # -- replicas -----------------------------------------------------------------------------------------------------

    def _look(self, scaling: ReplicaRule) -> None:
        running = {engine.name: 0 for engine in self.engines if engine.is_alive}
        waiting: dict[str, int] = {}
        for engine, _, job in self._where.values():
            if engine.name in running:
                running[engine.name] += 1
            if job.call.first_s < 0:
                waiting[job.call.program.kind] = waiting.get(job.call.program.kind, 0) + 1
        ready_in_s = [0.0] * len(running) + [at_s - self.now_s for at_s in self._starting.values()]
        self._paid_s += scaling.look_s * len(ready_in_s)
        wanted = scaling.wanted(self.now_s, waiting=waiting, ready_in_s=ready_in_s, running=running)
        self._wanted.append((self.now_s, wanted))
        replicas = {name: ReplicaWork("ready", count) for name, count in running.items()}
        replicas |= {name: ReplicaWork("starting") for name in self._starting}
        steps = steps_to(wanted, replicas)
        free = [engine for engine in self.engines if engine.name not in replicas]
        for engine in free[: steps.start]:
            self._starting[engine.name] = self.now_s + scaling.start_s
            self._at(self.now_s + scaling.start_s, self._started, engine, self.now_s + scaling.start_s)
        for name in steps.drain:
            if self._starting.pop(name, None) is None:
                self._stop(self._by_name[name])
                self._lose(self._by_name[name])
        if any(self._num_left.values()):
            self._at(self.now_s + scaling.look_s, self._look, scaling)

    def _started(self, engine: SimulatedEngine, ready_s: float) -> None:
        if self._starting.get(engine.name) == ready_s:  # it was not stopped meanwhile
            del self._starting[engine.name]
            self._join(engine)


def pooled_hit_rate(calls: Sequence[TimedCall], num_slots: int) -> float:
    """The share of prompt tokens that one cache of ``num_slots`` finds, serving the calls one after another."""
    cache = RadixCache(num_slots, policy=POLICIES["program_aware"])
    num_left: dict[str, int] = {}
    for call in calls:
        num_left[call.program.name] = num_left.get(call.program.name, 0) + 1
    found = asked = 0
    for call in calls:
        tokens, program = tokens_of(call.output), call.program.name
        lease = cache.acquire(tokens, limit=call.prompt_len - 1, program=program)
        found += lease.num_cached
        asked += call.prompt_len
        lease.extend(len(tokens) - lease.num_cached)
        lease.commit(tokens[:-1])
        lease.release()
        num_left[program] -= 1
        if not num_left[program]:
            cache.end_program(program)
    return found / asked
