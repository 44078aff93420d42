"""How many texts a language has. Never lists them."""

from .expressions import NOTHING, Expressions


def num_texts(ex: Expressions, expr: int, most: int) -> int:
    """How many texts are in the language, up to ``most``."""
    total = 0
    level = {expr: 1} if ex.is_nonempty(expr) else {}  # what is left, and after how many beginnings
    while level:
        total += sum(count for rest, count in level.items() if ex.nullable[rest])
        following: dict[int, int] = {}
        for rest, count in level.items():
            for lo, hi in ex.classes(rest):
                byte = ex._available_in(lo, hi)
                to = ex.alive(ex.derive(rest, byte)) if byte >= 0 else NOTHING
                if to != NOTHING:
                    following[to] = min(most, following.get(to, 0) + count * ex.num_bytes_in(lo, hi))
        if total + sum(following.values()) >= most:
            return most  # each beginning has an end
        level = following
    return min(total, most)
