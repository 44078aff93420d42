"""The op ``Embedding``: a sequence's tokens run as a row of their own, and their last hidden states become a vector.

last:  [0, n - 1) found in the cache or computed   [n - 1] its hidden state is the vector
mean:  [0, n) computed, none found in the cache, which holds keys and values and no hidden states
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ...protocol.messages import EmbeddingMeta
from ...protocol.ops import Embedding
from ..scheduler import Sequence
from .program import OpState, SequenceState

if TYPE_CHECKING:
    import torch

    from ..scheduler import PlanRow
    from .flight import StepInFlight
    from .programs import Programs


class PooledRow:
    """One row of tokens, and ``total``: the sum of the hidden states of those that were pooled so far, float64 [C]."""

    __slots__ = ("op_state", "owner", "seq", "start_s", "total")

    def __init__(self, owner: SequenceState, op_state: OpState, seq: Sequence, *, start_s: float) -> None:
        self.owner, self.op_state, self.seq, self.start_s = owner, op_state, seq, start_s
        self.total: np.ndarray | None = None

    def take(self, start: int, hidden: np.ndarray) -> None:
        """Add the sum of the hidden states from position ``start`` on. A preempted row begins again at its first."""
        if start == self.seq.logits_from:
            self.total = hidden.astype(np.float64)
        else:
            assert self.total is not None
            self.total += hidden

    def vector(self) -> bytes:
        """The pooled hidden state, scaled to length 1, as little-endian float32. A zero stays zero."""
        assert self.total is not None
        length = float(np.linalg.norm(self.total))
        return (self.total / (length or 1.0)).astype("<f4").tobytes()


class EmbeddingOps:
    """Begins and ends the embeddings of ``programs``."""

    def __init__(self, programs: Programs) -> None:
        self._programs = programs

    def start(self, owner: SequenceState, op_state: OpState) -> None:
        programs, op = self._programs, op_state.op
        assert isinstance(op, Embedding)
        end_id = programs.tokenizer.text_end_id
        owner.flush_text(programs.tokenizer)
        ends_in_text = bool(owner.segments) and owner.segments[-1].kind == "text"
        end_ids = [end_id] if end_id is not None and ends_in_text else []
        if not programs.has_room(owner, op_state, extra=len(end_ids)):
            return
        tokens = owner.seq.tokens.copy()
        tokens.extend(end_ids)
        seq = programs.new_sequence(owner.program, tokens)
        seq.logits_from = len(tokens) - 1 if op.pooling == "last" else 0
        seq.tag = PooledRow(owner, op_state, seq, start_s=programs.clock())
        owner.stop_op = partial(self._stop, seq)
        programs.scheduler.submit(seq, max_new=0)

    def finish_row(self, row: PooledRow) -> None:
        """All hidden states of ``row`` are known: take it off the schedule and end its op."""
        programs, owner, seq = self._programs, row.owner, row.seq
        now_s = programs.clock()
        admitted_s = seq.admitted_s or now_s
        meta = EmbeddingMeta(
            prompt_tokens=len(seq.tokens),
            cached_tokens=seq.num_cached,
            start_s=row.start_s - owner.program.start_s,
            queue_s=max(0.0, admitted_s - row.start_s),
            prefill_s=max(0.0, now_s - admitted_s),
        )
        owner.program.count_row(seq)
        owner.program.stats.queue_s += meta.queue_s
        owner.program.stats.prefill_s += meta.prefill_s
        owner.stop_op = None
        programs.release(seq)
        programs.finish_op(owner, row.op_state, row.vector(), meta=meta)
        programs.ready.append(owner)

    def _stop(self, seq: Sequence) -> tuple[str, ...]:
        """Take an embedding in progress off the schedule."""
        self._programs.release(seq)
        return ()


def want_vector(
    flight: StepInFlight,
    pooled: PooledRow,
    row: PlanRow,
    span: slice,
    live: Mapping[int, Sequence],
    finish_row: Callable[[PooledRow], None],
) -> None:
    """Request the hidden states of ``pooled``. ``span``: those of the row's last positions among the step's."""
    if not row.num_logits:
        return
    seq, start = pooled.seq, row.end - row.num_logits
    is_last = row.end == len(seq.tokens)
    hidden = flight.logits.features[span].float().sum(0)  # [C]

    def take(values: list[torch.Tensor]) -> None:
        if live.get(row.seq_id) is not seq:
            return  # the op was cancelled
        pooled.take(start, values[0].numpy())
        if is_last:
            finish_row(pooled)

    flight.want([hidden], take)
