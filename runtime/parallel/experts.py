"""Expert parallelism: each expert of a mixture lies whole on one rank, or on a few that split its inner dimensions.

    every rank: the residual, the router ─► the same choices ─► the tokens that chose my experts ─► their results
    long steps:   results of copies ─► home; results ─► to the rank that adds this token's ─► the sums to all ranks
    short steps:  results, zeros for other tokens ─► one sum of all ranks

(GShard: Lepikhin et al., 2021.) Every rank has every token's input, so results alone are sent. All ranks know all
choices, so they know each message's size. A GPU joins all steps by a sum: its host does not know the choices.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ...kernels import QuantizedWeight, mix_experts
from ...kernels.backend import reads_packed
from ..layers.adapters import AdapterRows
from ..layers.moe import MoE
from .expert_places import BLOCK, Places
from .group import Group
from .sharding import even_parts
from .sizes import SUM_BY_PARTS


class SplitExperts(MoE):
    """A mixture whose ranks hold other experts each. ``held``: of each rank of ``group``, its experts.

    ``num_spare``: rows of the weights after those of ``held``, for copies of other ranks' experts; 0: none.
    """

    def __init__(self, own: MoE, group: Group, held: Sequence[range], *, num_spare: int = 0) -> None:
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
        self.copies = CopiedExperts(self.gate_up, self.down, group, held, num_spare) if num_spare else None

    def __call__(self, x: Tensor, rows: AdapterRows | None = None) -> Tensor:  # [T, C] -> [T, C]
        weights, ids = self._route(self.router(x))  # [T, k]
        if reads_packed(x.device):  # a GPU's host must not wait for the choices: nothing has a size that they decide
            mixed = self._masked_experts(x, weights, ids)
            return self._group.sum(mixed if self.shared is None else mixed + self._shared_part(x))
        mixed = self._own_experts(x, weights, ids)
        if self.shared is not None:  # its part is of all tokens
            return self._group.sum(mixed + self._shared_part(x))
        if x.numel() < SUM_BY_PARTS:
            return self._group.sum(mixed)
        return self._exchanged(mixed, ids)

    def _masked_experts(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """[T, C]: what this rank's experts give to each token; choices of other experts are of none."""
        mine = self._held[self._group.rank]
        is_mine = (ids >= mine.start) & (ids < mine.stop)
        taken = x if isinstance(self.gate_up, QuantizedWeight) else x.to(self.gate_up.dtype)
        own_ids = torch.where(is_mine, ids - mine.start, -1).int()
        return mix_experts(taken, self.gate_up, self.down, weights, own_ids).to(x.dtype)

    def _own_experts(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """[T, C]: what this rank's experts give to each token."""
        mine = self._held[self._group.rank]
        tokens, places = ((ids >= mine.start) & (ids < mine.stop)).nonzero(as_tuple=True)
        if self.copies is not None:
            each = self.copies.results(x, weights, ids)
        else:
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


class CopiedExperts:
    """One rank's experts and its copies of others', with the tokens that chose each expert of the mixture.

    A result does not depend on where copies lie: an expert's tokens are computed in the same blocks on every rank, and
    go through the home of the expert. The ranks of a group call the same methods in the same order.
    """

    def __init__(
        self,
        gate_up: Tensor | QuantizedWeight,
        down: Tensor | QuantizedWeight,
        group: Group,
        held: Sequence[range],
        num_spare: int,
    ) -> None:
        assert isinstance(gate_up, Tensor) and isinstance(down, Tensor), "packed experts are not copied"
        self.gate_up, self.down = gate_up, down
        homes = list(dict.fromkeys(held))  # of each group of ranks
        self.places = Places(homes, num_spare)
        self._ranks = group
        self._each = group.size // len(homes)  # ranks that split the same experts
        self._mine, self._part = divmod(group.rank, self._each)
        self._rows = self.places.row_of(self._mine)
        self.load = np.zeros(self.places.num_experts)  # tokens of each expert; older ones count less
        self.tokens = np.zeros(
            (2, len(homes))
        )  # since the last review: of each group if there were no copies, and with

    @property
    def spare_bytes(self) -> int:
        """Of the spare places."""
        num_spare = self.places.spare.shape[1]
        return sum(weight[0].numel() * weight.element_size() * num_spare for weight in (self.gate_up, self.down))

    def results(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """[P, C]: the weighted results of the choices (token, place) of experts at home here, in the order of choices.
        In short steps, which would wait for the sending, copies are not used.
        """
        chosen = ids.numpy().ravel()
        counts = np.bincount(chosen, minlength=len(self.load))
        groups, firsts = self.places.share_out(counts, use_copies=x.numel() >= SUM_BY_PARTS)
        blocks = np.empty(len(chosen), np.int64)
        order = np.argsort(chosen, kind="stable")  # an expert's tokens stay in order
        starts = np.cumsum(counts) - counts
        blocks[order] = (np.arange(len(chosen)) - np.repeat(starts, counts)) // BLOCK
        by, home = groups[firsts[chosen] + blocks], self.places.home[chosen]
        self._note(counts, by)
        computed = np.flatnonzero(by == self._mine)
        rows = self._products(x, weights, chosen, computed, blocks[computed])
        if (by == home).all():
            return rows
        wanted = np.flatnonzero(home == self._mine)
        return self._sent_home(rows, home[computed], by[wanted])

    def _products(
        self, x: Tensor, weights: Tensor, chosen: np.ndarray, computed: np.ndarray, blocks: np.ndarray
    ) -> Tensor:
        """The results of the choices ``computed``: first blocks of all experts, second ones, and so on."""
        rows = self.gate_up.new_empty((len(computed), x.shape[1]))
        tokens = torch.from_numpy(computed // weights.shape[1])
        own_ids = torch.from_numpy(self._rows[chosen[computed]]).unsqueeze(1)
        own_weights = weights.flatten()[torch.from_numpy(computed)].unsqueeze(1)
        for block in range(int(blocks.max(initial=-1)) + 1):
            at = torch.from_numpy(np.flatnonzero(blocks == block))
            rows[at] = mix_experts(x[tokens[at]].to(rows.dtype), self.gate_up, self.down, own_weights[at], own_ids[at])
        return rows

    def _sent_home(self, rows: Tensor, homes: np.ndarray, by: np.ndarray) -> Tensor:
        """Sends ``rows`` to the ``homes`` of their experts; returns those of the experts at home here, which the groups
        ``by`` have computed."""
        parts, into = [], []
        for rank in range(self._ranks.size):
            group, part = divmod(rank, self._each)
            is_mine = part == self._part
            parts.append(rows[torch.from_numpy((homes == group) & is_mine)])
            into.append(rows.new_empty((int((by == group).sum()) * is_mine, rows.shape[1])))
        self._ranks.exchange(parts, into)
        found = rows.new_empty((len(by), rows.shape[1]))
        for group in range(self.places.num_groups):
            found[torch.from_numpy(by == group)] = into[group * self._each + self._part]
        return found

    def _note(self, counts: np.ndarray, by: np.ndarray) -> None:
        self.load += counts
        self.tokens[0] += self.places.tokens_at_home(counts)
        self.tokens[1] += np.bincount(by, minlength=self.places.num_groups)

    def review(self) -> int:
        """Copy the experts that are chosen most to where they are missed, at most one to each rank; returns how many
        copies the mixture has got. Between two steps; half of the load is forgotten.
        """
        moves = self.places.moves(self.load)
        for move in moves:
            source, to = (group * self._each + self._part for group in (move.source, move.to))
            if move.source == self._mine:
                row = move.expert - self.places.homes[self._mine].start
                self._ranks.send(self.gate_up[row], to)
                self._ranks.send(self.down[row], to)
            elif move.to == self._mine:
                row = len(self.places.homes[self._mine]) + move.place
                self._ranks.receive(self.gate_up[row], source)
                self._ranks.receive(self.down[row], source)
            self.places.make(move)
        self._rows = self.places.row_of(self._mine)
        self.load /= 2
        self.tokens[:] = 0
        return len(moves)
