"""Sequence parallelism: each rank keeps the keys and values of some slots, and every query visits all ranks.

    slot 0 1 2 3 4 5 6 7        rank 0 keeps slots 0 2 4 6, rank 1 keeps 1 3 5 7, so each has half of every sequence

    few tokens:   every rank runs all ─► queries over its keys ─► parts to all ranks                  ─► join
    many tokens:  each runs its share ─► queries to all ranks  ─► over its keys ─► parts to the share ─► join
                                      ─► keys, values to their owners

(Queries go to the keys, as in Yang et al., 2024; parts are joined by the log of their weight, as in Ring Attention, Liu
et al., 2023, and Flash-Decoding, Dao, 2023.) Slots have one owner whatever sequence reads them, so prefixes are shared
as on one rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ...kernels import partial_attention
from ..layers.batch import ForwardBatch, StepArrays
from ..layers.spread import Spread, TokenShares
from ..memory import KVPool
from .group import Group
from .sharding import even_parts
from .sizes import SHARED_TOKENS


class SpreadKeys:
    """Implements ``layers.keys.LayerKeys`` for the ranks of ``group``, which have the same layers and heads."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def places(self, batch: ForwardBatch, kv: KVPool, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """The pool, where keys of other ranks go to its spare slot; or tensors of this rank's share of the tokens."""
        assert batch.spread is not None
        if batch.spread.shares is None:
            return kv.k[layer], kv.v[layer], batch.out_slots
        k = kv.k[layer].new_empty((batch.num_tokens, *kv.k[layer].shape[1:]))
        return k, k if kv.v is kv.k else torch.empty_like(k), batch.out_slots

    def keep(self, k: Tensor, v: Tensor, batch: ForwardBatch, kv: KVPool, layer: int) -> None:
        assert batch.spread is not None
        shares = batch.spread.shares
        if shares is None:
            return
        whole = k.unsqueeze(1) if v is k else torch.stack((k, v), 1)  # [T, parts, Hkv, D]
        into = [whole.new_empty((count, *whole.shape[1:])) for count in shares.taken]
        self._group.exchange([whole[tokens] for tokens in shares.given], into)
        rows = torch.cat(into)
        for part, layers in enumerate(kv.parts):
            layers[layer][shares.slots] = rows[:, part]

    def attend(
        self,
        q: Tensor,
        batch: ForwardBatch,
        kv: KVPool,
        layer: int,
        *,
        scale: float,
        window: int = 0,
        soft_cap: float = 0.0,
        first: int = 0,
    ) -> Tensor:
        spread = batch.spread
        assert spread is not None
        own = q if spread.shares is None else self._all_queries(q, spread.shares, spread.num_tokens)
        rows = (batch.slot_table, batch.row_ids, batch.query_starts, spread.ends)
        inputs, firsts = (own, kv.k[layer], kv.v[layer], *rows), spread.firsts.get(window)
        out, logs = partial_attention(*inputs, scale=scale, firsts=firsts, soft_cap=soft_cap)
        part = torch.cat((out[:, :, first:], logs.unsqueeze(2)), 2)  # [S, H, D + 1]
        if spread.shares is None:
            return joined(self._group.gather(part)).to(q.dtype)
        parts = [part.new_empty((len(q), *part.shape[1:])) for _ in spread.shares.runs]
        self._group.exchange([part[run.start : run.stop] for run in spread.shares.runs], parts)
        return joined(parts).to(q.dtype)

    def _all_queries(self, q: Tensor, shares: TokenShares, num_tokens: int) -> Tensor:
        whole = q.new_empty((num_tokens, *q.shape[1:]))
        self._group.exchange([q.contiguous()] * self._group.size, [whole[run.start : run.stop] for run in shares.runs])
        return whole


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Attention over all ranks' keys, float32 [T, H, D], of the ranks' parts [T, H, D + 1]: over the keys of one rank,
    then the base-2 logarithm of their weight. The parts are added in their order.
    """
    highest = torch.stack([part[..., -1:] for part in parts]).amax(0)
    total, weight = torch.zeros_like(parts[0][..., :-1]), torch.zeros_like(highest)
    for part in parts:
        share = (part[..., -1:] - highest).exp2()
        total += part[..., :-1] * share
        weight += share
    return total / weight


class OwnedSlots:
    """Implements ``models.decoder.HeldSlots``: of each row of a batch, the slots that one rank of ``size`` owns.

    Slot s belongs to rank s % size, as its slot s // size. The rank's last slot belongs to no token.
    """

    def __init__(
        self, rank: int, size: int, *, windows: frozenset[int], spare_slot: int, max_rows: int, max_len: int
    ) -> None:
        self._rank, self._size, self._spare_slot = rank, size, spare_slot
        self._windows = windows - {0}
        self._slots = np.zeros((max_rows, max_len), np.int32)  # [row, i]: of the row's i-th position that is owned
        self._counts = np.zeros((max_rows, max_len + 1), np.int32)  # [row, p]: positions before p that are owned

    def batch(self, step: StepArrays) -> ForwardBatch:
        if step.earlier:
            runs = step.earlier
            rows, starts, firsts = (np.repeat(of, runs.lengths) for of in (runs.rows, runs.starts, runs.firsts))
            positions = starts + np.arange(len(firsts)) - firsts
            self._write(rows, positions, runs.slots, firsts)
        rows, positions = step.token_rows, step.positions
        self._write(rows, positions, step.out_slots, np.repeat(step.query_starts[:-1], np.diff(step.query_starts)))
        shares = self._shares(step)
        own = range(step.num_tokens) if shares is None else shares.runs[self._rank]
        out_slots = np.where(step.out_slots % self._size == self._rank, step.out_slots // self._size, self._spare_slot)
        logits_rows = np.asarray(step.logits_rows)
        if shares is not None:
            out_slots = np.arange(len(own))
            logits_rows = logits_rows[_within(logits_rows, own)] - own.start
        spread = Spread(
            ends=_narrow(self._counts[rows, positions + 1]),
            firsts={
                window: _narrow(self._counts[rows, np.maximum(positions + 1 - window, 0)]) for window in self._windows
            },
            num_tokens=step.num_tokens,
            num_logits=len(step.logits_rows),
            own=own,
            shares=shares,
        )
        mine = slice(own.start, own.stop)
        return ForwardBatch(
            token_ids=_wide(step.token_ids[mine]),
            positions=_wide(positions[mine]),
            out_slots=_wide(out_slots),
            logits_rows=_wide(logits_rows),
            row_ids=_narrow(step.row_ids),
            query_starts=_narrow(step.query_starts),
            kv_lens=_narrow(self._counts[step.row_ids, step.kv_lens]),
            slot_table=torch.from_numpy(self._slots),
            spread=spread,
        )

    def _write(self, rows: np.ndarray, positions: np.ndarray, slots: np.ndarray, firsts: np.ndarray) -> None:
        """The slots of runs of neighbouring positions. ``firsts``: of each position, where its run begins."""
        is_mine = slots % self._size == self._rank
        before = np.cumsum(is_mine) - is_mine  # of all runs
        places = self._counts[rows[firsts], positions[firsts]] + before - before[firsts]
        self._slots[rows[is_mine], places[is_mine]] = slots[is_mine] // self._size
        self._counts[rows, positions + 1] = places + is_mine

    def _shares(self, step: StepArrays) -> TokenShares | None:
        if step.num_tokens < SHARED_TOKENS * self._size:
            return None
        runs = even_parts(step.num_tokens, self._size)
        owners = step.out_slots % self._size
        of_own = owners[runs[self._rank].start : runs[self._rank].stop]
        mine = owners == self._rank
        return TokenShares(
            runs=tuple(runs),
            given=tuple(torch.from_numpy(np.flatnonzero(of_own == rank)) for rank in range(self._size)),
            taken=tuple(int(mine[run.start : run.stop].sum()) for run in runs),
            slots=_wide(step.out_slots[mine] // self._size),
            num_logits=tuple(int(_within(step.logits_rows, run).sum()) for run in runs),
        )


class SequenceRanks:
    """Implements ``models.decoder.KeyHolders`` for this rank of ``group``. ``windows``: of the layers, 0: none."""

    def __init__(self, group: Group, windows: frozenset[int]) -> None:
        self._group, self._windows = group, windows

    def slots(self, *, pool_slots: int, max_rows: int, max_len: int) -> OwnedSlots:
        sizes = {"max_rows": max_rows, "max_len": max_len}
        rank, size = self._group.rank, self._group.size
        return OwnedSlots(rank, size, windows=self._windows, spare_slot=pool_slots - 1, **sizes)

    def gathered(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        spread = batch.spread
        assert spread is not None
        none = x[:0]
        if self._group.rank:
            if spread.shares is not None:
                self._group.exchange([x.contiguous(), *[none] * (self._group.size - 1)], [none] * self._group.size)
            return x.new_empty((spread.num_logits, 0))
        if spread.shares is None:
            return x
        whole = x.new_empty((spread.num_logits, x.shape[1]))
        into = whole.split(spread.shares.num_logits)
        self._group.exchange([x, *[none] * (self._group.size - 1)], into)
        return whole


def _within(tokens: np.ndarray, run: range) -> np.ndarray:
    return (tokens >= run.start) & (tokens < run.stop)


def _wide(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array.astype(np.int64))


def _narrow(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array.astype(np.int32))
