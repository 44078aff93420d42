"""The events that an engine publishes about its cache: which blocks of tokens it has stored and evicted.

Block names follow from the tokens and are the same in every engine (see ``radix_cache.blocks``). A subscriber that
starts late or finds a gap in ``seq`` misses blocks; it never knows a block that was not stored.
"""

import msgspec


class BlocksStored(msgspec.Struct, frozen=True, tag_field="m", tag="stored"):
    """Blocks that follow each other, the first of them ``parent``. ``seq`` counts an engine's events."""

    seq: int
    namespace: str
    parent: bytes
    names: tuple[bytes, ...]


class BlocksEvicted(msgspec.Struct, frozen=True, tag_field="m", tag="evicted"):
    """Blocks that are no longer whole. ``cause``: ``space`` or ``flush``."""

    seq: int
    namespace: str
    names: tuple[bytes, ...]
    cause: str


CacheEvent = BlocksStored | BlocksEvicted


class CacheEvents(msgspec.Struct, frozen=True):
    """One frame: events in order, of blocks of ``block_len`` tokens."""

    block_len: int
    events: tuple[CacheEvent, ...]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(CacheEvents)


def encode_cache_events(events: CacheEvents) -> bytes:
    return _encoder.encode(events)


def decode_cache_events(frame: bytes) -> CacheEvents:
    """Raises ``msgspec.ValidationError`` for another frame."""
    return _decoder.decode(frame)
