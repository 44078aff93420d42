"""Which engine gets a program: the one where it costs least. Pure; no clocks, threads or sockets.

The cost of an engine is counted in seconds, those of the program and those of the programs that it delays there:

    queued prompt work there
    + prompt tokens that it has not cached x seconds a token x MISS_WEIGHT   + load of host or disk blocks
    + predicted output tokens x seconds of a step at its batch + wait for a row where all rows are taken
    + the same prompt and row seconds once for each row that runs there: they wait for each other
    + moving cost, where the program has another home

``place`` books what it decides at once, so programs that come before the next report do not all go to the same engine.
Of costs within ``near`` of the least, one is drawn at random.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from ..protocol.errors import EngineLost
from .index import Match, Matches
from .loads import Booking, Loads
from .roles import Prompt, Role, best_hand_off

# A computed token takes a slot of a cached one, which another program computes again. On the simulator's traces 4 to 16
# gave equal latencies and hit rates; 1 computed up to four times as many tokens and was no faster.
MISS_WEIGHT = 4.0

# only: there is one engine. prefix: it has (most of) the prompt. load: no engine has. spread: another has, and is
# busier. home: where the program is. moved: away from there.
# prefill: it computes the prompt, and another engine generates.
Reason = Literal["only", "prefix", "load", "spread", "home", "moved", "prefill"]


@dataclass(frozen=True, slots=True)
class Demand:
    """What is known of a program, or of one fork of it, when it is placed or asks for more.

    ``prompt_tokens``: of the whole prompt of its next generation, with its history. ``output_tokens``: a prediction of
    the tokens that it generates one after another. ``branches``: forks known to follow that share the prompt and run
    side by side. ``home``: the engine that it is on, or ""; there ``history_tokens`` of the prompt need no computing.
    """

    prompt_tokens: int
    output_tokens: float
    branches: int = 1
    home: str = ""
    history_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Choice:
    """``cost_s`` as above. ``cached_tokens``: of the prompt, on that engine."""

    engine: str
    cost_s: float
    cached_tokens: int
    reason: Reason


@dataclass(slots=True)
class Placement:
    """Chooses, and books in ``loads``, which has the engines that are ready.

    ``near``: costs that differ by less are equal, as a share of the least cost. ``move_s``: what a move costs beside
    computing the history again.
    """

    loads: Loads = field(default_factory=Loads)
    near: float = 0.02
    move_s: float = 0.25
    rng: random.Random = field(default_factory=random.Random)

    def place(
        self, demand: Demand, matches: Mapping[str, Match], now_s: float, *, among: Collection[str] | None = None
    ) -> tuple[Choice, Booking]:
        """Choose and book. The caller ends the booking with ``loads.finish`` when the generation ends or leaves."""
        choice = self.choose(demand, matches, now_s, among=among)
        return choice, self.book(demand, choice, matches, now_s)

    def place_new(
        self,
        demand: Demand,
        matches: Mapping[str, Match],
        now_s: float,
        *,
        roles: Mapping[str, Role],
        copy_s_per_token: float,
        among: Collection[str],
    ) -> tuple[Choice, Booking]:
        """As ``place``, for a new program: a prefill engine computes its prompt where that pays (reason ``prefill``).

        Where it does not, the program runs whole on any engine, prefill ones included.
        """
        generate = [engine for engine in among if roles[engine] != "prefill"]
        if generate and len(generate) < len(among):
            home = self.choose(demand, matches, now_s, among=generate)
            cached = {engine: matches[engine].tokens if engine in matches else 0 for engine in among}
            prompt = Prompt(demand.prompt_tokens, home.engine, home.cached_tokens)
            prefill = {engine: cached[engine] for engine in among if roles[engine] == "prefill"}
            found = best_hand_off(prompt, self.loads, prefill, copy_s_per_token=copy_s_per_token, now_s=now_s)
            if found is not None and roles[home.engine] == "decode":
                choice = Choice(found.engine, home.cost_s - found.gain_s, cached[found.engine], "prefill")
                return choice, self.book(replace(demand, output_tokens=1.0), choice, matches, now_s)
        return self.place(demand, matches, now_s, among=among)

    def choose(
        self,
        demand: Demand,
        matches: Mapping[str, Match],
        now_s: float,
        *,
        among: Collection[str] | None = None,
    ) -> Choice:
        """The engine with the least cost; ``matches`` are those of ``CacheIndex.match``. Books nothing.

        ``among``: the engines of ``loads`` that may be chosen, at least one; None: all.

        Raises EngineLost where no engine is ready.
        """
        loads = self.loads
        if not len(loads):
            raise EngineLost("no engine of the fleet is ready")
        held, device = _held(demand, loads, matches)
        if len(loads) == 1:
            return Choice(loads.names[0], 0.0, int(held[0]), "only")
        costs = _costs(demand, loads, held, device, now_s)
        if among is not None and len(among) < len(loads):
            costs[[name not in among for name in loads.names]] = np.inf
        home = loads.position.get(demand.home, -1)
        if home >= 0:
            costs += self.move_s
            costs[home] -= self.move_s
        least = costs.min()
        if home >= 0 and costs[home] <= least * (1.0 + self.near):
            return Choice(demand.home, float(costs[home]), int(held[home]), "home")
        equal = np.flatnonzero(costs <= least * (1.0 + self.near))
        at = int(equal[0]) if len(equal) == 1 else int(equal[self.rng.randrange(len(equal))])
        return Choice(loads.names[at], float(costs[at]), int(held[at]), _reason(home, int(held[at]), held))

    def book(self, demand: Demand, choice: Choice, matches: Mapping[str, Match], now_s: float) -> Booking:
        """Count ``demand`` as work of the engine chosen, until ``loads.finish``."""
        loads = self.loads
        at = loads.position[choice.engine]
        match = matches.get(choice.engine, NONE)
        rates = loads.rates[at]
        loaded = max(choice.cached_tokens - max(match.device_tokens, demand.history_tokens), 0)
        new = max(demand.prompt_tokens - choice.cached_tokens, 1)
        prefill_s = new * rates.prefill_s_per_token + loaded * rates.host_load_s_per_token
        rows = min(loads.rows[at] + demand.branches, loads.max_rows[at])
        step_s = float(rates.step_s + rates.row_s * rows)
        queued_s = float(loads.queued_s(now_s)[at])
        booking = Booking(
            choice.engine,
            demand.branches,
            prefill_s,
            demand.output_tokens,
            now_s,
            queued_s,
            step_s,
            demand.prompt_tokens,
        )
        loads.book(booking)
        return booking


NONE = Match(0, 0)


def _held(demand: Demand, loads: Loads, matches: Mapping[str, Match]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of the prompt that each engine holds, in any tier and on its device; at least one must be computed."""
    held, device = np.zeros(len(loads)), np.zeros(len(loads))
    found = matches if isinstance(matches, Matches) else Matches.of(matches)
    at = loads.positions_of(found.engines)
    held[at[at >= 0]], device[at[at >= 0]] = found.tokens[:, at >= 0]
    home = loads.position.get(demand.home)
    if home is not None:
        held[home] = max(held[home], demand.history_tokens)
        device[home] = max(device[home], demand.history_tokens)
    most = max(demand.prompt_tokens - 1, 0)
    return np.minimum(held, most), np.minimum(device, most)


