"""Engines on threads that end suddenly, as a killed process does."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import zmq
from phloem.cluster.client import FleetClient
from phloem.protocol import messages as m
from phloem.protocol import ops as o
from phloem.protocol.client import Client
from phloem.protocol.errors import EngineLost
from phloem.protocol.program_call import OpFailed, ProgramCall
from phloem.runtime.engine import EngineCore
from phloem.runtime.engine_socket import EngineSocket
from phloem.runtime.process.loop import publish_of, publisher_of
from phloem.tests.runtime.wire import WAIT_S, Heard


class Host:
    """Serves ``engine`` until ``end``, or until ``num_steps`` steps with work, or until it receives ``poison``.

    It does not send the messages of its last step. ``poison``: a text; a message that contains it ends the host.
    """

    def __init__(
        self, engine: EngineCore, url: str, *, num_steps: int | None = None, poison: str = "", events_url: str = ""
    ) -> None:
        self.engine = engine
        self.ended = threading.Event()
        self._num_left = num_steps
        self._poison = poison
        self._stopping = threading.Event()
        self._context: zmq.Context[Any] = zmq.Context.instance()
        self._publisher = publisher_of(engine, events_url, self._context)
        self._socket = EngineSocket(url, engine.welcome(), context=self._context)
        self.url = self._socket.url
        self._thread = threading.Thread(target=self._run, name="host", daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._stopping.set()
        self._thread.join(WAIT_S)

    def connect(self) -> Client:
        return Client(self.url, context=self._context)

    def _run(self) -> None:
        publish = publish_of(self.engine, self._publisher)
        while not self._stopping.is_set():
            inbox = self._socket.receive(0.0 if self.engine.has_work else 0.01)
            if self._poison and any(self._poison in str(message) for _, message in inbox):
                break
            outbox = self.engine.step(inbox)
            if self._num_left is not None and self.engine.has_work:
                self._num_left -= 1
                if self._num_left < 0:
                    break
            self._socket.send(outbox)
            if publish is not None:
                publish()
        self._socket.close()
        if self._publisher is not None:
            self._publisher.close()
        self.engine.fail_all(EngineLost("it was killed"))
        self.engine.step([])
        self.engine.check()
        self.ended.set()


class Fleet:
    """A fleet whose engines are hosts. ``add`` starts one; ``settle`` gives back the engine of one that has ended."""

    def __init__(self, engines: list[EngineCore], folder: Path, **options: Any) -> None:
        self.engines = engines
        self.lost: list[str] = []
        self.hosts: dict[str, Host] = {}
        self._folder = folder
        self._num_hosts = 0
        options = {"tokenize": lambda ops: []} | options
        self.client = FleetClient(on_lost=lambda engine, error: self.lost.append(engine), **options)

    def add(self, **options: Any) -> Host:
        self._num_hosts += 1
        name = f"e{self._num_hosts}"
        self.hosts[name] = self.host(name, **options)
        self.client.add(name, self.hosts[name].connect())
        return self.hosts[name]

    def host(self, name: str, **options: Any) -> Host:
        """A host that the client does not know."""
        return Host(self.engines.pop(), f"ipc://{self._folder}/{name}", **options)

    def settle(self, host: Host) -> None:
        """Wait until ``host`` has ended; its engine may then be used again."""
        assert host.ended.wait(WAIT_S)
        self.engines.append(host.engine)

    def close(self) -> None:
        self.client.close()
        for host in self.hosts.values():
            host.end()


@contextmanager
def fleet_of(engines: list[EngineCore], folder: Path, **options: Any) -> Iterator[Fleet]:
    fleet = Fleet(list(engines), folder, **options)
    try:
        yield fleet
    finally:
        fleet.close()


class Asked:
    """A program at a client, and the events that its caller received."""

    def __init__(
        self,
        client: FleetClient | Client,
        ops: list[o.AnyOp],
        settings: m.ProgramSettings | None = None,
        *,
        on_event: Callable[[Any], None] = lambda event: None,
    ) -> None:
        self.heard = Heard()
        self.events: list[Any] = []

        def take(event: Any) -> None:
            on_event(event)
            self.heard(event)

        self.call = ProgramCall(client, take)
        self.call.submit(ops, settings)

    def result(self) -> dict[object, object]:
        """Values, errors and streams by op, when the program is over."""
        self.events += self.heard.until(m.Closed)
        found: dict[object, object] = {}
        for event in self.events:
            match event:
                case m.Done(op=op, value=value):
                    assert op not in found, "two ends"
                    found[op] = round(value, 3) if isinstance(value, float) else value
                case OpFailed(op=op, error=error):
                    assert op not in found, "two ends"
                    found[op] = f"{type(error).__name__}: {error.message}"
                case m.Delta(op=op, index=index, text=text):
                    assert op not in found, "a delta after the end"
                    found["stream", op, index] = str(found.get(("stream", op, index), "")) + text
        return found
