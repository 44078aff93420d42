"""Which device each rank has: the CPU, or a GPU of its own."""

from __future__ import annotations

from typing import Any

import msgspec
import torch
import torch.distributed as dist

from ...protocol.errors import InvalidParams, Unsupported
from ..config import EngineConfig
from .mesh import Mesh
from .nodes import place_on_node

CHOOSE = "choose the GPUs with CUDA_VISIBLE_DEVICES"


def on_device(config: EngineConfig, rank: int) -> EngineConfig:
    """``config`` with the device of one of its ranks: a GPU of its machine where ``device`` is cuda."""
    if config.num_ranks == 1 or config.device != "cuda":
        return config
    return msgspec.structs.replace(config, device=f"cuda:{place_on_node(config, rank)}")


def refuse_devices(config: EngineConfig) -> None:
    """Raises InvalidParams or Unsupported where the ranks cannot each have a GPU that the config asks for."""
    mesh = Mesh.of(config)
    if mesh.size == 1 or not config.device.startswith("cuda"):
        return
    here = mesh.size // config.nnodes
    if config.device != "cuda":
        raise InvalidParams(
            f"device={config.device!r} with {mesh}: each rank has a GPU of its own, cuda:0 to cuda:{here - 1}; "
            f"set device='cuda', and {CHOOSE}",
            where="device",
        )
    if config.expert_copies:
        raise Unsupported(
            f"expert_copies={config.expert_copies} with device='cuda': copies are made on CPUs only; set it to 0",
            where="expert_copies",
        )
    count = torch.cuda.device_count()
    if count < here:
        raise InvalidParams(
            f"{mesh} is {here} ranks, each with a GPU of its own, but torch finds {count} CUDA devices here; "
            f"lower it, or set device='cpu'",
            where=mesh.where,
        )
    if not dist.is_nccl_available():
        raise Unsupported(f"{mesh} with device='cuda': torch {torch.__version__} has no NCCL", where="device")


def kind_of(device: torch.device) -> str:
    """What ranks of one model have in common."""
    if device.type == "cpu":
        return "cpu"
    about: Any = torch.cuda.get_device_properties(device)
    return f"{about.name} ({about.major}.{about.minor})"


def refuse_mixed(kinds: list[str]) -> None:
    """Raises Unsupported where ranks have different devices. ``kinds``: of each rank.

    Ranks make the same choices from their device's kind, such as which CUDA graph a step has.
    """
    for rank, kind in enumerate(kinds):
        if kind != kinds[0]:
            raise Unsupported(
                f"rank {rank} has the device {kind}, rank 0 {kinds[0]}: all ranks need the same kind; {CHOOSE}",
                where="device",
            )
