"""Programs over HTTP go on at the next server when theirs, or the proxy before it, ends."""

import contextlib
import socket
import threading
import time

import pytest
from phloem import RuntimeEndpoint, function, gen
from phloem.protocol import errors
from phloem.tests.runtime.string_engine import StringEngine
from phloem.tests.runtime.wire import wait_until


class Front:
    """Stands between clients and a server on loopback, and ends as suddenly as a killed process.

    ``page``: the answer while it is down; empty: the connection is closed.
    """

    def __init__(self, url: str) -> None:
        self._server = ("127.0.0.1", int(url.rpartition(":")[2]))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: set[socket.socket] = set()
        self.is_down, self.page, self.num_refused = False, b"", 0
        self.cuts_at = b""  # a connection ends once this has passed
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if self.is_down:
                    self.num_refused += 1
                    with client, contextlib.suppress(OSError):
                        if self.page:
                            client.recv(65536)
                            client.sendall(self.page)
                    continue
                server = socket.create_connection(self._server)
                self._open |= {client, server}
                threading.Thread(target=self._serve, args=(client, server), daemon=True).start()

    def _serve(self, client: socket.socket, server: socket.socket) -> None:
        with client, server:
            back = threading.Thread(target=self._pump, args=(server, client), daemon=True)
            back.start()
            self._pump(client, server)
            back.join()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
                if self.cuts_at and self.cuts_at in data:
                    break
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        for one in list(self._open):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        self._open.clear()

    def go_down(self, page: bytes = b"") -> None:
        self.page, self.is_down = page, True
        self.cut()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        self.cut()


@pytest.fixture
def fronted(serve):
    """``fronted(engine)``: a backend at a front of a server with that engine; the front; the engine."""
    made = []

    def make(engine, **options):
        server = serve(engine)
        front = Front(server.url)
        backend = RuntimeEndpoint(front.url, **options)
        made.append((backend, front))
        return backend, front, server.engine

    yield make
    for backend, front in made:
        backend.shutdown()
        front.close()


@function
def counting(s):
    s += "count" + gen("a", max_tokens=100_000)


@function
def branching(s):
    s += "one" + gen("a")
    s += " yes" if s["a"] else " no"
    s += gen("b")


def words(num):
    return "".join(f" {i}" for i in range(num))


def test_a_stream_goes_on_where_it_was_however_often_its_server_ends(fronted):
    backend, front, engine = fronted(StringEngine(reply=lambda prompt, op: words(60), step_s=0.005))
    s = counting.run(backend=backend, stream=True)
    pieces = []
    for i, piece in enumerate(s.text_iter("a")):
        pieces.append(piece)
        if i in (5, 20, 21):
            front.cut()
    assert "".join(pieces) == words(60) and s["a"] == words(60)
    wait_until(lambda: not engine.programs)


def test_programs_wait_for_the_next_server_and_none_fails(fronted):
    page = b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 4\r\nconnection: close\r\n\r\nRay."
    backend, front, engine = fronted(StringEngine(reply=lambda prompt, op: words(20), step_s=0.005))

    def restart() -> None:
        wait_until(lambda: len(engine.programs) >= 4)
        for page_of_it in (b"", page):
            front.go_down(page_of_it)
            seen = front.num_refused
            wait_until(lambda seen=seen: front.num_refused > seen)
        front.is_down = False

    restarting = threading.Thread(target=restart)
    restarting.start()
    states = branching.run_batch([{}] * 8, backend=backend)
    restarting.join()
    assert [(s["a"], s["b"]) for s in states] == [(words(20), words(20))] * 8


def test_a_program_fails_by_name_where_no_server_comes_back(fronted):
    backend, front, _ = fronted(StringEngine(reply=lambda prompt, op: words(1000), step_s=0.01), reconnect_s=0.2)
    s = counting.run(backend=backend, stream=True)
    next(s.text_iter("a"))
    front.go_down()
    with pytest.raises(errors.EngineLost, match=r"no server for 0.2 s, reconnect_s"):
        s["a"]


def test_a_program_fails_at_once_where_it_is_not_to_wait(fronted):
    backend, front, _ = fronted(StringEngine(reply=lambda prompt, op: words(1000), step_s=0.01), reconnect_s=0)
    s = counting.run(backend=backend, stream=True)
    next(s.text_iter("a"))
    front.cut()
    with pytest.raises(errors.EngineLost):
        s["a"]
    with pytest.raises(errors.InvalidParams, match="reconnect_s=-1: it must be 0 or more seconds"):
        RuntimeEndpoint(front.url, reconnect_s=-1)
    with pytest.raises(errors.InvalidRequest, match="reconnect_s: a tcp:// runtime takes none"):
        RuntimeEndpoint("tcp://127.0.0.1:1", reconnect_s=1)


def test_a_program_that_waits_for_a_server_can_be_cancelled(fronted):
    backend, front, _ = fronted(StringEngine(reply=lambda prompt, op: words(1000), step_s=0.01))
    s = counting.run(backend=backend, stream=True)
    next(s.text_iter("a"))
    front.go_down()
    wait_until(lambda: front.num_refused)
    began_s = time.monotonic()
    s.cancel()
    with pytest.raises(errors.Cancelled):
        s["a"]
    assert time.monotonic() - began_s < 10.0, "it does not wait for a server"


def test_a_program_whose_streams_break_again_and_again_without_progress_is_given_up(fronted):
    backend, front, _ = fronted(StringEngine(reply=lambda prompt, op: words(10), step_s=0.3))
    front.cuts_at = b'"accepted"'
    with pytest.raises(errors.EngineLost):
        counting.run(backend=backend)["a"]
