"""What the C library keeps of memory that was freed. Never frees anything itself."""

import ctypes
import sys


def give_back_freed() -> None:
    """Return to the system what loading has left behind; does nothing where the C library has no such call."""
    if not sys.platform.startswith("linux"):
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
