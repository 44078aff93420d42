"""The values of a program's variables. The backend resolves each ``Leaf`` once; the other values are made of leaves.

Waiting for a leaf ships nothing: ``ProgramRun.wait_leaves`` ships what is queued and then waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from ..protocol.messages import GenMeta, SelectMeta
from .meta import meta_info
from .types import parse_or_explain

if TYPE_CHECKING:
    from .grammar import Grammar


class Crew(Protocol):
    """The threads of a batch. ``lend`` is called before one of them waits, so that another body can run meanwhile."""

    def lend(self) -> None: ...


current_crew: ContextVar[Crew | None] = ContextVar("phloem_crew", default=None)


class Signal:
    """A condition that threads and event loops can wait for. Each waiter is called once, outside the lock.

    All signals of a run share one lock, so that a signal is cheap to make.
    """

    __slots__ = ("_lock", "_waiters")

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self._waiters: list[Callable[[], object]] | None = None

    def notify(self) -> None:
        """Wake the waiters. Call it after the change, so that a waiter that subscribes later sees the change itself."""
        with self._lock:
            waiters, self._waiters = self._waiters, None
        for wake in waiters or ():
            wake()

    def subscribe(self, holds: Callable[[], bool], wake: Callable[[], object]) -> bool:
        """True if ``holds()`` is true already; otherwise ``wake`` is called at the next change."""
        with self._lock:
            if holds():
                return True
            if self._waiters is None:
                self._waiters = []
            self._waiters.append(wake)
            return False

    def wait_for(self, holds: Callable[[], bool], timeout_s: float | None = None) -> None:
        """Block the thread until ``holds()``; ``TimeoutError`` after ``timeout_s``."""
        if holds():
            return
        crew = current_crew.get()
        if crew is not None:
            crew.lend()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            gate = threading.Lock()
            gate.acquire()
            if self.subscribe(holds, gate.release):
                return
            left = -1.0 if deadline is None else max(deadline - time.monotonic(), 0.0)
            if not gate.acquire(timeout=left):
                raise TimeoutError(f"no value within {timeout_s} s")

    async def wait_for_async(self, holds: Callable[[], bool]) -> None:
        """``wait_for`` for an event loop, which it does not block."""
        while not holds():
            loop = asyncio.get_running_loop()
            woken = loop.create_future()
            if self.subscribe(holds, lambda: _wake(loop, woken)):  # noqa: B023
                return
            await woken


def wait_any(leaves: Sequence[Leaf], timeout_s: float | None = None) -> None:
    """Block the thread until one of ``leaves`` changes; ``TimeoutError`` after ``timeout_s``."""
    crew = current_crew.get()
    if crew is not None:
        crew.lend()
    gate = threading.Semaphore(0)
    for leaf in leaves:
        if leaf.subscribe(leaf.done, gate.release):
            return
    if not gate.acquire(timeout=timeout_s):
        raise TimeoutError(f"no value within {timeout_s} s")


async def wait_any_async(leaves: Sequence[Leaf]) -> None:
    """``wait_any`` for an event loop, which it does not block."""
    loop = asyncio.get_running_loop()
    woken = loop.create_future()
    for leaf in leaves:
        if leaf.subscribe(leaf.done, lambda: _wake(loop, woken)):
            return
    await woken


def _wake(loop: asyncio.AbstractEventLoop, woken: asyncio.Future[None]) -> None:
    try:
        is_here = asyncio.get_running_loop() is loop
    except RuntimeError:
        is_here = False
    if is_here:
        _settle(woken)
        return
    with contextlib.suppress(RuntimeError):  # the loop is closed, so no task waits
        loop.call_soon_threadsafe(_settle, woken)


def _settle(woken: asyncio.Future[None]) -> None:
    if not woken.done():
        woken.set_result(None)


class Value(Protocol):
    def leaves(self) -> Iterable[Leaf]:
        """The leaves that must be resolved before ``read``."""
        ...

    def read(self) -> Any:
        """The value. Raises the error with which it failed."""
        ...

    def text(self) -> str:
        """Its text when it is appended."""
        ...


class Leaf(Signal):
    """The result of one generation or selection. ``chunks``: the text of candidate 0 streamed so far.

    ``lock`` is the lock of its run, and identifies the run. ``op`` is its id in the runtime once it is shipped.
    ``read`` returns a text, a list of ``n`` texts, or the value that ``parse`` makes of the text.
    """

    __slots__ = ("chunks", "error", "index", "is_done", "meta", "n", "name", "op", "parse", "partial", "texts")

    def __init__(
        self, lock: threading.Lock, name: str | None, *, n: int = 1, parse: Callable[[str], Any] | None = None
    ) -> None:
        self._lock = lock
        self._waiters = None
        self.name = name
        self.n = n
        self.parse = parse
        self.op = -1
        self.is_done = False
        self.index = 0  # of the fork that was picked, if this leaf decides between forks
        self.texts: Sequence[str] = ()
        self.partial: Sequence[str] = ()
        self.meta: Any = None
        self.error: BaseException | None = None
        self.chunks: list[str] | None = None

    # -- called by the backend, on any thread ------------------------------------------------------------------------

    def push(self, text: str) -> None:
        if self.chunks is None:
            self.chunks = []
        self.chunks.append(text)
        self.notify()

    def resolve(self, texts: Sequence[str], meta: Any = None) -> None:
        if not self.is_done:
            self.texts = texts if type(texts) is tuple else tuple(texts)
            self.meta = meta
            self.is_done = True
            self.notify()

    def fail(self, error: BaseException, partial: Sequence[str] = ()) -> None:
        if not self.is_done:
            self.error = error
            self.partial = partial
            self.is_done = True
            self.notify()

    @property
    def lock(self) -> threading.Lock:
        return self._lock

    def belongs_to(self, lock: threading.Lock) -> bool:
        return self._lock is lock

    def report(self) -> Any:
        """What ``s.get_meta_info`` returns for it."""
        return meta_info(self.meta) if isinstance(self.meta, GenMeta | SelectMeta) else self.meta

    # -- read by the program ------------------------------------------------------------------------------------------

    def leaves(self) -> Iterable[Leaf]:
        return (self,)

    def done(self) -> bool:
        return self.is_done

    def sources(self) -> tuple[Leaf, ...]:
        """The leaves that the backend resolves for it: itself, or those from which Python decides it."""
        return (self,)

    def raise_error(self) -> None:
        if self.error is not None:
            raise self.error.with_traceback(None)

    def read(self) -> Any:
        self.raise_error()
        if self.parse is not None:
            parsed = [self._parsed(i) for i in range(len(self.texts))]
            return parsed if self.n > 1 else parsed[0]
        return list(self.texts) if self.n > 1 else self.texts[0]

    def _parsed(self, index: int) -> Any:
        assert self.parse is not None
        candidates = getattr(self.meta, "candidates", None)
        reason = candidates[index].finish_reason if candidates else ""
        return parse_or_explain(self.name, self.parse, self.texts[index], reason)

    def text(self) -> str:
        self.raise_error()
        return self.texts[0]

    def partial_text(self) -> str:
        """The text so far."""
        if self.error is not None:
            return self.partial[0] if self.partial else ""
        return self.texts[0] if self.is_done else "".join(self.chunks or ())

    def _has_news(self, taken: int) -> bool:
        """Whether there are more than ``taken`` chunks, or the leaf is done."""
        return self.is_done or len(self.chunks or ()) > taken

    def read_chunks(self) -> Iterator[str]:
        """New text as it is generated, blocking. If the leaf failed, its error is raised after the text before it."""
        sent, taken = 0, 0
        while True:
            finished = self.is_done  # read before the chunks: no chunk is added after it is set
            chunks = self.chunks or ()
            count = len(chunks)
            for chunk in chunks[taken:count]:
                sent += len(chunk)
                yield chunk
            taken = count
            if finished:
                break
            self.wait_for(partial(self._has_news, count))
        self.raise_error()
        if sent < len(self.texts[0]):
            yield self.texts[0][sent:]

    async def read_chunks_async(self) -> AsyncIterator[str]:
        """``read_chunks`` for an event loop."""
        sent, taken = 0, 0
        while True:
            finished = self.is_done
            chunks = self.chunks or ()
            count = len(chunks)
            for chunk in chunks[taken:count]:
                sent += len(chunk)
                yield chunk
            taken = count
            if finished:
                break
            await self.wait_for_async(partial(self._has_news, count))
        self.raise_error()
        if sent < len(self.texts[0]):
            yield self.texts[0][sent:]


class DrawnText:
    """Text ``index`` of a leaf with several candidates."""

    __slots__ = ("index", "leaf")

    def __init__(self, leaf: Leaf, index: int) -> None:
        self.leaf = leaf
        self.index = index

    def leaves(self) -> Iterable[Leaf]:
        return (self.leaf,)

    def read(self) -> str:
        self.leaf.raise_error()
        return self.leaf.texts[self.index]

    text = read

    def partial_text(self) -> str:
        return self.leaf.texts[self.index] if self.index < len(self.leaf.texts) else self.leaf.partial_text()


class CapturedText:
    """A named part of a generated text, found by its grammar."""

    __slots__ = ("grammar", "leaf", "name")

    def __init__(self, leaf: Leaf, grammar: Grammar, name: str) -> None:
        self.leaf = leaf
        self.grammar = grammar
        self.name = name

    def leaves(self) -> Iterable[Leaf]:
        return (self.leaf,)

    def read(self) -> str | None:
        return self.grammar.captures(self.leaf.text())[self.name]

    def text(self) -> str:
        return self.read() or ""


class Constant:
    """A value set by the body."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def leaves(self) -> Iterable[Leaf]:
        return ()

    def read(self) -> Any:
        return self.value

    def text(self) -> str:
        return self.value if isinstance(self.value, str) else str(self.value)


