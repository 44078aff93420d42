"""Masks of context-free states: each lexeme is walked over the trie once, then combined as the parser allows.

A token may hold several lexemes. Which tokens a lexeme allows by itself, and the trie nodes at which it may end, does
not depend on the parser: the trie is walked once per lexeme, for all grammars of the machine. The same holds for a
second lexeme that begins at those nodes, and so on. For each state, the parser then says which lexemes may follow each
other, and the masks of those are combined.

A mask depends on the Earley sets that were read to find the lexemes that follow. They are at most some number of steps
away from the sets that the state stands for, so states that agree up to that depth share the mask.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numba as nb
import numpy as np

from ..native_code import native, native_part
from . import walk
from .machine import Machine
from .parser_sets import Lexer, Sets
from .recent import Recent
from .trie_walker import TrieWalker

MANY_NOTED = 64  # with so many nodes, counting the tokens once costs less than looking at each subtree


class Ends(NamedTuple):
    """Where lexemes may end within tokens: ``nodes[starts[b]:starts[b + 1]]`` are the next nodes of byte b.

    Only nodes that lead to tokens outside ``covered`` are kept; bit b of ``firsts`` says whether byte b has any.
    """

    number: int
    firsts: int
    covered: np.ndarray
    starts: np.ndarray
    nodes: np.ndarray


class Reach(NamedTuple):
    """The tokens that a lexeme allows from some nodes on, as a mask or a list, and where it may end within a token."""

    row: np.ndarray | None
    tokens: np.ndarray | None
    ends: Ends | None


class Plan(NamedTuple):
    """As ``Reach``, for all lexemes of a lexer together; ``further`` are (lexeme, where it may end within a token)."""

    row: np.ndarray | None
    tokens: np.ndarray | None
    further: tuple[tuple[int, Ends], ...]


class Beginning(NamedTuple):
    """The state before a lexeme, or before what is left of one; bit b of ``firsts`` says whether byte b may come."""

    state: int
    firsts: int


FEW_TOKENS = 512  # up to this many are kept as a list, more as a mask


class LazyMasks:
    """The masks of one machine's lazy states."""

    def __init__(self, machine: Machine, walker: TrieWalker, capacity: int) -> None:
        self.machine = machine
        self.walker = walker
        trie = machine.vocabulary.trie
        self._known: Recent[tuple[object, int, frozenset], np.ndarray] = Recent(capacity)
        self._depths: dict[tuple[object, frozenset], tuple[int, ...]] = {}
        self._reaches: dict[tuple[int, int], Reach] = {}  # by the number of the nodes, and the state at them
        self._plans: dict[tuple[Lexer, int], Plan] = {}
        nothing = np.zeros(machine.vocabulary.num_words, np.uint32)
        self._begin = Ends(0, -1, nothing, np.zeros(257, np.int32), np.zeros(0, np.int32))  # the whole trie
        self._num_ends = 1
        self.num_bytes = 0  # held for lexemes; freed with the machine only
        self._beginnings: dict[int, Beginning] = {}
        self._marks = np.zeros(trie.num_nodes, np.int32)
        self._mark = 0

    def of(self, sets: Sets, threads: tuple[tuple[int, Lexer], ...]) -> np.ndarray:
        """The mask, read-only and without the end token, of lexemes under way: (set where they began, lexer)."""
        rough = (sets, frozenset((sets.shape(number, 0), lexer) for number, lexer in threads))
        depths = self._depths.get(rough, ())
        for depth in depths:
            found = self._known.get((sets, depth, frozenset((sets.shape(n, depth), lexer) for n, lexer in threads)))
            if found is not None:
                return found
        row, looked_up = self._compute(threads, sets)
        depth = _depth_of(looked_up, [number for number, _ in threads], sets)
        if depth not in depths:
            self._depths[rough] = (*depths, depth)
        self._known.put((sets, depth, frozenset((sets.shape(n, depth), lexer) for n, lexer in threads)), row)
        return row

    def prepare(self, lexemes: Iterable[int], between: Iterable[int]) -> None:
        """Walk ``lexemes`` ahead of time: from their first byte, from their second, and after each of ``between``."""
        ex = self.machine.expressions
        lexemes = tuple(lexemes)
        for lexeme in between:
            self._plan(((lexeme, lexeme),), self._begin)
        after = [self._reach(self._begin, self._beginning(e).state).ends for e in between]
        for lexeme in lexemes:
            seconds = {ex.alive(ex.derive(lexeme, b)) for b, _ in ex.classes(lexeme)} - {0}
            for rest in (lexeme, *sorted(seconds)):
                self._plan(((rest, rest),), self._begin)
            for ends in after:
                if ends is not None:
                    self._plan(((lexeme, lexeme),), ends)

    def _compute(self, threads: tuple[tuple[int, Lexer], ...], sets: Sets) -> tuple[np.ndarray, set[int]]:
        row = np.zeros(self.machine.vocabulary.num_words, np.uint32)
        few: list[np.ndarray] = []
        looked_up: set[int] = set()
        plans = self._plans
        todo = [(number, lexer, self._begin) for number, lexer in threads]
        seen: set[tuple[int, int]] = set()
        for number, lexer, begin in todo:
            plan = plans.get((lexer, begin.number))
            if plan is None:
                plan = plans[lexer, begin.number] = self._plan(lexer, begin)
            if plan.row is not None:
                row |= plan.row
            if plan.tokens is not None:
                few.append(plan.tokens)
            for lexeme, ends in plan.further:
                after = sets.after(number, lexeme)
                key = (after, ends.number)
                if key not in seen:
                    seen.add(key)
                    looked_up |= sets.looked_up(after)
                    todo.append((after, sets.lexer(after), ends))
        if few:
            walk.allow_tokens(row, np.concatenate(few))
        row.flags.writeable = False
        return row, looked_up

    def _plan(self, lexer: Lexer, begin: Ends) -> Plan:
        row = None
        tokens: list[np.ndarray] = []
        further: list[tuple[int, Ends]] = []
        for lexeme, rest in lexer:
            beginning = self._beginning(rest)
            if not beginning.firsts & begin.firsts:
                continue
            reach = self._reach(begin, beginning.state)
            if reach.row is not None:
                row = reach.row if row is None else row | reach.row
            if reach.tokens is not None:
                tokens.append(reach.tokens)
            if reach.ends is not None:
                further.append((lexeme, reach.ends))
        return Plan(row, np.concatenate(tokens) if tokens else None, tuple(further))

    def _reach(self, begin: Ends, state: int) -> Reach:
        """What a lexeme allows from the nodes of ``begin`` on: what its stand-ins do, where a pair agrees."""
        found = self._reaches.get((begin.number, state))
        if found is None:
            stand_ins = self.machine.stand_ins.get(state)
            for lower, upper, _ in stand_ins() if stand_ins is not None else ():
                above = self._reach(begin, upper)
                if _is_same(self._reach(begin, lower), above):
                    found = above
                    break
            found = self._reaches[begin.number, state] = found or self._walk(begin, state)
        return found

    def _walk(self, begin: Ends, state: int) -> Reach:
        """Walk the automaton of a lexeme from the nodes of ``begin`` on."""
        row = np.zeros(self.machine.vocabulary.num_words, np.uint32)
        if begin.number == 0:
            noted = self.walker.ends_from(row, state)
        else:
            noted = self.walker.ends_below(row, state, begin.starts, begin.nodes)
        self._mark += 1
        trie = self.machine.vocabulary.trie
        tokens, covered, starts, nodes, firsts = reached(
            trie.node_byte, trie.node_end, trie.first_token, trie.token_order, noted, row,
            begin.covered, self._marks, self._mark, FEW_TOKENS,
        )  # fmt: skip
        ends = None
        if len(nodes):
            ends = Ends(self._num_ends, int.from_bytes(firsts.tobytes(), "little"), covered, starts, nodes)
            self._num_ends += 1
            self.num_bytes += nodes.nbytes + starts.nbytes + covered.nbytes
        if not len(tokens):
            return Reach(None, None, ends)
        if tokens[0] < 0:
            self.num_bytes += row.nbytes
            return Reach(row, None, ends)
        self.num_bytes += tokens.nbytes
        return Reach(None, tokens, ends)

    def _beginning(self, rest: int) -> Beginning:
        found = self._beginnings.get(rest)
        if found is None:
            machine = self.machine
            state = machine.text(rest)
            twin = machine.twins.get(state)
            state = twin() if twin is not None else state
            firsts = np.packbits(machine.row(state) > 0, bitorder="little")
            found = self._beginnings[rest] = Beginning(state, int.from_bytes(firsts.tobytes(), "little"))
        return found


