"""Self-attention over paged keys and values. A row knows its context only by its slots."""

import torch

from ...kernels import norm_rope_write_kv, rope_write_kv
from ..memory import KVPool
from .batch import ForwardBatch
from .keys import LayerKeys, LocalKeys
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
        self.keys: LayerKeys = LocalKeys()

    def __call__(self, x: torch.Tensor, batch: ForwardBatch, kv: KVPool, cos_sin: torch.Tensor) -> torch.Tensor:
        q = self.write(x, batch, kv, cos_sin)
        inputs = (q, batch, kv, self.layer)
        mixed = self.keys.attend(*inputs, scale=self.scale, window=self.window, soft_cap=self.soft_cap)
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
        k_cache, v_cache, slots = self.keys.places(batch, kv, self.layer)
        places = (cos_sin, batch.positions, k_cache, v_cache, slots)
        if has_norms and self.q_norm is not None and self.k_norm is not None:
            norms = {"q_norm": self.q_norm.weight, "k_norm": self.k_norm.weight}
            q = norm_rope_write_kv(q, k, v, *places, **norms, eps=self.q_norm.eps)
        else:
            rope_write_kv(q, k, v, *places)
        self.keys.keep(k_cache, v_cache, batch, kv, self.layer)
        return q
