"""Masks of context-free states: what lexemes allow, put together as a parser allows. Never walks a trie per state.

Which tokens a lexeme allows by itself, and at which of the trie's nodes it may end, does not depend on the parser: it
is walked once and shared by all grammars. So is what a second lexeme allows from those nodes on, and so forth. What is
left for each state is to ask the parser which lexemes may follow each other, as long as some token goes on.

The answer depends on the sets that were looked up, and these lie only so far up among those that the state came from:
states alike down to that depth share a mask.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from ..recent import Recent
from . import walk
from .reach import reached

if TYPE_CHECKING:
    from .machine import Machine
    from .masks import Masks

Lexer = tuple[tuple[int, int], ...]  # (lexeme, what of it is left)


class Sets(Protocol):
    """A parser's sets, as numbers."""

    def after(self, number: int, lexeme: int) -> int:
        """The set that a lexeme leads to."""
        ...

    def lexer(self, number: int) -> Lexer:
        """The lexemes that may follow."""
        ...

    def came_from(self, number: int) -> Iterable[int]:
        """The sets that its unfinished rules were begun in, all of lower numbers."""
        ...

    def looked_up(self, number: int) -> frozenset[int]:
        """The sets that were asked what waits in them when this one was made."""
        ...

    def shape(self, number: int, depth: int) -> int:
        """Equal for sets that differ only in what lies more than ``depth`` sets up."""
        ...


class Ends(NamedTuple):
    """Nodes after which tokens go on: ``nodes[starts[b]:starts[b + 1]]`` are their children by byte b.

    Only children that lead to tokens outside ``covered`` are kept; ``firsts`` has a bit for each byte there is.
    """

    number: int
    firsts: int
    covered: np.ndarray
    starts: np.ndarray
    nodes: np.ndarray


class Reach(NamedTuple):
    """What a lexeme allows from some nodes on, as a mask or as some tokens, and where it may end with more to come."""

    row: np.ndarray | None
    tokens: np.ndarray | None
    ends: Ends | None


class Plan(NamedTuple):
    """What all lexemes that may follow allow from some nodes on, and which of them may end with more to come."""

    row: np.ndarray | None
    tokens: np.ndarray | None
    further: tuple[tuple[int, Ends], ...]


class Beginning(NamedTuple):
    """Where a lexeme, or what is left of one, begins: the state, and a bit for each byte that may come first."""

    state: int
    firsts: int


FEW_TOKENS = 512  # more are kept as a mask


class LazyMasks:
    """The masks of one machine's lazy states."""

    def __init__(self, machine: "Machine", masks: "Masks", capacity: int) -> None:
        self.machine = machine
        self.masks = masks
        trie = machine.vocabulary.trie
        self._known: Recent[tuple[object, int, frozenset], np.ndarray] = Recent(capacity)
        self._depths: dict[tuple[object, frozenset], tuple[int, ...]] = {}
        self._reaches: dict[tuple[int, int], Reach] = {}
        self._plans: dict[tuple[Lexer, int], Plan] = {}
        nothing = np.zeros(machine.vocabulary.num_words, np.uint32)
        self._begin = Ends(0, -1, nothing, np.zeros(257, np.int32), np.zeros(0, np.int32))  # the whole trie
        self._num_ends = 1
        self.num_bytes = 0  # of what lexemes allow; it is never forgotten, the machine is
        self._beginnings: dict[int, Beginning] = {}
        self._marks = np.zeros(trie.num_nodes, np.int32)
        self._mark = 0

    def of(self, threads: Iterable[tuple[int, Lexer]], sets: Sets) -> np.ndarray:
        """The mask, read-only and without the end token, of lexemes under way since some sets."""
        threads = tuple(threads)
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
        """Walk some lexemes from their beginning, from their second byte, and after what may stand ``between`` any."""
        ex = self.machine.expressions
        lexemes = tuple(lexemes)
        for lexeme in between:
            self._plan(((lexeme, lexeme),), self._begin)
        after = [found.ends for e in between if (found := self._reaches.get((0, e))) is not None]
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
        reaches, beginnings = self._reaches, self._beginnings
        row = None
        tokens: list[np.ndarray] = []
        further: list[tuple[int, Ends]] = []
        for lexeme, rest in lexer:
            beginning = beginnings.get(rest)
            if beginning is None:
                beginning = beginnings[rest] = self._beginning(rest)
            if not beginning.firsts & begin.firsts:
                continue
            reach = reaches.get((begin.number, rest))
            if reach is None:
                reach = reaches[begin.number, rest] = self._reach(begin, beginning.state)
            if reach.row is not None:
                row = reach.row if row is None else row | reach.row
            if reach.tokens is not None:
                tokens.append(reach.tokens)
            if reach.ends is not None:
                further.append((lexeme, reach.ends))
        return Plan(row, np.concatenate(tokens) if tokens else None, tuple(further))

    def _reach(self, begin: Ends, state: int) -> Reach:
        """Walk a lexeme's own automaton from some nodes on."""
        row = np.zeros(self.machine.vocabulary.num_words, np.uint32)
        if begin.number == 0:
            num_noted = self.masks.walk_from(row, state)
        else:
            num_noted = self.masks.walk_below(row, state, begin.starts, begin.nodes)
        self._mark += 1
        trie = self.machine.vocabulary.trie
        tokens, covered, starts, nodes, firsts = reached(
            trie.node_byte, trie.node_end, trie.first_token, trie.token_order, self.masks.noted(num_noted), row,
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
        machine = self.machine
        state = machine.text(rest)
        twin = machine.twins.get(state)
        state = twin() if twin is not None else state
        firsts = np.packbits(machine.row(state) > 0, bitorder="little")
        return Beginning(state, int.from_bytes(firsts.tobytes(), "little"))


def _depth_of(looked_up: set[int], numbers: Iterable[int], sets: Sets) -> int:
    """How far up the furthest of the sets that were looked up is, on any way there."""
    lowest = min(looked_up, default=1 << 60)
    found = depth = 0
    level = {number for number in numbers if number >= lowest}
    while level:
        if not looked_up.isdisjoint(level):
            found = depth
        level = {o for number in level for o in sets.came_from(number) if o >= lowest}
        depth += 1
    return found
