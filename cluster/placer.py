"""What a fleet's client knows of its engines when it places a program: their caches, loads, rates, and usual outputs.

With fewer than two engines it does nothing: no tokenizing, no index, no bookings.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..protocol.cache_events import CacheEvents, CacheSnapshot
from ..protocol.journal import CHARS_PER_TOKEN
from ..protocol.messages import ProgramSettings
from ..protocol.ops import AnyOp, Fork, Gen
from ..radix_cache.blocks import block_names
from .index import Applied, CacheIndex, Match
from .loads import Booking, OutputLengths, RatesFit
from .placement import Choice, Demand, Placement
from .rebalance import Rebalancing, Room, Shift, Work
from .roles import CopyRate, Role

MAX_ROWS = 16  # of an engine that has not told yet


@dataclass(frozen=True, slots=True)
class Placed:
    """The engine for a program, why, and the work that was booked there (None: nothing was)."""

    engine: str
    reason: str
    booking: Booking | None


class Placer:
    """Methods may be called on any thread. ``tokenize(ops)``: the token ids of a program's first prompt."""

    def __init__(self, tokenize: Callable[[Sequence[AnyOp]], Sequence[int]]) -> None:
        self._tokenize = tokenize
        self._lock = threading.Lock()
        self._placement = Placement()
        self._index = CacheIndex()
        self._engines: set[str] = set()
        self._roles: dict[str, Role] = {}
        self._copy = CopyRate()
        self._fit = RatesFit()
        self._lengths = OutputLengths()
        self._rebalancing = Rebalancing()
        self._rooms: dict[str, Room] = {}

    @property
    def is_needed(self) -> bool:
        """Whether there are several engines to choose from."""
        return len(self._engines) > 1

    # -- what it learns -----------------------------------------------------------------------------------------------

    def add(self, engine: str, role: Role = "both") -> None:
        with self._lock:
            self._engines.add(engine)
            self._roles[engine] = role
            self._placement.loads.add(engine, rates=self._fit.rates, max_rows=MAX_ROWS)

    def remove(self, engine: str) -> None:
        """The engine takes no more programs."""
        with self._lock:
            self._engines.discard(engine)
            self._roles.pop(engine, None)
            self._rooms.pop(engine, None)
            self._fit.forget(engine)
            self._placement.loads.remove(engine)
            self._index.remove(engine)

    def set_max_rows(self, engine: str, max_rows: int) -> None:
        with self._lock:
            loads = self._placement.loads
            if engine in loads:
                loads.max_rows[loads.position[engine]] = max(max_rows, 1)

    def note_metrics(self, engine: str, metrics: dict[str, Any]) -> None:
        """An engine's answer to the query ``metrics``."""
        with self._lock:
            if engine in self._engines:
                rates, loads = self._fit.note(engine, metrics), self._placement.loads
                for name in loads.names:
                    loads.set_rates(name, rates)
                self._rooms[engine] = _room(metrics, float(loads.max_rows[loads.position[engine]]))

    def note_output(self, name: str, num_tokens: int) -> None:
        """A generation of a program called ``name`` has ended."""
        with self._lock:
            self._lengths.note(name, num_tokens)

    def note_copy(self, num_tokens: int, seconds: float, now_s: float) -> None:
        """The KV of so many tokens was copied from one engine to another."""
        with self._lock:
            self._copy.note(num_tokens, seconds, now_s)

    @property
    def num_known_blocks(self) -> int:
        with self._lock:
            return len(self._index)

    def apply(self, engine: str, events: CacheEvents) -> Applied:
        """As ``CacheIndex.apply``; of an engine that is gone nothing is kept."""
        with self._lock:
            return self._index.apply(engine, events) if engine in self._engines else "ok"

    def restore(self, engine: str, snapshot: CacheSnapshot) -> Applied:
        with self._lock:
            return self._index.restore(engine, snapshot) if engine in self._engines else "ok"

    # -- what it is asked ---------------------------------------------------------------------------------------------

    def place(
        self, ops: Sequence[AnyOp], settings: ProgramSettings | None, engines: Collection[str], now_s: float
    ) -> Placed:
        """The engine of ``engines`` for a program that begins with ``ops``; where that pays, one that computes its
        prompt alone.
        """
        settings = settings or ProgramSettings()
        ids = self._tokenize(ops)
        with self._lock:
            names = block_names(ids, namespace=_namespace(settings), block_len=self._index.block_len or 1)
            matches = self._index.match(names) if self._index.block_len else {}
            demand = Demand(len(ids), self._output_tokens(ops, settings.name), branches=_num_branches(ops))
            return self._placed(
                engines,
                lambda: self._placement.place_new(
                    demand,
                    matches,
                    now_s,
                    roles=self._roles,
                    copy_s_per_token=self._copy.s_per_token(self._fit.rates.prefill_s_per_token, now_s),
                    among=self._here(engines),
                ),
            )

    def replace(
        self, ops: Sequence[AnyOp], name: str, history_tokens: int, home: str, engines: Collection[str], now_s: float
    ) -> Placed:
        """The engine for a program that goes on with ``ops``: after ``history_tokens``, which ``home`` has cached.

        ``home`` is "" where its engine is gone.
        """
        new = sum(len(getattr(op, "text", "")) for op in ops) / CHARS_PER_TOKEN
        with self._lock:
            demand = Demand(
                history_tokens + int(new),
                self._output_tokens(ops, name),
                branches=_num_branches(ops),
                home=home,
                history_tokens=history_tokens if home else 0,
            )
            return self._decide(demand, {}, engines, now_s)

    def take_over(
        self, ops: Sequence[AnyOp], name: str, engines: Collection[str], now_s: float, *, made: int = 0
    ) -> Placed:
        """The engine for a program that goes on with ``ops`` where its KV is copied to; it has ``made`` tokens."""
        with self._lock:
            demand = Demand(1, self._output_tokens(ops, name, made=made), branches=_num_branches(ops))
            return self._decide(demand, {}, engines, now_s)

    def is_uneven(self) -> bool:
        """Whether engines differ in rows by so much that a program might move."""
        with self._lock:
            rows = self._placement.loads.rows
            return len(rows) > 1 and float(rows.max() - rows.min()) > 1.0

    def left(self, ops: Sequence[AnyOp], name: str, *, made: int) -> float:
        """Tokens that a program is expected to make yet for its open ``ops``, one after another, after ``made``."""
        with self._lock:
            return self._output_tokens(ops, name, made=made)

    def rebalance(self, works: Collection[Work], *, most: int, now_s: float) -> list[Shift]:
        """At most ``most`` programs that are to move to even out the loads; see ``rebalance``."""
        with self._lock:
            loads = self._placement.loads
            return self._rebalancing.plan(
                [work for work in works if work.engine in loads],
                loads,
                among=[name for name in loads.names if self._roles[name] != "prefill"],
                rooms=self._rooms,
                copy_s_per_token=self._copy.s_per_token(self._fit.rates.prefill_s_per_token, now_s),
                most=most,
                now_s=now_s,
            )

    def finish(self, booking: Booking, now_s: float, *, made: int = 0) -> None:
        """The work that was booked has ended with ``made`` tokens of output, or (0) has left its engine."""
        with self._lock:
            self._placement.loads.finish(booking, now_s, made=int(made / booking.rows))

    # -- inside -------------------------------------------------------------------------------------------------------

    def _decide(self, demand: Demand, matches: Mapping[str, Match], engines: Collection[str], now_s: float) -> Placed:
        """Of ``engines``, without those that only compute prompts where there are others; or the program's home."""
        here = self._here(engines)
        among = [engine for engine in here if self._roles[engine] != "prefill" or engine == demand.home] or here
        return self._placed(engines, lambda: self._placement.place(demand, matches, now_s, among=among))

    def _here(self, engines: Collection[str]) -> list[str]:
        return [engine for engine in self._placement.loads.names if engine in engines]

    def _placed(self, engines: Collection[str], place: Callable[[], tuple[Choice, Booking]]) -> Placed:
        if not self._here(engines):  # none takes programs any more
            return Placed(next(iter(engines)), "load", None)
        choice, booking = place()
        return Placed(choice.engine, choice.reason, booking)

    def _output_tokens(self, ops: Sequence[AnyOp], name: str, *, made: int = 0) -> float:
        """``made``: tokens that the first generation has already."""
        bounds = [op.params.max_tokens for op in ops if isinstance(op, Gen)]
        return sum(self._lengths.predict(name, bound, made=0 if i else made) for i, bound in enumerate(bounds))


def _room(metrics: Mapping[str, Any], max_rows: float) -> Room:
    """While sequences wait at an engine, it runs as many as it can: rows or slots are short."""
    slots, running = metrics["slots"], float(metrics["running"])
    if metrics["waiting"] and running:
        max_rows = min(max_rows, running)
    return Room(max_rows, float(slots["total"] - slots["leased"] - slots["locked"]))


def _num_branches(ops: Sequence[AnyOp]) -> int:
    return max((len(op.children) for op in ops if isinstance(op, Fork)), default=1)


def _namespace(settings: ProgramSettings) -> str:
    """Of the program's blocks, as the engine has it."""
    salt, adapter = settings.cache_salt, settings.adapter
    return f"{salt}\n{adapter}" if salt or adapter else ""
