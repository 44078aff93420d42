"""A weight as whole numbers of 4 or 8 bits with a scale for each group of neighbours."""

from dataclasses import dataclass

import torch

from ...kernels.linear import quantize_int8
from .group32 import GROUP_LEN

_CENTRE = {4: 8, 8: 128}
_ROWS = 512  # rounded at a time


@dataclass(frozen=True, slots=True)
class GroupTensor:
    """A matrix [N, K] in groups of ``K / G`` neighbours of a row, on the CPU.

    Of 4 bits ``w = (q - 8) * scale + zero``, with q uint8 of 0..15; of 8 bits ``w = q * scale``, with q int8 and no
    zero. ``scale`` and ``zero`` are float32 [N, G], and a group's length is a multiple of 32: the kernels' groups of 32
    hold the same weights. With ``centre`` 128 there is a zero and q is uint8 of 0..255: no kernel has this form, which
    is rounded to 8 bits without a zero.
    """

    q: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None = None
    centre: int = 8

    @property
    def shape(self) -> tuple[int, int]:
        return self.q.shape[0], self.q.shape[1]

    @property
    def bits(self) -> int:
        return 8 if self.is_exact_in_bytes or self.centre == 128 else 4

    @property
    def is_exact_in_bytes(self) -> bool:
        """Whether ``parts32`` are the weights as 8 bits without a zero, not rounded."""
        return self.zero is None

    def parts32(self) -> tuple[torch.Tensor, ...]:
        """``(q, scale, zero)`` in groups of 32, or of 8 bits ``(q, scale)``."""
        if self.centre == 128:
            runs = range(0, len(self.q), _ROWS)
            rounded = [quantize_int8(self.take_rows(slice(i, i + _ROWS)).dequantize()) for i in runs]
            return tuple(torch.cat(part) for part in zip(*rounded, strict=True))
        times = self.q.shape[1] // GROUP_LEN // self.scale.shape[1]
        factors = (self.scale,) if self.zero is None else (self.scale, self.zero)
        return self.q, *(part.repeat_interleave(times, dim=1) for part in factors)

    def take_rows(self, index: torch.Tensor | slice) -> "GroupTensor":
        zero = None if self.zero is None else self.zero[index]
        return GroupTensor(self.q[index], self.scale[index], zero, self.centre)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The weights [N, K]: computed in float32, rounded once in another type."""
        groups = self.q.float().view(*self.scale.shape, -1)
        if self.zero is None:
            return (groups * self.scale.unsqueeze(-1)).view(self.shape).to(dtype)
        return ((groups - self.centre) * self.scale.unsqueeze(-1) + self.zero.unsqueeze(-1)).view(self.shape).to(dtype)


def group_tensor(
    q: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None = None,
    *,
    bits: int,
    group_ids: torch.Tensor | None = None,
) -> GroupTensor | torch.Tensor:
    """``w[n, k] = (q[n, k] - zero_point[n, g]) * scale[n, g]``, packed where the kernels have its groups; else float32.

    q: uint8 [N, K] of ``bits`` bits. ``scale`` and ``zero_point`` (by default the middle of q's range): [N, G].
    ``group_ids`` int64 [K]: the group g of each column; by default G groups of neighbours. Fewer than 4 bits become 4.
    """
    width, num_groups = q.shape[1], scale.shape[1]
    scale = scale.float()
    centre = _CENTRE[8 if bits == 8 else 4]
    middle = 1 << (bits - 1)
    zero = torch.full_like(scale, middle) if zero_point is None else zero_point.float()
    neighbours = torch.arange(width) // -(-width // num_groups)
    if group_ids is not None and torch.equal(group_ids, neighbours):
        group_ids = None
    in_groups = group_ids is None and width % num_groups == 0 and width // num_groups % GROUP_LEN == 0
    if in_groups and bits <= 4:
        return GroupTensor(q, scale, (centre - zero) * scale)
    if in_groups and bool((zero == centre).all()):
        return GroupTensor((q.to(torch.int16) - centre).to(torch.int8), scale)
    if group_ids is None:
        group_ids = neighbours
    return (q.float() - zero[:, group_ids]) * scale[:, group_ids]
