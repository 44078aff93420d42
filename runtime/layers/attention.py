"""Self-attention over paged keys and values. A row knows its context only by its slots."""

import torch

from ...kernels import norm_rope_write_kv, paged_attention, rope_write_kv, shared_prefix_attention
from ..memory import KVPool
from .batch import ForwardBatch
from .linear import Linear
from .norm import RMSNorm


class Attention:
    """One layer's attention, H query and Hkv key/value heads of D dimensions. ``window`` 0: the whole context.

    Norms of D weights are for each head alone, longer ones for all heads together. ``scale`` 0 is ``D ** -0.5``. With
    ``soft_cap`` a score becomes ``soft_cap * tanh(score / soft_cap)``.
    """

    def __init__(
        self,
        qkv: Linear,
        output: Linear,
        *,
        layer: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        window: int = 0,
        scale: float = 0.0,
        soft_cap: float = 0.0,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
    ) -> None:
        self.qkv, self.output = qkv, output
        self.layer = layer
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.scale = scale or head_dim**-0.5
        self.soft_cap = soft_cap
        self.window = window
        self.q_norm, self.k_norm = q_norm, k_norm

    def __call__(self, x: torch.Tensor, batch: ForwardBatch, kv: KVPool, cos_sin: torch.Tensor) -> torch.Tensor:
        q = self.write(x, batch, kv, cos_sin)
        rows = (batch.slot_table, batch.row_ids, batch.query_starts, batch.kv_lens)
        inputs = (q, kv.k[self.layer], kv.v[self.layer], *rows)
        if batch.shared is not None and not self.window:
            mixed = shared_prefix_attention(*inputs, shared=batch.shared, scale=self.scale, soft_cap=self.soft_cap)
        else:
            options = {"scale": self.scale, "soft_cap": self.soft_cap}
            mixed = paged_attention(*inputs, sliding_window=self.window, **options)
        return self.output(mixed.view(-1, self.num_heads * self.head_dim), batch.adapters)

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.qkv, self.output

    @property
    def needs_torch_threads(self) -> bool:
        return any(linear.needs_torch_threads for linear in self.linears)

    def write(self, x: torch.Tensor, batch: ForwardBatch, kv: KVPool, cos_sin: torch.Tensor) -> torch.Tensor:
        """Writes the tokens' keys and values to their slots; returns the rotated queries [T, H, D]."""
        qkv = self.qkv(x, batch.adapters).view(x.shape[0], -1, self.head_dim)
        q, k, v = qkv.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        has_norms = self.q_norm is not None
        if self.q_norm is not None and self.k_norm is not None and len(self.q_norm.weight) > self.head_dim:
            q = self.q_norm(q.flatten(1))[0].view(q.shape)
            k = self.k_norm(k.flatten(1))[0].view(k.shape)
            has_norms = False
        places = (cos_sin, batch.positions, kv.k[self.layer], kv.v[self.layer], batch.out_slots)
        if has_norms and self.q_norm is not None and self.k_norm is not None:
            norms = {"q_norm": self.q_norm.weight, "k_norm": self.k_norm.weight}
            return norm_rope_write_kv(q, k, v, *places, **norms, eps=self.q_norm.eps)
        rope_write_kv(q, k, v, *places)
        return q
