"""Which running programs move to another engine because they, and those that they leave, then end sooner. Pure.

A program was placed by a prediction of its output. Where outputs are longer than predicted, one engine has a queue
while another has room. A move is counted in seconds, of the program and of those that it delays or no longer delays:

    it waits at A for a row:  gain  its wait at A                                    + its steps at A - those at B
                              cost  its prompt once for itself and once for each row at B
    it runs at A:             gain  its steps at A - those at B
                                    + those that wait at A get its row sooner, or those that run there a shorter step
                              cost  the copy of its KV once for each row at B + the switch (two steps of B)
    both:                     cost  each row at B has a longer step

Only engines that have room take programs, and where some wait at A, the last of them moves and none that runs.
Programs that come are placed where there is less to do, which evens out the loads as well: nothing is gained by shorter
steps after as many programs have come as the two engines differ by.

Nothing swings to and fro: a move must gain ``SURPLUS`` times its cost and ``LEAST_GAIN_S``; a program that was moved
stays for ``SETTLE_S``; and for that time the engine that gave it takes none, and the one that took it gives none.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from .loads import Loads
from .roles import SWITCH_STEPS

SURPLUS = 2.0
LEAST_GAIN_S = 0.5
SETTLE_S = 10.0


@dataclass(frozen=True, slots=True)
class Work:
    """A program that an engine has been given at ``booked_s``: ``rows`` sequences side by side.

    ``left``: tokens that each of them is expected to make yet. ``held``: tokens of its prompt and its output so far.
    ``is_running``: it is known to have its rows. ``may_move``: see the caller; others only count as load.
    """

    program: str
    engine: str
    rows: float
    left: float
    held: int
    booked_s: float
    is_running: bool
    may_move: bool = True


@dataclass(frozen=True, slots=True)
class Room:
    """Of an engine: rows that it runs at once, and tokens of KV that it has room for."""

    max_rows: float
    tokens: float


@dataclass(frozen=True, slots=True)
class Shift:
    """A program that is to move, and the seconds that it gains and costs."""

    program: str
    source: str
    target: str
    gain_s: float
    cost_s: float


class _Side:
    """One engine's work: who has rows, who waits for them, and how long a step takes."""

    def __init__(self, at: int, loads: Loads, *, max_rows: float, slowness: float) -> None:
        self.name = loads.names[at]
        self.max_rows = max_rows
        self._step_s, self._row_s = float(loads.step_s[at]) * slowness, float(loads.row_s[at]) * slowness
        self.prefill_s_per_token = float(loads.prefill_s_per_token[at]) * slowness
        self.running: list[Work] = []
        self.waiting: list[Work] = []
        self.rows = 0.0  # of those that run
        self.queued = 0.0  # rows of those that wait

    def fill(self, works: Iterable[Work]) -> None:
        """The oldest have the rows, after those that are known to have some."""
        for work in sorted(works, key=lambda work: (not work.is_running, work.booked_s)):
            if work.is_running or self.rows + work.rows <= self.max_rows or not self.rows:
                self.running.append(work)
                self.rows += work.rows
            else:
                self.waiting.append(work)
                self.queued += work.rows

    @property
    def row_s(self) -> float:
        return self._row_s

    def step_s(self, rows: float) -> float:
        return self._step_s + self._row_s * min(rows, self.max_rows)

    def mean_left(self) -> float:
        """Tokens of a row that runs."""
        return sum(work.rows * work.left for work in self.running) / self.rows if self.rows else 0.0

    def wait_s(self, rows: float) -> float:
        """Until so many rows more than there are now become free."""
        return rows / max(self.rows, 1.0) * self.mean_left() * self.step_s(self.rows)

    def has_room(self, rows: float) -> bool:
        return not self.waiting and self.rows + rows <= self.max_rows

    def give(self, work: Work) -> None:
        """It has room."""
        self.running.append(work)
        self.rows += work.rows

    def take(self, work: Work) -> None:
        if work in self.waiting:
            self.waiting.remove(work)
            self.queued -= work.rows
            return
        self.running.remove(work)
        self.rows -= work.rows


