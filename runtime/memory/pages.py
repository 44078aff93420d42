"""Memory of a model's size, straight from the system."""

import mmap

import numpy as np
import torch

_LARGE = 2 << 20  # bytes of a large page


def zeroed_pages(size: int, *, large: bool) -> torch.Tensor:
    """uint8 [size] of zeros; the system gives a page when it is first written.

    ``large``: pages of 2 MB, where the system has them for the asking. What is read from end to end at each step then
    misses fewer page tables; what is written here and there takes more memory, and longer at its first use.
    """
    if not hasattr(mmap, "MAP_ANONYMOUS"):  # Windows, which has no pages of 2 MB unless one asks for them
        return torch.from_numpy(np.zeros(size, np.uint8))
    is_large = large and size >= _LARGE and hasattr(mmap, "MADV_HUGEPAGE")
    pages = mmap.mmap(-1, size + (_LARGE if is_large else 0), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    found = torch.frombuffer(pages, dtype=torch.uint8)
    if not is_large:
        return found
    pages.madvise(mmap.MADV_HUGEPAGE)
    start = -found.data_ptr() % _LARGE
    return found[start : start + size]