def _is_same(one: Reach, other: Reach) -> bool:
    """Whether two lexemes allow the same tokens, and end at the same nodes."""
    if (one.ends is None) != (other.ends is None):
        return False
    pairs = [(one.row, other.row), (one.tokens, other.tokens)]
    if one.ends is not None and other.ends is not None:
        pairs += [(one.ends.starts, other.ends.starts), (one.ends.nodes, other.ends.nodes)]
    return all(a is b or (a is not None and b is not None and np.array_equal(a, b)) for a, b in pairs)


def _depth_of(looked_up: set[int], numbers: Iterable[int], sets: Sets) -> int:
    """The largest number of ``came_from`` steps, on any way, from ``numbers`` to a set of ``looked_up``."""
    lowest = min(looked_up, default=1 << 60)
    found = depth = 0
    level = {number for number in numbers if number >= lowest}
    while level:
        if not looked_up.isdisjoint(level):
            found = depth
        level = {o for number in level for o in sets.came_from(number) if o >= lowest}
        depth += 1
    return found


@nb.njit(inline="always")
def _lacks(covered, order, first, end):
    """Whether a token of ``order[first:end]`` is not in the mask ``covered``."""
    for i in range(first, end):
        token = order[i]
        if covered[token >> 5] >> np.uint32(token & 31) & 1 == 0:
            return True
    return False


