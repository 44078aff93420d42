"""Tensor parallelism: each rank holds a share of every layer, and two sums a layer join the results.

    x ─► qkv of my heads ─► attention over my keys ─► output, my columns ─► sum ─► norm
      ─► gate and up, my dimensions ─► activation ─► down, my columns    ─► sum ─► norm

(Megatron-LM: Shoeybi et al., 2019.) Every rank has the same residual, to the bit, so every rank has the head's input.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import torch
from torch import Tensor

from ...kernels import apply_bitmask
from ...protocol.errors import UnknownModel
from ..executor.split_steps import Shortlist
from ..layers.adapters import AdapterRows
from ..layers.attention import Attention
from ..layers.embedding import EmbeddingTable
from ..layers.linear import Linear, LMHead
from ..layers.mlp import MLP
from ..layers.moe import MoE
from ..models import Model
from ..models.adapters import Adapter
from ..models.decoder import DecoderLayer
from ..weights.adapter_folder import LowRankPair
from ..weights.weight_file import WeightFile
from .group import Group
from .sharding import Share, SharedFile, piece_len_of, share_of


@dataclass(slots=True)
class TensorSplit:
    """One rank's ``models.loading.Split``. ``source`` is the file that it read."""

    group: Group
    share: Share | None = None
    source: SharedFile | None = None

    def file(self, file: WeightFile) -> WeightFile:
        piece_len = piece_len_of(file)
        self.share = share_of(file.config, rank=self.group.rank, size=self.group.size, piece_len=piece_len)
        self.source = SharedFile(file, self.share)
        return self.source

    def adapter(self, adapter: Adapter) -> Adapter:
        path, added = adapter
        return path, {place: self._pair(path, *place, pair) for place, pair in added.items()}

    def _pair(self, path: str, layer: int, target: str, pair: LowRankPair) -> LowRankPair:
        assert self.share is not None
        share, config, (down, up) = self.share, self.share.config, pair
        q_len, kv_len = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        inner = config.intermediate_size
        rows, num_rows = {
            "q_proj": ((share.query_rows,), q_len),
            **dict.fromkeys(("k_proj", "v_proj"), ((share.kv_rows,), kv_len)),
            "qkv_proj": (share.qkv_rows, q_len + 2 * kv_len),
            **dict.fromkeys(("gate_proj", "up_proj"), ((share.inner,), inner)),
            "gate_up_proj": (share.gate_up_rows, 2 * inner),
        }.get(target, ((range(len(up)),), config.hidden_size))
        columns, width = {"o_proj": (share.query_rows, q_len), "down_proj": (share.inner, inner)}.get(
            target, (range(down.shape[1]), config.hidden_size)
        )
        if len(up) != num_rows or down.shape[1] != width:
            raise UnknownModel(
                f"adapter {path}: {target} of layer {layer} is {len(up)} x {down.shape[1]}, "
                f"but the model's is {num_rows} x {width}; it was made for another model"
            )
        return down[:, columns.start : columns.stop], torch.cat([up[run.start : run.stop] for run in rows])

    def joined(self, model: Model) -> Model:
        assert self.share is not None
        vocab = self.share.vocab
        for layer in model.layers:
            assert isinstance(layer.attention, Attention), "share_of refuses latent attention"
            layer.attention.output = RowLinear(layer.attention.output, self.group)
            if isinstance(layer.mlp, MLP):
                layer.mlp.down = RowLinear(layer.mlp.down, self.group)
        return replace(
            model,
            config=msgspec.structs.replace(model.config, vocab_size=self.share.config.vocab_size),
            embedding=SplitEmbedding(model.embedding, vocab, self.group),
            layers=tuple(self._layer(layer) for layer in model.layers),
            head=SplitHead(model.head, self.share, self.group),
            is_split=True,
        )

    def _layer(self, layer: DecoderLayer) -> DecoderLayer:
        return replace(layer, mlp=SplitMoE(layer.mlp, self.group)) if isinstance(layer.mlp, MoE) else layer


class RowLinear(Linear):
    """A product whose inputs are split: the sum of the ranks' products. One rank's bias is added, once."""

    def __init__(self, own: Linear, group: Group) -> None:
        super().__init__(own.parts, own.out_dtype, gain=own.gain)
        self.adapters = own.adapters
        self._group = group

    def __call__(self, x: Tensor, rows: AdapterRows | None = None) -> Tensor:
        return self._group.sum(super().__call__(x, rows))


class SplitMoE(MoE):
    """Experts whose inner dimensions are split. Every rank routes alike, as its router is whole."""

    def __init__(self, own: MoE, group: Group) -> None:
        super().__init__(
            own.router,
            own.gate_up,
            own.down,
            top_k=own.top_k,
            normalise=own.normalise,
            shared=own.shared,
            shared_gate=own.shared_gate,
            routing=own.routing,
            bias=own.bias,
        )
        self._group = group

    def __call__(self, x: Tensor, rows: AdapterRows | None = None) -> Tensor:
        return self._group.sum(super().__call__(x, rows))


class SplitEmbedding:
    """A table of which each rank holds the rows of its own tokens; other tokens add zeros."""

    def __init__(self, own: EmbeddingTable, vocab: range, group: Group) -> None:
        self._own, self._vocab, self._group = own, vocab, group

    @property
    def weight(self) -> Tensor:
        """The rows of this rank's tokens."""
        return self._own.weight

    def __call__(self, token_ids: Tensor) -> Tensor:  # [T] -> [T, C]
        local = token_ids - self._vocab.start
        is_mine = (local >= 0) & (local < len(self._vocab))
        x = self._own(torch.where(is_mine, local, 0))
        return self._group.sum(torch.where(is_mine.unsqueeze(1), x, 0))


