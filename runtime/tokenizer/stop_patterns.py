"""Regular expressions that end a text: whether one matches here, and how much of the text a match may still cover.

    text:  [cannot be part of a match | may begin one: held back]

The scan keeps one derivative of the pattern for each place where a match may have begun; of equal derivatives, the one
with the earliest place. Each character is read once and costs one step for each derivative kept.
J. Brzozowski: Derivatives of regular expressions, 1964.
"""

from __future__ import annotations

from ...constrained.expressions import NOTHING, Expressions
from ...constrained.regex_syntax import compile_regex, has_anchor
from ...constrained.spec import GrammarError

MAX_EXPRESSIONS = 20_000


class StopPattern:
    """One compiled pattern, shared by the texts of one thread. Raises GrammarError where it cannot end a text."""

    __slots__ = ("expressions", "pattern", "root")

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.expressions = Expressions(max_expressions=MAX_EXPRESSIONS)
        self.root = compile_regex(pattern, self.expressions, anchored=True)
        if has_anchor(pattern):
            raise GrammarError(f"{pattern!r} holds ^ or $, which mean nothing in a growing text; leave them out")
        if self.expressions.nullable[self.root]:
            raise GrammarError(f"{pattern!r} matches the empty text, so nothing would be generated")
        if not self.expressions.is_nonempty(self.root):
            raise GrammarError(f"{pattern!r} matches no text")


class StopScan:
    """Follows several patterns through one text. ``held``: characters at the end that a match may still cover."""

    __slots__ = ("_num_chars", "_open", "_patterns", "held")

    def __init__(self, patterns: tuple[StopPattern, ...]) -> None:
        self._patterns = patterns
        self._open: list[dict[int, int]] = [{} for _ in patterns]  # derivative -> where its match began
        self._num_chars = 0
        self.held = 0

    def step(self, char: str) -> tuple[int, str]:
        """Takes a character; returns the length and pattern of the longest match that ends with it, or (0, "")."""
        place, data = self._num_chars, char.encode("utf-8", errors="replace")
        self._num_chars += 1
        first, longest, found = self._num_chars, 0, ""
        for i, pattern in enumerate(self._patterns):
            expressions, before = pattern.expressions, self._open[i]
            after: dict[int, int] = {}
            before.setdefault(pattern.root, place)
            for expr, start in before.items():
                for byte in data:
                    expr = expressions.derive(expr, byte)
                    if expr == NOTHING:
                        break
                else:
                    if expressions.alive(expr) == NOTHING:
                        continue
                    if start < after.get(expr, self._num_chars):
                        after[expr] = start
                    first = min(first, start)
                    if expressions.nullable[expr] and self._num_chars - start > longest:
                        longest, found = self._num_chars - start, pattern.pattern
            self._open[i] = after
        self.held = self._num_chars - first
        return longest, found
