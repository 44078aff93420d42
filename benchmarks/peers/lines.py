"""A peer's end of the line protocol: requests as they come in, answers as they are said. See ``benchmarks.peers``."""

import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable

Requests = queue.Queue[tuple[float, dict] | None]  # each with the time it came; None: no more will


def take_stdout() -> Callable[[dict], None]:
    """What says an answer. From now on nothing that a library prints reaches the answers."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(answer: dict) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    return say


def read_requests() -> Requests:
    """Filled by a thread, so that a request's time is that of its arrival."""
    incoming: Requests = queue.Queue()

    def read() -> None:
        for line in sys.stdin:
            incoming.put((time.perf_counter(), json.loads(line)))
        incoming.put(None)

    threading.Thread(target=read, daemon=True).start()
    return incoming
