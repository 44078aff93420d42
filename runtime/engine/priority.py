"""How threads for grammars share the processors with steps."""

import contextlib
import os
import sys
import threading

NICER = 5  # a third of a step's share of a processor that both need


def behind_steps() -> None:
    """Lower the priority of this thread on Linux. Elsewhere a thread's number may be that of another process."""
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError):  # refused
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICER)
