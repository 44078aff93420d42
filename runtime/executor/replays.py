"""Steps on the CPU run from a tape: kernel calls are recorded once for each shape and replayed without Python."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from ...kernels.cpu.recording import Arena, Recording
from ...kernels.cpu.tape import Tape
from ...kernels.threads import team
from ..layers.adapters import AdapterRows
from ..layers.batch import ForwardBatch
from .layer_calls import LayerCalls, LayerPattern
from .tape_shapes import MAX_ROWS, MAX_TOKENS, StepShape, num_copies, padded_rows

if TYPE_CHECKING:
    from ..memory import KVPool
    from ..models import Model

MAX_KEPT = 128  # tapes
MAX_PATTERNS = 4  # of a model's layers; shapes that call other kernels have one each


@dataclass(frozen=True, slots=True)
class TapeTensors:
    """The tensors that a tape reads and writes. ``batch`` holds the layers' inputs, without token ids."""

    embedded: torch.Tensor  # [T, C], the activations' type
    residual: torch.Tensor  # float32 [T, C]
    batch: ForwardBatch
    features: torch.Tensor  # [T, C], the activations' type

    def fill(self, embedded: torch.Tensor, batch: ForwardBatch) -> None:
        """Set the inputs of the next replay."""
        self.embedded.copy_(embedded)
        self.residual.copy_(embedded)
        kept = self.batch
        kept.positions.copy_(batch.positions)
        kept.out_slots.copy_(batch.out_slots)
        kept.row_ids.copy_(batch.row_ids)
        kept.query_starts.copy_(batch.query_starts)
        kept.kv_lens.copy_(batch.kv_lens)
        if kept.adapters is not None and batch.adapters is not None:
            kept.adapters.ids.copy_(batch.adapters.ids)


@dataclass(frozen=True, slots=True)
class Recorded:
    """A tape and its tensors."""

    tape: Tape
    tensors: TapeTensors


