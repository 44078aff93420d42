"""Float matrices rounded to few bits: for each group of neighbours the range that loses least."""

from dataclasses import dataclass

import numpy as np
import torch

from ...kernels.linear import quantize_int8

MOST_FLOAT8 = 448.0  # the greatest number of e4m3
_SHRINKS = tuple(1 - 0.04 * i for i in range(10))  # of a group's range: fewer steps outside, finer ones inside
_FEWER_STEPS = tuple(range(14, 7, -1))  # in a group's range: weights that were rounded before may lie on such a grid
_ROWS = 512  # rounded at a time
_COLUMNS = 64  # whose errors are carried into the columns after them at once
_DAMPING = 0.01  # of the mean of the inputs' squares, added to each, so that the matrix of inputs has an inverse


@dataclass(frozen=True, slots=True)
class RoundedGroups:
    """``w = (q - zero) * scale``: q uint8 [N, K] of 0..15, zero uint8 and scale float32 [N, G]."""

    q: torch.Tensor
    zero: torch.Tensor
    scale: torch.Tensor

    def dequantize(self) -> torch.Tensor:
        groups = self.q.float().view(*self.scale.shape, -1)
        return ((groups - self.zero.unsqueeze(-1)) * self.scale.unsqueeze(-1)).view(self.q.shape)


@dataclass(frozen=True, slots=True)
class AffineGroups:
    """``w = q * scale + minimum``: q uint8 [N, K] of 0..15, scale and minimum float32 [N, G]."""

    q: torch.Tensor
    scale: torch.Tensor
    minimum: torch.Tensor

    def dequantize(self) -> torch.Tensor:
        groups = self.q.float().view(*self.scale.shape, -1)
        return (groups * self.scale.unsqueeze(-1) + self.minimum.unsqueeze(-1)).view(self.q.shape)


@dataclass(frozen=True, slots=True)
class Curvature:
    """How much an error of each weight of a product costs, and how later weights make up for it.

    ``order`` int64 [K]: the columns, those with the largest inputs first. ``factor`` float32 [K, K], in that order: the
    upper Cholesky factor of the inverse of the inputs' matrix. ``costs`` float32 [K]: the sum of each input's squares.
    """

    order: torch.Tensor
    factor: torch.Tensor
    costs: torch.Tensor

    @classmethod
    def of(cls, inputs: torch.Tensor) -> "Curvature":
        """``inputs`` float32 [K, K]: the sum of x x^T over the product's inputs."""
        costs = inputs.diagonal().clone()
        costs[costs == 0] = 1.0
        order = costs.argsort(descending=True, stable=True)
        hessian = inputs[order][:, order].double()
        diagonal = hessian.diagonal()
        diagonal[diagonal == 0] = 1.0
        diagonal += _DAMPING * diagonal.mean()
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian))
        return cls(order, torch.linalg.cholesky(inverse, upper=True).float(), costs)


def round_to_fours(
    weight: torch.Tensor, *, group_len: int, scale_dtype: torch.dtype, curvature: Curvature | None = None
) -> RoundedGroups:
    """4-bit groups with whole zero points; each group's range is the one of ten with the least square error.

    With ``curvature`` the errors are made up for as in ``compensated``. Scales are numbers of ``scale_dtype``.
    """
    costs = None if curvature is None else curvature.costs
    parts = [_fours(rows, group_len, scale_dtype, costs) for rows in weight.float().split(_ROWS)]
    q, zero, scale = (torch.cat(column) for column in zip(*parts, strict=True))
    if curvature is not None:
        q = compensated(weight, curvature, group_len, scale, -zero.float() * scale)
    return RoundedGroups(q, zero, scale)


