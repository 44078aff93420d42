"""Addresses of an engine (``ipc://``, ``tcp://``, ``inproc://``) and the keys that ``tcp://`` needs."""

import ipaddress
import socket
from dataclasses import dataclass, field

from .errors import InvalidParams, Unsupported

SCHEMES = ("ipc", "tcp", "inproc")
MAX_IPC_PATH = 107  # bytes in the kernel's socket address
KEY_LEN = 40  # characters of a Z85 key


@dataclass(frozen=True, slots=True)
class ServerKeys:
    """The engine's secret key, and the public keys of the clients it admits. Z85 texts, see ``new_key_pair``."""

    secret: str = field(repr=False)
    clients: frozenset[str]

    def __post_init__(self) -> None:
        for key in (self.secret, *self.clients):
            _check_key(key)

    @property
    def public(self) -> str:
        return public_key(self.secret)


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """The client's secret key and the public key of the engine it expects."""

    secret: str = field(repr=False)
    server: str

    def __post_init__(self) -> None:
        _check_key(self.secret)
        _check_key(self.server)

    @property
    def public(self) -> str:
        return public_key(self.secret)


def new_key_pair() -> tuple[str, str]:
    """A public and a secret CurveZMQ key."""
    import zmq  # only keys need it here, and `phloem serve` starts an engine's process before it loads more

    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def public_key(secret: str) -> str:
    import zmq

    return zmq.curve_public(secret.encode()).decode()


def new_keys() -> tuple[ServerKeys, ClientKeys]:
    """Keys of an engine that admits one client, and that client's."""
    (server_public, server_secret), (client_public, client_secret) = new_key_pair(), new_key_pair()
    return ServerKeys(server_secret, frozenset((client_public,))), ClientKeys(client_secret, server_public)


def has_ipc() -> bool:
    """Whether ``ipc://`` works here: ZeroMQ has Unix sockets, and so has Python, which looks whether one is in use."""
    import zmq

    return hasattr(socket, "AF_UNIX") and bool(zmq.has("ipc"))


def check_url(url: str, *, has_keys: bool) -> None:
    """Raises ``InvalidParams`` for an address that is not valid, or that needs keys and has none; ``Unsupported`` for
    ``ipc://`` on a system without Unix sockets.
    """
    scheme, found, rest = url.partition("://")
    if not found or scheme not in SCHEMES or not rest:
        raise InvalidParams(f"url={url!r}: must be ipc://<path>, tcp://<host>:<port> or inproc://<name>", where="url")
    if scheme == "ipc" and len(rest.encode()) > MAX_IPC_PATH:
        text = (
            f"url={url!r}: the path has {len(rest.encode())} bytes, but the limit is {MAX_IPC_PATH}; choose a shorter"
        )
        raise InvalidParams(text, where="url")
    if scheme == "ipc" and not has_ipc():
        text = f"url={url!r}: this system, or its ZeroMQ, has no Unix sockets; use tcp://127.0.0.1:PORT"
        raise Unsupported(text, where="url")
    if scheme == "tcp":
        host, colon, port = rest.rpartition(":")
        if not colon or not host or not (port in ("*", "0") or (port.isdigit() and int(port) < 65536)):
            raise InvalidParams(f"url={url!r}: must be tcp://<host>:<port>", where="url")
        if not has_keys and not is_loopback(host):
            text = f"{url}: a tcp address that others can reach needs CurveZMQ keys (ServerKeys, ClientKeys)"
            text += "; give them, or use 127.0.0.1 or ipc://"
            raise InvalidParams(text, where="url")
    elif has_keys:
        raise InvalidParams(f"url={url!r}: keys are for tcp:// only", where="keys")


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _check_key(key: str) -> None:
    if len(key) != KEY_LEN or not key.isascii():
        raise InvalidParams(f"a CurveZMQ key has {KEY_LEN} characters (Z85), this one {len(key)}", where="keys")
