"""A draft: a tree of guessed tokens that may follow a sequence. They are not part of the sequence until accepted.

token_ids   a  b  c  d         parents  -1  0  0  2        the texts: a, ab, ac, acd
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

MAX_DRAFT_TOKENS = 128  # of all drafts in a step


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """Token i follows token ``parents[i]`` (< i; -1: the sequence's last token). Children of one parent differ.

    ``parents`` None: a chain. ``source`` names the drafter.
    """

    token_ids: np.ndarray  # int32 [k]
    parents: np.ndarray | None = None  # int32 [k]
    source: str = ""

    def __len__(self) -> int:
        return len(self.token_ids)

    def cut(self, length: int) -> Draft:
        """The first ``length`` tokens. Parents precede their children, so the rest is a tree."""
        if length >= len(self.token_ids):
            return self
        parents = None if self.parents is None else self.parents[:length]
        return Draft(self.token_ids[:length], parents, self.source)

    def keep(self, kept: list[int]) -> Draft:
        """The tokens ``kept``, in that order; each one's parent must be among them, before it."""
        if self.parents is None:  # ``kept`` is a prefix of the chain
            return self.cut(len(kept))
        places = np.full(len(self.token_ids) + 1, -1, np.int32)
        places[kept] = np.arange(len(kept), dtype=np.int32)  # the last entry stays -1, the parent of roots
        parents = places[self.parents[kept]]
        return Draft(self.token_ids[kept], parents, self.source)

    def preorder(self) -> list[int]:
        """All tokens in preorder: each is followed by its descendants, then by its next sibling."""
        if self.parents is None:
            return list(range(len(self.token_ids)))
        below: list[list[int]] = [[] for _ in range(len(self.token_ids) + 1)]
        for i, parent in enumerate(self.parents.tolist()):
            below[parent + 1].append(i)
        order: list[int] = []
        stack = below[0][::-1]
        while stack:
            i = stack.pop()
            order.append(i)
            stack += below[i + 1][::-1]
        return order

    def in_preorder(self) -> Draft:
        """The same draft in preorder; without ``parents`` if no token has two children."""
        found = self.keep(self.preorder())
        if found.parents is not None and (found.parents == np.arange(-1, len(found) - 1)).all():
            return Draft(found.token_ids, None, found.source)
        return found

    def children(self) -> list[dict[int, int]]:
        """Children by token id: of the sequence's last token (entry 0), and of each draft token i (entry i + 1)."""
        out: list[dict[int, int]] = [{} for _ in range(len(self.token_ids) + 1)]
        parents = range(-1, len(self.token_ids) - 1) if self.parents is None else self.parents.tolist()
        for i, (token, parent) in enumerate(zip(self.token_ids.tolist(), parents, strict=True)):
            out[parent + 1][token] = i
        return out

    def parent_list(self) -> list[int]:
        return list(range(-1, len(self.token_ids) - 1)) if self.parents is None else self.parents.tolist()


def branches_of(parents: np.ndarray) -> list[tuple[int, int, list[int]]]:
    """A tree in preorder as chains: the start and end of each, and the path from the root to the token before it.

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
