"""Whether a language has any text where intersections and complements are part of it. Made of derivatives alone."""

from math import gcd
from typing import TYPE_CHECKING

from .spec import GrammarTooComplex

if TYPE_CHECKING:
    from .expressions import Expressions

NOTHING = 0  # as in ``expressions``, which imports this
MAX_FREE_DIGITS = 400


def has_text(ex: "Expressions", expr: int, known: dict[int, bool], fuel: int) -> bool:
    """By a search of at most ``fuel`` states; what it learns of them is kept in ``known``."""
    found = known.get(expr)
    if found is not None:
        return found
    parents: dict[int, int] = {expr: expr}
    queue = [expr]
    for at in queue:
        reachable = can_reach_multiple(ex, at)
        if known.get(at) or ex.nullable[at] or ex.is_plain[at] or reachable:
            while True:  # every state on the way here is alive
                known[at] = True
                if parents[at] == at:
                    return True
                at = parents[at]
        if len(queue) > fuel:
            raise GrammarTooComplex(
                f"an intersection of regular expressions has more than {fuel:,} states; a pattern that guesses "
                "how far its end is ((a|b)*a(a|b){18}) doubles them with each character"
            )
        if reachable is False:
            continue
        for lo, hi in ex.classes(at):
            byte = ex._available_in(lo, hi)
            if byte < 0:
                continue
            to = ex.derive(at, byte)
            if to != NOTHING and to not in parents and known.get(to) is not False:
                parents[to] = at
                queue.append(to)
    for at in queue:
        known[at] = False
    return False


def can_reach_multiple(ex: "Expressions", expr: int) -> bool | None:
    """Whether free digits follow that can complete a multiple: arithmetic where a search would try them all.

    None where it is not as simple as that.
    """
    node = ex.nodes[expr]
    multiples = [part for part in node[1:] if ex.nodes[part][0] == "multiple"] if node[0] == "and" else []
    if len(multiples) != 1:
        return None
    _, modulus, scale, remainder, fraction = ex.nodes[multiples[0]]
    others = [part for part in node[1:] if part != multiples[0]]
    has_fraction = False  # which arithmetic does not follow
    for count in range(MAX_FREE_DIGITS):
        behind_point = [ex.derive(part, 0x2E) for part in others]
        has_fraction = has_fraction or _goes_on(ex, behind_point, 1)
        if all(ex.nullable[part] for part in others):  # an end after any ``count`` digits
            places = scale - max(fraction, 0) - (count if fraction >= 0 else 0)
            if places < 0:
                return None
            step = modulus // gcd(modulus, 10**places)
            if -remainder * 10**count % step < 10**count:
                return True
            if not has_fraction and not _goes_on(ex, others, 0):
                return False
        elif NOTHING not in behind_point:
            return None
        after = [_after_any_digit(ex, part) for part in others]
        if NOTHING in after or (after == others and not all(ex.nullable[part] for part in others)):
            return None
        others = after
    return None


def _after_any_digit(ex: "Expressions", expr: int) -> int:
    """What follows a digit if it is the same after each; NOTHING if not."""
    after = {ex.derive(expr, digit) for digit in range(0x30, 0x3A)}
    return after.pop() if len(after) == 1 else NOTHING


def _goes_on(ex: "Expressions", exprs: list[int], least: int) -> bool:
    """Whether all of them can go on with the same digit, of those from ``least``."""
    return any(NOTHING not in [ex.derive(expr, 0x30 + digit) for expr in exprs] for digit in range(least, 10))
