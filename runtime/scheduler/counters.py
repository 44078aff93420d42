"""Counters of the scheduler."""

from bisect import bisect_left
from dataclasses import dataclass, field


class Histogram:
    """Values counted by upper bound, as in Prometheus. ``counts`` has one more entry: values beyond the last bound."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


QUEUE_BOUNDS_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0)


@dataclass(slots=True)
class SchedulerCounters:
    """Since the start. ``num_yields`` counts preemptions in favour of a more urgent or a shorter waiting sequence,
    ``num_swapped_back`` preempted sequences whose KV was restored from host memory or disk.

    Sequences had ``admitted_tokens`` tokens when they first ran; ``cached_tokens`` of these were in the cache.
    """

    num_preemptions: int = 0
    num_yields: int = 0
    num_swapped_back: int = 0
    admitted_tokens: int = 0
    cached_tokens: int = 0
    queue_time: Histogram = field(default_factory=lambda: Histogram(QUEUE_BOUNDS_S))