class Hole:
    """The text of an argument of a traced program."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def leaves(self) -> Iterable[Leaf]:
        return ()

    def read(self) -> str:
        return f"{{{self.name}}}"

    text = read
    partial_text = read


Piece = str | Leaf | DrawnText | Hole  # a part of a sequence's text


class TextSpan:
    """The text of several pieces, in order."""

    __slots__ = ("pieces",)

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = pieces

    def leaves(self) -> Iterable[Leaf]:
        return [leaf for piece in self.pieces if not isinstance(piece, str) for leaf in piece.leaves()]

    def read(self) -> str:
        return "".join([piece if isinstance(piece, str) else piece.text() for piece in self.pieces])

    text = read


class Picked:
    """Variable ``name`` of the fork that ``decision`` picks. ``values`` has None for a fork without that variable."""

    __slots__ = ("decision", "name", "values")

    def __init__(self, decision: Leaf, name: str | None, values: Sequence[Value | None]) -> None:
        self.decision = decision
        self.name = name
        self.values = values

    def leaves(self) -> Iterable[Leaf]:
        return (self.decision,)  # it resolves after everything that it decides between

    def value(self) -> Value:
        self.decision.raise_error()
        found = self.values[self.decision.index]
        if found is None:
            raise KeyError(f"the fork that was picked has no variable {self.name!r}")
        return found

    def read(self) -> Any:
        return self.value().read()

    def text(self) -> str:
        return self.value().text()


class Gathered:
    """One value per fork."""

    __slots__ = ("values",)

    def __init__(self, values: Sequence[Value]) -> None:
        self.values = values

    def leaves(self) -> Iterable[Leaf]:
        return [leaf for value in self.values for leaf in value.leaves()]

    def read(self) -> list[Any]:
        return [value.read() for value in self.values]

    def text(self) -> str:
        return "".join(value.text() for value in self.values)
