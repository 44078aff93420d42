"""EBNF as llama.cpp's GBNF writes it: rules of literals, character classes, groups and repeats.

    root  ::= "[" (value ("," value)*)? "]"      # the start is the rule named root
    value ::= [0-9]+ | root

A rule that does not refer back to itself becomes one regular lexeme; only recursion needs the parser.
"""

import re

from .code_points import ANY, complement, union
from .earley import Parser
from .expressions import EMPTY, Expressions
from .machine import Masks
from .productions import ContextFreeGrammar, Symbol
from .spec import GrammarError
from .syntax import Alt, Cat, Chars, Literal, Node, Rep, RuleName, language, leaves

MAX_REPEAT = 10_000
_NAME = re.compile(r"[\w.-]+")
_RULE_BEGIN = re.compile(r"[\w.-]+[ \t\r\n]*::=")
ESCAPES = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11, "0": 0, "b": 8}
HEX_LENGTHS = {"x": 2, "u": 4, "U": 8}


def compile_ebnf(text: str, masks: Masks, *, start: str = "root") -> Parser:
    """The parser of the grammar's texts; the caller holds the machine's lock. Raises GrammarError."""
    rules = read_ebnf(text)
    if start not in rules:
        raise GrammarError(f"the grammar has no rule {start!r} to start from; it has {', '.join(rules) or 'no rules'}")
    return _Lowering(rules, masks.machine.expressions).parser(start, masks)


def read_ebnf(text: str) -> dict[str, Node]:
    """The rules by name, in the order of the text. Raises GrammarError."""
    return _EbnfReader(text).read()


def rules_used(rules: dict[str, Node], start: str) -> set[str]:
    """The rules that ``start`` refers to, itself included, directly or through others."""
    found, waiting = {start}, [start]
    for name in waiting:
        new = {ref.name for ref in _names_in(rules[name])} - found
        found |= new
        waiting += sorted(new)
    return found


class _EbnfReader:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    @property
    def line(self) -> int:
        return self.text.count("\n", 0, self.at) + 1

    def fail(self, what: str) -> GrammarError:
        return GrammarError(what, where=f"line {self.line}")

    def read(self) -> dict[str, Node]:
        rules: dict[str, Node] = {}
        while self.skip(lines=True):
            name = self.name()
            self.skip(lines=True)
            if not self.text.startswith("::=", self.at):
                raise self.fail(f"'::=' expected after {name!r}")
            self.at += 3
            body = self.alternatives(0)
            if name in rules:
                raise self.fail(f"rule {name!r} is defined twice")
            rules[name] = body
        return rules

    def skip(self, *, lines: bool) -> bool:
        """Skip blanks and comments, and line ends if ``lines``; whether anything follows that belongs to the rule."""
        while self.at < len(self.text):
            c = self.text[self.at]
            if c == "#":
                while self.at < len(self.text) and self.text[self.at] != "\n":
                    self.at += 1
            elif c in " \t\r" or (lines and c == "\n"):
                self.at += 1
            elif c == "\n":
                mark = self.at
                self.skip(lines=True)
                if _RULE_BEGIN.match(self.text, self.at):
                    self.at = mark
                    return False
                return self.at < len(self.text)
            else:
                return True
        return False

    def peek(self) -> str:
        return self.text[self.at] if self.at < len(self.text) else ""

    def name(self) -> str:
        found = _NAME.match(self.text, self.at)
        if found is None:
            raise self.fail(f"a rule's name expected, not {self.peek()!r}")
        self.at = found.end()
        return found[0]

    def alternatives(self, depth: int) -> Node:
        if depth > 100:
            raise self.fail("groups nest deeper than 100")
        branches = [self.sequence(depth)]
        while self.skip(lines=depth > 0) and self.peek() == "|":
            self.at += 1
            branches.append(self.sequence(depth))
        return branches[0] if len(branches) == 1 else Alt(tuple(branches))

    def sequence(self, depth: int) -> Node:
        parts: list[Node] = []
        while self.skip(lines=depth > 0) and self.peek() not in "|)":
            parts.append(self.repeated(self.atom(depth)))
        if depth == 0 and self.peek() == ")":
            raise self.fail("unbalanced ')'")
        return parts[0] if len(parts) == 1 else Cat(tuple(parts))

    def atom(self, depth: int) -> Node:
        c = self.peek()
        if c in "\"'":
            return self.quoted(c)
        if c == "[":
            return self.char_class()
        if c == ".":
            self.at += 1
            return Chars(ANY)
        if c == "(":
            self.at += 1
            inner = self.alternatives(depth + 1)
            if self.peek() != ")":
                raise self.fail("'(' is never closed")
            self.at += 1
            return inner
        line = self.line
        return RuleName(self.name(), line)

    def repeated(self, node: Node) -> Node:
        while self.peek() and self.peek() in "*+?{":
            sign = self.peek()
            self.at += 1
            if sign == "{":
                end = self.text.find("}", self.at)
                low, comma, high = self.text[self.at : max(end, self.at)].replace(" ", "").partition(",")
                if end < 0 or not (low or high) or not (low or "0").isdecimal() or not (high or "0").isdecimal():
                    raise self.fail("a repeat is written {n}, {n,}, {,m} or {n,m}")
                first, last = int(low or 0), (int(high) if high else None) if comma else int(low)
                if max(first, last or 0) > MAX_REPEAT or (last is not None and last < first):
                    raise self.fail(f"repeat {{{low}{comma}{high}}} must rise and be at most {MAX_REPEAT:,}")
                self.at = end + 1
                node = Rep(node, first, last)
            else:
                node = Rep(node, 1 if sign == "+" else 0, 1 if sign == "?" else None)
        return node

    def code(self) -> int:
        c = self.peek()
        if not c or c == "\n":
            raise self.fail("a literal or class is never closed")
        self.at += 1
        if c != "\\":
            return ord(c)
        c = self.peek()
        self.at += 1
        if c in HEX_LENGTHS:
            digits = self.text[self.at : self.at + HEX_LENGTHS[c]]
            self.at += HEX_LENGTHS[c]
            try:
                return ord(chr(int(digits, 16)))
            except (ValueError, OverflowError):
                raise self.fail(f"{digits!r} is not a code point in hexadecimal") from None
        if c in ESCAPES:
            return ESCAPES[c]
        if c.isalnum() or not c:
            raise self.fail(f"unknown escape '\\{c}'")
        return ord(c)

    def quoted(self, quote: str) -> Node:
        self.at += 1
        codes = []
        while self.peek() != quote:
            codes.append(self.code())
        self.at += 1
        return Literal("".join(map(chr, codes)))

    def char_class(self) -> Node:
        self.at += 1
        negated = self.peek() == "^"
        self.at += negated
        ranges = []
        while self.peek() != "]":
            low = high = self.code()
            if self.peek() == "-" and self.text[self.at + 1 : self.at + 2] != "]":
                self.at += 1
                high = self.code()
                if high < low:
                    raise self.fail(f"character range {chr(low)!r} to {chr(high)!r} is the wrong way round")
            ranges.append((low, high))
        self.at += 1
        found = union(ranges)
        return Chars(complement(found) if negated else found)


