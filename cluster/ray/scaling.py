"""``cluster.autoscale`` as a policy of Ray Serve: what replicas report, and what the policy makes of it. No Ray.

engine's metrics ──► LoadReport ──numbers, pushed by Serve──► FleetScaler ──► Autoscaler ──► number of replicas
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from ...protocol.errors import InvalidParams
from ..autoscale import Autoscaler, ScalingSettings, work_s
from ..loads import Rates, RatesFit

START_S = 30.0  # while no replica has reported how long it took to start
MAX_KINDS = 64  # that a replica reports by name
OTHERS = "(others)"
_SUMS = ("runs", "computed", "generated")


class LoadReport:
    """What a replica tells the policy, made from its engine's metrics: ``numbers``, by name.

    ``runs``, ``computed`` and ``generated``, each with a program's name behind it, are sums since the start; the others
    are present values. ``start_s``: how long the engine took to start. ``max_rows``: of a step.
    """

    def __init__(self, *, start_s: float, max_rows: int) -> None:
        self._fit = RatesFit()
        self._max_rows = max_rows
        self.numbers: dict[str, float] = {"start_s": start_s}

    def note(self, metrics: Mapping[str, Any]) -> None:
        """The engine's answer to the query ``metrics``."""
        rates = self._fit.note("", metrics)
        step_s = rates.step_s / self._max_rows
        found: Counter[str] = Counter()
        for place, (name, usage) in enumerate(metrics["usage"]["programs"].items()):
            kind = name if place < MAX_KINDS else OTHERS
            tokens = usage["tokens"]
            found[f"runs {kind}"] += usage["runs"]
            found[f"computed {kind}"] += tokens["computed"]
            found[f"generated {kind}"] += tokens["generated"]
        self.numbers = {
            **found,
            "start_s": self.numbers["start_s"],
            "waiting": metrics["waiting"],
            "prefill_s_per_token": rates.prefill_s_per_token,
            "output_s_per_token": step_s + rates.row_s,
        }


@dataclass(slots=True)
class _Sums:
    """Of one kind of program at one replica, as reported last."""

    runs: float = 0.0
    computed: float = 0.0
    generated: float = 0.0


def settings_of(given: Mapping[str, Any]) -> ScalingSettings:
    """Raises InvalidParams for a name or a value that is not one of ``ScalingSettings``."""
    names = [field.name for field in fields(ScalingSettings)]
    for name, value in given.items():
        if name not in names:
            raise InvalidParams(f"autoscaling.{name}: it is not one of {', '.join(names)}", where=f"autoscaling.{name}")
        number = (int,) if name.endswith("_replicas") else (int, float)
        if isinstance(value, bool) or not isinstance(value, number):
            wanted = "a whole number" if number == (int,) else "a number"
            raise InvalidParams(f"autoscaling.{name}={value!r}: it must be {wanted}", where=f"autoscaling.{name}")
    return ScalingSettings(**{"start_s": START_S, **given})


