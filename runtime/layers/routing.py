"""The choice of experts by groups, as in DeepSeek-V2 and V3 (DeepSeek-AI, 2024)."""

import torch

from ..weights.config_parts import Routing


def route_by_groups(
    logits: torch.Tensor, top_k: int, *, routing: Routing, normalise: bool, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights float32 [T, top_k] and experts int32 [T, top_k] of router logits [T, E]. ``bias`` [E] changes the choice
    alone, not the weights. The host does not wait for the device.
    """
    logits = logits.float()
    scores = logits.sigmoid() if routing.scoring == "sigmoid" else logits.softmax(dim=-1)  # [T, E]
    ranked = scores if bias is None else scores + bias
    if routing.num_groups > 1:
        groups = ranked.unflatten(1, (routing.num_groups, -1))  # [T, G, E / G]
        best = groups.topk(2 if routing.scoring == "sigmoid" else 1, dim=-1).values.sum(dim=-1)  # [T, G]
        taken = best.topk(routing.groups_taken, dim=-1).indices
        is_left_out = torch.ones_like(best, dtype=torch.bool).scatter_(1, taken, False)
        ranked = groups.masked_fill(is_left_out.unsqueeze(-1), float("-inf")).flatten(1)
    ids = ranked.topk(top_k, dim=-1).indices
    weights = scores.gather(1, ids)
    if normalise:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)  # sigmoids may all be 0
    return weights * routing.scale, ids.int()