def _fours(
    weight: torch.Tensor, group_len: int, scale_dtype: torch.dtype, importance: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    num_rows, width = weight.shape
    groups = weight.view(num_rows, -1, group_len)
    costs = torch.ones(width) if importance is None else importance.float()
    costs = costs.view(1, -1, group_len)
    low, high = groups.amin(dim=-1).clamp_max(0), groups.amax(dim=-1).clamp_min(0)
    found: tuple[torch.Tensor, ...] = ()
    for shrink in _SHRINKS:
        scale = ((high - low) * shrink / 15).to(scale_dtype).float()
        step = scale.clamp_min(torch.finfo(torch.float16).tiny)
        zero = (-low * shrink / step).round().clamp_(0, 15)
        q = (groups / step.unsqueeze(-1) + zero.unsqueeze(-1)).round_().clamp_(0, 15)
        error = (((q - zero.unsqueeze(-1)) * scale.unsqueeze(-1) - groups).square_() * costs).sum(dim=-1)
        if not found:
            found = (q, zero, scale, error)
            continue
        better = error < found[3]
        found = tuple(
            torch.where(better.unsqueeze(-1) if new.ndim == 3 else better, new, old)
            for new, old in zip((q, zero, scale, error), found, strict=True)
        )
    q, zero, scale, _ = found
    return q.to(torch.uint8).view(num_rows, width), zero.to(torch.uint8), scale


def compensated(
    weight: torch.Tensor, curvature: Curvature, group_len: int, scale: torch.Tensor, offset: torch.Tensor
) -> torch.Tensor:
    """GPTQ (Frantar et al., 2023): column by column, the error of one is made up for by the columns after it.

    Columns are taken in ``curvature.order``; scale and offset float32 [N, G] stay as they are. Returns q uint8 [N, K]
    with ``w = q * scale + offset``. The loop runs in numpy: its operations are too short for torch's threads.
    """
    num_columns = weight.shape[1]
    order, factor = curvature.order.numpy(), curvature.factor.numpy()
    rest = weight.float().T[curvature.order].contiguous().numpy()  # [K, N], in that order
    offsets = offset.T.contiguous().numpy()  # [G, N]
    scales = scale.T.contiguous().numpy()
    steps = np.where(scales == 0, np.float32(1), scales)
    q = np.empty((num_columns, len(weight)), dtype=np.uint8)
    for start in range(0, num_columns, _COLUMNS):
        end = min(start + _COLUMNS, num_columns)
        errors = np.empty((end - start, len(weight)), dtype=np.float32)
        for i in range(start, end):
            group, column = order[i] // group_len, rest[i]
            number = np.clip(np.rint((column - offsets[group]) / steps[group]), 0, 15)
            q[order[i]] = number
            error = errors[i - start]
            np.divide(column - (number * scales[group] + offsets[group]), factor[i, i], out=error)
            rest[i + 1 : end] -= factor[i, i + 1 : end, None] * error
        rest[end:] -= factor[start:end, end:].T @ errors
    return torch.from_numpy(q).T.contiguous()


def round_to_affine(
    weight: torch.Tensor, *, group_len: int, scale_dtype: torch.dtype, curvature: Curvature | None = None
) -> AffineGroups:
    """4-bit groups with a real minimum; scales and minima are numbers of ``scale_dtype``.

    Each range is tried as in ``round_to_fours``; the scale and minimum are then those of the least square error, so
    weights that lie on 16 even steps are found again. With ``curvature`` the errors are made up for as in
    ``compensated``.
    """
    costs = None if curvature is None else curvature.costs
    parts = [_affine(rows, group_len, scale_dtype, costs) for rows in weight.float().split(_ROWS)]
    q, scale, minimum = (torch.cat(column) for column in zip(*parts, strict=True))
    if curvature is not None:
        q = compensated(weight, curvature, group_len, scale, minimum)
    return AffineGroups(q, scale, minimum)


def round_to_q4_1(weight: torch.Tensor, *, curvature: Curvature | None = None) -> torch.Tensor:
    """ggml's Q4_1 blocks, uint8 [N, K / 32 * 20]: affine groups of 32 with scales and minima of float16."""
    groups = round_to_affine(weight, group_len=32, scale_dtype=torch.float16, curvature=curvature)
    return _q4_1_blocks(groups.q, groups.scale, groups.minimum)


def _q4_1_blocks(q: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor) -> torch.Tensor:
    numbers = q.view(*scale.shape, 32)
    halves = numbers[..., :16] | numbers[..., 16:] << 4
    factors = torch.stack((scale, minimum), dim=-1).half().view(torch.uint8)
    return torch.cat((factors, halves), dim=-1).view(len(q), -1)


def _affine(
    weight: torch.Tensor, group_len: int, scale_dtype: torch.dtype, importance: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    num_rows, width = weight.shape
    groups = weight.view(num_rows, -1, group_len)
    costs = (torch.ones(width) if importance is None else importance.float()).view(1, -1, group_len)
    total = costs.sum(dim=-1)
    mean_w = (groups * costs).sum(dim=-1) / total
    low, high = groups.amin(dim=-1), groups.amax(dim=-1)
    ranges = [((high - low) * shrink / 15, low + (high - low) * (1 - shrink) / 2) for shrink in _SHRINKS]
    ranges += [((high - low) / count, low) for count in _FEWER_STEPS]
    found: tuple[torch.Tensor, ...] = ()
    for scale, minimum in ranges:
        for _ in range(2):
            scale, minimum = (part.to(scale_dtype).float() for part in (scale, minimum))
            step = torch.where(scale == 0, 1.0, scale)
            q = ((groups - minimum.unsqueeze(-1)) / step.unsqueeze(-1)).round_().clamp_(0, 15)
            error = ((q * scale.unsqueeze(-1) + minimum.unsqueeze(-1) - groups).square_() * costs).sum(dim=-1)
            if not found:
                found = (q, scale, minimum, error)
            else:
                better = error < found[3]
                found = tuple(
                    torch.where(better.unsqueeze(-1) if new.ndim == 3 else better, new, old)
                    for new, old in zip((q, scale, minimum, error), found, strict=True)
                )
            mean_q = (q * costs).sum(dim=-1) / total
            spread = ((q - mean_q.unsqueeze(-1)).square() * costs).sum(dim=-1)
            joint = ((q - mean_q.unsqueeze(-1)) * (groups - mean_w.unsqueeze(-1)) * costs).sum(dim=-1)
            scale = torch.where(spread > 0, joint / spread.clamp_min(1e-30), scale)
            minimum = mean_w - scale * mean_q
    q, scale, minimum, _ = found
    return q.to(torch.uint8).view(num_rows, width), scale, minimum


def round_to_q8_0(weight: torch.Tensor) -> torch.Tensor:
    """ggml's Q8_0 blocks, uint8 [N, K / 32 * 34]."""
    q, scale = quantize_int8(weight)
    half = scale.half()
    step = half.float().clamp_min(torch.finfo(torch.float16).tiny).unsqueeze(-1)
    groups = weight.float().view(*scale.shape, 32)
    numbers = (groups / step).round_().clamp_(-127, 127).to(torch.int8)
    parts = half.unsqueeze(-1).view(torch.uint8), numbers.view(torch.uint8)
    return torch.cat(parts, dim=-1).view(len(q), -1)


def round_to_float8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``(e4m3 [N, K], scale float32 [N, 1])``: each row uses the whole range."""
    scale = (weight.float().abs().amax(dim=1, keepdim=True) / MOST_FLOAT8).clamp_min(torch.finfo(torch.float32).tiny)
    return (weight.float() / scale).clamp_(-MOST_FLOAT8, MOST_FLOAT8).to(torch.float8_e4m3fn), scale


def pack_words(numbers: torch.Tensor, bits: int, *, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """int32 [..., W]: ``32 / bits`` numbers uint8 [..., n] in a word, the first one lowest; the last word is padded.

    ``order[i]``: which of a word's numbers has bit ``bits * i``.
    """
    count = 32 // bits
    padded = torch.nn.functional.pad(numbers, (0, -numbers.shape[-1] % count))
    parts = padded.view(*padded.shape[:-1], -1, count).long()
    words = torch.zeros(parts.shape[:-1], dtype=torch.int64)
    for i in range(count):
        words |= parts[..., i if order is None else order[i]] << (bits * i)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()