class FleetScaler:
    """A policy of Serve: called again and again with its context, it returns the number of replicas and no state.

    Serve makes one for a deployment, from ``policy_kwargs``: fields of ``ScalingSettings``. Without ``start_s`` it is
    the longest start that a replica has reported. The policy reads the series that replicas have reported, each sample
    once and in the order of time. Serve brings down the number of replicas by stopping one, whose programs the front
    then moves to others; see ``PlacesFollower``.
    """

    def __init__(self, **settings: float) -> None:
        self._learns_start = "start_s" not in settings
        self.scaler = Autoscaler(settings_of(settings))
        self._last: dict[tuple[Any, str], _Sums] = {}
        self._seen_s: dict[Any, float] = {}
        self._due: Counter[str] = Counter()  # programs that have arrived and whose work is not counted
        self._now_s = -math.inf  # of the latest sample
        self._ordered_s: float | None = None  # since when replicas are missing
        self._wanted: int | None = None

    def __call__(self, ctx: Any) -> tuple[int, dict[str, Any]]:
        series = ctx.raw_metrics or {}
        replicas = {replica for by_replica in series.values() for replica in by_replica}
        samples = [
            (at, str(replica), replica, values)
            for replica in replicas
            for at, values in _samples(series, replica).items()
            if at > self._seen_s.get(replica, -math.inf)
        ]
        for at, _, replica, values in sorted(samples, key=lambda sample: sample[:2]):
            self._now_s = max(self._now_s, at)  # replicas report at different times; the scaler's bins only go forward
            self._note(replica, values, is_first=replica not in self._seen_s)
            self._seen_s[replica] = at
        self._forget(replicas)
        if samples or self._wanted is None:
            self._wanted = self._decide(ctx, series, replicas)
        return self._wanted, {}

    def _note(self, replica: Any, values: Mapping[str, float], *, is_first: bool) -> None:
        """One sample of one replica. From the first one the next is counted: Serve's controller may have restarted."""
        prefill_s, output_s = values.get("prefill_s_per_token"), values.get("output_s_per_token")
        if prefill_s is None or output_s is None:
            return
        rates = Rates(prefill_s, 0.0, output_s)
        for name in [name for name in values if name.startswith("runs ")]:
            kind = name.removeprefix("runs ")
            new = _Sums(*(values.get(f"{part} {kind}", 0.0) for part in _SUMS))
            old = self._last.get((replica, kind), _Sums())
            self._last[replica, kind] = new
            if is_first:
                continue
            due = self._due[kind]
            took_s = work_s(
                rates,
                computed=max(new.computed - old.computed, 0.0),
                output_tokens=max(new.generated - old.generated, 0.0),
                batch=1,
            )
            if due and took_s:
                del self._due[kind]
                for _ in range(due):
                    self.scaler.ended(kind, took_s / due)
            arrived = max(int(new.runs - old.runs), 0)
            self._due[kind] += arrived
            for _ in range(arrived):
                self.scaler.arrived(kind, self._now_s)

    def _decide(self, ctx: Any, series: Mapping[str, Any], replicas: set[Any]) -> int:
        if self._learns_start:
            took_s = max((_last(series, "start_s", replica) for replica in replicas), default=0.0)
            self.scaler.settings = replace(self.scaler.settings, start_s=took_s or START_S)
        settings = self.scaler.settings
        if self._now_s == -math.inf:
            return int(min(max(ctx.target_num_replicas, settings.min_replicas), settings.max_replicas))
        present, ordered = ctx.current_num_replicas, ctx.target_num_replicas
        if ordered <= present:
            self._ordered_s = None
        elif self._ordered_s is None:
            self._ordered_s = self._now_s
        since_s = 0.0 if self._ordered_s is None else self._now_s - self._ordered_s
        left_s = max(settings.start_s - since_s, 1e-9)
        waiting = sum(_last(series, "waiting", replica) for replica in replicas)
        return self.scaler.wanted(
            self._now_s,
            waiting={"": round(waiting)} if waiting else {},
            ready_in_s=[0.0] * min(present, ordered) + [left_s] * max(ordered - present, 0),
        )

    def _forget(self, replicas: set[Any]) -> None:
        """Replicas that have ended."""
        self._seen_s = {replica: at for replica, at in self._seen_s.items() if replica in replicas}
        self._last = {key: sums for key, sums in self._last.items() if key[0] in replicas}


def _samples(series: Mapping[str, Any], replica: Any) -> dict[float, dict[str, float]]:
    """What one replica has reported, by time."""
    found: dict[float, dict[str, float]] = {}
    for name, by_replica in series.items():
        for sample in by_replica.get(replica, ()):
            found.setdefault(sample.timestamp, {})[name] = sample.value
    return found


def _last(series: Mapping[str, Any], name: str, replica: Any) -> float:
    found = series.get(name, {}).get(replica) or ()
    return float(found[-1].value) if found else 0.0
