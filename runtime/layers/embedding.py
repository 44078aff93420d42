"""Token ids to vectors. Never computes logits: a tied head packs the same weights for products."""

import torch
import torch.nn.functional as F


class Embedding:
    """``weight`` [V, C] in the type the activations should have."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:  # [T] -> [T, C]
        return F.embedding(token_ids, self.weight)
