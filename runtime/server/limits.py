"""The limits of one HTTP connection."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Seconds. ``headers_s``: from a request's first byte, or the connection's beginning, to the end of its headers.

    ``body_s``: from there to the end of its body. ``idle_s``: from an answer to the next request. ``write_s``: how long
    a client may read nothing of an answer. ``per_address``: connections of one address; 0: any number.
    """

    headers_s: float = 15.0
    body_s: float = 60.0
    idle_s: float = 15.0
    write_s: float = 60.0
    per_address: int = 0
