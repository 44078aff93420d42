"""Who waits, and who goes next: queues by priority and tenant, an order within each, and a bound on being overtaken.

The bound: of one priority and tenant, the k-th to come is admitted as the (k + max_overtaken)-th at the latest, in
whatever order. (At most one more becomes due with each admission, and who is due goes first.) Never looks at slots.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping
from heapq import heapify, heappop, heappush

from .lengths import Lengths
from .sequence import Sequence

MAX_IDLE = 256  # queues and tenants that nobody waits in, kept for their counters

Rank = tuple[float, ...]
Order = Callable[[Sequence, Lengths], Rank]


def first_come(seq: Sequence, lengths: Lengths) -> Rank:
    """In the order of arrival."""
    return (seq.order,)


def oldest_program(seq: Sequence, lengths: Lengths) -> Rank:
    """Earliest deadline, then calls of the program that began first: what was begun is ended before more is begun."""
    return (seq.deadline_s, seq.program_order, seq.order)


def shortest(seq: Sequence, lengths: Lengths) -> Rank:
    """Earliest deadline, then least work left, as far as that is known or can be told from others of its kind."""
    return (seq.deadline_s, lengths.work(seq), seq.order)


ORDERS: dict[str, Order] = {
    "first_come": first_come,
    "oldest_program": oldest_program,
    "shortest": shortest,
    "shortest_remaining": shortest,
}
PREEMPTIVE = frozenset({"shortest_remaining"})  # where one that runs makes way for a shorter one


class Queue:
    """The waiting sequences of one priority and tenant, sorted by rank; ranks stay while a sequence waits."""

    __slots__ = ("_arrivals", "max_overtaken", "num_left", "ranked")

    def __init__(self, max_overtaken: int, *, num_left: int = 0) -> None:
        self.max_overtaken = max_overtaken
        self.ranked: list[tuple[Rank, int, Sequence]] = []
        self._arrivals: list[tuple[int, int, Sequence]] = []  # heap: (due, ticket, sequence), dead entries skipped
        self.num_left = num_left  # sequences that have left it

    def add(self, seq: Sequence, rank: Rank) -> None:
        if seq.due < 0:
            seq.due = self.num_left + len(self.ranked) + self.max_overtaken
        else:
            self.num_left -= 1  # it comes back, to the place it had
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
        """Who goes next: whoever is due, else the longest match among the first ``window``, else the first."""
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
    """All queues, and what each tenant was served: among equal priorities the least served tenant goes first.

    Weighted fairness by virtual token counters (Sheng et al., 2024): a tenant that comes back after a pause starts at
    the least counter of those that wait, so a pause earns nothing.
    """

    def __init__(
        self, order: Order, *, lengths: Lengths, max_overtaken: int, tenant_weights: Mapping[str, float]
    ) -> None:
        self.order = order
        self.lengths = lengths
        self.max_overtaken = max_overtaken
        self.tenant_weights = tenant_weights
        self.served: dict[str, float] = {}
        self._queues: dict[tuple[int, str], Queue] = {}
        self._num = 0
        self._num_left = 0  # in the queue forgotten with most
        self._last_served = 0.0

    def __len__(self) -> int:
        return self._num

    def __iter__(self) -> Iterator[Sequence]:
        return (entry[2] for queue in self._queues.values() for entry in queue.ranked)

    def add(self, seq: Sequence) -> None:
        key = (seq.priority, seq.tenant)
        queue = self._queues.get(key)
        if queue is None:
            if len(self._queues) >= 2 * MAX_IDLE or len(self.served) >= 2 * MAX_IDLE:
                self._forget_idle()
            queue = self._queues[key] = Queue(self.max_overtaken, num_left=self._num_left)
        self._lift(seq.tenant)
        queue.add(seq, self.order(seq, self.lengths))
        self._num += 1

    def discard(self, seq: Sequence) -> None:
        self._queues[seq.priority, seq.tenant].discard(seq)
        self._num -= 1

    def head(self, window: int, matched: Callable[[Sequence], int]) -> Sequence | None:
        best: tuple[int, float, str] | None = None
        for (priority, tenant), queue in self._queues.items():
            if queue.ranked:
                place = (priority, self.served[tenant], tenant)
                best = place if best is None or place < best else best
        if best is None:
            return None
        self._last_served = best[1]
        return self._queues[best[0], best[2]].head(window, matched)

    @property
    def most_urgent(self) -> float:
        """The least priority number of those that wait; infinity where nobody does."""
        return min((priority for (priority, _), queue in self._queues.items() if queue.ranked), default=math.inf)

    def is_due(self, seq: Sequence) -> bool:
        """Whether ``seq``, which may be running, has been overtaken as often as may be."""
        queue = self._queues.get((seq.priority, seq.tenant))
        return seq.due <= (self._num_left if queue is None else queue.num_left)

    def charge(self, tenant: str, cost: float) -> None:
        """``tenant`` was served ``cost`` tokens."""
        self.served[tenant] = self.served.get(tenant, 0.0) + cost / self.tenant_weights.get(tenant, 1.0)

    def _forget_idle(self) -> None:
        """Tenants' names come from clients: of those who wait for nothing only the most served are remembered."""
        for key in [key for key, queue in self._queues.items() if not queue.ranked]:
            self._num_left = max(self._num_left, self._queues.pop(key).num_left)
        waiting = {tenant for _, tenant in self._queues}
        idle = sorted((tenant for tenant in self.served if tenant not in waiting), key=self.served.__getitem__)
        for tenant in idle[: max(0, len(idle) - MAX_IDLE)]:
            del self.served[tenant]

    def _lift(self, tenant: str) -> None:
        others = set()
        for (_, other), queue in self._queues.items():
            if queue.ranked:
                if other == tenant:
                    return
                others.add(other)
        floor = min((self.served[other] for other in others), default=self._last_served)
        self.served[tenant] = max(self.served.get(tenant, 0.0), floor)
