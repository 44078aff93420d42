"""A step whose keys and values are spread over several ranks, as one of these ranks sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

Upload = Callable[[np.ndarray], torch.Tensor]


@dataclass(frozen=True, slots=True)
class TokenShares:
    """What each rank runs of a step with many tokens, and the keys and values that go to their owners.

    ``given``: of each rank, those of this rank's tokens whose slots it owns. ``taken``: from each rank the number of
    its tokens whose slots this rank owns; ``slots`` are these, in the order of ranks and tokens.
    """

    runs: tuple[range, ...]  # of each rank, its tokens
    given: tuple[torch.Tensor, ...]  # int64, indices into this rank's tokens
    taken: tuple[int, ...]
    slots: torch.Tensor  # int64
    num_logits: tuple[int, ...]  # of each rank

    def uploaded(self, upload: Upload) -> TokenShares:
        given = tuple(upload(tokens.numpy()) for tokens in self.given)
        return replace(self, given=given, slots=upload(self.slots.numpy()))


@dataclass(frozen=True, slots=True)
class Spread:
    """The keys of a step's S tokens that one rank owns. A query sees those of its row from ``firsts`` to ``ends``.

    ``firsts`` is by sliding window, without an entry for the whole context. ``shares`` is None where every rank runs
    all tokens.
    """

    ends: torch.Tensor  # int32 [S]
    firsts: Mapping[int, torch.Tensor]  # int32 [S]
    num_tokens: int
    num_logits: int
    own: range  # the tokens that this rank runs
    shares: TokenShares | None = None

    def uploaded(self, upload: Upload) -> Spread:
        """The same on a device."""
        return replace(
            self,
            ends=upload(self.ends.numpy()),
            firsts={window: upload(firsts.numpy()) for window, firsts in self.firsts.items()},
            shares=None if self.shares is None else self.shares.uploaded(upload),
        )
