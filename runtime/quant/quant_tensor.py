"""A weight as its file's blocks of bytes, and what they mean. Never rounds: ``dequantize`` is exact in float32."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..protocol.errors import Unsupported


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """One way of packing ``block_len`` neighbouring weights of a row into ``block_bytes`` bytes."""

    block_len: int
    block_bytes: int
    decode: Callable[[torch.Tensor], torch.Tensor]  # uint8 [B, block_bytes] -> float32 [B, block_len]


@dataclass(frozen=True, slots=True)
class QuantTensor:
    """A matrix in ggml's block format ``kind`` (one of ``FORMATS``).

    ``blocks`` is uint8 [rows, blocks of a row, bytes of a block]; it may be mapped from the file, so never write to it.
    Rows are whole: permuting, slicing and stacking rows keeps the blocks as they are.
    """

    kind: str
    blocks: torch.Tensor
    shape: tuple[int, int]  # (rows, weights of a row)

    @classmethod
    def from_bytes(cls, kind: str, data: torch.Tensor, shape: Sequence[int]) -> "QuantTensor":
        """Blocks from a flat uint8 tensor; higher dimensions of ``shape`` fold into rows."""
        form = format_of(kind)
        row_len, num_rows = int(shape[-1]), 1
        for size in shape[:-1]:
            num_rows *= int(size)
        if row_len % form.block_len:
            raise Unsupported(f"{kind} tensor with rows of {row_len} weights; its blocks hold {form.block_len}")
        blocks = data.view(num_rows, row_len // form.block_len, form.block_bytes)
        return cls(kind, blocks, (num_rows, row_len))

    def dequantize(self) -> torch.Tensor:
        """The float32 weights [rows, weights of a row]."""
        flat = self.blocks.reshape(-1, self.blocks.shape[-1])
        return format_of(self.kind).decode(flat).view(self.shape)

    def take_rows(self, index: torch.Tensor | slice) -> "QuantTensor":
        blocks = self.blocks[index]
        return QuantTensor(self.kind, blocks, (blocks.shape[0], self.shape[1]))

    @property
    def size_bytes(self) -> int:
        return self.blocks.numel()


def format_of(kind: str) -> BlockFormat:
    if kind not in FORMATS:
        raise Unsupported(f"weights of type {kind}; the types read are {', '.join(FORMATS)}")
    return FORMATS[kind]


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """The float16 at byte ``start`` of every block, as float32 [B, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """[B, n] bytes -> [B, 2n]: all low nibbles, then all high ones."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _fifth_bits(packed: torch.Tensor) -> torch.Tensor:
    """[B, 4] bytes -> [B, 32]: bit i of the little-endian word, moved to bit 4."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(-1) >> shifts) & 1).reshape(packed.shape[0], 32) << 4


def _decode_q4_0(b: torch.Tensor) -> torch.Tensor:
    return _half(b, 0) * (_nibbles(b[:, 2:]).float() - 8)


def _decode_q4_1(b: torch.Tensor) -> torch.Tensor:
    return _half(b, 0) * _nibbles(b[:, 4:]).float() + _half(b, 2)


def _decode_q5_0(b: torch.Tensor) -> torch.Tensor:
    return _half(b, 0) * ((_nibbles(b[:, 6:]) | _fifth_bits(b[:, 2:6])).float() - 16)


def _decode_q5_1(b: torch.Tensor) -> torch.Tensor:
    return _half(b, 0) * (_nibbles(b[:, 8:]) | _fifth_bits(b[:, 4:8])).float() + _half(b, 2)


def _decode_q8_0(b: torch.Tensor) -> torch.Tensor:
    return _half(b, 0) * b[:, 2:].contiguous().view(torch.int8).float()


def k_scales(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The eight 6-bit scales and minima of a K super-block, from their 12 bytes: two uint8 [B, 8]."""
    low_scale, low_min, high = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scale = torch.cat((low_scale & 63, (high & 15) | ((low_scale >> 6) << 4)), dim=-1)
    minimum = torch.cat((low_min & 63, (high >> 4) | ((low_min >> 6) << 4)), dim=-1)
    return scale, minimum


def k_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """The 256 nibbles of a K super-block, in order, from their 128 bytes: uint8 [B, 8, 32].

    bytes 0..31: low nibbles are group 0, high nibbles group 1; bytes 32..63: groups 2 and 3; and so on.
    """
    chunks = packed.reshape(-1, 4, 1, 32)
    return torch.cat((chunks & 15, chunks >> 4), dim=2).view(-1, 8, 32)


def _decode_q4_k(b: torch.Tensor) -> torch.Tensor:
    scale, minimum = k_scales(b[:, 4:16])
    scaled, offset = _half(b, 0) * scale.float(), _half(b, 2) * minimum.float()  # [B, 8]
    return (scaled.unsqueeze(-1) * k_nibbles(b[:, 16:]).float() - offset.unsqueeze(-1)).view(-1, 256)


def _decode_q5_k(b: torch.Tensor) -> torch.Tensor:
    scale, minimum = k_scales(b[:, 4:16])
    scaled, offset = _half(b, 0) * scale.float(), _half(b, 2) * minimum.float()
    shifts = torch.arange(8, dtype=torch.uint8, device=b.device).view(1, 8, 1)
    fifth = ((b[:, 16:48].unsqueeze(1) >> shifts) & 1) << 4  # [B, 8, 32]
    q = k_nibbles(b[:, 48:]) | fifth
    return (scaled.unsqueeze(-1) * q.float() - offset.unsqueeze(-1)).view(-1, 256)


def _decode_q6_k(b: torch.Tensor) -> torch.Tensor:
    # Each half of the super-block: 64 bytes of low nibbles, 32 bytes of high bit pairs, four runs of 32 weights.
    low = b[:, :128].reshape(-1, 2, 64)
    low = torch.cat((low & 15, low >> 4), dim=-1).view(-1, 2, 4, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=b.device).view(1, 1, 4, 1)
    high = ((b[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3) << 4
    q = (low | high).view(-1, 16, 16).float() - 32
    scale = _half(b, 208) * b[:, 192:208].contiguous().view(torch.int8).float()  # [B, 16]
    return (scale.unsqueeze(-1) * q).view(-1, 256)


FORMATS: dict[str, BlockFormat] = {
    "Q4_0": BlockFormat(32, 18, _decode_q4_0),
    "Q4_1": BlockFormat(32, 20, _decode_q4_1),
    "Q5_0": BlockFormat(32, 22, _decode_q5_0),
    "Q5_1": BlockFormat(32, 24, _decode_q5_1),
    "Q8_0": BlockFormat(32, 34, _decode_q8_0),
    "Q4_K": BlockFormat(256, 144, _decode_q4_k),
    "Q5_K": BlockFormat(256, 176, _decode_q5_k),
    "Q6_K": BlockFormat(256, 210, _decode_q6_k),
}
