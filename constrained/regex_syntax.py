"""Regex text to an expression: the syntax that ECMA-262 and Python share.

Groups capture nothing. Lazy quantifiers are read as greedy ones, which have the same language. ``\\d`` and ``\\w`` are
ASCII. A look-ahead is an intersection of what follows it, up to the end of the text, with a language or its complement.
Refused by name: look-behind, look-ahead in most repeated groups, back-references, word boundaries, atomic groups,
possessive quantifiers, and inline flags but ``i`` and ``s``.
"""

from typing import NamedTuple

from .code_points import (
    ANY,
    DIGITS,
    SPACES,
    WORD,
    Ranges,
    complement,
    fold_case,
    unicode_class,
    union,
    without_surrogates,
)
from .expressions import EMPTY, Expressions
from .spec import GrammarError
from .syntax import Alt, Anchor, Cat, Chars, LookAhead, Node, Rep, language, leaves

MAX_REPEAT = 100_000
MAX_ANCHORED = 256  # alternatives with anchors
GROUP_BEGIN = 24  # characters
MAX_UNROLLED = 16  # times that a group with a look-ahead in it may be repeated
QUANTIFIERS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
SIMPLE = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11, "0": 0, "a": 7, "e": 27}
CLASSES = {
    "d": DIGITS,
    "D": complement(DIGITS),
    "w": WORD,
    "W": complement(WORD),
    "s": SPACES,
    "S": complement(SPACES),
}
LINE_ENDS: Ranges = ((10, 10), (13, 13), (0x2028, 0x2029))
POSIX = {
    "alpha": ((65, 90), (97, 122)), "digit": DIGITS, "alnum": ((48, 57), (65, 90), (97, 122)), "upper": ((65, 90),),
    "lower": ((97, 122),), "space": ((9, 13), (32, 32)), "blank": ((9, 9), (32, 32)), "cntrl": ((0, 31), (127, 127)),
    "punct": ((33, 47), (58, 64), (91, 96), (123, 126)), "xdigit": ((48, 57), (65, 70), (97, 102)),
    "word": WORD, "print": ((32, 126),), "graph": ((33, 126),),
}  # fmt: skip


def compile_regex(
    pattern: str, expressions: Expressions, *, anchored: bool, where: str = "", ignore_case: bool = False,
    dot_all: bool = False, ecma: bool = False, is_whole: bool = True,
) -> int:  # fmt: skip
    """The language of ``pattern``. Without ``anchored`` a text matches where any part of it does, as in JSON Schema.

    ``ecma``: ``.`` and classes as ECMA-262 has them, not Python. ``where`` is named in errors.
    ``is_whole``: nothing follows the texts, so that a look-ahead can be decided within them.
    Raises GrammarError for what is malformed or not supported.
    """
    tree = _PatternReader(pattern, where, ignore_case, dot_all, ecma).read()
    if not is_whole and _has_look_ahead(tree):
        raise GrammarError(f"regex {pattern!r}: look-ahead is not supported in a part of a text", where=where)
    return _lower(tree, expressions, anchored=anchored, pattern=pattern, where=where)


def has_anchor(pattern: str) -> bool:
    """Whether an anchor (``^``, ``$``, ``\\A``, ``\\Z``) stands in the pattern."""
    return _has_anchor(_PatternReader(pattern, "", False, False, False).read())


def alternatives(pattern: str) -> list[list[str]]:
    """The alternatives of each group of a regex that has more than one, inner groups first, the whole regex last."""
    reader = _PatternReader(pattern, "", False, False, False)
    reader.read()
    parts = [[(pattern[begin:end], flags) for begin, end, flags in group] for group in reader.groups]
    return [[f"(?{flags}:{part})" if flags else part for part, flags in group] for group in parts]


class _Group(NamedTuple):
    """A group that was read: its text behind the bracket, where that began, how deep, and the spans in it."""

    text: str
    node: Node
    at: int
    depth: int
    spans: list[list[tuple[int, int, str]]]


