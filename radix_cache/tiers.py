"""Tiers: evicted KV is saved to host memory and to disk, and restored from there.

    stored   -> pending --write_behind--> host tier --worker--> disk tier
    evicted  -> if not saved yet, saved before the slots are given out again
    read_ahead -> disk tier --worker--> host tier        RadixCache.restore -> host tier -> private slots -> commit

Block names are equal in every process (see ``blocks``), so a restarted engine finds its prefixes again, and engines on
one host share a folder. Only whole blocks are kept. The engine's ``save`` and ``load`` copy a block's bytes from and to
its KV pool, and choose the number format of the copies.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from queue import Full, Queue
from threading import Thread
from time import perf_counter

import numpy as np

from .blocks import block_names
from .contents import Contents
from .disk_tier import DiskTier
from .events import BlockEvents
from .host_tier import HostTier
from .node import Namespace, RadixNode

log = logging.getLogger(__name__)

TRY_AGAIN_AFTER = 64  # evictions without a copy, after which one is copied and timed again

Save = Callable[[np.ndarray], Sequence[bytes]]  # slots int32 [n, block_len] -> n blocks of bytes
Load = Callable[[np.ndarray, Sequence[bytes]], None]  # the same slots, filled from n blocks of bytes


@dataclass(slots=True)
class TierCounters:
    """In blocks. ``dropped``: not written to disk because the worker was behind. ``refused``: not saved because
    computing them again takes less time.
    """

    saved: int = 0
    restored: int = 0
    written: int = 0
    read: int = 0
    dropped: int = 0
    refused: int = 0


class ReadAhead:
    """Blocks being read from disk. Once done, the first ``num_tokens`` tokens can be restored if all blocks verify."""

    __slots__ = ("_all_reading", "_names", "num_tokens")

    def __init__(self, num_tokens: int, names: set[bytes], all_reading: set[bytes]) -> None:
        self.num_tokens = num_tokens
        self._names = names
        self._all_reading = all_reading

    @property
    def is_done(self) -> bool:
        while self._names:
            name = self._names.pop()
            if name in self._all_reading:
                self._names.add(name)
                return False
        return True


class Tiers:
    """The host tier, the disk tier and the worker between them; one per cache, called by the engine's thread.

    ``max_queued`` bounds the blocks that wait for the disk: beyond it a write is dropped and a read is not begun.
    An evicted block is copied only if copying it out and back takes less time than computing it again: the engine sets
    ``recompute_s_per_token`` to the time of a token (not known: infinite), and each copy is timed.
    """

    def __init__(
        self,
        *,
        save: Save,
        load: Load,
        host: HostTier,
        disk: DiskTier | None = None,
        block_len: int = 64,
        max_queued: int = 256,
    ) -> None:
        self.block_len = block_len
        self.host = host
        self.disk = disk
        self.counters = TierCounters()
        self.contents: Contents | None = None  # set by the cache
        self.recompute_s_per_token = inf
        self._save_s = self._load_s = 0.0  # of a block: moving averages
        self._num_refused = 0
        self._save = save
        self._load = load
        self._pending: dict[bytes, tuple[RadixNode, int]] = {}  # blocks of the tree not saved yet: node, end position
        self._leaving: dict[bytes, np.ndarray] = {}  # blocks being evicted, and their slots
        self._reading: set[bytes] = set()  # queued for the worker
        self._writing: set[bytes] = set()
        self._queue: Queue[tuple[bytes, bytes | None] | None] = Queue(max_queued)
        self._worker: Thread | None = None
        if disk is not None:
            self._worker = Thread(target=self._work, args=(disk,), name="phloem-kv-tiers", daemon=True)
            self._worker.start()

    def tell(self, events: BlockEvents) -> None:
        """Have ``events`` told of each block that a tier stores or drops from now on."""
        self.host.events = events
        if self.disk is not None:
            self.disk.events = events

    # -- out: called by the cache -------------------------------------------------------------------------------------

    def stored(self, node: RadixNode, names: list[bytes], *, parent: bytes, first_end: int) -> None:
        for i, name in enumerate(names):
            self._pending[name] = (node, first_end + i * self.block_len)

    def evicted(self, node: RadixNode, names: list[bytes], *, first_end: int, cause: str) -> None:
        for i, name in enumerate(names):
            self._pending.pop(name, None)
            if cause == "space" and not self._is_kept(name):
                self._leaving[name] = self._slots_of(node, first_end + i * self.block_len)

    def save_leaving(self) -> None:
        """Save the blocks that were just evicted; called while their slots still hold them."""
        if self._leaving:
            leaving, self._leaving = self._leaving, {}
            if self.is_worth_copying:
                self._save_blocks(leaving)
            else:
                self.counters.refused += len(leaving)

    @property
    def is_worth_copying(self) -> bool:
        """Whether copying a block out and back takes less time than computing it; sometimes True to time it again."""
        if self._save_s + self._load_s <= self.recompute_s_per_token * self.block_len:
            return True
        self._num_refused += 1
        return self._num_refused % TRY_AGAIN_AFTER == 0

    def write_behind(self, max_blocks: int) -> int:
        """Save up to ``max_blocks`` blocks of the tree, oldest first, so that their eviction needs no copy.

        Called while the device is idle; returns how many blocks were saved.
        """
        found: dict[bytes, np.ndarray] = {}
        while self._pending and len(found) < max_blocks:
            name = next(iter(self._pending))
            node, end = self._pending.pop(name)
            if not self._is_kept(name):
                found[name] = self._slots_of(node, end)
        self._save_blocks(found)
        return len(found)

    # -- in -----------------------------------------------------------------------------------------------------------

    def read_ahead(self, tokens: np.ndarray, *, start: int = 0, namespace: Namespace = "") -> ReadAhead:
        """Begin to read from disk the blocks of ``tokens`` after the first ``start`` tokens."""
        first = start // self.block_len
        reading, count = set(), 0
        for name in block_names(tokens, namespace=namespace, block_len=self.block_len, contents=self.contents)[first:]:
            if name not in self.host:
                if not self._begin_read(name):
                    break
                reading.add(name)
            count += 1
        return ReadAhead(max(start, (first + count) * self.block_len) if count else start, reading, self._reading)

    def blocks_of(self, tokens: np.ndarray, *, first: int, limit: int, namespace: Namespace = "") -> list[bytes]:
        """The blocks of ``tokens`` from number ``first`` on that host memory has without a gap, ``limit`` at most."""
        blocks: list[bytes] = []
        for name in block_names(tokens, namespace=namespace, block_len=self.block_len, contents=self.contents)[
            first : first + limit
        ]:
            block = self.host.get(name)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def load(self, slots: np.ndarray, blocks: Sequence[bytes]) -> None:
        """Fill ``slots``, int32 [blocks * block_len], from ``blocks``."""
        start_s = perf_counter()
        self._load(slots.reshape(len(blocks), self.block_len), blocks)
        self._load_s = _lately(self._load_s, (perf_counter() - start_s) / len(blocks))
        self.counters.restored += len(blocks)

    # -- the end ------------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Save every block of the tree and wait until the disk has them."""
        while self._pending:
            self.write_behind(min(64, self._queue.maxsize))
            self.wait()
        self.wait()

    def wait(self) -> None:
        """Wait until the worker has nothing left to do."""
        if self._worker is not None:
            self._queue.join()

    def close(self) -> None:
        """Finish the queued blocks and end the worker."""
        if self._worker is not None:
            self._queue.put(None)
            self._worker.join()
            self._worker = None

    # -- helpers ------------------------------------------------------------------------------------------------------

    def _is_kept(self, name: bytes) -> bool:
        if self.disk is None:
            return name in self.host
        return name in self._writing or name in self.disk

    def _save_blocks(self, slots: dict[bytes, np.ndarray]) -> None:
        if not slots:
            return
        start_s = perf_counter()
        blocks = self._save(np.stack(list(slots.values())))
        self._save_s = _lately(self._save_s, (perf_counter() - start_s) / len(slots))
        assert len(blocks) == len(slots), f"save made {len(blocks)} blocks of {len(slots)}"
        for name, block in zip(slots, blocks, strict=True):
            self.counters.saved += 1
            self.host.put(name, block)
            if self._worker is not None:
                self._writing.add(name)
                try:
                    self._queue.put_nowait((name, block))
                except Full:
                    self._writing.discard(name)
                    self.counters.dropped += 1

    def _begin_read(self, name: bytes) -> bool:
        if self._worker is None or self.disk is None:
            return False
        if name in self._reading:
            return True
        if name not in self.disk:
            return False
        self._reading.add(name)
        try:
            self._queue.put_nowait((name, None))
        except Full:
            self._reading.discard(name)
            return False
        return True

    def _work(self, disk: DiskTier) -> None:
        while True:
            task = self._queue.get()
            try:
                if task is None:
                    return
                self._move(disk, *task)
            except Exception:
                log.exception("a KV block was not written to disk or not read")
            finally:
                self._queue.task_done()

    def _move(self, disk: DiskTier, name: bytes, block: bytes | None) -> None:
        """Write ``block``, or if None read it into the host tier. The sets need no lock: each operation is atomic."""
        if block is not None:
            try:
                if name not in disk and disk.write(name, block):
                    self.counters.written += 1
            finally:
                self._writing.discard(name)
            return
        try:
            block = disk.read(name)
            if block is not None:
                self.host.put(name, block)
                self.counters.read += 1
        finally:
            self._reading.discard(name)

    def _slots_of(self, node: RadixNode, end: int) -> np.ndarray:
        """The slots of the block that ends at ``end`` on the path to ``node``."""
        result = np.empty(self.block_len, np.int32)
        start, at = end - self.block_len, node
        while at.start >= end:
            assert at.parent is not None
            at = at.parent
        while True:
            first, last = max(at.start, start), min(at.end, end)
            result[first - start : last - start] = at.slots[first - at.start : last - at.start]
            if at.start <= start:
                return result
            assert at.parent is not None
            at = at.parent


def _lately(mean: float, value: float) -> float:
    return value if mean == 0.0 else mean + 0.2 * (value - mean)
