"""Context-free grammars over lexemes: Earley sets (Earley 1970), hash-consed, with a lexer that never decides early.

A lexeme is a regular language of bytes. At every byte all lexemes that could be under way are followed, and one that
may end here also begins what may come after it, so no reading is lost to a longer one. A configuration

    (set at this very byte, lexemes under way from earlier sets)

is one state of the machine, made when first met. Never reads grammar syntax.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from .expressions import NOTHING, Expressions
from .machine import Machine
from .spec import GrammarError, GrammarTooComplex

Symbol = tuple[str, int]  # ("lexeme", expression) or ("rule", number)
Item = tuple[int, int, int]  # production, dot, origin set; OWN for the set itself
Lexer = tuple[tuple[int, int], ...]  # (lexeme, what of it is left), sorted
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


class Parser:
    """The states of one grammar on a machine."""

    def __init__(self, grammar: Grammar, machine: Machine) -> None:
        self.ex = machine.expressions
        self.machine = machine
        self.ignored = tuple(grammar.ignored)
        self._reduce(grammar)
        self._sets: list[EarleySet] = []
        self._set_ids: dict[frozenset[Item], int] = {}
        self._rows: dict[Lexer, list[tuple[int, int, Lexer, tuple[int, ...]]]] = {}
        self._advanced: dict[tuple[int, tuple[int, ...]], frozenset[Item]] = {}
        start = frozenset((p, 0, OWN) for p in self.by_rule[0])
        self.start = self._state(self._set(start), ())

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

    def _row(self, lexer: Lexer) -> list[tuple[int, int, Lexer, tuple[int, ...]]]:
        """Per byte range: the lexemes still under way after it, and those that may end with it."""
        found = self._rows.get(lexer)
        if found is None:
            ex = self.ex
            found = []
            parts = [(lexeme, rest, ex.classes(rest)) for lexeme, rest in lexer]
            cuts = sorted({lo for _, _, classes in parts for lo, _ in classes} | {256})
            for lo, hi in pairwise(cuts):
                byte = ex._available_in(lo, hi)
                if byte < 0:
                    continue
                under_way, ended = [], []
                for lexeme, rest, _ in parts:
                    left = ex.alive(ex.derive(rest, byte))
                    if left != NOTHING:
                        under_way.append((lexeme, left))
                        if ex.nullable[left]:
                            ended.append(lexeme)
                going_on = tuple((lexeme, left) for lexeme, left in under_way if left != 1)
                if under_way:
                    found.append((lo, hi, going_on, tuple(ended)))
            self._rows[lexer] = found
        return found

    def _state(self, at: int, threads: tuple[tuple[int, Lexer], ...]) -> int:
        """The machine's state of a configuration; ``at`` is -1 if no lexeme may end here."""
        machine = self.machine

        def make() -> int:
            accepting = at >= 0 and self._sets[at].accepts
            return machine.add_state(lambda row: self._fill(row, at, threads), accepting=accepting)

        return machine.state((self, at, threads), make)

    def _fill(self, row: np.ndarray, at: int, threads: tuple[tuple[int, Lexer], ...]) -> None:
        running = threads if at < 0 else ((at, self._sets[at].lexer), *threads)
        rows = [(number, self._row(lexer)) for number, lexer in running]
        cuts = sorted({cut for _, found in rows for lo, hi, _, _ in found for cut in (lo, hi)})
        places = [0] * len(rows)
        known: dict[tuple, int] = {}
        for lo, hi in pairwise(cuts):
            going_on: list[tuple[int, Lexer]] = []
            ended: list[tuple[int, tuple[int, ...]]] = []
            for i, (number, found) in enumerate(rows):
                while places[i] < len(found) and found[places[i]][1] <= lo:
                    places[i] += 1
                if places[i] < len(found) and found[places[i]][0] <= lo:
                    _, _, lexer, ends = found[places[i]]
                    if lexer:
                        going_on.append((number, lexer))
                    if ends:
                        ended.append((number, ends))
            if going_on or ended:
                key = (tuple(going_on), tuple(ended))
                target = known.get(key)
                if target is None:
                    target = known[key] = self._after(tuple(going_on), tuple(ended))
                row[lo:hi] = target

    def _after(self, going_on: tuple[tuple[int, Lexer], ...], ended: tuple[tuple[int, tuple[int, ...]], ...]) -> int:
        at = -1
        if ended:
            kernels = [self._advance(number, lexemes) for number, lexemes in ended]
            at = self._set(frozenset().union(*kernels))
        return self._state(at, tuple(sorted(set(going_on))))
