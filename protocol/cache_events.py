"""The events that an engine publishes about its cache: which blocks of tokens it has stored and evicted.

Block names follow from the tokens and are the same in every engine (see ``radix_cache.blocks``). A subscriber that
starts late or finds a gap in ``seq`` misses blocks; it never knows a block that was not stored. It asks the engine for
a ``CacheSnapshot`` (the query ``cache_blocks``) and goes on with the events after it.
"""

from typing import Literal

import msgspec

Tier = Literal["device", "host", "disk"]


class BlocksStored(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="m", tag="stored"):
    """Blocks that follow each other, the first of them ``parent``. ``seq`` counts an engine's events.

    Of the host and disk tiers' blocks ``namespace`` and ``parent`` are empty.
    """

    seq: int
    namespace: str
    parent: bytes
    names: tuple[bytes, ...]
    tier: Tier = "device"


class BlocksEvicted(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="m", tag="evicted"):
    """Blocks that are no longer whole in that tier. ``cause``: ``space``, ``flush``, or ``unsound`` (a broken file)."""

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
    """The names of all blocks of an engine by tier, in no order.

    Changes that are not in it have events with numbers above ``seq``. Some of those may be in it already: applying
    them again, in order, leads to the same state.
    """

    block_len: int
    epoch: int
    seq: int
    model: str = ""
    device: tuple[bytes, ...] = ()
    host: tuple[bytes, ...] = ()
    disk: tuple[bytes, ...] = ()


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(CacheEvents)
_snapshot_decoder = msgspec.msgpack.Decoder(CacheSnapshot)


def encode_cache_events(events: CacheEvents) -> bytes:
    return _encoder.encode(events)


def decode_cache_events(frame: bytes) -> CacheEvents:
    """Raises ``msgspec.ValidationError`` for another frame."""
    return _decoder.decode(frame)


def encode_cache_snapshot(snapshot: CacheSnapshot) -> bytes:
    """The answer to the query ``cache_blocks``."""
    return _encoder.encode(snapshot)


def decode_cache_snapshot(answer: bytes) -> CacheSnapshot:
    """Raises ``msgspec.ValidationError`` for other bytes."""
    return _snapshot_decoder.decode(answer)
