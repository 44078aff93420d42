"""A Python process that will be an engine: started before its order is known, so that it loads libraries meanwhile."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
from pathlib import Path

from ...protocol.address import MAX_IPC_PATH
from ..parallel.child import start_child

ENGINE_MODULE = "phloem.runtime.process.engine_main"
SOCKET_NAME, EVENTS_NAME = "engine.sock", "events.sock"
# Most of an engine's imports. An instruction set other than the machine's best must be chosen before they are loaded.
LIBRARIES = ("torch", "numba")
VARIABLES = {
    # numpy multiplies no matrices there or in a server, and OpenBLAS's threads spin for 0.1 s when they start.
    "OPENBLAS_NUM_THREADS": "1",
    # numpy asks for huge pages for arrays of 4 MiB and more. If such an array lay in the heap, its place goes on asking
    # after it is freed: what is put there later, however small, waits 4 to 11 ms for the kernel to zero 2 MiB. Memory
    # that is read from end to end at each step asks for its own huge pages (``memory.pages``).
    "NUMPY_MADVISE_HUGEPAGE": "0",
}


class PythonProcess:
    """The process, which imports ``modules`` and then waits for one order on its stdin; its folder; and the ``lines``
    that it says.

    The caller gives it to one ``EngineProcess`` or calls ``discard``. It ends when its stdin is closed.
    """

    def __init__(self, modules: tuple[str, ...] = ()) -> None:
        self.folder = _private_folder()
        self.log_path = self.folder / "engine.log"
        self.is_taken = False
        arguments = [str(self.folder), *modules]
        try:
            with self.log_path.open("wb") as log_file:
                self.process, self.lines = start_child(ENGINE_MODULE, *arguments, log=log_file, variables=VARIABLES)
        except BaseException:
            shutil.rmtree(self.folder)
            raise

    def take(self) -> None:
        """From now on the caller ends the process and removes the folder."""
        assert not self.is_taken
        self.is_taken = True

    def discard(self) -> None:
        """End the process and remove its folder, unless it was taken."""
        if self.is_taken:
            return
        self.take()
        self.process.kill()
        self.process.wait()
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def _private_folder() -> Path:
    """A new folder of mode 0700, in a place short enough for a socket's path where the system has Unix sockets."""
    folder = Path(tempfile.mkdtemp(prefix="phloem-"))
    if (
        hasattr(socket, "AF_UNIX")
        and max(len(os.fsencode(folder / name)) for name in (SOCKET_NAME, EVENTS_NAME)) > MAX_IPC_PATH
    ):
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="phloem-", dir="/tmp"))
    return folder
