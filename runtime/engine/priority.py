"""How threads for grammars share the processors with steps."""

import contextlib
import os
import threading

NICER = 5  # a third of a step's share of a processor that both need


def behind_steps() -> None:
    """Lower the priority of this thread, where the system has priorities of single threads."""
    with contextlib.suppress(AttributeError, OSError):  # such as Windows; refused
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICER)
