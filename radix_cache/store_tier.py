"""KV blocks in a store, by name, verified, up to a number of bytes; shared by engines and kept over restarts.

    key    <format>/<ab>/<ab...>.kv
    value  the sealed block (see ``sealed``)

A value that does not verify is ignored, and replaced when its block is saved again. A store that fails is left alone
for a while, so that nothing waits for it.
"""

import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from threading import Lock
from time import monotonic

from .block_store import BlockStore
from .events import BlockEvents
from .sealed import UnsoundBlock, digest, seal, unseal

MAX_KNOWN = 1 << 17  # names of a far store's blocks that are remembered: about 20 MB
FIRST_LOOK = 8  # blocks that are looked for in the first request
PAUSE_S, MAX_PAUSE_S = 1.0, 60.0  # for which a failing store is left alone; doubled while it fails

log = logging.getLogger(__name__)


class StoreTier:
    """Deletes the blocks that were used longest ago first, those of other formats too. For any number of threads.

    ``events``, if set, is told of each block that this object writes or deletes in a near store: not of those of other
    processes, and of none in a far store, which every engine reaches alike.
    """

    def __init__(
        self, store: BlockStore, *, format: str, max_bytes: int, clock: Callable[[], float] = monotonic
    ) -> None:
        if max_bytes < 1:
            raise ValueError(f"max_bytes={max_bytes}: {store.about} needs room for at least 1 byte")
        self.store = store
        self.max_bytes = max_bytes
        self.num_faults = 0  # reads, writes and look-ups that the store has failed
        self._format = digest(format.encode())
        self.events: BlockEvents | None = None
        self._lock, self._trimming = Lock(), Lock()
        self._unsound: set[bytes] = set()  # names of blocks that did not verify
        self._known: OrderedDict[bytes, None] = OrderedDict()  # of a far store: names of blocks that it had
        self._reads, self._writes, self._trims = _Pause(clock), _Pause(clock), _Pause(clock)
        self._size_bytes = -1  # not counted yet
        if store.is_near:
            self._size_bytes = sum(entry.num_bytes for entry in store.entries())

    @property
    def size_bytes(self) -> int:
        """Of all blocks in the store, as far as this process knows; 0 before a far store was first written to."""
        return max(self._size_bytes, 0)

    def __contains__(self, name: bytes) -> bool:
        """Takes microseconds. Of a far store: whether this process has seen the block there."""
        if name in self._unsound:
            return False
        if self.store.is_near:
            return self.store.has_many([self.key_of(name)])[0]
        return name in self._known

    def find(self, names: Sequence[bytes]) -> int:
        """How many of ``names``, from the first on, the store has without a gap. Asks the store."""
        found = 0
        while found < len(names) and not self._reads.is_on:
            some = names[found : found + max(FIRST_LOOK, found)]  # twice as many each time: few for a miss
            try:
                has = self.store.has_many([self.key_of(name) for name in some])
            except OSError as error:
                self._failed(self._reads, "looked up", error)
                return found
            self._reads.end()
            for name, is_there in zip(some, has, strict=True):
                if not is_there or name in self._unsound:
                    self._forget(name)
                    return found
                self._remember(name)
                found += 1
        return found

    def names(self) -> tuple[bytes, ...]:
        """Of the blocks in a near store, whichever process wrote them. Reads the whole store; of a far one: none."""
        if not self.store.is_near:
            return ()
        found = (self._name_of(entry.key) for entry in self.store.entries())
        return tuple(name for name in found if name is not None and name not in self._unsound)

    def read(self, name: bytes) -> bytes | None:
        """The block's bytes; None if the store has none that verify, or fails."""
        if name in self._unsound or self._reads.is_on:
            return None
        try:
            raw = self.store.read(self.key_of(name))
        except OSError as error:
            self._failed(self._reads, "read", error)
            return None
        self._reads.end()
        if raw is None:
            self._forget(name)
            return None
        try:
            return unseal(raw, format=self._format, name=name)
        except UnsoundBlock as error:
            self._ignore(name, str(error))
            return None

    def write(self, name: bytes, block: bytes) -> bool:
        """Write the block; False where the store fails, which is logged."""
        if self._writes.is_on or self._trims.is_on:
            return False
        data = seal(block, format=self._format, name=name)
        try:
            self.store.write(self.key_of(name), data)
        except OSError as error:
            self._failed(self._writes, "written", error)
            return False
        self._writes.end()
        self._remember(name)
        if self.events is not None:
            self.events.kept("disk", name)
        with self._lock:
            self._unsound.discard(name)
            if self._size_bytes >= 0:
                self._size_bytes += len(data)
            is_room = 0 <= self._size_bytes <= self.max_bytes
        if not is_room and self._trimming.acquire(blocking=False):
            try:
                self._trim()
            finally:
                self._trimming.release()
        return True

    def key_of(self, name: bytes) -> str:
        text = name.hex()
        return f"{self._format.hex()}/{text[:2]}/{text}.kv"

    def _trim(self) -> None:
        """Count all blocks, other engines' too. Beyond the limit delete the oldest, down to 90% of the limit."""
        try:
            entries = sorted(self.store.entries())
            size_bytes = sum(entry.num_bytes for entry in entries)
            gone: list[str] = []
            if size_bytes > self.max_bytes:
                for entry in entries:
                    if size_bytes <= self.max_bytes - self.max_bytes // 10:
                        break
                    gone.append(entry.key)
                    size_bytes -= entry.num_bytes
                self.store.delete(gone)
        except OSError as error:
            self._failed(self._trims, "counted and deleted", error)
            return
        self._trims.end()
        self._size_bytes = size_bytes
        for key in gone:
            name = self._name_of(key)
            if name is not None:
                self._forget(name)
                if self.events is not None:
                    self.events.dropped("disk", name, "space")

    def _name_of(self, key: str) -> bytes | None:
        """The block's name; None where it is of another format, or none of ours."""
        folder, _, rest = key.partition("/")
        name, dot, ending = os.path.basename(rest).rpartition(".")
        try:
            return bytes.fromhex(name) if folder == self._format.hex() and dot and ending == "kv" else None
        except ValueError:
            return None

    def _remember(self, name: bytes) -> None:
        if not self.store.is_near:
            with self._lock:
                self._known[name] = None
                if len(self._known) > MAX_KNOWN:
                    self._known.popitem(last=False)

    def _forget(self, name: bytes) -> None:
        with self._lock:
            self._known.pop(name, None)

    def _ignore(self, name: bytes, reason: str) -> None:
        with self._lock:
            self._unsound.add(name)
            self._known.pop(name, None)
        if self.events is not None:
            self.events.dropped("disk", name, "unsound")
        log.warning("kv block %s ignored: %s: %s", name.hex(), f"{self.store.about}/{self.key_of(name)}", reason)

    def _failed(self, pause: "_Pause", what: str, error: OSError) -> None:
        self.num_faults += 1
        pause_s = pause.begin()
        if pause_s:
            first_line = str(error).partition("\n")[0]
            log.warning("kv blocks not %s: %s: %s; tried again in %g s", what, self.store.about, first_line, pause_s)


class _Pause:
    """After a fault the store is left alone, for longer the more often it fails in a row."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = Lock()
        self._until_s = float("-inf")
        self._next_s = PAUSE_S

    @property
    def is_on(self) -> bool:
        return self._clock() < self._until_s

    def begin(self) -> float:
        """For how long; 0 where a pause is on already, as several threads meet one fault."""
        with self._lock:
            if self.is_on:
                return 0.0
            pause_s, self._next_s = self._next_s, min(2 * self._next_s, MAX_PAUSE_S)
            self._until_s = self._clock() + pause_s
            return pause_s

    def end(self) -> None:
        """The store has answered."""
        if self._next_s > PAUSE_S:
            with self._lock:
                self._next_s, self._until_s = PAUSE_S, float("-inf")
