"""Which engine gets a program: the one that is expected to finish it first. Pure; no clocks, threads or sockets.

An engine's cost is counted in seconds:

    queued work there  +  prompt tokens that it has not cached x seconds a token  +  load of host or disk blocks
    + predicted output tokens x seconds a token at its batch  +  moving cost (where the program has another home)

What ``choose`` decides is booked at once, so programs that come before the next report do not all go to the same
engine. Of costs within ``near`` of the least, one is drawn at random.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from .index import Match

Reason = Literal["only", "prefix", "load", "spread", "home", "moved"]


@dataclass(frozen=True, slots=True)
class Demand:
    """What is known of a program, or of one fork of it, when it is placed.

    ``prompt_tokens`` are those of its first generation's prompt; ``output_tokens`` a prediction (the sum over its known
    generations); ``branches``: forks known to follow that share the prompt. ``home``: the engine that it is on, or "".
    ``history_tokens``: tokens that a move would have to compute again.
    """

    prompt_tokens: int
    output_tokens: float
    branches: int = 1
    home: str = ""
    history_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Rates:
    """Of one engine: seconds for a prompt token and for a decode step's base and row; measured, or of ``planning``."""

    prefill_s_per_token: float
    step_s: float
    row_s: float
    host_load_s_per_token: float = 0.0


@dataclass(slots=True)
class EngineLoad:
    """What an engine has been given and has not finished. ``queued_s`` is the sum of the bookings' prompt seconds."""

    rates: Rates
    rows: float = 0.0
    queued_s: float = 0.0
    output_tokens: float = 0.0
    max_rows: int = 16
    free_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Choice:
    engine: str
    cost_s: float
    cached_tokens: int
    reason: Reason


@dataclass(slots=True)
class Placement:
    """Chooses and books. ``finish`` takes a booking back when the program ends or leaves its engine."""

    near: float = 0.05
    rng: random.Random = field(default_factory=random.Random)

    def choose(
        self, demand: Demand, loads: Mapping[str, EngineLoad], matches: Mapping[str, Match], now_s: float
    ) -> Choice:
        """The engine with the least expected end. ``loads`` has the engines that are ready: at least one."""
        raise NotImplementedError
