"""Items that are told apart by what was written: when one has ended, and which tokens go on into the next one.

What may follow an item of an array with ``uniqueItems`` depends on the item's text, of which states know nothing. So
the text of an item under way is kept beside its state, and an ``ItemReader`` is asked with it where the item ends.
Never knows what a text means.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from ..vocabulary import Vocabulary


class ItemReader(Protocol):
    """What waits for an item whose text counts."""

    is_sole: bool  # nothing else depends on its array: what follows the array is the same whatever its items are

    def after(self, state: int, text: bytes) -> int:
        """The state after an item that was written so, where it is ``state`` if the text does not count; 0 if the item
        must not have been."""
        ...

    def has_others(self) -> bool:
        """Whether others may follow, of each kind that may follow at all, whatever this one says."""
        ...


class Crossing(NamedTuple):
    """Tokens that may end an item, as long as they are allowed, and go on.

    ``ends`` get as far as a bracket or comma behind it, ``commas`` as far as a comma, ``into_next`` farther than the
    next item's first quote or bracket. The first three are for any item under way, the next three for those that have
    a quote open, and the last two begin an item and end it: they get to a comma, or to a bracket or comma.
    """

    ends: tuple[int, ...]
    commas: tuple[int, ...]
    into_next: tuple[int, ...]
    ends_after_quote: tuple[int, ...]
    commas_after_quote: tuple[int, ...]
    into_next_after_quote: tuple[int, ...]
    whole_commas: tuple[int, ...]
    whole: tuple[int, ...]

    def of(self, reader: ItemReader, *, in_string: bool) -> tuple[int, ...]:
        """Those to be looked at within an item."""
        if not reader.is_sole:
            return self.ends_after_quote if in_string else self.ends
        if not reader.has_others():
            return self.commas_after_quote if in_string else self.commas
        return self.into_next_after_quote if in_string else self.into_next


_INTO_NEXT = rb',\s*(?:[^\s"\[{]|["\[{].)'


def crossing_tokens(vocabulary: Vocabulary) -> Crossing:
    def matching(pattern: bytes, ids: Iterable[int]) -> tuple[int, ...]:
        search = re.compile(pattern, re.DOTALL).search
        return tuple(i for i in ids if search(vocabulary.tokens[i]))

    ends = matching(rb"[,\]]", (i for i in range(len(vocabulary)) if vocabulary.is_text[i]))
    commas = matching(rb",", ends)
    into_next = matching(_INTO_NEXT, commas)
    return Crossing(
        ends,
        commas,
        into_next,
        matching(rb'".*[,\]]', ends),
        matching(rb'".*,', commas),
        matching(rb'".*' + _INTO_NEXT, into_next),
        matching(rb"[\[,].*[^\s\[,].*,", commas),
        matching(rb"[\[,].*[^\s\[,].*[,\]]", ends),
    )


def is_in_string(text: bytes) -> bool:
    """Whether a string is open after a part of a JSON text."""
    return sum(found == b'"' for found in re.findall(rb'\\.|"', text, re.DOTALL)) % 2 == 1
