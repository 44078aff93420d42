"""Languages with fewer states that allow the same tokens, or surely no more, or surely no fewer."""

from collections.abc import Iterator

import numpy as np

from .expressions import Expressions
from .native_code import native
from .vocabulary import Vocabulary

SMALL_COUNTS = (2, 8)  # bounds of repeats that stand in for larger ones, tried in this order


class TokenReach:
    """What one vocabulary's tokens can tell apart in the languages of one store.

    A token is an extension of a text: a language allows it if some text of the language begins with both. Only tokens
    of at most ``most_bytes`` count.
    """

    def __init__(self, ex: Expressions, vocabulary: Vocabulary, *, most_bytes: int = 1 << 30) -> None:
        self.ex = ex
        self._vocabulary = vocabulary
        self._most_bytes = most_bytes
        self._runs: dict[int, int] = {}
        self._near: dict[tuple[int, bool], int] = {}
        self._most: dict[int, int] = {}
        self._bounded: dict[tuple[int, int, bool], int] = {}
        self._run(ex.any_char)  # loads the compiled function

    def without_far_bounds(self, expr: int, *, is_counted: bool = False) -> int:
        """A language that allows the same tokens, and accepts the empty text if ``expr`` does.

        A bound of a repeated character that no token reaches is dropped, or lowered where texts have to reach it.
        ``is_counted``: lower bounds stay, so that shortest texts have the same number of characters.
        """
        key = (expr, is_counted)
        found = self._near.get(key)
        if found is None:
            found = self._near[key] = self._without_far_bounds(expr, is_counted)
        return found

    def observed(self, expr: int) -> int:
        """A language with the same texts as ``expr`` among those of at most a token's length."""
        ex = self.ex
        node = ex.nodes[expr]
        match node[0]:
            case "and":
                return ex.intersect(*map(self.observed, node[1:]))
            case "or" if len(node) > 1:
                return ex.union(*map(self.observed, node[1:]))
            case "not":
                return ex.complement(self.observed(node[1]))
        return self.without_far_bounds(expr)

    def near_and_owed(self, expr: int) -> tuple[int, int]:
        """As ``without_far_bounds``, with lower bounds lowered where every text has to pass them; by so many
        characters, the second number, the shortest text after each token is longer than it seems."""
        ex = self.ex
        node = ex.nodes[expr]
        if node[0] == "cat":
            (first, owed), (rest, more) = map(self.near_and_owed, node[1:])
            return (expr if (first, rest) == node[1:] else ex.concat(first, rest)), owed + more
        if node[0] == "rep":
            _, inner, low, _ = node
            if self._is_set(inner) and low > 1 and low > (run := self._run(inner)) + 1:
                return ex.repeat(inner, run + 1, None), low - run - 1
        return self.without_far_bounds(expr, is_counted=True), 0

    def _without_far_bounds(self, expr: int, is_counted: bool) -> int:
        ex = self.ex
        node = ex.nodes[expr]
        match node[0]:
            case "rep":
                _, inner, low, high = node
                if not self._is_set(inner):
                    return ex.repeat(self.without_far_bounds(inner, is_counted=is_counted), low, high)
                if low <= 1 and high is None:
                    return expr
                run = self._run(inner)
                least = low if is_counted else min(low, run + 1)
                return ex.repeat(inner, least, None if high is None or high > run else high)
            case "cat":
                first, rest = (self.without_far_bounds(p, is_counted=is_counted) for p in node[1:])
                return expr if (first, rest) == node[1:] else ex.concat(first, rest)
            case "or" if len(node) > 1:
                parts = [self.without_far_bounds(p, is_counted=is_counted) for p in node[1:]]
                return expr if parts == list(node[1:]) else ex.union(*parts)
        return expr  # what languages have in common may differ where each of them looks the same

    def _is_set(self, inner: int) -> bool:
        """Whether the expression is one character out of a set."""
        return self.ex.nodes[inner][0] in ("set", "chars")

    def _run(self, inner: int) -> int:
        """How many characters of the set ``inner`` a token may spell at most."""
        node = self.ex.nodes[inner]
        found = self._runs.get(inner)
        if found is None:
            low, is_wide = node[1], node[0] == "chars"
            longest = self._vocabulary.shared(("run", low, is_wide), lambda: self._longest_run(low, is_wide))
            found = self._runs[inner] = min(longest, self._most_bytes)
        return found

    def _longest_run(self, low: int, is_wide: bool) -> int:
        has = np.array([low >> b & 1 for b in range(256)], bool)
        has[0x80:] |= is_wide
        return int(longest_run(self._vocabulary.token_bytes, self._vocabulary.token_offsets, has))

    # -- bounds of repeats ------------------------------------------------------------------------------------------

    def has_large_counts(self, exprs: tuple[int, ...]) -> bool:
        """Whether there are stand-ins."""
        return max(map(self.largest_count, exprs)) > SMALL_COUNTS[0]

    def stand_ins(self, exprs: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
        """(lower, upper, owed): languages with few states for each language, the simplest first.

        The lower one allows no token that ``expr`` does not allow, the upper one every token that it does, and
        so do the languages of what follows a token. So where both allow the same, that is what ``expr`` allows, however
        large its counts are. After each token the shortest text of the first of ``exprs`` has ``owed`` characters more
        than it has in either.
        """
        largest = max(map(self.largest_count, exprs))
        for most in SMALL_COUNTS:
            if largest <= most:
                return
            below, owed = self._bounded_and_owed(exprs[0], most, False)
            above, _ = self._bounded_and_owed(exprs[0], most, True)
            lower, upper = (tuple([self._bounded_by(e, most, upper) for e in exprs[1:]]) for upper in (False, True))
            yield (below, *lower), (above, *upper), owed

    def _bounded_and_owed(self, expr: int, most: int, upper: bool) -> tuple[int, int]:
        """``_bounded_by``; what every text has to pass is not in the language but counted: the second number."""
        ex = self.ex
        node = ex.nodes[expr]
        if node[0] == "cat":
            (first, owed), (rest, more) = (self._bounded_and_owed(p, most, upper) for p in node[1:])
            return ex.concat(first, rest), owed + more
        if node[0] == "rep" and node[2] > most and not self._is_set(node[1]):
            inner = self._bounded_by(node[1], most, upper)
            rest = ex.repeat(inner, 0, None) if upper else ex.endless
            return ex.concat(ex.repeat(inner, most, most), rest), (node[2] - most) * (ex.shortest(inner) or 0)
        return self._bounded_by(expr, most, upper), 0

    def largest_count(self, expr: int) -> int:
        """The largest finite bound of a repeat of more than one character."""
        found = self._most.get(expr)
        if found is None:
            node = self.ex.nodes[expr]
            found = 0
            match node[0]:
                case "rep":
                    found = self.largest_count(node[1])
                    if not self._is_set(node[1]):
                        found = max(found, node[2], node[3] or 0)
                case "cat" | "or":
                    found = max(self.largest_count(p) for p in node[1:]) if len(node) > 1 else 0
            self._most[expr] = found
        return found

    def _bounded_by(self, expr: int, most: int, upper: bool) -> int:
        key = (expr, most, upper)
        found = self._bounded.get(key)
        if found is None:
            found = self._bounded[key] = expr if self.largest_count(expr) <= most else self._bound(expr, most, upper)
        return found

    def _bound(self, expr: int, most: int, upper: bool) -> int:
        ex = self.ex
        node = ex.nodes[expr]
        if node[0] == "cat":
            return ex.concat(*[self._bounded_by(p, most, upper) for p in node[1:]])
        if node[0] == "or":
            return ex.union(*[self._bounded_by(p, most, upper) for p in node[1:]])
        _, inner, low, high = node
        is_set = self._is_set(inner)
        inner = self._bounded_by(inner, most, upper)
        if is_set:
            return ex.repeat(inner, low, high)
        more = None if high is None or high > most else high
        if low > most:  # the repeats left out count as characters of the shortest text
            owed = (low - most) * (ex.shortest(inner) or 0)
            rest = ex.owing(owed, ex.repeat(inner, 0, more)) if upper else ex.concat(ex.padding(owed), ex.endless)
            return ex.concat(ex.repeat(inner, most, most), rest)
        return ex.repeat(inner, low, more if upper or high is None else min(high, most))


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


@native
def longest_run(token_bytes, offsets, has):
    """The longest run of bytes of the set ``has`` [256] in one token.

    All bytes of a token with a backslash count: JSON may spell any character with it.
    """
    longest = 0
    for token in range(len(offsets) - 2, -1, -1):  # the longer ones are mostly last
        if offsets[token + 1] - offsets[token] <= longest:
            continue
        run = 0
        has_backslash = False
        for at in range(offsets[token], offsets[token + 1]):
            run = run + 1 if has[token_bytes[at]] else 0
            has_backslash = has_backslash or token_bytes[at] == 0x5C
            longest = max(longest, run)
        if has_backslash:
            longest = max(longest, offsets[token + 1] - offsets[token])
    return longest
