"""How far one token can lead a text away from its shortest ending, told by the expression alone.

A text under way needs some bytes to end. Whatever follows next, it then needs at most ``growth`` bytes more:

    [a-z]{3}                0    each letter brings the end nearer
    x(long|s)               4    after "x" one byte is enough; the other way to end has four
    (, [A-Z][a-z]{2}){0,5}  5    an optional part that has begun has to be completed
"""

from typing import NamedTuple

from .expressions import EMPTY, FULL, NOTHING, Expressions

MAX_PARTS = 2_000  # of an expression
CONTINUATION = 3  # bytes that complete a character


class _Part(NamedTuple):
    """``least``: bytes of the shortest text. ``first``: the bytes that begin one. ``last``: those that may follow where
    a text could end.
    """

    least: int
    growth: int
    first: int
    last: int


_EMPTY = _Part(0, 0, 0, 0)


def growth_of(ex: Expressions, expr: int) -> int | None:
    """The growth; None where it is not known.

    It is known where each byte of a text belongs to one part of the expression only: no byte both goes on with a part
    and begins the next one. Otherwise a byte may drop the reading of a text that has the short ending.
    """
    known: dict[int, _Part | None] = {}
    left = MAX_PARTS

    def part_of(expr: int) -> _Part | None:
        nonlocal left
        if expr not in known:
            left -= 1
            known[expr] = None if left < 0 else make(expr)
        return known[expr]

    def make(expr: int) -> _Part | None:
        node = ex.nodes[expr]
        match node[0]:
            case "empty":
                return _EMPTY
            case "set":
                return _Part(1, 0, node[1], 0)
            case "chars":
                return _Part(1 if node[1] else 2, CONTINUATION, node[1] | FULL & ~((1 << 0xC0) - 1), 0)
            case "word":
                return _Part(len(node[1]), 0, 1 << node[1][0], 0)
            case "words":
                return _of_words(node[1])
            case "cat":
                return concatenated(expr)
            case "or":
                return _united([part_of(one) for one in node[1:]], [ex.nullable[one] for one in node[1:]])
            case "rep":
                return _repeated(part_of(node[1]), node[2], node[3], is_nullable=ex.nullable[node[1]])
        return None

    def concatenated(expr: int) -> _Part | None:
        parts: list[int] = []
        while ex.nodes[expr][0] == "cat":
            _, left_part, expr = ex.nodes[expr]
            parts.append(left_part)
        whole, is_nullable = part_of(expr), ex.nullable[expr]
        for one in reversed(parts):
            part = part_of(one)
            if part is None or whole is None or part.last & whole.first:
                return None
            whole = _Part(
                part.least + whole.least,
                max(part.growth, whole.growth),
                part.first | (whole.first if ex.nullable[one] else 0),
                whole.last | (part.last | whole.first if is_nullable else 0),
            )
            is_nullable = is_nullable and ex.nullable[one]
        return whole

    return None if (found := part_of(expr)) is None or expr in (NOTHING, EMPTY) else found.growth


def _of_words(words: tuple[bytes, ...]) -> _Part:
    first = 0
    for word in words:
        first |= 1 << word[0] if word else 0
    begins_another = any(words[i + 1].startswith(words[i]) for i in range(len(words) - 1))
    return _Part(min(map(len, words)), max(map(len, words)), first, FULL if begins_another else 0)


def _united(parts: list[_Part | None], nullable: list[bool]) -> _Part | None:
    first = last = growth = 0
    least = 1 << 60
    for part in parts:
        if part is None or part.first & first:
            return None
        first |= part.first
        last |= part.last
        least = min(least, part.least)
        growth = max(growth, part.least + part.growth)
    return _Part(least, growth, first, last | (first if any(nullable) else 0))


def _repeated(part: _Part | None, low: int, high: int | None, *, is_nullable: bool) -> _Part | None:
    if part is None or is_nullable or (high != 1 and part.last & part.first):
        return None
    if high == low:
        return _Part(low * part.least, part.growth, part.first, part.last)
    return _Part(low * part.least, part.least + part.growth, part.first, part.last | part.first)
