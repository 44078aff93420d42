"""An encoder's layers, over texts packed one after another: no row is padding.

T: tokens of all texts, H: heads, D: a head's dimensions, E: the model's dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import torch
import torch.nn.functional as F

from ..layers.affine import Affine
from .config import Activation

_FARTHEST = 128  # tokens farther apart share the last class of distances
_QUERIES = 64  # least queries of a block, in layers with a window


@dataclass(frozen=True, slots=True)
class Texts:
    """``lengths`` ascend. ``places``: of each token in its text, int64 [T]. ``bias``: added to scores, [H, longest,
    longest], or None.
    """

    lengths: list[int]
    places: torch.Tensor
    bias: torch.Tensor | None = None

    def groups(self) -> Iterator[tuple[int, int, int]]:
        """(first token, texts, length of each) of the texts that have one length."""
        start = 0
        for length, group in groupby(self.lengths):
            count = len(list(group))
            yield start, count, length
            start += count * length


class EncoderLayer(Protocol):
    """``x`` and the result: float32 [T, E]."""

    def __call__(self, x: torch.Tensor, texts: Texts) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class PostNormLayer:
    """BERT's (Devlin et al., 2018): norms of the sums."""

    qkv: Affine
    output: Affine
    attention_norm: Affine
    up: Affine
    down: Affine
    mlp_norm: Affine
    num_heads: int
    eps: float
    activation: Activation

    def __call__(self, x: torch.Tensor, texts: Texts) -> torch.Tensor:
        mixed = attend(self.qkv.linear(x).view(len(x), 3, self.num_heads, -1), texts)
        x = self.attention_norm.norm(x + self.output.linear(mixed), self.eps)
        inner = activate(self.up.linear(x), self.activation)
        return self.mlp_norm.norm(x + self.down.linear(inner), self.eps)


@dataclass(frozen=True, slots=True)
class PreNormLayer:
    """ModernBERT's (Warner et al., 2024): norms of what attention and MLP read, rope, a gated MLP.

    ``attention_norm`` None: attention reads ``x`` as it is. ``cos_sin``: [places, D], cosines and then sines. A token
    attends to those at most ``window`` before and after it; 0: to the whole text. Of ``up`` the first half of the rows
    goes through the activation, the second half is multiplied with it.
    """

    qkv: Affine
    output: Affine
    attention_norm: Affine | None
    up: Affine
    down: Affine
    mlp_norm: Affine
    num_heads: int
    eps: float
    activation: Activation
    cos_sin: torch.Tensor
    window: int

    def __call__(self, x: torch.Tensor, texts: Texts) -> torch.Tensor:
        inner = x if self.attention_norm is None else self.attention_norm.norm(x, self.eps)
        qkv = self.qkv.linear(inner).view(len(x), 3, self.num_heads, -1)
        cos, sin = self.cos_sin[texts.places].view(len(x), 1, 1, -1).chunk(2, dim=-1)
        one, two = qkv[:, :2].chunk(2, dim=-1)
        rotated = torch.cat((one * cos - two * sin, two * cos + one * sin), dim=-1)
        x = x + self.output.linear(attend(torch.cat((rotated, qkv[:, 2:]), dim=1), texts, window=self.window))
        inner, gate = self.up.linear(self.mlp_norm.norm(x, self.eps)).chunk(2, dim=-1)
        return x + self.down.linear(activate(inner, self.activation) * gate)


def attend(qkv: torch.Tensor, texts: Texts, *, window: int = 0) -> torch.Tensor:
    """[T, E]: the values of each text, mixed for each of its tokens. ``qkv``: [T, 3, H, D].

    With ``window`` a block of queries reads the keys that one of them may read, so time grows with the length alone.
    """
    parts = []
    for start, count, length in texts.groups():
        part = qkv[start : start + count * length].view(count, length, *qkv.shape[1:])
        q, k, v = part.permute(2, 0, 3, 1, 4)  # [texts, H, length, D]
        if window and length > window + 1:
            mixed = torch.cat(list(_windowed(q, k, v, window)), dim=2)
        else:
            bias = None if texts.bias is None else texts.bias[:, :length, :length]
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        parts.append(mixed.transpose(1, 2).reshape(count * length, -1))
    return torch.cat(parts)


def _windowed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int) -> Iterator[torch.Tensor]:
    """Blocks of queries, one after another."""
    length = q.shape[2]
    at = torch.arange(length, device=q.device)
    block = max(_QUERIES, 2 * window)
    for first in range(0, length, block):
        queries = slice(first, min(first + block, length))
        keys = slice(max(0, first - window), min(first + block + window, length))
        near = (at[queries].unsqueeze(1) - at[keys]).abs() <= window
        yield F.scaled_dot_product_attention(q[:, :, queries], k[:, :, keys], v[:, :, keys], attn_mask=near)


def bias_by_distance(table: torch.Tensor, length: int) -> torch.Tensor:
    """[H, length, length]: what query i adds to the score of key j, by their distance (T5; Raffel et al., 2020).

    The first half of ``table``'s classes is for keys before the query, the second for those after it. Half of each half
    holds one distance a class, the rest grows with the logarithm up to ``_FARTHEST``.
    """
    half = len(table) // 2
    exact = half // 2
    at = torch.arange(length, device=table.device)
    ahead = at.unsqueeze(0) - at.unsqueeze(1)  # [i, j]: j - i
    far = ahead.abs()
    grown = (far.clamp_min(1).float() / exact).log() / math.log(_FARTHEST / exact) * (half - exact)
    classes = torch.where(far < exact, far, (exact + grown.long()).clamp_max(half - 1))
    return table[classes + half * (ahead > 0)].permute(2, 0, 1)


def activate(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    match activation:
        case "relu":
            return F.relu(x)
        case "tanh":
            return x.tanh()
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")
