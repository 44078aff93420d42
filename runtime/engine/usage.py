"""Usage by tenant and by program name: tokens by origin, time, preemptions.

Names come from clients, so only the first ``max_names`` tenants and program names get a row; all others share OTHERS.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

OTHERS = "(others)"
UNNAMED = "(unnamed)"
MAX_NAMES = 100
MAX_NAME_LEN = 100


@dataclass(slots=True)
class ProgramCounters:
    """Counters of one program, or the sum of several.

    ``foreseen_tokens`` were drawn and equal to the draft token at their place; ``accepted_tokens`` are these and the
    draft tokens that the grammar forced after them.
    """

    submits: int = 0
    ops: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefilled_tokens: int = 0
    generated_tokens: int = 0
    forced_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    foreseen_tokens: int = 0
    forwards: int = 0
    preemptions: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0

    def add(self, other: ProgramCounters) -> None:
        for name in _NAMES:
            setattr(self, name, getattr(self, name) + getattr(other, name))


_NAMES = tuple(f.name for f in fields(ProgramCounters))


@dataclass(slots=True)
class _Row:
    num_runs: int = 0
    ended: ProgramCounters = field(default_factory=ProgramCounters)


class Usage:
    """Owns the rows. ``begin`` counts a program's run, ``end`` adds its counters; running ones come with ``report``."""

    def __init__(self, *, max_names: int = MAX_NAMES) -> None:
        self.max_names = max_names
        self._tenants: dict[str, _Row] = {}
        self._names: dict[str, _Row] = {}

    def begin(self, *, tenant: str, name: str) -> tuple[str, str]:
        """The rows that count a new program: its tenant's and its name's."""
        rows = (self._row(self._tenants, tenant), self._row(self._names, name))
        self._tenants[rows[0]].num_runs += 1
        self._names[rows[1]].num_runs += 1
        return rows

    def end(self, rows: tuple[str, str], counters: ProgramCounters) -> None:
        self._tenants[rows[0]].ended.add(counters)
        self._names[rows[1]].ended.add(counters)

    def report(self, running: Iterable[tuple[tuple[str, str], ProgramCounters]]) -> dict[str, dict[str, Any]]:
        """``tenants`` and ``programs``: usage by name, running programs included. Numbers never decrease."""
        tenants = {name: _copy(row) for name, row in self._tenants.items()}
        names = {name: _copy(row) for name, row in self._names.items()}
        for (tenant, name), counters in running:
            tenants[tenant].ended.add(counters)
            names[name].ended.add(counters)
        return {
            "tenants": {name: _numbers(row) for name, row in tenants.items()},
            "programs": {name: _numbers(row) for name, row in names.items()},
        }

    def _row(self, rows: dict[str, _Row], name: str) -> str:
        name = name[:MAX_NAME_LEN] or UNNAMED
        if name not in rows:
            if len(rows) >= self.max_names:
                name = OTHERS
            rows.setdefault(name, _Row())
        return name


def _copy(row: _Row) -> _Row:
    copied = _Row(row.num_runs)
    copied.ended.add(row.ended)
    return copied


def _numbers(row: _Row) -> dict[str, Any]:
    """``tokens`` counts each token once by its origin: prompt tokens are computed or cached, output tokens the rest."""
    c = row.ended
    looked_up = c.cached_tokens + c.prefilled_tokens
    return {
        "runs": row.num_runs,
        "tokens": {
            "computed": c.prefilled_tokens,
            "cached": c.cached_tokens,
            "generated": c.generated_tokens - c.forced_tokens - c.foreseen_tokens,
            "forced": c.forced_tokens,
            "drafted": c.foreseen_tokens,
        },
        "hit_rate": c.cached_tokens / looked_up if looked_up else 0.0,
        "queue_seconds": c.queue_s,
        "prefill_seconds": c.prefill_s,
        "decode_seconds": c.decode_s,
        "preemptions": c.preemptions,
    }
