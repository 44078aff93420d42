"""Many runs of one program at once. A thread is spent only on a body that waits for a value.

One thread runs the bodies in turn; when a body has to wait, it lends its place and another thread goes on with the
next. Never starts more threads than bodies that wait, and never more than ``num_threads``.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..protocol.errors import InvalidRequest
from .global_config import global_config
from .program import Program
from .state import ProgramState
from .tracer import MIN_PREFIX_CHARS, leading_nodes
from .values import Signal, current_crew

if TYPE_CHECKING:
    from .backend.base_backend import BaseBackend
    from .function import RunOptions, SglFunction

MAX_WAITING_BODIES = 1024


class BodyCrew:
    """The threads of one batch. ``states[i]`` is set when the body of item i has ended."""

    def __init__(
        self, function: SglFunction, backend: BaseBackend, items: list[dict[str, Any]], options: RunOptions, limit: int
    ) -> None:
        self.states: list[ProgramState | None] = [None] * len(items)
        self.changed = Signal(threading.Lock())
        self._function = function
        self._backend = backend
        self._options = options
        self._limit = limit
        self._left = deque(enumerate(items))
        self._lock = threading.Lock()
        self._num_threads = 0
        self._programs: list[Program] = []
        self._wanted = -1  # the item that is waited for

    def lend(self) -> None:
        """The calling body is about to wait: let somebody go on with the next one."""
        with self._lock:
            if not self._left or self._num_threads >= self._limit:
                return
            self._num_threads += 1
        threading.Thread(target=self.work, name=f"{self._function.__name__}-batch", daemon=True).start()

    def start(self) -> None:
        """Run the bodies on threads; returns at once."""
        self._num_threads += 1
        threading.Thread(target=self.work, name=f"{self._function.__name__}-batch", daemon=True).start()

    def work(self) -> None:
        """Bodies in turn, lending the place where one waits."""
        token = current_crew.set(self)
        try:
            while self.work_one(wait=False):
                pass
        finally:
            current_crew.reset(token)

    def work_one(self, *, wait: bool) -> bool:
        """The next body, and with ``wait`` its program to the end; False when none is left."""
        try:
            index, arguments = self._left.popleft()
        except IndexError:
            return False
        state = self._run(arguments, is_awaited=wait)
        if wait:
            _finish(state)
        self.states[index] = state
        if index == self._wanted:
            self.changed.notify()
        return True

    def stop(self) -> None:
        """Begin no more, and cancel what runs."""
        self._left.clear()
        for program in self._programs:
            if not program.session.closed.is_done:
                program.session.cancel()

    def wait(self, index: int) -> ProgramState:
        """The state of one item, once its body has ended. Called by one thread only."""
        self._wanted = index
        self.changed.wait_for(lambda: self.states[index] is not None)
        state = self.states[index]
        assert state is not None
        return state

    def _run(self, arguments: dict[str, Any], *, is_awaited: bool) -> ProgramState:
        function, options = self._function, self._options
        arguments = {**arguments, **function.bind_arguments}
        program = Program(
            self._backend,
            sampling=options.sampling,
            settings=options.settings,
            arguments=arguments,
            is_awaited=is_awaited,
            num_api_spec_tokens=function.num_api_spec_tokens,
        )
        self._programs.append(program)
        state = ProgramState(program.root)
        function._run_body(state, (), arguments)
        return state


def run_batch(
    function: SglFunction, batch: Sequence[Any], options: RunOptions
) -> list[ProgramState] | Iterator[ProgramState]:
    order = _Order(function, batch, options)
    if not order.items:
        return []
    if function.is_async:
        name = function.__name__
        if options.options.get("generator_style"):
            raise InvalidRequest(
                f"generator_style: the states of an async program come in an event loop; "
                f"write async for state in {name}.iter_batch_async(...)"
            )
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(_run_all(order))
        raise InvalidRequest(
            f"run_batch() of the async program {name}() cannot start a second event loop inside the running one; "
            f"write await {name}.run_batch_async(...)"
        )
    states = _unbounded(order) if order.limit is None else _bounded(order, order.limit)
    if order.shows_progress:
        states = _with_progress(states, order)
    if options.options.get("generator_style"):
        return states
    if order.limit is None and not order.shows_progress:
        return _all_at_once(order)
    return list(states)


async def run_batch_in_loop(function: SglFunction, batch: Sequence[Any], options: RunOptions) -> list[ProgramState]:
    order = _Order(function, batch, options)
    if options.options.get("generator_style"):
        raise InvalidRequest(
            f"generator_style: write async for state in {function.__name__}.iter_batch_async(...), which yields each "
            "state as it ends"
        )
    return await _run_all(order) if order.items else []


async def iter_batch_in_loop(
    function: SglFunction, batch: Sequence[Any], options: RunOptions
) -> AsyncIterator[ProgramState]:
    order = _Order(function, batch, options)
    tasks = _tasks_of(order) if order.items else []
    try:
        with _progress(order) as advance:
            for task in tasks:
                state = await task
                advance()
                yield state
    finally:
        for task in tasks:
            task.cancel()


class _Order:
    """A batch, checked: what to run, on what, how much at a time."""

    def __init__(self, function: SglFunction, batch: Sequence[Any], options: RunOptions) -> None:
        from .function import resolve_backend

        if not isinstance(batch, list | tuple):
            raise InvalidRequest(f"run_batch() takes a list of items, not {type(batch).__name__}")
        self.function = function
        self.options = options
        self.items = [function.arguments_of(item) for item in batch]
        for item in self.items:
            unknown = [name for name in item if name not in function.arg_names]
            if unknown and not function.takes_any:
                raise InvalidRequest(
                    f"Given arguments mismatch the SGL function signature: {function.__name__}() has no argument "
                    f"{unknown[0]!r}; it has {', '.join(function.arg_names)}"
                )
        self.shows_progress = bool(options.options.get("progress_bar"))
        limit = options.options.get("num_threads", "auto")
        if limit != "auto" and (not isinstance(limit, int) or limit < 1):
            raise InvalidRequest(f"num_threads={limit!r}: must be 'auto' or 1 or more")
        self.limit: int | None = None if limit == "auto" else limit
        if not self.items:
            return
        self.backend = resolve_backend(options.options.get("backend"))
        if len(self.items) > 1 and self.backend.precache_in_batch and global_config.enable_precache_with_tracing:
            _precache(function, self.backend)


async def _run_all(order: _Order) -> list[ProgramState]:
    """Every item on the running loop, in order; an item that fails keeps its error."""
    tasks = _tasks_of(order)
    with _progress(order) as advance:
        if order.shows_progress:
            for task in tasks:
                task.add_done_callback(lambda _: advance())
        try:
            return list(await asyncio.gather(*tasks))
        except BaseException:
            for task in tasks:
                task.cancel()
            raise


def _tasks_of(order: _Order) -> list[asyncio.Task[ProgramState]]:
    """One per item, started in order."""
    function, options, backend = order.function, order.options, order.backend
    loop = asyncio.get_running_loop()

    async def run_one(arguments: dict[str, Any]) -> ProgramState:
        arguments = {**arguments, **function.bind_arguments}
        program = Program(
            backend,
            sampling=options.sampling,
            settings=options.settings,
            arguments=arguments,
            loop=loop,
            num_api_spec_tokens=function.num_api_spec_tokens,
        )
        state = ProgramState(program.root)
        await function._run_body_async(state, (), arguments)
        closed = program.session.closed
        if not closed.is_done:
            try:
                await closed.wait_for_async(closed.done)
            except asyncio.CancelledError:
                program.session.cancel()
                raise
        return state

    if order.limit is None:
        return [loop.create_task(run_one(item)) for item in order.items]
    gate = asyncio.Semaphore(order.limit)

    async def run_gated(arguments: dict[str, Any]) -> ProgramState:
        async with gate:
            return await run_one(arguments)

    return [loop.create_task(run_gated(item)) for item in order.items]


def _precache(function: SglFunction, backend: BaseBackend) -> None:
    """Tell the backend the constant text that all items begin with, if it is long enough."""
    nodes = leading_nodes(function, backend)
    if sum(len(node.text) for node in nodes) > MIN_PREFIX_CHARS:
        backend.cache_nodes(nodes)


def _finish(state: ProgramState) -> ProgramState:
    closed = state._program.session.closed
    closed.wait_for(closed.done)
    return state


def _unbounded(order: _Order) -> Iterator[ProgramState]:
    """Every item in flight at once; in order."""
    crew = BodyCrew(order.function, order.backend, order.items, order.options, MAX_WAITING_BODIES)
    try:
        crew.start()
        for index in range(len(order.items)):
            yield _finish(crew.wait(index))
    finally:
        crew.stop()


def _all_at_once(order: _Order) -> list[ProgramState]:
    """The same, all of them: waits for the last first, for when it has ended most others have too."""
    crew = BodyCrew(order.function, order.backend, order.items, order.options, MAX_WAITING_BODIES)
    try:
        crew.start()
        for index in range(len(order.items) - 1, -1, -1):
            _finish(crew.wait(index))
    finally:
        crew.stop()
    return [crew.wait(index) for index in range(len(order.items))]


def _bounded(order: _Order, limit: int) -> Iterator[ProgramState]:
    """At most ``limit`` items in flight; in order."""
    crew = BodyCrew(order.function, order.backend, order.items, order.options, 0)

    def work() -> None:
        while crew.work_one(wait=True):
            pass

    try:
        for _ in range(min(limit, len(order.items))):
            threading.Thread(target=work, name=f"{order.function.__name__}-batch", daemon=True).start()
        for index in range(len(order.items)):
            yield crew.wait(index)
    finally:
        crew.stop()


def _with_progress(states: Iterator[ProgramState], order: _Order) -> Iterator[ProgramState]:
    with _progress(order) as advance:
        for state in states:
            advance()
            yield state


@contextmanager
def _progress(order: _Order) -> Iterator[Callable[[], None]]:
    """A bar where the batch asks for one; what is given is called once per finished item."""
    if not order.shows_progress:
        yield lambda: None
        return
    from rich.progress import Progress

    with Progress(transient=False) as bar:
        task = bar.add_task(order.function.__name__, total=len(order.items))
        yield lambda: bar.advance(task)
