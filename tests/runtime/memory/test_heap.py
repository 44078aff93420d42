"""Memory is returned to the system, and library code that runs again is loaded again."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from phloem.runtime.memory import KVPool, heap, return_freed_memory, unmap_library_code

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads memory sizes in /proc, which only Linux has")


def _has_huge_pages() -> bool:
    path = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return path.exists() and "[madvise]" in path.read_text()


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


@linux_only
@pytest.mark.skipif(not _has_huge_pages(), reason="this system gives no huge pages to who asks for them")
@pytest.mark.parametrize("asks", [True, False])
def test_large_arrays_get_no_huge_pages_once_they_ask_for_none(asks: bool) -> None:
    """In a process of its own, whose NumPy stays as it is."""
    program = f"""
from phloem.runtime.memory import ask_for_no_huge_pages
import numpy as np

if not {asks}:
    ask_for_no_huge_pages()
array = np.ones(64 << 20, np.uint8)
at = array.ctypes.data + (32 << 20)
huge = is_here = 0
for line in open("/proc/self/smaps"):
    words = line.split()
    if not words[0].endswith(":"):
        begin, end = (int(address, 16) for address in words[0].split("-"))
        is_here = begin <= at < end
    elif is_here and words[0] == "AnonHugePages:":
        huge = int(words[1])
print(huge)
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert (int(run.stdout) > 0) == asks
