"""One rank but rank 0: its share of the model, its keys and values, and the orders that it follows."""

from __future__ import annotations

import logging

import msgspec

from ... import kernels, processor
from ..config import EngineConfig, sized
from ..executor import Accelerator, Executor
from ..executor.accelerator import accelerator_of
from ..memory import KVPool
from ..models import Model, load_model
from ..weights.resolve import resolve_model
from .agreed_slots import agreed_slots
from .devices import on_device
from .expert_copies import ExpertCopies
from .following import follow
from .group import Group
from .mesh import Mesh
from .split import RankSplit

log = logging.getLogger(__name__)


class Shape(msgspec.Struct, frozen=True):
    """What rank 0 decides for all: tokens of the vocabulary, KV slots, and the longest sequence in tokens.

    ``num_slots`` 0: as many as fit on every rank's device.
    """

    num_tokens: int
    num_slots: int
    context_len: int


class WeightBytes(msgspec.Struct, frozen=True):
    """Bytes of the model's file that one rank reads: all of them, and those that all ranks of its layers read."""

    read: int
    replicated: int


class Rank:
    """The constructor loads the share; ``follow`` runs orders until rank 0 ends them."""

    def __init__(self, config: EngineConfig, group: Group, *, accelerator: Accelerator | None = None) -> None:
        """``accelerator`` replaces the config's device."""
        config = on_device(sized(config), group.rank)
        num_threads = threads_of(config)
        kernels.set_threads(num_threads)
        split = RankSplit(group, Mesh.of(config), expert_copies=config.expert_copies)
        self.config, self.group = config, group
        self.model = load_model(resolve_model(config.model), config, split=split)
        self.weight_bytes = weight_bytes(split)
        self._accelerator = accelerator_of(self.model.device) if accelerator is None else accelerator
        if self.model.device.type == "cpu":
            kernels.warm_up(None)
        if not self.model.needs_torch_threads:
            kernels.set_kernel_threads(num_threads)

    def follow(self, shape: Shape) -> int:
        """``following.follow``."""
        model, config, num_slots = self.model, self.config, shape.num_slots
        if not num_slots:
            assert self._accelerator is not None
            length = shape.context_len
            num_slots = 1 + agreed_slots(model, self.group, self._accelerator, config, context_len=length)
        kv = KVPool.for_model(
            model.config,
            num_slots=Mesh.of(config).pool_slots(num_slots),
            dtype=model.kv_dtype,
            device=model.device,
            num_layers=len(model.layers),
        )
        executor = Executor(
            model,
            kv,
            max_rows=config.max_running,
            max_len=shape.context_len,
            accelerator=self._accelerator,
            use_graphs=config.cuda_graphs == "auto",
        )
        return follow(executor, self.group, num_tokens=shape.num_tokens, copies=copies_of(model, self.group, config))


def copies_of(model: Model, group: Group, config: EngineConfig) -> ExpertCopies | None:
    """None where the config has no spare places for experts."""
    return ExpertCopies(model, group, config) if config.expert_copies else None


def weight_bytes(split: RankSplit) -> WeightBytes:
    assert split.source is not None
    return WeightBytes(sum(split.source.read_bytes.values()), split.source.replicated_bytes)


def threads_of(config: EngineConfig) -> int:
    """The threads of each rank: the config's number, or its part of the machine's cores. 0: one per core."""
    if config.num_threads or config.num_ranks == 1:
        return config.num_threads
    return max(1, processor.num_cores() * config.nnodes // config.num_ranks)
