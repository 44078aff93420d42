"""Expert parallelism: each expert of a mixture lies whole on one rank, or on a few that split its inner dimensions.

    every rank: the residual, the router ─► the same choices ─► the tokens that chose my experts ─► their results
    long steps:   results ─► to the rank that adds this token's ─► the sums to all ranks
    short steps:  results, zeros for other tokens ─► one sum of all ranks

(GShard: Lepikhin et al., 2021.) Every rank has every token's input, so results alone are sent. All ranks know all
choices, so they know each message's size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...kernels import QuantizedWeight, mix_experts
from ..layers.adapters import AdapterRows
from ..layers.moe import MoE
from .group import Group
from .sharding import even_parts
from .sizes import SUM_BY_PARTS


class SplitExperts(MoE):
    """A mixture whose ranks hold other experts each. ``held``: of each rank of ``group``, its experts."""

    def __init__(self, own: MoE, group: Group, held: Sequence[range]) -> None:
        super().__init__(
            own.router,
            own.gate_up,
            own.down,
            top_k=own.top_k,
            normalise=own.normalise,
            shared=own.shared,
            shared_gate=own.shared_gate,
            routing=own.routing,
            bias=own.bias,
        )
        self._group, self._held = group, list(held)

    def __call__(self, x: Tensor, rows: AdapterRows | None = None) -> Tensor:  # [T, C] -> [T, C]
        weights, ids = self._route(self.router(x))  # [T, k]
        mixed = self._own_experts(x, weights, ids)
        if self.shared is not None:  # its part is of all tokens
            return self._group.sum(mixed + self._shared_part(x))
        if x.numel() < SUM_BY_PARTS:
            return self._group.sum(mixed)
        return self._exchanged(mixed, ids)

    def _own_experts(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """[T, C]: what this rank's experts give to each token."""
        mine = self._held[self._group.rank]
        tokens, places = ((ids >= mine.start) & (ids < mine.stop)).nonzero(as_tuple=True)
        taken = x[tokens] if isinstance(self.gate_up, QuantizedWeight) else x[tokens].to(self.gate_up.dtype)
        own_ids = ids[tokens, places].unsqueeze(1) - mine.start
        each = mix_experts(taken, self.gate_up, self.down, weights[tokens, places].unsqueeze(1), own_ids)
        mixed = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        return mixed.index_add_(0, tokens, each.float()).to(x.dtype)

    def _exchanged(self, mixed: Tensor, ids: Tensor) -> Tensor:
        """The sum of every rank's ``mixed``, each token's by one rank, from the ranks that have experts of it alone."""
        group = self._group
        runs = even_parts(len(mixed), group.size)  # of each rank, the tokens that it adds
        taken = [((ids >= held.start) & (ids < held.stop)).any(1) for held in self._held]  # of each rank, [T]
        parts = [mixed[run.start : run.stop][taken[group.rank][run.start : run.stop]] for run in runs]
        mine = runs[group.rank]
        chosen = [one[mine.start : mine.stop] for one in taken]
        into = [mixed.new_empty((int(one.sum()), mixed.shape[1])) for one in chosen]
        group.exchange(parts, into)
        total = torch.zeros((len(mine), mixed.shape[1]), dtype=torch.float32, device=mixed.device)
        for one, rows in zip(chosen, into, strict=True):
            total[one] += rows
        whole = torch.empty_like(mixed)
        own_sums = total.to(mixed.dtype)
        group.exchange([own_sums] * group.size, [whole[run.start : run.stop] for run in runs])
        return whole
