"""Memory is returned to the system, and library code that runs again is loaded again."""

import sys

import numpy as np
import pytest
import torch
from phloem.runtime.memory import KVPool, heap, return_freed_memory, unmap_library_code

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads memory sizes in /proc, which only Linux has")


def resident(kind: str) -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(kind))


def test_only_unmodified_code_of_files_is_unmapped() -> None:
    smaps = """
7f10-7f20 r-xp 00034000 fe:00 1234   /usr/lib/libexample.so
Rss:      512 kB
Anonymous:  0 kB
VmFlags: rd ex mr mw me
7f20-7f30 r-xp 00034000 fe:00 1234   /usr/lib/changed.so
Anonymous:  4 kB
7f30-7f40 r--p 00034000 fe:00 1234   /usr/lib/libexample.so
Anonymous:  0 kB
7f40-7f50 rw-p 00034000 fe:00 1234   /usr/lib/libexample.so
Anonymous:  0 kB
7f50-7f60 r-xp 00000000 00:00 0
Anonymous:  0 kB
7f60-7f70 r-xp 00034000 fe:00 99   /a folder/with blanks.so
Anonymous:  0 kB
"""
    found = list(heap.code_mappings(smaps.strip().splitlines()))
    assert found == [(0x7F10, 0x7F20), (0x7F60, 0x7F70)]


@linux_only
def test_libraries_run_again_after_their_code_is_unmapped() -> None:
    expected = torch.randn(4, 4, generator=torch.Generator().manual_seed(1)) @ torch.eye(4)
    before = resident("RssFile")
    unmap_library_code()
    assert resident("RssFile") < before
    return_freed_memory()
    assert torch.equal(torch.randn(4, 4, generator=torch.Generator().manual_seed(1)) @ torch.eye(4), expected)
    assert float(np.linalg.norm(np.ones(9))) == 3.0


@linux_only
def test_a_pool_takes_memory_only_for_written_slots() -> None:
    before = resident("RssAnon")
    pool = KVPool(8, 50_000, 4, 64, torch.bfloat16)
    for layer in (*pool.k, *pool.v):
        layer[:100] = 1.0
    taken = resident("RssAnon") - before
    assert taken < 10 * pool.size_bytes // 500 < pool.size_bytes
