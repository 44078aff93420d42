"""A fake engine with tiers, and a bucket in memory that can fail in every way."""

import threading

import numpy as np
from phloem.radix_cache import HostTier, RadixCache, StoreEntry, StoreTier, Tiers

BLOCK_LEN = 4
BLOCK_BYTES = BLOCK_LEN * 8


class Engine:
    """A cache over a fake KV pool: the KV of a token is a hash of everything up to it.

    By the ``clock`` copies and reads take no time, so none is refused or late.
    """

    def __init__(
        self, num_slots: int, *, disk: StoreTier | None = None, host_blocks: int = 1000, clock=lambda: 0.0
    ) -> None:
        self.kv = np.zeros(num_slots, np.int64)
        self.num_computed = 0
        self.tiers = Tiers(
            save=lambda slots: [self.kv[block].tobytes() for block in slots],
            load=self._load,
            host=HostTier(host_blocks * BLOCK_BYTES),
            store=disk,
            block_len=BLOCK_LEN,
            clock=clock,
        )
        self.cache = RadixCache(num_slots, tiers=self.tiers, block_len=BLOCK_LEN)

    def _load(self, slots: np.ndarray, blocks: list[bytes]) -> None:
        for row, block in zip(slots, blocks, strict=True):
            self.kv[row] = np.frombuffer(block, np.int64)

    def run(self, tokens: np.ndarray, *, limit: int | None = None, namespace: str = "") -> int:
        """Serve ``tokens`` and return how many had to be computed; every KV used is checked."""
        lease = self.cache.acquire(tokens, limit=limit, namespace=namespace)
        reading = self.tiers.read_ahead(tokens, start=lease.num_shared, namespace=namespace)
        self.tiers.wait()
        assert reading.is_done
        self.cache.restore(lease, tokens, limit=limit)
        self.cache.check()
        start = lease.num_shared
        assert (start == lease.num_cached) and (limit is None or start <= limit)
        lease.extend(len(tokens) - start)
        kv = self.expected(tokens, namespace)
        self.kv[lease.slot_ids[start:]] = kv[start:]
        assert (self.kv[lease.slot_ids] == kv).all()
        lease.commit(tokens)
        lease.release()
        self.cache.check()
        return len(tokens) - start

    @staticmethod
    def expected(tokens: np.ndarray, namespace: str) -> np.ndarray:
        return np.array([hash((namespace, *tokens[: n + 1].tolist())) for n in range(len(tokens))], np.int64)


def text(first: int, n: int) -> np.ndarray:
    return np.arange(first, first + n, dtype=np.int32)


class MemoryBucket:
    """Stands in for a server. ``fail``: methods that raise. ``gate``: while it is closed, ``get`` and ``put`` hang."""

    def __init__(self) -> None:
        self.objects: dict[str, tuple[float, bytes]] = {}
        self.fail: set[str] = set()
        self.gate = threading.Event()
        self.gate.set()
        self.asked: list[str] = []
        self._lock = threading.Lock()

    def get(self, key: str) -> bytes:
        self._note("get")
        if key not in self.objects:
            raise FileNotFoundError(key)
        return self.objects[key][1]

    def has(self, key: str) -> bool:
        self._note("has")
        return key in self.objects

    def put(self, key: str, data: bytes) -> None:
        self._note("put")
        with self._lock:
            self.objects[key] = (len(self.asked), data)

    def delete(self, keys: list[str]) -> None:
        self._note("delete")
        for key in keys:
            self.objects.pop(key, None)

    def list(self) -> list[StoreEntry]:
        self._note("list")
        return [StoreEntry(used_s, len(data), key) for key, (used_s, data) in self.objects.items()]

    def _note(self, method: str) -> None:
        self.asked.append(method)
        if method in ("get", "put"):
            assert self.gate.wait(60), "the gate was never opened"
        if method in self.fail:
            raise OSError(f"the server refuses {method}")


SPOILERS = {
    "a flipped bit": lambda raw: raw[:-1] + bytes([raw[-1] ^ 1]),
    "a cut object": lambda raw: raw[:-7],
    "a longer object": lambda raw: raw + b"x",
    "an empty object": lambda raw: b"",
    "a foreign object": lambda raw: b"GIF89a" * 40,
    "a missing object": None,
}


def spoil(bucket, spoiler, *, which=lambda key: True) -> int:
    """Spoil the objects under the keys that ``which`` chooses; returns how many."""
    keys = [entry.key for entry in bucket.list() if which(entry.key)]
    for key in keys:
        if spoiler is None:
            bucket.delete([key])
        else:
            bucket.put(key, spoiler(bucket.get(key)))
    return len(keys)
