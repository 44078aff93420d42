"""Raw ends of the wire, to say what a well-behaved client or engine would not.

Import it as ``phloem.tests.runtime.wire``. Every wait has an end.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import zmq
from phloem.protocol import messages as m
from phloem.protocol import ops as o
from phloem.protocol.client import Client
from phloem.protocol.program_call import OpFailed, ProgramCall, ProgramEvent
from phloem.protocol.sampling import SamplingParams
from phloem.runtime.engine_socket import EngineSocket
from phloem.runtime.process import serve_engine

WAIT_S = 60.0
encode = msgspec.msgpack.encode
decode = msgspec.msgpack.Decoder(list[m.RuntimeMessage]).decode
decode_client = msgspec.msgpack.Decoder(m.ClientMessage).decode


class RawClient:
    """A DEALER socket; greets unless told not to."""

    def __init__(self, url: str, *, context: zmq.Context[Any] | None = None, rcvhwm: int = 1000) -> None:
        self.socket = (context or zmq.Context.instance()).socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.rcvhwm = rcvhwm
        self.socket.connect(url)
        # Within a process messages are there once they are sent; for others a thread of ZeroMQ has to run.
        self._patience_ms = 0 if url.startswith("inproc:") else 50

    def say(self, *messages: m.ClientMessage | bytes) -> None:
        for message in messages:
            self.socket.send(message if isinstance(message, bytes) else encode(message))

    def hear(self, *, within_s: float = WAIT_S) -> list[m.RuntimeMessage]:
        """The next frame."""
        assert self.socket.poll(int(1000 * within_s)), "nothing came"
        return decode(self.socket.recv())

    def hear_all(self) -> list[m.RuntimeMessage]:
        """The messages that have arrived; from another process, 50 ms after the one before at the latest."""
        found: list[m.RuntimeMessage] = []
        while self.socket.poll(self._patience_ms):
            found += decode(self.socket.recv())
        return found

    def close(self) -> None:
        self.socket.close(0)


class RawEngine:
    """A ROUTER socket and the one client it has met."""

    def __init__(self, url: str, *, heartbeat_s: float = 1.0) -> None:
        self.socket = zmq.Context.instance().socket(zmq.ROUTER)
        self.socket.linger = 0
        self.socket.bind(url)
        self.url = self.socket.getsockopt_string(zmq.LAST_ENDPOINT) if url.startswith("tcp") else url
        self.heartbeat_s = heartbeat_s
        self.client = b""

    def hear(self, kind: Any, *, within_s: float = WAIT_S) -> Any:
        end_s = time.monotonic() + within_s
        while True:
            assert self.socket.poll(max(1, int(1000 * (end_s - time.monotonic())))), f"no {kind} came"
            self.client, frame = self.socket.recv_multipart()
            message = decode_client(frame)
            if isinstance(message, kind):
                return message

    def say(self, *messages: m.RuntimeMessage | bytes) -> None:
        raw = [message for message in messages if isinstance(message, bytes)]
        self.socket.send_multipart([self.client, raw[0] if raw else encode(list(messages))])

    def welcome(self, **changes: Any) -> None:
        self.hear(m.Hello)
        self.say(msgspec.structs.replace(welcome(heartbeat_s=self.heartbeat_s), **changes))

    def close(self) -> None:
        self.socket.close(0)
        if self.url.startswith("ipc://"):  # ZeroMQ stops listening a moment later
            Path(self.url.removeprefix("ipc://")).unlink(missing_ok=True)


class Heard:
    """An ``on_event`` that keeps the events, and the threads they came on."""

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[ProgramEvent] = queue.SimpleQueue()
        self.threads: set[str] = set()

    def __call__(self, event: ProgramEvent) -> None:
        self.threads.add(threading.current_thread().name)
        self.events.put(event)

    def until(self, kind: type, *, within_s: float = WAIT_S) -> list[ProgramEvent]:
        heard = []
        end_s = time.monotonic() + within_s
        while True:
            heard.append(self.events.get(timeout=max(0.01, end_s - time.monotonic())))
            if isinstance(heard[-1], kind):
                return heard

    def rest(self) -> list[ProgramEvent]:
        """The events that have come already."""
        found = []
        while not self.events.empty():
            found.append(self.events.get())
        return found


def begin(client: Client, submit: m.Submit, on_event: Callable[[ProgramEvent], None]) -> ProgramCall:
    call = ProgramCall(client, on_event, program=submit.program)
    call.submit(submit.ops, submit.settings)
    return call


def wait_until(holds: Callable[[], bool]) -> None:
    """Fails after ``WAIT_S``. Asks less often after a while, as an answer may cost several processes some time."""
    start_s = time.monotonic()
    while not holds():
        waited_s = time.monotonic() - start_s
        assert waited_s < WAIT_S, f"it did not become true within {WAIT_S:g} s"
        time.sleep(min(max(0.005, waited_s / 10), 0.05))


def welcome(**changes: Any) -> m.Welcome:
    made = m.Welcome(
        version=m.PROTOCOL_VERSION,
        model="raw",
        model_path="",
        context_len=100,
        vocab_size=100,
        vocab_hash="",
        template=m.TemplateInfo(),
        limits=m.Limits(),
    )
    return msgspec.structs.replace(made, **changes)


def ask(program: str = "p", *, text: str = "hello", stream: bool = False, max_tokens: int = 50_000) -> m.Submit:
    """Text, Gen (op 1), Close."""
    params = SamplingParams(max_tokens=max_tokens)
    ops = [o.Text(op=0, seq=0, text=text), o.Gen(op=1, seq=0, params=params, stream=stream), o.Close(op=2, seq=0)]
    return m.Submit(program, ops)


def failures(events: list[ProgramEvent]) -> dict[int, str]:
    """Op -> kind of error; every op failed once."""
    found = [(event.op, type(event.error).__name__) for event in events if isinstance(event, OpFailed)]
    assert len(dict(found)) == len(found)
    return dict(found)


@contextlib.contextmanager
def served(engine: Any, url: str, **options: Any) -> Iterator[EngineSocket]:
    """``engine`` behind ``url`` on a thread, through the real loop."""
    engine_socket = EngineSocket(url, engine.welcome(), **options)
    stopping = threading.Event()
    thread = threading.Thread(target=serve_engine, args=(engine, engine_socket, stopping.is_set), daemon=True)
    thread.start()
    try:
        yield engine_socket
    finally:
        stopping.set()
        thread.join(WAIT_S)
        engine_socket.close()


@contextlib.contextmanager
def talking(engine: Any, url: str, **options: Any) -> Iterator[Client]:
    with served(engine, url) as engine_socket, Client(engine_socket.url, **options) as client:
        yield client
