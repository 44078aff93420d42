"""Rows grouped by what they use: an expert of a mixture, or an adapter.

rows of groups    2 0 - 2 0      order  1 4 | | 0 3 | 2      starts  0 2 2 4 5
"""

from typing import NamedTuple

from torch import Tensor


class GroupBlocks(NamedTuple):
    """Blocks of rows of one group, as a kernel reads them. There is room for the most blocks that the rows could need;
    those that they do not need have group -1.
    """

    order: Tensor  # int32 [P]: rows by group, rows in no group last
    starts: Tensor  # int32 [groups + 2]
    groups: Tensor  # int32 [blocks]
    firsts: Tensor  # int32 [blocks]: each block's first place in the order


class Groups:
    """``ids`` int [P]: each row's group, -1 for a row in none.

    ``blocks``: by block length. A kernel that needs them first makes them on the device, for its next calls too; the
    host does not read the result, which would wait for the device.
    """

    def __init__(self, ids: Tensor, num_groups: int) -> None:
        self.ids, self.num_groups = ids, num_groups
        self.blocks: dict[int, GroupBlocks] = {}
