"""From a weight file to a model in memory, at an engine's precision."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec
import torch

from ...cpu_isa import isa
from ...kernels.backend import reads_packed
from ...kernels.linear import PackedLinear, has_bfloat16_products
from ...kernels.quantized_weight import Experts, QuantizedWeight, joined_experts
from ...protocol.errors import InvalidParams, UnknownModel, Unsupported
from ..config import EngineConfig
from ..layers.attention import Attention
from ..layers.embedding import BlockEmbedding, EmbeddingTable, FloatEmbedding, NoEmbedding, TiedEmbedding
from ..layers.latent_attention import LatentAttention, LatentQueries, query_order, vector_order
from ..layers.linear import Linear, LinearPrecision, LMHead, as_float, stacked_linear
from ..layers.mlp import MLP
from ..layers.moe import MoE
from ..layers.norm import LayerNorm, NoNorm, RMSNorm
from ..layers.rotary import cos_sin_table, unrotated_table
from ..quant import GroupTensor, QuantTensor, Weight
from ..weights.config_parts import Latent
from ..weights.home import default_home
from ..weights.model_config import ModelConfig
from ..weights.random_folder import RandomFolder
from ..weights.weight_file import WeightFile, open_weights
from .adapters import Adapter, load_adapters
from .decoder import DecoderLayer, Model
from .names import TensorNames
from .packed_copy import PackedCopy

log = logging.getLogger(__name__)

MAX_ROPE_TABLE = 1 << 31  # numbers in the table of cosines and sines, 8 GiB
COPIED_ROWS = 16_384  # of an embedding, before their pages leave memory
RopeKind = Literal["global", "local", "none"]
_KV_TYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}


@dataclass(frozen=True, slots=True)
class LayerRun:
    """Neighbouring layers of a model, with the last norm if they are the last; and whether it has embedding and head.
    ``experts``: those of each mixture; None: all. ``spare_experts``: places after these that are filled later.
    """

    layers: range
    has_embedding: bool
    has_head: bool
    experts: range | None = None
    spare_experts: int = 0


class Split(Protocol):
    """One rank's share of a model: what it reads of the file, and how its results are joined with the others'."""

    def file(self, file: WeightFile) -> WeightFile:
        """``file`` with the share's tensors and its config, in which the number of layers is the whole model's."""
        ...

    def run(self, config: ModelConfig) -> LayerRun:
        """The layers that the share has."""
        ...

    def adapter(self, adapter: Adapter) -> Adapter:
        """The share of a low-rank adapter of the whole model."""
        ...

    def joined(self, model: Model) -> Model:
        """The share in ``model``, with the collectives that make its results those of the whole model."""
        ...


def load_model(
    path: Path | str,
    config: EngineConfig,
    *,
    split: Split | None = None,
    later: Callable[[Callable[[], None]], None] | None = None,
) -> Model:
    """``path`` as ``open_weights`` takes it. Positions go up to ``max_seq_len``, or as far as the model was trained.
    With ``split`` only one rank's share is read.

    ``later`` gets the work that the model does not need, which is to be called from any thread: a copy of the packed
    weights is written to disk. Without it that is done here.
    """
    device = device_named(config.device)
    file: WeightFile = RandomFolder(Path(path), device=device) if config.weights == "random" else open_weights(path)
    if split is not None:
        file = split.file(file)
    trained = file.config.max_positions
    if config.max_seq_len > trained:
        raise InvalidParams(
            f"max_seq_len {config.max_seq_len:,} is beyond the {trained:,} positions of {file.path}; lower it",
            where="max_seq_len",
        )
    num_positions = config.max_seq_len or trained
    if num_positions * file.config.head_dim > MAX_ROPE_TABLE:
        most = MAX_ROPE_TABLE // file.config.head_dim
        raise InvalidParams(
            f"{file.path} was trained for {num_positions:,} positions, as it says; set max_seq_len to {most:,} or less",
            where="max_seq_len",
        )
    refuse_kv_dtype(config, file, device)
    whole = LayerRun(range(file.config.num_layers), has_embedding=True, has_head=True)
    run = whole if split is None else split.run(file.config)
    precision = precision_of(config, file, device)
    packed = None
    if config.repack_cache and split is None and config.weights != "random" and device.type == "cpu":
        packed = PackedCopy(default_home() / "packed", file.path, precision=precision)
    model = _Loader(file, precision, device, run, packed).model(num_positions)
    if packed is not None and packed.has_new:
        (later or _now)(packed.save)
    if file.unpacked():
        log.warning("%s: %s are unpacked: no kernel multiplies their form", file.path, file.unpacked())
    if config.adapters:
        load_adapters(model, config.adapters, cut=split.adapter if split is not None else None)
    if config.kv_dtype != "auto":
        model = replace(model, kv_dtype=_KV_TYPES[config.kv_dtype])
    return model if split is None else split.joined(model)


def _now(work: Callable[[], None]) -> None:
    work()


def refuse_kv_dtype(config: EngineConfig, file: WeightFile, device: torch.device) -> None:
    """Raises InvalidParams where no kernel reads the keys and values that the config asks for."""
    is_gpu = reads_packed(device)
    problem = None
    if config.kv_dtype == "fp8" and not is_gpu:
        problem = f"on {device}: only GPU kernels read 8-bit floats; use int8, bfloat16 or auto"
    elif config.kv_dtype == "int8" and is_gpu:
        problem = f"on {device}: only CPU kernels read it; use fp8, bfloat16 or auto"
    elif config.kv_dtype == "int8" and file.config.latent is not None:
        problem = f"and the latent attention of {file.path}: its vectors are not kept in 8 bits; use bfloat16 or auto"
    if problem is not None:
        raise InvalidParams(f"kv_dtype {config.kv_dtype!r} {problem}", where="kv_dtype")


def precision_of(config: EngineConfig, file: WeightFile, device: torch.device) -> LinearPrecision:
    """``auto`` is float32 for a file of floats on a CPU without bfloat16 products, where rounding would cost time."""
    if config.precision != "auto" or device.type != "cpu" or has_bfloat16_products() or reads_packed(device):
        return config.precision
    return "auto" if file.has_packed() else "float32"


class _Loader:
    def __init__(
        self,
        file: WeightFile,
        precision: LinearPrecision,
        device: torch.device,
        run: LayerRun,
        packed: PackedCopy | None,
    ) -> None:
        self.file, self.precision, self.device, self.run, self.packed = file, precision, device, run, packed
        self.config = file.config
        # The type of keys and values, and of weights that are not packed.
        self.stored = torch.float32 if precision == "float32" else torch.bfloat16
        # bfloat16 activations would lose ten times as much as products that round x to 16 bits.
        has_fine_products = precision == "int16" or (precision == "auto" and isa().has_tiles and file.has_packed())
        self.dtype = torch.float32 if has_fine_products and device.type == "cpu" else self.stored
        self.names = TensorNames(file.config, file.format)

    def model(self, num_positions: int) -> Model:
        self.names.refuse_strangers(self.file.names(), source=str(self.file.path))
        config, run = self.config, self.run
        is_last = run.layers.stop == config.num_layers
        embedding, logits = self.ends()
        table_of = cache(lambda kind: self.rope_table(kind, num_positions))
        return Model(
            config=config,
            embedding=embedding,
            layers=tuple(self.layers(run, table_of)),
            norm=self.norm(self.names.of_model("norm"), config.hidden_size) if is_last else NoNorm(),
            head=LMHead(logits, cap=config.logits_cap),
            max_positions=num_positions,
            positions=self.positions() if config.learned_positions and run.has_embedding else None,
            dtype=self.dtype,
            kv_dtype=self.stored,
            device=self.device,
            first_layer=run.layers.start,
        )

    def layers(self, run: LayerRun, table_of: Callable[[RopeKind], torch.Tensor]) -> Iterator[DecoderLayer]:
        """One after the other: of the file, one layer at a time is in memory."""
        for i in run.layers:
            self.file.release()
            yield self.layer(i, table_of(self.rope_kind(i)))
        self.file.release()

    def ends(self) -> tuple[EmbeddingTable, Linear]:
        """The embedding and the head's product, as far as these layers have them."""
        config, run = self.config, self.run
        shape, is_tied = (config.vocab_size, config.hidden_size), config.tied_embeddings
        table = head = None
        if run.has_embedding or (is_tied and run.has_head):
            table = self.read(self.names.of_model("embedding"), shape)
        if run.has_head:
            head = table if is_tied else self.read(self.names.of_model("head"), shape)
        product = Linear(()) if head is None else self.logits(head)
        if not run.has_embedding or table is None:
            return NoEmbedding(), product
        shared = product if head is not None or not is_tied or not _is_exact_in_bytes(table) else self.logits(table)
        return self.embedding(table, shared), product

    def logits(self, head: Weight) -> Linear:
        # The head loses more by few bits than the layers do, and it is one product, not one for each layer.
        precision: LinearPrecision = "auto" if self.precision in ("int4", "fp8") else self.precision
        gain, out_dtype = self.config.logits_scale, torch.float32

        def make() -> Linear:
            return stacked_linear(
                [head], precision=precision, device=self.device, out_dtype=out_dtype, gain=gain, for_logits=True
            )

        return self.packed_or_made("logits", make, out_dtype=out_dtype, gain=gain)

    def positions(self) -> torch.Tensor:
        table = self.read(self.names.of_model("positions"), (self.config.max_positions, self.config.hidden_size))
        return as_float(table, self.dtype).to(self.device)

    def embedding(self, table: Weight, head: Linear) -> FloatEmbedding | TiedEmbedding | BlockEmbedding:
        """The embedding in the form that takes the least memory and gives the table's exact rows."""
        scale = self.config.embedding_scale
        if self.config.tied_embeddings and head.has_rows and _is_exact_in_bytes(table):
            return TiedEmbedding(head, self.dtype, scale=scale)
        if isinstance(table, QuantTensor) and self.device.type == "cpu" and self.dtype != torch.float32:
            return BlockEmbedding(self.copied(table), self.dtype, scale=scale)
        return FloatEmbedding(as_float(table, self.dtype).to(self.device), scale=scale)

    def copied(self, table: QuantTensor) -> QuantTensor:
        """Not in the file's memory. A run of rows of the file is in memory at a time, not a second table."""
        blocks = torch.empty_like(table.blocks)
        for copy, rows in zip(blocks.split(COPIED_ROWS), table.blocks.split(COPIED_ROWS), strict=True):
            copy.copy_(rows)
            self.file.release()
        return QuantTensor(table.kind, blocks, table.shape)

    def rope_kind(self, layer: int) -> RopeKind:
        if layer in self.config.unrotated_layers:
            return "none"
        return "local" if self.config.local_rope_theta and self.config.window_of(layer) else "global"

    def rope_table(self, kind: RopeKind, num_positions: int) -> torch.Tensor:
        if kind == "none":
            return unrotated_table(num_positions, device=self.device)
        config = self.config
        if kind == "local":
            config = msgspec.structs.replace(config, rope_theta=config.local_rope_theta, rope_scaling=None)
        return cos_sin_table(config, num_positions, device=self.device)

    def layer(self, i: int, cos_sin: torch.Tensor) -> DecoderLayer:
        config = self.config
        hidden = config.hidden_size
        before, after = config.pre_norms, config.post_norms
        return DecoderLayer(
            cos_sin=cos_sin,
            attention_norm=self.norm(self.names.of_layer(i, "attention_norm"), hidden) if before else NoNorm(),
            attention=self.attention(i) if config.latent is None else self.latent_attention(i, config.latent),
            mlp_norm=self.norm(self.names.of_layer(i, "mlp_norm"), hidden) if before else NoNorm(),
            mlp=self.mixture(i) if config.has_experts(i) else self.mlp(i),
            attention_post_norm=self.norm(self.names.of_layer(i, "attention_post_norm"), hidden) if after else None,
            mlp_post_norm=self.norm(self.names.of_layer(i, "mlp_post_norm"), hidden) if after else None,
            parallel_residual=config.parallel_residual,
        )

    def attention(self, i: int) -> Attention:
        config = self.config
        hidden = config.hidden_size
        q_len, kv_len = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        q_norm = k_norm = None
        if config.qk_norm:
            whole = config.whole_qk_norm
            q_norm = self.norm(self.names.of_layer(i, "q_norm"), q_len if whole else config.head_dim)
            k_norm = self.norm(self.names.of_layer(i, "k_norm"), kv_len if whole else config.head_dim)
        qkv = {"qkv": q_len + 2 * kv_len} if config.fused_qkv else {"q": q_len, "k": kv_len, "v": kv_len}
        return Attention(
            # Attention multiplies tensors of one type.
            self.linear(i, qkv, hidden, has_bias=config.qkv_bias, out_dtype=self.stored),
            self.attention_output(i, q_len),
            layer=i - self.run.layers.start,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            window=config.window_of(i),
            scale=config.attention_scale,
            soft_cap=config.attention_cap,
            q_norm=q_norm,
            k_norm=k_norm,
        )

    def attention_output(self, i: int, width: int) -> Linear:
        rows, gain = {"output": self.config.hidden_size}, self.config.residual_scale
        return self.linear(i, rows, width, has_bias=self.config.output_bias, out_dtype=self.dtype, gain=gain)

    def latent_attention(self, i: int, sizes: Latent) -> LatentAttention:
        config = self.config
        hidden, heads = config.hidden_size, config.num_heads
        queries = heads * sizes.query_dim
        query: Linear | LatentQueries
        if sizes.query_size:
            query = LatentQueries(
                self.linear(i, {"q_down": sizes.query_size}, hidden, has_bias=False),
                self.norm(self.names.of_layer(i, "q_down_norm"), sizes.query_size),
                self.linear(i, {"q_up": queries}, sizes.query_size, has_bias=False, out_dtype=self.stored),
            )
        else:
            query = self.linear(i, {"q": queries}, hidden, has_bias=False, out_dtype=self.stored)
        key_up, value_up = self.latent_products(i, sizes)
        return LatentAttention(
            query,
            self.linear(i, {"kv_down": sizes.slot_dim}, hidden, has_bias=False, out_dtype=self.stored),
            self.norm(self.names.of_layer(i, "kv_down_norm"), sizes.size),
            key_up.to(self.stored).to(self.device),
            value_up.to(self.stored).to(self.device),
            self.attention_output(i, heads * sizes.value_dim),
            layer=i - self.run.layers.start,
            num_heads=heads,
            sizes=sizes,
            scale=config.attention_scale,
        )

    def latent_products(self, i: int, sizes: Latent) -> tuple[torch.Tensor, torch.Tensor]:
        """What makes keys [H, N, L] and values [H, L, V] of latents, as floats."""
        heads, size = self.config.num_heads, sizes.size
        if sizes.is_split:
            keys = as_float(self.read(self.names.of_layer(i, "k_up"), (heads * size, sizes.nope_dim)))
            values = as_float(self.read(self.names.of_layer(i, "v_up"), (heads * sizes.value_dim, size)))
            key_up = keys.view(heads, size, -1).transpose(1, 2)
            value_up = values.view(heads, -1, size).transpose(1, 2)
        else:
            rows = heads * (sizes.nope_dim + sizes.value_dim)
            both = as_float(self.read(self.names.of_layer(i, "kv_up"), (rows, size))).view(heads, -1, size)
            key_up, values = both.split((sizes.nope_dim, sizes.value_dim), dim=1)
            value_up = values.transpose(1, 2)
        return key_up.contiguous(), value_up.contiguous()

    def mlp(self, i: int) -> MLP:
        config = self.config
        hidden, inner, has_bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        gate_up = {"gate_up": 2 * inner} if config.fused_gate_up else {"gate": inner, "up": inner}
        if not config.gated:
            gate_up = {"up": inner}
        return MLP(
            self.linear(i, gate_up, hidden, has_bias=has_bias, out_dtype=self.dtype),
            self.linear(
                i, {"down": hidden}, inner, has_bias=has_bias, out_dtype=self.dtype, gain=config.residual_scale
            ),
            activation=config.activation,
            gated=config.gated,
        )

    def mixture(self, i: int) -> MoE:
        config = self.config
        hidden, inner, count = config.hidden_size, config.expert_size, config.num_experts
        held = range(count) if self.run.experts is None else self.run.experts
        gate_up = self.experts(i, {"expert_gate": inner, "expert_up": inner}, hidden, held)
        down = self.experts(i, {"expert_down": hidden}, inner, held)
        router = self.read(self.names.of_layer(i, "router"), (count, hidden))
        precision: LinearPrecision = "float32" if self.dtype == torch.float32 else "bfloat16"
        return MoE(
            # Experts are chosen in float32: in bfloat16 their scores would tie.
            stacked_linear([router], precision=precision, device=self.device, out_dtype=torch.float32),
            gate_up,
            down,
            top_k=config.experts_per_token,
            normalise=config.normalised_experts,
            shared=self.shared_expert(i) if config.shared_expert_size else None,
            shared_gate=self.shared_gate(i) if config.shared_expert_size and config.shared_expert_gated else None,
            routing=config.routing,
            bias=self.router_bias(i) if config.routing is not None and config.routing.has_bias else None,
        )

    def experts(self, layer: int, rows: dict[str, int], row_len: int, held: range) -> Experts:
        """The experts ``held``, each stacked of ``rows``: packed where the device's kernels read the form that products
        would have, else floats [E, rows, row_len], then with the spare places.
        """
        if reads_packed(self.device) and not self.run.spare_experts:
            found = self.packed_experts(layer, rows, row_len, held)
            if found is not None:
                return found
        num_places = len(held) + self.run.spare_experts  # unread ones take memory when they are filled
        floats = torch.empty((num_places, sum(rows.values()), row_len), dtype=self.stored, device=self.device)
        for into, key in zip(floats.split(list(rows.values()), dim=1), rows, strict=True):
            self.read_experts(layer, key, held, into[: len(held)])
        return floats

    def packed_experts(self, layer: int, rows: dict[str, int], row_len: int, held: range) -> QuantizedWeight | None:
        """None where an expert would be floats, or several parts, or another kind than the others."""
        found: list[QuantizedWeight] = []
        stacks = {}
        if self.file.format == "gguf":
            stacks = {
                key: self.read(self.names.of_layer(layer, key), (len(held) * num, row_len)) for key, num in rows.items()
            }
        for place, expert in enumerate(held):
            weights = [
                _rows_of(stacks[key], slice(place * num, (place + 1) * num))
                if stacks
                else self.read(self.names.of_expert(layer, expert, key), (num, row_len))
                for key, num in rows.items()
            ]
            (part, *others) = stacked_linear(weights, precision=self.precision, device=self.device).parts
            if others or part.quantized is None or (found and part.quantized.kind != found[0].kind):
                return None
            found.append(part.quantized)
        return joined_experts(found)

    def read_experts(self, layer: int, key: str, held: range, into: torch.Tensor) -> None:
        """Fills ``into`` [E, rows, columns] with the experts ``held``."""
        if self.file.format == "gguf":
            stack = self.read(self.names.of_layer(layer, key), (into.shape[0] * into.shape[1], into.shape[2]))
            into.copy_(as_float(stack, self.dtype).view(into.shape))
            return
        for expert, part in zip(held, into, strict=True):
            name = self.names.of_expert(layer, expert, key)
            part.copy_(as_float(self.read(name, tuple(part.shape)), self.dtype))

    def shared_expert(self, i: int) -> MLP:
        hidden, inner = self.config.hidden_size, self.config.shared_expert_size
        return MLP(
            self.linear(i, {"shared_gate": inner, "shared_up": inner}, hidden, has_bias=False),
            self.linear(i, {"shared_down": hidden}, inner, has_bias=False),
        )

    def shared_gate(self, i: int) -> Linear:
        hidden, name = self.config.hidden_size, self.names.of_layer(i, "shared_router")
        gate = as_float(self.read(name, (hidden,) if self.file.format == "gguf" else (1, hidden))).view(1, hidden)
        precision: LinearPrecision = "float32" if self.dtype == torch.float32 else "bfloat16"
        return stacked_linear([gate], precision=precision, device=self.device, out_dtype=torch.float32)

    def router_bias(self, i: int) -> torch.Tensor:
        bias = self.read(self.names.of_layer(i, "router_bias"), (self.config.num_experts,))
        return as_float(bias).clone().to(self.device)

    def linear(
        self,
        layer: int,
        rows: dict[str, int],
        row_len: int,
        *,
        has_bias: bool,
        out_dtype: torch.dtype | None = None,
        gain: float = 1.0,
    ) -> Linear:
        """One layer of stacked weights; ``rows`` maps each one's name to its number of rows."""

        def make() -> Linear:
            weights = [self.matrix(layer, key, num, row_len) for key, num in rows.items()]
            biases = None
            if has_bias:
                biases = [
                    self.by_part(key, as_float(self.read(self.names.of_layer(layer, f"{key}_bias"), (num,))))
                    for key, num in rows.items()
                ]
            return stacked_linear(
                weights, biases, precision=self.precision, device=self.device, out_dtype=out_dtype, gain=gain
            )

        return self.packed_or_made(f"{layer} {' '.join(rows)}", make, out_dtype=out_dtype, gain=gain)

    def packed_or_made(
        self, name: str, make: Callable[[], Linear], *, out_dtype: torch.dtype | None, gain: float
    ) -> Linear:
        """The product ``name`` of the model's packed copy, which reads no weights; else what ``make`` makes."""
        if self.packed is None:
            return make()
        found = self.packed.find(name)
        if found is not None:
            return Linear([PackedLinear.of_packed(part, out_dtype=out_dtype) for part in found], out_dtype, gain=gain)
        made = make()
        self.packed.keep(name, made.parts)
        return made

    def matrix(self, layer: int, key: str, num_rows: int, row_len: int) -> Weight:
        name = self.names.of_layer(layer, key)
        if not self.config.transposed:
            return self.by_part(key, self.read(name, (num_rows, row_len)))
        return as_float(self.read(name, (row_len, num_rows))).T

    def by_part(self, key: str, weight: Any) -> Any:
        """A fused projection's rows: all queries, all keys, all values; of latent attention: the rotated first."""
        sizes = self.config.latent
        if sizes is not None and key in ("q", "q_up", "kv_down"):
            order = vector_order(sizes) if key == "kv_down" else query_order(sizes, self.config.num_heads)
            return weight[order] if isinstance(weight, torch.Tensor) else weight.take_rows(order)
        if key != "qkv" or not self.config.qkv_by_head:
            return weight
        weight = as_float(weight)
        rows = torch.arange(len(weight)).view(self.config.num_heads, 3, self.config.head_dim)
        return weight[rows.transpose(0, 1).reshape(-1)]

    def norm(self, name: str, length: int) -> Any:
        weight = as_float(self.read(name, (length,))) + self.config.norm_offset  # a copy: the file need not stay mapped
        if not self.config.layer_norm:
            return RMSNorm(weight.to(self.device), self.config.rms_norm_eps)
        bias = as_float(self.read(f"{name.removesuffix('.weight')}.bias", (length,))).clone()
        return LayerNorm(weight.to(self.device), bias.to(self.device), self.config.rms_norm_eps)

    def read(self, name: str, shape: tuple[int, ...]) -> Weight:
        found = self.file.tensor(name)
        if isinstance(found, torch.Tensor) and found.ndim == 3:
            found = found.flatten(0, 1)  # a stack of experts
        if tuple(found.shape) != shape:
            raise UnknownModel(
                f"{self.file.path}: tensor {name} is {list(found.shape)}, but its config asks for {list(shape)}"
            )
        return found


def _rows_of(weight: Weight, rows: slice) -> Weight:
    return weight[rows] if isinstance(weight, torch.Tensor) else weight.take_rows(rows)


def _is_exact_in_bytes(weight: Weight) -> bool:
    if isinstance(weight, GroupTensor):
        return weight.is_exact_in_bytes
    return isinstance(weight, QuantTensor) and weight.kind == "Q8_0"


def device_named(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidParams(f"device {name!r} is unknown; use cpu, cuda or cuda:N", where="device") from error
    if device.type not in ("cpu", "cuda"):
        raise Unsupported(f"device {name!r}; models run on cpu and cuda", where="device")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InvalidParams(f"device {name!r}, but torch finds no CUDA device here; use cpu", where="device")
    return device
