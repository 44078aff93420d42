"""Host names, also internationalised ones (IDNA 2008: RFC 5890 to 5893), as regular languages of their Unicode form.

No automaton of a bearable size knows which labels that begin with ``xn--`` decode (RFC 3492) to one that is allowed:
they are left out. Lengths are not counted: each count would be a state.
"""

import functools
import unicodedata
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from ..code_points import HAN, Ranges, complement, intersection, union
from ..expressions import EMPTY, Expressions

# The blocks of the scripts in common use (Unicode Standard Annex 31, table 5): with all scripts a mask costs ten times.
COMMON: Ranges = (
    (0x80, 0x6FF), (0x750, 0x7BF), (0x900, 0x109F), (0x10D0, 0x10FF), (0x1200, 0x137F), (0x1780, 0x17FF),
    (0x1E00, 0x1FFF), (0x3005, 0x312F), (0x31F0, 0x31FF),
)  # fmt: skip
# Blocks of letters that are all valid; asking each would take a while.
PLAIN_BLOCKS: Ranges = ((0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0x20000, 0x2A6DF))

# RFC 5892, section 2.6
ALSO_VALID = (0xDF, 0x3C2, 0x6FD, 0x6FE, 0xF0B, 0x3007)
NEVER_VALID = ((0x640, 0x640), (0x302E, 0x302F), (0x3031, 0x3035), (0x303B, 0x303B))
IGNORABLE = ((0x34F, 0x34F), (0x17B4, 0x17B5))
VALID_CATEGORIES = frozenset(("Ll", "Lu", "Lo", "Nd", "Lm", "Mn", "Mc"))

KERAIA, KATAKANA_DOT, NON_JOINER, JOINER = 0x375, 0x30FB, 0x200C, 0x200D
GERESH: Ranges = ((0x5F3, 0x5F4),)
# Marks that may compose with the letter before them, which a normalised text (NFC) does not have: all are left out.
COMPOSING: Ranges = ((0x300, 0x345),)
DIGITS_TO_LEFT: Ranges = ((0x660, 0x669),)
DIGITS_TO_RIGHT: Ranges = ((0x6F0, 0x6F9),)  # numbers of Persian and Urdu
ASCII_DIGITS: Ranges = ((0x30, 0x39),)
GREEK: Ranges = (
    (0x370, 0x373), (0x375, 0x377), (0x37A, 0x37D), (0x37F, 0x37F), (0x384, 0x384), (0x386, 0x386), (0x388, 0x3E1),
    (0x3F0, 0x3FF), (0x1F00, 0x1FFE),
)  # fmt: skip
HEBREW: Ranges = ((0x591, 0x5F4), (0xFB1D, 0xFB4F))
KANA: Ranges = ((0x3041, 0x3096), (0x309D, 0x309F), (0x30A1, 0x30FA), (0x30FD, 0x30FF), (0x31F0, 0x31FF))
HYPHEN: Ranges = ((0x2D, 0x2D),)
LOWER: Ranges = ((0x2D, 0x2D), (0x30, 0x39), (0x61, 0x7A))
LDH: Ranges = union(LOWER, ((0x41, 0x5A),))
DOTS: Ranges = ((0x2E, 0x2E), (0x3002, 0x3002), (0xFF0E, 0xFF0E), (0xFF61, 0xFF61))


def host_name(ex: Expressions) -> int:
    """Labels of ASCII letters, digits and hyphens (RFC 1123), none of them encoded."""
    end, rest = _end_and_rest(ex)
    x, n = ((0x58, 0x58), (0x78, 0x78)), ((0x4E, 0x4E), (0x6E, 0x6E))
    no_x, no_n = ex.chars(_without(LDH, HYPHEN, x)), ex.chars(_without(LDH, HYPHEN, n))
    hyphen = ex.literal(b"-")
    after_xn = ex.union(EMPTY, ex.concat(ex.union(EMPTY, hyphen), end, rest))
    after_hyphen = _until(ex, end)
    after_x = ex.union(EMPTY, ex.concat(no_n, rest), ex.concat(ex.chars(n), after_xn), ex.concat(hyphen, after_hyphen))
    label = ex.union(ex.concat(no_x, rest), ex.concat(ex.chars(x), after_x))
    return _joined(ex, label, ex.literal(b"."))


def international_host_name(ex: Expressions) -> int:
    """Labels as they are before they are encoded, or of ASCII characters."""
    return _joined(ex, ex.union(_plain_label(ex), _unicode_label(ex)), ex.chars(DOTS))


def _joined(ex: Expressions, label: int, dot: int) -> int:
    return ex.concat(label, ex.repeat(ex.concat(dot, label), 0, None))


def _until(ex: Expressions, end: int) -> int:
    return ex.concat(ex.repeat(ex.chars(LDH), 0, None), end)


def _end_and_rest(ex: Expressions) -> tuple[int, int]:
    """The last character of a label of ASCII characters, and what may follow one that is no hyphen."""
    end = ex.chars(_without(LDH, HYPHEN))
    return end, ex.union(EMPTY, _until(ex, end))


def _plain_label(ex: Expressions) -> int:
    """ASCII characters of which the third and fourth are not both hyphens."""
    end, rest = _end_and_rest(ex)
    third = ex.concat(ex.chars(LDH), ex.union(EMPTY, ex.literal(b"-")), end, rest)
    return ex.concat(end, ex.union(EMPTY, end, third))


