"""Threads with a bounded queue, for what the engine's thread must not wait for."""

import logging
import time
from collections import deque
from collections.abc import Callable
from threading import Condition, Thread

log = logging.getLogger(__name__)


class Workers:
    """Runs tasks in the order of their coming, ``num_threads`` at once. A task that raises is logged."""

    def __init__(self, name: str, *, num_threads: int, max_queued: int) -> None:
        self.max_queued = max_queued
        self._tasks: deque[Callable[[], None]] = deque()
        self._num_running = 0
        self._is_closed = False
        self._changed = Condition()
        self._threads = [Thread(target=self._work, name=f"{name}-{i}", daemon=True) for i in range(num_threads)]
        for thread in self._threads:
            thread.start()

    @property
    def num_open(self) -> int:
        """Tasks that wait or run."""
        return len(self._tasks) + self._num_running

    def submit(self, task: Callable[[], None]) -> bool:
        """False where ``max_queued`` tasks wait already: the task is not run."""
        with self._changed:
            if self._is_closed or len(self._tasks) >= self.max_queued:
                return False
            self._tasks.append(task)
            self._changed.notify()
        return True

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing waits or runs; False where that takes longer than ``timeout_s``."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.num_open, timeout_s)

    def close(self, timeout_s: float | None = None) -> None:
        """Finish what waits, within ``timeout_s``; a thread that hangs then ends with the process."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        self.wait(timeout_s)
        with self._changed:
            self._is_closed = True
            self._tasks.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(None if deadline_s is None else max(0.0, deadline_s - time.monotonic()))

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._tasks or self._is_closed)
                if not self._tasks:
                    return
                task = self._tasks.popleft()
                self._num_running += 1
            try:
                task()
            except Exception:
                log.exception("a KV block was not written or not read")
            finally:
                del task
                with self._changed:
                    self._num_running -= 1
                    self._changed.notify_all()
