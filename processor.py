"""The processor that this process runs on, and the memory beside it."""

import ctypes
import os
import platform
import sys
from functools import cache
from pathlib import Path
from typing import Any


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


# LLVM's name of a feature: where its bit is in Linux's auxiliary vector, and Apple's name of it.
_HWCAP, _HWCAP2 = 16, 26
_ARM_FEATURES = {
    "neon": (_HWCAP, 1, "hw.optional.AdvSIMD"),
    "dotprod": (_HWCAP, 20, "hw.optional.arm.FEAT_DotProd"),
    "sve": (_HWCAP, 22, "hw.optional.arm.FEAT_SVE"),
    "i8mm": (_HWCAP2, 13, "hw.optional.arm.FEAT_I8MM"),
    "bf16": (_HWCAP2, 14, "hw.optional.arm.FEAT_BF16"),
}


def arm_features() -> dict[str, bool]:
    """What the operating system says of the features of an Arm CPU that kernels use, by LLVM's names.

    LLVM itself reads only some of them from Linux, and none from macOS. Empty on other systems and other CPUs.
    """
    if platform.machine() not in ("aarch64", "arm64") or sys.platform not in ("linux", "darwin"):
        return {}
    library = ctypes.CDLL(None)
    if sys.platform == "darwin":
        return {name: _apple_has(library, key) for name, (_, _, key) in _ARM_FEATURES.items()}
    library.getauxval.argtypes, library.getauxval.restype = [ctypes.c_ulong], ctypes.c_ulong
    return {name: bool(library.getauxval(word) >> bit & 1) for name, (word, bit, _) in _ARM_FEATURES.items()}


def _apple_has(library: Any, key: str) -> bool:
    value, size = ctypes.c_int(0), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    failed = library.sysctlbyname(key.encode(), ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0))
    return not failed and value.value == 1


def memory_bytes() -> int:
    """Of the machine; 0 on systems that do not say."""
    if windows := _windows():
        words = _words(8)  # MEMORYSTATUSEX: its length and the load, then the physical memory
        return words[1] if windows.GlobalMemoryStatusEx(ctypes.byref(words)) else 0
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 0


def resident_bytes() -> int:
    """Memory that this process has in RAM now; 0 on systems that do not say."""
    if windows := _windows():
        words = _words(9)  # PROCESS_MEMORY_COUNTERS: its length and the faults, then the peak and the size now
        found = windows.K32GetProcessMemoryInfo(ctypes.c_void_p(-1), ctypes.byref(words), ctypes.sizeof(words))
        return words[2] if found else 0
    if sys.platform == "darwin":
        words = _words(12)  # proc_taskinfo: the address space, then what is in RAM
        size = ctypes.sizeof(words)
        kind, argument = 4, ctypes.c_uint64(0)  # PROC_PIDTASKINFO
        found = ctypes.CDLL(None).proc_pidinfo(os.getpid(), kind, argument, ctypes.byref(words), size)
        return words[1] if found == size else 0
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _windows() -> Any:
    """Windows's kernel32; None elsewhere."""
    library = getattr(ctypes, "WinDLL", None)
    return None if library is None else library("kernel32")


def _words(count: int) -> Any:
    """Memory for a structure of 64-bit words, the first of which begins with the structure's length in bytes."""
    return (ctypes.c_uint64 * count)(8 * count)
