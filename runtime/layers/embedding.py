"""Token ids to vectors."""

import torch
import torch.nn.functional as F

from ..quant import QuantTensor
from .linear import Linear


class Embedding:
    """``weight`` [V, C] in the type the activations should have."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:  # [T] -> [T, C]
        return F.embedding(token_ids, self.weight)


class TiedEmbedding:
    """An embedding that shares the head's weights: it reads its rows from the head's packed form."""

    def __init__(self, head: Linear, dtype: torch.dtype) -> None:
        (self._packed,) = head.parts
        self._dtype = dtype

    @property
    def weight(self) -> torch.Tensor:
        """[V, C], made at each call."""
        return self(torch.arange(self._packed.shape[0]))

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:  # [T] -> [T, C]
        return self._packed.rows(token_ids, self._dtype)


class BlockEmbedding:
    """The rows of a file's quantized table, unpacked on demand: a quarter of the memory of bfloat16."""

    def __init__(self, table: QuantTensor, dtype: torch.dtype) -> None:
        # A copy: a view would keep the whole file mapped.
        self._table = QuantTensor(table.kind, table.blocks.clone(), table.shape)
        self._dtype = dtype

    @property
    def weight(self) -> torch.Tensor:
        """[V, C], made at each call."""
        return self._table.dequantize(self._dtype)

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:  # [T] -> [T, C]
        return self._table.take_rows(token_ids).dequantize(self._dtype)