class _PatternReader:
    def __init__(self, pattern: str, where: str, ignore_case: bool, dot_all: bool, ecma: bool) -> None:
        self.text = pattern
        self.at = 0
        self.where = where
        self.ignore_case = ignore_case
        self.dot_all = dot_all
        self.ecma = ecma
        self.depth = 0
        self.groups: list[list[tuple[int, int, str]]] = []  # the alternatives of each group: begin, end, flags
        # Equal parts of a pattern are read once: characters, classes and groups by their text, and groups by how that
        # begins.
        self._characters: dict[tuple[int, bool], Chars] = {}
        self._classes: dict[tuple[str, bool], Chars] = {}
        self._known_groups: dict[tuple[str, bool, bool], list[_Group]] = {}

    def fail(self, what: str) -> GrammarError:
        shown = self.text if len(self.text) <= 80 else self.text[:77] + "..."
        return GrammarError(f"regex {shown!r}, character {self.at}: {what}", where=self.where)

    def read(self) -> Node:
        tree = self.alternation()
        if self.at < len(self.text):
            raise self.fail("unbalanced ')'")
        return tree

    def peek(self) -> str:
        return self.text[self.at] if self.at < len(self.text) else ""

    def take(self) -> str:
        if self.at >= len(self.text):
            raise self.fail("the pattern ends too early")
        self.at += 1
        return self.text[self.at - 1]

    def alternation(self) -> Node:
        self.depth += 1
        if self.depth > 200:
            raise self.fail("groups nest deeper than 200")
        branches, spans = [], []
        while True:
            begin, flags = self.at, "i" * self.ignore_case + "s" * self.dot_all
            branches.append(self.sequence())
            spans.append((begin, self.at, flags))
            if self.peek() != "|":
                break
            self.at += 1
        self.depth -= 1
        if len(branches) == 1:
            return branches[0]
        self.groups.append(spans)
        return Alt(tuple(branches))

    def sequence(self) -> Node:
        parts: list[Node] = []
        while self.at < len(self.text) and self.peek() not in "|)":
            node = self.atom()
            if node is not None:
                parts.append(self.quantified(node))
        return parts[0] if len(parts) == 1 else Cat(tuple(parts))

    def quantified(self, node: Node) -> Node:
        while True:
            sign = self.peek()
            found = self.braces() if sign == "{" else QUANTIFIERS.get(sign)
            if found is None:
                return node
            low, high = found
            self.at += sign != "{"  # ``braces`` has read its own
            if self.peek() == "?":
                self.at += 1  # lazy
            elif self.peek() == "+":
                raise self.fail("possessive quantifiers are not supported")
            if isinstance(node, Anchor | LookAhead):
                return node if low else Cat(())
            node = Rep(node, low, high)

    def braces(self) -> tuple[int, int | None] | None:
        end = self.text.find("}", self.at)
        body = self.text[self.at + 1 : end] if end > 0 else ""
        low, comma, high = body.partition(",")
        if end < 0 or not (low.isdecimal() or (not low and comma and high)) or (high and not high.isdecimal()):
            return None  # the brace is a literal
        first = int(low or 0)
        last = (int(high) if high else None) if comma else first
        if max(first, last or 0) > MAX_REPEAT:
            raise self.fail(f"repeat count {max(first, last or 0):,} is above the limit of {MAX_REPEAT:,}")
        if last is not None and last < first:
            raise self.fail(f"repeat {{{body}}} has its bounds the wrong way round")
        self.at = end + 1
        return first, last

    def atom(self) -> Node | None:
        c = self.take()
        match c:
            case "^" | "$":
                return Anchor(c)
            case ".":
                if self.dot_all:
                    return Chars(ANY)
                return Chars(complement(LINE_ENDS if self.ecma else ((10, 10),)))
            case "(":
                return self.known_group() or self.group()
            case "[":
                return self.known_class()
            case "\\":
                return self.escape()
            case "*" | "+" | "?":
                raise self.fail(f"nothing to repeat before {c!r}")
            case "{":
                self.at -= 1
                if self.braces() is not None:
                    raise self.fail("nothing to repeat before '{'")
                self.at += 1
        return self.one(ord(c))

    def one(self, code: int) -> Chars:
        found = self._characters.get((code, self.ignore_case))
        if found is None:
            ranges: Ranges = ((code, code),)
            found = Chars(fold_case(ranges) if self.ignore_case else ranges)
            self._characters[code, self.ignore_case] = found
        return found

    def known_group(self) -> Node | None:
        """The group that begins here, if one with the same text was read before."""
        begin = self.text[self.at : self.at + GROUP_BEGIN]
        for group in self._known_groups.get((begin, self.ignore_case, self.dot_all), ()):
            if self.depth <= group.depth and self.text.startswith(group.text, self.at):
                shift = self.at - group.at
                for spans in group.spans:
                    self.groups.append([(first + shift, end + shift, flags) for first, end, flags in spans])
                self.at += len(group.text)
                return group.node
        return None

    def group(self) -> Node | None:
        saved = self.ignore_case, self.dot_all
        start, num_groups = self.at, len(self.groups)
        is_look_ahead, kind = False, ""
        if self.peek() == "?":
            self.at += 1
            kind = self.take()
            if kind == ":":
                pass
            elif kind in "=!":
                is_look_ahead = True
            elif kind == "<" and self.peek() in ("=", "!"):
                raise self.fail(f"look-behind '(?<{self.peek()}' is not supported")
            elif kind == ">":
                raise self.fail("atomic groups '(?>' are not supported")
            elif kind == "#":
                while self.take() != ")":
                    pass
                return None
            elif kind == "<" or (kind == "P" and self.peek() == "<"):
                while self.take() != ">":
                    pass
            elif kind == "P":
                raise self.fail("back-references '(?P=' are not supported")
            else:
                flags = kind
                while self.peek() not in (":", ")", ""):
                    flags += self.take()
                if set(flags) - set("ismau"):
                    raise self.fail(f"inline flags {flags!r} are not supported (only i and s)")
                if "m" in flags:
                    raise self.fail("the inline flag 'm' is not supported")
                self.ignore_case = self.ignore_case or "i" in flags
                self.dot_all = self.dot_all or "s" in flags
                if self.take() == ")":
                    return None  # the flags hold to the end of the enclosing group
        inner = self.alternation()
        if self.peek() != ")":
            raise self.fail("'(' is never closed")
        self.at += 1
        self.ignore_case, self.dot_all = saved
        node = LookAhead(inner, kind == "!") if is_look_ahead else inner
        text = self.text[start : self.at]
        found = _Group(text, node, start, self.depth, self.groups[num_groups:])
        self._known_groups.setdefault((text[:GROUP_BEGIN], *saved), []).append(found)
        return node

    def escape(self) -> Node:
        c = self.peek()
        if c in ("b", "B"):
            raise self.fail(f"word boundary '\\{c}' is not supported")
        if c in ("A", "Z", "z") and not self.ecma:
            self.at += 1
            return Anchor("^" if c == "A" else "$")
        if c and c in "123456789":
            raise self.fail(f"back-reference '\\{c}' is not supported")
        if c == "k" and self.text[self.at + 1 : self.at + 2] == "<":
            raise self.fail("back-reference '\\k<' is not supported")
        ranges = self.escaped_set()
        return Chars(fold_case(ranges) if self.ignore_case else ranges)

    def escaped_set(self) -> Ranges:
        c = self.take()
        if c in CLASSES:
            return CLASSES[c]
        if c in ("p", "P"):
            if self.peek() == "{":
                end = self.text.find("}", self.at)
                if end < 0:
                    raise self.fail("'\\p{' is never closed")
                name = self.text[self.at + 1 : end]
                self.at = end + 1
            else:
                name = self.take()
            negated = name.startswith("^")
            found = unicode_class(name.lstrip("^"))
            if found is None:
                raise self.fail(f"unknown Unicode class {name!r}")
            return complement(found) if (c == "P") != negated else found
        if c in SIMPLE:
            return ((SIMPLE[c], SIMPLE[c]),)
        if c == "x":
            return self.hexadecimal(2)
        if c == "u":
            if self.peek() == "{":
                end = self.text.find("}", self.at)
                digits = self.text[self.at + 1 : end]
                self.at = end + 1
                return self.code(digits)
            code = self.hexadecimal(4)[0][0]
            if 0xD800 <= code < 0xDC00 and self.text[self.at : self.at + 2] == "\\u":
                self.at += 2
                low = self.hexadecimal(4)[0][0]
                code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00)
            return ((code, code),)
        if c == "U":
            return self.hexadecimal(8)
        if c == "c":
            code = ord(self.take()) % 32
            return ((code, code),)
        if c.isalnum() and c.isascii():
            raise self.fail(f"unknown escape '\\{c}'")
        return ((ord(c), ord(c)),)

    def hexadecimal(self, length: int) -> Ranges:
        digits = self.text[self.at : self.at + length]
        if len(digits) < length:
            raise self.fail(f"{length} hexadecimal digits expected")
        self.at += length
        return self.code(digits)

    def code(self, digits: str) -> Ranges:
        try:
            code = int(digits, 16)
            chr(code)
        except (ValueError, OverflowError):
            raise self.fail(f"{digits!r} is not a code point in hexadecimal") from None
        return ((code, code),)

    def known_class(self) -> Chars:
        end = self.text.find("]", self.at) + 1  # not always the end of the class: then the text is no key
        found = self._classes.get((self.text[self.at : end], self.ignore_case))
        if found is not None:
            self.at = end
            return found
        begin = self.at
        made = Chars(self.char_class())
        self._classes[self.text[begin : self.at], self.ignore_case] = made
        return made

    def char_class(self) -> Ranges:
        negated = self.peek() == "^"
        if negated:
            self.at += 1
        ranges: list[tuple[int, int]] = []
        first = True
        while True:
            c = self.take()
            if c == "]" and (not first or self.ecma):
                break
            first = False
            if c == "[" and self.peek() == ":" and not self.ecma:
                end = self.text.find(":]", self.at)
                name = self.text[self.at + 1 : end]
                if end > 0 and name in POSIX:
                    ranges += POSIX[name]
                    self.at = end + 2
                    continue
            low = self.class_item(c)
            if self.peek() == "-" and self.text[self.at + 1 : self.at + 2] not in ("]", ""):
                mark = self.at
                self.at += 1
                high = self.class_item(self.take())
                if len(low) == len(high) == 1 and low[0][0] == low[0][1] and high[0][0] == high[0][1]:
                    if high[0][0] < low[0][0]:
                        raise self.fail("character range is the wrong way round")
                    ranges.append((low[0][0], high[0][0]))
                    continue
                self.at = mark + 1  # [\w-.]: the dash is a literal
                ranges.append((0x2D, 0x2D))
            ranges += low
        found = union(ranges)
        if self.ignore_case:
            found = fold_case(found)
        return complement(found) if negated else without_surrogates(found)

    def class_item(self, c: str) -> Ranges:
        if c != "\\":
            return ((ord(c), ord(c)),)
        if self.peek() == "b":
            self.at += 1
            return ((8, 8),)
        return self.escaped_set()


