"""Model shapes: the sizes that decide what a step reads and multiplies."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ...protocol.errors import InvalidParams, Unsupported
from ..weights.model_config import ModelConfig
from ..weights.vision_config import has_vision, read_vision_config
from .towers import TowerShape

if TYPE_CHECKING:
    from ..weights import WeightFile

KV_BYTES = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.125, "fp8": 1.0}  # int8 with its scales
WEIGHT_BYTES = {4: 0.625, 8: 1.0625, 16: 2.0, 32: 4.0}  # with scales and zeros of groups of 32


@dataclass(frozen=True, slots=True)
class ModelShape:
    """``kv_bytes``: of one number in the KV cache, with its share of scales. ``eight_bit_share``: share of 8-bit
    weights in the layers.

    Of a mixture ``inner`` is that of one expert; a token goes through ``experts_per_token`` of ``num_experts``.
    """

    name: str
    num_layers: int
    hidden: int
    inner: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool
    weight_bits: int = 4
    kv_bytes: float = KV_BYTES["bfloat16"]
    eight_bit_share: float = 0.0
    num_experts: int = 0
    experts_per_token: int = 0
    experts_held: int = 0  # of a rank with a share of them; 0: all
    spare_experts: int = 0  # places for copies of other ranks' experts
    tower: TowerShape | None = None  # of a model that reads images

    def __post_init__(self) -> None:
        if self.weight_bits not in WEIGHT_BYTES:
            known = ", ".join(map(str, WEIGHT_BYTES))
            raise InvalidParams(f"weight_bits={self.weight_bits}: must be one of {known}")

    @classmethod
    def of_config(cls, name: str, config: ModelConfig) -> ModelShape:
        if config.num_experts and (config.shared_expert_size or config.dense_layers):
            raise Unsupported(
                f"{name}: {config.num_experts} experts, and an expert for all tokens or layers without experts; plans "
                f"can be made only for mixtures whose layers are alike"
            )
        if config.latent is not None:
            raise Unsupported(f"{name}: latent attention; plans can be made only for models with keys and values")
        if not config.gated:
            raise Unsupported(f"{name}: an MLP without a gate; plans can be made only for models with gated MLPs")
        return cls(
            name,
            config.num_layers,
            config.hidden_size,
            config.expert_size or config.intermediate_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.vocab_size,
            config.tied_embeddings,
            num_experts=config.num_experts,
            experts_per_token=config.experts_per_token,
        )

    @classmethod
    def of_file(cls, name: str, file: WeightFile) -> ModelShape:
        """The shape of a model file, with the bits of its layers' weights on a CPU. Reads only the file's header."""
        from ..layers.linear import bits_of  # loads torch, which no flag of the command line needs

        sizes: Counter[int] = Counter()
        for tensor in map(file.tensor, file.names()):
            rows, *columns = tensor.shape
            if columns and rows != file.config.vocab_size:
                sizes[bits_of(tensor)] += rows * columns[0]
        shape = cls.of_config(name, file.config)
        if has_vision(file.path):
            shape = replace(shape, tower=TowerShape.of_config(read_vision_config(file.path), shape.hidden))
        if sizes[16] or not sizes[4]:
            return replace(shape, weight_bits=16 if sizes[16] else 8)
        return replace(shape, weight_bits=4, eight_bit_share=sizes[8] / sizes.total())

    def describe(self) -> str:
        mixed = f" ({self.eight_bit_share:.0%} of them 8-bit)" if self.eight_bit_share else ""
        return f"{self.name}, {self.weight_bits}-bit weights{mixed}"

    def share(self, ranks: int, *, stages: int = 1, expert_parts: int = 1, expert_copies: int = 0) -> ModelShape:
        """The largest share of a rank, rounded up: every rank waits for it. ``ranks`` share out each layer,
        ``stages`` have some of the layers, ``expert_parts`` of the ranks have some of the experts, and memory for
        ``expert_copies`` others of each layer.
        """
        if self.tower is not None and (ranks > 1 or stages > 1):
            raise Unsupported(f"{self.name} reads images; the engine runs such models on one device")
        if not 1 <= ranks <= self.num_heads:
            raise InvalidParams(f"tensor_parallel={ranks}: {self.name} has {self.num_heads} heads; give 1 to that many")
        if not 1 <= stages <= self.num_layers:
            raise InvalidParams(
                f"pipeline_parallel={stages}: {self.name} has {self.num_layers} layers; give 1 to that many"
            )
        if expert_parts < 1 or ranks % expert_parts or expert_parts > max(self.num_experts, 1):
            raise InvalidParams(
                f"expert_parallel={expert_parts}: {self.name} has {self.num_experts or 'no'} experts, and the number "
                f"must divide tensor_parallel={ranks}"
            )
        held = -(-self.num_experts // expert_parts)
        if not 0 <= expert_copies <= self.num_experts - held:
            most = self.num_experts - held
            raise InvalidParams(
                f"expert_copies={expert_copies}: {self.name} split into {expert_parts} parts of its experts can have "
                f"copies of {most} others at most"
            )
        kv_heads = -(-self.num_kv_heads // ranks)
        group = self.num_heads // self.num_kv_heads
        heads = kv_heads * group if ranks <= self.num_kv_heads else -(-self.num_heads // ranks)
        inner, vocab = -(-self.inner // (ranks // expert_parts)), -(-self.vocab_size // ranks)
        return replace(
            self,
            num_layers=-(-self.num_layers // stages),
            num_heads=heads,
            num_kv_heads=kv_heads,
            inner=inner,
            vocab_size=vocab,
            experts_held=held,
            spare_experts=expert_copies,
        )

    def experts_read(self, tokens: float) -> float:
        """The mean number of held experts that ``tokens`` tokens of one step go through, if all are equally likely."""
        return (self.experts_held or self.num_experts) * (1 - (1 - self.experts_per_token / self.num_experts) ** tokens)

    @property
    def products(self) -> tuple[tuple[int, int], ...]:
        """(outputs, inputs) of the matrix products of one layer."""
        q_len, kv_len = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return (
            (q_len + 2 * kv_len, self.hidden),
            (self.hidden, q_len),
            (2 * self.inner, self.hidden),
            (self.hidden, self.inner),
        )

    @property
    def layer_weights(self) -> int:
        attention, mlp = self.products[:2], self.products[2:]
        places = max(self.experts_held or self.num_experts, 1) + self.spare_experts
        weights = sum(outputs * inputs for outputs, inputs in attention)
        return weights + places * sum(outputs * inputs for outputs, inputs in mlp) + self.hidden * self.num_experts

    @property
    def spare_size_bytes(self) -> float:
        """Of the weights, those of places for copies of experts."""
        expert = sum(outputs * inputs for outputs, inputs in self.products[2:])
        return self.num_layers * self.spare_experts * expert * self.layer_weight_bytes

    @property
    def head_weights(self) -> int:
        return self.vocab_size * self.hidden

    @property
    def head_bits(self) -> int:
        """4-bit models keep 8 bits in the head."""
        return max(self.weight_bits, 8)

    @property
    def weights_size_bytes(self) -> float:
        """In memory: layers, head, a 16-bit embedding unless it is tied to the head, and the image encoder."""
        layers = self.num_layers * self.layer_weights * self.layer_weight_bytes
        layers += 0.0 if self.tower is None else self.tower.size_bytes
        return layers + self.head_weights * (WEIGHT_BYTES[self.head_bits] + (0.0 if self.tied else 2.0))

    @property
    def layer_weight_bytes(self) -> float:
        """Mean over the layers' weights."""
        plain = (1.0 - self.eight_bit_share) * WEIGHT_BYTES[self.weight_bits]
        return plain + self.eight_bit_share * WEIGHT_BYTES[8]

    @property
    def slot_size_bytes(self) -> int:
        """Bytes of one token's keys and values."""
        return int(2 * self.num_layers * self.num_kv_heads * self.head_dim * self.kv_bytes)


_ALL = (
    ModelShape("smollm2", 30, 576, 1536, 9, 3, 64, 49_152, True),
    # The files of these two mix formats.
    ModelShape("qwen2.5-coder-0.5b", 24, 896, 4864, 14, 2, 64, 151_936, False, eight_bit_share=0.854),
    ModelShape("qwen2.5-coder-1.5b", 28, 1536, 8960, 12, 2, 128, 151_936, False, eight_bit_share=0.151),
    ModelShape("qwen3-0.6b", 28, 1024, 3072, 16, 8, 128, 151_936, True),
    ModelShape("qwen3-8b", 36, 4096, 12_288, 32, 8, 128, 151_936, False),
    ModelShape("llama-3.1-8b", 32, 4096, 14_336, 32, 8, 128, 128_256, False),
    ModelShape("llama-3.3-70b", 80, 8192, 28_672, 64, 8, 128, 128_256, False),
    ModelShape("llama-3.1-405b", 126, 16_384, 53_248, 128, 8, 128, 128_256, False),
    ModelShape(*("qwen3-235b-a22b", 94, 4096, 1536, 64, 4, 128, 151_936, False), num_experts=128, experts_per_token=8),
)
SHAPES = {shape.name: shape for shape in _ALL}
