"""What the parser of a context-free grammar offers to the machine: Earley sets, and states made of them."""

from collections.abc import Callable, Iterable
from typing import Protocol

Lexer = tuple[tuple[int, int], ...]  # (lexeme, the expression left of it), sorted


class Sets(Protocol):
    """The Earley sets of one parser, by number."""

    def after(self, number: int, lexeme: int) -> int:
        """The set that follows set ``number`` once ``lexeme`` has ended."""
        ...

    def lexer(self, number: int) -> Lexer:
        """The lexemes that may follow."""
        ...

    def came_from(self, number: int) -> Iterable[int]:
        """The sets in which the unfinished rules of this set began; all have lower numbers."""
        ...

    def looked_up(self, number: int) -> frozenset[int]:
        """The sets that were read while this set was completed."""
        ...

    def shape(self, number: int, depth: int) -> int:
        """Equal for sets that differ only in sets more than ``depth`` steps of ``came_from`` away."""
        ...


class LazyState(Protocol):
    """A state of a context-free grammar: parser sets with lexemes under way. Its row is made byte by byte."""

    def step(self, byte: int) -> tuple[int, int, int]:
        """The range [low, high) of bytes that act like ``byte``, and their code."""
        ...

    def accepts(self) -> bool:
        """Whether the text may end here."""
        ...

    def threads(self) -> tuple[Sets, tuple[tuple[int, Lexer], ...]]:
        """The parser, and the lexemes under way as (set in which they began, what is left of them)."""
        ...

    def ending(self, word_of: Callable[[int], bytes]) -> bytes:
        """Bytes that complete the text; ``word_of`` gives a shortest text of an expression."""
        ...
