"""The texts of array items that ``uniqueItems`` keeps apart, and the tokens that end one item and begin the next.

What may follow an item of such an array depends on the item's text, which states do not hold. So a configuration keeps
the text of the item under way, and where the item ends, an ``ItemReader`` chooses the next state by that text.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from ..vocabulary import Vocabulary


class ItemReader(Protocol):
    """Waits below an item whose text counts."""

    is_sole: bool  # what follows the array is the same whatever its items are

    def after(self, state: int, text: bytes) -> int:
        """The state after an item with this text; ``state`` is the one if the text did not count. 0: refused."""
        ...

    def has_others(self) -> bool:
        """Whether another item of each kind may follow, whatever this item's text is."""
        ...


class Crossing(NamedTuple):
    """The tokens that may end an item and go on behind it.

    ``ends`` hold a bracket or comma, ``commas`` a comma, ``into_next`` also more than the first quote or bracket of the
    next item. Those ``_after_quote`` do so behind a quote, for items with an open string. ``whole_commas`` and
    ``whole`` begin an item as well, and end it with a comma, or with a comma or bracket.
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
        """The tokens to be tried within an item."""
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
    """Whether a JSON string is open at the end of ``text``."""
    return sum(found == b'"' for found in re.findall(rb'\\.|"', text, re.DOTALL)) % 2 == 1
