"""The tensors that hold keys and values, one row per slot. Never decides whose a slot is: that is the radix cache's."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from ..protocol.errors import LimitExceeded
from ..weights.model_config import ModelConfig

CPU_SHARE = 0.25  # of the memory that is free: others run on the machine too
CUDA_SHARE = 0.85


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


def size_slots(config: ModelConfig, budget_bytes: int, *, dtype: torch.dtype = torch.bfloat16) -> int:
    """The slots that fit into ``budget_bytes``. Raises LimitExceeded when not even one does."""
    each = slot_size_bytes(config, dtype)
    if budget_bytes < each:
        raise LimitExceeded(
            f"{budget_bytes:,} bytes for keys and values, but one token takes {each:,}; free memory or set num_slots"
        )
    return budget_bytes // each


def kv_budget_bytes(device: torch.device | str) -> int:
    """The share of the device's free memory that keys and values may take."""
    device = torch.device(device)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * CUDA_SHARE)
    return int(free_host_bytes() * CPU_SHARE)


def free_host_bytes(root: Path = Path("/")) -> int:
    """Memory this process can still take: the machine's, or its control group's where that is less."""
    free = [_available_bytes(root / "proc/meminfo")]
    group = root / "sys/fs/cgroup"
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            free.append(int((group / limit).read_text()) - int((group / used).read_text()))
        except (OSError, ValueError):
            continue  # no such control group, or its limit is "max"
    return max(0, min(free))


def _available_bytes(meminfo: Path) -> int:
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 4 << 30  # not Linux: assume what any machine that runs a model has


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy's zeros come from the kernel page by page; torch's would write them all now.
    size = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(np.zeros(size, dtype=np.uint8)).view(dtype).view(shape)
