"""What a step needs of a GPU besides kernels: asynchronous copies, CUDA graphs, and one wait a step.

An accelerator runs its work in the order of the calls; only ``Readback.wait`` blocks the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch


class Readback(Protocol):
    """Tensors that are being copied to the host."""

    def wait(self) -> list[torch.Tensor]:
        """Wait for the copies; returns the tensors in host memory."""
        ...


class DeviceGraph(Protocol):
    """Captured kernel calls with fixed addresses; ``replay`` queues all of them in one call."""

    def replay(self) -> None: ...


class Accelerator(Protocol):
    """One device with one queue of work."""

    @property
    def device(self) -> torch.device: ...

    def upload(self, array: np.ndarray) -> torch.Tensor:
        """A copy on the device. The caller may change ``array`` as soon as this returns."""
        ...

    def write(self, array: np.ndarray, into: torch.Tensor) -> None:
        """As ``upload``, but into a tensor: uint8 [N] into the first N bytes of a uint8 tensor."""
        ...

    def download(self, tensors: Sequence[torch.Tensor]) -> Readback: ...

    def capture(self, run: Callable[[], torch.Tensor]) -> tuple[DeviceGraph, torch.Tensor]:
        """A graph of what ``run`` does, and the tensor that holds its result. All graphs share their memory.

        ``run`` is called more than once, so it must be repeatable, and it must not synchronise with the host. The
        result is valid after a replay, until the next replay of any graph.
        """
        ...

    def free_and_total_bytes(self) -> tuple[int, int]:
        """(free, total) memory of the device; memory that torch keeps for later calls counts as free."""
        ...

    def peak_bytes(self, run: Callable[[], object]) -> int:
        """The peak memory of ``run``, beyond what was allocated before."""
        ...


class CudaAccelerator:
    """torch's current stream, pinned host memory, CUDA graphs."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.index is not None:
            torch.cuda.set_device(device)  # kernels run on this thread's current device
        self._pool: Any = None  # torch's handle of the graphs' shared memory
        self._side: torch.cuda.Stream | None = None

    def upload(self, array: np.ndarray) -> torch.Tensor:
        # torch reuses a block of pinned memory only when the copies from it are done.
        return torch.from_numpy(array).pin_memory().to(self.device, non_blocking=True)

    def write(self, array: np.ndarray, into: torch.Tensor) -> None:
        into[: len(array)].copy_(torch.from_numpy(array).pin_memory(), non_blocking=True)

    def download(self, tensors: Sequence[torch.Tensor]) -> CudaReadback:
        held = [torch.empty(x.shape, dtype=x.dtype, pin_memory=True) for x in tensors]
        for to, x in zip(held, tensors, strict=True):
            to.copy_(x, non_blocking=True)
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(self.device))
        return CudaReadback(held, done)

    def capture(self, run: Callable[[], torch.Tensor]) -> tuple[DeviceGraph, torch.Tensor]:
        if self._pool is None or self._side is None:
            self._pool = torch.cuda.graph_pool_handle()
            self._side = torch.cuda.Stream(self.device)
        current, side = torch.cuda.current_stream(self.device), self._side
        side.wait_stream(current)
        with torch.cuda.stream(side):
            run()  # the first call compiles, loads and allocates, which a capture must not do
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=side, capture_error_mode="thread_local"):
            result = run()
        return graph, result

    def free_and_total_bytes(self) -> tuple[int, int]:
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.device)

    def peak_bytes(self, run: Callable[[], object]) -> int:
        self.free_and_total_bytes()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_reserved(self.device)
        run()
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_reserved(self.device) - before


class CudaReadback:
    def __init__(self, held: list[torch.Tensor], done: torch.cuda.Event) -> None:
        self._held, self._done = held, done

    def wait(self) -> list[torch.Tensor]:
        self._done.synchronize()
        return self._held


def accelerator_of(device: torch.device) -> Accelerator | None:
    """None on a CPU, where each call is complete when it returns."""
    return CudaAccelerator(device) if device.type == "cuda" else None
