"""The waiting queue: by priority and tenant, ordered within each, with a bound on how often a sequence is overtaken.

The bound: the k-th sequence of a priority and tenant to arrive is admitted as the (k + max_overtaken)-th at the latest,
in any order. A sequence that has been overtaken ``max_overtaken`` times is *due* and goes first; each admission makes
at most one more sequence due.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping
from heapq import heapify, heappop, heappush
from random import Random

from .lengths import Lengths
from .sequence import Sequence

MAX_IDLE = 256  # empty queues and idle tenants whose counters are kept

Rank = tuple[float, ...]
Order = Callable[[Sequence, Lengths], Rank]


def first_come(seq: Sequence, lengths: Lengths) -> Rank:
    """In the order of arrival."""
    return (seq.order,)


def oldest_program(seq: Sequence, lengths: Lengths) -> Rank:
    """Earliest deadline, then the oldest program: programs that have begun end before new ones begin."""
    return (seq.deadline_s, seq.program_order, seq.order)


def shortest(seq: Sequence, lengths: Lengths) -> Rank:
    """Earliest deadline, then least work left, as ``Lengths`` estimates it."""
    return (seq.deadline_s, lengths.work(seq), seq.order)


def at_random(seq: Sequence, lengths: Lengths) -> Rank:
    """In an order that follows from nothing: what the other orders gain is measured against it."""
    return (Random(seq.order).random(),)


ORDERS: dict[str, Order] = {
    "first_come": first_come,
    "random": at_random,
    "oldest_program": oldest_program,
    "shortest": shortest,
    "shortest_remaining": shortest,
}
PREEMPTIVE = frozenset({"shortest_remaining"})  # a running sequence may be preempted for a shorter one


class Queue:
    """The waiting sequences of one priority and tenant, sorted by rank. A rank is computed once, in ``add``."""

    __slots__ = ("_arrivals", "max_overtaken", "num_left", "ranked")

    def __init__(self, max_overtaken: int, *, num_left: int = 0) -> None:
        self.max_overtaken = max_overtaken
        self.ranked: list[tuple[Rank, int, Sequence]] = []
        # A heap of (due, order, sequence); entries of sequences that have left are skipped.
        self._arrivals: list[tuple[int, int, Sequence]] = []
        self.num_left = num_left  # sequences that have left it

    def add(self, seq: Sequence, rank: Rank) -> None:
        if seq.due < 0:
            seq.due = self.num_left + len(self.ranked) + self.max_overtaken
        else:
            self.num_left -= 1  # preempted: it returns to its old place
        seq.rank = rank
        insort(self.ranked, (rank, seq.order, seq))
        heappush(self._arrivals, (seq.due, seq.order, seq))

    def discard(self, seq: Sequence) -> None:
        index = bisect_left(self.ranked, (seq.rank, seq.order))
        assert self.ranked[index][2] is seq, seq
        del self.ranked[index]
        self.num_left += 1
        seq.rank = ()
        if len(self._arrivals) > 64 + 4 * len(self.ranked):
            self._arrivals = [(other.due, other.order, other) for _, _, other in self.ranked]
            heapify(self._arrivals)

    def head(self, window: int, matched: Callable[[Sequence], int]) -> Sequence:
        """The next to be admitted: a due sequence, else the one with most cached tokens among the first ``window``."""
        while self._arrivals and not self._waits(self._arrivals[0]):
            heappop(self._arrivals)
        if self._arrivals and self._arrivals[0][0] <= self.num_left:
            return self._arrivals[0][2]
        if window <= 1:
            return self.ranked[0][2]
        best = max(range(min(window, len(self.ranked))), key=lambda i: (matched(self.ranked[i][2]), -i))
        return self.ranked[best][2]

    @staticmethod
    def _waits(entry: tuple[int, int, Sequence]) -> bool:
        return bool(entry[2].rank) and entry[2].order == entry[1]


class Waiting:
    """All queues, and the tokens that each tenant was served: of equal priorities the least served tenant goes first.

    Weighted fairness by virtual token counters (Sheng et al., 2024): a tenant that returns after a pause starts at the
    lowest counter of the waiting tenants, so it gains nothing by pausing.
    """

    def __init__(
        self, order: Order, *, lengths: Lengths, max_overtaken: int, tenant_weights: Mapping[str, float]
    ) -> None:
        self.order = order
        self.lengths = lengths
        self.max_overtaken = max_overtaken
        self.tenant_weights = tenant_weights
        self.served: dict[str, float] = {}
        self.queues: dict[tuple[int, str], Queue] = {}
        self._num = 0
        self._num_left = 0  # the greatest ``num_left`` of a queue that was forgotten
        self._last_served = 0.0

    def __len__(self) -> int:
        return self._num

    def __iter__(self) -> Iterator[Sequence]:
        return (entry[2] for queue in self.queues.values() for entry in queue.ranked)

    def add(self, seq: Sequence) -> None:
        key = (seq.priority, seq.tenant)
        queue = self.queues.get(key)
        if queue is None:
            if len(self.queues) >= 2 * MAX_IDLE or len(self.served) >= 2 * MAX_IDLE:
                self._forget_idle()
            queue = self.queues[key] = Queue(self.max_overtaken, num_left=self._num_left)
        self._lift(seq.tenant)
        queue.add(seq, self.order(seq, self.lengths))
        self._num += 1

    def discard(self, seq: Sequence) -> None:
        self.queues[seq.priority, seq.tenant].discard(seq)
        self._num -= 1

    def head(self, window: int, matched: Callable[[Sequence], int]) -> Sequence | None:
        best: tuple[int, float, str] | None = None
        for (priority, tenant), queue in self.queues.items():
            if queue.ranked:
                place = (priority, self.served[tenant], tenant)
                best = place if best is None or place < best else best
        if best is None:
            return None
        self._last_served = best[1]
        return self.queues[best[0], best[2]].head(window, matched)

    @property
    def most_urgent(self) -> float:
        """The lowest priority number of the waiting sequences; infinity if there are none."""
        return min((priority for (priority, _), queue in self.queues.items() if queue.ranked), default=math.inf)

    def is_due(self, seq: Sequence) -> bool:
        """Whether ``seq``, which may be running, has been overtaken ``max_overtaken`` times."""
        queue = self.queues.get((seq.priority, seq.tenant))
        return seq.due <= (self._num_left if queue is None else queue.num_left)

    def charge(self, tenant: str, cost: float) -> None:
        """``tenant`` was served ``cost`` tokens."""
        self.served[tenant] = self.served.get(tenant, 0.0) + cost / self.tenant_weights.get(tenant, 1.0)

    def _forget_idle(self) -> None:
        """Bound the memory, as clients choose tenants' names: keep the ``MAX_IDLE`` most served of the idle tenants."""
        for key in [key for key, queue in self.queues.items() if not queue.ranked]:
            self._num_left = max(self._num_left, self.queues.pop(key).num_left)
        waiting = {tenant for _, tenant in self.queues}
        idle = sorted((tenant for tenant in self.served if tenant not in waiting), key=self.served.__getitem__)
        for tenant in idle[: max(0, len(idle) - MAX_IDLE)]:
            del self.served[tenant]

    def _lift(self, tenant: str) -> None:
        """Raise the counter of a tenant that begins to wait to the lowest counter of the waiting tenants."""
        others = set()
        for (_, other), queue in self.queues.items():
            if queue.ranked:
                if other == tenant:
                    return
                others.add(other)
        floor = min((self.served[other] for other in others), default=self._last_served)
        self.served[tenant] = max(self.served.get(tenant, 0.0), floor)
