"""The processor that this process runs on, and the memory beside it."""

import os
import platform
from functools import cache
from pathlib import Path


def num_cores() -> int:
    """Cores that this process may run on; on systems without such a limit, those of the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def name() -> str:
    """As its maker calls it; on systems without /proc what Python knows."""
    return field("model name") or platform.processor() or platform.machine() or "unknown"


@cache
def field(key: str) -> str:
    """The first value of ``key`` in Linux's /proc/cpuinfo; "" if there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.split(":", 1)[0].strip() == key), "")


def memory_bytes() -> int:
    """Of the machine; 0 on systems that do not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 0


def resident_bytes() -> int:
    """Memory that this process has in RAM now; 0 on systems without /proc."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
