"""Frames: messages as bytes and back. A frame that cannot be decoded raises a ``ProtocolError`` that says where."""

from typing import Any

import msgspec

from .errors import InvalidRequest, ProtocolError
from .messages import ClientMessage, Name, RuntimeMessage

_encoder = msgspec.msgpack.Encoder()
_client_decoder = msgspec.msgpack.Decoder(ClientMessage)
_runtime_decoder = msgspec.msgpack.Decoder(list[RuntimeMessage])


class Head(msgspec.Struct, frozen=True):
    """The fields of a client's message that tell which call or query to answer when the rest cannot be decoded.

    None: absent, or a value of another type.
    """

    m: str | None = None
    version: int | None = None
    program: str | None = None
    id: int | None = None


_NIL = msgspec.Raw(b"\xc0")


class _RawHead(msgspec.Struct, frozen=True):
    """``Head`` before its values are decoded: a frame of nested lists would become gigabytes of Python's lists."""

    m: msgspec.Raw = _NIL
    version: msgspec.Raw = _NIL
    program: msgspec.Raw = _NIL
    id: msgspec.Raw = _NIL


_head_decoder = msgspec.msgpack.Decoder(_RawHead)


def encode_client(message: ClientMessage) -> bytes:
    """Raises ``InvalidRequest`` where a field holds a value that MessagePack cannot encode."""
    try:
        return _encoder.encode(message)
    except (TypeError, ValueError, OverflowError, msgspec.MsgspecError) as error:
        text = f"a {type(message).__name__} that cannot be sent: {error}"
        raise InvalidRequest(text) from error


def encode_runtime(messages: list[RuntimeMessage]) -> bytes:
    return _encoder.encode(messages)


def decode_client(frame: bytes) -> ClientMessage:
    try:
        return _client_decoder.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _unreadable(frame, error) from error


def decode_runtime(frame: bytes) -> list[RuntimeMessage]:
    try:
        return _runtime_decoder.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _unreadable(frame, error) from error


def decode_head(frame: bytes) -> Head:
    """An unreadable frame has an empty head."""
    try:
        raw = _head_decoder.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return Head()
    return Head(_value(raw.m, str), _value(raw.version, int), _value(raw.program, Name), _value(raw.id, int))


def _value(raw: msgspec.Raw, kind: Any) -> Any:
    try:
        return msgspec.msgpack.decode(raw, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _unreadable(frame: bytes, error: Exception) -> ProtocolError:
    """msgspec writes ``<what> - at `$.ops[3].text```; the place goes into ``where``."""
    what, _, place = str(error).partition(" - at `$")
    where = place.rstrip("`").lstrip(".")
    at = f" (at {where})" if where else ""
    return ProtocolError(f"a frame of {len(frame):,} bytes was not understood: {what}{at}", where=where)
