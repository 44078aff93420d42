"""Where each rank stands in a model that is split by layers into stages, and within each stage by tensors.

rank:          0    1    2    3         tensor 2, pipeline 2, expert 2
stage:         0    0    1    1         its layers
tensor rank:   0    1    0    1         its heads and inner dimensions
expert rank:   0    1    0    1         its experts: tensor ranks, in neighbouring groups
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

    @classmethod
    def of(cls, config: EngineConfig) -> Mesh:
        """Raises InvalidParams for numbers that no machine can have."""
        for name in ("tensor_parallel", "pipeline_parallel", "expert_parallel"):
            count = getattr(config, name)
            if not 1 <= count <= MAX_RANKS:
                raise InvalidParams(f"{name}={count}: it must be 1 to {MAX_RANKS}", where=name)
        mesh = cls(config.tensor_parallel, config.pipeline_parallel, config.expert_parallel)
        if mesh.tensor % mesh.expert:
            raise InvalidParams(
                f"expert_parallel={mesh.expert}: experts are shared out over the ranks of tensor_parallel="
                f"{mesh.tensor}, which it must divide; set tensor_parallel={mesh.expert}, or another multiple",
                where="expert_parallel",
            )
        if mesh.size > MAX_RANKS:
            raise InvalidParams(
                f"{mesh}: {mesh.tensor} x {mesh.pipeline} is {mesh.size} ranks, but at most {MAX_RANKS} can work "
                f"together; lower one of them",
                where="pipeline_parallel",
            )
        return mesh

    @property
    def size(self) -> int:
        return self.tensor * self.pipeline

    def __str__(self) -> str:
        """The options that split the model, as a config names them."""
        counts = {"tensor_parallel": self.tensor, "pipeline_parallel": self.pipeline, "expert_parallel": self.expert}
        return " and ".join(f"{name}={count}" for name, count in counts.items() if count > 1) or "one rank"

    @property
    def where(self) -> str:
        """The first of these options."""
        return "tensor_parallel" if self.tensor > 1 else "pipeline_parallel"

    def stage_of(self, rank: int) -> int:
        return rank // self.tensor

    def tensor_rank_of(self, rank: int) -> int:
        return rank % self.tensor

    def ranks_of(self, stage: int) -> range:
        return range(stage * self.tensor, (stage + 1) * self.tensor)

    def layers_of(self, config: ModelConfig, stage: int) -> LayerRun:
        """Stages differ by one layer at most, the longer ones first: the last has the head too.

        Raises InvalidParams where there are more stages than layers.
        """
        if self.pipeline > config.num_layers:
            raise InvalidParams(
                f"pipeline_parallel={self.pipeline}: the model has {config.num_layers} layers; at most "
                f"{config.num_layers} ranks can each have some of them",
                where="pipeline_parallel",
            )
        layers = even_parts(config.num_layers, self.pipeline)[stage]
        return LayerRun(layers, has_embedding=stage == 0, has_head=stage == self.pipeline - 1)
