"""How many replicas a fleet wants, and which of them start, drain and end for it. No clock, no thread, no engine.

Work is counted in seconds of one replica. With r(t) the work that arrives a second, n replicas and a start of S:

    arrivals   r(S) / busy                                   a replica is to be busy for that share of its time
    queue      (work that waits + r's work in [0, S) - what the replicas do in [0, S)) / goal, at least 0
    wanted     ceil(arrivals + queue)                        up at once, down after ``calm_s``

r(t) is a line through the arrivals of the last ``window_s``; it is level where its slope may be chance. Where the
arrivals have stepped, the window begins at the step:

    arrivals   ....:..:.:...|''''''  the bins after the bar differ by more than MIN_STEP standard errors
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ..protocol.errors import InvalidParams
from ..runtime.scheduler.lengths import MAX_KINDS
from .loads import Rates

NUM_BINS = 36  # of the window
MIN_BINS = 3  # that make a level; an average over fewer would follow single programs
MIN_OLD_BINS = 6  # before a step
MIN_STEP = 6.0  # standard errors by which the arrivals after a step differ from those before
MIN_SLOPE = 4.0  # standard errors that a slope must differ from 0 by
MAX_GROWTH = 2.0  # of the arrivals during a start, over the highest bin
KEEP = 0.995  # weight of the past at each ended program, in the mean work of its kind


@dataclass(frozen=True, slots=True)
class ScalingSettings:
    """``start_s``: from the order to a ready replica. ``goal_s``: a queue is to be worked off in that time, once the
    replicas that it needs are ready. ``busy``: the share of its time that a replica may work in the long run.

    A replica is drained when ``calm_s`` have gone by in which none needed it, with ``margin`` more work than came.
    ``first_work_s``: of a program while none has ended.
    """

    start_s: float
    goal_s: float = 30.0
    min_replicas: int = 1
    max_replicas: int = 8
    busy: float = 0.8
    window_s: float = 180.0
    calm_s: float = 600.0
    margin: float = 0.15
    first_work_s: float = 1.0

    def __post_init__(self) -> None:
        for name in ("goal_s", "busy", "window_s", "first_work_s"):
            if not getattr(self, name) > 0:
                raise InvalidParams(f"{name}={getattr(self, name)}: it must be more than 0", where=name)
        for name in ("start_s", "calm_s", "margin"):
            if not getattr(self, name) >= 0:
                raise InvalidParams(f"{name}={getattr(self, name)}: it must be 0 or more", where=name)
        if self.busy > 1:
            raise InvalidParams(f"busy={self.busy}: a replica is busy for at most 1, all of its time", where="busy")
        if not 1 <= self.min_replicas <= self.max_replicas:
            text = f"min_replicas={self.min_replicas}: it must be 1 to max_replicas, which is {self.max_replicas}"
            raise InvalidParams(text, where="min_replicas")


def work_s(rates: Rates, *, computed: float, output_tokens: float, batch: int) -> float:
    """Seconds of a replica's time that a program takes: its computed prompt tokens, and its part of steps of
    ``batch`` rows.
    """
    return computed * rates.prefill_s_per_token + output_tokens * (rates.step_s / batch + rates.row_s)


class Autoscaler:
    """Told of programs that arrive and end, by kind; says at each look how many replicas are wanted."""

    def __init__(self, settings: ScalingSettings) -> None:
        self.settings = settings
        self._bin_s = settings.window_s / NUM_BINS
        self._bins: deque[tuple[int, Counter[str]]] = deque()  # arrivals by kind, oldest first
        self._first_bin: int | None = None
        self._kinds: dict[str, tuple[float, float]] = {}  # weight and sum of the work of ended programs
        self._all = (0.0, 0.0)
        self._needs: deque[tuple[float, int]] = deque()  # (time, replicas needed with the margin), in ``calm_s``
        self._wanted = settings.min_replicas

    def arrived(self, kind: str, now_s: float) -> None:
        index = math.floor(now_s / self._bin_s)
        if self._first_bin is None:
            self._first_bin = index
        if not self._bins or self._bins[-1][0] != index:
            self._bins.append((index, Counter()))
        self._bins[-1][1][kind] += 1
        self._forget(index)

    def ended(self, kind: str, work_s: float) -> None:
        """A program has ended, which took ``work_s`` seconds of a replica. One that failed says nothing."""
        if kind in self._kinds or len(self._kinds) < MAX_KINDS:
            weight, total = self._kinds.get(kind, (0.0, 0.0))
            self._kinds[kind] = (KEEP * weight + 1, KEEP * total + work_s)
        weight, total = self._all
        self._all = (KEEP * weight + 1, KEEP * total + work_s)

    def work_of(self, kinds: Mapping[str, int]) -> float:
        """The work of so many programs of each kind, as those before them took."""
        weight, total = self._all
        usual = total / weight if weight else self.settings.first_work_s
        means = {kind: total / weight for kind, (weight, total) in self._kinds.items() if kind in kinds}
        return sum(count * means.get(kind, usual) for kind, count in kinds.items())

    def wanted(self, now_s: float, *, waiting: Mapping[str, int], ready_in_s: Sequence[float]) -> int:
        """The number of replicas. ``waiting``: programs that no replica has begun, by kind. ``ready_in_s``: of each
        replica that takes programs or starts, the seconds until it is ready; 0 where it is.
        """
        settings = self.settings
        rate, slope = self._arrivals(now_s)
        ahead = max(rate + slope * settings.start_s, 0.0)
        coming_s = settings.start_s * (rate + ahead) / 2
        done_s = sum(max(settings.start_s - in_s, 0.0) for in_s in ready_in_s)
        queue_s = max(self.work_of(waiting) + coming_s - done_s, 0.0)
        need = max(ahead, rate) / settings.busy + queue_s / settings.goal_s

        def bounded(replicas: float) -> int:
            return max(settings.min_replicas, min(math.ceil(replicas - 1e-9), settings.max_replicas))

        self._needs.append((now_s, bounded(need * (1 + settings.margin))))
        while self._needs[0][0] < now_s - settings.calm_s:
            self._needs.popleft()
        self._wanted = max(bounded(need), min(self._wanted, max(most for _, most in self._needs)))
        return self._wanted

    def _forget(self, index: int) -> None:
        while self._bins and self._bins[0][0] < index - NUM_BINS:
            self._bins.popleft()

    def _arrivals(self, now_s: float) -> tuple[float, float]:
        """Work that arrives a second, now, and its change a second; from the whole bins of the window."""
        index = math.floor(now_s / self._bin_s)
        self._forget(index)
        if self._first_bin is None:
            return 0.0, 0.0
        first = max(index - NUM_BINS, self._first_bin)
        by_bin = dict(self._bins)
        if index == first:  # the first bin is not over
            return self.work_of(by_bin.get(index, {})) / self._bin_s / MIN_BINS, 0.0
        kinds = [by_bin.get(at, Counter()) for at in range(first, index)]
        begin = last_step(np.array([one.total() for one in kinds], dtype=float))
        self._first_bin = first = first + begin  # what was before a step is never looked at again
        rates = np.array([self.work_of(one) for one in kinds[begin:]]) / self._bin_s
        level = float(rates.sum()) / max(len(rates), MIN_BINS)
        if len(rates) <= 2 * MIN_BINS:
            return level, 0.0
        times = (np.arange(first, index) + 0.5) * self._bin_s - now_s  # the line's value at 0 is the present
        spread = times - times.mean()
        slope = float(spread @ rates / (spread @ spread))
        rest = rates - level - slope * spread
        error = math.sqrt(float(rest @ rest) / (len(rates) - 2) / float(spread @ spread))
        if abs(slope) <= MIN_SLOPE * error:
            return level, 0.0
        most = MAX_GROWTH * float(rates.max())
        rate = min(max(level - slope * float(times.mean()), 0.0), most)
        return rate, min(slope, (most - rate) / max(self.settings.start_s, 1e-9))


def last_step(counts: np.ndarray) -> int:
    """Where the arrivals of the window's bins, oldest first, have stepped to another level: the first bin after the
    step; 0 where they have not.

    The bins after the step are compared without the highest of them, so that programs that come all at once are none.
    """
    ats = np.arange(MIN_OLD_BINS, len(counts) - MIN_BINS + 1)  # [A], the bins before and after: at, n - at
    total = float(counts.sum())
    if not len(ats) or not total:
        return 0
    sums, squares = np.cumsum(counts), np.cumsum(counts**2)
    highest = np.maximum.accumulate(counts[::-1])[::-1][ats]  # [A]
    before, num_after = sums[ats - 1] / ats, len(counts) - ats - 1
    after = (total - sums[ats - 1] - highest) / num_after
    # of a bin; that of a Poisson process at least
    variance = np.maximum(squares[ats - 1] / ats - before**2, total / len(counts))
    errors = np.abs(after - before) / np.sqrt(variance * (1 / ats + 1 / num_after))
    best = int(errors.argmax())
    return int(ats[best]) if errors[best] > MIN_STEP else 0


@dataclass(frozen=True, slots=True)
class ReplicaWork:
    """``programs``: those that it runs, or whose history it keeps."""

    state: Literal["starting", "ready", "draining"]
    programs: int = 0


@dataclass(frozen=True, slots=True)
class ScalingSteps:
    """``start`` new replicas; ``resume``: draining ones that take programs again; ``end``: they have nothing left."""

    start: int = 0
    resume: tuple[str, ...] = ()
    drain: tuple[str, ...] = ()
    end: tuple[str, ...] = ()


def steps_to(wanted: int, replicas: Mapping[str, ReplicaWork]) -> ScalingSteps:
    """What brings ``replicas`` to ``wanted``. A replica ends only after it was drained and has no program left.

    Replicas with the fewest programs are drained first, those that start before all; those with the most are resumed.
    """
    ascending = sorted(replicas, key=lambda name: (replicas[name].state != "starting", replicas[name].programs, name))
    draining = [name for name in ascending if replicas[name].state == "draining"]
    active = [name for name in ascending if replicas[name].state != "draining"]
    missing = wanted - len(active)
    resumed = tuple(reversed(draining))[: max(missing, 0)]
    end = tuple(name for name in draining if name not in resumed and not replicas[name].programs)
    return ScalingSteps(max(missing - len(resumed), 0), resumed, tuple(active[: max(-missing, 0)]), end)
