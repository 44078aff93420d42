"""The client: programs submitted to an engine, and every message about them given to the program's handler.

Never reconnects: when the engine is lost every waiting op fails once, and a new ``Client`` starts anew.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import zmq

from .address import ClientKeys
from .errors import (
    Cancelled,
    EngineLost,
    InternalError,
    InvalidRequest,
    LimitExceeded,
    Overloaded,
    PhloemError,
    from_info,
)
from .frames import encode_client
from .line import Line
from .messages import (
    Accepted,
    Answer,
    Cancel,
    Closed,
    Delta,
    Done,
    Failed,
    ProgramStats,
    Query,
    Rejected,
    RuntimeMessage,
    Submit,
    Welcome,
)

logger = logging.getLogger(__name__)

Handler = Callable[[RuntimeMessage], None]


@dataclass(slots=True)
class _Program:
    handler: Handler
    pending: dict[int, None] = field(default_factory=dict)  # op ids without a final message, in order
    in_flight: deque[list[int]] = field(default_factory=deque)  # op ids of each submit not yet accepted
    is_accepted: bool = False
    is_cancelled: bool = False


class Client:
    """A connected client; its methods may be called on any thread, handlers are called on the client's own.

    A handler must return soon and may submit or cancel, but not ``query``. What it raises is logged and goes no
    further. When the engine is lost, each pending op's handler gets one ``Failed(EngineLost)``, then one ``Closed``.
    ``engine_alive`` says why the engine's process has ended, or None while it lives. ``engine_timeout_s`` is the
    silence after which an engine counts as lost; a closed connection is noticed at once.
    """

    def __init__(
        self,
        url: str,
        *,
        context: zmq.Context[Any] | None = None,
        keys: ClientKeys | None = None,
        connect_timeout_s: float = 30.0,
        engine_timeout_s: float = 30.0,
        engine_alive: Callable[[], str | None] | None = None,
    ) -> None:
        self.url = url
        self._lock = threading.Lock()
        self._programs: dict[str, _Program] = {}
        self._queries: dict[int, Future[Any]] = {}
        self._next_query = 0
        self._end: PhloemError | None = None
        self._line = Line(
            url,
            receive=self._take,
            ended=self._finish,
            context=context,
            keys=keys,
            connect_timeout_s=connect_timeout_s,
            engine_timeout_s=engine_timeout_s,
            engine_alive=engine_alive,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def welcome(self) -> Welcome:
        return self._line.welcome

    @property
    def lost(self) -> str | None:
        """Why nothing can be submitted any more; None while the engine is there."""
        return None if self._end is None else self._end.message

    def submit(self, submit: Submit, handler: Handler | None = None) -> None:
        """Send ops. ``handler`` is given with a program's first submit, and only then.

        Raises ``EngineLost`` when there is no engine, ``LimitExceeded`` and ``InvalidRequest`` for what cannot be
        sent; what the engine refuses comes to the handler as ``Rejected``.
        """
        frame = encode_client(submit)
        limit = self.welcome.limits.max_submit_bytes
        if len(frame) > limit:
            text = f"a submit of {len(frame):,} bytes, but the limit is {limit:,}; send its ops in several submits"
            raise LimitExceeded(text, where="ops")
        ids = [op.op for op in submit.ops]
        with self._lock:
            self._check_open()
            program = self._programs.get(submit.program)
            if program is None:
                if handler is None:
                    text = f"program {submit.program!r} is not running here; its first submit brings a handler"
                    raise InvalidRequest(text, where="program")
                program = self._programs[submit.program] = _Program(handler)
            elif program.is_cancelled:
                raise Cancelled(f"program {submit.program!r} was cancelled", where="program")
            elif handler is not None and handler != program.handler:
                text = f"program {submit.program!r} has a handler already; only its first submit brings one"
                raise InvalidRequest(text, where="program")
            repeated = [op for op in ids if op in program.pending] or [op for op in set(ids) if ids.count(op) > 1]
            if repeated:
                if not program.in_flight and not program.is_accepted:
                    del self._programs[submit.program]
                raise InvalidRequest(f"op id {repeated[0]} is used twice", where="ops")
            program.pending.update(dict.fromkeys(ids))
            program.in_flight.append(ids)
            self._line.send(frame)

    def cancel(self, program: str, seq: int | None = None, op: int | None = None) -> None:
        """End a program, a sequence of it or one op. Nothing happens when it has ended already."""
        with self._lock:
            known = self._programs.get(program)
            if self._end is not None or known is None:
                return
            known.is_cancelled = known.is_cancelled or (seq is None and op is None)
            self._line.send(encode_client(Cancel(program=program, seq=seq, op=op)))

    def query(self, what: str, timeout_s: float = 10.0) -> Any:
        """Ask the engine: ``what`` is one of ``messages.QUERIES``. Raises ``Overloaded`` after ``timeout_s``."""
        if self._line.is_own_thread():
            raise InternalError("query() waits for the client's own thread, so a handler cannot call it")
        answer: Future[Any] = Future()
        with self._lock:
            self._check_open()
            self._next_query += 1
            number = self._next_query
            self._queries[number] = answer
            self._line.send(encode_client(Query(id=number, what=what)))
        try:
            return answer.result(timeout_s)
        except FutureTimeout:
            text = f"the engine has not answered query {what!r} within {timeout_s:g} s; it may be in a long step"
            raise Overloaded(text) from None
        finally:
            with self._lock:
                self._queries.pop(number, None)

    def close(self) -> None:
        """Leave the engine; what still waits fails as ``Cancelled``. A second call does nothing."""
        self._line.close()

    def _check_open(self) -> None:
        if self._end is not None:
            raise EngineLost(f"no engine at {self.url}: {self._end.message}")

    # -- on the client's thread ---------------------------------------------------------------------------------------

    def _take(self, message: RuntimeMessage) -> None:
        match message:
            case Answer():
                self._answer(message)
            case Accepted():
                self._on_accepted(message)
            case Rejected():
                self._on_rejected(message)
            case Delta():
                with self._lock:
                    program = self._programs.get(message.program)
                if program is not None and message.op in program.pending:
                    self._tell(program, message)
            case Done() | Failed():
                with self._lock:
                    program = self._programs.get(message.program)
                    is_news = program is not None and message.op in program.pending
                    if program is not None and is_news:
                        del program.pending[message.op]
                if program is not None and is_news:
                    self._tell(program, message)
            case Closed():
                with self._lock:
                    program = self._programs.pop(message.program, None)
                if program is not None:
                    self._fail_pending(message.program, program, Cancelled("the program had ended before this op"))
                    self._tell(program, message)
            case _:
                logger.warning("unexpected %s from the engine", type(message).__name__)

    def _on_accepted(self, message: Accepted) -> None:
        with self._lock:
            program = self._programs.get(message.program)
            if program is None:
                # it was closed while this submit was under way, and the engine has begun it anew: nobody waits for it
                self._line.send(encode_client(Cancel(program=message.program)))
                return
            if program.in_flight:
                program.in_flight.popleft()
            program.is_accepted = True
        self._tell(program, message)

    def _on_rejected(self, message: Rejected) -> None:
        with self._lock:
            program = self._programs.get(message.program)
            if program is None:
                return
            for op in program.in_flight.popleft() if program.in_flight else ():
                program.pending.pop(op, None)
            if not program.is_accepted and not program.in_flight:
                del self._programs[message.program]
        self._tell(program, message)

    def _answer(self, message: Answer) -> None:
        with self._lock:
            waiting = self._queries.pop(message.id, None)
        if waiting is None:
            return  # the asker has given up
        if message.error is not None:
            waiting.set_exception(from_info(message.error))
        else:
            waiting.set_result(message.value)

    def _finish(self, error: PhloemError) -> None:
        """The line has ended: whoever waits is told, once."""
        with self._lock:
            self._end = error
            programs, self._programs = self._programs, {}
            queries, self._queries = self._queries, {}
        for name, program in programs.items():
            self._fail_pending(name, program, error)
            self._tell(program, Closed(program=name, stats=ProgramStats()))
        for waiting in queries.values():
            waiting.set_exception(error)

    def _fail_pending(self, name: str, program: _Program, error: PhloemError) -> None:
        info = error.info()
        pending, program.pending = program.pending, {}
        for op in pending:
            self._tell(program, Failed(program=name, op=op, error=info))

    def _tell(self, program: _Program, message: RuntimeMessage) -> None:
        try:
            program.handler(message)
        except Exception:
            logger.exception("a handler failed on %s", type(message).__name__)
