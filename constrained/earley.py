"""Context-free grammars over lexemes: Earley sets (Earley 1970), each stored once; the lexer keeps all readings.

A lexeme is a regular language of bytes. At every byte the parser follows all lexemes that may be under way; where one
may end, those that may come after it begin as well. A configuration

    (the set at this byte, the lexemes under way from earlier sets)

is one state of the machine, made when first met.
"""

import heapq
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from itertools import pairwise

from .expressions import EMPTY, NOTHING
from .machine import Lexer, Masks
from .productions import ContextFreeGrammar, Symbol, bounds_of_rules, reduced
from .rests import Bounds, Needs
from .spec import GrammarTooComplex

Item = tuple[int, int, int]  # production, dot, origin set; OWN for the set itself
# The lexemes that ended at a byte, as (set where they began, lexemes), and those that go on, as (set, lexer).
Pending = tuple[tuple[tuple[int, tuple[int, ...]], ...], tuple[tuple[int, Lexer], ...]]
LexerRow = tuple[list[int], list[tuple[Lexer, tuple[int, ...]] | None]]
OWN = -1
MAX_SETS = 200_000


@dataclass(frozen=True, slots=True, eq=False)
class Predicted:
    """The items that begin in a set; shared by all sets that wait for the same rules."""

    scan: dict[int, list[Item]]
    waiting: dict[int, list[Item]]


@dataclass(frozen=True, slots=True)
class EarleySet:
    """``scan``: items by the lexeme they wait for; ``waiting``: items by the rule; ``accepts``: the start is complete.

    ``items`` are (production, dot) of all unfinished items, by the set where they began; ``looked_up`` are the sets
    that were read to complete rules.
    """

    kernel: frozenset[Item]
    scan: dict[int, list[Item]]
    waiting: dict[int, list[Item]]
    predicted: Predicted
    accepts: bool
    lexer: Lexer
    items: dict[int, frozenset[tuple[int, int]]]
    looked_up: frozenset[int]

    def waiting_for(self, rule: int) -> list[Item]:
        return [*self.waiting.get(rule, ()), *self.predicted.waiting.get(rule, ())]


@dataclass(frozen=True, slots=True)
class Configuration:
    """The set at this byte (-1: none) and the lexemes under way.

    ``rows``: per set, the starts of its lexer's byte ranges, and what follows in each range.
    """

    at: int
    running: tuple[tuple[int, Lexer], ...]
    rows: list[tuple[int, list[int], list[tuple[Lexer, tuple[int, ...]] | None]]]
    accepts: bool


class ParserState:
    """A state of the machine (``LazyState``); its set is made when first needed."""

    __slots__ = ("_configuration", "_parser", "_pending")

    def __init__(self, parser: "Parser", pending: Pending, configuration: Configuration | None = None) -> None:
        self._parser = parser
        self._pending = pending
        self._configuration = configuration

    @property
    def configuration(self) -> Configuration:
        if self._configuration is None:
            self._configuration = self._parser.configuration(self._pending)
        return self._configuration

    def step(self, byte: int) -> tuple[int, int, int]:
        return self._parser.step(self.configuration, byte)

    def accepts(self) -> bool:
        return self.configuration.accepts

    def threads(self) -> tuple["Parser", tuple[tuple[int, Lexer], ...]]:
        return self._parser, self.configuration.running

    def ending(self, word_of: Callable[[int], bytes]) -> bytes:
        return self._parser.ending(self.configuration, word_of)


