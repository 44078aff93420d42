"""How many cores the kernels may use. Never pins a thread to a core."""

import os

import torch


def set_threads(num_threads: int) -> int:
    """Lets torch and the compiled kernels share ``num_threads`` threads, 0: one per core; returns their number."""
    if num_threads < 0:
        raise ValueError(f"num_threads={num_threads}: must be 0 (one per core) or more")
    count = num_threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(count)
    return count
