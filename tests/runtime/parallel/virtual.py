"""Ranks as threads of one process that take turns: the same shares and sums as processes have, without processes."""

import contextvars
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from phloem.runtime.config import EngineConfig
from phloem.runtime.executor import Accelerator
from phloem.runtime.models import Model
from phloem.runtime.parallel.group import added
from phloem.runtime.parallel.leader import Leader
from phloem.runtime.parallel.lost import GangLost
from phloem.runtime.parallel.rank import Rank, Shape, WeightBytes, copies_of
from phloem.tests.runtime.executor.stand_in import one_call

MAX_TURNS = 200_000  # in one wait: nobody makes progress


class Turns:
    """One thread at a time runs; it hands on when it waits. A failure on any rank ends the waits of all."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.failure: BaseException | None = None
        self.messages: dict[tuple[int, int], deque[torch.Tensor]] = defaultdict(deque)
        self.wanted: dict[tuple[int, int], deque[torch.Tensor]] = defaultdict(deque)
        self._turn = 0
        self._is_over = [False] * size
        self._changed = threading.Condition()

    def enter(self, rank: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._turn == rank)

    def leave(self, rank: int) -> None:
        self._is_over[rank] = True
        self._hand_on(rank)

    def until(self, rank: int, is_true: Callable[[], bool]) -> None:
        for _ in range(MAX_TURNS):
            if is_true():
                return
            if self.failure is not None:
                raise GangLost(f"rank {rank} waits for a rank that failed: {self.failure}")
            if all(over for other, over in enumerate(self._is_over) if other != rank):
                raise GangLost(f"rank {rank} waits for ranks that have ended")
            self._hand_on(rank)
            with self._changed:
                self._changed.wait_for(lambda: self._turn == rank)
        raise AssertionError("the ranks wait for each other")

    def _hand_on(self, rank: int) -> None:
        with self._changed:
            following = [(rank + step) % self.size for step in range(1, self.size + 1)]
            self._turn = next((other for other in following if not self._is_over[other]), rank)
            self._changed.notify_all()


class VirtualGroup:
    """One rank's end: messages are queues."""

    def __init__(self, turns: Turns, rank: int, peers: Sequence[int] = ()) -> None:
        self._turns = turns
        self._peers = list(peers) or list(range(turns.size))
        self.rank, self.size = rank, len(self._peers)
        self._others = [other for other in range(self.size) if other != rank]
        self.num_sent = 0

    def wait_until(self, is_true: Callable[[], bool]) -> None:
        self._turns.until(self._peers[self.rank], is_true)

    def part(self, ranks: Sequence[int]) -> "VirtualGroup":
        return type(self)(self._turns, list(ranks).index(self.rank), [self._peers[rank] for rank in ranks])

    def num_waiting(self, source: int) -> int:
        """Messages that rank ``source`` has sent to this one and that it has not received."""
        return len(self._turns.messages[self._peers[source], self._peers[self.rank]])

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return added(self.gather(x))

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        for other in self._others:
            self.send(x, other)
        return [x if other == self.rank else self.receive(torch.empty_like(x), other) for other in range(self.size)]

    def scatter(self, parts: Sequence[torch.Tensor] | None, into: torch.Tensor, *, source: int = 0) -> torch.Tensor:
        if self.rank != source:
            return self.receive(into, source)
        assert parts is not None
        for other in self._others:
            self.send(parts[other], other)
        return into.copy_(parts[source])

    def broadcast(self, x: torch.Tensor, *, source: int = 0) -> None:
        if self.rank == source:
            for other in self._others:
                self.send(x, other)
        else:
            self.receive(x, source)

    def exchange(self, parts: Sequence[torch.Tensor], into: Sequence[torch.Tensor]) -> None:
        into[self.rank].copy_(parts[self.rank])
        for other in self._others:
            self.send(parts[other], other)
        for other in self._others:
            self.receive(into[other], other)

    def send(self, x: torch.Tensor, to: int) -> None:
        self.num_sent += 1
        self._turns.messages[self._peers[self.rank], self._peers[to]].append(x.clone())

    def start_send(self, x: torch.Tensor, to: int) -> Callable[[], object]:
        self.send(x, to)
        return lambda: None

    def start_receive(self, into: torch.Tensor, source: int) -> Callable[[], object]:
        channel = self._peers[source], self._peers[self.rank]
        queue, wanted = self._turns.messages[channel], self._turns.wanted[channel]
        wanted.append(into)

        def wait() -> None:
            while any(one is into for one in wanted):  # messages come in the order in which they were wanted
                self.wait_until(lambda: bool(queue))
                first, found = wanted.popleft(), queue.popleft()
                if found.ndim == 1 and len(found) < len(first):
                    first = first[: len(found)]  # a broadcast may be shorter
                assert found.shape == first.shape and found.dtype == first.dtype, "two ranks disagree about a message"
                first.copy_(found)

        return wait

    def receive(self, into: torch.Tensor, source: int) -> torch.Tensor:
        self.start_receive(into, source)()
        return into