class Replays:
    """Owns the tapes of one model, one pool and one slot table, either with adapters or without. All share one arena.

    A shape is recorded at its first step: all layers of the first shapes, and a few layers of later ones, from which
    the other layers' calls follow. ``is_cold``: the last step recorded its tape, so it took longer than later steps of
    its shape.
    """

    def __init__(self, model: Model, kv: KVPool, arena: Arena | None = None) -> None:
        self._model, self._kv = model, kv
        self.arena = Arena() if arena is None else arena
        self.kept: OrderedDict[StepShape, Recorded | None] = OrderedDict()  # None: a kernel of it cannot be recorded
        self._patterns: list[LayerPattern] = []  # the one that fitted last comes first
        self._all_can: bool | None = None  # None: not asked yet
        self.is_cold = False

    @property
    def num_tapes(self) -> int:
        return sum(recorded is not None for recorded in self.kept.values())

    def forward(self, batch: ForwardBatch) -> torch.Tensor | None:
        """The head's input [L, C], valid until the next step. None without a tape: for steps of more than MAX_TOKENS
        tokens or of many tokens in more than MAX_ROWS rows, with images, with adapters where ranks share out the
        layers, and for kernels that cannot be recorded.

        A tape runs every token through the whole last layer, also tokens without logits.
        """
        self.is_cold = False
        num_tokens = batch.num_tokens
        if (
            batch.given is not None
            or not 0 < num_tokens <= MAX_TOKENS
            or (batch.adapters is not None and self._model.agree is not None)
            or not self._can_replay()
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

    def record_ahead(self, slot_table: torch.Tensor) -> bool:
        """Record the tape of the fewest rows of one token each that have none yet. It takes as long as at a first step,
        and computes nothing. False where every such tape of up to MAX_ROWS rows is kept, as many tapes as can be are
        kept, or ranks would have to do the same. ``slot_table``: that of all steps.
        """
        most = min(MAX_ROWS, len(slot_table))
        count = next((n for n in range(1, most + 1) if (n, n) not in self.kept), 0)
        if not count or len(self.kept) >= MAX_KEPT or self._model.agree is not None or not self._can_replay():
            return False
        each = torch.arange(count)
        rows = each.int()
        batch = ForwardBatch(each, each, each, rows, torch.arange(count + 1).int(), rows + 1, slot_table, each)
        self.kept[count, count] = self._record(batch, self._model.embed(torch.zeros_like(each), each))
        return True

    def _features(self, batch: ForwardBatch) -> torch.Tensor | None:
        """The features of every token, [T, C]; None without a tape."""
        num_tokens = batch.num_tokens
        shape = (len(batch.row_ids), num_tokens)
        embedded = self._model.embed(batch.token_ids, batch.positions)
        if shape not in self.kept:
            self.is_cold = True
            recorded = self._record(batch, embedded)
            self.kept[shape] = recorded if self._agreed(recorded is not None) else None
            if len(self.kept) > MAX_KEPT:
                self.kept.popitem(last=False)
        self.kept.move_to_end(shape)
        recorded = self.kept[shape]
        if recorded is None:
            return None
        recorded.tensors.fill(embedded, batch)
        recorded.tape.replay(team().pool)
        return recorded.tensors.features

    def _can_replay(self) -> bool:
        """As ``team().can_replay``; with other ranks, whether all ranks can, which is asked once."""
        if self._model.agree is None:
            return team().can_replay
        if self._all_can is None:
            self._all_can = self._agreed(team().can_replay)
        return self._all_can

    def _agreed(self, is_so: bool) -> bool:
        """Whether it is so on all ranks: a padded step takes part in sums of its padded size."""
        return is_so if self._model.agree is None else self._model.agree(is_so)

    def _record(self, batch: ForwardBatch, embedded: torch.Tensor) -> Recorded | None:
        """A tape for the batch's shape; None where a kernel of it cannot be recorded."""
        for pattern in self._patterns:
            layers, tensors = self._trace(batch, embedded, pattern.needed)
            if tensors is None:
                return None
            every = pattern.complete(layers)
            if every is not None:
                self._patterns.remove(pattern)
                self._patterns.insert(0, pattern)
                return self._recorded(every, tensors)
        layers, tensors = self._trace(batch, embedded, range(len(self._model.layers)))
        if tensors is None:
            return None
        every = list(layers.values())
        self._patterns.insert(0, LayerPattern(every))
        del self._patterns[MAX_PATTERNS:]
        return self._recorded(every, tensors)

    def _trace(
        self, batch: ForwardBatch, embedded: torch.Tensor, numbers: Sequence[int]
    ) -> tuple[dict[int, LayerCalls], TapeTensors | None]:
        """The calls of the layers ``numbers`` by number, and the step's tensors; none where a kernel cannot be
        recorded.
        """
        self.arena.restart()
        held = self._like(embedded), self._like(embedded, torch.float32)
        adapters = self._adapters_like(batch)
        kept = replace(
            batch,
            positions=self._like(batch.positions),
            out_slots=self._like(batch.out_slots),
            row_ids=self._like(batch.row_ids),
            query_starts=self._like(batch.query_starts),
            kv_lens=self._like(batch.kv_lens),
            adapters=adapters,
            logits_adapters=adapters,
        )
        model, begins = self._model, list[int]()
        if len(numbers) < len(model.layers):
            model = replace(model, layers=tuple(model.layers[i] for i in numbers))
        with Recording(self.arena) as recording:
            calls = recording.calls
            features = model.run_body(*held, kept, self._kv, at_layer=lambda: begins.append(len(calls)))
        if recording.foreign is not None:
            return {}, None
        ends = [*begins[1:], len(calls)]
        parts = zip(numbers, begins, ends, strict=True)
        layers = {i: LayerCalls.of(calls[begin:end], self.arena) for i, begin, end in parts}
        return layers, TapeTensors(*held, kept, features)

    def _recorded(self, layers: Sequence[LayerCalls], tensors: TapeTensors) -> Recorded:
        return Recorded(Tape([call for layer in layers for call in layer.calls], self.arena), tensors)

    def _adapters_like(self, batch: ForwardBatch) -> AdapterRows | None:
        rows = batch.adapters
        return None if rows is None else AdapterRows.of(self._like(rows.ids, torch.int64), rows.groups.num_groups)

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

    last, adapters = batch.query_starts[-1], batch.adapters
    if adapters is not None:
        adapters = AdapterRows.of(with_more(adapters.ids, adapters.ids[token]), adapters.groups.num_groups)
    return replace(
        batch,
        token_ids=with_more(batch.token_ids, batch.token_ids[token]),
        positions=with_more(batch.positions, batch.positions[token]),
        out_slots=with_more(batch.out_slots, batch.out_slots[token]),
        row_ids=with_more(batch.row_ids, batch.row_ids[row]),
        query_starts=torch.cat((batch.query_starts, last + torch.arange(1, count + 1, dtype=last.dtype))),
        kv_lens=with_more(batch.kv_lens, batch.positions[token] + 1),
        adapters=adapters,
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
