"""Policies compared on generated traces: the real scheduler and radix cache, a modelled step time, and no model.

    python -m benchmarks.scheduler_sim [--quick] [--save] [--trace NAME] [--load X]
    python -m benchmarks.scheduler_sim --host-cost [--save]

A step takes BASE_S + TOKEN_S * tokens + CONTEXT_S * tokens of context read, about the time of an 8-billion-parameter
model on one large GPU. Hit rate: the share of prompt tokens that were not computed. Tokens that are computed again
after a preemption count as computed.

``optimum``: the same run with Belady's rule. The cache evicts the tokens that are needed furthest in the future, by the
times of the program-aware run. ``alone``: Belady's rule for one call at a time with the whole pool, an upper bound for
concurrent calls. ``infinite``: no eviction. The optimum knows the next question, which no real policy can predict for
random calls. ``known``: a policy that knows the mean frequency of each prefix, from other draws of the same trace; in
``http_chat`` one that knows by which law conversations pause and end; in ``chat`` and ``agents`` the best of the orders
``ORDERS_OF_PAUSES``, of which one suits the law by which their pauses are drawn.
"""

import argparse
import heapq
import math
import random
import statistics
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from phloem.cluster.traces import TimedCall, Trace, tokens_of
from phloem.radix_cache import POLICIES, Policy, RadixCache
from phloem.radix_cache.node import RadixNode
from phloem.runtime.scheduler import Scheduler, SchedulerConfig, Sequence, TokenBuffer
from phloem.runtime.scheduler.parked import Parked

from . import RESULTS, print_header, save
from .traces import LEAST_TURNS, MOST_TURNS, PAUSE_S, TRACES

BASE_S, TOKEN_S, CONTEXT_S = 8e-3, 20e-6, 25e-9
TTFT_TARGET_S, TOKEN_TARGET_S = 2.0, 0.05
OF_OPTIMUM, WAIT_BOUND_S = 0.96, 10.0
DRAWN_ALONE = ("few_shot", "rag")  # traces whose calls are drawn independently


@dataclass(frozen=True, slots=True)
class Setting:
    """One policy. ``is_program_aware``: sequences stay parked between calls, and the cache knows programs.

    ``bounds``: a key of ``BOUNDS``, the bound that each call states for its length.
    """

    name: str
    eviction: str
    order: str
    match_window: int
    is_program_aware: bool
    bounds: str = "twice"


BOUNDS: dict[str, Callable[[int], tuple[int, int]]] = {  # name -> the bound that a call of n tokens states
    "twice": lambda n: (0, 2 * n),
    "known": lambda n: (n, n),
    "unknown": lambda n: (0, 8192),
}

SETTINGS = (
    Setting("lru + first come", "lru", "first_come", 1, False),
    Setting("lru + longest match", "lru", "first_come", 64, False),
    Setting("program-aware", "program_aware", "oldest_program", 1, True),
    Setting("program-aware + match", "program_aware", "oldest_program", 64, True),
)


REFERENCE = SETTINGS[2]
CLAIRVOYANT = Setting("clairvoyant", "lru", "oldest_program", 1, False)