class CapturedGroup(VirtualGroup):
    """Each collective is one call of a stand-in's graph, as over NCCL."""

    def __init__(self, turns: Turns, rank: int, peers: Sequence[int] = ()) -> None:
        super().__init__(turns, rank, peers)
        for name in ("sum", "gather", "exchange", "broadcast"):
            setattr(self, name, one_call(name, getattr(self, name)))


class VirtualRanks:
    """Runs ``body(group)`` for every rank from 1 on a thread of its own; rank 0 is the caller's thread.

    ``group`` is rank 0's. ``end`` waits for the others, which must have been told to return. All use the backend of
    kernels that the caller uses.
    """

    def __init__(
        self, size: int, body: Callable[[VirtualGroup], Any], *, kind: type[VirtualGroup] = VirtualGroup
    ) -> None:
        self._turns = Turns(size)
        self._kind = kind
        self.results: list[Any] = [None] * size
        self.group = kind(self._turns, 0)
        contexts = [contextvars.copy_context() for _ in range(1, size)]
        self._threads = [
            threading.Thread(target=context.run, args=(self._run, rank, body), name=f"rank {rank}", daemon=True)
            for rank, context in enumerate(contexts, start=1)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, rank: int, body: Callable[[VirtualGroup], Any]) -> None:
        self._turns.enter(rank)
        try:
            self.results[rank] = body(self._kind(self._turns, rank))
        except BaseException as error:
            self._turns.failure = error
        finally:
            self._turns.leave(rank)

    def end(self) -> list[Any]:
        self._turns.leave(0)
        for thread in self._threads:
            thread.join(60.0)
            assert not thread.is_alive(), "a rank has not returned"
        if self._turns.failure is not None:
            raise self._turns.failure
        return self.results


def run_all(size: int, body: Callable[[VirtualGroup], Any]) -> list[Any]:
    """``body`` on every rank; the results in the order of ranks."""
    ranks = VirtualRanks(size, body)
    try:
        ranks.results[0] = body(ranks.group)
    except BaseException:
        ranks.end()
        raise
    return ranks.end()


class VirtualGang:
    """A ``Gang`` whose ranks are threads of this process. ``accelerators``: of the ranks from 1 on."""

    def __init__(self, config: EngineConfig, accelerators: Sequence[Accelerator] = ()) -> None:
        self._config, self._accelerators = config, accelerators
        self._shape: Shape | None = None
        self._leader: Leader | None = None
        self.loaded: dict[int, Rank] = {}
        kind = CapturedGroup if accelerators else VirtualGroup
        self.ranks = VirtualRanks(config.num_ranks, self._run, kind=kind)
        self.group = self.ranks.group

    @property
    def weights(self) -> list[WeightBytes]:
        return [self.loaded[rank].weight_bytes for rank in range(1, self.group.size)]

    def _run(self, group: VirtualGroup) -> int:
        accelerator = self._accelerators[group.rank - 1] if self._accelerators else None
        rank = self.loaded[group.rank] = Rank(self._config, group, accelerator=accelerator)
        group.wait_until(lambda: self._shape is not None)
        assert self._shape is not None
        return rank.follow(self._shape)

    def begin(self, model: Model, shape: Shape) -> Leader:
        self._shape = shape
        self.group.wait_until(lambda: len(self.loaded) == self.group.size - 1)
        copies = copies_of(model, self.group, self._config)
        self._leader = Leader(self.group, model, num_tokens=shape.num_tokens, beat_s=1e9, copies=copies)
        return self._leader

    def close(self) -> None:
        if self._leader is not None:
            self._leader.close()
        self.ranks.end()
