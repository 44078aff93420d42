"""What was written and may not be repeated: the items of arrays with ``uniqueItems``, and the names of objects that
count their properties. Their texts, and the tokens that may end one item and begin the next.

What may follow an item of such an array depends on the items before it, which states do not hold: the states of the
array are those of one that may repeat items. A configuration has a *reading* beside its state: for each such array
around the place, the items that were read and the text of the item under way. Where an item ends, an ``ItemReader``
chooses the next state, or refuses the item.

An object is read in the same way while so many names have to differ: its items are the names, without their quotes,
and one that was written before is refused at its closing quote.
"""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from ..vocabulary import Vocabulary
from .agreement import SPACES, STRING, VALUE, Agreement, Known, agreement_with, key_of, unescaped
from .recent import Recent

BETWEEN = -1  # in the place of a text: between two names of an object


class Seen:
    """The items of an array, last first. Equal lists are one object."""

    __slots__ = ("_after", "before", "count", "key", "original", "value")

    def __init__(
        self, before: "Seen | None" = None, value: Known = None, key: object = None, original: object = None
    ) -> None:
        self.before, self.value, self.key, self.original = before, value, key, original
        self.count: int = 0 if before is None else before.count + 1
        self._after: dict[object, Seen] = {}

    def with_item(self, value: Known, original: object) -> "Seen":
        """The list with one more item; ``original`` is the item as it was parsed."""
        key = key_of(value)
        found = self._after.get(key)
        if found is None:
            found = self._after[key] = Seen(self, value, key, original)
        return found

    def has(self, value: Known) -> bool:
        key, at = key_of(value), self
        while at.before is not None:
            if at.key == key:
                return True
            at = at.before
        return False

    def values(self) -> Iterator[Known]:
        return (at.value for at in self._items())

    def originals(self) -> Iterator[object]:
        return (at.original for at in self._items())

    def _items(self) -> "Iterator[Seen]":
        at = self
        while at.before is not None:
            yield at
            at = at.before


class ItemReader(Protocol):
    """Waits below the items of an array with ``uniqueItems``."""

    is_plain: bool  # every item that repeats another is refused
    spaces_close: bool  # white space behind a value inside an item belongs to a closing bracket alone

    def after(self, state: int, text: bytes, seen: Seen) -> tuple[int, Seen | None]:
        """The state after an item with this text, 0 if it is refused; the items read, None if they count no more.

        ``state`` is the one after an item that repeats none of ``seen``.
        """
        ...

    def has_others(self, count: int) -> bool:
        """Whether this item may be followed by any of more than ``count`` values, of each kind that may follow it."""
        ...

    def has_others_after(self, state: int, count: int) -> bool:
        """As ``has_others``, where ``state`` is the one after the item."""
        ...


class Level(NamedTuple):
    """An array or object under way: the stack below its items, the frame with its reader (0 for an object), the items
    read, and the number of the text of the one under way. ``text`` is ``BETWEEN`` outside of an object's names."""

    base: int
    frame: int
    seen: Seen
    text: int = 0

    @property
    def is_object(self) -> bool:
        return not self.frame


Levels = tuple[Level, ...]  # the outermost array first


