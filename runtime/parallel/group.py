"""A group of ranks and its collectives, on torch.distributed.

A group is made once for each rank and passed as an argument; there is no default group. All ranks call the same
collectives in the same order. A sum adds in the order of ranks, so every rank gets the same bits, and so does any other
``Group`` with the same shares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .lost import GangLost
from .sizes import SUM_BY_PARTS

LOOPBACK = "127.0.0.1"


class Group(Protocol):
    """``size`` ranks; ``rank`` is this one, from 0. Every method raises GangLost when a rank has ended or is silent."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def sum(self, x: Tensor) -> Tensor:
        """The sum of every rank's x, added in float32 in the order of ranks and rounded once to x's type."""
        ...

    def gather(self, x: Tensor) -> list[Tensor]:
        """Every rank's x, in the order of ranks; all have one shape. ``x`` itself is this rank's entry."""
        ...

    def scatter(self, parts: Sequence[Tensor] | None, into: Tensor, *, source: int = 0) -> Tensor:
        """Entry ``rank`` of the ``parts`` that rank ``source`` gives, in ``into``; other ranks give None."""
        ...

    def broadcast(self, x: Tensor, *, source: int = 0) -> None:
        """Fills x with that of rank ``source``."""
        ...

    def exchange(self, parts: Sequence[Tensor], into: Sequence[Tensor]) -> None:
        """Sends ``parts[r]`` to each rank r; ``into[r]`` is filled with what rank r has for this one. Parts may have
        different shapes, also none.
        """
        ...

    def send(self, x: Tensor, to: int) -> None:
        """Returns once x may be changed."""
        ...

    def receive(self, into: Tensor, source: int) -> Tensor:
        """Fills ``into`` with the next tensor that rank ``source`` sends to this one, of the same shape and type."""
        ...

    def start_send(self, x: Tensor, to: int) -> Wait:
        """As ``send``, without waiting: x stays as it is until the result has been called."""
        ...

    def start_receive(self, into: Tensor, source: int) -> Wait:
        """As ``receive``, without waiting: ``into`` is filled once the result has been called."""
        ...

    def part(self, ranks: Sequence[int]) -> Group:
        """The group of some of these ranks, among them this one: its ranks 0, 1, ... It makes no connection."""
        ...


Wait = Callable[[], object]


class Alone:
    """The group of one rank: nothing is sent."""

    rank, size = 0, 1

    def sum(self, x: Tensor) -> Tensor:
        return x

    def gather(self, x: Tensor) -> list[Tensor]:
        return [x]

    def scatter(self, parts: Sequence[Tensor] | None, into: Tensor, *, source: int = 0) -> Tensor:
        assert parts is not None and source == 0
        return into.copy_(parts[0])

    def broadcast(self, x: Tensor, *, source: int = 0) -> None:
        assert source == 0

    def exchange(self, parts: Sequence[Tensor], into: Sequence[Tensor]) -> None:
        into[0].copy_(parts[0])

    def send(self, x: Tensor, to: int) -> None:
        raise ValueError(f"send to rank {to}: a group of one rank has no other")

    def receive(self, into: Tensor, source: int) -> Tensor:
        raise ValueError(f"receive from rank {source}: a group of one rank has no other")

    def start_send(self, x: Tensor, to: int) -> Wait:
        raise ValueError(f"send to rank {to}: a group of one rank has no other")

    def start_receive(self, into: Tensor, source: int) -> Wait:
        raise ValueError(f"receive from rank {source}: a group of one rank has no other")

    def part(self, ranks: Sequence[int]) -> Group:
        return self


