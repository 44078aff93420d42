"""Tensor parallelism: each rank holds a share of every layer, and two sums a layer join the results.

    x ─► qkv of my heads ─► attention over my keys ─► output, my columns ─► sum ─► norm
      ─► gate and up, my dimensions ─► activation ─► down, my columns    ─► sum ─► norm

(Megatron-LM: Shoeybi et al., 2019.) Every rank has the same residual, to the bit, so every rank has the head's input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from ...kernels import apply_bitmask
from ...kernels.backend import reads_packed
from ...kernels.cpu.recording import open_recording
from ...kernels.linear import Columns
from ..executor.split_steps import Shortlist
from ..layers.adapters import AdapterRows
from ..layers.embedding import EmbeddingTable
from ..layers.linear import Linear, LMHead
from ..layers.moe import MoE
from .group import Group


class RowLinear(Linear):
    """A product whose inputs are split: the sum of the ranks' products. One rank's bias is added, once."""

    def __init__(self, own: Linear, group: Group) -> None:
        super().__init__(own.parts, own.out_dtype, gain=own.gain)
        self.adapters = own.adapters
        self._group = group

    def __call__(self, x: Tensor | Columns, rows: AdapterRows | None = None) -> Tensor:
        return _summed(self._group, super().__call__(x, rows))


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
        return _summed(self._group, super().__call__(x, rows))


def _summed(group: Group, x: Tensor) -> Tensor:
    """The sum, or its place on the tape that is recorded."""
    recording = open_recording()
    return group.sum(x) if recording is None else recording.call_host(group.sum, x)


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
    """A head of which each holder has the rows of its own tokens. The results come together on rank 0.

    Rank 0 calls ``whole_logits`` or ``shortlist`` while the others call ``send_whole`` or ``send_shortlist``, all for
    the same step. A rank that is no holder, such as one of a stage before the last, does not read the input: it needs
    only its number of rows. ``before`` is what a call of rank 0 does first: it gives the others that order.
    """

    def __init__(
        self,
        own: LMHead,
        group: Group,
        holders: Sequence[tuple[int, range]],
        *,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        """``holders``: ranks of ``group`` and their tokens, in the order of tokens."""
        super().__init__(own, cap=own.cap)
        self.before: Callable[[int], None] | None = None
        self._group, self._holders, self._vocab_size = group, list(holders), vocab_size
        self._device = device
        self._vocab = dict(holders).get(group.rank, range(0))

    @property
    def can_pick(self) -> bool:
        return False

    def likeliest(self, num_tokens: int) -> None:
        return None

    @property
    def rank(self) -> int:
        return self._group.rank

    @property
    def is_holder(self) -> bool:
        return len(self._vocab) > 0

    def __call__(self, x: Tensor | Columns, rows: AdapterRows | None = None) -> Tensor:  # [L, C] -> [L, V]
        assert isinstance(x, Tensor)
        assert self.before is not None, "only rank 0 has whole logits"
        self.before(len(x))
        return self.whole_logits(x)

    def whole_logits(self, x: Tensor) -> Tensor:  # [L, C] -> [L, V]
        logits = torch.empty((len(x), self._vocab_size), dtype=torch.float32, device=x.device)
        for rank, run in self._holders:
            columns = logits[:, run.start : run.stop]
            if rank == self._group.rank:
                columns.copy_(self._own_logits(x))
            else:
                columns.copy_(self._group.receive(logits.new_empty(columns.shape), rank))
        return logits

    def _own_logits(self, x: Tensor) -> Tensor:  # [L, C] -> [L, this rank's tokens]
        return super().__call__(x)

    def send_whole(self, x: Tensor) -> None:
        if self.is_holder:
            self._group.send(self._own_logits(x).contiguous(), 0)

    def fetch_input(self, num_rows: int, width: int) -> Tensor:
        """On rank 0, while the first holder calls ``send_input``: the head's input [L, C] of the step, float32."""
        into = torch.empty((num_rows, width), dtype=torch.float32, device=self._device)
        return self._group.receive(into, self._holders[0][0])

    def send_input(self, x: Tensor) -> None:
        if self._group.rank == self._holders[0][0]:
            self._group.send(x.float().contiguous(), 0)

    def shortlist(self, x: Tensor, k: int, *, num_tokens: int, rows: np.ndarray, words: np.ndarray) -> Shortlist:
        """The ``k`` likeliest tokens of every holder's part: among them the ``k`` likeliest of all, ties by lower id.

        ``words`` (uint32 [M, W]) masks the tokens of ``rows`` (int64 [M]); tokens from ``num_tokens`` on are no tokens.
        """
        parts = []
        for rank, run in self._holders:
            if rank == self._group.rank:
                parts.append(self._own_shortlist(x, k, num_tokens=num_tokens, rows=rows, words=words))
            else:
                into = torch.empty((len(x), 2 * min(k, len(run)) + 2), dtype=torch.float64, device=x.device)
                parts.append(self._group.receive(into, rank))
        ids, logits, highest, sums = [], [], [], []
        for part, (_, run) in zip(parts, self._holders, strict=True):
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
        if self.is_holder:
            self._group.send(self._own_shortlist(x, k, num_tokens=num_tokens, rows=rows, words=words), 0)

    def _own_shortlist(self, x: Tensor, k: int, *, num_tokens: int, rows: np.ndarray, words: np.ndarray) -> Tensor:
        """float64 [L, 2 n + 2]: ids within the share, in order, their logits, the highest logit, and the sum of
        exponentials of the logits less that one."""
        logits, vocab = self._own_logits(x), self._vocab
        if num_tokens < vocab.stop:
            logits[:, max(0, num_tokens - vocab.start) :] = float("-inf")
        if len(rows):
            mine = np.ascontiguousarray(words[:, vocab.start // 32 : -(-vocab.stop // 32)]).view(np.int32)
            apply_bitmask(logits, _on(mine, x.device), rows=_on(rows, x.device))
        find = likeliest_by_keys if reads_packed(x.device) else likeliest  # a GPU's host would wait in the other
        ids = find(logits, min(k, len(vocab)))
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


def likeliest_by_keys(logits: Tensor, k: int) -> Tensor:
    """``likeliest`` without the host: the k highest of keys that are the bits of a logit, then those of its id.

    On a CPU it takes two to four times as long.
    """
    bits = (logits.float() + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    in_order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    last = logits.shape[1] - 1
    keys = (in_order.long() << 32) + torch.arange(last, -1, -1, device=logits.device)
    return (last - (keys.topk(k, dim=1).values & 0xFFFFFFFF)).sort(dim=1).values


def _on(array: np.ndarray, device: torch.device) -> Tensor:
    """A copy on the device, for which the host does not wait."""
    host = torch.from_numpy(array)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)
