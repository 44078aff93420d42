"""The socket that a server listens on, bound before the model is loaded."""

import errno
import ipaddress
import socket

from ...protocol.errors import InvalidRequest

BACKLOG = 2048
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")  # as they stand in a request


def listen(host: str, port: int) -> socket.socket:
    """A listening socket on ``host:port`` (port 0: any free one). InvalidRequest says what to change.

    Listening at once, not only binding: two servers that both bind first would both believe the port theirs.
    """
    if not 0 <= port <= 65535:
        raise InvalidRequest(f"port {port} is not between 0 and 65535; choose another with --port", where="port")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise InvalidRequest(f"host {host!r} is unknown here ({error.strerror}); change --host", where="host") from None
    try:
        return socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        raise InvalidRequest(_reason(error, host, port), where="port") from None


def _reason(error: OSError, host: str, port: int) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return f"port {port} on {host} is in use by another program; stop it or choose another with --port"
        case errno.EACCES:
            return f"port {port} on {host} needs more rights than this user has; choose one above 1023 with --port"
        case errno.EADDRNOTAVAIL:
            return f"{host} is not an address of this machine; change --host (127.0.0.1 serves this machine alone)"
    return f"cannot listen on {host}:{port}: {error.strerror}; change --host or --port"


def is_loopback(listener: socket.socket) -> bool:
    return ipaddress.ip_address(listener.getsockname()[0]).is_loopback


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
