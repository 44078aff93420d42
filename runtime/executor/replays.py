"""Steps on the CPU run from a tape: kernel calls are recorded once for each shape and replayed without Python.

Of a prompt only the last tokens have logits. So the tape of a larger step ends before the last layer's feed-forward.
The rest runs from another tape, for the tokens with logits alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from ...kernels.cpu.recording import Arena, Call, Recording
from ...kernels.cpu.tape import Tape
from ...kernels.threads import team
from ..layers.adapters import AdapterRows
from ..layers.batch import ForwardBatch, StepArrays
from .layer_calls import LayerCalls, LayerPattern
from .tape_shapes import MAX_ROWS, MAX_TOKENS, StepShape, num_copies, padded_rows, usual_shapes

if TYPE_CHECKING:
    from ..memory import KVPool
    from ..models import Model

MAX_KEPT = 448  # tapes, of 0.15 MB each for 30 layers; there are 436 shapes
MAX_FINISHES = 64  # tapes of a few calls
_SPARE = 0.5  # of a pattern's tensors: attention's plan is larger for some smaller shapes
MAX_PATTERNS = 4  # shapes that call other kernels have one each


@dataclass(frozen=True, slots=True)
class TapeTensors:
    """The tensors that a tape reads and writes. ``batch`` holds the layers' inputs, without token ids."""

    embedded: torch.Tensor  # [T, C], the activations' type
    residual: torch.Tensor  # float32 [T, C]
    batch: ForwardBatch
    last: torch.Tensor  # [T, C], the activations' type: what the last layer's feed-forward gets
    last_residual: torch.Tensor  # float32 [T, C]
    features: torch.Tensor  # [T, C], the activations' type

    def has_room(self, batch: ForwardBatch) -> bool:
        kept = self.batch
        return batch.num_tokens <= len(kept.positions) and len(batch.row_ids) <= len(kept.row_ids)

    def of_shape(self, batch: ForwardBatch) -> TapeTensors:
        """Those of a step of the shape of ``batch``, at the same places."""
        kept, num_tokens, num_rows = self.batch, batch.num_tokens, len(batch.row_ids)
        adapters = kept.adapters
        if adapters is not None:
            adapters = AdapterRows.of(adapters.ids[:num_tokens], adapters.groups.num_groups)
        shaped = replace(
            batch,
            positions=kept.positions[:num_tokens],
            out_slots=kept.out_slots[:num_tokens],
            row_ids=kept.row_ids[:num_rows],
            query_starts=kept.query_starts[: num_rows + 1],
            kv_lens=kept.kv_lens[:num_rows],
            adapters=adapters,
            logits_adapters=adapters,
        )
        own = (self.embedded, self.residual, self.last, self.last_residual, self.features)
        embedded, residual, *results = (each[:num_tokens] for each in own)
        return TapeTensors(embedded, residual, shaped, *results)

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
class StepInputs:
    """The integers of a tape's step, where it reads them; ``token_ids`` is of these steps alone."""

    token_ids: torch.Tensor  # int64 [T]
    token_array: np.ndarray  # the same memory
    positions: np.ndarray
    out_slots: np.ndarray
    row_ids: np.ndarray
    query_starts: np.ndarray
    kv_lens: np.ndarray

    @classmethod
    def of(cls, batch: ForwardBatch) -> StepInputs:
        token_ids = torch.zeros(batch.num_tokens, dtype=torch.int64)
        others = (batch.positions, batch.out_slots, batch.row_ids, batch.query_starts, batch.kv_lens)
        return cls(token_ids, token_ids.numpy(), *(tensor.numpy() for tensor in others))

    def fill(self, step: StepArrays) -> None:
        """Set them for the next replay."""
        self.token_array[:] = step.token_ids
        self.positions[:] = step.positions
        self.out_slots[:] = step.out_slots
        self.row_ids[:] = step.row_ids
        self.query_starts[:] = step.query_starts
        self.kv_lens[:] = step.kv_lens


@dataclass(frozen=True, slots=True)
class Recorded:
    """A tape and its tensors. Unless it ``is_whole``, it ends with the inputs of the last layer's feed-forward."""

    tape: Tape
    tensors: TapeTensors
    is_whole: bool
    inputs: StepInputs


@dataclass(frozen=True, slots=True)
class Finish:
    """The tape of what follows for some tokens, and its tensors, as those of ``TapeTensors``."""

    tape: Tape
    last: torch.Tensor
    last_residual: torch.Tensor
    features: torch.Tensor


@dataclass(frozen=True, slots=True)
class Pattern:
    """The layers' calls for one shape, from which those for smaller shapes follow, and that shape's tensors."""

    layers: LayerPattern
    tensors: TapeTensors
    every: tuple[list[Call], np.ndarray]  # ``LayerPattern.complete`` for the shape itself
    num_last: int  # calls that follow the last layer's attention
    num_last_words: int  # of their records


