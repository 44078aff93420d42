"""A peer's end of the line protocol: reads requests and writes answers. See ``benchmarks.peers``."""

import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable

Requests = queue.Queue[tuple[float, dict] | None]  # (arrival time, request); None: no further request


def take_stdout() -> Callable[[dict], None]:
    """A function that writes an answer. It takes stdout over, so a library's prints go to stderr from now on."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(answer: dict) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    return say


def read_requests() -> Requests:
    """A queue that a thread fills from stdin, with the arrival time of each request."""
    incoming: Requests = queue.Queue()

    def read() -> None:
        for line in sys.stdin:
            incoming.put((time.perf_counter(), json.loads(line)))
        incoming.put(None)

    threading.Thread(target=read, daemon=True).start()
    return incoming
