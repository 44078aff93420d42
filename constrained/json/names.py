"""The states inside a property name: each stands for a node of the trie of the listed names.

From any of them the name may also leave the trie and become another name.
"""

from json.encoder import encode_basestring

import numpy as np

from ..machine import Machine
from ..native_code import native

QUOTE = 0x22
BYTE, PARENT, FIRST, LAST, CLASS = range(5)  # the columns of ``name_nodes``


class NameTrie:
    """The trie of ``names``, whose classes are 1, 2, ...; ``other`` is the state inside any other name, 0 for none."""

    def __init__(self, machine: Machine, other: int, names: tuple[str, ...]) -> None:
        self.machine = machine
        self._other = other
        whole = "".join(names)
        is_plain = whole.isascii() and whole.isprintable() and '"' not in whole and "\\" not in whole
        words = [name.encode() if is_plain else spelled(name) for name in names]
        order = sorted(range(len(names)), key=words.__getitem__)
        self._sorted = np.array(order, np.int32)
        self._nodes = name_nodes(
            b"".join([words[i] for i in order]), np.array([len(words[i]) for i in order], np.int64), self._sorted
        )
        self.num_nodes = len(self._nodes)
        self._ends = machine.end_states(len(names))
        self._edges: dict[int, list[tuple[int, int]]] = {}  # (byte, child) of each node, for rows made one by one
        self._beside: list[int] = []  # the state inside the other names at each node, for these rows
        if is_plain or not other:
            self.start = machine.add_sparse_states(
                self.num_nodes,
                lambda first: trie_moves(self._nodes, first, self._ends),
                other,
                inside_string=other,
            )
        else:
            self._beside = [other]
            for child, (byte, parent) in enumerate(self._nodes[1:, :FIRST].tolist(), 1):
                beside = self._beside[parent]
                self._beside.append(max(int(machine.row(beside)[byte]), 0) if beside else 0)
                self._edges.setdefault(parent, []).append((byte, child))
            self.start = machine.add_states(self.num_nodes, self._fill)
            for n, beside in enumerate(self._beside):
                if beside == other:
                    machine.inside_string[self.start + n] = other
        self._filters: dict[int, int] = {}

    def _fill(self, row: np.ndarray, state: int) -> None:
        n = state - self.start
        beside = self._beside[n]
        if beside:
            np.maximum(self.machine.row(beside), 0, out=row)
        for byte, child in self._edges.get(n, ()):
            row[byte] = self.start + child
        if self._nodes[n, CLASS]:
            row[QUOTE] = self._ends[self._nodes[n, CLASS] - 1]

    def filter(self, names: int, others: bool) -> int:
        """The frame filter that allows the names whose bits are set; 0, which allows all, if ``others`` may come."""
        if others:
            return 0
        found = self._filters.get(names)
        if found is None:
            found = self._filters[names] = self.machine.add_filter(self.allowed(names))
        return found

    def allowed(self, names: int) -> np.ndarray:
        """uint8 [num_nodes + 1]: whether states of each local number may be entered; see ``filter``."""
        allowed = np.empty(self.num_nodes + 1, np.uint8)
        allowed[0] = not self._other  # a list's frame waits below the states of its literals too
        bits = np.frombuffer(names.to_bytes(len(self._sorted) // 8 + 1, "little"), np.uint8)
        allowed_nodes(bits, self._sorted, self._nodes, allowed[1:])
        return allowed


def spelled(name: str) -> bytes:
    """The bytes of a name between its quotes."""
    return encode_basestring(name)[1:-1].encode()


@native
def name_nodes(data, lengths, order):
    """int32 [N, 5], the nodes of a trie in depth-first order, the root first: the byte that leads to the node, its
    parent, the sorted positions [first, last) of the names under it, and the class of the name that ends there, 0 for
    none.

    ``data``: the words of ``lengths``, sorted, one after another; ``order``: the class of each, less 1.
    """
    nodes = np.zeros((1 + len(data), 5), np.int32)
    longest = 0
    for length in lengths:
        longest = max(longest, length)
    path = np.zeros(1 + longest, np.int32)  # the nodes of the last word
    num_nodes = 1
    begin = before = 0  # of this word, of the last one
    depth = 0
    for at in range(len(order)):
        length = lengths[at]
        common = 0
        while common < min(length, depth) and data[begin + common] == data[before + common]:
            common += 1
        while depth > common:
            nodes[path[depth], LAST] = at
            depth -= 1
        while depth < length:
            nodes[num_nodes, BYTE] = data[begin + depth]
            nodes[num_nodes, PARENT] = path[depth]
            nodes[num_nodes, FIRST] = at
            depth += 1
            path[depth] = num_nodes
            num_nodes += 1
        nodes[path[depth], CLASS] = order[at] + 1
        before = begin
        begin += length
    for d in range(depth + 1):
        nodes[path[d], LAST] = len(order)
    return nodes[:num_nodes]


@native
def trie_moves(nodes, start, ends):
    """What ``Machine.add_sparse_states`` takes of the nodes, whose states are ``start`` and on: a node's moves lead to
    its children, and with the quote of a name that ends there to ``ends[cls - 1]``."""
    begins = np.zeros(len(nodes) + 1, np.int32)
    for n in range(len(nodes)):
        begins[n + 1] += nodes[n, CLASS] > 0
        if n > 0:
            begins[nodes[n, PARENT] + 1] += 1
    for n in range(len(nodes)):
        begins[n + 1] += begins[n]
    free = begins.copy()
    moves = np.zeros((begins[len(nodes)], 3), np.int32)
    for n in range(len(nodes)):
        if nodes[n, CLASS] > 0:
            at = free[n]
            moves[at, 0], moves[at, 1], moves[at, 2] = QUOTE, QUOTE + 1, ends[nodes[n, CLASS] - 1]
            free[n] += 1
        if n > 0:
            at = free[nodes[n, PARENT]]
            moves[at, 0], moves[at, 1], moves[at, 2] = nodes[n, BYTE], nodes[n, BYTE] + 1, start + n
            free[nodes[n, PARENT]] += 1
    return begins, moves


@native
def allowed_nodes(bits, order, nodes, allowed):
    """Set ``allowed[n]`` where a name whose bit is set is under node n."""
    sums = np.zeros(len(order) + 1, np.int32)  # of the set bits at sorted positions
    for i in range(len(order)):
        sums[i + 1] = sums[i] + (bits[order[i] >> 3] >> (order[i] & 7) & 1)
    for n in range(len(nodes)):
        allowed[n] = sums[nodes[n, LAST]] > sums[nodes[n, FIRST]]
