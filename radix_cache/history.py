"""How often each prefix was asked for lately, also while it was not cached. Never holds tokens, and forgets slowly.

A prefix that was evicted and comes again is known from before, as a tree alone could not know it. A count-min sketch
with conservative update, halved after every so many counts, as TinyLFU has it (Einziger et al., 2017):

    tokens |--BLOCK--|--BLOCK--|--BLOCK--|..      each whole block's prefix is counted; a prefix has the count of its
                                                  last whole block, and below one block none
"""

import numpy as np

from .node import Namespace, RadixNode

BLOCK = 16
PER_BLOCK = 32  # counters of a row for each block that the cache has slots for; half as many counts halve them all
NUM_ROWS = 4
NEAR = 3  # blocks that may seem known by chance beyond an end
MOST = 255
_ALL_BITS = 0xFFFFFFFFFFFFFFFF


class History:
    """About ten bytes a slot. Where hashes collide a prefix seems asked for more often than it was."""

    def __init__(self, num_slots: int) -> None:
        bits = max(10, (PER_BLOCK * num_slots // BLOCK).bit_length())
        self.num_until_halved = (1 << bits) // 2
        self._shift = np.uint64(64 - bits)
        self._counts = np.zeros((NUM_ROWS, 1 << bits), np.uint8)
        self._mix = _weights(NUM_ROWS)[:, None]
        self._is_end = np.zeros(1 << bits, np.bool_)  # of the first row's counters, those where somebody's tokens ended
        self._rows = np.arange(NUM_ROWS)[:, None]
        self._num_counted = 0
        self._weights = _weights(4096)  # of the token at each position

    def count(self, namespace: Namespace, tokens: np.ndarray) -> None:
        """All prefixes of ``tokens`` were asked for.

        Where they go on from the end of what was asked for before, as a chat's next turn does, only what is new counts:
        the one who asked before is the one who asks now, and will not ask for both again.
        """
        n = len(tokens) // BLOCK * BLOCK
        if n == 0:
            return
        if n > len(self._weights):
            self._weights = _weights(2 * n)
        products = tokens[:n].astype(np.uint64) * self._weights[:n]
        sums = np.cumsum(np.add.reduceat(products, np.arange(0, n, BLOCK)))
        cells = self._cells(sums + np.uint64(hash(namespace) & _ALL_BITS))
        counts = self._counts[self._rows, cells]
        least = counts.min(axis=0)
        num_known = len(least) if least.all() else int((least == 0).argmax())
        if 0 < num_known < len(least):
            for end in range(num_known, max(0, num_known - NEAR), -1):
                if self._is_end[cells[0, end - 1]]:
                    self._is_end[cells[0, end - 1]] = False
                    cells, counts, least = cells[:, end:], counts[:, end:], least[end:]
                    break
        self._is_end[cells[0, -1]] = True
        self._counts[self._rows, cells] = counts + ((counts == least) & (counts < MOST))
        self._num_counted += len(least)
        if self._num_counted >= self.num_until_halved:
            self._num_counted = 0
            self._counts >>= 1
            self._is_end &= self._counts[0] > 0

    def times(self, node: RadixNode) -> tuple[int, int]:
        """How often the path to ``node`` was asked for, and from which position of its edge on no more often."""
        start, end = node.start, node.end - node.end % BLOCK
        if end == 0:
            return 0, start
        if end > len(self._weights):
            self._weights = _weights(2 * end)
        before = self._sum(node, min(start, end))
        if end <= start:  # no block ends in this edge
            return int(self._least(np.array([before], np.uint64))[0]), start
        first = -start % BLOCK or BLOCK
        products = node.tokens[: end - start].astype(np.uint64) * self._weights[start:end]
        sums = np.cumsum(np.add.reduceat(products, np.arange(first - BLOCK, end - start, BLOCK).clip(0)))
        times = self._least(sums + np.uint64(before))
        num_above = int((times <= times[-1]).argmax())  # blocks whose prefix was asked for more often
        return int(times[-1]), start + (first + BLOCK * (num_above - 1) if num_above else 0)

    def _sum(self, node: RadixNode, end: int) -> int:
        """What the first ``end`` tokens of the path to ``node`` sum up to, from which their counters are found."""
        at, total = node, hash(node.namespace)
        while at.parent is not None:
            start = at.start
            if start < end:
                n = min(at.end, end) - start
                total += int(np.dot(at.tokens[:n].astype(np.uint64), self._weights[start : start + n]))
            at = at.parent
        return total & _ALL_BITS

    def _least(self, sums: np.ndarray) -> np.ndarray:
        return self._counts[self._rows, self._cells(sums)].min(axis=0)

    def _cells(self, sums: np.ndarray) -> np.ndarray:
        """The counter of each sum in each row, [rows, n]."""
        sums = sums ^ (sums >> np.uint64(31))
        return (sums * self._mix) >> self._shift


def _weights(n: int) -> np.ndarray:
    """The same beginning for every n: what was counted before it grew is found again."""
    return np.random.default_rng(0).integers(0, 1 << 63, n, np.uint64) * np.uint64(2) + np.uint64(1)
