"""A mixture of experts: routing, and the experts' feed-forward blocks. The host does not wait for the device.

Reads each used expert once for every block of its rows; 6 * tokens * top_k * hidden * width flops.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..groups import Groups
from ..quantized_weight import Experts, num_experts
from .activation import silu_mul
from .grouped import grouped_product


@triton.jit
def route_kernel(logits, weights, ids, num_experts, TOP_K: tl.constexpr, NORMALISE: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    logit = tl.load(logits + token * num_experts + expert, mask=expert < num_experts, other=float("-inf"))
    share = tl.exp(logit.to(tl.float32) - tl.max(logit.to(tl.float32), 0))
    share = share / tl.sum(share, 0)
    left = tl.where(expert < num_experts, share, -1.0)
    kept = 0.0
    for _ in tl.static_range(TOP_K):
        best = tl.max(left, 0)
        kept += best
        left = tl.where(expert == tl.argmax(left, 0, tie_break_left=True), -1.0, left)
    left = tl.where(expert < num_experts, share, -1.0)
    scale = 1.0
    if NORMALISE:
        scale = 1.0 / kept
    for rank in tl.static_range(TOP_K):
        best = tl.max(left, 0)
        taken = tl.argmax(left, 0, tie_break_left=True)
        tl.store(weights + token * TOP_K + rank, best * scale)
        tl.store(ids + token * TOP_K + rank, taken)
        left = tl.where(expert == taken, -1.0, left)


def route_experts(logits: Tensor, top_k: int, *, normalise: bool) -> tuple[Tensor, Tensor]:
    num_tokens, num_experts = logits.shape
    weights = torch.empty((num_tokens, top_k), dtype=torch.float32, device=logits.device)
    ids = torch.empty((num_tokens, top_k), dtype=torch.int32, device=logits.device)
    if num_tokens:
        route_kernel[(num_tokens,)](
            logits.contiguous(),
            weights,
            ids,
            num_experts,
            TOP_K=top_k,
            NORMALISE=normalise,
            BLOCK=triton.next_power_of_2(num_experts),
            num_warps=1,
        )
    return weights, ids


def mix_experts(x: Tensor, gate_up: Experts, down: Experts, weights: Tensor, ids: Tensor) -> Tensor:
    num_tokens, top_k = ids.shape
    groups = Groups(ids.view(-1), num_experts(down, x.shape[1]))
    inner = silu_mul(grouped_product(x, gate_up, groups, divide=top_k))
    each = grouped_product(inner, down, groups, row_scale=weights.view(-1))
    return each.view(num_tokens, top_k, x.shape[1]).sum(1, dtype=torch.float32).to(x.dtype)