class ItemTexts:
    """The readings of one machine, and their texts, both by number. Reading 0 is outside of all such arrays."""

    def __init__(self) -> None:
        self._readings: list[Levels] = [()]
        self._ids: dict[Levels, int] = {(): 0}
        self._ways: list[int] = [0]  # by text: the text before its last byte, times 256, plus that byte
        self._texts: dict[int, int] = {}  # the same, the other way round
        self._firsts = [0]  # by text: its first byte that is no white space, 0 if there is none
        self._agreements: Recent[tuple[int, Seen], tuple[Agreement | None]] = Recent(10_000)
        self.empty = Seen()  # of an array
        self.no_names = Seen()

    def levels(self, reading: int) -> Levels:
        return self._readings[reading]

    def reading(self, levels: Levels) -> int:
        found = self._ids.get(levels)
        if found is None:
            found = self._ids[levels] = len(self._readings)
            self._readings.append(levels)
        return found

    def begins_item(self, reading: int, stack: int, depths: Sequence[int]) -> bool:
        """Whether an item is under way that has no text yet; ``depths`` are those of stacks."""
        levels = self._readings[reading]
        return bool(levels) and not levels[-1].text and depths[stack] > depths[levels[-1].base]

    def with_name(self, level: Level) -> Level | None:
        """The level of an object behind the name under way; None if the name was written before."""
        name = unescaped(self.text(level.text))
        return None if level.seen.has(name) else level._replace(seen=level.seen.with_item(name, None), text=BETWEEN)

    def extended(self, text: int, part: bytes) -> int:
        """The number of a text followed by ``part``."""
        for byte in part:
            way = text << 8 | byte
            found = self._texts.get(way)
            if found is None:
                found = self._texts[way] = len(self._ways)
                self._ways.append(way)
                self._firsts.append(self._firsts[text] or (0 if byte in SPACES else byte))
            text = found
        return text

    def text(self, number: int) -> bytes:
        found = bytearray()
        while number:
            found.append(self._ways[number] & 0xFF)
            number = self._ways[number] >> 8
        found.reverse()
        return bytes(found)

    def first_byte(self, number: int) -> int:
        """The first byte of a text that is no white space; 0 if there is none."""
        return self._firsts[number]

    def agreement(self, level: Level) -> Agreement | None:
        """With which of the items before it the item under way agrees; None if with none."""
        if level.seen.before is None or level.text == BETWEEN:
            return None
        way, text, seen = [], level.text, level.seen
        while (found := self._agreements.get((text, seen))) is None:
            if not text:
                found = (agreement_with(seen.values(), mode=STRING if level.is_object else VALUE),)
                self._agreements.put((0, seen), found)
                break
            way.append(text)
            text = self._ways[text] >> 8
        agreement = found[0]
        for text in reversed(way):
            agreement = agreement.step(self._ways[text] & 0xFF) if agreement is not None else None
            self._agreements.put((text, seen), (agreement,))
        return agreement


class Crossing(NamedTuple):
    """The tokens that may end an item and go on behind it, int32 [n] each.

    ``commas`` hold a comma; ``into_next`` also more than the first quote or bracket of the next item. Those
    ``_after_quote`` and ``_after_bracket`` have that behind a quote or closing bracket, for items that end with one;
    ``_after_both`` behind a quote and a bracket.
    ``whole`` may begin an array or object with an item and end that item; ``whole_after_quote`` has the bracket behind
    a quote. ``into_names`` hold a comma and more than the quote of a name behind it.
    """

    commas: np.ndarray
    into_next: np.ndarray
    commas_after_quote: np.ndarray
    into_next_after_quote: np.ndarray
    commas_after_bracket: np.ndarray
    into_next_after_bracket: np.ndarray
    commas_after_both: np.ndarray
    whole: np.ndarray
    whole_after_quote: np.ndarray
    into_names: np.ndarray


_INTO_NEXT = rb',\s*(?:[^\s"\[{]|["\[{].)'


def crossing_tokens(vocabulary: Vocabulary) -> Crossing:
    def matching(pattern: bytes, ids: np.ndarray) -> np.ndarray:
        search = re.compile(pattern, re.DOTALL).search
        return np.array([i for i in ids.tolist() if search(vocabulary.tokens[i])], np.int32)

    commas = np.flatnonzero(vocabulary.having(b",")).astype(np.int32)
    into_next = matching(_INTO_NEXT, commas)
    opens = rb'(\[.*[^\s\[]|\{.*,\s*".)'
    opening = matching(opens, np.flatnonzero(vocabulary.having(b"[") | vocabulary.having(b"{")))
    return Crossing(
        commas,
        into_next,
        matching(rb'".*,', commas),
        matching(rb'".*' + _INTO_NEXT, into_next),
        matching(rb"[\]}].*,", commas),
        matching(rb"[\]}].*" + _INTO_NEXT, into_next),
        matching(rb'".*[\]}].*,', commas),
        opening,
        matching(rb'".*' + opens, opening),
        matching(rb',\s*".', commas),
    )
