"""How often each prefix was looked up lately, also while it was not cached.

The tree forgets a prefix that it evicts; the history still counts it. A count-min sketch with conservative update,
whose counters are halved after ``num_until_halved`` counts, as in TinyLFU (Einziger et al., 2017):

    tokens |--BLOCK--|--BLOCK--|--BLOCK--|..      the prefix up to the end of each whole block has a counter; any other
                                                  prefix has the count of its last whole block, or 0
"""

from functools import lru_cache

import numpy as np

from .blocks import root_name
from .node import Namespace, RadixNode
from .returns import MAX_TURN, Returns

BLOCK = 16
PER_BLOCK = 32  # counters in a row for each block that fits into the cache
NUM_ROWS = 4
NEAR = 3  # blocks after the end of an earlier lookup that may have counts by chance
MOST = 255
_ALL_BITS = 0xFFFFFFFFFFFFFFFF
_SECOND_BITS = np.uint64(0xFFFF)


class History:
    """Takes 22 to 44 bytes a slot.

    Hash collisions make a count too high. They make one too low only where a lookup seems to continue another: if both
    have the same counter in two rows.
    """

    def __init__(self, num_slots: int) -> None:
        bits = max(10, (PER_BLOCK * num_slots // BLOCK).bit_length())
        self.num_until_halved = (1 << bits) // 2
        self._shift = np.uint64(64 - bits)
        self._counts = np.zeros((NUM_ROWS, 1 << bits), np.uint8)
        self._mix = weights_of(NUM_ROWS)[:, None]
        # By counter of the first row, of the lookups whose tokens ended there: the turn, 0 for none, the last bits of
        # the counter of the second row, and the time.
        self._turns = np.zeros(1 << bits, np.uint8)
        self._seconds = np.zeros(1 << bits, np.uint16)
        self._times = np.zeros(1 << bits, np.uint32)
        self.returns = Returns()
        self._rows = np.arange(NUM_ROWS)[:, None]
        self._num_counted = 0
        self.weights = weights_of(4096)  # of the token at each position

    def count(self, namespace: Namespace, tokens: np.ndarray, *, now: int = 0) -> int:
        """Count a lookup of ``tokens`` for all of their prefixes. Returns its turn, 0 where it is too short to tell.

        ``now``: the uses of the cache so far.

        If ``tokens`` continue those of an earlier lookup, as a chat's next turn does, only the prefixes beyond it are
        counted: the same client has moved on and will not look up the shorter prefix again.
        """
        n = len(tokens) // BLOCK * BLOCK
        if n == 0:
            return 0
        if n > len(self.weights):
            self.weights = weights_of(2 * n)
        products = tokens[:n].astype(np.uint64) * self.weights[:n]
        sums = np.cumsum(np.add.reduceat(products, np.arange(0, n, BLOCK)))
        cells = self._cells(sums + np.uint64(_first_sum(namespace)))
        counts = self._counts[self._rows, cells]
        least = counts.min(axis=0)
        num_known = len(least) if least.all() else int((least == 0).argmax())
        turn = 1
        if 0 < num_known < len(least):
            for end in range(num_known, max(0, num_known - NEAR), -1):
                before = cells[0, end - 1]
                if self._turns[before] and self._seconds[before] == cells[1, end - 1] & _SECOND_BITS:
                    turn = min(self._turns.item(before) + 1, MAX_TURN)
                    pause = now - self._times.item(before)
                    self._turns[before] = 0
                    cells, counts, least = cells[:, end:], counts[:, end:], least[end:]
                    break
        self.returns.count(turn, pause if turn > 1 else 0)
        last = cells[0, -1]
        self._turns[last], self._seconds[last], self._times[last] = turn, cells[1, -1] & _SECOND_BITS, now
        # The maximum, not what is written last: two blocks of one lookup may share a counter.
        np.maximum.at(self._counts, (self._rows, cells), counts + ((counts == least) & (counts < MOST)))
        self._num_counted += len(least)
        if self._num_counted >= self.num_until_halved:
            self._num_counted = 0
            self._counts >>= 1
            self._turns[self._counts[0] == 0] = 0
            self.returns.fade()
        return turn

    def times(self, node: RadixNode) -> tuple[int, int]:
        """The count of the path to ``node``, and the position in its edge from which on counts are not higher."""
        start, end = node.start, node.end - node.end % BLOCK
        if end == 0:
            return 0, start
        if end > len(self.weights):
            self.weights = weights_of(2 * end)
        before = self._sum(node, min(start, end))
        if end <= start:  # no block ends in this edge
            return int(self._least(np.array([before], np.uint64))[0]), start
        first = -start % BLOCK or BLOCK
        products = node.tokens[: end - start].astype(np.uint64) * self.weights[start:end]
        sums = np.cumsum(np.add.reduceat(products, np.arange(first - BLOCK, end - start, BLOCK).clip(0)))
        times = self._least(sums + np.uint64(before))
        num_above = int((times <= times[-1]).argmax())  # blocks whose prefix has a higher count
        return int(times[-1]), start + (first + BLOCK * (num_above - 1) if num_above else 0)

    def _sum(self, node: RadixNode, end: int) -> int:
        """The hash sum of the first ``end`` tokens of the path to ``node``, which selects their counters."""
        at, total = node, _first_sum(node.namespace)
        while at.parent is not None:
            start = at.start
            if start < end:
                n = min(at.end, end) - start
                total += int(np.dot(at.tokens[:n].astype(np.uint64), self.weights[start : start + n]))
            at = at.parent
        return total & _ALL_BITS

    def _least(self, sums: np.ndarray) -> np.ndarray:
        return self._counts[self._rows, self._cells(sums)].min(axis=0)

    def _cells(self, sums: np.ndarray) -> np.ndarray:
        """The counter of each sum in each row, [rows, n]."""
        sums = sums ^ (sums >> np.uint64(31))
        return (sums * self._mix) >> self._shift


@lru_cache(maxsize=1024)
def _first_sum(namespace: Namespace) -> int:
    """The hash sum before the first token: one that is equal in every process, which ``hash`` of a text is not."""
    return int.from_bytes(root_name(namespace)[:8], "little")


def weights_of(n: int) -> np.ndarray:
    """The first weights are equal for every n, so counters stay valid when the array grows."""
    return np.random.default_rng(0).integers(0, 1 << 63, n, np.uint64) * np.uint64(2) + np.uint64(1)