@native
def reached(node_byte, ends, first, order, noted, row, covered_before, marks, mark, limit):
    """The tokens of ``row``, and the children of the noted nodes that lead to tokens which no mask has yet.

    Returns the tokens (``[-1]`` if they are more than ``limit``), ``row | covered_before``, and the children in order
    of their bytes: where each byte's children begin [257], the children, one bit per byte that has any [32]. A node
    may be noted twice; ``marks[node] = mark`` says that it has been looked at.
    """
    num_nodes = len(node_byte)
    covered = row | covered_before
    # the tokens of the subtree [n, end) are order[first[n]:first[end]]
    num_order = len(order)
    lacking = np.zeros(num_order + 1 if len(noted) > MANY_NOTED else 0, np.int32)
    for i in range(len(lacking) - 1):
        token = order[i]
        lacking[i + 1] = lacking[i] + (covered[token >> 5] >> np.uint32(token & 31) & 1 == 0)
    starts = np.zeros(257, np.int32)
    found = np.zeros(256, np.int32)
    count = 0
    for n in noted:
        if marks[n] == mark:
            continue
        marks[n] = mark
        end = ends[n]
        if len(lacking) > 0 and lacking[first[end] if end < num_nodes else num_order] == lacking[first[n]]:
            continue
        at = n + 1
        while at < ends[n]:
            end = ends[at]
            last = first[end] if end < num_nodes else num_order
            if len(lacking) > 0:
                goes_on = lacking[last] > lacking[first[at]]
            else:
                goes_on = _lacks(covered, order, first[at], last)
            if goes_on:
                if count == len(found):
                    more = np.zeros(4 * count, np.int32)
                    for i in range(count):
                        more[i] = found[i]
                    found = more
                found[count] = at
                count += 1
                starts[node_byte[at] + 1] += 1
            at = np.int64(end)
    firsts = np.zeros(32, np.uint8)
    for b in range(256):
        if starts[b + 1] > 0:
            firsts[b >> 3] |= np.uint8(1 << (b & 7))
        starts[b + 1] += starts[b]
    room = starts[:256].copy()
    children = np.zeros(count, np.int32)
    for i in range(count):
        byte = node_byte[found[i]]
        children[room[byte]] = found[i]
        room[byte] += 1
    return _tokens_of(row, limit), covered, starts, children, firsts


@native_part
def _tokens_of(mask, limit):
    """The tokens of a mask; ``[-1]`` if they are more than ``limit``."""
    out = np.zeros(limit, np.int32)
    count = 0
    for word in range(len(mask)):
        bits = mask[word]
        if bits == 0:
            continue
        for i in range(32):
            if bits >> np.uint32(i) & 1:
                if count == limit:
                    out[0] = -1
                    return out[:1].copy()
                out[count] = 32 * word + i
                count += 1
    return out[:count].copy()