class Rebalancing:
    """Plans moves, and remembers the last ones."""

    def __init__(self) -> None:
        self._moved_s: dict[str, float] = {}  # by program
        self._gave_s: dict[str, float] = {}  # by engine
        self._took_s: dict[str, float] = {}

    def plan(
        self,
        works: Collection[Work],
        loads: Loads,
        *,
        among: Sequence[str],
        rooms: Mapping[str, Room],
        copy_s_per_token: float,
        most: int,
        now_s: float,
    ) -> list[Shift]:
        """At most ``most`` moves between the engines ``among``, of which those without a ``Room`` take none."""
        self._forget(now_s)
        slowness, arrivals_per_s = loads.slowness(now_s), loads.arrivals_per_s(now_s)
        by_engine: dict[str, list[Work]] = {}
        for work in works:
            by_engine.setdefault(work.engine, []).append(work)
        sides: list[_Side] = []
        left = {name: room.tokens for name, room in rooms.items()}
        for name in among:
            at = loads.position[name]
            max_rows = rooms[name].max_rows if name in rooms else float(loads.max_rows[at])
            sides.append(_Side(at, loads, max_rows=max_rows, slowness=float(slowness[at])))
            sides[-1].fill(by_engine.get(name, ()))
        found: list[Shift] = []
        while len(found) < most:
            best = self._best(sides, left, copy_s_per_token, arrivals_per_s)
            if best is None:
                break
            work, source, target, shift = best
            found.append(shift)
            left[target.name] = left.get(target.name, 0.0) - _tokens_of(work)
            source.take(work)
            target.give(work)
            self._moved_s[work.program] = self._gave_s[source.name] = self._took_s[target.name] = now_s
        return found

    def _best(
        self, sides: Sequence[_Side], left: Mapping[str, float], copy_s_per_token: float, arrivals_per_s: float
    ) -> tuple[Work, _Side, _Side, Shift] | None:
        """The move that gains most."""
        targets = [side for side in sides if side.name not in self._gave_s and side.has_room(1.0)]
        best: tuple[Work, _Side, _Side, Shift] | None = None
        for source in sides:
            others = [side for side in targets if side is not source]
            if source.name in self._took_s or not others:
                continue
            target = min(others, key=_row_costs_s)
            differ = source.rows + source.queued - target.rows
            if differ <= 1.0:
                continue
            lasts_s = differ / arrivals_per_s if arrivals_per_s > 0 else math.inf
            for work in self._candidates(source):
                if not target.has_room(work.rows) or left.get(target.name, 0.0) < _tokens_of(work):
                    continue
                gain_s, cost_s = worth(work, source, target, copy_s_per_token=copy_s_per_token, lasts_s=lasts_s)
                if gain_s < SURPLUS * cost_s + LEAST_GAIN_S:
                    continue
                if best is None or gain_s - cost_s > best[3].gain_s - best[3].cost_s:
                    best = work, source, target, Shift(work.program, source.name, target.name, gain_s, cost_s)
        return best

    def _candidates(self, source: _Side) -> list[Work]:
        found = [
            work for work in source.waiting or source.running if work.may_move and work.program not in self._moved_s
        ]
        return found[-1:] if source.waiting else found

    def _forget(self, now_s: float) -> None:
        for times in (self._moved_s, self._gave_s, self._took_s):
            for name in [name for name, at_s in times.items() if now_s - at_s >= SETTLE_S]:
                del times[name]


def worth(work: Work, source: _Side, target: _Side, *, copy_s_per_token: float, lasts_s: float) -> tuple[float, float]:
    """The seconds that a move gains and costs, as in the module's docstring; the loads differ for ``lasts_s``."""
    rows, before_s, after_s = target.rows, source.step_s(source.rows), target.step_s(target.rows + work.rows)
    most = lasts_s / before_s  # steps for which they differ
    slower_s = rows * min(work.left, most, target.mean_left()) * work.rows * target.row_s
    if work in source.waiting:
        gain_s = source.wait_s(source.queued) + min(work.left, most) * (before_s - after_s)
        return gain_s, work.held * target.prefill_s_per_token * (1 + rows) + slower_s
    copy_s = work.held * copy_s_per_token
    left = min(work.left, most) - copy_s / before_s  # it goes on while it is copied
    if left <= 0:
        return 0.0, copy_s
    gain_s = left * (before_s - after_s)
    gain_s += (source.rows - work.rows) * min(left, source.mean_left()) * work.rows * source.row_s
    return gain_s, copy_s * rows + SWITCH_STEPS * after_s + slower_s


def _row_costs_s(side: _Side) -> float:
    """What a step with one more row costs it, and the rows that run there."""
    return side.step_s(side.rows + 1.0) + side.rows * side.row_s


def _tokens_of(work: Work) -> float:
    return work.held + work.rows * work.left
