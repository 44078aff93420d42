"""A draft: guesses of what follows a sequence, as a tree. Never part of the sequence's tokens.

token_ids   a  b  c  d         parents  -1  0  0  2        the texts: a, ab, ac, acd
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

MAX_DRAFT_TOKENS = 128  # of all drafts in a step


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
        """The tokens ``kept``, in that order: every one's parent is among them and comes before it."""
        if self.parents is None:  # of a chain a beginning is kept
            return self.cut(len(kept))
        places = np.full(len(self.token_ids) + 1, -1, np.int32)
        places[kept] = np.arange(len(kept), dtype=np.int32)  # the last stays -1: the parent of roots
        parents = places[self.parents[kept]]
        return Draft(self.token_ids[kept], parents, self.source)

    def preorder(self) -> list[int]:
        """All tokens, each followed by all that comes after it before its next sibling: branches lie in one piece."""
        if self.parents is None:
            return list(range(len(self.token_ids)))
        below: list[list[int]] = [[] for _ in range(len(self.token_ids) + 1)]
        for i, parent in enumerate(self.parents.tolist()):
            below[parent + 1].append(i)
        order: list[int] = []
        coming = below[0][::-1]
        while coming:
            i = coming.pop()
            order.append(i)
            coming += below[i + 1][::-1]
        return order

    def in_preorder(self) -> Draft:
        """The same, in preorder; a chain where no token has two that come after it."""
        found = self.keep(self.preorder())
        if found.parents is not None and (found.parents == np.arange(-1, len(found) - 1)).all():
            return Draft(found.token_ids, None, found.source)
        return found

    def children(self) -> list[dict[int, int]]:
        """For the sequence's last token (entry 0) and each draft token i (entry i + 1): token id -> draft token."""
        out: list[dict[int, int]] = [{} for _ in range(len(self.token_ids) + 1)]
        parents = range(-1, len(self.token_ids) - 1) if self.parents is None else self.parents.tolist()
        for i, (token, parent) in enumerate(zip(self.token_ids.tolist(), parents, strict=True)):
            out[parent + 1][token] = i
        return out

    def parent_list(self) -> list[int]:
        return list(range(-1, len(self.token_ids) - 1)) if self.parents is None else self.parents.tolist()


def branches_of(parents: np.ndarray) -> list[tuple[int, int, list[int]]]:
    """A tree in preorder as chains: where each begins and ends, and the draft tokens before it, from the root.

    parents  -1  0  1  0  -1        chains  [0, 3) after nothing   [3, 4) after 0   [4, 5) after nothing
    """
    found: list[tuple[int, int, list[int]]] = []
    before = parents.tolist()
    for i, parent in enumerate(before):
        if i and parent == i - 1:
            found[-1] = (found[-1][0], i + 1, found[-1][2])
            continue
        path = []
        while parent >= 0:
            path.append(parent)
            parent = before[parent]
        found.append((i, i + 1, path[::-1]))
    return found
