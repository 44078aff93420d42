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
MOST_MORE = 0.1  # than an even part, of a stage's weights


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
        """``config``: of the whole model. Raises InvalidParams where there are more stages than layers."""
        if self.pipeline > config.num_layers:
            raise InvalidParams(
                f"pipeline_parallel={self.pipeline}: the model has {config.num_layers} layers; at most "
                f"{config.num_layers} ranks can each have some of them",
                where="pipeline_parallel",
            )
        stage = self.stage_of(rank)
        layers = stages_of(config, self.pipeline)[stage]
        return LayerRun(layers, has_embedding=stage == 0, has_head=rank in self.head_ranks())


def stages_of(config: ModelConfig, count: int) -> list[range]:
    """The layers of each of ``count`` stages. Stages differ by one layer at most, the longer ones first, unless the
    embedding or the head makes the first or the last one larger than an even part of all weights by more than
    ``MOST_MORE``: then it hands layers to the smallest stage, while that makes the largest one smaller.
    """
    counts = [len(part) for part in even_parts(config.num_layers, count)]
    table = config.vocab_size * config.hidden_size / mean_layer_weights(config)  # in layers
    sizes = [float(layers) for layers in counts]
    sizes[0] += table
    sizes[-1] += table
    most = (1 + MOST_MORE) * sum(sizes) / count
    while max(sizes) > most:
        largest, smallest = sizes.index(max(sizes)), sizes.index(min(sizes))
        if counts[largest] == 1 or sizes[smallest] + 1 >= sizes[largest]:
            break
        for stage, change in ((largest, -1), (smallest, 1)):
            counts[stage] += change
            sizes[stage] += change
    return [range(sum(counts[:stage]), sum(counts[: stage + 1])) for stage in range(count)]


def mean_layer_weights(config: ModelConfig) -> float:
    """Of a layer's matrices."""
    width, heads, latent = config.hidden_size, config.num_heads, config.latent
    if latent is None:
        attention = 2 * width * (heads + config.num_kv_heads) * config.head_dim
    else:
        attention = width * heads * (latent.query_dim + latent.value_dim) + width * latent.slot_dim
        attention += heads * (latent.nope_dim + latent.value_dim) * latent.size
    dense = (3 if config.gated else 2) * width * config.intermediate_size
    mixture = 3 * width * (config.expert_size * config.num_experts + config.shared_expert_size)
    num_mixtures = sum(map(config.has_experts, range(config.num_layers)))
    share = num_mixtures / config.num_layers
    return attention + share * mixture + (1 - share) * dense
