"""Low-rank adapters of linear layers, and the adapter of each token of a batch.

y[t, columns] += x[t] @ down[a].T @ up[a].T        a: the token's adapter
"""

from dataclasses import dataclass, field

import torch

from ...kernels import Groups, add_adapters


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """The tokens of a batch, grouped by adapter. A token without an adapter is left unchanged."""

    groups: Groups

    @classmethod
    def of(cls, ids: torch.Tensor, num_adapters: int) -> "AdapterRows":
        """``ids`` int [T], -1 for none."""
        return cls(Groups(ids, num_adapters))

    @property
    def ids(self) -> torch.Tensor:
        return self.groups.ids


@dataclass(frozen=True, slots=True)
class LowRank:
    """What each adapter adds to a range of neighbouring outputs of a layer. Ranks are padded with zeros to one rank."""

    columns: slice
    down: torch.Tensor  # [adapters, r, K]
    up: torch.Tensor  # [adapters, N, r]

    def add(self, y: torch.Tensor, x: torch.Tensor, rows: AdapterRows) -> None:
        add_adapters(y[:, self.columns], x, self.down, self.up, rows.groups)


@dataclass(slots=True)
class AdapterNames:
    """The adapters of a model's products, by number. Models that have products in common share it.

    ``names``: "" is a free number. ``num_moves``: how often the products' tables have been made anew. What holds
    addresses of tables, such as a tape or a graph, is valid only for the number at which it was made.
    """

    names: list[str] = field(default_factory=list)
    num_moves: int = 0

    def __len__(self) -> int:
        return len(self.names)
