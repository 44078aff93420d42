"""Grammars as values: texts and patterns that combine with ``+`` and ``|`` and can be captured under a name.

    number = regex("[0-9]+").capture("n")
    s += gen("line", "total: " + number + (" " + one_of("USD", "EUR").capture("unit")).optional())

A composed grammar is one regular expression, so it runs in one generation; captures are read from its result.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..constrained.spec import GrammarSpec
from ..protocol.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Grammar:
    """A set of texts. ``pattern`` has a group ``(?P<name>...)`` for every capture."""

    pattern: str
    names: tuple[str, ...] = ()

    def __add__(self, other: Grammar | str) -> Grammar:
        right = _grammar(other)
        return NotImplemented if right is None else _join(self, right, "")

    def __radd__(self, other: Grammar | str) -> Grammar:
        left = _grammar(other)
        return NotImplemented if left is None else _join(left, self, "")

    def __or__(self, other: Grammar | str) -> Grammar:
        right = _grammar(other)
        return NotImplemented if right is None else _join(self, right, "|")

    def __ror__(self, other: Grammar | str) -> Grammar:
        left = _grammar(other)
        return NotImplemented if left is None else _join(left, self, "|")

    def many(self, least: int = 0, most: int | None = None, *, sep: Grammar | str = "") -> Grammar:
        """This grammar repeated ``least`` to ``most`` times, with ``sep`` between."""
        if least < 0 or (most is not None and most < max(least, 1)):
            raise InvalidRequest(f"many({least}, {most}): must be 0 <= least <= most, and most 1 or more")
        between = _grammar(sep)
        assert between is not None
        if self.names:
            raise InvalidRequest(
                f"capture {self.names[0]!r} is inside many(), where it would hold the last match alone; "
                "capture the whole repetition and split its text"
            )
        if between.pattern in ("", "(?:)"):
            return Grammar(f"(?:{self.pattern}){_times(least, most)}")
        rest = f"(?:{between.pattern}{self.pattern}){_times(max(least - 1, 0), None if most is None else most - 1)}"
        whole = f"(?:{self.pattern}{rest})"
        return Grammar(whole if least else whole + "?")

    def optional(self) -> Grammar:
        """This grammar or the empty text, for which its captures are None."""
        return Grammar(f"(?:{self.pattern})?", self.names)

    def capture(self, name: str) -> Grammar:
        """``s[name]`` will be the text of this part."""
        if not name.isidentifier():
            raise InvalidRequest(f"capture({name!r}): must be a Python name")
        if name in self.names:
            raise InvalidRequest(f"capture({name!r}) is used twice; every capture has a name of its own")
        return Grammar(f"(?P<{name}>{self.pattern})", (name, *self.names))

    def spec(self) -> GrammarSpec:
        return GrammarSpec("regex", re.sub(r"\(\?P<\w+>", "(?:", self.pattern))

    def captures(self, text: str) -> dict[str, str | None]:
        """Name to text of every capture in a generated text; None for a part that the text does not have."""
        match = re.fullmatch(self.pattern, text, re.DOTALL)
        return dict.fromkeys(self.names) if match is None else match.groupdict()

    def __iter__(self) -> Iterator[Any]:
        raise InvalidRequest("a grammar is not a list; put it into gen(name, grammar)")


def _join(left: Grammar, right: Grammar, operator: str) -> Grammar:
    twice = set(left.names) & set(right.names)
    if twice:
        raise InvalidRequest(f"capture {min(twice)!r} is used twice; every capture has a name of its own")
    names = (*left.names, *right.names)
    if operator == "|":
        return Grammar(f"(?:{left.pattern}|{right.pattern})", names)
    return Grammar(left.pattern + right.pattern, names)


def _times(least: int, most: int | None) -> str:
    if most is None:
        return {0: "*", 1: "+"}.get(least, f"{{{least},}}")
    return f"{{{least},{most}}}"


def _grammar(value: Grammar | str) -> Grammar | None:
    if isinstance(value, Grammar):
        return value
    return Grammar(_quoted(value)) if isinstance(value, str) else None


def _quoted(text: str) -> str:
    """``text`` as a pattern, escaping only what both Python's and the runtime's dialect know."""
    return "".join("\\" + char if char in r"\.^$*+?{}[]()|/-" and char not in "/-" else _plain(char) for char in text)


def _plain(char: str) -> str:
    return {"\n": r"\n", "\t": r"\t", "\r": r"\r"}.get(char, char)


def text(value: str) -> Grammar:
    """Exactly ``value``."""
    return Grammar(_quoted(value))


def regex(pattern: str) -> Grammar:
    """Every text that ``pattern`` matches as a whole. Its named groups are captures."""
    compiled = re.compile(pattern)
    return Grammar(f"(?:{pattern})", tuple(compiled.groupindex))


def one_of(*values: Grammar | str) -> Grammar:
    """Any one of several texts or grammars."""
    if not values:
        raise InvalidRequest("one_of() needs one choice or more")
    whole, *rest = [_grammar(value) for value in values]
    assert whole is not None
    for item in rest:
        assert item is not None
        whole = whole | item
    return Grammar(f"(?:{whole.pattern})", whole.names)


def integer() -> Grammar:
    """An integer of up to 18 digits, with or without a minus sign."""
    return Grammar("-?(?:0|[1-9][0-9]{0,17})")


def number() -> Grammar:
    """A decimal number with or without a minus sign and a fraction."""
    return Grammar(r"-?(?:0|[1-9][0-9]{0,17})(?:\.[0-9]{1,12})?")


def words(least: int = 1, most: int | None = None) -> Grammar:
    """``least`` to ``most`` words with one blank between."""
    return Grammar(r"[^\s]+").many(least, most, sep=" ")
