"""The parent's hold on an engine process: start, readiness, reason of death, end. Never speaks the protocol."""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from ..config import EngineConfig
from ..protocol.errors import EngineLost, from_info
from .engine_main import Order, Ready

LOG_TAIL_CHARS = 2000


class EngineProcess:
    """Started by the constructor, which returns when the engine listens.

    Raises the child's own error when it cannot start (UnknownModel, ...), EngineLost when it dies or takes longer than
    ``start_timeout_s``. Without ``url`` it listens on a socket in a temporary folder of mode 0700.
    """

    def __init__(
        self, config: EngineConfig, *, url: str = "", start_timeout_s: float = 600.0, factory: str = ""
    ) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="phloem-"))
        self._log_path = self._folder / "engine.log"
        self._exit_reason: str | None = None
        with self._log_path.open("wb") as log_file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "phloem.runtime.process.engine_main"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log_file,
                start_new_session=True,  # Ctrl-C is for the parent, which then ends the child
            )
        try:
            order = Order(config, url or f"ipc://{self._folder}/engine.sock", factory)
            assert self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(msgspec.json.encode(order) + b"\n")
                self._process.stdin.flush()
            self.url = self._wait_ready(start_timeout_s)
        except BaseException:
            self.stop(timeout_s=1.0)
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def death(self) -> str | None:
        """Why the process is dead, with the end of its log; None while it lives."""
        if self._exit_reason is None:
            code = self._process.poll()
            if code is None:
                return None
            if code < 0:
                with contextlib.suppress(ValueError):
                    code_text = signal.Signals(-code).name
                    self._exit_reason = f"the engine process {self.pid} was ended by {code_text}"
            if self._exit_reason is None:
                self._exit_reason = f"the engine process {self.pid} exited with code {code}"
            tail = self.log_tail()
            if tail:
                self._exit_reason += f"; its log ends:\n{tail}"
        return self._exit_reason

    def log_tail(self) -> str:
        try:
            return self._log_path.read_text(errors="replace")[-LOG_TAIL_CHARS:].strip()
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
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _wait_ready(self, timeout_s: float) -> str:
        stdout = self._process.stdout
        assert stdout is not None
        line = b""
        end_s = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if not selector.select(max(0.0, end_s - time.monotonic())):
                    raise EngineLost(
                        f"the engine was not ready within {timeout_s:g} s; its log ends:\n{self.log_tail()}"
                    )
                piece = os.read(stdout.fileno(), 65536)
                if not piece:
                    self._process.wait(5.0)
                    raise EngineLost(f"{self.death()}" if self.death() else "the engine ended while it was starting")
                line += piece
        ready = msgspec.json.decode(line, type=Ready)
        if ready.error is not None:
            raise from_info(ready.error)
        return ready.url
