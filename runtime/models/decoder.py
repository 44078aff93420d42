"""The decoder of all served families: embedding, then attention and MLP for each layer, then logits."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.nn.functional as F

from ..layers.adapters import AdapterNames, AdapterRows
from ..layers.attention import Attention
from ..layers.batch import ForwardBatch, StepArrays
from ..layers.embedding import EmbeddingTable, TiedEmbedding
from ..layers.latent_attention import LatentAttention
from ..layers.linear import LMHead
from ..layers.mlp import MLP
from ..layers.moe import MoE
from ..layers.norm import LayerNorm, NoNorm, RMSNorm
from ..memory import KVPool
from ..weights.model_config import ModelConfig

Norm = RMSNorm | LayerNorm | NoNorm


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """``cos_sin`` is shared with the other layers of the same rope, and has a row for every position."""

    cos_sin: torch.Tensor  # float32 [positions, rotated dimensions]
    attention_norm: Norm
    attention: Attention | LatentAttention
    mlp_norm: Norm
    mlp: MLP | MoE
    attention_post_norm: RMSNorm | None = None
    mlp_post_norm: RMSNorm | None = None
    parallel_residual: bool = False

    def feed_forward(
        self, x: torch.Tensor, residual: torch.Tensor, rows: AdapterRows | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The rest of the layer after attention's x [T, C]: what is to be added to a residual, and that residual."""
        if self.parallel_residual:
            y, _ = self.mlp_norm(residual)
            return x + self.mlp(y.to(x.dtype), rows), residual
        if self.attention_post_norm is not None:
            x, _ = self.attention_post_norm(x)
        x, residual = self.mlp_norm(x, residual)  # in float32: bfloat16 sums would add half to the error
        x = self.mlp(x, rows)
        if self.mlp_post_norm is not None:
            x, _ = self.mlp_post_norm(x)
        return x, residual


class Stage(Protocol):
    """The place of a model's layers in a pipeline, where other ranks have the layers before or after them.

    What goes from stage to stage is the residual, float32 [T, C]: embedding and all results of layers, added up.
    """

    is_first: bool
    is_last: bool

    def num_micro_steps(self, num_tokens: int) -> int:
        """How many parts a step of so many tokens is run in, one after another, so that stages run at once."""
        ...

    def begin(self, num_tokens: list[int]) -> None:
        """A step of micro-steps of so many tokens begins. Each is then received, run and sent, in order."""
        ...

    def receive(self) -> torch.Tensor:
        """The residual of the next micro-step, from the stage before."""
        ...

    def send(self, residual: torch.Tensor) -> None:
        """Give it to the next stage. It belongs to the stage from now on."""
        ...


class HeldSlots(Protocol):
    """Which slots of each row's context lie in this rank's pool. It is written by each step."""

    def batch(self, step: StepArrays) -> ForwardBatch:
        """The step as this rank runs it."""
        ...


