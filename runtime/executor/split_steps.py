"""What the executor asks of other ranks, where its model is split over several."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from ..layers.batch import StepArrays
from .step_logits import StepMasks

MAX_SHORTLIST = 64  # tokens of each rank


@dataclass(frozen=True, slots=True)
class Shortlist:
    """Of each row the likeliest tokens, in the order of ids, and the logarithm of the sum of all exponentials."""

    token_ids: Tensor  # int64 [L, n]
    logits: Tensor  # float32 [L, n]
    logsumexp: Tensor  # float32 [L]


class SplitSteps(Protocol):
    """The other ranks, as rank 0's executor sees them."""

    def announce(self, step: StepArrays, drawn: Tensor | None) -> None:
        """Every rank runs the forward of ``step`` now. ``drawn``: the draws that its tokens may refer to; they lie on
        the device, and the other ranks get them.
        """
        ...

    def shortlist(self, features: Tensor, k: int, masks: StepMasks | None) -> Shortlist:
        """The ``k`` likeliest tokens of each row of the last step, and some more. Masked tokens have -inf."""
        ...

    def inputs(self, features: Tensor) -> Tensor:
        """The head's input [L, C] of the last step; ``features`` if this rank has the head."""
        ...


def shortlist_len(temperature: np.ndarray, top_k: np.ndarray) -> int | None:
    """How many of the likeliest tokens are enough for these draws; None where they need all logits."""
    needed = np.where(temperature == 0, 1, top_k)
    return int(needed.max()) if len(needed) and needed.min() > 0 and needed.max() <= MAX_SHORTLIST else None