class SplitHead(LMHead):
    """A head of which each rank holds the rows of its own tokens. Its results come together on rank 0.

    Rank 0 calls ``whole_logits`` or ``shortlist`` while the others call ``send_whole`` or ``send_shortlist``, all with
    the same input. ``before`` is what a call of rank 0 does first: it gives the others that order.
    """

    def __init__(self, own: LMHead, share: Share, group: Group) -> None:
        super().__init__(own, cap=own.cap)
        self.before: Callable[[int], None] | None = None
        self._group, self._vocab = group, share.vocab
        self._vocab_size = share.config.vocab_size
        self._ranges = [
            share_of(share.config, rank=rank, size=share.size).vocab for rank in range(share.size)
        ]  # of every rank

    @property
    def can_pick(self) -> bool:
        return False

    def __call__(self, x: Tensor, rows: AdapterRows | None = None) -> Tensor:  # [L, C] -> [L, V]
        assert self.before is not None, "only rank 0 has whole logits"
        self.before(len(x))
        return self.whole_logits(x)

    def whole_logits(self, x: Tensor) -> Tensor:  # [L, C] -> [L, V]
        logits = torch.empty((len(x), self._vocab_size), dtype=torch.float32, device=x.device)
        for rank, run in enumerate(self._ranges):
            columns = logits[:, run.start : run.stop]
            if rank == self._group.rank:
                columns.copy_(self._own_logits(x))
            else:
                columns.copy_(self._group.receive(torch.empty_like(columns), rank))
        return logits

    def _own_logits(self, x: Tensor) -> Tensor:  # [L, C] -> [L, this rank's tokens]
        return super().__call__(x)

    def send_whole(self, x: Tensor) -> None:
        self._group.send(self._own_logits(x).contiguous(), 0)

    def shortlist(self, x: Tensor, k: int, *, num_tokens: int, rows: np.ndarray, words: np.ndarray) -> Shortlist:
        """The ``k`` likeliest tokens of every rank's part: among them the ``k`` likeliest of all, ties by lower id.

        ``words`` (uint32 [M, W]) masks the tokens of ``rows`` (int64 [M]); tokens from ``num_tokens`` on are no tokens.
        """
        own = self._own_shortlist(x, k, num_tokens=num_tokens, rows=rows, words=words)
        parts = [own]
        for rank in range(1, self._group.size):
            width = min(k, len(self._ranges[rank]))
            parts.append(self._group.receive(own.new_empty((len(x), 2 * width + 2)), rank))
        ids, logits, highest, sums = [], [], [], []
        for part, run in zip(parts, self._ranges, strict=True):
            width = (part.shape[1] - 2) // 2
            ids.append(part[:, :width].long() + run.start)
            logits.append(part[:, width : 2 * width].float())
            highest.append(part[:, -2])
            sums.append(part[:, -1])
        top = torch.stack(highest).amax(0)
        scaled = [s * (h - top).exp() for h, s in zip(highest, sums, strict=True)]
        total = torch.stack(scaled).nan_to_num(0.0).sum(0).log() + top
        return Shortlist(torch.cat(ids, 1), torch.cat(logits, 1), total.float())

    def send_shortlist(self, x: Tensor, k: int, *, num_tokens: int, rows: np.ndarray, words: np.ndarray) -> None:
        self._group.send(self._own_shortlist(x, k, num_tokens=num_tokens, rows=rows, words=words), 0)

    def _own_shortlist(self, x: Tensor, k: int, *, num_tokens: int, rows: np.ndarray, words: np.ndarray) -> Tensor:
        """float64 [L, 2 n + 2]: ids within the share, in order, their logits, the highest logit, and the sum of
        exponentials of the logits less that one."""
        logits, vocab = self._own_logits(x), self._vocab
        if num_tokens < vocab.stop:
            logits[:, max(0, num_tokens - vocab.start) :] = float("-inf")
        if len(rows):
            mine = np.ascontiguousarray(words[:, vocab.start // 32 : -(-vocab.stop // 32)]).view(np.int32)
            apply_bitmask(logits, torch.from_numpy(mine).to(x.device), rows=torch.from_numpy(rows).to(x.device))
        ids = likeliest(logits, min(k, len(vocab)))
        highest = logits.amax(1, keepdim=True)
        exponentials = torch.where(highest > float("-inf"), logits - highest, float("-inf")).exp()
        sums = exponentials.sum(1, keepdim=True, dtype=torch.float64)
        return torch.cat((ids.double(), logits.gather(1, ids).double(), highest.double(), sums), 1)


def likeliest(logits: Tensor, k: int) -> Tensor:
    """int64 [L, k]: the ids of each row's ``k`` highest logits, in the order of ids; of equal ones the lower ids."""
    values, ids = logits.topk(k, dim=1)
    is_tied = (logits == values[:, -1:]).sum(1) > (values == values[:, -1:]).sum(1)
    for row in is_tied.nonzero().flatten().tolist():
        ids[row] = logits[row].sort(descending=True, stable=True).indices[:k]
    return ids.sort(dim=1).values
