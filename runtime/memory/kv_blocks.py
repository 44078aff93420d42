"""The keys and values of token blocks as bytes, for the tiers.

auto:                [P, layers, block, Hkv, D] in the pool's dtype   (P: keys, then values, or one part that is both)
int8 or fp8:         scales float32 [P, layers, block, Hkv], then bytes [P, layers, block, Hkv, D]

A pool of int8 has longer vectors, which hold their scales, and is copied as it is: ``auto``.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch

from .kv_pool import KVPool

BlockFormat = Literal["auto", "int8", "fp8"]

# dtype and greatest value
_BYTES: dict[str, tuple[torch.dtype, float]] = {"int8": (torch.int8, 127.0), "fp8": (torch.float8_e4m3fn, 448.0)}


class KVBlocks:
    """Copies blocks between a pool and bytes; ``auto`` is exact.

    In ``int8`` and ``fp8`` each head's vector of a token has its own scale. The quantisation error is at most 1/254 of
    the vector's greatest value for ``int8``; for ``fp8`` (e4m3) 1/16 of each value, or 2^-18 of the greatest if that is
    more.
    """

    def __init__(self, pool: KVPool, *, block_len: int, format: BlockFormat = "auto") -> None:
        assert format == "auto" or pool.dtype != torch.int8, format
        self.pool = pool
        self.block_len = block_len
        self.format = format
        num_heads, head_dim = pool.k[0].shape[1:]
        self._shape = (len(pool.parts), len(pool.k), block_len, num_heads, head_dim)

    def _rows(self, layer: torch.Tensor) -> torch.Tensor:
        """A view that can be indexed: torch cannot index 8-bit floats on every device, but bytes."""
        return layer.view(torch.uint8) if layer.dtype == torch.float8_e4m3fn else layer

    @property
    def size_bytes(self) -> int:
        """Of one block."""
        numbers = int(np.prod(self._shape))
        if self.format in _BYTES:
            return numbers + 4 * numbers // self._shape[-1]
        return numbers * self.pool.dtype.itemsize

    @torch.inference_mode()
    def save(self, slots: np.ndarray) -> list[bytes]:
        """The bytes of n blocks, whose slots are ``slots``, int32 [n, block_len]."""
        n = len(slots)
        index = torch.from_numpy(slots.reshape(-1).astype(np.int64)).to(self.pool.device)
        parts = [
            torch.stack([self._rows(layer)[index] for layer in layers]).view(self.pool.dtype)
            for layers in self.pool.parts
        ]
        whole = torch.stack(parts).view(*self._shape[:2], n, *self._shape[2:])  # [P, layers, n, block, Hkv, D]
        blocks = whole.movedim(2, 0).contiguous()  # [n, P, layers, block, Hkv, D]
        if self.format not in _BYTES:
            raw = blocks.view(n, -1).view(torch.uint8).cpu().numpy()
            return [row.tobytes() for row in raw]
        dtype, greatest = _BYTES[self.format]
        scales = blocks.float().abs().amax(dim=-1) / greatest
        scaled = blocks.float() / scales.clamp(min=1e-30)[..., None]
        rounded = (scaled.round() if dtype is torch.int8 else scaled).to(dtype).view(torch.uint8)
        heads = scales.view(n, -1).cpu().numpy()
        bodies = rounded.view(n, -1).cpu().numpy()
        return [head.tobytes() + body.tobytes() for head, body in zip(heads, bodies, strict=True)]

    @torch.inference_mode()
    def load(self, slots: np.ndarray, blocks: Sequence[bytes]) -> None:
        """Fill ``slots``, int32 [n, block_len], from n blocks of bytes."""
        for block in blocks:
            if len(block) != self.size_bytes:
                raise ValueError(f"a KV block of {len(block):,} bytes, but this pool's have {self.size_bytes:,}")
        raw = torch.from_numpy(np.frombuffer(b"".join(blocks), np.uint8).reshape(len(blocks), -1).copy())
        if self.format not in _BYTES:
            values = raw.view(self.pool.dtype).view(len(blocks), *self._shape)
        else:
            num_scales = int(np.prod(self._shape[:-1]))
            scales = raw[:, : 4 * num_scales].contiguous().view(torch.float32).view(len(blocks), *self._shape[:-1])
            rounded = raw[:, 4 * num_scales :].contiguous().view(_BYTES[self.format][0]).view(len(blocks), *self._shape)
            values = (rounded.float() * scales[..., None]).to(self.pool.dtype)
        index = torch.from_numpy(slots.reshape(-1).astype(np.int64)).to(self.pool.device)
        joined = values.movedim(0, 2).flatten(2, 3).to(self.pool.device)  # [P, layers, n * block, Hkv, D]
        for layers, part in zip(self.pool.parts, joined, strict=True):
            for layer, rows in zip(layers, part, strict=True):
                self._rows(layer)[index] = self._rows(rows)
