"""Large tables that are filled bit by bit: pages that are never touched cost no memory, and none is made in advance.

NumPy asks for huge pages for arrays of some megabytes. The first touch of one of these zeroes 2 MiB, which takes 0.3 ms
and up to 40 where memory is fragmented: a mask would wait for it.
"""

import mmap
from math import prod
from typing import Any

import numpy as np


def untouched(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Zeros, in pages of the usual size."""
    size = prod(shape) * np.dtype(dtype).itemsize
    if size < mmap.PAGESIZE or not hasattr(mmap, "MADV_NOHUGEPAGE"):
        return np.zeros(shape, dtype)
    area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    area.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(area, dtype).reshape(shape)
