"""Token ids to vectors."""

from typing import Protocol

import torch
import torch.nn.functional as F

from ..quant import QuantTensor
from .linear import Linear


class EmbeddingTable(Protocol):
    @property
    def weight(self) -> torch.Tensor:
        """[V, C]."""
        ...

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor: ...  # [T] -> [T, C]


class FloatEmbedding:
    """``weight`` [V, C] in the type the activations should have; they are its rows, times ``scale``."""

    def __init__(self, weight: torch.Tensor, *, scale: float = 1.0) -> None:
        self.weight = weight
        self._scale = scale

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:  # [T] -> [T, C]
        return _scaled(F.embedding(token_ids, self.weight), self._scale)


class TiedEmbedding:
    """An embedding that shares the head's weights: it reads its rows from the head's packed form.

    ``scale``: of the head's weights, which contain the head's gain.
    """

    def __init__(self, head: Linear, dtype: torch.dtype, *, scale: float = 1.0) -> None:
        (self._packed,) = head.parts
        self._dtype = dtype
        self._scale = scale / head.gain

    @property
    def weight(self) -> torch.Tensor:
        """[V, C], made at each call."""
        return self(torch.arange(self._packed.shape[0]))

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:  # [T] -> [T, C]
        return _scaled(self._packed.rows(token_ids, self._dtype), self._scale)

    def write(self, token_ids: torch.Tensor, out: torch.Tensor, residual: torch.Tensor) -> bool:
        """Writes the vectors of ``token_ids`` (int64 [T]) to ``out`` and ``residual`` (float32), both dense [T, C].

        One kernel does it. False, and nothing is written, where the vectors are scaled.
        """
        if self._scale != 1.0:
            return False
        self._packed.rows(token_ids, self._dtype, out=out, also=residual)
        return True


class BlockEmbedding:
    """The rows of a file's quantized table, unpacked on demand: a quarter of the memory of bfloat16."""

    def __init__(self, table: QuantTensor, dtype: torch.dtype, *, scale: float = 1.0) -> None:
        """``table`` must not lie in a mapped file: the file may change, and a view would keep all of it mapped."""
        self._table = table
        self._dtype = dtype
        self._scale = scale

    @property
    def weight(self) -> torch.Tensor:
        """[V, C], made at each call."""
        return self._table.dequantize(self._dtype)

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:  # [T] -> [T, C]
        return _scaled(self._table.take_rows(token_ids).dequantize(self._dtype), self._scale)


class NoEmbedding:
    """In place of the table in layers that get their input from other layers, on another rank."""

    @property
    def weight(self) -> torch.Tensor:
        raise RuntimeError("this rank has no embedding; rank 0 has it")

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("this rank has no embedding; rank 0 has it")


def _scaled(x: torch.Tensor, scale: float) -> torch.Tensor:
    return x if scale == 1.0 else x * scale
