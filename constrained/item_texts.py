"""Items that are told apart by what was written: when one has ended, and which tokens go on into the next one.

What may follow an item of an array with ``uniqueItems`` depends on the item's text, of which states know nothing. So
the text of an item under way is kept beside its state, and an ``ItemReader`` is asked with it where the item ends.
Never knows what a text means.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from .vocabulary import Vocabulary


class ItemReader(Protocol):
    """What waits for an item whose text counts."""

    def after(self, text: bytes) -> int:
        """The state after an item that was written so, at the byte behind it; 0 if it must not have been."""
        ...

    def has_others(self) -> bool:
        """Whether others may follow, of each kind that may follow at all, whatever this one says."""
        ...


class Crossing(NamedTuple):
    """Tokens that may end an item, as long as they are allowed, and reach into another one.

    ``commas`` get as far as its comma, ``into_next`` farther than its first quote or bracket; each also for items
    under way that have a quote open. ``whole_items`` begin an item, end it and get into the next one.
    """

    commas: tuple[int, ...]
    into_next: tuple[int, ...]
    commas_after_quote: tuple[int, ...]
    into_next_after_quote: tuple[int, ...]
    whole_items: tuple[int, ...]


_INTO_NEXT = rb',\s*(?:[^\s"\[{]|["\[{].)'


def crossing_tokens(vocabulary: Vocabulary) -> Crossing:
    def matching(pattern: bytes, ids: Iterable[int]) -> tuple[int, ...]:
        search = re.compile(pattern, re.DOTALL).search
        return tuple(i for i in ids if search(vocabulary.tokens[i]))

    commas = matching(rb",", (i for i in range(len(vocabulary)) if vocabulary.is_text[i]))
    into_next = matching(_INTO_NEXT, commas)
    return Crossing(
        commas,
        into_next,
        matching(rb'".*,', commas),
        matching(rb'".*' + _INTO_NEXT, into_next),
        matching(rb"[\[,].*[^\s\[,].*" + _INTO_NEXT, into_next),
    )


def is_in_string(text: bytes) -> bool:
    """Whether a string is open after a part of a JSON text."""
    return sum(found == b'"' for found in re.findall(rb'\\.|"', text, re.DOTALL)) % 2 == 1
