"""Copies KV blocks from another engine, on a thread of its own; see ``Handoff``, which puts them into the cache."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial
from typing import Any

from ...protocol.address import ClientKeys
from ...protocol.client import Client
from ...protocol.errors import Cancelled, EngineLost, InternalError
from ...radix_cache import UnsoundBlock, unseal

NUM_ASKED = 2  # fetches under way: one is on the line while the other's blocks are loaded

Blocks = list[tuple[bytes, bytes]]  # names, and the blocks' bytes


class Pull:
    """``coming`` is a future of the next blocks, in the order of ``names``; empty: all have come.

    At most ``NUM_ASKED`` answers of ``num_each`` blocks wait for the engine's thread, which calls ``go_on`` for more.
    ``coming`` raises a ``PhloemError`` that says why no more blocks come: the other engine is lost, takes longer than
    ``timeout_s``, has not kept a block, or sent another one than was asked for.
    """

    def __init__(
        self,
        url: str,
        grant: str,
        names: Sequence[bytes],
        *,
        keys: ClientKeys | None,
        format: bytes,
        num_each: int,
        timeout_s: float,
    ) -> None:
        self._connect = partial(
            Client, url, keys=keys, connect_timeout_s=timeout_s, engine_timeout_s=max(timeout_s, 1.0)
        )
        self._url, self._grant, self._format, self._timeout_s = url, grant, format, timeout_s
        self._parts = deque(tuple(names[i : i + num_each]) for i in range(0, len(names), num_each))
        self._asked: deque[tuple[tuple[bytes, ...], Future[Any]]] = deque()
        self._client: Client | None = None
        self._is_closed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="phloem-pull")
        self.coming: Future[Blocks] = self._thread.submit(self._next)

    def go_on(self) -> None:
        self.coming = self._thread.submit(self._next)

    def close(self) -> None:
        """End the thread and the connection; does not wait for them."""
        self._is_closed = True
        for _, answer in list(self._asked):
            answer.cancel()
        self._thread.submit(self._disconnect)
        self._thread.shutdown(wait=False)

    # -- on the thread ------------------------------------------------------------------------------------------------

    def _next(self) -> Blocks:
        if self._is_closed:
            raise Cancelled("the copy was ended")
        if self._client is None:
            self._client = self._connect()
        while self._parts and len(self._asked) < NUM_ASKED:
            names = self._parts.popleft()
            self._asked.append((names, self._client.fetch(self._grant, names)))
        if not self._asked:
            return []
        names, answer = self._asked[0]
        try:
            found = answer.result(self._timeout_s)
        except FutureTimeout:
            raise EngineLost(f"no block came from {self._url} within {self._timeout_s:g} s") from None
        except CancelledError:  # by ``close``
            raise Cancelled("the copy was ended") from None
        self._asked.popleft()
        if not isinstance(found, list) or len(found) != len(names):
            raise InternalError(f"{self._url} answered a fetch of {len(names)} blocks with something else")
        return [(name, self._opened(name, sealed)) for name, sealed in zip(names, found, strict=True)]

    def _opened(self, name: bytes, sealed: object) -> bytes:
        if sealed == b"":
            raise EngineLost(f"{self._url} has not kept block {name.hex()}")
        if not isinstance(sealed, bytes):
            raise InternalError(f"block {name.hex()} of {self._url}: it is no block")
        try:
            return unseal(sealed, format=self._format, name=name)
        except UnsoundBlock as error:
            raise InternalError(f"block {name.hex()} of {self._url}: {error}") from None

    def _disconnect(self) -> None:
        if self._client is not None:
            self._client.close()
