"""What a process holds of memory that it does not need. Never frees anything that somebody owns."""

import ctypes
import sys
from collections.abc import Iterator
from pathlib import Path

_MAPPINGS = Path("/proc/self/smaps")
_DONT_NEED = 4  # of madvise


def give_back_freed() -> None:
    """Return to the system what loading has left behind; does nothing where the C library has no such call."""
    if not sys.platform.startswith("linux"):
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def let_go_of_libraries() -> None:
    """Unmap the pages of libraries' code: most of it ran for loading alone. What runs again is found in the system's
    page cache, some microseconds a time. Does nothing but on Linux.
    """
    if not _MAPPINGS.exists():
        return
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for start, end in _code_mappings(_MAPPINGS.read_text().splitlines()):
        advise(start, end - start, _DONT_NEED)


def _code_mappings(lines: list[str]) -> Iterator[tuple[int, int]]:
    """The address ranges that are a file's, may be run, may not be written, and hold no page that differs from it.

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
