"""Where a layer writes its keys and values, and attention over those of the whole context."""

from typing import Protocol

import torch

from ...kernels import paged_attention, shared_prefix_attention
from ..memory import KVPool
from .batch import ForwardBatch


class LayerKeys(Protocol):
    """A layer calls ``places``, writes there, then ``keep``; ``attend`` after that."""

    def places(self, batch: ForwardBatch, kv: KVPool, layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tensors for the batch's keys and values, and the row of each token in them."""
        ...

    def keep(self, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch, kv: KVPool, layer: int) -> None:
        """The tensors of ``places`` are filled."""
        ...

    def attend(
        self,
        q: torch.Tensor,
        batch: ForwardBatch,
        kv: KVPool,
        layer: int,
        *,
        scale: float,
        window: int = 0,
        soft_cap: float = 0.0,
        first: int = 0,
    ) -> torch.Tensor:
        """[T, H, D - first] of q [T, H, D]: attention, without the first dimensions of values."""
        ...


class LocalKeys:
    """All of them lie in the pool."""

    def places(self, batch: ForwardBatch, kv: KVPool, layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return kv.k[layer], kv.v[layer], batch.out_slots

    def keep(self, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch, kv: KVPool, layer: int) -> None:
        pass

    def attend(
        self,
        q: torch.Tensor,
        batch: ForwardBatch,
        kv: KVPool,
        layer: int,
        *,
        scale: float,
        window: int = 0,
        soft_cap: float = 0.0,
        first: int = 0,
    ) -> torch.Tensor:
        rows = (batch.slot_table, batch.row_ids, batch.query_starts, batch.kv_lens)
        inputs = (q, kv.k[layer], kv.v[layer], *rows)
        if batch.shared is not None and not window:
            mixed = shared_prefix_attention(*inputs, shared=batch.shared, scale=scale, soft_cap=soft_cap)
        else:
            mixed = paged_attention(*inputs, scale=scale, sliding_window=window, soft_cap=soft_cap)
        return mixed[:, :, first:] if first else mixed
