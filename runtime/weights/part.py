"""A part of a file's tensor: what one rank of a split model reads, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..quant import GroupTensor, QuantTensor

StoredWeight = torch.Tensor | QuantTensor


@dataclass(frozen=True, slots=True)
class Part:
    """Ranges of a matrix's rows, one under another, and one range of its columns; None is all of them.

    A vector's entries are rows. Higher dimensions count as rows, as in ``QuantTensor``.
    """

    rows: tuple[range, ...] | None = None
    columns: range | None = None

    def num_rows(self, whole: int) -> int:
        return whole if self.rows is None else sum(map(len, self.rows))


def part_of(weight: StoredWeight, part: Part) -> StoredWeight:
    """``part`` of ``weight``. One range of rows is a view.

    Raises Unsupported where a border of the columns lies within a block of packed weights.
    """
    if isinstance(weight, torch.Tensor) and weight.ndim > 2:
        weight = weight.flatten(0, -2)
    if part.rows is not None:
        if len(part.rows) == 1:
            weight = _rows(weight, slice(part.rows[0].start, part.rows[0].stop))
        else:
            weight = _rows(weight, torch.cat([torch.arange(run.start, run.stop) for run in part.rows]))
    if part.columns is None:
        return weight
    if isinstance(weight, QuantTensor):
        return weight.take_columns(part.columns)
    return weight[:, part.columns.start : part.columns.stop]


def stored_bytes(weight: StoredWeight | GroupTensor) -> int:
    """The bytes of a weight as its file stores it; of groups its packed numbers, and 16 bits for a scale or a zero."""
    if isinstance(weight, GroupTensor):
        factors = weight.scale.numel() + (0 if weight.zero is None else weight.zero.numel())
        return weight.q.numel() * weight.bits // 8 + 2 * factors
    return weight.size_bytes if isinstance(weight, QuantTensor) else weight.numel() * weight.element_size()


def _rows(weight: StoredWeight, index: torch.Tensor | slice) -> StoredWeight:
    return weight.take_rows(index) if isinstance(weight, QuantTensor) else weight[index]
