"""On ``PYTHONPATH`` this makes a Linux do what Windows does, in a Python process and those that it starts.

Windows lacks the modules, names, sockets and files that are hidden here, and some calls do something else there. What
Python's own modules need of the system is imported before it is hidden, and so are libraries that would ask for
Windows's DLLs: those that ``PHLOEM_TEST_LOADED`` names, or for an engine ``PHLOEM_TEST_ENGINE_LOADED``. Each process
writes its number into the folder ``PHLOEM_TEST_HIDDEN``.
"""

# ruff: noqa: E402
import asyncio
import builtins
import importlib
import io
import mmap
import multiprocessing.connection
import multiprocessing.util  # noqa: F401
import os
import random  # noqa: F401
import select
import selectors
import signal
import socket
import stat
import subprocess
import sys
import tempfile  # noqa: F401
from pathlib import Path
from typing import Any

is_engine = any("_main.run" in word for word in sys.orig_argv)
for name in os.environ.get("PHLOEM_TEST_ENGINE_LOADED" if is_engine else "PHLOEM_TEST_LOADED", "").split():
    importlib.import_module(name)
import zmq

modules: Any = sys.modules
modules.update(dict.fromkeys(("fcntl", "grp", "pwd", "resource", "termios", "tty")))
for module, names in (
    (
        os,
        "fork forkpty getgid getloadavg getpgid getuid killpg nice posix_fadvise pread preadv pwrite sched_getaffinity "
        "sched_setaffinity sched_yield setpriority getpriority setsid sysconf",
    ),
    (mmap, "MAP_ANON MAP_ANONYMOUS MAP_PRIVATE MAP_SHARED MADV_DONTNEED MADV_NOHUGEPAGE MADV_HUGEPAGE"),
    (select, "epoll poll"),
    (signal, "SIGALRM SIGCHLD SIGHUP SIGKILL SIGQUIT SIGUSR1 pthread_sigmask"),
    (socket, "AF_UNIX send_fds recv_fds"),
):
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)

KILL = 9
_kill, _rename, _open, _select, _stat, _popen = (
    os.kill,
    os.rename,
    io.open,
    select.select,
    os.stat,
    subprocess.Popen.__init__,
)


def kill(pid: int, number: int) -> None:
    """Any signal ends the process at once; 0, with which Linux asks whether there is one, does not."""
    _kill(pid, number and KILL)


def rename(source: Any, target: Any, **places: Any) -> None:
    if os.path.exists(target):
        raise FileExistsError(target)
    _rename(source, target, **places)


def hide_proc(path: object) -> None:
    if isinstance(path, str | Path) and str(path).startswith("/proc"):
        raise FileNotFoundError(2, "hidden", str(path))


def open_hidden(file: Any, *arguments: Any, **options: Any) -> Any:
    hide_proc(file)
    return _open(file, *arguments, **options)


def stat_hidden(path: Any, **options: Any) -> os.stat_result:
    hide_proc(path)
    return _stat(path, **options)


def select_sockets(reads: list, writes: list, errors: list, *timeout: float) -> object:
    """Pipes and files cannot be waited for."""
    for one in (*reads, *writes, *errors):
        number = one if isinstance(one, int) else one.fileno()
        if not stat.S_ISSOCK(os.fstat(number).st_mode):
            raise OSError(f"select: {number} is no socket")
    return _select(reads, writes, errors, *timeout)


def start(self: subprocess.Popen, *arguments: Any, **options: Any) -> None:
    if options.get("pass_fds") or options.get("preexec_fn"):
        raise ValueError("pass_fds and preexec_fn are not supported on Windows")
    _popen(self, *arguments, **options)


def end(self: subprocess.Popen) -> None:
    if self.poll() is None:
        _kill(self.pid, KILL)


def pair(*_: object) -> tuple[socket.socket, socket.socket]:
    """As Python makes one where the system has none."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        return one, listener.accept()[0]


def no_signals(self: object, *arguments: object) -> None:
    """As the event loops of Windows do."""
    raise NotImplementedError


def without_ipc(method: Any) -> Any:
    def call(self: zmq.Socket, url: str, *arguments: Any) -> Any:
        if isinstance(url, str) and url.startswith("ipc:"):
            raise zmq.ZMQError(zmq.EPROTONOSUPPORT)
        return method(self, url, *arguments)

    return call


os.kill, os.rename, os.stat = kill, rename, stat_hidden
io.open = builtins.open = open_hidden
select.select, socket.socketpair = select_sockets, pair
selectors.DefaultSelector = selectors.SelectSelector
subprocess.Popen.__init__, subprocess.Popen.kill, subprocess.Popen.terminate = start, end, end
loop: Any = asyncio.SelectorEventLoop
loop.add_signal_handler = no_signals
zmq.has = zmq.backend.has = lambda what: what != "ipc"
zmq.Socket.bind, zmq.Socket.connect = without_ipc(zmq.Socket.bind), without_ipc(zmq.Socket.connect)
sys.platform = "win32"
if folder := os.environ.get("PHLOEM_TEST_HIDDEN"):
    Path(folder, str(os.getpid())).write_text(" ".join(sys.orig_argv))
