"""The parent's handle of an engine process: start, readiness, reason of death, end."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from queue import Empty
from typing import Self

import msgspec

from ...protocol.address import ClientKeys, ServerKeys, has_ipc, new_keys
from ...protocol.client import Client
from ...protocol.errors import Cancelled, EngineLost, ErrorInfo, from_info
from ..config import EngineConfig, Progress
from ..parallel.child import ChildLines
from .engine_main import STOP, Loading, Order, Ready, Told
from .python_process import EVENTS_NAME, SOCKET_NAME, PythonProcess

logger = logging.getLogger(__name__)

LOG_TAIL_CHARS = 2000
ENGINE_TIMEOUT_S = (
    120.0  # of silence before an engine that still runs counts as lost; a process that ends is noticed at once
)
PRIVATE_URL = "ipc://*"  # of cache events: a socket in the process's folder, or a port where the engine's keys admit
ANY_PORT = "tcp://127.0.0.1:*"
LOOK_S = 0.1  # for a cancelled start; on Windows Ctrl-C waits for it, too
KILL_WAIT_S = 30.0  # for the kernel to end a killed process: freeing a GPU takes seconds


class EngineProcess:
    """Started by the constructor, which returns when the engine listens. ``progress`` is called meanwhile.

    Raises the child's own error when it cannot start (UnknownModel, ...), EngineLost when it dies or takes longer than
    ``start_timeout_s``, Cancelled soon after ``is_cancelled()`` is true. Without ``url`` it listens on a socket in a
    temporary folder of mode 0700; on a system without Unix sockets, on a port of loopback with keys of its own. With
    ``interpreter`` that process becomes the engine, unless ``config`` restricts the instruction set, which must be done
    before libraries are loaded. The process ends with its parent, however that ends. As a context manager it stops at
    the block's end.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        url: str = "",
        keys: ServerKeys | None = None,
        start_timeout_s: float = 600.0,
        factory: str = "",
        progress: Progress | None = None,
        is_cancelled: Callable[[], bool] | None = None,
        interpreter: PythonProcess | None = None,
    ) -> None:
        if interpreter is not None and config.cpu_isa != "auto":
            interpreter.discard()
            interpreter = None
        interpreter = interpreter or PythonProcess()
        interpreter.take()
        self._exit_reason: str | None = None
        self._process, self._folder, self._log_path = interpreter.process, interpreter.folder, interpreter.log_path
        self._own_keys: ClientKeys | None = None  # of ``connect``, where the address is private and has keys
        if not url and not has_ipc():
            url = ANY_PORT
            keys, self._own_keys = new_keys()
        url = url or f"ipc://{self._folder}/{SOCKET_NAME}"
        has_private_events = config.cache_events_url == PRIVATE_URL and not has_ipc()
        if config.cache_events_url == PRIVATE_URL:
            events_url = ANY_PORT if has_private_events else f"ipc://{self._folder}/{EVENTS_NAME}"
            config = msgspec.structs.replace(config, cache_events_url=events_url)
        order = Order(config, url, os.getpid(), str(self._folder), factory, keys, has_private_events)
        try:
            assert self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # the child has died; _wait_ready reports it
                self._process.stdin.write(msgspec.json.encode(order) + b"\n")
                self._process.stdin.flush()
            self.url = self._wait_ready(interpreter.lines, start_timeout_s, progress, is_cancelled)
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        return self._process.pid

    def death(self) -> str | None:
        """Why the process is dead, with the end of its log; None while it lives. Callable on any thread."""
        if self._exit_reason is None and (code := self._process.poll()) is not None:
            how = f"was ended by {_signal_name(-code)}" if code < 0 else f"exited with code {code}"
            tail = self.log_tail()
            self._exit_reason = f"the engine process {self.pid} {how}" + (f"; its log ends:\n{tail}" if tail else "")
        return self._exit_reason

    def connect(self, *, keys: ClientKeys | None = None, engine_timeout_s: float = ENGINE_TIMEOUT_S) -> Client:
        """A client of this engine, which learns at once when the process ends. The caller closes it."""
        # an address to connect to, made from one to listen at
        url = self.url.replace("tcp://0.0.0.0:", "tcp://127.0.0.1:").replace("tcp://[::]:", "tcp://[::1]:")
        keys = keys or self._own_keys
        return Client(url, keys=keys, engine_timeout_s=engine_timeout_s, engine_alive=self.death)

    def log_tail(self) -> str:
        try:
            with self._log_path.open("rb") as log_file:
                log_file.seek(max(0, log_file.seek(0, os.SEEK_END) - LOG_TAIL_CHARS))
                return log_file.read().decode(errors="replace").strip()
        except OSError:
            return ""

    def stop(self, *, timeout_s: float = 5.0) -> None:
        """End the process: asked first, killed after ``timeout_s``; leaves no file and no zombie."""
        if self._process.poll() is None:
            assert self._process.stdin is not None
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):  # it has died, or does not hear
                self._process.stdin.write(STOP)
                self._process.stdin.flush()
                self._process.wait(timeout_s)
        self.kill()

    def kill(self) -> None:
        """End the process at once, also one that hangs or is stopped (SIGSTOP); leaves no file and no zombie."""
        if self._process.poll() is None:
            self._process.kill()
            try:
                self._process.wait(KILL_WAIT_S)
            except subprocess.TimeoutExpired:
                logger.error("the engine process %d was killed and has not ended in %g s", self.pid, KILL_WAIT_S)
        self.death()
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _wait_ready(
        self, lines: ChildLines, timeout_s: float, progress: Progress | None, is_cancelled: Callable[[], bool] | None
    ) -> str:
        for line in self._said(lines, timeout_s, is_cancelled):
            match msgspec.json.decode(line, type=Told):
                case Loading(what, done, total):
                    if progress is not None:
                        progress(what, done, total)
                case Ready(url, None):
                    return url
                case Ready(error=ErrorInfo() as error):
                    raise from_info(error)
        raise AssertionError("lines end with an exception")

    def _said(self, lines: ChildLines, timeout_s: float, is_cancelled: Callable[[], bool] | None) -> Iterator[bytes]:
        """The child's lines, without end. Raises EngineLost when it dies or takes longer than ``timeout_s``."""
        end_s = time.monotonic() + timeout_s
        while True:
            left_s = max(0.0, end_s - time.monotonic())
            try:
                line = lines.next(min(left_s, LOOK_S))
            except Empty:
                if is_cancelled is not None and is_cancelled():
                    raise Cancelled("the engine was stopped while it was starting") from None
                if time.monotonic() < end_s:
                    continue
                text = f"the engine was not ready within {timeout_s:g} s; its log ends:\n{self.log_tail()}"
                raise EngineLost(text) from None
            if line is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(5.0)
                raise EngineLost(self.death() or "the engine went silent while it was starting")
            yield line


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