class KeyHolders(Protocol):
    """The ranks that have the same layers and other keys and values of every sequence."""

    def slots(self, *, pool_slots: int, max_rows: int, max_len: int) -> HeldSlots:
        """Those of a new slot table; the pool's last slot belongs to no token."""
        ...

    def gathered(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """The head's input [L, C] of the whole step, of what each rank has; [L, any number] on ranks without a head."""
        ...


@dataclass(frozen=True, slots=True)
class Model:
    """``dtype`` is of activations, ``kv_dtype`` of keys and values.

    With a ``stage`` the layers are some of the whole model's, from ``first_layer`` on; ``config`` counts all of them.
    """

    config: ModelConfig
    embedding: EmbeddingTable
    layers: tuple[DecoderLayer, ...]
    norm: Norm
    head: LMHead
    max_positions: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    device: torch.device
    positions: torch.Tensor | None = None  # [positions, C], added to the embedding
    adapters: AdapterNames = field(default_factory=AdapterNames)
    has_tapes: bool = True  # its layers wait for other ranks in sums alone
    agree: Callable[[bool], bool] | None = None  # of ranks that share out its layers: whether it is so on all of them
    is_even: bool = True  # all ranks have as many heads
    first_layer: int = 0
    stages: tuple[range, ...] = ()  # of a split model: the layers of each stage
    stage: Stage | None = None
    sequence: KeyHolders | None = None

    @property
    def needs_torch_threads(self) -> bool:
        """Whether any product is torch's own, so that torch needs the machine's threads."""
        parts = [part for layer in self.layers for part in (layer.attention, layer.mlp)]
        return any(part.needs_torch_threads for part in (*parts, self.head))

    def describe(self) -> str:
        """The kernels of the first layer's products and of the head's."""
        layer = self.layers[0]
        linears = list(layer.attention.linears)
        if isinstance(layer.mlp, MLP):
            linears += [layer.mlp.gate_up, layer.mlp.down]
        kinds = dict.fromkeys(part.describe() for linear in linears for part in linear.parts)
        return f"{', '.join(kinds)}; head {', '.join(part.describe() for part in self.head.parts)}"

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: KVPool) -> torch.Tensor:
        """float32 logits [L, V] of ``batch.logits_rows``. Writes the batch's keys and values to ``kv``."""
        return self.logits_of(self.features(batch, kv))

    @torch.inference_mode()
    def features(self, batch: ForwardBatch, kv: KVPool) -> torch.Tensor:
        """The head's input [L, C] for ``batch.logits_rows``; [L, 0] on a stage that is not the last."""
        stage, before = self.stage, None
        if stage is None or stage.is_first:
            x = self.embed(batch.token_ids, batch.positions)
            if batch.given is not None:
                x = x.index_copy(0, batch.given.at, batch.given.rows.to(x.dtype))
            residual = x.float()
        else:
            before = residual = stage.receive()
            x = torch.zeros_like(before, dtype=self.dtype)  # all of it is in ``before``
        if stage is None or stage.is_last:
            features = self.run_body(x, residual, batch, kv, before=before)
            return features if self.sequence is None else self.sequence.gathered(features, batch)
        x, added, residual = self._run(self.layers, x, before, residual, batch, kv)
        assert added is not None, "a stage has layers"
        stage.send(added + x)
        return x.new_empty((batch.num_logits_of_step, 0))

    def embed(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:  # [T], [T] -> [T, C]
        x = self.embedding(token_ids)
        return x if self.positions is None else x + F.embedding(positions, self.positions)

    def write_embedded(
        self, token_ids: torch.Tensor, positions: torch.Tensor, out: torch.Tensor, residual: torch.Tensor
    ) -> None:
        """Writes ``embed`` to ``out`` and ``residual`` (float32), both [T, C]."""
        table = self.embedding
        if self.positions is None and isinstance(table, TiedEmbedding) and table.write(token_ids, out, residual):
            return
        with torch.inference_mode():
            x = self.embed(token_ids, positions)
            out.copy_(x)
            residual.copy_(x)

    def logits_of(self, features: torch.Tensor) -> torch.Tensor:
        if not len(features):
            return torch.empty(0, self.config.vocab_size, dtype=torch.float32, device=self.device)
        return self.head(features)

    def run_body(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        batch: ForwardBatch,
        kv: KVPool,
        *,
        before: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``features`` of embedded tokens x [T, C]; ``residual`` is x in float32, and neither is changed. ``before``:
        what layers on other ranks have added to x.

        It does not read ``batch.token_ids``, so a tape recorded here serves any tokens.
        """
        x, residual = self.run_to_last(x, residual, batch, kv, before=before)
        if not len(x):
            return x
        if batch.num_logits < batch.num_tokens:
            x, residual = x[batch.logits_rows], residual[batch.logits_rows]
        return self.finish(x, residual, batch.logits_adapters)

    def run_to_last(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        batch: ForwardBatch,
        kv: KVPool,
        *,
        before: torch.Tensor | None = None,
        at_layer: Callable[[], object] = lambda: None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``run_body`` up to the last layer's feed-forward, whose inputs [T, C] it returns; [0, C] where no logits are
        wanted, for which that layer's keys and values are enough. ``at_layer`` is called before each layer.
        """
        x, added, residual = self._run(self.layers[:-1], x, before, residual, batch, kv, at_layer=at_layer)
        at_layer()
        last = self.layers[-1]
        x, total = last.attention_norm(x, added)
        residual = residual if added is None else total
        if not batch.num_logits_of_step:
            last.attention.write(x, batch, kv, last.cos_sin)
            return x[:0], residual[:0]
        x = last.attention(x, batch, kv, last.cos_sin)
        return (x, residual) if batch.num_logits else (x[:0], residual[:0])

    def finish(self, x: torch.Tensor, residual: torch.Tensor, adapters: AdapterRows | None) -> torch.Tensor:
        """The rest of the last layer for the tokens with logits: the head's input, as x [L, C]."""
        x, residual = self.layers[-1].feed_forward(x, residual, adapters)
        x, _ = self.norm(x, residual)
        return x

    @staticmethod
    def _run(
        layers: tuple[DecoderLayer, ...],
        x: torch.Tensor,
        added: torch.Tensor | None,
        residual: torch.Tensor,
        batch: ForwardBatch,
        kv: KVPool,
        *,
        at_layer: Callable[[], object] = lambda: None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """``added`` is to be added to x; before the first layer of a model there is none."""
        for layer in layers:
            at_layer()
            x, total = layer.attention_norm(x, added)
            residual = residual if added is None else total
            x = layer.attention(x, batch, kv, layer.cos_sin)
            x, added = layer.feed_forward(x, residual, batch.adapters)
        return x, added, residual
