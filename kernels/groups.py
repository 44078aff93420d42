"""Rows grouped by what they use: an expert of a mixture, or an adapter.

rows of groups    2 0 - 2 0      order  1 4 | | 0 3 | 2      starts  0 2 2 4 5
"""

from functools import cached_property

import torch
from torch import Tensor


class Groups:
    """``ids`` int [P]: each row's group, -1 for a row in none.

    Rows are sorted on the device, where a kernel first needs that; the host does not read the result, which would wait
    for the device. ``blocks``: by block length what a kernel has made of ``starts``, for its next calls.
    """

    def __init__(self, ids: Tensor, num_groups: int) -> None:
        self.ids, self.num_groups = ids, num_groups
        self.blocks: dict[int, tuple[Tensor, Tensor]] = {}

    @cached_property
    def order(self) -> Tensor:
        """int32 [P]: rows by group, rows in no group last."""
        return self._numbers.argsort(stable=True).int()

    @cached_property
    def starts(self) -> Tensor:
        """int32 [groups + 2]"""
        ids = self._numbers
        counts = torch.zeros(self.num_groups + 1, dtype=torch.int32, device=ids.device)
        counts.scatter_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))
        return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()

    @property
    def _numbers(self) -> Tensor:
        return torch.where(self.ids < 0, self.num_groups, self.ids).long()
