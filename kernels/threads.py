"""The threads that run the kernels: torch's own, or a pool of their own. Never pins a thread to a core.

Two pools that both spin between regions fight for the cores, so there is one at a time. ``set_threads`` is for models
whose products are torch's: the kernels then run on the very OpenMP runtime that torch is linked with, where a worker
that has just finished a product takes the kernel at once. ``set_kernel_threads`` is for models whose products are all
ours: torch keeps to one thread and the kernels have their own pool, which never waits for a thread that has not begun.

Measured on two cores after a 16-row bfloat16 product of 33 us: a region of torch's runtime adds 3 us; numba's ``omp``
layer, which loads a second OpenMP runtime whose workers spin against torch's, adds 8 us and now and then 200; its
``workqueue`` layer, whose workers sleep, adds 50, and may not be entered from two Python threads at once. A job of the
own pool costs 2 us. With both cores taken by other processes, 120 products of a 1-row step took 5 ms on the own pool
(at worst 7) and 12 ms on OpenMP (at worst 440), since a region ends only when every thread has had a core.
"""

import ctypes
import os
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from .cpu.pool import Pool, has_pool

Run = Callable[[int, int, int], None]


class Team:
    """The process's kernel threads: process-wide as torch's are. ``run(function, argument, n)``: addresses, threads."""

    def __init__(self) -> None:
        self.pool: Pool | None = None  # None: the threads are torch's
        self._shared = _openmp_run() or _python_run

    @property
    def size(self) -> int:
        return torch.get_num_threads() if self.pool is None else self.pool.num_threads

    def run(self, function: int, argument: int, num_threads: int) -> None:
        pool = self.pool
        (self._shared if pool is None else pool.run)(function, argument, num_threads)

    @property
    def can_replay(self) -> bool:
        """Whether tapes run as fast as the calls on them do: not where the threads are torch's."""
        return self.pool is not None or torch.get_num_threads() == 1

    def share(self, num_threads: int) -> None:
        """Runs on torch's threads from now on."""
        pool, self.pool = self.pool, None
        if pool is not None:
            pool.close()
        torch.set_num_threads(num_threads)

    def own(self, num_threads: int) -> None:
        """Runs on threads that torch does not have from now on."""
        self.share(1)
        if num_threads > 1:
            self.pool = Pool(num_threads)


@cache
def team() -> Team:
    return Team()


def set_threads(num_threads: int) -> int:
    """Lets torch and the kernels share ``num_threads`` threads, 0: one per core; returns their number.

    As with torch, the number holds for calls from this thread and from threads started later.
    """
    count = _count(num_threads)
    team().share(count)
    return count


def set_kernel_threads(num_threads: int) -> int:
    """Gives the kernels ``num_threads`` threads of their own, 0: one per core, and torch one; returns their number.

    Where the system has no such pool, as ``set_threads``.
    """
    count = _count(num_threads)
    if has_pool():
        team().own(count)
    else:
        team().share(count)
    return count


def num_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _count(num_threads: int) -> int:
    if num_threads < 0:
        raise ValueError(f"num_threads={num_threads}: must be 0 (one per core) or more")
    return num_threads or num_cores()


def _openmp_run() -> Run | None:
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        # Looked up through torch's own library, so it is the runtime which that is linked with.
        parallel = ctypes.CDLL(str(library)).GOMP_parallel
    except (OSError, AttributeError):
        return None
    parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None
    return lambda function, argument, num_threads: parallel(function, argument, num_threads, 0)


def _python_run(function: int, argument: int, num_threads: int) -> None:
    """On threads made for the occasion, where torch's runtime is another; they hold no lock in compiled code."""
    body = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)
    others = [threading.Thread(target=body, args=(argument,)) for _ in range(num_threads - 1)]
    for thread in others:
        thread.start()
    body(argument)
    for thread in others:
        thread.join()