def _unicode_label(ex: Expressions) -> int:
    """RFC 5891, section 4.2, in one direction of writing (RFC 5893). ASCII letters are lower case, hyphens stand alone.

    A character that needs certain neighbours (RFC 5892, appendix A) is read with them.
    """
    known = _label_letters()

    def char(code: int) -> int:
        return ex.literal(chr(code).encode())

    def any_number(expr: int) -> int:
        return ex.repeat(expr, 0, None)

    def of(*sets: Ranges) -> int:
        return ex.chars(intersection(known.valid, union(*sets)))

    hyphen = ex.union(EMPTY, char(0x2D))
    virama = ex.concat(ex.chars(known.viramas), ex.union(EMPTY, ex.chars(((NON_JOINER, JOINER),))))
    marks = [ex.chars(_without(known.combining, known.viramas)), virama]

    japanese = union(KANA, HAN)
    special = union(HYPHEN, ((0x6C, 0x6C),), known.combining, known.to_left, japanese)
    dots = any_number(char(KATAKANA_DOT))
    firsts = [
        ex.chars(union(_without(known.valid, special), DIGITS_TO_RIGHT)),
        ex.concat(char(0x6C), any_number(ex.literal("·l".encode()))),
        ex.concat(of(japanese), dots),
        ex.concat(ex.repeat(char(KERAIA), 1, None), of(GREEK)),
    ]
    first = ex.union(*firsts, ex.concat(ex.repeat(char(KATAKANA_DOT), 1, None), of(japanese), dots))
    to_right = ex.concat(first, any_number(ex.concat(hyphen, ex.union(*firsts, *marks))))

    dual, join = ex.chars(known.dual), char(NON_JOINER)
    joined = ex.union(EMPTY, ex.concat(join, ex.chars(known.right)))
    letters = [
        ex.chars(_without(known.to_left, known.dual, HEBREW)),
        ex.concat(dual, any_number(ex.concat(join, dual)), joined),
        ex.concat(of(HEBREW), any_number(ex.chars(GERESH))),
    ]
    above = ex.chars(_without(known.combining, known.spacing))

    def run(*parts: int) -> int:
        """Parts with single hyphens between them, and marks, which no hyphen stands before."""
        return any_number(ex.union(ex.concat(hyphen, ex.union(*parts)), above))

    rests = []
    for some in (DIGITS_TO_LEFT, union(ASCII_DIGITS, DIGITS_TO_RIGHT)):  # not of both sets
        rests.append(ex.concat(hyphen, ex.chars(some), run(*letters, ex.chars(some))))
    inner = run(*letters)
    return ex.union(to_right, ex.concat(ex.union(*letters), inner, ex.union(EMPTY, *rests)))


# -- properties -------------------------------------------------------------------------------------------------------


class LabelLetters(NamedTuple):
    """Sets of code points. The first is the standard's ``PVALID``; the others are parts of it."""

    valid: Ranges
    combining: Ranges  # marks
    spacing: Ranges  # marks that take room, so that they have a direction
    to_left: Ranges  # letters of scripts that are written from right to left
    viramas: Ranges
    dual: Ranges  # letters that join to both sides
    right: Ranges  # letters that join to the one before


@functools.cache
def _label_letters() -> LabelLetters:
    """Computed from Python's Unicode tables: some 10 ms once, where an internationalised name is first asked for."""
    skipped = union(IGNORABLE, NEVER_VALID, DIGITS_TO_LEFT, DIGITS_TO_RIGHT, PLAIN_BLOCKS, COMPOSING)
    asked = _chars(intersection(complement(skipped), COMMON))
    categories = dict(zip(asked, map(unicodedata.category, asked), strict=True))
    letters = [char for char, category in categories.items() if category in VALID_CATEGORIES]
    valid = [*_stable(letters), *map(chr, ALSO_VALID)]
    marks = {char: category for char, category in categories.items() if category[0] == "M"}
    allowed = union(_ranges(valid), PLAIN_BLOCKS, LOWER)
    dual, right = _joining()
    return LabelLetters(
        allowed,
        _ranges(c for c in valid if c in marks),
        _ranges(c for c in valid if marks.get(c) == "Mc"),
        _ranges(c for c in valid if unicodedata.bidirectional(c) in ("R", "AL")),
        _ranges(c for c in valid if unicodedata.combining(c) == 9),
        intersection(allowed, dual),
        intersection(allowed, right),
    )


def _stable(chars: list[str]) -> list[str]:
    """Those that folding case and compatibility leaves as they are (RFC 5892, section 2.2)."""
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", "\n".join(chars)).casefold()).split("\n")
    return [char for char, after in zip(chars, folded, strict=True) if after == char]


def _joining() -> tuple[Ranges, Ranges]:
    """The Arabic letters that join to both sides, and those that join only to the one before.

    The presentation forms tell: the former have an initial form, the latter only a final one.
    """
    forms: dict[int, set[str]] = {}
    for code in (*range(0xFB50, 0xFDFE), *range(0xFE70, 0xFEFD)):
        form, *letters = unicodedata.decomposition(chr(code)).split() or [""]
        if len(letters) == 1:
            forms.setdefault(int(letters[0], 16), set()).add(form)
    dual = [code for code, found in forms.items() if "<initial>" in found]
    right = [code for code, found in forms.items() if "<final>" in found and "<initial>" not in found]
    return _ranges(map(chr, dual)), _ranges(map(chr, right))


def _ranges(chars: Iterable[str]) -> Ranges:
    codes = np.unique([*map(ord, chars)])
    is_first = np.diff(codes, prepend=-2) > 1
    return tuple(zip(codes[is_first].tolist(), codes[np.roll(is_first, -1)].tolist(), strict=True))


def _chars(*sets: Ranges) -> list[str]:
    return [chr(code) for ranges in sets for lo, hi in ranges for code in range(lo, hi + 1)]


def _without(ranges: Ranges, *others: Ranges) -> Ranges:
    return intersection(ranges, complement(union(*others)))
