"""The tensors of keys and values, one row per slot. The radix cache decides whose a slot is."""

from collections.abc import Sequence

import numpy as np
import torch

from ...kernels.quantized_kv import kv_row_len
from ..weights.model_config import ModelConfig
from .pages import zeroed_pages


class KVPool:
    """``k[layer]`` and ``v[layer]`` are [num_slots, Hkv, ``kv_row_len``]: D numbers, and in int8 their scales.

    On the CPU, pages take memory when first written.

    In a pool that is not ``has_values`` each vector is key and value: ``v`` is ``k``.
    """

    def __init__(
        self,
        num_layers: int,
        num_slots: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        has_values: bool = True,
    ) -> None:
        shape = (num_layers, num_slots, num_kv_heads, kv_row_len(head_dim, dtype))
        self.num_slots = num_slots
        self.dtype = dtype
        self.device = torch.device(device)
        self._keys = _zeros(shape, dtype, self.device)
        self.k: Sequence[torch.Tensor] = self._keys.unbind(0)
        self.v = _zeros(shape, dtype, self.device).unbind(0) if has_values else self.k

    @classmethod
    def for_model(
        cls,
        config: ModelConfig,
        *,
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        num_layers: int | None = None,
    ) -> "KVPool":
        """``num_layers``: None for all layers of the model."""
        return cls(
            config.num_layers if num_layers is None else num_layers,
            num_slots,
            config.num_kv_heads,
            config.head_dim,
            dtype,
            device,
            has_values=config.slot_vectors > 1,
        )

    @property
    def parts(self) -> tuple[Sequence[torch.Tensor], ...]:
        """The distinct tensors of all layers: keys and values, or those that are both."""
        return (self.k,) if self.v is self.k else (self.k, self.v)

    @property
    def size_bytes(self) -> int:
        return len(self.parts) * self._keys.numel() * self._keys.element_size()


def slot_size_bytes(config: ModelConfig, dtype: torch.dtype, *, num_layers: int | None = None) -> int:
    """Bytes of one token's keys and values in so many layers; None: in all of them."""
    vectors = config.slot_vectors * (config.num_layers if num_layers is None else num_layers) * config.num_kv_heads
    return vectors * kv_row_len(config.head_dim, dtype) * dtype.itemsize


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # In pages of 2 MB, 60 tensors would take 120 MB and half a second at the first token, and no step is faster.
    size = max(1, int(np.prod(shape)) * dtype.itemsize)
    pages = zeroed_pages(size, large=False)
    return pages[: size // dtype.itemsize * dtype.itemsize].view(dtype).view(shape)