class Replays:
    """Owns the tapes of one model, one pool and one slot table, either with adapters or without. All share one arena.

    A shape is recorded at its first step: a few layers, from which the other layers' calls follow, as all layers have
    been recorded for the largest shape. ``is_cold``: the last step recorded its tape, so it took longer than later
    steps of its shape.
    """

    def __init__(self, model: Model, kv: KVPool, arena: Arena | None = None) -> None:
        self._model, self._kv = model, kv
        self.arena = Arena() if arena is None else arena
        self.kept: OrderedDict[StepShape, Recorded | None] = OrderedDict()  # None: a kernel of it cannot be recorded
        self._finishes: OrderedDict[int, Finish] = OrderedDict()  # by the number of tokens
        self._finish_arena = Arena()  # these tapes read what a tape of the other arena has left there
        self._patterns: list[Pattern] = []  # the one that fitted last comes first
        self._all_can: bool | None = None  # None: not asked yet
        self.is_cold = False

    @property
    def num_tapes(self) -> int:
        return sum(recorded is not None for recorded in self.kept.values())

    @property
    def num_patterns(self) -> int:
        """How often all layers were recorded."""
        return len(self._patterns)

    def forward(self, batch: ForwardBatch) -> torch.Tensor | None:
        """The head's input [L, C], valid until the next step. None without a tape: for steps of more than MAX_TOKENS
        tokens or of many tokens in more than MAX_ROWS rows, with images, with adapters where ranks share out the
        layers, and for kernels that cannot be recorded.

        A tape of up to MAX_ROWS tokens or with adapters runs every token through the whole last layer, also tokens
        without logits.
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
            return self._features(batch, None)
        if num_tokens > MAX_ROWS:
            batch = _with_copies(batch, num_copies(num_tokens))
            if len(batch.row_ids) > MAX_ROWS:
                return None
        return self._features(
            _in_few_shapes(batch), None if has_all and batch.num_tokens == num_tokens else batch.logits_rows
        )

    def forward_decode(self, step: StepArrays) -> torch.Tensor | None:
        """As ``forward``, of a step whose rows have one token each, with logits, and no adapter. None unless its tape
        is there already."""
        shape = (step.num_tokens, step.num_tokens)
        recorded = self.kept.get(shape)
        if recorded is None or step.num_tokens > MAX_ROWS or not self._can_replay():
            return None
        self.is_cold = False
        self.kept.move_to_end(shape)
        tensors, inputs = recorded.tensors, recorded.inputs
        inputs.fill(step)
        self._model.write_embedded(inputs.token_ids, tensors.batch.positions, tensors.embedded, tensors.residual)
        recorded.tape.replay(team().pool)
        return tensors.features

    def record_ahead(self, slot_table: torch.Tensor) -> bool:
        """Record the first of the ``usual_shapes`` that has no tape yet. It takes as long as at a first step, and
        computes nothing. False where all of them are kept, as many tapes as can be are kept, or ranks would have to do
        the same. ``slot_table``: that of all steps.
        """
        shapes = usual_shapes(len(slot_table))
        shape = next((one for one in shapes if one not in self.kept), None)
        if shape is None or len(self.kept) >= MAX_KEPT or self._model.agree is not None or not self._can_replay():
            return False
        batch = _blank(shape, slot_table)
        self.kept[shape] = self._record(batch, self._model.embed(batch.token_ids, batch.positions))
        return True

    def _features(self, batch: ForwardBatch, logits_rows: torch.Tensor | None) -> torch.Tensor | None:
        """The features [L, C] of the tokens ``logits_rows``, None: of all; None without a tape."""
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
        tensors = recorded.tensors
        tensors.fill(embedded, batch)
        recorded.tape.replay(team().pool)
        if recorded.is_whole:
            return tensors.features if logits_rows is None else tensors.features[logits_rows]
        return self._finished(tensors, torch.arange(num_tokens) if logits_rows is None else logits_rows)

    def _finished(self, tensors: TapeTensors, logits_rows: torch.Tensor) -> torch.Tensor:
        """The features of these tokens, of which a tape has computed all but the last layer's feed-forward."""
        count = len(logits_rows)
        if not count:
            return tensors.last[:0]
        finish = self._finishes.get(count)
        if finish is None:
            finish = self._finishes[count] = self._record_finish(tensors, count)
            if len(self._finishes) > MAX_FINISHES:
                self._finishes.popitem(last=False)
        self._finishes.move_to_end(count)
        torch.index_select(tensors.last, 0, logits_rows, out=finish.last)
        torch.index_select(tensors.last_residual, 0, logits_rows, out=finish.last_residual)
        finish.tape.replay(team().pool)
        return finish.features

    def _record_finish(self, tensors: TapeTensors, count: int) -> Finish:
        arena = self._finish_arena
        arena.restart()
        last = arena.empty((count, tensors.last.shape[1]), tensors.last.dtype)
        residual = arena.empty((count, tensors.last_residual.shape[1]), tensors.last_residual.dtype)
        with Recording(arena) as recording:
            features = self._model.finish(last, residual, None)
        assert recording.foreign is None, "the same kernels have been recorded before"
        return Finish(Tape(recording.calls, arena), last, residual, features)

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
        if not self._patterns:
            self._learn(*_largest(batch, embedded))
        for pattern in self._patterns:
            if not pattern.tensors.has_room(batch):
                continue
            layers, tensors = self._trace(batch, embedded, pattern.layers.needed)
            if tensors is None:
                return None
            every = pattern.layers.complete(layers)
            if every is not None:
                self._patterns.remove(pattern)
                self._patterns.insert(0, pattern)
                return self._recorded(pattern, every, batch)
        own = self._learn(batch, embedded)
        return None if own is None else self._recorded(own, own.every, batch)

    def _learn(self, batch: ForwardBatch, embedded: torch.Tensor) -> Pattern | None:
        """Record all layers, as the pattern of this shape and of smaller ones."""
        found, tensors = self._trace(batch, embedded, range(len(self._model.layers) + 1), spare=_SPARE)
        if tensors is None:
            return None
        layers = LayerPattern(list(found.values()))
        every = layers.complete(found)
        assert every is not None, "the layers follow from themselves"
        finish = found[len(self._model.layers)]
        pattern = Pattern(layers, tensors, every, len(finish.calls), len(finish.words))
        self._patterns.insert(0, pattern)
        del self._patterns[MAX_PATTERNS:]
        return pattern

    def _trace(
        self, batch: ForwardBatch, embedded: torch.Tensor, numbers: Sequence[int], *, spare: float = 0.0
    ) -> tuple[dict[int, LayerCalls], TapeTensors | None]:
        """The calls of the layers ``numbers`` by number, and the step's tensors; none where a kernel cannot be
        recorded. What follows the last layer's attention has a number of its own, the last one.
        """
        self.arena.restart(spare=spare)
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
        if len(numbers) <= len(model.layers):
            model = replace(model, layers=tuple(model.layers[i] for i in numbers[:-1]))
        with Recording(self.arena) as recording:
            calls = recording.calls
            last = model.run_to_last(*held, kept, self._kv, at_layer=lambda: begins.append(len(calls)))
            begins.append(len(calls))
            features = model.finish(*last, kept.logits_adapters)
        if recording.foreign is not None:
            return {}, None
        ends, places = [*begins[1:], len(calls)], self.arena.places
        parts = zip(numbers, begins, ends, strict=True)
        layers = {i: LayerCalls.of(calls[begin:end], places) for i, begin, end in parts}
        return layers, TapeTensors(*held, kept, *last, features)

    def _recorded(self, pattern: Pattern, every: tuple[list[Call], np.ndarray], batch: ForwardBatch) -> Recorded:
        calls, words = every
        is_whole = batch.num_tokens <= MAX_ROWS or batch.adapters is not None
        if not is_whole:
            calls, words = calls[: -pattern.num_last], words[: -pattern.num_last_words]
        tensors = pattern.tensors.of_shape(batch)
        return Recorded(Tape(calls, self.arena, words), tensors, is_whole, StepInputs.of(tensors.batch))

    def _adapters_like(self, batch: ForwardBatch) -> AdapterRows | None:
        rows = batch.adapters
        return None if rows is None else AdapterRows.of(self._like(rows.ids, torch.int64), rows.groups.num_groups)

    def _like(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self.arena.empty(tuple(x.shape), dtype or x.dtype)


def _largest(batch: ForwardBatch, embedded: torch.Tensor) -> tuple[ForwardBatch, torch.Tensor]:
    """A batch with as many tokens and rows as any tape has, to be recorded and not to be run; and its embedding."""
    adapters = batch.adapters
    if adapters is not None:
        adapters = AdapterRows.of(adapters.ids.new_zeros(MAX_TOKENS), adapters.groups.num_groups)
    large = replace(_blank((MAX_ROWS, MAX_TOKENS), batch.slot_table), adapters=adapters)
    return large, embedded.new_empty((MAX_TOKENS, *embedded.shape[1:]))


def _blank(shape: StepShape, slot_table: torch.Tensor) -> ForwardBatch:
    """A batch of this shape whose contents mean nothing."""
    num_rows, num_tokens = shape
    tokens, rows = torch.zeros(num_tokens, dtype=torch.int64), torch.zeros(num_rows, dtype=torch.int32)
    starts = torch.zeros(num_rows + 1, dtype=torch.int32)
    return ForwardBatch(tokens, tokens, tokens, rows, starts, rows, slot_table, tokens)


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
