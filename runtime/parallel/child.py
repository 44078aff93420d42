"""Python processes that find the same packages as this one, and the two pipes between them and their parent.

    parent ──stdin──► child   lines; the pipe's end is the parent's death
    parent ◄─stdout── child   lines; the pipe's end is the child's death

Every system gives a child these two pipes. What the child prints goes to its stderr, which is its log.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from typing import IO

PARENT_CHECK_S = 1.0


class ChildLines:
    """The lines that come out of ``pipe``, the read end of a pipe, which is closed at its end.

    A thread reads them: only POSIX systems can wait for a pipe for a limited time.
    """

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe
        self._found: SimpleQueue[bytes | None] = SimpleQueue()
        threading.Thread(target=self._read, name="phloem-child", daemon=True).start()

    def next(self, timeout_s: float | None = None) -> bytes | None:
        """The next line; None once the child has closed its end. Raises ``queue.Empty`` after ``timeout_s``."""
        line = self._found.get(timeout=timeout_s)
        if line is None:
            self._found.put(None)  # for the next caller
        return line

    def _read(self) -> None:
        rest = b""
        try:
            while piece := os.read(self._pipe, 65536):
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    if line.startswith(b"{"):  # others were printed while Python started, by a sitecustomize
                        self._found.put(line)
        finally:
            os.close(self._pipe)
            self._found.put(None)


def start_child(
    module: str, *arguments: str, log: IO[bytes], variables: Mapping[str, str] | None = None
) -> tuple[subprocess.Popen[bytes], ChildLines]:
    """Start a process that calls ``run`` of ``module`` with the file descriptor of its lines. ``variables``: of the
    environment, unless this process has them.
    """
    ready, ready_end = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _program(module), *arguments],
            stdin=subprocess.PIPE,
            stdout=ready_end,
            stderr=log,
            env={**(variables or {}), **os.environ},
            # Ctrl-C is for the parent, which then ends the child.
            start_new_session=True,
            creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
        )
    except BaseException:
        os.close(ready)
        raise
    finally:
        os.close(ready_end)
    return process, ChildLines(ready)


def _program(module: str) -> str:
    """Code for ``python -P -c``, with this process's module path. Parts of torch are imported late."""
    path = [os.path.abspath(entry) for entry in sys.path]
    package, _, name = module.rpartition(".")
    pipe = "import os, sys; lines = os.dup(1); os.dup2(2, 1)"  # libraries print to the log from here on
    late = "from phloem.late_import import import_late; import_late()"
    return f"{pipe}; sys.path[:] = {path!r}; {late}; from {package} import {name}; {name}.run(lines)"


def wait_for_parents_end(parent_pid: int, *, said: Callable[[], None] | None = None) -> None:
    """Return once the parent of this process has ended, or has closed the pipe to stdin. ``said`` is called, on another
    thread, when more comes through the pipe than has been read of it.
    """
    has_ended = threading.Event()

    def read() -> None:
        while os.read(0, 4096):
            if said is not None:
                said()
        has_ended.set()

    threading.Thread(target=read, name="phloem-parent", daemon=True).start()
    while not has_ended.wait(PARENT_CHECK_S):
        if is_orphan(parent_pid):
            return


def is_orphan(parent_pid: int) -> bool:
    """Whether the parent has ended, on systems that fork: there its forks may hold the pipe open, and an orphan gets
    another parent. Elsewhere the pipe tells it, and the parent's number may be that of an environment's ``python.exe``.
    """
    return hasattr(os, "fork") and os.getppid() != parent_pid
