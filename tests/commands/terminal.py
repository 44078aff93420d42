"""A real terminal for tests: a program on a pseudo-terminal, whose screen is waited for and never slept for.

Import it as ``phloem.tests.commands.terminal``.
"""

import contextlib
import fcntl
import os
import pty
import re
import select
import subprocess
import sys
import termios
from collections.abc import Iterator, Sequence

HANGING_S = 300.0  # a test that hangs fails after this long
PHLOEM = (sys.executable, "-m", "phloem")
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    def __init__(self, process: subprocess.Popen[bytes], screen: int) -> None:
        self.process = process
        self._screen = screen
        self._unread = ""

    def wait_for(self, text: str) -> str:
        """What was shown until and with ``text``."""
        while text not in self._unread:
            self._unread += self._read(f"{text!r} did not appear after {self._unread!r}")
        end = self._unread.index(text) + len(text)
        shown, self._unread = self._unread[:end], self._unread[end:]
        return shown

    def enter(self, line: str) -> None:
        os.write(self._screen, line.encode() + b"\n")

    def type(self, keys: str) -> None:
        os.write(self._screen, keys.encode())

    def press(self, key: str) -> None:
        """``c``: Ctrl-C; ``d``: Ctrl-D."""
        os.write(self._screen, bytes([ord(key) & 0x1F]))

    def wait_end(self) -> tuple[int, str]:
        """The exit code, and what was shown last."""
        with contextlib.suppress(EOFError):
            while True:
                self._unread += self._read("the program did not end")
        return self.process.wait(HANGING_S), self._unread

    def _read(self, missing: str) -> str:
        if not select.select([self._screen], [], [], HANGING_S)[0]:
            raise AssertionError(missing)
        try:
            shown = os.read(self._screen, 65536)
        except OSError:  # Linux says so when the program has closed its side
            shown = b""
        if not shown:
            raise EOFError(missing)
        return _ESCAPES.sub("", shown.decode(errors="replace")).replace("\r\n", "\n")


@contextlib.contextmanager
def terminal(*arguments: str, program: Sequence[str] = PHLOEM) -> Iterator[Terminal]:
    """``phloem ARGUMENTS``, or another program, on a pseudo-terminal of its own; killed at the end."""
    ours, theirs = pty.openpty()

    def take_terminal() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "200"}
    process = subprocess.Popen(
        [*program, *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=take_terminal,
        env=environment,
    )
    os.close(theirs)
    try:
        yield Terminal(process, ours)
    finally:
        process.kill()
        process.wait()
        os.close(ours)
