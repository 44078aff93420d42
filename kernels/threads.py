"""The threads that run the CPU kernels: torch's own, or the kernels' own pool.

Two pools that both spin while they wait compete for the cores, so only one is in use. ``set_threads`` is for models
whose products are torch's: the kernels run on the OpenMP runtime that torch is linked with, where a worker that has
finished a product takes the kernel at once. ``set_kernel_threads`` is for models whose products are all ours: torch has
one thread, and the kernels have their own pool, which waits for no thread that has not started.

Measured on two cores after a 16-row bfloat16 product of 33 us: a region of torch's runtime adds 3 us. numba's ``omp``
layer loads a second OpenMP runtime, whose workers spin beside torch's: it adds 8 us and sometimes 200. numba's
``workqueue`` layer, whose workers sleep, adds 50 us and cannot be entered from two Python threads at once. A job of the
own pool adds 2 us. With both cores busy with other processes, 120 products of a 1-row step took 5 ms on the own pool
(at most 7) and 12 ms on OpenMP (at most 440), because a region ends only when every thread has had a core.
"""

import ctypes
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from .. import processor
from .cpu.pool import Pool, has_pool

Run = Callable[[int, int, int], None]


class Team:
    """The process's kernel threads, one team for the whole process, as with torch.

    ``run(function, argument, n)`` calls the function at one address with another address, on up to n threads.
    """

    def __init__(self) -> None:
        self.pool: Pool | None = None  # None: the threads are torch's
        self._shared = openmp_run() or python_run

    @property
    def size(self) -> int:
        return torch.get_num_threads() if self.pool is None else self.pool.num_threads

    def run(self, function: int, argument: int, num_threads: int) -> None:
        pool = self.pool
        (self._shared if pool is None else pool.run)(function, argument, num_threads)

    @property
    def can_replay(self) -> bool:
        """Whether a tape is as fast as its calls made one by one: not on torch's threads, of which a tape uses one."""
        return self.pool is not None or torch.get_num_threads() == 1

    def share(self, num_threads: int) -> None:
        """Switches to torch's threads."""
        pool, self.pool = self.pool, None
        if pool is not None:
            pool.close()
        torch.set_num_threads(num_threads)

    def own(self, num_threads: int) -> None:
        """Switches to a pool of its own, and torch to one thread."""
        self.share(1)
        if num_threads > 1:
            self.pool = Pool(num_threads)


@cache
def team() -> Team:
    return Team()


def set_threads(num_threads: int) -> int:
    """Lets torch and the kernels share ``num_threads`` threads, 0: one per core; returns their number.

    As with torch, the number applies to calls from this thread and from threads started later.
    """
    count = _count(num_threads)
    team().share(count)
    return count


def set_kernel_threads(num_threads: int) -> int:
    """Gives the kernels ``num_threads`` threads of their own, 0: one per core, and torch one; returns their number.

    On a system without such a pool it does what ``set_threads`` does.
    """
    count = _count(num_threads)
    if has_pool():
        team().own(count)
    else:
        team().share(count)
    return count


def _count(num_threads: int) -> int:
    if num_threads < 0:
        raise ValueError(f"num_threads={num_threads}: must be 0 (one per core) or more")
    return num_threads or processor.num_cores()


def openmp_run() -> Run | None:
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        # Looked up through torch's library, so it is the runtime that torch is linked with.
        parallel = ctypes.CDLL(str(library)).GOMP_parallel
    except (OSError, AttributeError):
        return None
    parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None
    return lambda function, argument, num_threads: parallel(function, argument, num_threads, 0)


def python_run(function: int, argument: int, num_threads: int) -> None:
    """Starts threads for one call, where torch has another runtime than OpenMP. Compiled code holds no lock."""
    body = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)
    others = [threading.Thread(target=body, args=(argument,)) for _ in range(num_threads - 1)]
    for thread in others:
        thread.start()
    body(argument)
    for thread in others:
        thread.join()
