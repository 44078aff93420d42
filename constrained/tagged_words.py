"""Words that carry their number, so that an automaton can tell which one has ended. Never builds the automaton."""

from collections.abc import Iterable

from .expressions import Expressions


def one_of_tagged(ex: Expressions, literals: Iterable[bytes]) -> int:
    """The literals, each followed by its number in quotes: so that ``tag_here`` can tell which one has ended.

    A tag ends with the only quote after the literal, which nothing else that may follow does.
    """
    return ex.one_of([word + b'"%d"' % i for i, word in enumerate(literals)])


def tags(ex: Expressions, tagged: int) -> tuple[bytes, ...]:
    return ex.words_of(tagged) or ()


def tag_here(ex: Expressions, tagged: int) -> int:
    """The number of the literal that ends here; -1 if none does."""
    for tail in ex.words_of(ex.derive(tagged, 0x22)) or ():
        if tail[-1:] == b'"' and tail[:-1].isdigit():
            return int(tail[:-1])
    return -1