class Distributed:
    """Ranks that are processes, joined by a process group of torch.distributed.

    Tensors are copied by sends and receives alone: one thread hop each, where gloo's own collectives take several.
    """

    def __init__(
        self, process_group: Any, *, rank: int, size: int, peers: Sequence[int] = (), failures: list[str] | None = None
    ) -> None:
        """``peers``: the process group's ranks that this group's ranks are; by default the same. ``failures``: of
        another group on the same transport.
        """
        self._transport = process_group
        self.rank, self.size = rank, size
        self._peers = list(peers) or list(range(size))
        self._others = [other for other in range(size) if other != rank]
        self._failures = [] if failures is None else failures  # the first one; every later call fails at once

    def sum(self, x: Tensor) -> Tensor:
        if x.numel() < SUM_BY_PARTS or self.size == 2:
            return added(self.gather(x.contiguous()))
        # Rank r adds the r-th part of every rank's x, then all ranks get all sums: 2 (N - 1) / N of x is sent.
        flat = x.contiguous().view(-1)
        part_len = -(-len(flat) // self.size)
        padded = torch.nn.functional.pad(flat, (0, part_len * self.size - len(flat)))
        received = torch.empty_like(padded).view(self.size, part_len)
        self.exchange(padded.view(self.size, part_len).unbind(0), received.unbind(0))
        total = added(received.unbind(0))
        return torch.cat(self.gather(total))[: len(flat)].view(x.shape)

    def gather(self, x: Tensor) -> list[Tensor]:
        found = [x if rank == self.rank else torch.empty_like(x) for rank in range(self.size)]
        with self._watched():
            self._wait([*self._sends(x), *self._receives(found)])
        return found

    def scatter(self, parts: Sequence[Tensor] | None, into: Tensor, *, source: int = 0) -> Tensor:
        if self.rank != source:
            return self.receive(into, source)
        assert parts is not None
        with self._watched():
            self._wait([self._send(parts[other], other) for other in self._others])
        return into.copy_(parts[source])

    def broadcast(self, x: Tensor, *, source: int = 0) -> None:
        with self._watched():
            if self.rank == source:
                self._wait(self._sends(x))
            else:
                self._wait([self._receive(x, source)])

    def exchange(self, parts: Sequence[Tensor], into: Sequence[Tensor]) -> None:
        into[self.rank].copy_(parts[self.rank])
        with self._watched():
            sends = [self._send(parts[other], other) for other in self._others if parts[other].numel()]
            receives = [self._receive(into[other], other) for other in self._others if into[other].numel()]
            self._wait([*sends, *receives])

    def send(self, x: Tensor, to: int) -> None:
        with self._watched():
            self._wait([self._send(x, to)])

    def receive(self, into: Tensor, source: int) -> Tensor:
        with self._watched():
            self._wait([self._receive(into, source)])
        return into

    def start_send(self, x: Tensor, to: int) -> Wait:
        with self._watched():
            return self._finish(self._send(x, to), x)

    def start_receive(self, into: Tensor, source: int) -> Wait:
        with self._watched():
            return self._finish(self._receive(into, source), into)

    def part(self, ranks: Sequence[int]) -> Group:
        if len(ranks) == 1:
            return Alone()
        peers = [self._peers[rank] for rank in ranks]
        own = list(ranks).index(self.rank)
        return Distributed(self._transport, rank=own, size=len(peers), peers=peers, failures=self._failures)

    def _finish(self, work: Any, x: Tensor) -> Wait:
        def wait() -> Tensor:
            with self._watched():
                work.wait()
            return x  # which lives as long as the transfer

        return wait

    def _send(self, x: Tensor, to: int) -> Any:
        return self._transport.send([x], self._peers[to], 0)

    def _receive(self, into: Tensor, source: int) -> Any:
        return self._transport.recv([into], self._peers[source], 0)

    def _sends(self, x: Tensor) -> list[Any]:
        return [self._send(x, other) for other in self._others]

    def _receives(self, into: Sequence[Tensor]) -> list[Any]:
        return [self._receive(into[other], other) for other in self._others]

    @staticmethod
    def _wait(works: list[Any]) -> None:
        for work in works:
            work.wait()

    @contextmanager
    def _watched(self) -> Iterator[None]:
        if self._failures:
            raise GangLost(self._failures[0])
        try:
            yield
        except RuntimeError as error:
            self._failures.append(f"rank {self.rank} of {self.size} lost another rank: {_reason(error)}")
            raise GangLost(self._failures[0]) from error


def added(parts: Sequence[Tensor]) -> Tensor:
    """The sum of ``parts`` in their order, in float32, rounded once to their type."""
    total = parts[0].to(torch.float32, copy=True)
    for part in parts[1:]:
        total += part
    return total.to(parts[0].dtype)


def _reason(error: RuntimeError) -> str:
    """gloo's message without its source file and advice."""
    return str(error).partition("] ")[2].partition(". This is")[0] or str(error)


def connect(folder: Path, *, rank: int, size: int, timeout_s: float, start_timeout_s: float = 600.0) -> Group:
    """This rank's group of ``size`` processes of this machine, which all give the same new ``folder``.

    Waits until every rank has called it, at most ``start_timeout_s``. Sockets are bound to loopback. A rank that does
    not take part in a collective within ``timeout_s`` is lost.
    """
    if size == 1:
        return Alone()
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=LOOPBACK)]
    options._timeout = timedelta(seconds=timeout_s)
    options._threads = 1
    try:
        store = dist.FileStore(str(folder / "ranks"), size)
        store.set_timeout(timedelta(seconds=start_timeout_s))
        store.set(f"here {rank}", "1")  # before the group exists, whose own timeout is short
        store.wait([f"here {other}" for other in range(size)])
        return Distributed(gloo(store, rank, size, options), rank=rank, size=size)
    except RuntimeError as error:
        raise GangLost(f"rank {rank} of {size} could not reach the others: {error}") from error
