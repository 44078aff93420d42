"""What a fleet reports of itself, and how the answers of its engines become one."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from typing import Any

import msgspec

from ..protocol.errors import EngineLost
from .attempt import Member


class ReplicaReport(msgspec.Struct, frozen=True):
    """An engine as the fleet sees it. ``rows`` and ``hit_rate`` are its own metrics, None where it did not answer."""

    name: str
    is_draining: bool
    programs: int
    rows: int | None = None
    hit_rate: float | None = None


class FleetReport(msgspec.Struct, frozen=True):
    """``placements``: programs by the reason for their engine. ``poisoned``: how many were given up as the cause of
    lost engines, ``poisoned_programs`` the last of them. ``engines_lost`` counts lines that ended by themselves, but
    not those of drained engines without programs.
    ``migrations``: programs that went on at another engine after their KV was copied; each is a replay too.
    ``rebalanced``: those of them that moved to even out the loads.
    ``known_blocks``: distinct blocks of KV cache that the engines are known to hold.
    """

    replicas: tuple[ReplicaReport, ...]
    programs: int
    waiting: int
    placements: dict[str, int]
    replays: int
    migrations: int
    rebalanced: int
    poisoned: int
    poisoned_programs: tuple[str, ...]
    engines_lost: int
    journals_bytes: int
    known_blocks: int


def ask_all(engines: Sequence[Member], what: str, timeout_s: float) -> dict[str, Any]:
    """Each engine's answer; None where it has none in time."""
    asked: dict[str, Future[Any] | None] = {}
    for engine in engines:
        try:
            asked[engine.name] = engine.client.ask(what)
        except EngineLost:
            asked[engine.name] = None
    wait_for([answer for answer in asked.values() if answer is not None], timeout_s)
    found: dict[str, Any] = {}
    for name, answer in asked.items():
        is_there = answer is not None and not answer.cancel() and answer.exception() is None
        found[name] = answer.result() if answer is not None and is_there else None
    return found


def sum_of(answers: Sequence[Any]) -> Any:
    """Numbers are added, rates averaged, lists added by place, dicts joined by key; bounds are equal everywhere."""
    first = answers[0]
    if isinstance(first, dict):
        keys = {key: None for answer in answers for key in answer}
        found = {key: [answer[key] for answer in answers if key in answer] for key in keys}
        return {key: values[0] if key == "bounds" else sum_of(values) for key, values in found.items()} | {
            key: sum(values) / len(values) for key, values in found.items() if key.endswith("hit_rate")
        }
    if isinstance(first, list | tuple):
        return [sum_of(values) for values in zip(*answers, strict=True)]
    if isinstance(first, int | float):
        return sum(answers)
    return first


def rows_of(metrics: Any) -> tuple[int | None, float | None]:
    return (None, None) if metrics is None else (metrics.get("running"), metrics.get("cache_hit_rate"))
