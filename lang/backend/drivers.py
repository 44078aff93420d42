"""The threads on which a backend's calls run: a bounded pool, or one event loop on a thread of its own.

Each is made on a backend's first use and kept in the backend.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from .base_backend import BaseBackend

_T = TypeVar("_T")
_making = threading.Lock()


class LoopThread:
    """An event loop on its own thread, to which other threads submit coroutines. A burst of calls wakes it once."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._inbox: deque[tuple[Callable[..., Coroutine[Any, Any, Any] | None], tuple[Any, ...]]] = deque()
        self._is_woken = False
        self._tasks: set[asyncio.Task[Any]] = set()  # an event loop alone does not keep its tasks alive
        self._tidy_at = 64  # number of tasks at which finished ones are dropped
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        self.loop.close()

    def stop(self, *last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Cancel the running tasks, run ``last`` and end the thread. Later calls are dropped."""
        asyncio.run_coroutine_threadsafe(self._wind_up(last), self.loop).result(10.0)
        self.loop.call_soon_threadsafe(self.loop.stop)
        if self._thread is not threading.current_thread():
            self._thread.join(10.0)

    async def _wind_up(self, last: Sequence[Callable[[], Coroutine[Any, Any, None]]]) -> None:
        self._begin()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for close in last:
            await close()

    def call(self, function: Callable[..., Coroutine[Any, Any, Any] | None], *args: Any) -> None:
        """Run ``function(*args)`` on the loop, in the order of calls. A coroutine that it returns becomes a task."""
        self._inbox.append((function, args))
        if not self._is_woken:
            self._is_woken = True
            self.loop.call_soon_threadsafe(self._begin)

    def _begin(self) -> None:
        self._is_woken = False  # cleared first: a call that comes after the last popleft wakes the loop again
        while self._inbox:
            function, args = self._inbox.popleft()
            coroutine = function(*args)
            if coroutine is not None:
                self._tasks.add(self.loop.create_task(coroutine))
        if len(self._tasks) >= self._tidy_at:
            self._tasks = {task for task in self._tasks if not task.done()}
            self._tidy_at = 2 * len(self._tasks) + 64


class Alarm:
    """Calls ``ring(after_s)`` once unless cancelled. All alarms of a backend share one thread."""

    def __init__(self, backend: BaseBackend, after_s: float, ring: Callable[[float], None]) -> None:
        self._loop = _kept(backend, "_phloem_alarms", lambda: LoopThread(f"{type(backend).__name__}-alarms")).loop
        self._due = self._loop.time() + after_s
        self._handle: asyncio.TimerHandle | None = None
        self._ring: Callable[[], None] | None = lambda: ring(after_s)
        self._loop.call_soon_threadsafe(self._set)

    def _set(self) -> None:
        if (ring := self._ring) is not None:
            self._handle = self._loop.call_at(self._due, ring)

    def cancel(self) -> None:
        self._ring = None
        self._loop.call_soon_threadsafe(self._clear)

    def _clear(self) -> None:
        if self._handle is not None:
            self._handle.cancel()


def pool_of(backend: BaseBackend) -> ThreadPoolExecutor:
    name = type(backend).__name__
    return _kept(backend, "_phloem_pool", lambda: ThreadPoolExecutor(backend.max_threads, thread_name_prefix=name))


def loop_of(backend: BaseBackend) -> LoopThread:
    return _kept(backend, "_phloem_loop", lambda: LoopThread(f"{type(backend).__name__}-loop"))


def _kept(backend: BaseBackend, attribute: str, make: Callable[[], _T]) -> _T:
    """The attribute of ``backend``, made on first use. Many threads may ask for it at once."""
    kept: _T | None = backend.__dict__.get(attribute)
    if kept is None:
        with _making:
            kept = backend.__dict__.get(attribute)
            if kept is None:
                kept = backend.__dict__[attribute] = make()
    return kept
