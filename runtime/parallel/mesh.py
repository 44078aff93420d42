"""Where each rank stands in a model that is split by layers into stages, within each stage by slots, then by tensors.

rank:          0    1    2    3    4    5    6    7         tensor 2, sequence 2, pipeline 2, expert 2
stage:         0    0    0    0    1    1    1    1         its layers
sequence rank: 0    0    1    1    0    0    1    1         its slots of keys and values
tensor rank:   0    1    0    1    0    1    0    1         its heads and inner dimensions
expert rank:   0    1    0    1    0    1    0    1         its experts: tensor ranks, in neighbouring groups
"""

from __future__ import annotations

from dataclasses import dataclass

from ...protocol.errors import InvalidParams
from ..config import EngineConfig
from ..models.loading import LayerRun
from ..weights.model_config import ModelConfig
from .sharding import even_parts

MAX_RANKS = 64


@dataclass(frozen=True, slots=True)
class Mesh:
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    sequence: int = 1

    @classmethod
    def of(cls, config: EngineConfig) -> Mesh:
        """Raises InvalidParams for numbers that no machine can have."""
        for name in ("tensor_parallel", "pipeline_parallel", "expert_parallel", "sequence_parallel"):
            count = getattr(config, name)
            if not 1 <= count <= MAX_RANKS:
                raise InvalidParams(f"{name}={count}: it must be 1 to {MAX_RANKS}", where=name)
        counts = (config.tensor_parallel, config.pipeline_parallel, config.expert_parallel, config.sequence_parallel)
        mesh = cls(*counts)
        if mesh.tensor % mesh.expert:
            raise InvalidParams(
                f"expert_parallel={mesh.expert}: experts are shared out over the ranks of tensor_parallel="
                f"{mesh.tensor}, which it must divide; set tensor_parallel={mesh.expert}, or another multiple",
                where="expert_parallel",
            )
        if mesh.size > MAX_RANKS:
            raise InvalidParams(
                f"{mesh}: {mesh.tensor} x {mesh.pipeline}{f' x {mesh.sequence}' if mesh.sequence > 1 else ''} is "
                f"{mesh.size} ranks, but at most {MAX_RANKS} can work together; lower one of them",
                where=mesh.where,
            )
        return mesh

    @property
    def size(self) -> int:
        return self.tensor * self.sequence * self.pipeline

    def __str__(self) -> str:
        """The options that split the model, as a config names them."""
        counts = {"tensor_parallel": self.tensor, "pipeline_parallel": self.pipeline}
        counts |= {"expert_parallel": self.expert, "sequence_parallel": self.sequence}
        return " and ".join(f"{name}={count}" for name, count in counts.items() if count > 1) or "one rank"

    @property
    def where(self) -> str:
        """The first of these options."""
        if self.tensor > 1:
            return "tensor_parallel"
        return "pipeline_parallel" if self.pipeline > 1 else "sequence_parallel"

    @property
    def stage_size(self) -> int:
        """The ranks of a stage."""
        return self.tensor * self.sequence

    def stage_of(self, rank: int) -> int:
        return rank // self.stage_size

    def tensor_rank_of(self, rank: int) -> int:
        return rank % self.tensor

    def sequence_rank_of(self, rank: int) -> int:
        return rank // self.tensor % self.sequence

    def tensor_ranks(self, rank: int) -> range:
        """Those that share out layers with a rank, and have the same slots."""
        first = rank - self.tensor_rank_of(rank)
        return range(first, first + self.tensor)

    def sequence_ranks(self, rank: int) -> range:
        """Those that have the same part of the same layers as a rank, and other slots."""
        first = self.stage_of(rank) * self.stage_size
        return range(first + self.tensor_rank_of(rank), first + self.stage_size, self.tensor)

    def head_ranks(self) -> range:
        """Those that have the head: of the last stage, with the first slots."""
        return self.tensor_ranks(self.size - self.stage_size)

    def pool_slots(self, num_slots: int) -> int:
        """The slots of each rank's pool, where the engine has ``num_slots``. Of several ranks each has one to spare."""
        return num_slots if self.sequence == 1 else -(-num_slots // self.sequence) + 1

    def layers_of(self, config: ModelConfig, rank: int) -> LayerRun:
        """Stages differ by one layer at most, the longer ones first: the last has the head too.

        Raises InvalidParams where there are more stages than layers.
        """
        if self.pipeline > config.num_layers:
            raise InvalidParams(
                f"pipeline_parallel={self.pipeline}: the model has {config.num_layers} layers; at most "
                f"{config.num_layers} ranks can each have some of them",
                where="pipeline_parallel",
            )
        stage = self.stage_of(rank)
        layers = even_parts(config.num_layers, self.pipeline)[stage]
        return LayerRun(layers, has_embedding=stage == 0, has_head=rank in self.head_ranks())
