"""Low-rank adapters of linear layers, and the adapter of each token of a batch.

y[t, columns] += x[t] @ down[a].T @ up[a].T        a: the token's adapter
"""

from dataclasses import dataclass

import torch

from ...kernels import Groups, add_adapters


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """The tokens of a batch, grouped by adapter. A token without an adapter is left unchanged."""

    groups: Groups
    scales: torch.Tensor  # float32 [T], all 1: an adapter's own scale is in its weights

    @classmethod
    def of(cls, ids: torch.Tensor, num_adapters: int) -> "AdapterRows":
        """``ids`` int [T], -1 for none."""
        return cls(Groups.of(ids, num_adapters), torch.ones(len(ids), dtype=torch.float32, device=ids.device))


@dataclass(frozen=True, slots=True)
class LowRank:
    """What each adapter adds to a range of neighbouring outputs of a layer. Ranks are padded with zeros to one rank."""

    columns: slice
    down: torch.Tensor  # [adapters, r, K]
    up: torch.Tensor  # [adapters, N, r]

    def add(self, y: torch.Tensor, x: torch.Tensor, rows: AdapterRows) -> None:
        add_adapters(y[:, self.columns], x, self.down, self.up, rows.groups, scales=rows.scales)
