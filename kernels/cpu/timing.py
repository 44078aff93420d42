"""When each kernel call began and ended, while somebody watches. Never changes what is called.

Calls on a tape are then made one by one from Python, so a watched step takes a little longer than others; the calls
themselves take what they always do.
"""

from __future__ import annotations

import time
from contextvars import ContextVar, Token
from types import TracebackType
from typing import NamedTuple, Self

_open: ContextVar[KernelTimes | None] = ContextVar("kernel_times", default=None)

clock_ns = time.perf_counter_ns


class CallTime(NamedTuple):
    """``num_outputs`` counts where the function is a matrix product."""

    function: int
    num_outputs: int
    start_ns: int
    end_ns: int


class KernelTimes:
    """A context: the kernel calls of this thread inside it are noted in ``calls``.

    ``watching_ns``: what lay between the calls of tapes, where otherwise nothing does.
    """

    def __init__(self) -> None:
        self.calls: list[CallTime] = []
        self.watching_ns = 0
        self._token: Token[KernelTimes | None] | None = None

    def __enter__(self) -> Self:
        self._token = _open.set(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self._token is not None
        _open.reset(self._token)


def open_times() -> KernelTimes | None:
    return _open.get()
