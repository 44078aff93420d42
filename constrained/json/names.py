"""The states inside a property name: each stands for a node of the trie of the listed names.

From any of them the name may also leave the trie and become another name.
"""

import json

import numpy as np

from ..machine import Machine
from ..vocabulary import flat_trie

QUOTE = 0x22
EAGER_NODES = 4096  # the rows of a bigger trie are made one by one, when first met


class NameTrie:
    """The trie of ``names``, whose classes are 1, 2, ...; ``other`` is the state inside any other name, 0 for none."""

    def __init__(self, machine: Machine, other: int, names: tuple[str, ...]) -> None:
        self.machine = machine
        self._has_others = other > 0
        words = [spelled(name) for name in names]
        self._sorted = np.array(sorted(range(len(names)), key=words.__getitem__), np.int32)
        data = np.frombuffer(b"".join(words) + b"\0", np.uint8)
        offsets = np.concatenate([[0], np.cumsum([len(word) for word in words])]).astype(np.int64)
        num_empty = sum(not word for word in words)  # the empty name ends at the root
        node_byte, depth, end, first, count, _, _ = flat_trie(data, offsets, self._sorted[num_empty:])
        # Node 0 is the root. The names under node n are those of sorted positions [_first[n], _last[n]).
        self.num_nodes = len(node_byte) + 1
        before = np.concatenate([[0], np.cumsum(count)]) + num_empty
        self._first = np.concatenate([[0], before[:-1]])
        self._last = np.concatenate([[len(names)], before[end]])
        self._ends = np.full(self.num_nodes, -1, np.int64)  # class of the name that ends at the node, -1 for none
        ending = np.flatnonzero(count)
        self._ends[ending + 1] = self._sorted[num_empty + first[ending]] + 1
        if num_empty:
            self._ends[0] = self._sorted[0] + 1
        self._bytes = node_byte
        self._parents = _parents(depth)
        self._edges: dict[int, list[tuple[int, int]]] | None = (
            None  # (byte, child) of each node, for rows made one by one
        )
        is_plain = (data[:-1] >= 0x20) & (data[:-1] < 0x7F) & (data[:-1] != 0x5C) & (data[:-1] != QUOTE)
        self.start = machine.num_states
        if is_plain.all() and self.num_nodes <= EAGER_NODES:
            self._beside = np.full(self.num_nodes, other, np.int64)
            machine.add_states(self.num_nodes, self._fill, inside_string=other or -1)
            self._fill_all(other)
        else:
            self._beside = np.zeros(self.num_nodes, np.int64)
            self._beside[0] = other
            for n, (parent, byte) in enumerate(zip(self._parents.tolist(), node_byte.tolist(), strict=True), 1):
                beside = int(self._beside[parent])
                self._beside[n] = max(int(machine.row(beside)[byte]), 0) if beside else 0
            self.start = machine.num_states
            machine.add_states(self.num_nodes, self._fill)
            for n in np.flatnonzero(self._beside == other).tolist() if other else ():
                machine.inside_string[self.start + n] = other
        self._filters: dict[tuple[int, bool], int] = {}

    def _fill_all(self, other: int) -> None:
        machine = self.machine
        rows = machine.rows_like(machine.row(other), self.start, self.num_nodes)
        rows[self._parents, self._bytes] = self.start + 1 + np.arange(self.num_nodes - 1)
        for n in np.flatnonzero(self._ends >= 0).tolist():
            rows[n, QUOTE] = machine.end_state(int(self._ends[n]))
        machine.refuse_missing(rows)

    def _fill(self, row: np.ndarray, state: int) -> None:
        n = state - self.start
        if self._edges is None:
            self._edges = {}
            for child, (parent, byte) in enumerate(zip(self._parents.tolist(), self._bytes.tolist(), strict=True), 1):
                self._edges.setdefault(parent, []).append((byte, child))
        beside = int(self._beside[n])
        if beside:
            np.maximum(self.machine.row(beside), 0, out=row)
        for byte, child in self._edges.get(n, ()):
            row[byte] = self.start + child
        if self._ends[n] >= 0:
            row[QUOTE] = self.machine.end_state(int(self._ends[n]))

    def filter(self, names: int, others: bool) -> int:
        """The frame filter that allows the names whose bits are set, and other names if ``others``."""
        key = (names, others)
        found = self._filters.get(key)
        if found is None:
            found = self._filters[key] = self.machine.add_filter(self.allowed(names, others))
        return found

    def allowed(self, names: int, others: bool) -> np.ndarray:
        """uint8 [num_nodes + 1]: whether states of each local number may be entered; see ``filter``."""
        allowed = np.ones(self.num_nodes + 1, np.uint8)
        if not others:
            count = len(self._sorted)
            data = np.frombuffer(names.to_bytes(count // 8 + 1, "little"), np.uint8)
            chosen = np.unpackbits(data, bitorder="little")[:count]
            sums = np.concatenate([[0], np.cumsum(chosen[self._sorted])])
            allowed[0] = not self._has_others  # a list's frame waits below the states of its literals too
            allowed[1:] = sums[self._last] > sums[self._first]
        return allowed


def spelled(name: str) -> bytes:
    """The bytes of a name between its quotes."""
    return json.dumps(name, ensure_ascii=False)[1:-1].encode()


def _parents(depth: np.ndarray) -> np.ndarray:
    """The parent of each node, given the nodes' depths in depth-first order; nodes count from 1, the root is 0."""
    path = [0] * (int(depth.max(initial=0)) + 1)
    out = np.zeros(len(depth), np.int64)
    for n, d in enumerate(depth.tolist(), 1):
        out[n - 1] = path[d - 1]
        path[d] = n
    return out