class Parser:
    """The states of one grammar on a machine."""

    def __init__(self, grammar: ContextFreeGrammar, masks: Masks) -> None:
        machine = self.machine = masks.machine
        self.ex = machine.expressions
        self.ignored = tuple(grammar.ignored)
        self.productions, self.nullable = reduced(grammar)
        self.by_rule: dict[int, list[int]] = {}
        for number, (rule, _) in enumerate(self.productions):
            self.by_rule.setdefault(rule, []).append(number)
        self.sets: list[EarleySet] = []
        self._set_ids: dict[frozenset[Item], int] = {}
        self._rows: dict[Lexer, LexerRow] = {}
        self._resolved: dict[Pending, Configuration] = {}
        self._configurations: dict[tuple[int, tuple[tuple[int, Lexer], ...]], Configuration] = {}
        self._advanced: dict[tuple[int, tuple[int, ...]], frozenset[Item]] = {}
        self._predicted: dict[frozenset[int], Predicted] = {}
        self._lexers: dict[tuple[frozenset[int], Predicted], Lexer] = {}
        self._after: dict[tuple[int, int], int] = {}
        self._shapes: dict[tuple[int, int], int] = {}
        self._shape_ids: dict[Hashable, int] = {}
        self._shortest: dict[int, bytes] = {}  # by rule
        self._finished: dict[tuple[int, int], bytes | None] = {}  # by rule and the set where it began
        lexemes = {value for _, symbols in self.productions for kind, value in symbols if kind == "lexeme"}
        masks.lazy.prepare(sorted(lexemes), self.ignored)
        start = frozenset((p, 0, OWN) for p in self.by_rule[0])
        self.start = machine.add_lazy_state(ParserState(self, ((), ()), self._make(self._set(start), ())))
        self.needs = Needs(self._bounds)

    def _bounds(self) -> Bounds:
        with self.machine.lock:
            return bounds_of_rules(self.productions, self.ex)

    # -- sets -----------------------------------------------------------------------------------------------------

    def _set(self, kernel: frozenset[Item]) -> int:
        found = self._set_ids.get(kernel)
        if found is None:
            if len(self.sets) >= MAX_SETS:
                raise GrammarTooComplex(f"the text needs more than {MAX_SETS:,} different parser states")
            found = self._set_ids[kernel] = len(self.sets)
            self.sets.append(self._close(kernel))
        return found

    def _close(self, kernel: frozenset[Item]) -> EarleySet:
        """Complete and predict."""
        productions, sets, nullable = self.productions, self.sets, self.nullable
        scan: dict[int, list[Item]] = {}
        waiting: dict[int, list[Item]] = {}
        items: dict[int, set[tuple[int, int]]] = {}
        accepts = False
        seen = set(kernel)
        looked_up: set[int] = set()
        todo = list(kernel)
        while todo:
            item = todo.pop()
            production, dot, origin = item
            rule, symbols = productions[production]
            if dot == len(symbols):
                accepts = accepts or rule == 0  # only the whole text is rule 0
                if origin != OWN:
                    looked_up.add(origin)
                    for p, d, o in sets[origin].waiting_for(rule):
                        following = (p, d + 1, origin if o == OWN else o)
                        if following not in seen:
                            seen.add(following)
                            todo.append(following)
                if item not in kernel:
                    continue
            else:
                kind, value = symbols[dot]
                if kind == "lexeme":
                    scan.setdefault(value, []).append(item)
                else:
                    waiting.setdefault(value, []).append(item)
                    if value in nullable:
                        following = (production, dot + 1, origin)
                        if following not in seen:
                            seen.add(following)
                            todo.append(following)
            if origin != OWN:
                items.setdefault(origin, set()).add((production, dot))
        predicted = self._predict(frozenset(waiting))
        key = (frozenset(scan), predicted)
        lexer = self._lexers.get(key)
        if lexer is None:
            lexemes = {*scan, *predicted.scan, *self.ignored}
            lexer = self._lexers[key] = tuple(sorted((lexeme, lexeme) for lexeme in lexemes))
        own = {o: frozenset(found) for o, found in items.items()}
        return EarleySet(kernel, scan, waiting, predicted, accepts, lexer, own, frozenset(looked_up))

    def _predict(self, rules: frozenset[int]) -> Predicted:
        """The items that may come first in some rules; rules that may be empty are stepped over."""
        found = self._predicted.get(rules)
        if found is None:
            scan: dict[int, list[Item]] = {}
            waiting: dict[int, list[Item]] = {}
            todo: list[Item] = [(p, 0, OWN) for rule in rules for p in self.by_rule[rule]]
            seen = set(todo)
            begun = set(rules)
            for production, dot, _ in todo:
                symbols = self.productions[production][1]
                if dot == len(symbols):
                    continue
                kind, value = symbols[dot]
                item = (production, dot, OWN)
                if kind == "lexeme":
                    scan.setdefault(value, []).append(item)
                    continue
                waiting.setdefault(value, []).append(item)
                new = [(production, dot + 1, OWN)] if value in self.nullable else []
                if value not in begun:
                    begun.add(value)
                    new += [(p, 0, OWN) for p in self.by_rule[value]]
                for following in new:
                    if following not in seen:
                        seen.add(following)
                        todo.append(following)
            found = self._predicted[rules] = Predicted(scan, waiting)
        return found

    # -- as ``Sets`` --------------------------------------------------------------------------------------------------

    def after(self, number: int, lexeme: int) -> int:
        key = (number, lexeme)
        found = self._after.get(key)
        if found is None:
            found = self._after[key] = self._set(self._advance(number, (lexeme,)))
        return found

    def lexer(self, number: int) -> Lexer:
        return self.sets[number].lexer

    def came_from(self, number: int) -> Iterable[int]:
        return self.sets[number].items

    def looked_up(self, number: int) -> frozenset[int]:
        return self.sets[number].looked_up

    def shape(self, number: int, depth: int) -> int:
        key = (number, depth)
        found = self._shapes.get(key)
        if found is None:
            at = self.sets[number]
            if depth == 0:
                # the items that begin in this set follow from the others
                content: Hashable = frozenset().union(*at.items.values()), at.accepts
            else:
                content = frozenset((self.shape(o, depth - 1), items) for o, items in at.items.items()), at.accepts
            content = (depth, at.lexer, number if not at.items else -1, content)
            found = self._shapes[key] = self._shape_ids.setdefault(content, len(self._shape_ids))
        return found

    def _advance(self, number: int, lexemes: tuple[int, ...]) -> frozenset[Item]:
        """The kernel of the set after any of some lexemes that began in set ``number``."""
        key = (number, lexemes)
        found = self._advanced.get(key)
        if found is None:
            at = self.sets[number]
            items: set[Item] = set()
            for lexeme in lexemes:
                for found_in in (at.scan, at.predicted.scan):
                    items.update((p, d + 1, number if o == OWN else o) for p, d, o in found_in.get(lexeme, ()))
                if lexeme in self.ignored:
                    items.update((p, d, number if o == OWN and d else o) for p, d, o in at.kernel)
            found = self._advanced[key] = frozenset(items)
        return found

    # -- endings --------------------------------------------------------------------------------------------------

    def ending(self, configuration: Configuration, word_of: Callable[[int], bytes]) -> bytes:
        """A shortest text after ``configuration``, but for lexemes to be ignored that have not begun."""
        if configuration.accepts:
            return b""
        if not self._shortest:
            self._find_shortest(word_of)
        found: list[bytes] = []
        for number, lexer in configuration.running:
            at = self.sets[number]
            for lexeme, rest in lexer:
                items = [(p, d + 1, o) for scan in (at.scan, at.predicted.scan) for p, d, o in scan.get(lexeme, ())]
                if lexeme in self.ignored:
                    items += at.kernel
                for production, dot, origin in items:
                    rule, symbols = self.productions[production]
                    after = self._finish(rule, number if origin == OWN else origin, word_of)
                    if after is not None:
                        found.append(word_of(rest) + self._spelled(symbols[dot:], word_of) + after)
        return min(found, key=_short_first)

    def _find_shortest(self, word_of: Callable[[int], bytes]) -> None:
        """A shortest text of each rule, the rules with the shortest first (Knuth 1977)."""
        shortest = self._shortest
        while len(shortest) < len(self.by_rule):
            texts: dict[int, bytes] = {}
            for rule, symbols in self.productions:
                if rule not in shortest and all(kind == "lexeme" or value in shortest for kind, value in symbols):
                    text = self._spelled(symbols, word_of)
                    texts[rule] = min(texts.get(rule, text), text, key=_short_first)
            least = min(map(len, texts.values()))
            shortest.update((rule, text) for rule, text in texts.items() if len(text) == least)

    def _spelled(self, symbols: Iterable[Symbol], word_of: Callable[[int], bytes]) -> bytes:
        return b"".join([self._shortest[value] if kind == "rule" else word_of(value) for kind, value in symbols])

    def _finish(self, rule: int, number: int, word_of: Callable[[int], bytes]) -> bytes | None:
        """A shortest text after a rule that began in set ``number`` and is complete (Dijkstra 1959)."""
        key = (rule, number)
        if key in self._finished:
            return self._finished[key]
        queue: list[tuple[int, bytes, int, int]] = [(0, b"", rule, number)]
        seen: set[tuple[int, int]] = set()
        found: bytes | None = None
        while queue:
            _, text, rule, number = heapq.heappop(queue)
            if rule <= 0:  # the start's own rule, or a text that is known to the end
                found = text
                break
            if (rule, number) in seen:
                continue
            seen.add((rule, number))
            if (rule, number) in self._finished:
                known = self._finished[rule, number]
                if known is not None:
                    heapq.heappush(queue, (len(text) + len(known), text + known, -1, 0))
                continue
            for production, dot, origin in self.sets[number].waiting_for(rule):
                outer, symbols = self.productions[production]
                whole = text + self._spelled(symbols[dot + 1 :], word_of)
                heapq.heappush(queue, (len(whole), whole, outer, number if origin == OWN else origin))
        self._finished[key] = found
        return found

    # -- states ---------------------------------------------------------------------------------------------------

    def _row(self, lexer: Lexer) -> LexerRow:
        """Per byte range: the lexemes still under way after it, and those that may end with it; None if neither."""
        found = self._rows.get(lexer)
        if found is None:
            ex = self.ex
            starts = sorted({lo for _, rest in lexer for lo, _ in ex.classes(rest)} or {0})
            entries: list[tuple[Lexer, tuple[int, ...]] | None] = []
            for lo, hi in pairwise([*starts, 256]):
                byte = ex.available_in(lo, hi)
                under_way, ended = [], []
                for lexeme, rest in lexer if byte >= 0 else ():
                    left = ex.alive(ex.derive(rest, byte))
                    if left != NOTHING:
                        if left != EMPTY:
                            under_way.append((lexeme, left))
                        if ex.nullable[left]:
                            ended.append(lexeme)
                entries.append((tuple(under_way), tuple(ended)) if under_way or ended else None)
            found = self._rows[lexer] = (starts, entries)
        return found

    def _state(self, pending: Pending) -> int:
        """The machine's state after some lexemes have ended and others go on."""
        machine = self.machine

        return machine.state((self, pending), lambda: machine.add_lazy_state(ParserState(self, pending)))

    def configuration(self, pending: Pending) -> Configuration:
        found = self._resolved.get(pending)
        if found is None:
            ended, going_on = pending
            at = -1
            if ended:
                at = self._set(frozenset().union(*[self._advance(number, lexemes) for number, lexemes in ended]))
            found = self._resolved[pending] = self._make(at, going_on)
        return found

    def _make(self, at: int, going_on: tuple[tuple[int, Lexer], ...]) -> Configuration:
        key = (at, going_on)
        found = self._configurations.get(key)
        if found is None:
            running = going_on if at < 0 else ((at, self.sets[at].lexer), *going_on)
            rows = [(number, *self._row(lexer)) for number, lexer in running]
            found = Configuration(at, running, rows, at >= 0 and self.sets[at].accepts)
            self._configurations[key] = found
        return found

    def step(self, configuration: Configuration, byte: int) -> tuple[int, int, int]:
        """The range of bytes that act like ``byte``, and the state they lead to."""
        low, high = 0, 256
        going_on: list[tuple[int, Lexer]] = []
        ended: list[tuple[int, tuple[int, ...]]] = []
        for number, starts, entries in configuration.rows:
            at = bisect_right(starts, byte) - 1
            low = max(low, starts[at])
            if at + 1 < len(starts):
                high = min(high, starts[at + 1])
            entry = entries[at]
            if entry is not None:
                lexer, ends = entry
                if lexer:
                    going_on.append((number, lexer))
                if ends:
                    ended.append((number, ends))
        if not going_on and not ended:
            return low, high, 0
        pending = (tuple(sorted(ended)), tuple(sorted(set(going_on))))
        return low, high, self._state(pending)


def _short_first(text: bytes) -> tuple[int, bytes]:
    return len(text), text
