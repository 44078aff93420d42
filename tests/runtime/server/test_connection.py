"""Connections that send or read too slowly are ended; others are left alone."""

import contextlib
import json
import socket
import threading

from phloem.runtime.config import ConnectionLimits
from phloem.runtime.server.app import create_app, run_app
from phloem.runtime.server.listener import listen
from phloem.tests.runtime.server.doubles import MODEL, ChatML, WordTokenizer, connected
from phloem.tests.runtime.string_engine import StringEngine
from phloem.tests.runtime.wire import wait_until

QUICK = ConnectionLimits(headers_s=0.3, body_s=0.3, idle_s=0.3, write_s=0.3)
PATIENT = ConnectionLimits(headers_s=300, body_s=300, idle_s=300, write_s=300)
HEADERS = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


@contextlib.contextmanager
def limited(limits, engine=None):
    """A server with ``limits``; yields a function that opens a connection to it."""
    over, ready = threading.Event(), threading.Event()
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(connected(engine or StringEngine()))
        listener = stack.enter_context(listen("127.0.0.1", 0))
        address = listener.getsockname()[:2]
        app = create_app(client, WordTokenizer(), ChatML(), model_name=MODEL)
        thread = threading.Thread(
            target=run_app,
            args=(app, listener, lambda url: ready.set()),
            kwargs={"is_over": over.is_set, "limits": limits},
        )
        thread.start()
        assert ready.wait(timeout=300)

        def connect():
            connection = stack.enter_context(socket.create_connection(address))
            connection.settimeout(300)
            return connection

        connect.stop = over.set
        try:
            yield connect
        finally:
            over.set()
            thread.join(timeout=300)