class Simulation:
    """Discrete events. A call arrives when the calls before it have ended; a step takes its modelled time."""

    def __init__(
        self,
        trace: Trace,
        setting: Setting,
        num_slots: int,
        *,
        max_running: int = 64,
        needs: "Needs | None" = None,
        policy: Policy | None = None,
    ) -> None:
        self.trace = trace
        self.setting = setting
        self.now_s = 0.0
        self.needs = needs
        if policy is None:
            policy = POLICIES[setting.eviction] if needs is None else needs.furthest
        self.cache = RadixCache(num_slots, policy=policy, clock=lambda: self.now_s)
        config = SchedulerConfig(
            max_running=max_running,
            max_step_tokens=2048,
            prefill_chunk=1024,
            order=setting.order,
            match_window=setting.match_window,
        )
        self.scheduler = Scheduler(config, self.cache, clock=lambda: self.now_s)
        self.arrived: list[TimedCall] = []
        self.num_steps = 0
        self.host_s: list[float] = []
        self._live: dict[int, Sequence] = {}
        self._lines: dict[tuple[str, int], Sequence] = {}
        self._events: list[tuple[float, int, TimedCall]] = []
        self._num_events = 0
        self._num_left: dict[str, int] = {}
        for program in trace.programs:
            self._num_left[program.name] = len(program.calls)
            for call in program.calls:
                call.before, call.num_open, call.end_s, call.first_s, call.computed = [], len(call.after), -1.0, 0.0, 0
            for call in program.calls:
                for earlier in call.after:
                    earlier.before.append(call)
                if not call.after:
                    self._push(program.start_s, call)

    def run(self) -> None:
        scheduler = self.scheduler
        while self._events or scheduler.has_work:
            while self._events and self._events[0][0] <= self.now_s:
                self._arrive(heapq.heappop(self._events)[2])
            start_s = time.perf_counter()
            plan = scheduler.plan()
            assert not scheduler.failed, scheduler.failed
            if plan is None:
                assert self._events, "sequences wait, but none runs and none will arrive"
                self.now_s = max(self.now_s, self._events[0][0])
                continue
            scheduler.complete(plan, self._live)
            self.host_s.append(time.perf_counter() - start_s)
            context = sum(row.end for row in plan.rows)
            self.now_s += BASE_S + TOKEN_S * plan.num_tokens + CONTEXT_S * context
            self.num_steps += 1
            for row in plan.rows:
                seq = self._live[row.seq_id]
                if row.end == len(seq.tokens):
                    self._token(seq)
        self.cache.check()
        assert self.cache.num_leased == 0 and self.cache.num_locked == 0

    def _push(self, at_s: float, call: TimedCall) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (at_s, self._num_events, call))

    def _arrive(self, call: TimedCall) -> None:
        program = call.program
        call.arrival_s = self.now_s
        self.arrived.append(call)
        key = (program.name, call.line)
        seq = self._lines.get(key)
        if seq is None:
            tag = program.name if self.setting.is_program_aware else ""
            seq = Sequence(
                self._num_events,
                TokenBuffer(tokens_of(call.prompt)),
                program=tag,
                kind=program.kind,
                tenant=program.tenant,
            )
            self._num_events += 1
            self._live[seq.seq_id] = seq
            if self.setting.is_program_aware:
                self._lines[key] = seq
        else:
            seq.tokens.extend(tokens_of(call.prompt)[len(seq.tokens) :])
        seq.tag = call
        seq.logits_from = len(seq.tokens) - 1
        least, most = BOUNDS[self.setting.bounds](call.num_new)
        self.scheduler.submit(seq, max_new=most, min_new=least)

    def _token(self, seq: Sequence) -> None:
        call = seq.tag
        assert isinstance(call, TimedCall)
        made = len(seq.tokens) - seq.prompt_len
        if made == 0:
            call.first_s = self.now_s
            if self.needs is not None:
                self.needs.serve(call)
        seq.tokens.append(call.output[-1].first + made)
        seq.logits_from = len(seq.tokens) - 1
        if made + 1 < call.num_new:
            return
        call.end_s = self.now_s
        call.computed = seq.num_run - made  # prompt tokens, including those computed again after preemptions
        scheduler, program = self.scheduler, call.program
        self._num_left[program.name] -= 1
        goes_on = any(later.program is program and later.line == call.line for later in call.before)
        if self.setting.is_program_aware and goes_on:
            scheduler.park(seq)
        else:
            scheduler.remove(seq)
            del self._live[seq.seq_id]
            self._lines.pop((program.name, call.line), None)
        for later in call.before:
            later.num_open -= 1
            if later.num_open == 0:
                self._push(self.now_s + later.delay_s, later)
        if self._num_left[program.name] == 0 and self.setting.is_program_aware:
            scheduler.end_program(program.name)


