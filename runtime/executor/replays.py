"""Steps on the CPU run from a tape: kernel calls are recorded once for each shape and replayed without Python."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from ...kernels.cpu.recording import Arena, Recording
from ...kernels.cpu.tape import Tape
from ...kernels.threads import team
from ..layers.batch import ForwardBatch
from .tape_shapes import MAX_ROWS, MAX_TOKENS, STEPS_BEFORE, StepShape, num_copies, padded_rows

if TYPE_CHECKING:
    from ..memory import KVPool
    from ..models import Model

MAX_KEPT = 128  # tapes


@dataclass(frozen=True, slots=True)
class Recorded:
    """A tape and the tensors that it reads and writes. ``batch`` holds the layers' inputs, without token ids."""

    tape: Tape
    embedded: torch.Tensor  # [T, C], the activations' type
    residual: torch.Tensor  # float32 [T, C]
    batch: ForwardBatch
    features: torch.Tensor  # [T, C], the activations' type


class Replays:
    """Owns the tapes of one model, one pool and one slot table. All tapes share one arena.

    ``is_cold``: the last step ran without a tape or recorded one, so it took longer than later steps of its shape.
    """

    def __init__(self, model: Model, kv: KVPool, *, steps_before: int = STEPS_BEFORE) -> None:
        """``steps_before``: steps of a shape that run without a tape before one is recorded; may be changed."""
        self._model, self._kv = model, kv
        self.steps_before = steps_before
        self.arena = Arena()
        self.kept: OrderedDict[StepShape, Recorded | None] = OrderedDict()  # None: a kernel of it cannot be recorded
        self._seen: Counter[StepShape] = Counter()  # steps of each shape without a tape
        self.is_cold = False

    @property
    def num_tapes(self) -> int:
        return sum(recorded is not None for recorded in self.kept.values())

    def forward(self, batch: ForwardBatch) -> torch.Tensor | None:
        """The head's input [L, C], valid until the next step. None without a tape: for steps of more than MAX_TOKENS
        tokens or of many tokens in more than MAX_ROWS rows, with adapters or images, for shapes that are still rare,
        for kernels that cannot be recorded.

        A tape runs every token through the whole last layer, also tokens without logits.
        """
        self.is_cold = False
        num_tokens = batch.num_tokens
        if (
            batch.adapters is not None
            or batch.given is not None
            or not 0 < num_tokens <= MAX_TOKENS
            or not team().can_replay
        ):
            return None
        has_all = batch.num_logits == num_tokens
        if num_tokens <= MAX_ROWS and has_all and len(batch.row_ids) in (1, num_tokens):
            return self._features(batch)
        if num_tokens > MAX_ROWS:
            batch = _with_copies(batch, num_copies(num_tokens))
            if len(batch.row_ids) > MAX_ROWS:
                return None
        whole = self._features(_in_few_shapes(batch))
        return whole if whole is None or (has_all and len(whole) == num_tokens) else whole[batch.logits_rows]

    def _features(self, batch: ForwardBatch) -> torch.Tensor | None:
        """The features of every token, [T, C]; None without a tape."""
        num_tokens = batch.num_tokens
        shape = (len(batch.row_ids), num_tokens)
        if shape not in self.kept:
            self.is_cold = True
            self._seen[shape] += 1
            if self._seen[shape] <= self.steps_before:
                return None
            del self._seen[shape]
            return self._record(shape, batch)
        self.kept.move_to_end(shape)
        recorded = self.kept[shape]
        if recorded is None:
            return None
        _fill(recorded, self._model.embed(batch.token_ids, batch.positions), batch)
        recorded.tape.replay(team().pool)
        return recorded.features

    def _record(self, shape: StepShape, batch: ForwardBatch) -> torch.Tensor:
        self.arena.restart()
        embedded = self._model.embed(batch.token_ids, batch.positions)
        held = self._like(embedded), self._like(embedded, torch.float32)
        kept = replace(
            batch,
            positions=self._like(batch.positions),
            out_slots=self._like(batch.out_slots),
            row_ids=self._like(batch.row_ids),
            query_starts=self._like(batch.query_starts),
            kv_lens=self._like(batch.kv_lens),
        )
        _copy_into(kept, batch)
        held[0].copy_(embedded)
        held[1].copy_(embedded)
        with Recording(self.arena) as recording:
            features = self._model.run_body(*held, kept, self._kv)
        recorded = None
        if recording.foreign is None:
            recorded = Recorded(Tape(recording), *held, kept, features)
        self.kept[shape] = recorded
        if len(self.kept) > MAX_KEPT:
            self.kept.popitem(last=False)
        return features

    def _like(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self.arena.empty(tuple(x.shape), dtype or x.dtype)


def _with_copies(batch: ForwardBatch, count: int) -> ForwardBatch:
    """The batch with ``count`` more rows, each a copy of its token with the shortest context.

    A copy writes the same keys and values, to the bit, to the same slot, so it changes nothing.
    """
    if not count:
        return batch
    token = int(batch.positions.argmin())
    row = int(torch.searchsorted(batch.query_starts, token, right=True)) - 1

    def with_more(values: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
        return torch.cat((values, more.to(values.dtype).expand(count)))

    last = batch.query_starts[-1]
    return replace(
        batch,
        token_ids=with_more(batch.token_ids, batch.token_ids[token]),
        positions=with_more(batch.positions, batch.positions[token]),
        out_slots=with_more(batch.out_slots, batch.out_slots[token]),
        row_ids=with_more(batch.row_ids, batch.row_ids[row]),
        query_starts=torch.cat((batch.query_starts, last + torch.arange(1, count + 1, dtype=last.dtype))),
        kv_lens=with_more(batch.kv_lens, batch.positions[token] + 1),
    )


def _in_few_shapes(batch: ForwardBatch) -> ForwardBatch:
    """The batch with logits for all tokens, padded with empty rows to a shape that many steps share.

    Forced tokens and drafts give steps many different splits of their tokens into rows.
    """
    num_rows, num_tokens = len(batch.row_ids), batch.num_tokens
    longest, context = int(batch.query_starts.diff().max()), int(batch.kv_lens.max())
    padding = padded_rows(num_rows, num_tokens, longest=longest, context=context) - num_rows
    none = batch.row_ids.new_zeros(padding)
    return replace(
        batch,
        row_ids=torch.cat((batch.row_ids, none)),
        query_starts=torch.cat((batch.query_starts, none + num_tokens)),
        kv_lens=torch.cat((batch.kv_lens, none)),
        logits_rows=torch.arange(num_tokens),
    )


def _fill(recorded: Recorded, embedded: torch.Tensor, batch: ForwardBatch) -> None:
    recorded.embedded.copy_(embedded)
    recorded.residual.copy_(embedded)
    _copy_into(recorded.batch, batch)


def _copy_into(kept: ForwardBatch, batch: ForwardBatch) -> None:
    kept.positions.copy_(batch.positions)
    kept.out_slots.copy_(batch.out_slots)
    kept.row_ids.copy_(batch.row_ids)
    kept.query_starts.copy_(batch.query_starts)
    kept.kv_lens.copy_(batch.kv_lens)
