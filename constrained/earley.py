"""Context-free grammars over lexemes: Earley sets (Earley 1970), hash-consed, with a lexer that never decides early.

A lexeme is a regular language of bytes. At every byte all lexemes that could be under way are followed, and one that
may end here also begins what may come after it, so no reading is lost to a longer one. A configuration

    (set at this very byte, lexemes under way from earlier sets)

is one state of the machine, made when first met. Never reads grammar syntax.
"""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from .expressions import EMPTY, NOTHING, Expressions
from .machine import Machine
from .spec import GrammarError, GrammarTooComplex

Symbol = tuple[str, int]  # ("lexeme", expression) or ("rule", number)
Item = tuple[int, int, int]  # production, dot, origin set; OWN for the set itself
Lexer = tuple[tuple[int, int], ...]  # (lexeme, what of it is left), sorted
# What has ended at a byte, as (set, its lexemes), and what goes on, as (set, its lexer).
Pending = tuple[tuple[tuple[int, tuple[int, ...]], ...], tuple[tuple[int, Lexer], ...]]
LexerRow = tuple[list[int], list[tuple[Lexer, tuple[int, ...]] | None]]
OWN = -1
MAX_SETS = 200_000


class Grammar:
    """Productions under construction. Rule 0 is the start, and no production refers to it."""

    def __init__(self, expressions: Expressions) -> None:
        self.ex = expressions
        self.names: list[str] = []
        self.productions: list[tuple[int, tuple[Symbol, ...]]] = []
        self.ignored: list[int] = []

    def rule(self, name: str) -> int:
        self.names.append(name)
        return len(self.names) - 1

    def add(self, rule: int, symbols: Iterable[Symbol]) -> None:
        """A production; a lexeme that may be empty becomes one that may be left out."""
        done: list[Symbol] = []
        for kind, value in symbols:
            if kind == "lexeme" and self.ex.nullable[value]:
                solid = self.ex.intersect(value, self.ex.complement(1))
                if solid == NOTHING:
                    continue
                optional = self.rule(f"{self.names[rule]}, lexeme that may be empty")
                self.productions.append((optional, ()))
                self.productions.append((optional, (("lexeme", solid),)))
                done.append(("rule", optional))
            else:
                done.append((kind, value))
        self.productions.append((rule, tuple(done)))

    def ignore(self, expression: int) -> None:
        if self.ex.nullable[expression]:
            expression = self.ex.intersect(expression, self.ex.complement(1))
        if self.ex.is_nonempty(expression):
            self.ignored.append(expression)


@dataclass(slots=True)
class EarleySet:
    """``scan[lexeme]``: items that wait for it; ``waiting[rule]``: for it; ``accepts``: the start rule is complete."""

    kernel: frozenset[Item]
    scan: dict[int, list[Item]]
    waiting: dict[int, list[Item]]
    accepts: bool
    lexer: Lexer = ()


@dataclass(frozen=True, slots=True)
class Configuration:
    """A set at this byte and lexemes under way: per set, where its lexer's byte ranges start and what they lead to."""

    rows: list[tuple[int, list[int], list[tuple[Lexer, tuple[int, ...]] | None]]]
    accepts: bool


