"""The tensors that hold keys and values, one row per slot. Never decides whose a slot is: that is the radix cache's."""

import mmap
from collections.abc import Sequence

import numpy as np
import torch

from ..weights.model_config import ModelConfig


class KVPool:
    """``k[layer]`` and ``v[layer]`` are [num_slots, Hkv, D]. On the CPU, memory is taken as slots are first written."""

    def __init__(
        self,
        num_layers: int,
        num_slots: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (num_layers, num_slots, num_kv_heads, head_dim)
        self.num_slots = num_slots
        self.dtype = dtype
        self.device = torch.device(device)
        self._keys = _zeros(shape, dtype, self.device)
        self._values = _zeros(shape, dtype, self.device)
        self.k: Sequence[torch.Tensor] = self._keys.unbind(0)
        self.v: Sequence[torch.Tensor] = self._values.unbind(0)

    @classmethod
    def for_model(
        cls, config: ModelConfig, *, num_slots: int, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> "KVPool":
        return cls(config.num_layers, num_slots, config.num_kv_heads, config.head_dim, dtype, device)

    @property
    def size_bytes(self) -> int:
        return 2 * self._keys.numel() * self._keys.element_size()


def slot_size_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """What one token's keys and values take, over all layers."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # Zeros come from the system page by page, of 4 kB. numpy would ask for pages of 2 MB: of 60 tensors 120 MB and half
    # a second for the first token, and no step was found to be faster.
    size = max(1, int(np.prod(shape)) * dtype.itemsize)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.uint8)[: size // dtype.itemsize * dtype.itemsize].view(dtype).view(shape)