def rest(connection) -> bytes:
    """Everything that comes until the server closes."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while data := connection.recv(65536):
            found += data
    return found


def ask_whether_it_lives(connection) -> None:
    connection.sendall(b"GET /health/live HTTP/1.1\r\nhost: localhost\r\n\r\n")
    found = b""
    while not found.endswith(b'{"live":true}'):
        found += connection.recv(65536)
    assert found.startswith(b"HTTP/1.1 200 ")


def error_of(answer: bytes) -> dict[str, object]:
    return json.loads(answer.partition(b"\r\n\r\n")[2])["error"]


HALVES = {
    b"": b"",
    b"POST /v1/comp": b"408",
    HEADERS: b"408",
    HEADERS + b"content-length: 100\r\n\r\n": b"408",
    HEADERS + b"content-length: 100\r\n\r\n{": b"408",
    HEADERS + b"transfer-encoding: chunked\r\n\r\n5\r\n{": b"408",
}


def test_half_sent_requests_are_ended():
    """Half-sent headers and bodies were still open after 37 seconds."""
    with limited(QUICK) as connect:
        connections = [connect() for _ in HALVES]
        for connection, sent in zip(connections, HALVES, strict=True):
            connection.sendall(sent)
        for connection, (sent, status) in zip(connections, HALVES.items(), strict=True):
            answer = rest(connection)
            assert answer[9:12] == status, sent
            if status:
                error = error_of(answer)
                assert error["code"] == "request_timeout" and "within 0.3 seconds" in error["message"], sent


def test_a_server_that_stops_waits_for_no_half_sent_request(monkeypatch):
    """The time for running answers is long here, and no answer runs."""
    monkeypatch.setattr("phloem.runtime.server.app.GRACE_S", 10_000)
    halves = [b"", b"POST /v1/comp", HEADERS + b"content-length: 100\r\n\r\n{"]
    with limited(PATIENT) as connect:
        connections = [connect() for _ in halves]
        for connection, sent in zip(connections, halves, strict=True):
            ask_whether_it_lives(connection)
            connection.sendall(sent)
        ask_whether_it_lives(connect())  # so what was sent before has been read
        connect.stop()
        for connection, sent in zip(connections, halves, strict=True):
            assert rest(connection)[9:12] == (b"503" if sent.startswith(HEADERS) else b""), sent


def test_a_request_that_dribbles_is_ended_however_many_pieces_come():
    with limited(QUICK) as connect:
        connection = connect()
        with contextlib.suppress(OSError):
            for byte in HEADERS * 1000:
                connection.sendall(bytes([byte]))
                if threading.Event().wait(0.05):
                    break
        with contextlib.suppress(OSError):
            assert b" 408 " in rest(connection)


def test_a_connection_between_two_requests_is_ended_and_serves_until_then():
    with limited(QUICK) as connect:
        connection = connect()
        ask_whether_it_lives(connection)
        ask_whether_it_lives(connection)
        assert rest(connection) == b""


def test_a_body_that_nobody_reads_is_not_waited_for():
    """A route without a body has answered before the rest of it comes."""
    with limited(QUICK) as connect:
        connection = connect()
        connection.sendall(b"GET /health/live HTTP/1.1\r\nhost: localhost\r\ncontent-length: 10\r\n\r\na")
        assert rest(connection).startswith(b"HTTP/1.1 200 ")


def test_a_client_that_does_not_read_is_disconnected_and_its_program_cancelled(caplog):
    caplog.set_level("INFO")
    engine = StringEngine(reply=lambda prompt, op: "word " * 60_000)
    with limited(QUICK, engine) as connect:
        connection = connect()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        body = json.dumps({"prompt": "a", "max_tokens": 60_000, "stream": True}).encode()
        connection.sendall(HEADERS + b"content-length: %d\r\n\r\n" % len(body) + body)
        wait_until(lambda: "a client has read nothing for 0.3 s" in caplog.text)
        wait_until(lambda: not engine.has_work)


def test_a_long_answer_outlives_all_limits():
    """The limits count what the client has to do, not what the engine does."""
    gate = threading.Event()

    def reply(prompt, op):
        assert gate.wait(timeout=300)
        return "done"

    with limited(QUICK, StringEngine(reply=reply)) as connect:
        connection = connect()
        body = b'{"prompt": "a"}'
        connection.sendall(HEADERS + b"content-length: %d\r\n\r\n" % len(body) + body)
        threading.Timer(1.0, gate.set).start()
        assert b"done" in rest(connection)


def test_an_address_has_a_limited_number_of_connections():
    limits = ConnectionLimits(headers_s=300, body_s=300, idle_s=300, write_s=300, per_address=2)
    with limited(limits) as connect:
        first, second = connect(), connect()
        for connection in (first, second):
            ask_whether_it_lives(connection)
        answer = rest(connect())
        assert b" 429 " in answer and error_of(answer)["code"] == "too_many_connections"
        first.close()
        ask_whether_it_lives(second)


def test_the_end_of_the_server_ends_streams_with_an_error_and_cuts_silent_connections(caplog, monkeypatch):
    """Half of the streams got a bare end of file, and the log got CancelledError traces."""
    monkeypatch.setattr("phloem.runtime.server.app.GRACE_S", 1)  # the streams are too long to end in any
    engine = StringEngine(reply=lambda prompt, op: "word " * 400_000)
    with limited(PATIENT, engine) as connect:
        streams = [connect() for _ in range(4)]
        body = json.dumps({"prompt": "a", "max_tokens": 400_000, "stream": True}).encode()
        for stream in streams:
            stream.sendall(HEADERS + b"content-length: %d\r\n\r\n" % len(body) + body)
        for stream in streams:
            assert b" 200 " in stream.recv(65536)
        half = connect()
        half.sendall(HEADERS + b"content-length: 100\r\n\r\n{")
        found: list[bytes] = []
        readers = [threading.Thread(target=lambda s=stream: found.append(rest(s))) for stream in streams]
        for reader in readers:
            reader.start()
        connect.stop()
        for reader in readers:  # before the connections are closed on this side
            reader.join(timeout=300)
    assert len(found) == 4
    for text in found:
        assert b'"code":"engine_lost"' in text[-2000:] and b"shutting down" in text[-2000:] and b"[DONE]" not in text
    assert "CancelledError" not in caplog.text and "Exception in ASGI" not in caplog.text


def test_a_connection_that_is_being_cut_is_no_error_of_the_loop():
    with limited(QUICK) as connect:
        for _ in range(20):
            connection = connect()
            connection.sendall(HEADERS + b"content-length: 100\r\n\r\n{")
            connection.close()
        ask_whether_it_lives(connect())


def test_what_is_no_http_is_answered_with_an_error_and_an_id():
    """It was a plain text without an id."""
    with limited(PATIENT) as connect:
        for sent in (b"hello\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"GET / HTTP/9\r\n\r\n"):
            connection = connect()
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            answer = rest(connection)
            assert answer.startswith(b"HTTP/1.1 400 ") and b"x-request-id: " in answer, answer
            assert error_of(answer)["code"] == "invalid_http"