# -- lowering ---------------------------------------------------------------------------------------------------------


def _lower(tree: Node, ex: Expressions, *, anchored: bool, pattern: str, where: str) -> int:
    branches = []
    for starts, ends, body in _anchors(tree, pattern, where):
        rest = EMPTY if anchored or ends else ex.text
        if any(_has_look_ahead(part) for part in body):
            found = _before(Cat(body), rest, ex, pattern, where)
        else:
            found = ex.concat(*[language(part, ex, _no_rule) for part in body], rest)
        branches.append(found if anchored or starts else ex.concat(ex.text, found))
    return ex.union(*branches)


def _before(node: Node, rest: int, ex: Expressions, pattern: str, where: str) -> int:
    """The language of ``node`` before the language ``rest``, which reaches to the end of the text."""
    if not _has_look_ahead(node):
        return ex.concat(language(node, ex, _no_rule), rest)
    match node:
        case LookAhead(_, is_negative):
            seen = _seen(node, ex, pattern, where)
            return ex.intersect(rest, ex.complement(seen) if is_negative else seen)
        case Cat(parts):
            for part in reversed(parts):
                rest = _before(part, rest, ex, pattern, where)
            return rest
        case Alt(parts):
            return ex.union(*[_before(part, rest, ex, pattern, where) for part in parts])
        case Rep(inner, low, high) if high is not None and high <= MAX_UNROLLED:
            found = rest
            for _ in range(high - low):
                found = ex.union(rest, _before(inner, found, ex, pattern, where))
            for _ in range(low):
                found = _before(inner, found, ex, pattern, where)
            return found
        case Rep(Cat((LookAhead(_, True) as look, Chars(ranges))), low, None) if rest in (EMPTY, ex.text) and not low:
            if rest == ex.text:
                return rest
            # ((?!x).)* to the end of the text: no character of the text begins an x.
            seen = ex.intersect(_seen(look, ex, pattern, where), ex.concat(ex.any_char, ex.text))
            return ex.intersect(ex.repeat(ex.chars(ranges), 0, None), ex.complement(ex.concat(ex.text, seen)))
    raise GrammarError(f"regex {pattern!r}: look-ahead in this repeated group is not supported", where=where)


