"""Low-rank adapters of linear layers, and which rows of a batch have which. Never reads a file.

y[t, columns] += x[t] @ down[a].T @ up[a].T        a: the token's adapter
"""

from dataclasses import dataclass

import torch

from ...kernels import Groups, add_adapters


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """Tokens by their adapter; those of none are left as they are."""

    groups: Groups
    scales: torch.Tensor  # float32 [T], all 1: an adapter's own scale is in its weights

    @classmethod
    def of(cls, ids: torch.Tensor, num_adapters: int) -> "AdapterRows":
        """``ids`` int [T], -1 for none."""
        return cls(Groups.of(ids, num_adapters), torch.ones(len(ids), dtype=torch.float32, device=ids.device))


@dataclass(frozen=True, slots=True)
class LowRank:
    """Of neighbouring outputs of a layer what each adapter adds; ranks are filled up to one with zeros."""

    columns: slice
    down: torch.Tensor  # [adapters, r, K]
    up: torch.Tensor  # [adapters, N, r]

    def add(self, y: torch.Tensor, x: torch.Tensor, rows: AdapterRows) -> None:
        add_adapters(y[:, self.columns], x, self.down, self.up, rows.groups, scales=rows.scales)
