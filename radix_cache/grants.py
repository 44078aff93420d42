"""Grants: whole blocks of this cache's tree that other engines may copy, each for a time.

    extend ──► lent: the blocks are pinned, and each fetch renews the grant ──► ended, or expired: nothing is kept

A grant holds no slots of its own. It pins prefixes (see ``pins``), so its blocks stay within the slots that pins may
keep, may go early where a sequence could not run otherwise, and are evictable as soon as the grant has expired.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from .blocks import block_names
from .cache import RadixCache
from .contents import FIRST_CONTENT_ID
from .node import Namespace


class UnknownGrant(Exception):
    """A grant that was never made, has ended or has expired."""


@dataclass(frozen=True, slots=True)
class LentPrefix:
    """``tokens``, int32 [blocks * block_len], from a sequence's start, and the names of their blocks."""

    tokens: np.ndarray
    names: tuple[bytes, ...]


@dataclass(slots=True)
class _Granted:
    namespace: Namespace
    format: bytes
    ttl_s: float
    expires_s: float
    prefixes: tuple[LentPrefix, ...] = ()
    places: dict[bytes, tuple[int, int]] = field(default_factory=dict)  # name -> (prefix, number of the block in it)


class Grants:
    """Of one cache; for the engine's thread. ``clock`` is in seconds and has to be the cache's."""

    def __init__(self, cache: RadixCache, *, block_len: int, clock: Callable[[], float]) -> None:
        self._cache = cache
        self._block_len = block_len
        self._clock = clock
        self._granted: dict[str, _Granted] = {}

    def __len__(self) -> int:
        self._expire()
        return len(self._granted)

    def extend(
        self,
        sequences: Sequence[np.ndarray],
        *,
        namespace: Namespace,
        ttl_s: float,
        format: bytes = b"",
        grant: str = "",
    ) -> tuple[str, tuple[LentPrefix, ...]]:
        """Lend for ``ttl_s`` the whole blocks that the tree holds of ``sequences`` (token ids, int32 [n]).

        Returns the grant's id and the prefixes, the longest first, each with at least one block that none before has.
        Tokens of contents, such as images, have ids of this engine alone: a prefix ends before the first of them.
        ``format`` is kept for ``format_of``. ``grant``: one that is renewed with these sequences, or made again where
        it is gone; "": a new one.
        """
        self._expire()
        id = grant if grant in self._granted else secrets.token_hex(16)
        self.end(id)
        found = self._granted[id] = _Granted(namespace, format, ttl_s, self._clock() + ttl_s)
        prefixes: list[LentPrefix] = []
        for tokens in sorted(sequences, key=len, reverse=True):
            contents = np.flatnonzero(tokens >= FIRST_CONTENT_ID)
            end = contents.item(0) if len(contents) else len(tokens)
            names = block_names(tokens[:end], namespace=namespace, block_len=self._block_len)
            new = sum(name not in found.places for name in names)
            if not new:
                continue
            owner = (id, len(prefixes))
            num_pinned = self._cache.pin(
                tokens[: len(names) * self._block_len], ttl_s=ttl_s, owner=owner, namespace=namespace
            )
            num_blocks = num_pinned // self._block_len
            if num_blocks <= len(names) - new:
                self._cache.pins.unpin(owner)
                continue
            for number, name in enumerate(names[:num_blocks]):
                found.places.setdefault(name, (len(prefixes), number))
            prefixes.append(LentPrefix(tokens[: num_blocks * self._block_len].copy(), tuple(names[:num_blocks])))
        found.prefixes = tuple(prefixes)
        return id, found.prefixes

    def slots_of(self, grant: str, names: Sequence[bytes]) -> list[np.ndarray | None]:
        """The slots of each block, int32 [block_len], or None where it is not there any more. Renews the grant.

        The slots are valid until the next change of the cache. Raises ``UnknownGrant``.
        """
        found = self._find(grant)
        found.expires_s = self._clock() + found.ttl_s
        paths: list[np.ndarray] = []
        for i, prefix in enumerate(found.prefixes):
            self._cache.pin(prefix.tokens, ttl_s=found.ttl_s, owner=(grant, i), namespace=found.namespace)
            paths.append(self._cache.slots_of(prefix.tokens, namespace=found.namespace))
        slots: list[np.ndarray | None] = []
        for name in names:
            i, number = found.places.get(name, (-1, 0))
            start, end = number * self._block_len, (number + 1) * self._block_len
            slots.append(paths[i][start:end] if i >= 0 and end <= len(paths[i]) else None)
        return slots

    def format_of(self, grant: str) -> bytes:
        """Raises ``UnknownGrant``."""
        return self._find(grant).format

    def end(self, grant: str) -> None:
        """Nothing happens where it is gone."""
        found = self._granted.pop(grant, None)
        for i in range(len(found.prefixes) if found is not None else 0):
            self._cache.pins.unpin((grant, i))

    def end_all(self) -> None:
        for grant in list(self._granted):
            self.end(grant)

    def _find(self, grant: str) -> _Granted:
        self._expire()
        found = self._granted.get(grant)
        if found is None:
            raise UnknownGrant(grant)
        return found

    def _expire(self) -> None:
        now_s = self._clock()
        for grant in [grant for grant, found in self._granted.items() if found.expires_s <= now_s]:
            self.end(grant)
