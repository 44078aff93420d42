"""Names for token blocks that mean the same everywhere: a chain of hashes over a sequence. Never holds a sequence.

    root = H(namespace)    name[i] = H(name[i - 1], tokens[i * block_len : (i + 1) * block_len])

So a name stands for a whole prefix: two sequences share a block's KV exactly when its names are equal. Routers follow
an engine's cache by these names, and tiers file blocks under them.
"""

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from .node import Namespace

NAME_BYTES = 16


def root_name(namespace: Namespace) -> bytes:
    """The name before the first block; ``namespace`` is made of strings, bytes, integers, None and tuples."""
    return blake2b(_encode(namespace), digest_size=NAME_BYTES).digest()


def chain(name: bytes, tokens: np.ndarray, block_len: int) -> list[bytes]:
    """The names of the whole blocks in ``tokens``, which follow the block called ``name``."""
    raw = tokens.astype("<i4", copy=False).tobytes()
    names, step = [], 4 * block_len
    for at in range(0, len(raw) - step + 1, step):
        name = blake2b(name + raw[at : at + step], digest_size=NAME_BYTES).digest()
        names.append(name)
    return names


def block_names(tokens: Sequence[int] | np.ndarray, *, namespace: Namespace = "", block_len: int) -> list[bytes]:
    """The names of the whole blocks of a sequence from its start."""
    return chain(root_name(namespace), np.asarray(tokens, np.int32), block_len)


def _encode(value: Namespace) -> bytes:
    match value:
        case tuple():
            return b"(" + b"".join(map(_encode, value)) + b")"
        case str():
            kind, raw = b"s", value.encode()
        case bytes():
            kind, raw = b"b", value
        case int():
            kind, raw = b"i", str(int(value)).encode()
        case None:
            kind, raw = b"n", b""
        case _:
            raise TypeError(
                f"namespace part {value!r} of type {type(value).__name__} has no lasting name; "
                "use strings, bytes, integers, None and tuples of them"
            )
    return kind + str(len(raw)).encode() + b":" + raw
