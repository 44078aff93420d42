"""Tiers: evicted KV is saved to host memory and to a store, and restored from there.

    stored   -> pending --write_behind--> host tier --writers--> store (a folder, an object store)
    evicted  -> if not saved yet, saved before the slots are given out again
    read_ahead -> store --readers--> host tier           RadixCache.restore -> host tier -> private slots -> commit

Block names are equal in every process (see ``blocks``), so a restarted engine finds its prefixes again, and engines
share a store. Only whole blocks are kept. The engine's ``save`` and ``load`` copy a block's bytes from and to its KV
pool, and choose the number format of the copies. The engine's thread never waits for the store.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from threading import Lock
from time import perf_counter

import numpy as np

from .blocks import block_names
from .contents import Contents
from .events import BlockEvents
from .host_tier import HostTier
from .node import Namespace, RadixNode
from .read_rates import ReadRates, mean_of
from .store_tier import StoreTier
from .workers import Workers

TRY_AGAIN_AFTER = 64  # evictions without a copy, after which one is copied and timed again

Save = Callable[[np.ndarray], Sequence[bytes]]  # slots int32 [n, block_len] -> n blocks of bytes
Load = Callable[[np.ndarray, Sequence[bytes]], None]  # the same slots, filled from n blocks of bytes


@dataclass(slots=True)
class TierCounters:
    """In blocks. ``dropped``: not written to the store because the writers were behind, or the store failed.
    ``refused``: not saved because computing them again takes less time; ``not_read``: not read for that reason, or
    because the readers were behind. ``missing``: looked for, and not in the store. ``late``: not read in time.
    """

    saved: int = 0
    restored: int = 0
    written: int = 0
    read: int = 0
    dropped: int = 0
    refused: int = 0
    not_read: int = 0
    missing: int = 0
    late: int = 0


class ReadAhead:
    """Blocks that are looked for and read. Done once all are there, or their time is over: late ones only reach the
    host tier, and their tokens are computed. What is there is what ``Tiers.blocks_of`` finds.
    """

    __slots__ = ("_deadline_s", "_is_looking", "_names", "_tiers", "_wait_s")

    def __init__(self, tiers: "Tiers", names: set[bytes], *, is_looking: bool = False, wait_s: float = inf) -> None:
        self._tiers = tiers
        self._names = names
        self._is_looking = is_looking
        self._wait_s = wait_s
        self._deadline_s = tiers.clock() + wait_s

    @property
    def is_done(self) -> bool:
        if not self._is_looking:
            while self._names:
                name = self._names.pop()
                if self._tiers.is_reading(name):
                    self._names.add(name)
                    break
            else:
                return True
        if self._tiers.clock() < self._deadline_s:
            return False
        self._tiers.note_late(len(self._names) or 1, self._wait_s)
        self._names, self._is_looking = set(), False
        return True

    def found(self, names: set[bytes]) -> None:
        """The look-up has ended, and ``names`` are being read."""
        if self._is_looking:
            self._names, self._is_looking = names, False


class Tiers:
    """The host tier, the store and the threads between them; one per cache, called by the engine's thread.

    ``max_queued`` bounds the blocks that wait for the store, each way: beyond it a write is dropped and a read is not
    begun. An evicted block is copied only if copying it out and back takes less time than computing it again: the
    engine sets ``recompute_s_per_token`` to the time of a token (not known: infinite), and each copy is timed on
    ``clock``. A prompt's blocks are read only if that is expected to take no longer than computing them, and a sequence
    waits for them no longer than computing takes, nor longer than ``read_budget_s``.
    """

    def __init__(
        self,
        *,
        save: Save,
        load: Load,
        host: HostTier,
        store: StoreTier | None = None,
        block_len: int = 64,
        max_queued: int = 256,
        read_budget_s: float = 2.0,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.block_len = block_len
        self.host = host
        self.store = store
        self.counters = TierCounters()
        self.contents: Contents | None = None  # set by the cache
        self.recompute_s_per_token = inf
        self.read_budget_s = read_budget_s
        self.clock = clock
        self.rates = ReadRates()
        self._save_s = self._load_s = 0.0  # of a block: moving averages
        self._num_refused = 0
        self._save = save
        self._load = load
        self._pending: dict[bytes, tuple[RadixNode, int]] = {}  # blocks of the tree not saved yet: node, end position
        self._leaving: dict[bytes, np.ndarray] = {}  # blocks being evicted, and their slots
        self._reading: set[bytes] = set()  # queued for the readers
        self._writing: set[bytes] = set()
        self._counting = Lock()
        self._readers = self._writers = None
        if store is not None:
            self.rates.num_readers = store.store.num_readers
            num_writers = 1 if store.store.is_near else 2
            self._readers = Workers("phloem-kv-read", num_threads=store.store.num_readers, max_queued=max_queued)
            self._writers = Workers("phloem-kv-write", num_threads=num_writers, max_queued=max_queued)

    def tell(self, events: BlockEvents) -> None:
        """Have ``events`` told of each block that a tier stores or drops from now on."""
        self.host.events = events
        if self.store is not None and self.store.store.is_near:
            self.store.events = events

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
        """Begin to read from the store the blocks of ``tokens`` after the first ``start`` tokens."""
        first = start // self.block_len
        names = block_names(tokens, namespace=namespace, block_len=self.block_len, contents=self.contents)[first:]
        names = names[next((i for i, name in enumerate(names) if name not in self.host), len(names)) :]
        if self.store is None or self._readers is None or not names:
            return ReadAhead(self, set())
        if self.store.store.is_near:
            there: list[bytes] = []
            for name in names:
                if name not in self.host and not self.is_reading(name) and name not in self.store:
                    break
                there.append(name)
            return ReadAhead(self, self._begin_reads(there), wait_s=self._wait_s(len(there)))
        if not self._is_worth_reading(len(names)):
            return ReadAhead(self, set())
        reading = ReadAhead(self, set(), is_looking=True, wait_s=self._wait_s(len(names)))
        if not self._readers.submit(partial(self._look_up, self.store, names, reading)):
            self._count(not_read=len(names))
            reading.found(set())
        return reading

    def is_reading(self, name: bytes) -> bool:
        return name in self._reading

    def note_late(self, num_blocks: int, waited_s: float) -> None:
        """A sequence has waited for ``num_blocks`` as long as it may."""
        self._count(late=num_blocks)
        self.rates.late(waited_s)

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
        start_s = self.clock()
        self._load(slots.reshape(len(blocks), self.block_len), blocks)
        self._load_s = mean_of(self._load_s, (self.clock() - start_s) / len(blocks))
        self._count(restored=len(blocks))

    # -- the end ------------------------------------------------------------------------------------------------------

    def flush(self, timeout_s: float = inf) -> bool:
        """Save every block of the tree and wait until the store has them; False where ``timeout_s`` is over before."""
        end_s = self.clock() + timeout_s
        while self._pending:
            self.write_behind(64 if self._writers is None else min(64, self._writers.max_queued))
            if not self.wait(end_s - self.clock()):
                return False
        return self.wait(end_s - self.clock())

    def wait(self, timeout_s: float = inf) -> bool:
        """Wait until the threads have nothing left to do; False where ``timeout_s`` is over before."""
        limit_s = None if timeout_s == inf else max(timeout_s, 0.0)
        workers = [w for w in (self._readers, self._writers) if w is not None]
        return all(w.wait(limit_s) for w in workers)

    def close(self, timeout_s: float = inf) -> None:
        """Finish the queued blocks, for at most ``timeout_s``, and end the threads."""
        for workers in (self._readers, self._writers):
            if workers is not None:
                workers.close(None if timeout_s == inf else max(timeout_s, 0.0))
        self._readers = self._writers = None

    # -- helpers ------------------------------------------------------------------------------------------------------

    def _is_kept(self, name: bytes) -> bool:
        if self.store is None:
            return name in self.host
        return name in self._writing or name in self.store

    def _save_blocks(self, slots: dict[bytes, np.ndarray]) -> None:
        if not slots:
            return
        start_s = self.clock()
        blocks = self._save(np.stack(list(slots.values())))
        self._save_s = mean_of(self._save_s, (self.clock() - start_s) / len(slots))
        assert len(blocks) == len(slots), f"save made {len(blocks)} blocks of {len(slots)}"
        self._count(saved=len(slots))
        for name, block in zip(slots, blocks, strict=True):
            self.host.put(name, block)
            if self.store is not None and self._writers is not None:
                self._writing.add(name)
                if not self._writers.submit(partial(self._write, self.store, name, block)):
                    self._writing.discard(name)
                    self._count(dropped=1)

    def _compute_s(self, num_blocks: int) -> float:
        return num_blocks * self.block_len * self.recompute_s_per_token

    def _wait_s(self, num_blocks: int) -> float:
        return min(self.read_budget_s, self._compute_s(num_blocks)) if num_blocks else inf

    def _is_worth_reading(self, num_blocks: int) -> bool:
        assert self._readers is not None
        is_worth = self.rates.is_worth(
            num_blocks,
            num_before=self._readers.num_open,
            block_compute_s=self._compute_s(1),
            block_load_s=self._load_s,
        )
        if not is_worth:
            self._count(not_read=num_blocks)
        return is_worth

    def _begin_reads(self, names: Sequence[bytes]) -> set[bytes]:
        """Of ``names``, those that are being read now; nothing after the first one that cannot be."""
        store, readers = self.store, self._readers
        if store is None or readers is None:
            return set()
        wanted = [name for name in names if name not in self.host and not self.is_reading(name)]
        reading = {name for name in names if self.is_reading(name)}
        if not wanted or not self._is_worth_reading(len(wanted)):
            return reading
        for i, name in enumerate(wanted):
            self._reading.add(name)
            if not readers.submit(partial(self._read, store, name)):
                self._reading.discard(name)
                self._count(not_read=len(wanted) - i)
                break
            reading.add(name)
        return reading

    def _count(self, **changes: int) -> None:
        """Counters change on several threads."""
        with self._counting:
            for field, change in changes.items():
                setattr(self.counters, field, getattr(self.counters, field) + change)

    # -- on the threads; the sets need no lock: each operation is atomic -----------------------------------------------

    def _look_up(self, store: StoreTier, names: list[bytes], reading: ReadAhead) -> None:
        found: set[bytes] = set()
        try:
            start_s = self.clock()
            num_found = store.find(names)
            self.rates.looked_up(self.clock() - start_s, num_found=num_found, num_asked=len(names))
            self._count(missing=len(names) - num_found)
            found = self._begin_reads(names[:num_found])
        finally:
            reading.found(found)

    def _read(self, store: StoreTier, name: bytes) -> None:
        try:
            start_s = self.clock()
            block = store.read(name)
            self.rates.read(self.clock() - start_s)
            if block is not None:
                self.host.put(name, block)
                self._count(read=1)
        finally:
            self._reading.discard(name)

    def _write(self, store: StoreTier, name: bytes, block: bytes) -> None:
        try:
            if name in store or (not store.store.is_near and store.find([name])):
                return
            if store.write(name, block):
                self._count(written=1)
            else:
                self._count(dropped=1)
        finally:
            self._writing.discard(name)

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
