"""Large tables that are filled bit by bit: pages that are never touched cost no memory.

NumPy asks for huge pages for arrays of some megabytes. The first touch of one of these zeroes 2 MiB, which takes 0.3 ms
and up to 40 where memory is fragmented: a mask would wait for it.
"""

import mmap
from contextlib import suppress
from math import prod
from typing import Any

import numpy as np

POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, since Linux 5.14
PIECE = 1 << 20  # bytes made by one call, which holds Python's lock; one call for a whole table took up to 20 ms


def untouched(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Zeros, in pages of the usual size."""
    size = prod(shape) * np.dtype(dtype).itemsize
    if size < mmap.PAGESIZE or not hasattr(mmap, "MADV_NOHUGEPAGE"):
        return np.zeros(shape, dtype)
    area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    area.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(area, dtype).reshape(shape)


def touch(array: np.ndarray, begin: int, end: int) -> None:
    """Have the kernel make the pages of ``array[begin:end]`` at once; ``array`` is from ``untouched``. A page that is
    read before it is written to would cost two faults. Where the kernel cannot, nothing happens."""
    area: Any = array
    while isinstance(area, np.ndarray):
        area = area.base
    if isinstance(area, memoryview):
        area = area.obj
    if isinstance(area, mmap.mmap):
        row = array.strides[0]
        first = begin * row // mmap.PAGESIZE * mmap.PAGESIZE
        last = min(end * row, len(area))
        with suppress(OSError):
            for start in range(first, last, PIECE):
                area.madvise(POPULATE_WRITE, start, min(PIECE, last - start))
