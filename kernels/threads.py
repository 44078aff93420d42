"""The threads that torch and the compiled kernels share. Never pins a thread to a core.

Both run on one OpenMP pool: ``run_team`` calls the very runtime that torch is linked with, so a worker that has just
finished a matrix product, and still spins for the next region, takes the kernel at once. Measured on two cores after a
16-row bfloat16 product of 33 us: a region of this pool adds 3 us; numba's ``omp`` layer, which loads a second OpenMP
runtime whose workers spin against torch's, adds 8 us and now and then 200; its ``workqueue`` layer, whose workers
sleep, adds 50, and may not be entered from two Python threads at once. Where the runtime has no ``GOMP_parallel``
(Windows), a region gets short-lived Python threads, which hold no lock while they run compiled code.
"""

import ctypes
import os
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

Team = Callable[[int, int, int], None]


def set_threads(num_threads: int) -> int:
    """Lets torch and the compiled kernels use ``num_threads`` threads, 0: one per core; returns their number.

    The number holds for calls from this thread and from threads started later.
    """
    if num_threads < 0:
        raise ValueError(f"num_threads={num_threads}: must be 0 (one per core) or more")
    count = num_threads or num_cores()
    torch.set_num_threads(count)
    return count


def num_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def run_team() -> Team:
    """``run(function, argument, num_threads)``: every thread of the team calls function(argument), both addresses."""
    return _openmp_team() or _python_team


def _openmp_team() -> Team | None:
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        # Looked up through torch's own library, so it is the runtime which that is linked with.
        parallel = ctypes.CDLL(str(library)).GOMP_parallel
    except (OSError, AttributeError):
        return None
    parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None
    return lambda function, argument, num_threads: parallel(function, argument, num_threads, 0)


def _python_team(function: int, argument: int, num_threads: int) -> None:
    body = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)
    others = [threading.Thread(target=body, args=(argument,)) for _ in range(num_threads - 1)]
    for thread in others:
        thread.start()
    body(argument)
    for thread in others:
        thread.join()
