"""The client of an engine over ZeroMQ: it sends the submits of program calls and hands each call its messages."""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec
import zmq

from .address import ClientKeys
from .channel import Channel
from .errors import (
    EngineLost,
    InternalError,
    InvalidRequest,
    LimitExceeded,
    Overloaded,
    PhloemError,
    Unsupported,
    from_info,
)
from .frames import encode_client
from .messages import (
    GRANT_TTL_S,
    MAX_INPUTS,
    Accepted,
    Answer,
    Cancel,
    Closed,
    Delta,
    Done,
    Embed,
    Embedded,
    EndGrant,
    Export,
    Failed,
    Fetch,
    Forget,
    Grant,
    Import,
    Imported,
    Limits,
    LoadAdapter,
    Query,
    Rejected,
    RuntimeMessage,
    Submit,
    UnloadAdapter,
    Welcome,
)
from .program_call import Receiver

logger = logging.getLogger(__name__)

Value = TypeVar("Value")


def encode_submit(submit: Submit, limits: Limits) -> bytes:
    """Raises ``LimitExceeded`` and ``InvalidRequest`` for what cannot be sent."""
    frame = encode_client(submit)
    if len(frame) > limits.max_submit_bytes:
        text = f"a submit of {len(frame):,} bytes, but the limit is {limits.max_submit_bytes:,}"
        raise LimitExceeded(f"{text}; send its ops in several submits", where="ops")
    return frame


def check_embed(inputs: Sequence[str | list[int]], welcome: Welcome, *, seconds: Sequence[str] | None = None) -> None:
    """Raises what ``Client.embed`` raises for the kind of model and the number of inputs; what ``Client.score`` raises
    with ``seconds``.
    """
    is_decoder = not {"embed", "score"} & set(welcome.capabilities)
    if seconds is not None and "score" not in welcome.capabilities:
        kind = "a decoder, which generates text" if is_decoder else "an encoder, which gives embeddings"
        text = f"{welcome.model!r} is {kind} and has no classification layer for scores"
        raise Unsupported(f"{text}; send the request to a reranker or a classifier", where="model")
    if seconds is None and "embed" not in welcome.capabilities:
        text = f"{welcome.model!r} is a classifier, which scores texts and gives no embeddings"
        if is_decoder:
            text = f"{welcome.model!r} is a decoder, whose embeddings come from programs with the operation 'embedding'"
        raise Unsupported(f"{text}; send this request to an embedding model", where="model")
    if seconds and len(seconds) != len(inputs):
        text = f"{len(inputs):,} texts and {len(seconds):,} second ones; give as many of both"
        raise InvalidRequest(text, where="input")
    if not inputs:
        raise InvalidRequest("input is empty; give at least one text or list of token ids", where="input")
    if len(inputs) > MAX_INPUTS:
        text = f"{len(inputs):,} inputs, but one request may have {MAX_INPUTS:,}; send several"
        raise LimitExceeded(text, where="input")


def _converted(answer: Future[Any], kind: type[Value]) -> Future[Value]:
    """The answer as a ``kind``."""
    found = Future[Value]()

    def pass_on(answer: Future[Any]) -> None:
        if answer.cancelled() or not found.set_running_or_notify_cancel():
            return
        if (error := answer.exception()) is not None:
            found.set_exception(error)
            return
        try:
            found.set_result(msgspec.convert(answer.result(), kind))
        except msgspec.ValidationError as wrong:
            found.set_exception(InternalError(f"an answer that is no {kind.__name__}: {wrong}"))

    answer.add_done_callback(pass_on)
    return found


