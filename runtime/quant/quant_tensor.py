"""A weight as its file's blocks of bytes; ``dequantize`` decodes them, exactly in float32."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...protocol.errors import Unsupported
from . import block_decoding as blocks_of
from . import small_blocks

CHUNK = 1 << 15  # weights decoded at a time: few enough for the cache, and for torch to start no threads


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """One way of packing ``block_len`` neighbouring weights of a row into ``block_bytes`` bytes."""

    block_len: int
    block_bytes: int
    decode: blocks_of.Decoder


FORMATS: dict[str, BlockFormat] = {
    "Q4_0": BlockFormat(32, 18, blocks_of.decode_q4_0),
    "Q4_1": BlockFormat(32, 20, blocks_of.decode_q4_1),
    "Q5_0": BlockFormat(32, 22, blocks_of.decode_q5_0),
    "Q5_1": BlockFormat(32, 24, blocks_of.decode_q5_1),
    "Q8_0": BlockFormat(32, 34, blocks_of.decode_q8_0),
    "Q4_K": BlockFormat(256, 144, blocks_of.decode_q4_k),
    "Q5_K": BlockFormat(256, 176, blocks_of.decode_q5_k),
    "Q6_K": BlockFormat(256, 210, blocks_of.decode_q6_k),
    "Q2_K": BlockFormat(256, 84, small_blocks.decode_q2_k),
    "Q3_K": BlockFormat(256, 110, small_blocks.decode_q3_k),
    "IQ4_NL": BlockFormat(32, 18, small_blocks.decode_iq4_nl),
    "IQ4_XS": BlockFormat(256, 136, small_blocks.decode_iq4_xs),
    "MXFP4": BlockFormat(32, 17, small_blocks.decode_mxfp4),
    "TQ1_0": BlockFormat(256, 54, small_blocks.decode_tq1_0),
    "TQ2_0": BlockFormat(256, 66, small_blocks.decode_tq2_0),
    "IQ1_S": BlockFormat(256, 50, small_blocks.by_package("IQ1_S")),
    "IQ1_M": BlockFormat(256, 56, small_blocks.by_package("IQ1_M")),
    "IQ2_XXS": BlockFormat(256, 66, small_blocks.by_package("IQ2_XXS")),
    "IQ2_XS": BlockFormat(256, 74, small_blocks.by_package("IQ2_XS")),
    "IQ2_S": BlockFormat(256, 82, small_blocks.by_package("IQ2_S")),
    "IQ3_XXS": BlockFormat(256, 98, small_blocks.by_package("IQ3_XXS")),
    "IQ3_S": BlockFormat(256, 110, small_blocks.by_package("IQ3_S")),
}


@dataclass(frozen=True, slots=True)
class QuantTensor:
    """A matrix in ggml's block format ``kind`` (one of ``FORMATS``), on the CPU.

    ``blocks`` is uint8 [rows, blocks of a row, bytes of a block]; it may be mapped from the file, so never write to it.
    Rows are whole: permuting and slicing rows keeps the blocks as they are.
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

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The weights [rows, weights of a row]: exact in float32, rounded once in another type."""
        form = format_of(self.kind)
        blocks = self.blocks.reshape(-1, form.block_bytes).numpy()
        out = torch.empty(len(blocks), form.block_len, dtype=dtype)
        step = CHUNK // form.block_len
        scratch = torch.empty(step, form.block_len)
        for i in range(0, len(blocks), step):
            piece = blocks[i : i + step]
            if dtype == torch.float32:
                form.decode(piece, out[i : i + step].numpy())
            else:
                form.decode(piece, scratch[: len(piece)].numpy())
                out[i : i + step] = scratch[: len(piece)]
        return out.view(self.shape)

    def take_rows(self, index: torch.Tensor | slice) -> "QuantTensor":
        blocks = self.blocks[index]
        return QuantTensor(self.kind, blocks, (blocks.shape[0], self.shape[1]))

    def take_columns(self, columns: range) -> "QuantTensor":
        """Neighbouring weights of every row, in whole blocks. Raises Unsupported where a border cuts a block."""
        block_len = format_of(self.kind).block_len
        if columns.start % block_len or columns.stop % block_len:
            raise Unsupported(
                f"weights {columns.start} to {columns.stop} of rows of {self.kind}, whose blocks hold {block_len}; "
                f"split the model into fewer parts, or convert it to blocks of 32 (Q8_0, Q4_0, Q4_1)"
            )
        blocks = self.blocks[:, columns.start // block_len : columns.stop // block_len]
        return QuantTensor(self.kind, blocks, (self.shape[0], len(columns)))

    @property
    def size_bytes(self) -> int:
        return self.blocks.numel()


def format_of(kind: str) -> BlockFormat:
    if kind not in FORMATS:
        raise Unsupported(f"weights of type {kind}; the types read are {', '.join(FORMATS)}")
    return FORMATS[kind]
