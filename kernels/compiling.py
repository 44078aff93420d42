"""Kernels compiled by several processes, where none of them is on disk yet.

The processes and the caller take kernels from one list, the slowest first. Each process keeps what it compiles in
numba's cache, from which the caller loads it. Where a process dies, the caller compiles what is missing.

parent -> stdin:   lines, each with a kernel's name; the end of the pipe ends the process
child -> stdout:   a line for each kernel that is on disk
"""

import contextlib
import importlib
import os
import subprocess
import sys
import threading
from collections import deque
from types import ModuleType
from typing import Any

from ..cpu_isa import CpuIsa, choose
from .cpu.entry import Entry, entries

MIN_MISSING = 4  # kernels; a process takes a second to start
MAX_PROCESSES = 3


class Compiling:
    """Begun by the constructor. ``close`` ends the processes."""

    def __init__(self, missing: list[Entry[Any]], *, cpu_isa: CpuIsa, num_processes: int) -> None:
        self._left = deque(missing)
        self._processes = [_worker(cpu_isa) for _ in range(num_processes)]
        self._threads = [threading.Thread(target=self._feed, args=(one,), daemon=True) for one in self._processes]
        for thread in self._threads:
            thread.start()

    def take(self) -> Entry[Any] | None:
        """A kernel that nobody compiles yet, for the caller to compile; None where none is left."""
        try:
            return self._left.popleft()
        except IndexError:
            return None

    @property
    def num_left(self) -> int:
        """Kernels that nobody compiles yet."""
        return len(self._left)

    def wait(self) -> None:
        """Return once every kernel that a process has taken is on disk, or its process has died."""
        for thread in self._threads:
            thread.join()

    def close(self) -> None:
        self._left.clear()
        for process in self._processes:
            process.kill()
        self.wait()
        for process in self._processes:
            process.communicate()

    def _feed(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(OSError, ValueError):  # the process has died
            while (kernel := self.take()) is not None:
                process.stdin.write(f"{kernel.name}\n")
                process.stdin.flush()
                if not process.stdout.readline():
                    return


def begin_compiling(modules: tuple[ModuleType, ...], *, cpu_isa: CpuIsa, num_threads: int) -> Compiling | None:
    """For the modules' kernels, in their order. None where the first or most are on disk, or there is one thread."""
    if num_threads < 2:
        return None
    kernels = list(entries(*modules))
    if kernels[0].is_on_disk():  # they become stale together
        return None
    missing = [kernel for kernel in kernels if not kernel.is_on_disk()]
    if len(missing) < MIN_MISSING:
        return None
    return Compiling(missing, cpu_isa=cpu_isa, num_processes=min(num_threads - 1, MAX_PROCESSES))


def _worker(cpu_isa: CpuIsa) -> "subprocess.Popen[str]":
    path = [os.path.abspath(entry) for entry in sys.path]
    late = "from phloem.late_import import import_late; import_late()"
    code = f"import sys; sys.path[:] = {path!r}; {late}; from {__name__} import run; run({cpu_isa!r})"
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-P", "-c", code], stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True
    )


def run(cpu_isa: CpuIsa) -> None:
    """The main function of the processes."""
    choose(cpu_isa)
    for line in sys.stdin:
        module, _, name = line.strip().rpartition(".")
        getattr(importlib.import_module(module), name).compile()
        sys.stdout.write("on disk\n")
        sys.stdout.flush()
