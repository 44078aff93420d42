"""What happened in the schedule, counted. Never decides anything."""

from bisect import bisect_left
from dataclasses import dataclass, field


class Histogram:
    """Values by upper bound, as Prometheus has them. ``counts`` has one entry more than ``bounds``: beyond the last."""

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
    """Since the start. ``num_yields``: preemptions for the sake of a more urgent or a shorter sequence.
    ``num_swapped_back``: preempted sequences whose KV came back from host memory or disk.

    Of the ``admitted_tokens`` of sequences when they first ran, ``cached_tokens`` were there already.
    """

    num_preemptions: int = 0
    num_yields: int = 0
    num_swapped_back: int = 0
    admitted_tokens: int = 0
    cached_tokens: int = 0
    queue_time: Histogram = field(default_factory=lambda: Histogram(QUEUE_BOUNDS_S))