def _costs(demand: Demand, loads: Loads, held: np.ndarray, device: np.ndarray, now_s: float) -> np.ndarray:
    """Seconds by engine, as in the module's docstring without the moving cost."""
    rows, most = loads.rows, loads.max_rows
    after = rows + demand.branches
    running = np.minimum(rows, most)
    prefill_s = MISS_WEIGHT * (demand.prompt_tokens - held) * loads.prefill_s_per_token
    prefill_s += (held - device) * loads.host_load_s_per_token
    step_s = loads.step_s + loads.row_s * np.minimum(after, most)
    decode_s = demand.output_tokens * step_s
    left = loads.output_tokens / np.maximum(rows, 1.0)  # tokens of each row there, on average
    row_wait_s = np.maximum(after - most, 0.0) / most * left * step_s
    delays_s = running * (prefill_s + demand.output_tokens * demand.branches * loads.row_s)
    own_s = loads.queued_s(now_s) + prefill_s + decode_s + row_wait_s
    costs: np.ndarray = (own_s + delays_s) * loads.slowness(now_s)
    return costs


def _reason(home: int, held: int, all_held: np.ndarray) -> Reason:
    if home >= 0:
        return "moved"
    most = all_held.max()
    if most <= 0:
        return "load"
    return "prefix" if 2 * held >= most else "spread"
