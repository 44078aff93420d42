"""Which groups of ranks hold which experts of a mixture: each expert's home, and copies of those that are chosen often.

    group 0   home of experts 0 1 2   spare places: 5 -        a group is one rank, or the ranks that split the inner
    group 1   home of experts 3 4 5   spare places: 0 -        dimensions of the same experts

An expert's tokens of one step are computed in blocks, and each block by one group that has the expert. Every rank
finds the same answers from the same counts of tokens, so none of them is sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

BLOCK = 32  # tokens of an expert that are computed together, wherever that is: a product's last bits depend on them
MIN_GAIN = 0.02  # of the busiest group's tokens, for which weights are sent
PIECES = 256  # into which a load is cut to predict how it would be shared out


@dataclass(frozen=True, slots=True)
class ExpertMove:
    """Group ``to`` gets a copy of ``expert`` in its spare place ``place``; ``source`` is the expert's home."""

    expert: int
    source: int
    to: int
    place: int


class Places:
    """The places of one mixture's experts; ``spare`` (int64 [G, N]) is the expert in each spare place, -1 for none."""

    def __init__(self, homes: Sequence[range], num_spare: int) -> None:
        self.homes = list(homes)
        self.num_groups = len(homes)
        self.home = np.repeat(np.arange(len(homes)), [len(run) for run in homes])  # [E]
        self.spare = np.full((len(homes), num_spare), -1, np.int64)

    @property
    def num_experts(self) -> int:
        return len(self.home)

    def groups_of(self, expert: int) -> list[int]:
        """Those that hold the expert, its home first."""
        return [int(self.home[expert]), *(self.spare == expert).any(1).nonzero()[0].tolist()]

    def row_of(self, group: int) -> np.ndarray:
        """int64 [E]: of each expert its row in the group's weights, those of the spare places last; -1: not there."""
        run = self.homes[group]
        rows = np.full(self.num_experts, -1, np.int64)
        rows[run.start : run.stop] = np.arange(len(run))
        for place, expert in enumerate(self.spare[group].tolist()):
            if expert >= 0:
                rows[expert] = len(run) + place
        return rows

    def tokens_at_home(self, counts: np.ndarray) -> np.ndarray:
        """[G]: the tokens of each group if there were no copies."""
        return np.bincount(self.home, counts, self.num_groups)

    def share_out(self, counts: np.ndarray, *, use_copies: bool = True) -> tuple[np.ndarray, np.ndarray]:
        """``counts`` (int64 [E]): each expert's tokens. Returns the blocks' groups, expert by expert, and each expert's
        first block.

        An expert without copies is computed at home. Full blocks of the others go first, each to the group that has the
        fewest tokens by then.
        """
        num_blocks = -(-counts // BLOCK)
        firsts = np.cumsum(num_blocks) - num_blocks
        groups = np.repeat(self.home, num_blocks)
        copied = np.unique(self.spare[self.spare >= 0]) if use_copies else ()
        pieces = [
            (min(BLOCK, int(counts[expert]) - first), int(expert), int(firsts[expert]) + first // BLOCK)
            for expert in copied
            for first in range(0, int(counts[expert]), BLOCK)
        ]
        if pieces:
            alone = counts.copy()
            alone[copied] = 0
            pieces.sort(key=lambda piece: (-piece[0], piece[2]))
            self._assign(pieces, self.tokens_at_home(alone), groups)
        return groups, firsts

    def _assign(self, pieces: Iterable[tuple[float, int, int]], tokens: np.ndarray, into: np.ndarray) -> np.ndarray:
        """Gives each of ``pieces`` (tokens, expert, index of ``into``) to the group that has the fewest; returns each
        group's tokens."""
        held = {expert: self.groups_of(expert) for expert in np.unique(self.spare[self.spare >= 0]).tolist()}
        found = tokens.tolist()
        for size, expert, index in pieces:
            group = min(held[expert], key=found.__getitem__)
            found[group] += size
            into[index] = group
        return np.array(found)

    def busiest(self, load: np.ndarray) -> float:
        """The predicted tokens of the busiest group; ``load`` (float64 [E]) are tokens of each expert."""
        copied = np.unique(self.spare[self.spare >= 0]).tolist()
        alone = load.copy()
        alone[copied] = 0.0
        tokens = self.tokens_at_home(alone)
        size = load.sum() / PIECES
        pieces = []
        for expert in copied:
            count = max(1, round(load[expert] / size)) if size else 0
            pieces += [(float(load[expert]) / count, expert, 0)] * count
        pieces.sort(key=lambda piece: (-piece[0], piece[1]))
        return float(self._assign(pieces, tokens, np.zeros(1, np.int64)).max())

    def moves(self, load: np.ndarray) -> list[ExpertMove]:
        """The copies to make now for this load: at most one for each group, and none where they would gain little."""
        wanted = Places(self.homes, self.spare.shape[1])
        wanted.spare = self._best_copies(load)
        if wanted.busiest(load) > (1 - MIN_GAIN) * self.busiest(load):
            return []
        found = []
        for group in range(self.num_groups):
            new = [e for e in wanted.spare[group].tolist() if e >= 0 and e not in self.spare[group]]
            old = self.spare[group].tolist()
            if new:
                free = [place for place, e in enumerate(old) if e < 0 or e not in wanted.spare[group]]
                place = min(free, key=lambda place: (old[place] >= 0, load[old[place]], place))
                expert = max(new, key=lambda e: (load[e], -e))
                found.append(ExpertMove(expert, int(self.home[expert]), group, place))
        return found

    def _best_copies(self, load: np.ndarray) -> np.ndarray:
        """``spare`` as this load asks for it: the next copy is of the expert with most tokens for each of its places.
        Then these are placed, those with most tokens first, each in the group with fewest.
        """
        num_groups, num_spare = self.spare.shape
        count = np.ones(self.num_experts)
        for _ in range(num_groups * num_spare):
            each = np.where(count < num_groups, load / count, 0.0)
            expert = int(each.argmax())
            if not each[expert]:
                break
            count[expert] += 1
        each = load / count
        tokens = self.tokens_at_home(each)
        spare = np.full_like(self.spare, -1)
        free = [num_spare] * num_groups
        hot = sorted(np.flatnonzero(count > 1).tolist(), key=lambda expert: (-each[expert], expert))
        for expert in hot:
            for _ in range(int(count[expert]) - 1):
                groups = [g for g in range(num_groups) if free[g] and g != self.home[expert] and expert not in spare[g]]
                if not groups:
                    break
                group = min(groups, key=tokens.__getitem__)
                spare[group, num_spare - free[group]] = expert
                free[group] -= 1
                tokens[group] += each[expert]
        return spare

    def make(self, move: ExpertMove) -> None:
        """The copy of ``move`` is there."""
        self.spare[move.to, move.place] = move.expert
