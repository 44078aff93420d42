"""How much a text that has begun may still need at most, and how much one token adds, told by the expression alone.

Whatever a text of ``[A-Z][a-z]{2,9}`` began with, three bytes at most complete it; of ``(, [A-Z][a-z]{2}){0,5}``, five.
A limit of tokens further away than that changes no mask. ``Expressions.spread`` has such a bound for masks, in
characters and for expressions without intersections; a limit needs bytes as they are written. After ``x`` a text of
``x([0-9]{20};)*`` may end, and one more byte makes it need 21: where fewer tokens are left, that byte is not allowed.
"""

from collections.abc import Callable
from typing import NamedTuple

from .expressions import NOTHING, Expressions

MAX_PARTS = 2_000  # of an expression
NO_END = 1 << 30  # as the number of characters of the longest text: there is none
LONG_ESCAPE = 12  # bytes of the longest escape in JSON, of a character beyond U+FFFF


class Rest(NamedTuple):
    """Upper bounds: of the bytes of the shortest text, of those that the beginning of any text still needs, of the
    characters of the longest text, of the bytes of one character, and of the bytes that one choice adds to those that
    the text needs. Such a choice begins a longer branch or one more round of a repeat."""

    least: int
    most: int
    longest: int
    widest: int
    added: int = 0


class Bounds(NamedTuple):
    """Three numbers of tokens. ``most``: what a text that has begun may still need at most; None where there is no such
    number, or it is not known. ``added``: what one token adds at most to what the text needs; 0 where that is not
    known. ``begun``: what a text may need after the token that begins it."""

    most: int | None
    added: int
    begun: int


NOT_KNOWN = Bounds(None, 0, 0)


class Needs:
    """The ``Bounds`` of one grammar, which are found when they are first asked for."""

    def __init__(self, find: Callable[[], Bounds]) -> None:
        self._find: Callable[[], Bounds] | None = find
        self._bounds = NOT_KNOWN

    @property
    def bounds(self) -> Bounds:
        find = self._find
        if find is not None:  # two threads may both find them, which are the same
            self._bounds = find()
            self._find = None
        return self._bounds


def bounds_of(rest: Rest | None) -> Bounds:
    """The bounds of an expression; each byte counts as a token."""
    return NOT_KNOWN if rest is None else Bounds(rest.most, rest.added, max(rest.least, rest.added))


def rest_of(ex: Expressions, expr: int, *, in_json: bool = False) -> Rest | None:
    """The rest of the texts of an expression; None where it is not known. ``in_json``: as they are written in a JSON
    string, without escapes that need not be.

    The beginning of a text of a union is one of either language, so it needs no more than there; of two languages one
    after the other, it needs the rest of the first and a text of the second, or the rest of the second. Of an
    intersection only the longest text is known.
    """
    known: dict[int, Rest | None] = {NOTHING: None}
    left = MAX_PARTS

    def part(expr: int) -> Rest | None:
        nonlocal left
        if expr not in known:
            left -= 1
            known[expr] = None if left < 0 else make(expr)
        return known[expr]

    def make(expr: int) -> Rest | None:
        node = ex.nodes[expr]
        match node[0]:
            case "empty":
                return Rest(0, 0, 0, 1)
            case "set":
                widths = _widths(node[1], in_json)
                return Rest(widths[0], widths[0], 1, widths[-1])
            case "chars":
                narrowest, widest = _utf8_len(node[2][0][0]), _utf8_len(node[2][-1][1])
                widths = sorted([*_widths(node[1], in_json), narrowest, widest])
                return Rest(widths[0], max(widths[0], widest - 1), 1, widths[-1])
            case "tail":
                return Rest(node[2], node[2], node[2], 1)
            case "word":
                return of_word(node[1])
            case "words":
                return _either([of_word(word) for word in node[1]])
            case "cat":
                return concatenated(expr)
            case "or":
                parts = [part(one) for one in node[1:]]
                return None if None in parts else _either([one for one in parts if one is not None])
            case "rep":
                return _repeated(part(node[1]), node[2], node[3])
            case "and":
                bounds = [one for one in map(part, node[1:]) if one is not None]
                longest = min((one.longest for one in bounds), default=NO_END)
                if longest < NO_END:
                    widest = min(one.widest for one in bounds)
                    added = max(one.added for one in bounds)
                    return Rest(longest * widest, longest * widest, longest, widest, added)
        return None

    def of_word(word: bytes) -> Rest:
        widths = [_width(byte) for byte in word] if in_json else [1] * len(word)
        return Rest(sum(widths), sum(widths), len(word), max(widths, default=1))

    def concatenated(expr: int) -> Rest | None:
        parts: list[int] = []
        while ex.nodes[expr][0] == "cat":
            _, first, expr = ex.nodes[expr]
            parts.append(first)
        whole = part(expr)
        for one in reversed(parts):
            before = part(one)
            if before is None or whole is None:
                return None
            whole = Rest(
                before.least + whole.least,
                max(before.most + whole.least, whole.most),
                min(before.longest + whole.longest, NO_END),
                max(before.widest, whole.widest),
                max(before.added, whole.added),
            )
        return whole

    return part(expr)


def _utf8_len(code_point: int) -> int:
    return 1 + (code_point >= 0x80) + (code_point >= 0x800) + (code_point >= 0x10000)


def _width(byte: int) -> int:
    """The bytes that write a byte in a JSON string."""
    return 6 if byte < 0x20 else 2 if byte in b'"\\' else 1


def _widths(bits: int, in_json: bool) -> list[int]:
    """The different widths of the bytes in a set, narrowest first."""
    if not in_json:
        return [1] if bits else []
    return sorted({_width(byte) for byte in range(256) if bits >> byte & 1})


def _either(parts: list[Rest]) -> Rest:
    return Rest(
        min(part.least for part in parts),
        max(part.most for part in parts),
        max(part.longest for part in parts),
        max(part.widest for part in parts),
        max(max(part.least, part.added) for part in parts),  # few tokens may spell the shortest one
    )


def _repeated(part: Rest | None, low: int, high: int | None) -> Rest | None:
    if part is None:
        return None
    longest = NO_END if high is None else min(high * part.longest, NO_END)
    added = part.added + (part.least if high is None or high > low else 0)
    return Rest(low * part.least, part.most + max(low - 1, 0) * part.least, longest, part.widest, added)
