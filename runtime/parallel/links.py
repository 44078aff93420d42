"""How tensors go from rank to rank: over gloo in host memory, over NCCL from GPU to GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

Wait = Callable[[], object]
Transfer = tuple[Tensor, int]  # a tensor, and the rank that it goes to or comes from


class Link(Protocol):
    """Tensors are contiguous. They stay as they are, and are filled, until the result of a call has been called."""

    def move(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> Wait:
        """One rank's transfers in a collective. The ranks that it names call ``move`` too."""
        ...

    def send(self, x: Tensor, to: int) -> Wait:
        """Rank ``to`` calls ``receive``."""
        ...

    def receive(self, into: Tensor, source: int) -> Wait: ...


class GlooLink:
    """A wait blocks the host.

    Tensors are copied by sends and receives alone: one thread hop each, where gloo's own collectives take several.
    """

    def __init__(self, process_group: Any) -> None:
        self.process_group = process_group

    def move(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> Wait:
        works = [self.process_group.send([x], to, 0) for x, to in sends]
        works += [self.process_group.recv([into], source, 0) for into, source in receives]

        def wait() -> None:
            for work in works:
                work.wait()

        return wait

    def send(self, x: Tensor, to: int) -> Wait:
        return self.process_group.send([x], to, 0).wait

    def receive(self, into: Tensor, source: int) -> Wait:
        return self.process_group.recv([into], source, 0).wait


class NcclLink:
    """Calls queue work on the GPU, and a wait makes torch's current stream wait, not the host. So the host runs ahead,
    and a CUDA graph can capture a collective.

        communicator of all ranks    move: all transfers of a collective are one kernel
        of each pair of ranks        send, receive: one that waits for another stage holds up no collective

    NCCL connects a pair at its first transfer.
    """

    def __init__(self, process_group: Any) -> None:
        """``process_group``: a ``torch.distributed.ProcessGroupNCCL``."""
        self._group = process_group

    def move(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> Wait:
        if not sends and not receives:
            return lambda: None
        self._group._start_coalescing()
        for x, to in sends:
            self._group.send([x], to, 0)
        for into, source in receives:
            self._group.recv([into], source, 0)
        return self._group._end_coalescing().wait

    def send(self, x: Tensor, to: int) -> Wait:
        return self._group.send([x], to, 0).wait

    def receive(self, into: Tensor, source: int) -> Wait:
        return self._group.recv([into], source, 0).wait

    def close(self) -> None:
        """Free the communicators. CUDA graphs that captured their transfers have to be freed before: until they are,
        NCCL waits.
        """
        self._group.shutdown()