class Client:
    """A connected client. Its methods may be called on any thread; it hands messages to calls on its own thread.

    An ``on_event`` of a call cannot ``query``, which waits for that thread. A client never reconnects: when the engine
    is lost, every call fails once, and submits raise ``EngineLost``. ``engine_alive`` says why the engine's process
    has ended, or None while it lives. ``engine_timeout_s`` is the silence after which an engine counts as lost; a
    closed connection is noticed at once.
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
        self.keys = keys
        self._lock = threading.Lock()
        self._calls: dict[str, Receiver] = {}
        self._queries: dict[int, Future[Any]] = {}
        self._next_query = 0
        self._adapters: tuple[str, ...] | None = None
        self._end: PhloemError | None = None
        self._on_end: Callable[[PhloemError], None] | None = None
        self._is_told = False  # every call has been told of the end
        self._channel = Channel(
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
        return self._channel.welcome

    @property
    def lost(self) -> str | None:
        """Why nothing can be submitted any more; None while the engine is there."""
        return None if self._end is None else self._end.message

    @property
    def silent_s(self) -> float:
        """Seconds since the oldest ping that the engine has not answered; 0.0 while it answers."""
        return self._channel.silent_s

    def when_ended(self, tell: Callable[[PhloemError], None]) -> None:
        """Call ``tell`` once, after every call was told that the channel has ended: on the client's thread, or now."""
        with self._lock:
            if not self._is_told:
                self._on_end = tell
                return
        assert self._end is not None
        tell(self._end)

    def submit(self, submit: Submit, call: Receiver) -> None:
        """Send ops of ``call``, whose own ``submit`` calls this.

        Raises ``EngineLost`` when there is no engine, ``LimitExceeded`` and ``InvalidRequest`` for what cannot be
        sent.
        """
        frame = encode_submit(submit, self.welcome.limits)
        with self._lock:
            self._check_open()
            known = self._calls.get(submit.program)
            if known is not call:
                if known is not None and not known.is_over:
                    text = f"program {submit.program!r} is running already; choose another id"
                    raise InvalidRequest(text, where="program")
                self._calls[submit.program] = call
            self._channel.send(frame)

    def cancel(self, program: str, seq: int | None = None, op: int | None = None) -> None:
        """End a program, a sequence of it or one op. Nothing happens when it has ended already."""
        with self._lock:
            if self._end is None and program in self._calls:
                self._channel.send(encode_client(Cancel(program=program, seq=seq, op=op)))

    def query(self, what: str, timeout_s: float = 10.0) -> Any:
        """Ask the engine: ``what`` is one of ``messages.QUERIES``. Raises ``Overloaded`` after ``timeout_s``."""
        if self._channel.is_own_thread():
            raise InternalError("query() waits for the client's own thread, so a call's on_event cannot call it")
        answer = self.ask(what)
        try:
            return answer.result(timeout_s)
        except FutureTimeout:
            answer.cancel()
            text = f"the engine has not answered query {what!r} within {timeout_s:g} s; it may be in a long step"
            raise Overloaded(text) from None

    def ask(self, what: str) -> Future[Any]:
        """As ``query``, without waiting. Who no longer wants the answer cancels it."""
        return self._ask(lambda number: encode_client(Query(id=number, what=what)))

    def export(
        self, program: str, *, ttl_s: float = GRANT_TTL_S, grant: str = "", when_drawing: bool = False
    ) -> Future[Grant]:
        """Have the engine lend the KV of ``program``, which this client runs there; see ``messages.Export``."""
        answer = self._ask(lambda number: encode_client(Export(number, program, ttl_s, grant, when_drawing)))
        return _converted(answer, Grant)

    def end_grant(self, grant: str) -> None:
        """The engine need not keep the blocks of ``grant`` any more. Nothing happens where the engine is gone."""
        with self._lock:
            if self._end is None:
                self._channel.send(encode_client(EndGrant(grant)))

    def fetch(self, grant: str, names: Sequence[bytes]) -> Future[Any]:
        """Blocks of a grant; see ``messages.Fetch``."""
        return self._ask(lambda number: encode_client(Fetch(number, grant, list(names))))

    def import_from(self, other: "Client", grant: Grant, *, ttl_s: float = GRANT_TTL_S) -> Future[Imported]:
        """Have the engine copy the KV of ``grant`` from the engine of ``other``; see ``messages.Import``.

        It connects with the keys of ``other``. Raises LimitExceeded where the grant is too long for one message.
        """
        keys = other.keys
        server, secret = ("", "") if keys is None else (keys.server, keys.secret)

        def frame_of(number: int) -> bytes:
            frame = encode_client(Import(number, grant, other.url, server, secret, ttl_s))
            limit = self.welcome.limits.max_submit_bytes
            if len(frame) > limit:
                text = f"a grant of {len(frame):,} bytes, but the limit is {limit:,}; the program is computed again"
                raise LimitExceeded(text, where="grant")
            return frame

        return _converted(self._ask(frame_of), Imported)

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names that programs may choose, as this client knows them: from the welcome, or its last change."""
        return self.welcome.adapters if self._adapters is None else self._adapters

    def load_adapter(self, name: str, path: str, *, timeout_s: float = 60.0) -> None:
        """Read a low-rank adapter from a folder of the engine's machine; programs can choose it then.

        Raises InvalidParams, LimitExceeded, UnknownModel or Unsupported for what cannot be loaded, and Overloaded after
        ``timeout_s``; the engine may still load it then.
        """
        self._change_adapters(lambda number: LoadAdapter(number, name, path), f"load adapter {name!r}", timeout_s)

    def unload_adapter(self, name: str, *, timeout_s: float = 60.0) -> None:
        """Programs that run keep the adapter; new ones cannot choose it. Raises UnknownModel where there is none."""
        self._change_adapters(lambda number: UnloadAdapter(number, name), f"unload adapter {name!r}", timeout_s)

    def list_adapters(self, *, timeout_s: float = 10.0) -> list[dict[str, Any]]:
        """``name``, ``path``, ``programs`` and ``unloading`` of each adapter that the engine holds."""
        found = self.query("adapters", timeout_s)
        self._know(found)
        return found

    def _change_adapters(
        self, message: Callable[[int], LoadAdapter | UnloadAdapter], what: str, timeout_s: float
    ) -> None:
        if self._channel.is_own_thread():
            raise InternalError(f"{what}: it waits for the client's own thread, so a call's on_event cannot do it")
        answer = self._ask(lambda number: encode_client(message(number)))
        try:
            self._know(answer.result(timeout_s))
        except FutureTimeout:
            answer.cancel()
            raise Overloaded(f"the engine has not answered within {timeout_s:g} s: {what}") from None

    def _know(self, listed: list[dict[str, Any]]) -> None:
        self._adapters = tuple(one["name"] for one in listed if not one["unloading"])

    def embed(self, inputs: Sequence[str | list[int]], *, truncate: bool = True) -> Future[Embedded]:
        """The vectors of texts or token ids; see ``messages.Embed``. Who no longer wants them cancels the future.

        Raises ``Unsupported`` where the model is no encoder, ``LimitExceeded`` for too many inputs or bytes.
        """
        check_embed(inputs, self.welcome)
        return self._embed(inputs, [], truncate)

    def score(
        self, inputs: Sequence[str | list[int]], seconds: Sequence[str] = (), *, truncate: bool = True
    ) -> Future[Embedded]:
        """A classifier's scores of texts, token ids, or with ``seconds`` of pairs of texts, as float32 in ``vectors``.

        As ``embed``; raises ``Unsupported`` where the model is no classifier.
        """
        check_embed(inputs, self.welcome, seconds=seconds)
        return self._embed(inputs, list(seconds), truncate)

    def _embed(self, inputs: Sequence[str | list[int]], seconds: list[str], truncate: bool) -> Future[Embedded]:
        sent = 0

        def frame_of(number: int) -> bytes:
            nonlocal sent
            sent = number
            frame = encode_client(Embed(id=number, inputs=list(inputs), truncate=truncate, seconds=seconds))
            limit = self.welcome.limits.max_submit_bytes
            if len(frame) > limit:
                text = f"inputs of {len(frame):,} bytes, but the limit is {limit:,}; send them in several requests"
                raise LimitExceeded(text, where="input")
            return frame

        answer = self._ask(frame_of)
        found = _converted(answer, Embedded)

        def ended(found: Future[Embedded]) -> None:
            if not found.cancelled() or not answer.cancel():
                return
            with self._lock:
                if self._end is None:
                    self._channel.send(encode_client(Forget(id=sent)))

        found.add_done_callback(ended)
        return found

    def _ask(self, frame_of: Callable[[int], bytes]) -> Future[Any]:
        answer: Future[Any] = Future()
        with self._lock:
            self._check_open()
            self._next_query += 1
            number = self._next_query
            frame = frame_of(number)
            self._queries[number] = answer
            self._channel.send(frame)
        answer.add_done_callback(lambda _: self._queries.pop(number, None))
        return answer

    def close(self) -> None:
        """Disconnect; open ops fail as ``Cancelled``. A second call does nothing."""
        self._channel.close()

    def _check_open(self) -> None:
        if self._end is not None:
            raise EngineLost(f"no engine at {self.url}: {self._end.message}")

    # -- on the client's thread ---------------------------------------------------------------------------------------

    def _take(self, message: RuntimeMessage) -> None:
        match message:
            case Delta() | Done() | Accepted() | Failed() | Closed() | Rejected():
                call = self._calls.get(message.program)
                if call is not None:
                    call.take(message)
                    if call.is_over:
                        self._forget(call)
                elif isinstance(message, Accepted):
                    # the program closed while this submit was on its way, and the engine began a new one for it
                    self._channel.send(encode_client(Cancel(program=message.program)))
            case Answer():
                self._answer(message)
            case _:
                logger.warning("unexpected %s from the engine", type(message).__name__)

    def _forget(self, call: Receiver) -> None:
        with self._lock:
            if self._calls.get(call.program) is call:  # a new call may have its id already
                del self._calls[call.program]

    def _answer(self, message: Answer) -> None:
        with self._lock:
            waiting = self._queries.pop(message.id, None)
        if waiting is None or not waiting.set_running_or_notify_cancel():
            return  # nobody waits for it any more
        if message.error is not None:
            waiting.set_exception(from_info(message.error))
        else:
            waiting.set_result(message.value)

    def _finish(self, error: PhloemError) -> None:
        """The channel has ended: fail every call and every query once."""
        with self._lock:
            self._end = error
            calls, self._calls = self._calls, {}
            queries, self._queries = self._queries, {}
        for call in calls.values():
            call.lose(error)
        for waiting in queries.values():
            if waiting.set_running_or_notify_cancel():
                waiting.set_exception(error)
        with self._lock:
            self._is_told = True
            tell = self._on_end
        if tell is not None:
            tell(error)
