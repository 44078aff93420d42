"""Names of token blocks that are equal in every process: a chain of hashes over a sequence's tokens.

    root = H(namespace)    name[i] = H(name[i - 1], tokens[i * block_len : (i + 1) * block_len])

A name stands for a whole prefix: two sequences can share a block's KV exactly when its names are equal. Routers follow
an engine's cache by these names, and tiers store blocks under them. A block belongs to the node whose edge holds the
block's last token.
"""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Protocol

import numpy as np

from .contents import FIRST_CONTENT_ID, Contents
from .node import Namespace, RadixNode

NAME_BYTES = 16


class Follower(Protocol):
    """Called after blocks were stored in the tree, and before they are evicted.

    ``names`` are of consecutive blocks; the first ends at position ``first_end``. All of them end in the edge of
    ``node``.
    """

    def stored(self, node: RadixNode, names: list[bytes], *, parent: bytes, first_end: int) -> None: ...
    def evicted(self, node: RadixNode, names: list[bytes], *, first_end: int, cause: str) -> None: ...


class BlockNames:
    """The tree's observer: keeps on each node the names of the blocks that end in its edge."""

    def __init__(self, block_len: int, followers: Sequence[Follower], *, contents: Contents | None = None) -> None:
        """``contents`` describes the ids beyond the vocabulary."""
        if block_len < 1:
            raise ValueError(f"block_len={block_len}: a block needs at least 1 token")
        self.block_len = block_len
        self._followers = tuple(followers)
        self._contents = contents

    def rooted(self, root: RadixNode) -> None:
        root.names = [root_name(root.namespace)]

    def stored(self, node: RadixNode, start: int) -> None:
        first = start - start % self.block_len  # [first, start) belongs to a block that begins above; then [start, end)
        pieces, at = [], node
        while at.end > first:
            pieces.append(at.tokens[max(first - at.start, 0) :])
            assert at.parent is not None
            at = at.parent
        parent = self._name_before(node)
        names = chain(parent, np.concatenate(pieces[::-1]), self.block_len, self._contents)
        node.names = [*(node.names or ()), *names]
        if names:
            for follower in self._followers:
                follower.stored(node, names, parent=parent, first_end=first + self.block_len)

    def evicted(self, node: RadixNode, start: int, cause: str) -> None:
        assert node.names is not None
        keep = start // self.block_len - node.start // self.block_len
        gone = node.names[keep:]
        del node.names[keep:]
        if gone:
            first_end = (start // self.block_len + 1) * self.block_len
            for follower in self._followers:
                follower.evicted(node, gone, first_end=first_end, cause=cause)

    def split(self, head: RadixNode, tail: RadixNode) -> None:
        assert tail.names is not None
        keep = head.end // self.block_len - head.start // self.block_len
        head.names, tail.names = tail.names[:keep], tail.names[keep:]

    def _name_before(self, node: RadixNode) -> bytes:
        """The last name on the path down to ``node`` (included); every root has a name."""
        at: RadixNode | None = node
        while at is not None and not at.names:
            at = at.parent
        assert at is not None and at.names
        return at.names[-1]


def root_name(namespace: Namespace) -> bytes:
    """The name that precedes the first block. ``namespace``: strings, bytes, integers, None and tuples of them."""
    return blake2b(_encode(namespace), digest_size=NAME_BYTES).digest()


def chain(name: bytes, tokens: np.ndarray, block_len: int, contents: Contents | None = None) -> list[bytes]:
    """The names of the whole blocks in ``tokens``, which follow the block ``name``.

    ``contents`` describes the ids beyond the vocabulary. Without it there must be none: their names would be wrong in
    other engines.
    """
    tokens = tokens.astype("<i4", copy=False)
    has_contents = bool(len(tokens)) and int(tokens.max()) >= FIRST_CONTENT_ID
    raw = tokens.tobytes()
    names, step = [], 4 * block_len
    for at in range(0, len(raw) - step + 1, step):
        block = raw[at : at + step]
        if has_contents:
            assert contents is not None, "ids of contents need their digests"
            block = contents.described(tokens[at // 4 : at // 4 + block_len])
        name = blake2b(name + block, digest_size=NAME_BYTES).digest()
        names.append(name)
    return names


def block_names(
    tokens: Sequence[int] | np.ndarray,
    *,
    namespace: Namespace = "",
    block_len: int,
    contents: Contents | None = None,
) -> list[bytes]:
    """The names of the whole blocks of a sequence from its start."""
    return chain(root_name(namespace), np.asarray(tokens, np.int32), block_len, contents)


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
                f"namespace part {value!r} of type {type(value).__name__} cannot be hashed for block names; "
                "use strings, bytes, integers, None and tuples of them"
            )
    return kind + str(len(raw)).encode() + b":" + raw
