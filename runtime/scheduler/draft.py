"""A draft: guesses of what follows a sequence, as a tree. Never part of the sequence's tokens.

token_ids   a  b  c  d         parents  -1  0  0  2        the texts: a, ab, ac, acd
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """Token i comes after token ``parents[i]`` (< i; -1: after the sequence's last); no two of one parent are equal.

    ``parents`` None: a chain. ``source`` names who guessed.
    """

    token_ids: np.ndarray  # int32 [k]
    parents: np.ndarray | None = None  # int32 [k]
    source: str = ""

    def __len__(self) -> int:
        return len(self.token_ids)

    def cut(self, length: int) -> Draft:
        """The first ``length`` tokens: parents come before their children, so a tree stays one."""
        if length >= len(self.token_ids):
            return self
        parents = None if self.parents is None else self.parents[:length]
        return Draft(self.token_ids[:length], parents, self.source)

    def keep(self, kept: list[int]) -> Draft:
        """Only the tokens ``kept``, ascending, with every kept token's parent among them."""
        if len(kept) == len(self.token_ids):
            return self
        if self.parents is None:  # of a chain a beginning is kept
            return self.cut(len(kept))
        places = np.full(len(self.token_ids) + 1, -1, np.int32)
        places[kept] = np.arange(len(kept), dtype=np.int32)  # the last stays -1: the parent of roots
        parents = places[self.parents[kept]]
        return Draft(self.token_ids[kept], parents, self.source)

    def children(self) -> list[dict[int, int]]:
        """For the sequence's last token (entry 0) and each draft token i (entry i + 1): token id -> draft token."""
        out: list[dict[int, int]] = [{} for _ in range(len(self.token_ids) + 1)]
        parents = range(-1, len(self.token_ids) - 1) if self.parents is None else self.parents.tolist()
        for i, (token, parent) in enumerate(zip(self.token_ids.tolist(), parents, strict=True)):
            out[parent + 1][token] = i
        return out

    def parent_list(self) -> list[int]:
        return list(range(-1, len(self.token_ids) - 1)) if self.parents is None else self.parents.tolist()
