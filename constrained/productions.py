"""The productions of a context-free grammar over lexemes, and equivalent ones that are cheaper to parse.

A mask depends on the language alone, not on how its texts are read, so productions may be replaced by less ambiguous
ones.
"""

from collections.abc import Iterable

from .expressions import NO_TEXT, NOTHING, Expressions
from .rests import Bounds, rest_of
from .spec import GrammarError

Symbol = tuple[str, int]  # ("lexeme", expression) or ("rule", number)
Production = tuple[int, tuple[Symbol, ...]]
MAX_NESTED = 8  # rules within rules that one token is taken to begin


class ContextFreeGrammar:
    """Productions under construction. Rule 0 is the start; no production refers to it."""

    def __init__(self, expressions: Expressions) -> None:
        self.ex = expressions
        self.names: list[str] = []
        self.productions: list[tuple[int, tuple[Symbol, ...]]] = []
        self.ignored: list[int] = []

    def rule(self, name: str) -> int:
        self.names.append(name)
        return len(self.names) - 1

    def add(self, rule: int, symbols: Iterable[Symbol]) -> None:
        """Add a production. A lexeme that may be empty is replaced by an optional rule of a lexeme that may not."""
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
        """Allow texts of a language between any two lexemes."""
        if self.ex.nullable[expression]:
            expression = self.ex.intersect(expression, self.ex.complement(1))
        if self.ex.is_nonempty(expression):
            self.ignored.append(expression)


def reduced(grammar: ContextFreeGrammar) -> tuple[list[Production], set[int]]:
    """Productions of the same language in which every prefix that parses can be completed, and the nullable rules.

    Raises GrammarError if the language has no text.
    """
    productions = _productive(grammar)
    productions = _without_ambiguous_operators(productions, len(grammar.names))
    productions = _with_merged_lexemes(productions, grammar.ex)
    return productions, _closure(productions, of_lexemes=False)


def bounds_of_rules(productions: list[Production], ex: Expressions) -> Bounds:
    """How many bytes one token adds at most to those that a text needs: it may begin a rule, and up to ``MAX_NESTED``
    rules inside that one. What stands before an inner rule is written by then and does not count. Where a rule begins
    with itself (left recursion), its shortest text is taken there, since the text may end after it."""
    lexemes = {value for _, symbols in productions for kind, value in symbols if kind == "lexeme"}
    rests = {lexeme: rest_of(ex, lexeme) for lexeme in lexemes}
    least: dict[Symbol, int] = {("rule", rule): NO_TEXT for rule, _ in productions}
    for lexeme, rest in rests.items():
        least["lexeme", lexeme] = ex.at_least(lexeme) if rest is None else rest.least
    is_changed = True
    while is_changed:
        is_changed = False
        for rule, symbols in productions:
            found = sum(least[symbol] for symbol in symbols)
            if found < least["rule", rule]:
                least["rule", rule] = found
                is_changed = True
    begun = least | {("lexeme", lexeme): least["lexeme", lexeme] + rest.added for lexeme, rest in rests.items() if rest}
    for _ in range(MAX_NESTED):
        longer = dict(begun)
        for rule, symbols in productions:
            key, rest_needs = ("rule", rule), sum(least[symbol] for symbol in symbols)
            longer[key] = max(longer[key], rest_needs)
            for place, symbol in enumerate(symbols):
                if place or symbol != key:
                    longer[key] = max(longer[key], rest_needs - least[symbol] + begun[symbol])
                rest_needs -= least[symbol]
        if longer == begun:
            break
        begun = longer
    return Bounds(None, max(count for count in begun.values() if count < NO_TEXT), begun["rule", 0])


def _productive(grammar: ContextFreeGrammar) -> list[Production]:
    """The productions that some text completes."""
    ex = grammar.ex
    usable = [
        (rule, symbols)
        for rule, symbols in dict.fromkeys(grammar.productions)
        if all(kind == "rule" or ex.is_nonempty(value) for kind, value in symbols) and symbols != (("rule", rule),)
    ]
    productive = _closure(usable, of_lexemes=True)
    if 0 not in productive:
        raise GrammarError(f"no text matches rule {grammar.names[0]!r}")
    return [(rule, symbols) for rule, symbols in usable if all(k == "lexeme" or v in productive for k, v in symbols)]


def _closure(productions: list[Production], *, of_lexemes: bool) -> set[int]:
    """The rules that derive a sequence of lexemes; the empty sequence unless ``of_lexemes``."""
    found: set[int] = set()
    size = -1
    while size < len(found):
        size = len(found)
        for rule, symbols in productions:
            if rule not in found and all(v in found if k == "rule" else of_lexemes for k, v in symbols):
                found.add(rule)
    return found


def _without_ambiguous_operators(productions: list[Production], num_rules: int) -> list[Production]:
    """Make rules that are operands of their own operators left-recursive:

        E -> E a E | E c | d E | b        becomes        E -> E a B | E c | B,   B -> d B | b

    Both have the language b'(c | a b')*, b' = d* b. With the second, each text has one reading instead of many.
    """
    by_rule: dict[int, list[tuple[Symbol, ...]]] = {}
    for rule, symbols in productions:
        by_rule.setdefault(rule, []).append(symbols)
    out: list[Production] = []
    for rule, bodies in by_rule.items():
        own: Symbol = ("rule", rule)
        left = [body for body in bodies if body and body[0] == own]
        if not any(body and body[-1] == own for body in bodies) or not left:
            out += [(rule, body) for body in bodies]
            continue
        operand: Symbol = ("rule", num_rules)
        num_rules += 1
        out.append((rule, (operand,)))
        for body in bodies:
            if body in left:
                out.append((rule, (*body[:-1], operand) if body[-1] == own else body))
            else:
                out.append((operand[1], (*body[:-1], operand) if body and body[-1] == own else body))
    return out


def _with_merged_lexemes(productions: list[Production], ex: Expressions) -> list[Production]:
    """Merge productions of a rule that differ in one lexeme into one, of the union of the lexemes."""
    for place in range(max((len(symbols) for _, symbols in productions), default=0)):
        merged: dict[tuple, list[int]] = {}
        out: list[Production | tuple] = []
        for rule, symbols in productions:
            if place < len(symbols) and symbols[place][0] == "lexeme":
                key = (rule, symbols[:place], symbols[place + 1 :])
                if key not in merged:
                    merged[key] = []
                    out.append(key)
                merged[key].append(symbols[place][1])
            else:
                out.append((rule, symbols))
        productions = []
        for entry in out:
            if len(entry) == 2:
                productions.append(entry)
            else:
                rule, before, after = entry
                productions.append((rule, (*before, ("lexeme", ex.union(*merged[entry])), *after)))
    return list(dict.fromkeys(productions))
