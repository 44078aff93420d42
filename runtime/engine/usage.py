"""Usage by tenant and by program name: tokens by origin, time, preemptions.

Names come from clients, so only the first ``max_names`` tenants and program names get a row; all others share OTHERS.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ...protocol.messages import ProgramStats

OTHERS = "(others)"
UNNAMED = "(unnamed)"
MAX_NAMES = 100
MAX_NAME_LEN = 100


@dataclass(slots=True)
class _Row:
    num_runs: int = 0
    ended: ProgramStats = field(default_factory=ProgramStats)


class Usage:
    """Owns the rows. ``begin`` counts a program's run, ``end`` adds its stats; running ones come with ``report``."""

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

    def end(self, rows: tuple[str, str], stats: ProgramStats) -> None:
        _add(self._tenants[rows[0]].ended, stats)
        _add(self._names[rows[1]].ended, stats)

    def report(self, running: Iterable[tuple[tuple[str, str], ProgramStats]]) -> dict[str, dict[str, Any]]:
        """``tenants`` and ``programs``: usage by name, running programs included. Numbers never decrease."""
        tenants = {name: _copy(row) for name, row in self._tenants.items()}
        names = {name: _copy(row) for name, row in self._names.items()}
        for (tenant, name), stats in running:
            _add(tenants[tenant].ended, stats)
            _add(names[name].ended, stats)
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
    return _Row(row.num_runs, msgspec.structs.replace(row.ended))


def _add(total: ProgramStats, stats: ProgramStats) -> None:
    for name in ProgramStats.__struct_fields__:
        setattr(total, name, getattr(total, name) + getattr(stats, name))


def _numbers(row: _Row) -> dict[str, Any]:
    """``tokens`` counts each token once by its origin: prompt tokens are computed or cached, output tokens the rest."""
    c = row.ended
    looked_up = c.cached_tokens + c.prefilled_tokens
    return {
        "runs": row.num_runs,
        "tokens": {
            "computed": c.prefilled_tokens,
            "cached": c.cached_tokens,
            "generated": c.generated_tokens - c.forced_tokens - c.drawn_draft_tokens,
            "forced": c.forced_tokens,
            "drafted": c.drawn_draft_tokens,
        },
        "hit_rate": c.cached_tokens / looked_up if looked_up else 0.0,
        "queue_seconds": c.queue_s,
        "prefill_seconds": c.prefill_s,
        "decode_seconds": c.decode_s,
        "preemptions": c.preemptions,
    }
