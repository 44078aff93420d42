"""The decoder of all served families: embedding, then attention and MLP for each layer, then logits."""

from dataclasses import dataclass

import torch

from ..layers.attention import Attention
from ..layers.batch import ForwardBatch
from ..layers.embedding import BlockEmbedding, Embedding, TiedEmbedding
from ..layers.linear import LMHead
from ..layers.mlp import MLP
from ..layers.moe import MoE
from ..layers.norm import NoNorm, RMSNorm
from ..memory import KVPool
from ..weights.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """``cos_sin`` is shared with the other layers of the same rope, and has a row for every position."""

    cos_sin: torch.Tensor  # float32 [positions, rotated dimensions]
    attention_norm: RMSNorm | NoNorm
    attention: Attention
    mlp_norm: RMSNorm | NoNorm
    mlp: MLP | MoE
    attention_post_norm: RMSNorm | None = None
    mlp_post_norm: RMSNorm | None = None


@dataclass(frozen=True, slots=True)
class Model:
    """``dtype`` is of activations, ``kv_dtype`` of keys and values."""

    config: ModelConfig
    embedding: Embedding | TiedEmbedding | BlockEmbedding
    layers: tuple[DecoderLayer, ...]
    norm: RMSNorm
    head: LMHead
    max_positions: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    device: torch.device
    adapters: tuple[str, ...] = ()  # names; a row refers to one by its index here

    @property
    def needs_torch_threads(self) -> bool:
        """Whether any product is torch's own, so that torch needs the machine's threads."""
        layers = [(x.attention.qkv, x.attention.output, x.mlp) for x in self.layers]
        return any(part.needs_torch_threads for layer in (*layers, (self.head,)) for part in layer)

    def describe(self) -> str:
        """The kernels of the first layer's products and of the head's."""
        layer = self.layers[0]
        linears = [layer.attention.qkv, layer.attention.output]
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
        """The head's input [L, C] for ``batch.logits_rows``."""
        x = self.embedding(batch.token_ids)  # [T, C]
        return self.run_body(x, x.float(), batch, kv)

    def logits_of(self, features: torch.Tensor) -> torch.Tensor:
        if not len(features):
            return torch.empty(0, self.config.vocab_size, dtype=torch.float32, device=self.device)
        return self.head(features)

    def run_body(self, x: torch.Tensor, residual: torch.Tensor, batch: ForwardBatch, kv: KVPool) -> torch.Tensor:
        """``features`` of embedded tokens x [T, C]; ``residual`` is x in float32, and neither is changed.

        It does not read ``batch.token_ids``, so a tape recorded here serves any tokens.
        """
        added: torch.Tensor | None = None  # to be added to x; before the first layer there is none
        for layer in self.layers[:-1]:
            x, total = layer.attention_norm(x, added)
            residual = residual if added is None else total
            x = layer.attention(x, batch, kv, layer.cos_sin)
            if layer.attention_post_norm is not None:
                x, _ = layer.attention_post_norm(x)
            x, added = layer.mlp_norm(x, residual)  # in float32: bfloat16 sums would add half to the error
            x = layer.mlp(x, batch.adapters)
            if layer.mlp_post_norm is not None:
                x, _ = layer.mlp_post_norm(x)
        return self._finish(x, added, residual, batch, kv)

    def _finish(
        self, x: torch.Tensor, added: torch.Tensor | None, residual: torch.Tensor, batch: ForwardBatch, kv: KVPool
    ) -> torch.Tensor:
        """The rest of the last layer, for ``logits_rows`` only: other tokens need only its keys and values."""
        last = self.layers[-1]
        x, total = last.attention_norm(x, added)
        residual = residual if added is None else total
        if not batch.num_logits:
            last.attention.write(x, batch, kv, last.cos_sin)
            return x[:0]
        x = last.attention(x, batch, kv, last.cos_sin)
        if last.attention_post_norm is not None:
            x, _ = last.attention_post_norm(x)
        if batch.num_logits < batch.num_tokens:
            x, residual = x[batch.logits_rows], residual[batch.logits_rows]
        x, residual = last.mlp_norm(x, residual)
        x = last.mlp(x, batch.logits_adapters)
        if last.mlp_post_norm is not None:
            x, _ = last.mlp_post_norm(x)
        x, _ = self.norm(x, residual)
        return x
