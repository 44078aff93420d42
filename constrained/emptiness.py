"""Whether a language has any text where intersections and complements are part of it. Made of derivatives alone."""

from typing import TYPE_CHECKING

from .spec import GrammarTooComplex

if TYPE_CHECKING:
    from .expressions import Expressions

NOTHING = 0  # as in ``expressions``, which imports this


def has_text(ex: "Expressions", expr: int, known: dict[int, bool], fuel: int) -> bool:
    """By a search of at most ``fuel`` states; what it learns of them is kept in ``known``."""
    found = known.get(expr)
    if found is not None:
        return found
    parents: dict[int, int] = {expr: expr}
    queue = [expr]
    for at in queue:
        if known.get(at) or ex.nullable[at] or ex.is_plain[at]:
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


def can_reach_multiple(ex: "Expressions", expr: int) -> bool:
    """Whether free digits follow that can complete a multiple: arithmetic where a search would try them all."""
    node = ex.nodes[expr]
    if node[0] != "and" or len(node) != 3:
        return False
    first, second = node[1], node[2]
    if ex.nodes[first][0] != "multiple":
        first, second = second, first
    if ex.nodes[first][0] != "multiple" or not ex.nullable[second]:
        return False
    if any(ex.derive(second, digit) != second for digit in range(0x30, 0x3A)):
        return False
    _, modulus, scale, remainder, fraction = ex.nodes[first]
    if fraction < 0:
        return True
    room = 10 ** (scale - fraction)
    return -remainder * room % modulus < room
