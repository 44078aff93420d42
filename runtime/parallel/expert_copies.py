"""When the experts that are chosen most are copied, and what has come of it.

Rank 0 orders a review after so many tokens. Each stage then looks at one of its mixtures, the next one by turns, so a
review takes the time of one mixture's copies at most.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ..config import EngineConfig
from ..models import Model
from .experts import CopiedExperts, SplitExperts
from .group import Group
from .mesh import Mesh

REVIEW_TOKENS = 16_384  # of steps, in which every mixture is reviewed once
MOST_WAITING = 2  # times so many tokens, after which a review does not wait for an idle moment


@dataclass(frozen=True, slots=True)
class MixtureReport:
    """One mixture at its last review. ``at_home`` and ``shared``: the share of all its tokens since the review before
    that the busiest group would have computed without copies, and has computed. ``copies``: of each copied expert, the
    groups that have got it. Of sequence-parallel ranks the first ones are counted.
    """

    layer: int
    at_home: float
    shared: float
    copies: dict[int, list[int]]


class ExpertCopies:
    """All mixtures of one rank; ``group`` has all ranks. Every rank calls ``review`` on the same orders."""

    def __init__(self, model: Model, group: Group, config: EngineConfig) -> None:
        self._group, self._mesh, self._num_spare = group, Mesh.of(config), config.expert_copies
        self._heads = range(0, self._mesh.size, self._mesh.stage_size)  # the first rank of each stage
        self._own: list[tuple[int, CopiedExperts]] = []
        for i, layer in enumerate(model.layers, start=model.first_layer):
            if isinstance(layer.mlp, SplitExperts) and layer.mlp.copies is not None:
                self._own.append((i, layer.mlp.copies))
        self._num_turns = max(sum(map(model.config.has_experts, layers)) for layers in model.stages)
        self._turn = self._num_tokens = self.num_copied = 0
        self._reports: dict[int, MixtureReport] = {}

    def note_step(self, num_tokens: int) -> None:
        self._num_tokens += num_tokens

    def is_due(self, *, is_idle: bool) -> bool:
        due = REVIEW_TOKENS if is_idle else MOST_WAITING * REVIEW_TOKENS
        return self._num_tokens * self._num_turns >= due

    def review(self) -> None:
        """Between two steps."""
        self._num_tokens = 0
        found = [self._review_own()]
        if self._group.rank in self._heads[1:]:
            self._group.send(found[0], 0)
        elif self._group.rank == 0:
            found += [self._group.receive(torch.empty_like(found[0]), head) for head in self._heads[1:]]
            for one in found:
                self._take(one.numpy())
        self._turn += 1

    def _review_own(self) -> torch.Tensor:
        """float64: copies made, layer, tokens of groups without copies and with, experts in spare places."""
        num_groups, num_spare = self._mesh.expert, self._num_spare
        found = np.full(2 + 2 * num_groups + num_groups * num_spare, -1.0)
        if self._own:
            layer, copied = self._own[self._turn % len(self._own)]
            tokens = copied.tokens.copy()
            found[0], found[1] = copied.review(), layer
            found[2 : 2 + 2 * num_groups] = tokens.ravel()
            found[2 + 2 * num_groups :] = copied.places.spare.ravel()
        return torch.from_numpy(found)

    def _take(self, found: np.ndarray) -> None:
        num_groups = self._mesh.expert
        if found[1] < 0:
            return
        tokens = found[2 : 2 + 2 * num_groups].reshape(2, num_groups)
        at_home, shared = (tokens.max(1) / max(1.0, tokens[0].sum())).tolist()
        copies: dict[int, list[int]] = {}
        for group, experts in enumerate(found[2 + 2 * num_groups :].reshape(num_groups, -1).astype(int).tolist()):
            for expert in experts:
                if expert >= 0:
                    copies.setdefault(expert, []).append(group)
        self.num_copied += int(found[0])
        self._reports[int(found[1])] = MixtureReport(int(found[1]), at_home, shared, dict(sorted(copies.items())))

    def reports(self) -> list[MixtureReport]:
        """On rank 0: of all mixtures that have been reviewed."""
        return [self._reports[layer] for layer in sorted(self._reports)]

    @property
    def spare_bytes(self) -> int:
        """Of this rank's spare places."""
        return sum(copied.spare_bytes for _, copied in self._own)
