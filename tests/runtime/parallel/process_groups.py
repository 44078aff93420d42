"""Stand-ins for ``torch.distributed.ProcessGroupNCCL`` as far as ranks use it."""

from collections.abc import Callable
from typing import Any

import torch

ALONE, TOGETHER = 0, 1  # tags: NCCL has a communicator for each pair of ranks, and one for all


class Work:
    def __init__(self, *waits: Callable[[], object]) -> None:
        self._waits = waits

    def wait(self) -> None:
        for wait in self._waits:
            wait()


class Coalesced:
    """Over gloo: the calls between start and end have one result. A transfer meets only one of its own kind, as the
    two kinds have different communicators in NCCL.
    """

    def __init__(self, gloo: Any) -> None:
        self._gloo = gloo
        self._started: list[Any] | None = None
        self.num_together = 0

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> Any:
        assert tag == 0
        return self._kept(self._gloo.send(tensors, to, ALONE if self._started is None else TOGETHER))

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Any:
        assert tag == 0
        return self._kept(self._gloo.recv(tensors, source, ALONE if self._started is None else TOGETHER))

    def _kept(self, work: Any) -> Any:
        if self._started is not None:
            self._started.append(work)
        return work

    def _start_coalescing(self) -> None:
        assert self._started is None
        self._started = []

    def _end_coalescing(self) -> Work:
        assert self._started, "NCCL has no result of an empty group"
        works, self._started = self._started, None
        self.num_together += 1
        return Work(*(work.wait for work in works))


class Loopback:
    """One rank, which sends to itself."""

    def __init__(self) -> None:
        self._sent: list[torch.Tensor] = []
        self._wanted: list[torch.Tensor] = []

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> Work:
        assert (to, tag) == (0, 0)
        self._sent += tensors
        return Work()

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Work:
        assert (source, tag) == (0, 0)
        self._wanted += tensors
        return Work()

    def _start_coalescing(self) -> None:
        pass

    def _end_coalescing(self) -> Work:
        for into, x in zip(self._wanted, self._sent, strict=True):
            into.copy_(x)
        self._sent, self._wanted = [], []
        return Work()

    def shutdown(self) -> None:
        pass
