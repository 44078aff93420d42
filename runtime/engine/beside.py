"""Work for a sequence that takes longer than a step may wait, such as tokenizing a long text: it runs on a thread.

The sequence waits, as it does while the model computes its first op; a cancellation ends the wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from .program import SequenceState

Result = TypeVar("Result")


class Beside:
    """Belongs to the engine's thread, but for the work itself. One thread does it, in the order in which it comes."""

    def __init__(self, ready: deque[SequenceState], *, name: str = "tokenizer") -> None:
        """``ready``: where sequences go that need not wait any more. ``name``: of the thread."""
        self._ready = ready
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._waiting: dict[SequenceState, tuple[Future[Any], Callable[[Any], None]]] = {}

    @property
    def futures(self) -> list[Future[Any]]:
        """Of the work that has not been taken."""
        return [future for future, _ in self._waiting.values()]

    def begin(
        self, owner: SequenceState, work: Callable[[Callable[[], bool]], Result], take: Callable[[Result], None]
    ) -> None:
        """Call ``work`` on the thread; ``poll`` then calls ``take`` with its result, or fails with its error.

        ``work`` must change nothing. It gets a function that says whether its result is still wanted.
        """
        is_over: list[bool] = []
        future = self._thread.submit(work, lambda: not is_over)
        self._waiting[owner] = future, take
        owner.stop_op = partial(self._stop, owner, is_over)

    def poll(self, fail: Callable[[SequenceState, BaseException], None]) -> None:
        """Take the results that are there. ``fail(sequence, error)`` is called where work has raised an error."""
        for owner in [owner for owner, (future, _) in self._waiting.items() if future.done()]:
            future, take = self._waiting.pop(owner)
            owner.stop_op = None
            error = future.exception()
            if error is not None:
                fail(owner, error)
            else:
                take(future.result())
            self._ready.append(owner)
            self._ready.extend(owner.program.joining)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _stop(self, owner: SequenceState, is_over: list[bool]) -> tuple[str, ...]:
        future, _ = self._waiting.pop(owner)
        is_over.append(True)
        future.cancel()
        return ()
