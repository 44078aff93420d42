"""The pushdown automaton over bytes that all grammars of a vocabulary share, and its token masks.

Builders of grammars add states and frames to a ``Machine``; ``Masks`` makes the masks of its configurations.
"""

from .agreement import key_of, known_value
from .endings import FAR, Endings, ShortEnding, pack
from .item_texts import ItemReader, Seen
from .machine import MASK_WORK, Fill, Machine
from .masks import Masks
from .parser_sets import Lexer
from .part_sets import StringText
from .recent import Recent
from .walk import DEAD_STATE, MAX_NEED, REFUSED, UNBOUNDED, are_on_disk
from .white_space import COMPACT, FLEXIBLE, ONE_SPACE, indent, new_line

__all__ = [
    "COMPACT",
    "DEAD_STATE",
    "FAR",
    "FLEXIBLE",
    "MASK_WORK",
    "MAX_NEED",
    "ONE_SPACE",
    "REFUSED",
    "UNBOUNDED",
    "Endings",
    "Fill",
    "ItemReader",
    "Lexer",
    "Machine",
    "Masks",
    "Recent",
    "Seen",
    "ShortEnding",
    "StringText",
    "are_on_disk",
    "indent",
    "key_of",
    "known_value",
    "new_line",
    "pack",
]
