"""Rows grouped by what they use: an expert of a mixture, or an adapter.

rows of groups    2 0 - 2 0      order  1 4 | | 0 3 | 2      starts  0 2 2 4 5
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Groups:
    """Rows sorted by group. Made on the device; the host does not read it, which would wait for the device."""

    num_groups: int
    ids: Tensor  # int [P], -1: in no group
    order: Tensor  # int32 [P]: rows by group, rows in no group last
    starts: Tensor  # int32 [groups + 2]

    @classmethod
    def of(cls, group_ids: Tensor, num_groups: int) -> "Groups":
        """``group_ids`` int [P], -1 for a row in no group."""
        ids = torch.where(group_ids < 0, num_groups, group_ids).long()
        counts = torch.zeros(num_groups + 1, dtype=torch.int32, device=ids.device)
        counts.scatter_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))
        starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
        return cls(num_groups, group_ids, ids.argsort(stable=True).int(), starts)
