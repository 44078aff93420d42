"""Sets of Unicode code points as sorted ranges, and the named sets that regexes use."""

import functools
import unicodedata
from bisect import bisect_left
from collections.abc import Iterable

Ranges = tuple[tuple[int, int], ...]  # sorted, disjoint, not touching; ends inclusive

LAST = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)


def union(*sets: Iterable[tuple[int, int]]) -> Ranges:
    merged: list[list[int]] = []
    for lo, hi in sorted(pair for ranges in sets for pair in ranges):
        if merged and lo <= merged[-1][1] + 1:
            merged[-1][1] = max(merged[-1][1], hi)
        else:
            merged.append([lo, hi])
    return tuple((lo, hi) for lo, hi in merged)


def complement(ranges: Ranges) -> Ranges:
    """Every code point outside the ranges, but surrogates: UTF-8 has no bytes for them."""
    gaps, at = [], 0
    for lo, hi in union(ranges, (SURROGATES,)):
        if lo > at:
            gaps.append((at, lo - 1))
        at = hi + 1
    if at <= LAST:
        gaps.append((at, LAST))
    return tuple(gaps)


def intersection(left: Ranges, right: Ranges) -> Ranges:
    out, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        (a, b), (c, d) = left[i], right[j]
        if b < c:
            i += 1
        elif d < a:
            j += 1
        else:
            out.append((a if a > c else c, b if b < d else d))
            if b < d:
                i += 1
            else:
                j += 1
    return tuple(out)


def clip(ranges: Ranges, low: int, high: int) -> Ranges:
    """The part of the set from ``low`` to ``high``, both inclusive. Costs a bisection and the part's length."""
    first = bisect_left(ranges, (low,))
    if first and ranges[first - 1][1] >= low:
        first -= 1
    last = bisect_left(ranges, (high + 1,), first)
    part = ranges[first:last]
    if part and part[0][0] < low:
        part = ((low, part[0][1]), *part[1:])
    if part and part[-1][1] > high:
        part = (*part[:-1], (part[-1][0], high))
    return part


def without_surrogates(ranges: Ranges) -> Ranges:
    return intersection(union(ranges), ((0, SURROGATES[0] - 1), (SURROGATES[1] + 1, LAST)))


ANY: Ranges = complement(())
DIGITS: Ranges = ((0x30, 0x39),)
WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
SPACES: Ranges = union(
    ((9, 13), (32, 32), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A)),
    ((0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
)

LONG_NAMES = {
    "letter": "L", "lowercase_letter": "Ll", "uppercase_letter": "Lu", "titlecase_letter": "Lt", "cased_letter": "LC",
    "modifier_letter": "Lm", "other_letter": "Lo", "mark": "M", "nonspacing_mark": "Mn", "spacing_mark": "Mc",
    "enclosing_mark": "Me", "number": "N", "decimal_number": "Nd", "digit": "Nd", "letter_number": "Nl",
    "other_number": "No", "punctuation": "P", "punct": "P", "connector_punctuation": "Pc", "dash_punctuation": "Pd",
    "open_punctuation": "Ps", "close_punctuation": "Pe", "initial_punctuation": "Pi", "final_punctuation": "Pf",
    "other_punctuation": "Po", "symbol": "S", "math_symbol": "Sm", "currency_symbol": "Sc", "modifier_symbol": "Sk",
    "other_symbol": "So", "separator": "Z", "space_separator": "Zs", "line_separator": "Zl",
    "paragraph_separator": "Zp", "other": "C", "control": "Cc", "format": "Cf", "private_use": "Co", "unassigned": "Cn",
}  # fmt: skip


@functools.cache
def _categories() -> dict[str, Ranges]:
    found: dict[str, list[tuple[int, int]]] = {}
    start, current = 0, unicodedata.category("\0")
    for code in range(1, LAST + 2):
        category = unicodedata.category(chr(code)) if code <= LAST else ""
        if category != current:
            found.setdefault(current, []).append((start, code - 1))
            start, current = code, category
    found.pop("Cs", None)
    return {name: tuple(ranges) for name, ranges in found.items()}


# `\p{Script=...}` takes a script's characters by the first word of their Unicode names, without a table of scripts.
HAN: Ranges = ((0x2E80, 0x2FD5), (0x3005, 0x3007), (0x3021, 0x3029), (0x3400, 0x4DBF), (0x4E00, 0x9FFF),
                (0xF900, 0xFAFF), (0x20000, 0x323AF))  # fmt: skip
SCRIPTS = ("latin", "greek", "cyrillic", "arabic", "hebrew", "thai", "hangul", "hiragana", "katakana", "devanagari")


@functools.cache
def unicode_class(name: str) -> Ranges | None:
    """The set ``\\p{name}`` stands for: a general category, short or long, or a common script; None if unknown."""
    key = name.split("=")[-1].strip().replace(" ", "_")
    low = key.lower()
    if low in ("any",):
        return ANY
    if low in ("ascii",):
        return ((0, 0x7F),)
    short = LONG_NAMES.get(low, key)
    if short == "LC":
        names = ["Lu", "Ll", "Lt"]
    else:
        names = [c for c in _categories() if c == short or (len(short) == 1 and c.startswith(short))]
    if names:
        return union(*(_categories()[c] for c in names))
    if low in ("alphabetic", "alpha"):
        return union(*(ranges for c, ranges in _categories().items() if c[0] == "L" or c == "Nl"))
    if low in ("han", "hani", "ideographic"):
        return HAN
    if low in SCRIPTS:
        prefix = low.upper() + " "
        return union(
            [
                (c, c)
                for c in range(0x10000)
                if not 0xD800 <= c <= 0xDFFF and unicodedata.name(chr(c), "").startswith(prefix)
            ]
        )
    return None


@functools.cache
def _alike() -> dict[int, tuple[int, ...]]:
    """The letters that share their upper case with two or more, as sigma and final sigma do: each with all of them."""
    by_upper: dict[str, list[int]] = {}
    for code in range(0x80, 0x1E944):  # the last cased letter is U+1E943
        by_upper.setdefault(chr(code).upper(), []).append(code)
    return {
        code: tuple(group) for upper, group in by_upper.items() if len(upper) == 1 and len(group) > 2 for code in group
    }


def fold_case(ranges: Ranges) -> Ranges:
    """The set and every other case of its letters (simple folding); ranges of over 5,000 stay as is."""
    extra = []
    for lo, hi in ranges:
        if hi - lo > 5000:
            continue
        for code in range(lo, hi + 1):
            others = [ord(other) for other in (chr(code).lower(), chr(code).upper()) if len(other) == 1]
            if code >= 0x80:
                others += _alike().get(code, ())
            extra += [(other, other) for other in others]
    return union(ranges, extra)
