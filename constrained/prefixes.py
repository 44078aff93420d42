"""Prefixes of a language's texts, as far as the expression's own form shows them without a search."""

from .expressions import Expressions


def without_far_bounds(ex: Expressions, expr: int, length: int) -> int:
    """A language with fewer states, and with the same texts and prefixes of up to ``length`` bytes.

    Repeats whose upper bound is at least ``length`` lose the bound.
    """
    node = ex.nodes[expr]
    if node[0] == "rep" and node[2] == 0 and node[3] is not None and node[3] >= length:
        return ex.repeat(node[1], 0, None)
    if node[0] == "cat":
        first = without_far_bounds(ex, node[1], length)
        return expr if first == node[1] else ex.concat(first, node[2])
    if node[0] == "or":
        parts = [without_far_bounds(ex, p, length) for p in node[1:]]
        return expr if parts == list(node[1:]) else ex.union(*parts)
    return expr


def contains_all_texts_of(ex: Expressions, expr: int) -> int | None:
    """n if every text of at most n characters is a prefix of the language and n is known; else None.

    Known are: all texts, all texts but a list of words, and bounded runs of any character.
    """
    if expr == ex.text:
        return 1 << 30
    node = ex.nodes[expr]
    if node[0] == "and":
        others = [ex.nodes[p] for p in node[1:] if p != ex.text]
        is_all_but_some = all(n[0] == "not" and ex.words_of(n[1]) is not None for n in others)
        return 1 << 30 if is_all_but_some and len(others) < len(node) - 1 else None
    if node[0] == "rep" and node[1] == ex.any_char:
        return 1 << 30 if node[3] is None else node[3]
    if node[0] == "cat":
        return contains_all_texts_of(ex, node[1])
    if node[0] == "or":
        runs = [r for r in (contains_all_texts_of(ex, p) for p in node[1:]) if r is not None]
        return max(runs) if runs else None
    return None
