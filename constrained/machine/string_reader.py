"""Reads the text of a token within a string by the parts of its languages.

A walk of the trie makes no states of the machine (``part_sets``, ``joint_sets``), so a token that is then taken would
have one made for each of its bytes. Compiled code follows the sets of parts instead, and only the state behind the text
is made.
"""

import re
from contextlib import suppress

from ..expressions import Expressions
from .joint_sets import JointSets
from .part_sets import SHORTEST, NoParts, PartSets, StringText
from .recent import Recent

MAX_KNOWN = 20_000  # texts that are remembered at most
MOST_UNREAD = 3  # texts; after so many that lacked rules, up to ``MOST_RULES`` are made for one, which take 0.3 ms
MOST_RULES = 8
_STOP = re.compile(rb'[\x00-\x1f"\\]')


class StringReader:
    """Reads within the strings of one machine. Callers hold its lock."""

    def __init__(self, ex: Expressions, part_sets: PartSets, joint_sets: JointSets) -> None:
        self._ex = ex
        self._part_sets = part_sets
        self._joint_sets = joint_sets
        self._known: Recent[tuple[int, bytes], tuple[int, int, int]] = Recent(MAX_KNOWN // 2)
        self._num_unread = 0

    @property
    def num_known(self) -> int:
        return len(self._known.young) + len(self._known.old)

    def read(self, state: int, text: StringText, data: bytes) -> tuple[int, int, int]:
        """How many bytes of ``data`` were read, how many characters, and the state behind them; ``text`` is that of
        ``state``. Nothing is read of less than ``SHORTEST`` bytes, or where rules of the parts are missing.
        """
        found = self._known.get((state, data))
        if found is None:
            found = self._read(state, text, data)
            if found[0]:
                self._known.put((state, data), found)
        return found

    def _read(self, state: int, text: StringText, data: bytes) -> tuple[int, int, int]:
        stop = _STOP.search(data)
        begin = data if stop is None else data[: stop.start()]
        if len(begin) < SHORTEST:
            return 0, 0, state
        most_rules = 0
        if self._num_unread >= MOST_UNREAD:
            most_rules, self._num_unread = MOST_RULES, 0
        with suppress(NoParts):
            if self._ex.is_plain[text.expr]:
                size, count, rest = self._part_sets.read(text.expr, begin, text.is_counted, most_rules)
            else:
                size, count, rest = self._joint_sets.read(text.expr, begin, most_rules)
            if size >= SHORTEST:
                return size, count, text.state_of(rest)
        self._num_unread += 1
        return 0, 0, state
