"""The parent's handle of an engine process: start, readiness, reason of death, end."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import msgspec

from ...protocol.address import MAX_IPC_PATH, ClientKeys, ServerKeys
from ...protocol.client import Client
from ...protocol.errors import EngineLost, ErrorInfo, from_info
from ..config import EngineConfig, Progress
from .engine_main import Loading, Order, Ready, Told

LOG_TAIL_CHARS = 2000
ENGINE_TIMEOUT_S = (
    120.0  # of silence before an engine that still runs counts as lost; a process that ends is noticed at once
)
SOCKET_NAME = "engine.sock"


class EngineProcess:
    """Started by the constructor, which returns when the engine listens. ``progress`` is called meanwhile.

    Raises the child's own error when it cannot start (UnknownModel, ...), EngineLost when it dies or takes longer than
    ``start_timeout_s``. Without ``url`` it listens on a socket in a temporary folder of mode 0700. The process ends
    with its parent, however that ends. As a context manager it stops at the block's end.
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
    ) -> None:
        self._exit_reason: str | None = None
        self._folder = _private_folder()
        self._log_path = self._folder / "engine.log"
        url = url or f"ipc://{self._folder}/{SOCKET_NAME}"
        order = Order(config, url, os.getpid(), str(self._folder), factory, keys)
        ready, ready_end = os.pipe()
        try:
            self._process = self._spawn(ready_end)
        except BaseException:
            os.close(ready)
            shutil.rmtree(self._folder)
            raise
        finally:
            os.close(ready_end)
        try:
            assert self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # the child has died; _wait_ready reports it
                self._process.stdin.write(msgspec.json.encode(order) + b"\n")
                self._process.stdin.flush()
            self.url = self._wait_ready(ready, start_timeout_s, progress)
        except BaseException:
            self.stop(timeout_s=1.0)
            raise
        finally:
            os.close(ready)

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
            self._process.terminate()
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self.death()
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _spawn(self, ready_end: int) -> subprocess.Popen[bytes]:
        with self._log_path.open("wb") as log_file:
            return subprocess.Popen(
                [sys.executable, "-P", "-c", _program(), str(ready_end)],
                stdin=subprocess.PIPE,
                stdout=log_file,
                stderr=log_file,
                pass_fds=(ready_end,),
                start_new_session=True,  # Ctrl-C is for the parent, which then ends the child
            )

    def _wait_ready(self, ready: int, timeout_s: float, progress: Progress | None) -> str:
        for line in self._lines(ready, timeout_s):
            match msgspec.json.decode(line, type=Told):
                case Loading(what, done, total):
                    if progress is not None:
                        progress(what, done, total)
                case Ready(url, None):
                    return url
                case Ready(error=ErrorInfo() as error):
                    raise from_info(error)
        raise AssertionError("lines end with an exception")

    def _lines(self, pipe: int, timeout_s: float) -> Iterator[bytes]:
        """The child's lines, without end; raises EngineLost when it dies or takes longer than ``timeout_s``."""
        end_s = time.monotonic() + timeout_s
        poller = select.poll()
        poller.register(pipe, select.POLLIN)
        rest = b""
        while True:
            if not poller.poll(max(0.0, 1000 * (end_s - time.monotonic()))):
                text = f"the engine was not ready within {timeout_s:g} s; its log ends:\n{self.log_tail()}"
                raise EngineLost(text)
            piece = os.read(pipe, 65536)
            if not piece:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(5.0)
                raise EngineLost(self.death() or "the engine went silent while it was starting")
            *lines, rest = (rest + piece).split(b"\n")
            yield from lines


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _private_folder() -> Path:
    """A new folder of mode 0700, in a place short enough for a socket's path."""
    folder = Path(tempfile.mkdtemp(prefix="phloem-"))
    if len(os.fsencode(folder / SOCKET_NAME)) > MAX_IPC_PATH:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="phloem-", dir="/tmp"))
    return folder


def _program() -> str:
    """``engine_main`` with the parent's module path: the child finds the same package and the same libraries."""
    path = [os.path.abspath(entry) for entry in sys.path]
    return f"import sys; sys.path[:] = {path!r}; from phloem.runtime.process import engine_main; engine_main.run()"
