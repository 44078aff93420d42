"""Large tables as many small dictionaries. One dictionary that grows is copied into new memory, 0.8 ms for 22,000
entries, for which the text that put in the last entry would wait.

    table[number >> PART_BITS][number]              keys that are numbers from 0 on, or begin with one
    table[hash(key) % NUM_PARTS][key]               other keys
"""

from collections import defaultdict
from typing import TypeVar

PART_BITS = 12
NUM_PARTS = 16

Key = TypeVar("Key")
Value = TypeVar("Value")
Parts = defaultdict[int, dict[Key, Value]]


def in_parts() -> Parts:
    """An empty table."""
    return defaultdict(dict)