class Parser:
    """The states of one grammar on a machine."""

    def __init__(self, grammar: Grammar, machine: Machine) -> None:
        self.ex = machine.expressions
        self.machine = machine
        self.ignored = tuple(grammar.ignored)
        self._reduce(grammar)
        self._sets: list[EarleySet] = []
        self._set_ids: dict[frozenset[Item], int] = {}
        self._rows: dict[Lexer, LexerRow] = {}
        self._resolved: dict[Pending, Configuration] = {}
        self._configurations: dict[tuple[int, tuple[tuple[int, Lexer], ...]], Configuration] = {}
        self._advanced: dict[tuple[int, tuple[int, ...]], frozenset[Item]] = {}
        start = frozenset((p, 0, OWN) for p in self.by_rule[0])
        first = self._make(self._set(start), ())
        self.start = machine.add_lazy_state(lambda byte: self._step(first, byte), lambda: first.accepts)

    def _reduce(self, grammar: Grammar) -> None:
        """Drop productions that no text completes, so that every prefix that parses can be completed."""
        ex = self.ex
        productive: set[int] = set()
        nullable: set[int] = set()
        changed = True
        usable = [
            (rule, symbols)
            for rule, symbols in dict.fromkeys(grammar.productions)
            if all(kind == "rule" or ex.is_nonempty(value) for kind, value in symbols)
        ]
        while changed:
            changed = False
            for rule, symbols in usable:
                if rule not in productive and all(k == "lexeme" or v in productive for k, v in symbols):
                    productive.add(rule)
                    changed = True
                if rule not in nullable and all(k == "rule" and v in nullable for k, v in symbols):
                    nullable.add(rule)
                    changed = True
        if 0 not in productive:
            raise GrammarError(f"no text matches rule {grammar.names[0]!r}")
        self.nullable = nullable
        self.productions = [
            (rule, symbols) for rule, symbols in usable if all(k == "lexeme" or v in productive for k, v in symbols)
        ]
        self.by_rule: dict[int, list[int]] = {rule: [] for rule in range(len(grammar.names))}
        for number, (rule, _) in enumerate(self.productions):
            self.by_rule[rule].append(number)

    # -- sets -----------------------------------------------------------------------------------------------------

    def _set(self, kernel: frozenset[Item]) -> int:
        found = self._set_ids.get(kernel)
        if found is None:
            if len(self._sets) >= MAX_SETS:
                raise GrammarTooComplex(f"the text needs more than {MAX_SETS:,} different parser states")
            found = self._set_ids[kernel] = len(self._sets)
            self._sets.append(self._close(kernel))
        return found

    def _close(self, kernel: frozenset[Item]) -> EarleySet:
        """Complete and predict."""
        scan: dict[int, list[Item]] = {}
        waiting: dict[int, list[Item]] = {}
        accepts = False
        seen = set(kernel)
        todo = sorted(kernel)
        while todo:
            item = todo.pop()
            production, dot, origin = item
            rule, symbols = self.productions[production]
            new: list[Item] = []
            if dot == len(symbols):
                accepts = accepts or rule == 0  # nothing refers to rule 0: it ends only with the text
                if origin != OWN:  # empty rules are stepped over below
                    before = self._sets[origin]
                    new = [(p, d + 1, origin if o == OWN else o) for p, d, o in before.waiting.get(rule, ())]
            else:
                kind, value = symbols[dot]
                if kind == "lexeme":
                    scan.setdefault(value, []).append(item)
                else:
                    if value not in waiting:
                        new = [(p, 0, OWN) for p in self.by_rule[value]]
                    waiting.setdefault(value, []).append(item)
                    if value in self.nullable:
                        new.append((production, dot + 1, origin))
            for following in new:
                if following not in seen:
                    seen.add(following)
                    todo.append(following)
        made = EarleySet(kernel, scan, waiting, accepts)
        made.lexer = tuple(sorted((lexeme, lexeme) for lexeme in {*scan, *self.ignored}))
        return made

    def _advance(self, number: int, lexemes: tuple[int, ...]) -> frozenset[Item]:
        """The kernel after any of some lexemes from a set on."""
        key = (number, lexemes)
        found = self._advanced.get(key)
        if found is None:
            at = self._sets[number]
            items: set[Item] = set()
            for lexeme in lexemes:
                items.update((p, d + 1, number if o == OWN else o) for p, d, o in at.scan.get(lexeme, ()))
                if lexeme in self.ignored:
                    items.update((p, d, number if o == OWN and d else o) for p, d, o in at.kernel)
            found = self._advanced[key] = frozenset(items)
        return found

    # -- states ---------------------------------------------------------------------------------------------------

    def _row(self, lexer: Lexer) -> LexerRow:
        """Per byte range: the lexemes still under way after it and those that may end with it; None if none."""
        found = self._rows.get(lexer)
        if found is None:
            ex = self.ex
            starts = sorted({lo for _, rest in lexer for lo, _ in ex.classes(rest)} or {0})
            entries: list[tuple[Lexer, tuple[int, ...]] | None] = []
            for lo, hi in pairwise([*starts, 256]):
                byte = ex._available_in(lo, hi)
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
        """The machine's state after some lexemes have ended here and others go on; its set is made when asked for."""
        machine = self.machine

        def make() -> int:
            return machine.add_lazy_state(
                lambda byte: self._step(self._configuration(pending), byte),
                lambda: self._configuration(pending).accepts,
            )

        return machine.state((self, pending), make)

    def _configuration(self, pending: Pending) -> Configuration:
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
            running = going_on if at < 0 else ((at, self._sets[at].lexer), *going_on)
            rows = [(number, *self._row(lexer)) for number, lexer in running]
            found = Configuration(rows, at >= 0 and self._sets[at].accepts)
            self._configurations[key] = found
        return found

    def _step(self, configuration: Configuration, byte: int) -> tuple[int, int, int]:
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
