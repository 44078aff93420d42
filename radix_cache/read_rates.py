"""Whether reading KV blocks from a store takes less time than computing them: from measured times and shares."""

from dataclasses import dataclass, field
from math import ceil
from threading import Lock

TRY_AGAIN_AFTER = 16  # reads that were not begun, after which one is begun and timed again


@dataclass(slots=True)
class ReadRates:
    """Moving averages: seconds of a look-up, seconds of a block's read, and the share of blocks that were there."""

    num_readers: int = 1
    lookup_s: float = 0.0
    block_s: float = 0.0
    share: float = 1.0
    _num_refused: int = 0
    _lock: Lock = field(default_factory=Lock)

    def looked_up(self, seconds: float, *, num_found: int, num_asked: int) -> None:
        with self._lock:
            self.lookup_s = mean_of(self.lookup_s, seconds)
            self.share += 0.2 * (num_found / num_asked - self.share)

    def read(self, seconds: float) -> None:
        """A block was read in ``seconds``."""
        with self._lock:
            self.block_s = mean_of(self.block_s, seconds)

    def late(self, seconds: float) -> None:
        """A block was not there after ``seconds``: it takes at least twice as long, until a read shows the contrary."""
        with self._lock:
            self.block_s = max(self.block_s, 2 * seconds)

    def read_s(self, num_blocks: int, *, num_before: int = 0) -> float:
        """How long the reads of ``num_blocks`` take that wait behind ``num_before`` others."""
        return ceil((num_before + num_blocks) / self.num_readers) * self.block_s

    def is_worth(self, num_blocks: int, *, num_before: int, block_compute_s: float, block_load_s: float) -> bool:
        """Whether looking for ``num_blocks`` and reading those found is expected to take no longer than computing them.

        Sometimes True to measure again. ``block_load_s``: from host memory to the KV pool.
        """
        num_found = self.share * num_blocks
        read_s = self.lookup_s + self.read_s(ceil(num_found), num_before=num_before) + num_found * block_load_s
        if read_s <= num_found * block_compute_s:
            self._num_refused = 0
            return True
        self._num_refused += 1
        return self._num_refused % TRY_AGAIN_AFTER == 0


def mean_of(mean: float, value: float) -> float:
    """The moving average after ``value``; the first value is the average."""
    return value if mean == 0.0 else mean + 0.2 * (value - mean)
