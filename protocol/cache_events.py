"""The events that an engine publishes about its cache: which blocks of tokens it has stored and evicted.

Block names follow from the tokens and are the same in every engine (see ``radix_cache.blocks``). A subscriber that
starts late or finds a gap in ``seq`` misses blocks; it never knows a block that was not stored. It asks the engine for
a ``CacheSnapshot`` (the query ``cache_blocks``) and goes on with the events after it.
"""

from typing import Literal

import msgspec


Tier = Literal["device", "host", "disk"]


class BlocksStored(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="m", tag="stored"):
    """Blocks that follow each other, the first of them ``parent``. ``seq`` counts an engine's events."""

    seq: int
    namespace: str
    parent: bytes
    names: tuple[bytes, ...]
    tier: Tier = "device"


class BlocksEvicted(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="m", tag="evicted"):
    """Blocks that are no longer whole in that tier. ``cause``: ``space`` or ``flush``."""

    seq: int
    namespace: str
    names: tuple[bytes, ...]
    cause: str
    tier: Tier = "device"


CacheEvent = BlocksStored | BlocksEvicted


class CacheEvents(msgspec.Struct, frozen=True):
    """One frame: events in order, of blocks of ``block_len`` tokens.

    ``epoch`` is random for each start of an engine: under another epoch all that was known of it is void. ``model``
    is the engine's vocabulary and weights as one digest: blocks of other models are other blocks.
    """

    block_len: int
    events: tuple[CacheEvent, ...]
    epoch: int = 0
    model: str = ""


class CacheSnapshot(msgspec.Struct, frozen=True):
    """All blocks of an engine after event ``seq``, by tier: chains of names without order between them."""

    block_len: int
    epoch: int
    seq: int
    model: str = ""
    device: tuple[bytes, ...] = ()
    host: tuple[bytes, ...] = ()
    disk: tuple[bytes, ...] = ()


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(CacheEvents)


def encode_cache_events(events: CacheEvents) -> bytes:
    return _encoder.encode(events)


def decode_cache_events(frame: bytes) -> CacheEvents:
    """Raises ``msgspec.ValidationError`` for another frame."""
    return _decoder.decode(frame)