class _Lowering:
    """Makes expressions of regular rules, and productions of the others."""

    def __init__(self, rules: dict[str, Node], ex: Expressions) -> None:
        self.rules = rules
        self.ex = ex
        self._regular: dict[str, bool] = {}
        self._exprs: dict[str, int] = {}
        self._numbers: dict[str, int] = {}

    def parser(self, start: str, masks: Masks) -> Parser:
        for name in self.rules:
            self.is_regular(name, ())
        grammar = self.grammar = ContextFreeGrammar(self.ex)
        top = grammar.rule(start)
        grammar.add(top, self.symbols(RuleName(start, 0)))
        return Parser(grammar, masks)

    def is_regular(self, name: str, path: tuple[str, ...], line: int = 0) -> bool:
        """Whether neither the rule nor a rule it refers to is recursive."""
        if name in path:
            for inner in path[path.index(name) :]:
                self._regular[inner] = False
            return False
        if name not in self._regular:
            if name not in self.rules:
                raise GrammarError(f"rule {name!r} is used but not defined", where=f"line {line}")
            found = [self.is_regular(ref.name, (*path, name), ref.line) for ref in _names_in(self.rules[name])]
            self._regular.setdefault(name, all(found))
        return self._regular[name]

    def rule(self, name: str) -> int:
        """A regular rule's language."""
        if name not in self._exprs:
            self._exprs[name] = language(self.rules[name], self.ex, self.rule)
        return self._exprs[name]

    def symbols(self, node: Node) -> list[Symbol]:
        """A node as symbols of a production; neighbouring regular parts become one lexeme."""
        if all(self._regular[ref.name] for ref in _names_in(node)):
            whole = language(node, self.ex, self.rule)
            return [("lexeme", whole)] if whole != EMPTY else []
        match node:
            case RuleName(name, _):
                return [("rule", self.number(name))]
            case Cat(parts):
                out: list[Symbol] = []
                for symbol in [s for part in parts for s in self.symbols(part)]:
                    if symbol[0] == "lexeme" and out and out[-1][0] == "lexeme":
                        out[-1] = ("lexeme", self.ex.concat(out[-1][1], symbol[1]))
                    else:
                        out.append(symbol)
                return out
            case Alt(parts):
                rule = self.grammar.rule("alternatives")
                for part in parts:
                    self.grammar.add(rule, self.symbols(part))
                return [("rule", rule)]
            case Rep(inner, low, high):
                return self._repeat(self.symbols(inner), low, high)
        raise AssertionError(node)

    def _repeat(self, inner: list[Symbol], low: int, high: int | None) -> list[Symbol]:
        grammar = self.grammar
        one = grammar.rule("repeated")
        grammar.add(one, inner)
        if high is None:
            many = grammar.rule("any number")
            grammar.add(many, [])
            grammar.add(many, [("rule", many), ("rule", one)])
            return [("rule", one)] * low + [("rule", many)]
        tail: list[Symbol] = []
        for _ in range(high - low):
            option = grammar.rule("one more")
            grammar.add(option, [])
            grammar.add(option, [("rule", one), *tail])
            tail = [("rule", option)]
        return [("rule", one)] * low + tail

    def number(self, name: str) -> int:
        found = self._numbers.get(name)
        if found is None:
            found = self._numbers[name] = self.grammar.rule(name)
            body = self.rules[name]
            for part in body.parts if isinstance(body, Alt) else (body,):
                self.grammar.add(found, self.symbols(part))
        return found


def _names_in(node: Node) -> list[RuleName]:
    return [leaf for leaf in leaves(node) if isinstance(leaf, RuleName)]
