"""The listening socket: an error about an address is one line that names the address and the option."""

import socket

import pytest
from phloem.protocol.errors import InvalidRequest
from phloem.runtime.server.listener import is_loopback, listen, url_of


def test_a_free_port_is_taken_at_once():
    with listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        assert url_of(first) == f"http://127.0.0.1:{port}"
        assert is_loopback(first)
        with pytest.raises(InvalidRequest, match=rf"port {port} on 127\.0\.0\.1 is in use .*--port"):
            listen("127.0.0.1", port)


def test_a_port_is_free_again_right_after_its_server_has_ended():
    with listen("127.0.0.1", 0) as first:
        address = first.getsockname()
        with socket.create_connection(address) as client:
            accepted, _ = first.accept()
            accepted.close()  # our side closes first: the port lingers in TIME_WAIT
            assert client.recv(1) == b""
    listen(*address).close()


@pytest.mark.parametrize(
    ("host", "port", "message"),
    [
        ("127.0.0.1", 70000, "port 70000 is not between 0 and 65535"),
        ("192.0.2.1", 8000, r"192\.0\.2\.1 is not an address of this machine; change --host"),
        ("no host", 8000, "host 'no host' is unknown here .* change --host"),
    ],
)
def test_a_bad_address_is_named(host, port, message):
    with pytest.raises(InvalidRequest, match=message):
        listen(host, port)


def test_small_answers_do_not_wait_for_acknowledgements() -> None:
    """Head and body are two segments: with Nagle's algorithm the second waits 40 ms for the client."""
    listener = listen("127.0.0.1", 0)
    with listener, socket.create_connection(listener.getsockname()):
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
