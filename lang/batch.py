"""Many runs of one program at once.

One thread runs the bodies in turn. When a body has to wait for a value, another thread takes over the next items, so
there is one thread for each body that waits, at most ``MAX_WAITING_BODIES`` (or ``num_threads``).
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from .state import ProgramState
from .values import Signal, current_crew

MAX_WAITING_BODIES = 1024


class Begin(Protocol):
    def __call__(self, arguments: dict[str, Any], *, is_awaited: bool) -> ProgramState:
        """The state of one item whose body has not begun."""
        ...


@dataclass(frozen=True, slots=True)
class Batch:
    """The items of one batch and how to run one. ``limit``: how many run at once; None: all of them."""

    name: str
    items: list[dict[str, Any]]
    begin: Begin
    begin_async: Callable[[dict[str, Any], asyncio.AbstractEventLoop], Coroutine[Any, Any, ProgramState]]
    run_body: Callable[[ProgramState, dict[str, Any], Callable[[ProgramState], None]], ProgramState]
    run_body_async: Callable[[ProgramState, dict[str, Any]], Coroutine[Any, Any, ProgramState]]
    limit: int | None
    shows_progress: bool


class BodyCrew:
    """The threads of one batch. ``states[i]`` is set when the body of item i has ended."""

    def __init__(self, batch: Batch, limit: int) -> None:
        self.states: list[ProgramState | None] = [None] * len(batch.items)
        self.changed = Signal(threading.Lock())
        self._batch = batch
        self._limit = limit  # how many threads lend() may start
        self._left = deque(enumerate(batch.items))
        self._lock = threading.Lock()
        self._num_threads = 0
        self._begun: list[ProgramState] = []
        self._wanted = -1  # the item that wait() waits for

    def lend(self) -> None:
        """Called by a body that is about to wait: another thread takes over the next item."""
        with self._lock:
            if not self._left or self._num_threads >= self._limit:
                return
            self._num_threads += 1
        self._start_thread(self.work)

    def start(self) -> None:
        """Run the bodies on threads; returns at once."""
        self._num_threads += 1
        self._start_thread(self.work)

    def start_bounded(self, num_threads: int) -> None:
        """Run the items on ``num_threads`` threads, each item to the end of its program."""
        for _ in range(num_threads):
            self._start_thread(self._work_bounded)

    def _start_thread(self, target: Callable[[], None]) -> None:
        threading.Thread(target=target, name=f"{self._batch.name}-batch", daemon=True).start()

    def work(self) -> None:
        """Run bodies in turn. Where one waits, another thread takes over the rest."""
        token = current_crew.set(self)
        try:
            while self._work_one(wait=False):
                pass
        finally:
            current_crew.reset(token)

    def _work_bounded(self) -> None:
        while self._work_one(wait=True):
            pass

    def _work_one(self, *, wait: bool) -> bool:
        """Run the next body, and with ``wait`` its program to the end; False when no item is left."""
        try:
            index, arguments = self._left.popleft()
        except IndexError:
            return False
        state = self._batch.begin(arguments, is_awaited=wait)
        self._begun.append(state)
        state = self._batch.run_body(state, arguments, self._begun.append)
        if wait:
            _finish(state)
        self.states[index] = state
        if index == self._wanted:
            self.changed.notify()
        return True

    def stop(self) -> None:
        """Begin no further item, and cancel those that run."""
        self._left.clear()
        for state in self._begun:
            session = state.program.session
            if not session.closed.is_done:
                session.cancel()

    def wait(self, index: int) -> ProgramState:
        """The state of one item, once its body has ended. Called by one thread only."""
        self._wanted = index
        self.changed.wait_for(lambda: self.states[index] is not None)
        state = self.states[index]
        assert state is not None
        return state


def run_states(batch: Batch) -> list[ProgramState]:
    """Every item, in batch."""
    if batch.limit is None and not batch.shows_progress:
        return _all_at_once(batch)
    return list(iter_states(batch))


def iter_states(batch: Batch) -> Iterator[ProgramState]:
    """Every item, in order, each as soon as it and those before it have ended."""
    states = _unbounded(batch) if batch.limit is None else _bounded(batch, batch.limit)
    return _with_progress(states, batch) if batch.shows_progress else states


async def run_in_loop(batch: Batch) -> list[ProgramState]:
    """Every item on the running loop, in order; an item that fails keeps its error."""
    tasks = _tasks_of(batch)
    with _progress(batch) as advance:
        if batch.shows_progress:
            for task in tasks:
                task.add_done_callback(lambda _: advance())
        try:
            return list(await asyncio.gather(*tasks))
        except BaseException:
            for task in tasks:
                task.cancel()
            raise


async def iter_in_loop(batch: Batch) -> AsyncIterator[ProgramState]:
    """The states in order, on the running loop. Closing the iterator cancels the items that still run."""
    tasks = _tasks_of(batch)
    try:
        with _progress(batch) as advance:
            for task in tasks:
                state = await task
                advance()
                yield state
    finally:
        for task in tasks:
            task.cancel()


def _tasks_of(batch: Batch) -> list[asyncio.Task[ProgramState]]:
    """One per item, started in batch."""
    loop = asyncio.get_running_loop()

    async def run_one(arguments: dict[str, Any]) -> ProgramState:
        state = await batch.begin_async(arguments, loop)
        state = await batch.run_body_async(state, arguments)
        session = state.program.session
        closed = session.closed
        if not closed.is_done:
            try:
                await closed.wait_for_async(closed.done)
            except asyncio.CancelledError:
                session.cancel()
                raise
        return state

    if batch.limit is None:
        return [loop.create_task(run_one(item)) for item in batch.items]
    gate = asyncio.Semaphore(batch.limit)

    async def run_gated(arguments: dict[str, Any]) -> ProgramState:
        async with gate:
            return await run_one(arguments)

    return [loop.create_task(run_gated(item)) for item in batch.items]


def _finish(state: ProgramState) -> ProgramState:
    closed = state.program.session.closed
    closed.wait_for(closed.done)
    return state


def _unbounded(batch: Batch) -> Iterator[ProgramState]:
    """The states in order; all items run at once."""
    crew = BodyCrew(batch, MAX_WAITING_BODIES)
    try:
        crew.start()
        for index in range(len(batch.items)):
            yield _finish(crew.wait(index))
    finally:
        crew.stop()


def _all_at_once(batch: Batch) -> list[ProgramState]:
    """The same as a list. Waits for the last item first: most others have ended by then."""
    crew = BodyCrew(batch, MAX_WAITING_BODIES)
    try:
        crew.start()
        for index in range(len(batch.items) - 1, -1, -1):
            _finish(crew.wait(index))
    finally:
        crew.stop()
    return [crew.wait(index) for index in range(len(batch.items))]


def _bounded(batch: Batch, limit: int) -> Iterator[ProgramState]:
    """The states in order; at most ``limit`` items run at once."""
    crew = BodyCrew(batch, 0)
    try:
        crew.start_bounded(min(limit, len(batch.items)))
        for index in range(len(batch.items)):
            yield crew.wait(index)
    finally:
        crew.stop()


def _with_progress(states: Iterator[ProgramState], batch: Batch) -> Iterator[ProgramState]:
    with _progress(batch) as advance:
        for state in states:
            advance()
            yield state


@contextmanager
def _progress(batch: Batch) -> Iterator[Callable[[], None]]:
    """A progress bar if the batch asks for one. Yields a function to call once per finished item."""
    if not batch.shows_progress:
        yield lambda: None
        return
    from rich.progress import Progress

    with Progress(transient=False) as bar:
        task = bar.add_task(batch.name, total=len(batch.items))
        yield lambda: bar.advance(task)
