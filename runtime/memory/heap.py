"""Returns memory that the process holds but does not need to the operating system."""

import ctypes
import sys
from collections.abc import Iterator
from pathlib import Path

_MAPPINGS = Path("/proc/self/smaps")
_DONT_NEED = 4  # of madvise


def return_freed_memory() -> None:
    """Return freed heap memory to the system, after loading. Does nothing if the C library has no ``malloc_trim``."""
    if not sys.platform.startswith("linux"):
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def unmap_library_code() -> None:
    """Unmap the code pages of libraries, most of which only ran for loading. A page that runs again is mapped from the
    system's page cache in some microseconds. Works on Linux only.
    """
    if not _MAPPINGS.exists():
        return
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for start, end in code_mappings(_MAPPINGS.read_text().splitlines()):
        advise(start, end - start, _DONT_NEED)


def code_mappings(lines: list[str]) -> Iterator[tuple[int, int]]:
    """The address ranges that map a file as executable, not writable, and without a modified page.

    7f0000000000-7f0000200000 r-xp 00034000 fe:00 1234   /usr/lib/libexample.so
    Rss:    512 kB
    Anonymous:  0 kB
    """
    found: tuple[int, int] | None = None
    for line in lines:
        words = line.split()
        if not words[0].endswith(":"):
            start, end = (int(address, 16) for address in words[0].split("-"))
            found = (start, end) if words[1] == "r-xp" and words[4] != "0" else None
        elif words[0] == "Anonymous:" and found is not None and words[1] == "0":
            yield found
            found = None