class Needs:
    """When each span will be needed. ``at``: for each call the time at which a run served it, or its place in an order.

    Another run serves calls at other times. So a use is past when ``serve`` says so, not when its time has come.
    """

    def __init__(self, trace: Trace, calls: list[TimedCall], at: list[float]) -> None:
        self._firsts = [span.first for span in trace.paths.spans]
        self._uses: list[list[float]] = [[] for _ in trace.paths.spans]
        self._num_served = [0] * len(trace.paths.spans)
        for when, call in sorted(zip(at, calls, strict=True), key=lambda pair: pair[0]):
            for span in call.prompt:
                self._uses[span.index].append(when)

    def serve(self, call: TimedCall) -> None:
        for span in call.prompt:
            self._num_served[span.index] += 1

    def furthest(self, leaf: RadixNode, age: float) -> tuple[float, ...]:
        """Belady's rule as an eviction policy: evict the leaf that is needed furthest in the future."""
        index = bisect_right(self._firsts, leaf.tokens.item(-1)) - 1
        uses, num_served = self._uses[index], self._num_served[index]
        return (-uses[num_served] if num_served < len(uses) else float("-inf"), leaf.last_use)


def by_law(trace: Trace, others: list[Trace]) -> Policy:
    """An eviction policy: evict the leaf that ``others``, draws of the same trace, need least often."""
    firsts = [span.first for span in trace.paths.spans]
    uses: Counter[tuple[str, ...]] = Counter()
    for other in others:
        names = other.paths.names()
        uses.update(names[span.index] for program in other.programs for call in program.calls for span in call.prompt)
    num_uses = [uses[name] for name in trace.paths.names()]

    def least_needed(leaf: RadixNode, age: float) -> tuple[float, ...]:
        return (num_uses[bisect_right(firsts, leaf.tokens.item(-1)) - 1], leaf.last_use)

    return least_needed


class KnownTurns:
    """An eviction policy for ``traces.http_chat`` that knows by which law its conversations pause and end.

    The odds that one goes on after a pause (``radix_cache.returns``), from the true law instead of counts.
    """

    def __init__(self, trace: Trace) -> None:
        self._firsts = [span.first for span in trace.paths.spans]
        self._turns = {}
        for program in trace.programs:
            turn = 1 + int(program.name.rpartition(" ")[2])
            for call in program.calls:
                self._turns |= {span.index: turn for span in (call.prompt[-1], call.output[-1])}
        self._of_use: dict[int, tuple[float, int | None]] = {}  # by the tree's time: seconds, and the turn of that use
        self.now_s: Callable[[], float] = lambda: 0.0

    def __call__(self, leaf: RadixNode, age: float) -> tuple[float, ...]:
        # The leaf of a conversation is offered before the rest of its path, whose spans are of earlier turns.
        turn = self._turns.get(bisect_right(self._firsts, leaf.tokens.item(-1)) - 1)
        used_s, turn = self._of_use.setdefault(leaf.last_use, (self.now_s(), turn))
        if turn is None:
            return (math.inf,)  # a system prompt
        if turn == MOST_TURNS:
            return (-math.inf, used_s)
        share = 1.0 - 1e-9 if turn < LEAST_TURNS else 1 - 1 / (MOST_TURNS + 1 - turn)
        return (used_s + PAUSE_S * math.log(share / (1 - share)),)


class OrderedPauses(Parked):
    """Parked sequences of one law of pauses: the one parked longest gives up its slots first, or the one parked last.

    The first suits pauses whose end becomes less likely with time, the second those that become more likely to end,
    as evenly drawn ones. Where pauses are memoryless each order is as good as the other.
    """

    def __init__(self, choose: Callable[..., Sequence]) -> None:
        super().__init__()
        self._choose = choose

    def first_to_go(self, now_s: float) -> Sequence | None:
        all_ = [seq for here in self.with_slots.values() for seq in here.values()]
        return self._choose(all_, key=lambda seq: (seq.parked_s, seq.seq_id)) if all_ else None


