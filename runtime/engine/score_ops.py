"""The ops ``Select`` and ``Score``: their rows put on the schedule, and the winner appended.

Which rows a choice needs and which choice wins is ``scoring``'s; never computes a log-probability.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ...protocol.ops import Score
from ..scheduler import TokenBuffer
from .program import OpState, Segment, SequenceState
from .scoring import ScoreRow, Scoring
from .tracing import trace_scoring

if TYPE_CHECKING:
    from .interpreter import Interpreter


class ScoreOps:
    """Begins and ends scorings for ``interpreter``."""

    def __init__(self, interpreter: Interpreter) -> None:
        self._interpreter = interpreter

    def start(self, owner: SequenceState, op_state: OpState) -> None:
        interpreter = self._interpreter
        owner.flush_text(interpreter.tokenizer)
        scoring = Scoring(op_state, owner, interpreter.tokenizer, now_s=interpreter.clock())
        longest = max(len(suffix) for suffix in scoring.suffixes)
        if not interpreter.has_room(owner, op_state, extra=longest):
            return
        prefix = owner.seq.tokens.ids[: scoring.common].tolist()
        for suffix in scoring.suffixes:
            self._add_row(scoring, scoring.rows, prefix, suffix)
            if scoring.needs_unconditional:
                self._add_row(scoring, scoring.unconditional, [], suffix)
        owner.activity = scoring
        if not scoring.rows and not scoring.unconditional:
            self._finish(scoring)

    def _add_row(
        self, scoring: Scoring, rows: dict[tuple[int, ...], ScoreRow], prefix: list[int], suffix: list[int]
    ) -> None:
        inner = tuple(suffix[:-1])
        if inner not in rows:
            tokens = [*prefix, *inner]
            if not tokens:
                return
            seq = self._interpreter.new_sequence(scoring.owner.program, TokenBuffer(tokens))
            seq.logits_from = max(len(prefix) - 1, 0)
            row = ScoreRow(scoring, seq, first=seq.logits_from + 1)
            seq.tag = rows[inner] = row
            self._interpreter.scheduler.submit(seq, max_new=0)
        rows[inner].last[suffix[-1]] = float("nan")

    def finish_row(self, row: ScoreRow) -> None:
        """All of ``row``'s log-probabilities are known: leave the schedule, perhaps end the op."""
        counters = row.scoring.owner.program.counters
        counters.prompt_tokens += len(row.seq.tokens)
        counters.cached_tokens += row.seq.num_cached
        counters.prefilled_tokens += row.seq.num_run
        counters.preemptions += row.seq.num_preempted
        row.cached_tokens = row.seq.num_cached
        self._interpreter.release(row.seq)
        if row.scoring.is_finished:
            self._finish(row.scoring)

    def _finish(self, scoring: Scoring) -> None:
        owner, op_state, op = scoring.owner, scoring.op_state, scoring.op
        interpreter = self._interpreter
        owner.activity = None
        meta = scoring.meta(now_s=interpreter.clock())
        if owner.program.settings.trace:
            meta = msgspec.structs.replace(meta, trace=trace_scoring(scoring, meta, interpreter.tokenizer))
        winner = scoring.choices[meta.index]
        owner.program.counters.queue_s += meta.queue_s
        owner.program.counters.prefill_s += meta.prefill_s
        if op.append:
            interpreter.scheduler.drop_lease(owner.seq)  # the winner's KV is in the cache
            last = owner.segments[-1] if owner.segments else None
            if last is not None and last.kind == "text":
                last = Segment("generated", last.token_start, last.text_start, last.text + winner)
                owner.segments[-1] = last
                owner.text_len += len(winner)
            else:
                owner.note_generated(scoring.common, winner)
            interpreter.scheduler.truncate(owner.seq, scoring.common)
            owner.seq.tokens.extend(scoring.suffixes[meta.index])
        value: object = winner
        if isinstance(op, Score):
            value = sum(v for v in meta.logprobs[0] if v is not None)
        interpreter.finish_op(owner, op_state, value, meta=meta, texts=(winner,))
        interpreter.make_ready(owner)

    def stop(self, scoring: Scoring) -> None:
        """Take a scoring in progress off the schedule."""
        for row in (*scoring.rows.values(), *scoring.unconditional.values()):
            self._interpreter.release(row.seq)
