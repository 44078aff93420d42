"""The begin and end of each kernel call, while a ``KernelTimes`` is open.

The calls of a tape are then made one by one from Python, so such a step takes a little longer. The calls themselves
take the same time.
"""

from __future__ import annotations

import time
from contextvars import ContextVar, Token
from types import TracebackType
from typing import NamedTuple, Self

_open: ContextVar[KernelTimes | None] = ContextVar("kernel_times", default=None)

clock_ns = time.perf_counter_ns


class CallTime(NamedTuple):
    """``num_outputs``: of a matrix product, else 0."""

    function: int
    num_outputs: int
    start_ns: int
    end_ns: int


class KernelTimes:
    """A context: the kernel calls of this thread inside it are kept in ``calls``.

    ``watching_ns``: the time between the calls of tapes, which exists only because they are timed.
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
