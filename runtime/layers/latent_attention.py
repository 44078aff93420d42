"""Multi-head latent attention (DeepSeek-AI, 2024: DeepSeek-V2) over the latents themselves.

Head h's key of a token is ``key_up[h] @ latent``, its value ``latent @ value_up[h]``. Neither is made:

q . (key_up[h] @ latent) = (q @ key_up[h]) . latent
weights @ (latents @ value_up[h]) = (weights @ latents) @ value_up[h]

So all heads attend to one vector of each token, ``[rotated part | latent]``, which is both key and value: a slot holds
``R + L`` numbers instead of ``2 * H * D``. Prompts and decodes use the same products.
"""

import torch

from ...kernels import rope_write_kv
from ..memory import KVPool
from ..weights.config_parts import Latent
from .adapters import AdapterRows
from .batch import ForwardBatch
from .keys import LayerKeys, LocalKeys
from .linear import Linear
from .norm import RMSNorm


class LatentQueries:
    """The product that makes queries: ``up(norm(down(x)))``."""

    def __init__(self, down: Linear, norm: RMSNorm, up: Linear) -> None:
        self.down, self.norm, self.up = down, norm, up

    def __call__(self, x: torch.Tensor, rows: AdapterRows | None = None) -> torch.Tensor:
        y, _ = self.norm(self.down(x, rows))
        return self.up(y, rows)


class LatentAttention:
    """One layer's attention: H heads, R rotated dimensions, latents of L, N other dimensions of a query, values of V.

    ``query`` returns [T, H * (R + N)] and ``compress`` [T, R + L]: the rotated part comes first in both. ``key_up`` is
    [H, N, L], ``value_up`` [H, L, V].
    """

    window = 0

    def __init__(
        self,
        query: Linear | LatentQueries,
        compress: Linear,
        latent_norm: RMSNorm,
        key_up: torch.Tensor,
        value_up: torch.Tensor,
        output: Linear,
        *,
        layer: int,
        num_heads: int,
        sizes: Latent,
        scale: float,
    ) -> None:
        self.query, self.compress, self.latent_norm = query, compress, latent_norm
        self.key_up, self.value_up = key_up, value_up
        self.output = output
        self.layer = layer
        self.num_heads, self.sizes, self.scale = num_heads, sizes, scale
        self.keys: LayerKeys = LocalKeys()

    def __call__(self, x: torch.Tensor, batch: ForwardBatch, kv: KVPool, cos_sin: torch.Tensor) -> torch.Tensor:
        q = self.write(x, batch, kv, cos_sin)
        mixed = self.keys.attend(q, batch, kv, self.layer, scale=self.scale, first=self.sizes.rope_dim)  # [T, H, L]
        latents = mixed.transpose(0, 1)  # [H, T, L]
        values = torch.bmm(latents, self.value_up).transpose(0, 1)  # [T, H, V]
        return self.output(values.flatten(1), batch.adapters)

    def write(self, x: torch.Tensor, batch: ForwardBatch, kv: KVPool, cos_sin: torch.Tensor) -> torch.Tensor:
        """Writes the tokens' vectors to their slots; returns the queries of them, [T, H, R + L]."""
        rotated = self.sizes.rope_dim
        query = self.query(x, batch.adapters).view(x.shape[0], self.num_heads, -1)  # [T, H, R + N]
        q = torch.empty((x.shape[0], self.num_heads, self.sizes.slot_dim), dtype=query.dtype, device=x.device)
        q[:, :, :rotated] = query[:, :, :rotated]
        q[:, :, rotated:] = torch.bmm(query[:, :, rotated:].transpose(0, 1), self.key_up).transpose(0, 1)
        vector = self.compress(x, batch.adapters)  # [T, R + L]
        latent, _ = self.latent_norm(vector[:, rotated:].contiguous())
        vector = torch.cat((vector[:, :rotated], latent), dim=1).unsqueeze(1)  # [T, 1, R + L]
        k_cache, v_cache, slots = self.keys.places(batch, kv, self.layer)
        rope_write_kv(q, vector, None, cos_sin, batch.positions, k_cache, v_cache, slots)
        self.keys.keep(k_cache, v_cache, batch, kv, self.layer)
        return q

    @property
    def linears(self) -> tuple[Linear, ...]:
        first = (self.query,) if isinstance(self.query, Linear) else (self.query.down, self.query.up)
        return (*first, self.compress, self.output)

    @property
    def needs_torch_threads(self) -> bool:
        return True  # the products with ``key_up`` and ``value_up`` are torch's


def query_order(sizes: Latent, num_heads: int) -> torch.Tensor:
    """Where in the file each row of the query product lies. A head is ``[others | rotated]`` there, reversed here."""
    rows = torch.arange(num_heads * sizes.query_dim).view(num_heads, -1)
    others, rotated = rows.split((sizes.nope_dim, sizes.rope_dim), dim=1)
    return torch.cat((_halves(rotated, sizes), others), dim=1).flatten()


def vector_order(sizes: Latent) -> torch.Tensor:
    """Where in the file each row of ``compress`` lies: ``[latent | rotated]`` there, rotated first here."""
    latent, rotated = torch.arange(sizes.slot_dim).split((sizes.size, sizes.rope_dim))
    return torch.cat((_halves(rotated.unsqueeze(0), sizes)[0], latent))


def _halves(rows: torch.Tensor, sizes: Latent) -> torch.Tensor:
    """Rows [H, R] of neighbouring pairs as first halves, then second halves."""
    if not sizes.is_interleaved:
        return rows
    return rows.view(len(rows), -1, 2).transpose(1, 2).reshape(len(rows), -1)
