"""A group of ranks and its collectives, on torch.distributed.

A group is made once for each rank and passed as an argument; there is no default group. All ranks call the same
collectives in the same order. A sum adds in the order of ranks, so every rank gets the same bits, and so does any other
``Group`` with the same shares. Tensors of a GPU go from GPU to GPU over NCCL, those of the host over gloo.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .devices import kind_of, refuse_mixed
from .links import GlooLink, Link, NcclLink, Transfer, Wait
from .lost import GangLost
from .sizes import GPU_SUM_BY_PARTS, SUM_BY_PARTS

LOOPBACK = "127.0.0.1"
CPU = torch.device("cpu")


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
        """Fills x with that of rank ``source``, which may be shorter on the host: then the rest of x stays."""
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
    """Ranks that are processes. ``links``: how they are joined, by the type of a tensor's device."""

    def __init__(
        self,
        links: Mapping[str, Link],
        *,
        rank: int,
        size: int,
        peers: Sequence[int] = (),
        failures: list[str] | None = None,
    ) -> None:
        """``peers``: the links' ranks that this group's ranks are; by default the same. ``failures``: of another group
        on the same links.
        """
        self.links = links
        self.rank, self.size = rank, size
        self._peers = list(peers) or list(range(size))
        self._others = [other for other in range(size) if other != rank]
        self._failures = [] if failures is None else failures  # the first one; every later call fails at once

    def sum(self, x: Tensor) -> Tensor:
        by_parts = SUM_BY_PARTS if x.device.type == "cpu" else GPU_SUM_BY_PARTS
        if x.numel() < by_parts or self.size == 2:
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
        self._move(x, self._with_peers([x] * self.size), self._with_peers(found))
        return found

    def scatter(self, parts: Sequence[Tensor] | None, into: Tensor, *, source: int = 0) -> Tensor:
        if self.rank != source:
            self._move(into, [], [(into, self._peers[source])])
            return into
        assert parts is not None
        self._move(into, self._with_peers(parts), [])
        return into.copy_(parts[source])

    def broadcast(self, x: Tensor, *, source: int = 0) -> None:
        if self.rank == source:
            self._move(x, self._with_peers([x] * self.size), [])
        else:
            self._move(x, [], [(x, self._peers[source])])

    def exchange(self, parts: Sequence[Tensor], into: Sequence[Tensor]) -> None:
        into[self.rank].copy_(parts[self.rank])
        sends, receives = ([pair for pair in self._with_peers(all_) if pair[0].numel()] for all_ in (parts, into))
        self._move(parts[self.rank], sends, receives)

    def send(self, x: Tensor, to: int) -> None:
        self.start_send(x, to)()

    def receive(self, into: Tensor, source: int) -> Tensor:
        self.start_receive(into, source)()
        return into

    def start_send(self, x: Tensor, to: int) -> Wait:
        with self._watched():
            return self._finish(self._link(x).send(x, self._peers[to]), x)

    def start_receive(self, into: Tensor, source: int) -> Wait:
        with self._watched():
            return self._finish(self._link(into).receive(into, self._peers[source]), into)

    def part(self, ranks: Sequence[int]) -> Group:
        if len(ranks) == 1:
            return Alone()
        peers = [self._peers[rank] for rank in ranks]
        own = list(ranks).index(self.rank)
        return Distributed(self.links, rank=own, size=len(peers), peers=peers, failures=self._failures)

    def _link(self, x: Tensor) -> Link:
        return self.links[x.device.type]

    def _move(self, like: Tensor, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> None:
        with self._watched():
            self._link(like).move(sends, receives)()

    def _with_peers(self, tensors: Sequence[Tensor]) -> list[Transfer]:
        """Each other rank's tensor."""
        return [(tensors[other], self._peers[other]) for other in self._others]

    def _finish(self, transfer: Wait, x: Tensor) -> Wait:
        def wait() -> Tensor:
            with self._watched():
                transfer()
            return x  # which lives as long as the transfer

        return wait

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


def connect(
    folder: Path,
    *,
    rank: int,
    size: int,
    timeout_s: float,
    device: torch.device = CPU,
    start_timeout_s: float = 600.0,
) -> Group:
    """This rank's group of ``size`` processes of this machine, which all give the same new ``folder``. With a GPU as
    ``device`` the folder has to stay until the group's end.

    Waits until every rank has called it, at most ``start_timeout_s``. Sockets are bound to loopback. A rank that does
    not take part in a collective within ``timeout_s`` is lost. Raises Unsupported where ranks have different devices.
    """
    if size == 1:
        return Alone()
    try:
        store = dist.FileStore(str(folder / "ranks"), size)
        store.set_timeout(timedelta(seconds=start_timeout_s))
        store.set(f"here {rank}", kind_of(device))  # before the group exists, whose own timeout is short
        store.wait([f"here {other}" for other in range(size)])
        refuse_mixed([store.get(f"here {other}").decode() for other in range(size)])
        group = Distributed(links_of(store, device, rank=rank, size=size, timeout_s=timeout_s), rank=rank, size=size)
        if device.type == "cuda":
            group.gather(torch.zeros(1, device=device))  # all ranks connect here, and parts of them need not
        return group
    except RuntimeError as error:
        raise GangLost(f"rank {rank} of {size} could not reach the others: {error}") from error


def links_of(store: dist.Store, device: torch.device, *, rank: int, size: int, timeout_s: float) -> dict[str, Link]:
    """By the type of a tensor's device: gloo for the host's, and NCCL for those of a GPU where the rank has one."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=LOOPBACK)]
    options._timeout = timedelta(seconds=timeout_s)
    options._threads = 1
    links: dict[str, Link] = {"cpu": GlooLink(gloo(store, rank, size, options))}
    if device.type == "cuda":
        nccl: Any = dist.ProcessGroupNCCL  # only in builds of torch that have NCCL; it connects at its first transfer
        options = nccl.Options()
        options._timeout = timedelta(seconds=timeout_s)
        links["cuda"] = NcclLink(nccl(dist.PrefixStore("gpus", store), rank, size, options))
    return links
