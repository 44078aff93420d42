"""A Python process that will be an engine: started before its order is known, so that it loads libraries meanwhile."""

from __future__ import annotations

import contextlib
import os
import platform
import select
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from ...protocol.address import MAX_IPC_PATH
from ...protocol.errors import Unsupported
from ..parallel.child import module_program

ENGINE_MODULE = "phloem.runtime.process.engine_main"
SOCKET_NAME, EVENTS_NAME = "engine.sock", "events.sock"
# Most of an engine's imports. An instruction set other than the machine's best must be chosen before they are loaded.
LIBRARIES = ("torch", "numba")
# numpy multiplies no matrices there or in a server, and OpenBLAS's threads spin for 0.1 s when they start.
NO_BLAS_THREADS = {"OPENBLAS_NUM_THREADS": "1"}


class PythonProcess:
    """The process, which imports ``modules`` and then waits for one order on its stdin; its folder; and ``ready``, the
    file descriptor of what it says.

    The caller gives it to one ``EngineProcess`` or calls ``discard``. It ends when its stdin is closed. Raises
    Unsupported where the system lacks what starting it takes.
    """

    def __init__(self, modules: tuple[str, ...] = ()) -> None:
        _refuse_system()
        self.folder = _private_folder()
        self.log_path = self.folder / "engine.log"
        self.is_taken = False
        self.ready, ready_end = os.pipe()
        arguments = [str(ready_end), str(self.folder), *modules]
        try:
            with self.log_path.open("wb") as log_file:
                self.process = subprocess.Popen(
                    [sys.executable, "-P", "-c", module_program(ENGINE_MODULE), *arguments],
                    stdin=subprocess.PIPE,
                    stdout=log_file,
                    stderr=log_file,
                    pass_fds=(ready_end,),
                    env=NO_BLAS_THREADS | os.environ,
                    start_new_session=True,  # Ctrl-C is for the parent, which then ends the child
                )
        except BaseException:
            os.close(self.ready)
            shutil.rmtree(self.folder)
            raise
        finally:
            os.close(ready_end)

    def take(self) -> None:
        """From now on the caller ends the process, closes ``ready`` and removes the folder."""
        assert not self.is_taken
        self.is_taken = True

    def discard(self) -> None:
        """End the process and remove its folder, unless it was taken."""
        if self.is_taken:
            return
        self.take()
        self.process.kill()
        self.process.wait()
        os.close(self.ready)
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def _private_folder() -> Path:
    """A new folder of mode 0700, in a place short enough for a socket's path."""
    folder = Path(tempfile.mkdtemp(prefix="phloem-"))
    if max(len(os.fsencode(folder / name)) for name in (SOCKET_NAME, EVENTS_NAME)) > MAX_IPC_PATH:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="phloem-", dir="/tmp"))
    return folder


def _refuse_system() -> None:
    has = {
        "Unix sockets": hasattr(socket, "AF_UNIX"),
        "select.poll": hasattr(select, "poll"),
        "file descriptors passed to a child": sys.platform != "win32",
    }
    if missing := [what for what, is_there in has.items() if not is_there]:
        raise Unsupported(
            f"an engine's process cannot be started on {platform.system()}, which lacks {', '.join(missing)}; "
            "use Linux, macOS or the Windows Subsystem for Linux"
        )
