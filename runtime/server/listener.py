"""The socket that a server listens on, bound before the model is loaded, and its certificate."""

import errno
import ipaddress
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path

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
        listener = socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        raise InvalidRequest(_reason(error, host, port), where="port") from None
    # Connections inherit it. An answer is written as head and body; without this its body waits for the client's
    # delayed acknowledgement of the head, 40 ms. asyncio sets it only on sockets made with an explicit protocol number.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


@dataclass(frozen=True, slots=True)
class Tls:
    """Files in PEM format. ``ca``: clients need a certificate that it has signed; None: clients need none.

    Made only of files that work: InvalidRequest names the one that does not.
    """

    cert: Path
    key: Path
    ca: Path | None = None

    def __post_init__(self) -> None:
        for flag, path in (("--tls-cert", self.cert), ("--tls-key", self.key), ("--tls-ca", self.ca)):
            if path is not None:
                try:
                    path.read_bytes()
                except OSError as error:
                    raise InvalidRequest(f"{flag} {path}: {error.strerror}", where="tls") from None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.cert, self.key, password=lambda: b"")  # never asks at the terminal
        except (ssl.SSLError, ValueError) as error:
            message = f"--tls-cert {self.cert} and --tls-key {self.key} are no PEM certificate with its unencrypted key"
            raise InvalidRequest(f"{message}: {error}", where="tls") from None
        if self.ca is not None:
            try:
                context.load_verify_locations(self.ca)
            except ssl.SSLError as error:
                raise InvalidRequest(f"--tls-ca {self.ca} is no PEM certificate: {error}", where="tls") from None


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


def url_of(listener: socket.socket, tls: Tls | None = None) -> str:
    host, port = listener.getsockname()[:2]
    return f"{'http' if tls is None else 'https'}://{f'[{host}]' if ':' in host else host}:{port}"