ORDERS_OF_PAUSES: tuple[Callable[..., Sequence], ...] = (min, max)


def belady_hit_rate(trace: Trace, calls: list[TimedCall], num_slots: int) -> float:
    """The hit rate of Belady's rule when calls run one at a time, in the given order, each with the whole pool."""
    needs = Needs(trace, calls, [float(i) for i in range(len(calls))])
    cache = RadixCache(num_slots, policy=needs.furthest)
    found = asked = 0
    for call in calls:
        needs.serve(call)
        tokens = tokens_of(call.output)
        lease = cache.acquire(tokens, limit=call.prompt_len - 1)
        found += lease.num_cached
        asked += call.prompt_len
        lease.extend(len(tokens) - lease.num_cached)
        lease.commit(tokens[:-1])
        lease.release()
    return found / asked


def hit_rate(calls: list[TimedCall]) -> float:
    return 1 - sum(call.computed for call in calls) / sum(call.prompt_len for call in calls)


def figures(simulation: Simulation) -> dict[str, Any]:
    trace, calls = simulation.trace, simulation.arrived
    ttft = sorted(call.first_s - call.arrival_s for call in calls)
    per_token = [(c.end_s - c.first_s) / (c.num_new - 1) for c in calls if c.num_new > 1]
    good = sum(
        call.first_s - call.arrival_s <= TTFT_TARGET_S
        and (call.end_s - call.first_s) <= TOKEN_TARGET_S * max(call.num_new - 1, 1)
        for call in calls
    )
    spans = [max(c.end_s for c in p.calls) - min(c.arrival_s for c in p.calls) for p in trace.programs]
    tenants: dict[str, list[float]] = {}
    for call in calls:
        tenants.setdefault(call.program.tenant, []).append(call.first_s - call.arrival_s)
    means = [statistics.mean(values) for values in tenants.values()]
    return {
        "hit_rate": hit_rate(calls),
        "ttft_p50_s": ttft[len(ttft) // 2],
        "ttft_p99_s": ttft[int(0.99 * len(ttft))],
        "ttft_max_s": ttft[-1],
        "per_token_ms": 1e3 * statistics.mean(per_token),
        "goodput": good / len(calls),
        "program_mean_s": statistics.mean(spans),
        "makespan_s": simulation.now_s,
        # Jain's index over the tenants' mean times to the first token: 1 is equal
        "fairness": sum(means) ** 2 / (len(means) * sum(m * m for m in means)) if any(means) else 1.0,
        "preemptions": simulation.scheduler.num_preemptions,
        "steps": simulation.num_steps,
        "host_ms": 1e3 * statistics.median(simulation.host_s),
    }


def compare(
    name: str, num_slots: int, *, scale: float, load: float, settings: tuple[Setting, ...] = SETTINGS
) -> dict[str, Any]:
    make, n, rate, _ = TRACES[name]
    num_slots = max(5_000, int(num_slots * scale))
    trace = make(max(20, int(n * scale)), rate * load * scale, random.Random(1))
    num_calls = sum(len(program.calls) for program in trace.programs)
    print(
        f"\n{name}: {len(trace.programs):,} programs, {num_calls:,} calls, {trace.num_distinct:,} distinct tokens, "
        f"{num_slots:,} slots"
    )
    made = {}
    bounds: dict[str, float] = {}
    for setting in settings:
        simulation = Simulation(trace, setting, num_slots)
        simulation.run()
        made[setting.name] = figures(simulation)
        if setting is REFERENCE:
            calls = simulation.arrived
            bounds = {
                "alone": belady_hit_rate(trace, calls, num_slots),
                "infinite": belady_hit_rate(trace, calls, trace.num_distinct + 1),
            }
            needs = Needs(trace, calls, [call.first_s for call in calls])
    clairvoyant = Simulation(trace, CLAIRVOYANT, num_slots, needs=needs)
    clairvoyant.run()
    bounds["optimum"] = hit_rate(clairvoyant.arrived)
    if name in DRAWN_ALONE:
        others = [make(len(trace.programs), rate * load * scale, random.Random(seed)) for seed in range(2, 22)]
        informed = Simulation(trace, REFERENCE, num_slots, policy=by_law(trace, others))
        informed.run()
        bounds["known"] = hit_rate(informed.arrived)
    if name in ("chat", "agents"):
        rates = []
        for choose in ORDERS_OF_PAUSES:
            informed = Simulation(trace, REFERENCE, num_slots)
            informed.scheduler.parked = OrderedPauses(choose)
            informed.run()
            rates.append(hit_rate(informed.arrived))
        bounds["known"] = max(rates)
    if name == "http_chat":
        known = KnownTurns(trace)
        informed = Simulation(trace, REFERENCE, num_slots, policy=known)
        known.now_s = lambda: informed.now_s
        informed.run()
        bounds["known"] = hit_rate(informed.arrived)
    print("  " + "   ".join(f"{bound} {rate:.1%}" for bound, rate in bounds.items()))
    print(
        f"  {'':24}{'hit':>7}{'of opt.':>9}{'TTFT p50':>10}{'p99':>8}{'max':>8}"
        f"{'ms/tok':>8}{'good':>7}{'program':>9}{'fair':>6}{'preempt':>8}"
    )
    for name, f in made.items():
        f["of_optimum"] = f["hit_rate"] / bounds["optimum"]
        print(
            f"  {name:24}{f['hit_rate']:7.1%}{f['of_optimum']:9.1%}"
            f"{f['ttft_p50_s']:9.2f}s{f['ttft_p99_s']:7.1f}s{f['ttft_max_s']:7.1f}s{f['per_token_ms']:8.1f}"
            f"{f['goodput']:7.1%}{f['program_mean_s']:8.1f}s{f['fairness']:6.2f}{f['preemptions']:8}",
            flush=True,
        )
    return {
        "programs": len(trace.programs),
        "calls": num_calls,
        "num_slots": num_slots,
        **bounds,
        "settings": made,
    }


def check_bars(made: dict[str, Any]) -> list[str]:
    """The bars missed: 96% of the optimum, better than LRU + first come, and no wait longer than the bound."""
    faults = []
    for trace, pools in made.items():
        for pool, result in pools.items():
            ours, plain = result["settings"][REFERENCE.name], result["settings"][SETTINGS[0].name]
            where = f"{trace}, {pool}"
            if ours["of_optimum"] < OF_OPTIMUM:
                faults.append(f"{where}: {ours['of_optimum']:.1%} of the optimum")
            if ours["hit_rate"] <= plain["hit_rate"]:
                faults.append(f"{where}: no better than {SETTINGS[0].name}")
            if ours["ttft_max_s"] > WAIT_BOUND_S:
                faults.append(f"{where}: the longest wait is {ours['ttft_max_s']:.1f} s")
    return faults


# -- host cost --------------------------------------------------------------------------------------------------------


def host_cost(*, repeats: int = 5, **case: Any) -> dict[str, Any]:
    """Times of each step: the best of several equal runs, because other programs on the machine slow some steps."""
    runs = [step_times(**case) for _ in range(repeats)]
    times_s = sorted(map(min, zip(*(times_s for times_s, _, _ in runs), strict=True)))
    return {
        "rows": runs[0][1],
        "waiting": runs[0][2],
        "median_ms": 1e3 * statistics.median(times_s),
        "best_ms": 1e3 * times_s[0],
        "p95_ms": 1e3 * times_s[int(0.95 * len(times_s))],
    }


def step_times(
    *, num_slots: int, max_running: int, ends: float, order: str = "oldest_program", num_steps: int = 400
) -> tuple[list[float], float, int]:
    """CPU seconds of ``plan`` and ``complete`` with 256 running and 1,000 waiting sequences.

    In each step the share ``ends`` of the running sequences ends. Also returns the median number of running sequences,
    and the number that wait at the end.
    """
    cache = RadixCache(num_slots)
    config = SchedulerConfig(max_running=max_running, max_step_tokens=8192, prefill_chunk=2048, order=order)
    scheduler, rng = Scheduler(config, cache), np.random.default_rng(0)
    stems = rng.integers(0, 50_000, (16, 200), dtype=np.int32)
    live: dict[int, Sequence] = {}
    count = 0

    def add() -> None:
        nonlocal count
        count += 1
        tokens = np.concatenate((stems[count % 16], rng.integers(0, 50_000, 300, dtype=np.int32)))
        seq = live[count] = Sequence(count, TokenBuffer(tokens), program=f"program {count}")
        seq.logits_from = len(tokens) - 1
        scheduler.submit(seq, max_new=400)

    for _ in range(1256):
        add()
    times_s, rows = [], []
    for step in range(num_steps):
        start_s = time.process_time()
        plan = scheduler.plan()
        assert plan is not None
        scheduler.complete(plan, live)
        took_s = time.process_time() - start_s
        if step >= num_steps // 4:
            times_s.append(took_s)
            rows.append(len(plan.rows))
        for row in plan.rows:
            seq = live[row.seq_id]
            if row.end < len(seq.tokens):
                continue
            if ends and rng.random() < ends:
                scheduler.remove(seq)
                scheduler.end_program(seq.program)
                del live[seq.seq_id]
                add()
            else:
                seq.tokens.append(7)
                seq.logits_from = len(seq.tokens) - 1
    return times_s, statistics.median(rows), scheduler.num_waiting


def show_host_cost() -> dict[str, Any]:
    cases = {
        "all rows taken": host_cost(num_slots=1_000_000, max_running=256, ends=0.0),
        "0.5% of rows end and are replaced": host_cost(num_slots=1_000_000, max_running=256, ends=0.005),
        "rows taken, shortest remaining": host_cost(
            num_slots=1_000_000, max_running=256, ends=0.005, order="shortest_remaining"
        ),
        "rows free, slots short": host_cost(num_slots=150_000, max_running=512, ends=0.005),
    }
    for name, f in cases.items():
        print(
            f"  {name:36}{f['rows']:5.0f} running {f['waiting']:6,} waiting   median {f['median_ms']:.2f} ms   "
            f"best {f['best_ms']:.2f}   p95 {f['p95_ms']:.2f}"
        )
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="run a tenth of each trace, with a tenth of rate and pool")
    parser.add_argument("--save", action="store_true", help="write the figures to benchmarks/results")
    parser.add_argument("--trace", choices=sorted(TRACES), action="append", help="run this trace; may be repeated")
    parser.add_argument("--load", type=float, default=1.0, help="factor for the arrival rates")
    parser.add_argument("--host-cost", action="store_true", help="time the scheduler itself instead")
    options = parser.parse_args()
    about = print_header()
    if options.host_cost:
        name, made = "scheduler_host_cost", show_host_cost()
    else:
        scale = 0.1 if options.quick else 1.0
        name = "scheduler_sim"
        made = {}
        for trace in options.trace or TRACES:
            roomy, tight = TRACES[trace][3]
            made[trace] = {
                "roomy": compare(trace, roomy, scale=scale, load=options.load),
                "tight": compare(trace, tight, scale=scale, load=options.load),
            }
        print("\nbars missed:", *(check_bars(made) or ["none"]), sep="\n  ")
    if options.save:
        save(RESULTS / f"{name}.json", {**about, "figures": made})


if __name__ == "__main__":
    main()
