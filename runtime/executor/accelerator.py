"""What a step asks of a GPU besides kernels: copies nobody waits for, graphs, and one wait a step. Never plans a step.

The work given to an accelerator is done in the order in which it is given, by and by; only ``Readback.wait`` waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch


class Readback(Protocol):
    """Tensors on their way to the host."""

    def wait(self) -> list[torch.Tensor]:
        """Their values, in host memory, once the work before them is done."""
        ...


class DeviceGraph(Protocol):
    """Kernel calls with their addresses, made again at once by ``replay``."""

    def replay(self) -> None: ...


class Accelerator(Protocol):
    """One device and one queue of work on it."""

    @property
    def device(self) -> torch.device: ...

    def upload(self, array: np.ndarray) -> torch.Tensor:
        """A copy on the device. ``array`` may be changed as soon as this returns."""
        ...

    def write(self, array: np.ndarray, into: torch.Tensor) -> None:
        """As ``upload``, to a place that stays: uint8 [N] into the first N of a uint8 tensor."""
        ...

    def download(self, tensors: Sequence[torch.Tensor]) -> Readback: ...

    def capture(self, run: Callable[[], torch.Tensor]) -> tuple[DeviceGraph, torch.Tensor]:
        """A graph of what ``run`` does, and where its result will lie; all graphs share their memory.

        ``run`` is called more than once, so doing it again must do no harm, and nothing in it may ask the host. The
        result is there after a replay, and good until a graph is replayed next.
        """
        ...

    def free_and_total_bytes(self) -> tuple[int, int]:
        """The device's memory that nobody has, what is kept for later calls among it, and all of it."""
        ...

    def peak_bytes(self, run: Callable[[], object]) -> int:
        """The most memory that ``run`` takes at a time, beyond what was taken before."""
        ...


class CudaAccelerator:
    """torch's current stream, pinned host memory, CUDA graphs."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool: Any = None  # torch's handle of the memory that all graphs share
        self._side: torch.cuda.Stream | None = None

    def upload(self, array: np.ndarray) -> torch.Tensor:
        # The allocator of pinned memory gives a block to others only when the copies from it are done.
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
            run()  # what is compiled, loaded or allocated at the first call must not be so in the graph
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
    """None on a CPU, which runs each call as it is made."""
    return CudaAccelerator(device) if device.type == "cuda" else None