def _seen(look: LookAhead, ex: Expressions, pattern: str, where: str) -> int:
    """The texts up to their end that begin with what a look-ahead looks for."""
    found = []
    for starts, ends, body in _anchors(look.inner, pattern, where):
        if starts:
            raise GrammarError(f"regex {pattern!r}: '^' in a look-ahead is not supported", where=where)
        found.append(_before(Cat(body), EMPTY if ends else ex.text, ex, pattern, where))
    return ex.union(*found)


def _has_look_ahead(node: Node) -> bool:
    return any(isinstance(leaf, LookAhead) for leaf in leaves(node))


def _no_rule(name: str) -> int:
    raise AssertionError(name)  # a regex has no rules


def _has_anchor(node: Node) -> bool:
    return any(isinstance(leaf, Anchor) for leaf in leaves(node))


def _anchors(node: Node, pattern: str, where: str) -> list[tuple[bool, bool, tuple[Node, ...]]]:
    """The alternatives of a pattern: bound to the start, bound to the end, parts without anchors."""
    if not _has_anchor(node):
        return [(False, False, (node,))]
    match node:
        case Anchor(kind):
            return [(kind == "^", kind == "$", ())]
        case Alt(parts):
            return [found for part in parts for found in _anchors(part, pattern, where)]
        case Cat(parts):
            found: list[tuple[bool, bool, tuple[Node, ...]]] = [(False, False, ())]
            for part in parts:
                joined = []
                for starts, ends, body in found:
                    for starts2, ends2, body2 in _anchors(part, pattern, where):
                        if (starts2 and not _may_be_empty(body)) or (ends and not _may_be_empty(body2)):
                            continue  # text before ^ or after $: this alternative matches nothing
                        # what stands before ^ or after $ matches the empty text; a look-ahead still looks
                        before = _look_aheads(body, pattern, where) if starts2 else body
                        after = _look_aheads(body2, pattern, where) if ends else body2
                        both = (*before, *after)
                        joined.append((starts or starts2, ends or ends2, both))
                found = joined
                if len(found) > MAX_ANCHORED:
                    raise GrammarError(
                        f"regex {pattern!r}: anchors make more than {MAX_ANCHORED} alternatives", where=where
                    )
            return found
        case Rep(inner, low, high):
            if high == 0:
                return [(False, False, ())]
            if high == 1:
                some = _anchors(inner, pattern, where)
                return some if low else [*some, (False, False, ())]
            raise GrammarError(f"regex {pattern!r}: an anchor inside a repeated group is not supported", where=where)
    raise AssertionError(node)


def _look_aheads(parts: tuple[Node, ...], pattern: str, where: str) -> tuple[Node, ...]:
    """The parts that are look-aheads."""
    found = tuple(part for part in parts if isinstance(part, LookAhead))
    if len(found) < sum(_has_look_ahead(part) for part in parts):
        raise GrammarError(
            f"regex {pattern!r}: look-ahead in a group before '^' or after '$' is not supported", where=where
        )
    return found


def _may_be_empty(parts: tuple[Node, ...]) -> bool:
    def empty(node: Node) -> bool:
        match node:
            case Cat(inner):
                return all(empty(p) for p in inner)
            case Alt(inner):
                return any(empty(p) for p in inner)
            case Rep(inner, low, _):
                return low == 0 or empty(inner)
            case LookAhead():
                return True
        return False

    return all(empty(p) for p in parts)
