"""A KV block as it travels to stores and to other engines: with its name, what it depends on, and a checksum.

    MAGIC, format [16], name [16], checksum [16], the block's bytes

``format`` is a digest of all that the bytes depend on: model, layers, heads, number format, code.
"""

from hashlib import blake2b

MAGIC = b"phloem kv block 1\n"
HASH_BYTES = 16
_HEADER_BYTES = len(MAGIC) + 3 * HASH_BYTES


class UnsoundBlock(Exception):
    """Bytes that are not the block they should be; the message says why."""


def digest(data: bytes | memoryview) -> bytes:
    return blake2b(data, digest_size=HASH_BYTES).digest()


def seal(block: bytes, *, format: bytes, name: bytes) -> bytes:
    return MAGIC + format + name + digest(block) + block


def unseal(raw: bytes, *, format: bytes, name: bytes) -> bytes:
    """The bytes of the block ``name`` of this ``format``. Raises ``UnsoundBlock`` for anything else."""
    if not raw.startswith(MAGIC):
        raise UnsoundBlock("it is no block of this cache")
    block = memoryview(raw)[_HEADER_BYTES:]
    if raw[:_HEADER_BYTES] != MAGIC + format + name + digest(block):
        raise UnsoundBlock("its checksum, name or format does not verify")
    return bytes(block)
