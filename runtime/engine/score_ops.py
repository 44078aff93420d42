"""The ops ``Select`` and ``Score``: their rows are put on the schedule, and the winner is appended."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import msgspec

from ...protocol.errors import PromptTooLong
from ...protocol.ops import Score, Select
from ..scheduler import TokenBuffer
from ..tokenizer.tokenizer import LONG_TEXT
from .program import OpState, Segment, SequenceState
from .scoring import ScoreRow, Scoring, num_chars_of_choices, tokenize_choices
from .tracing import trace_scoring

if TYPE_CHECKING:
    from .programs import Programs


class ScoreOps:
    """Begins and ends the scorings of ``programs``."""

    def __init__(self, programs: Programs) -> None:
        self._programs = programs

    def start(self, owner: SequenceState, op_state: OpState) -> None:
        programs, tokenizer = self._programs, self._programs.tokenizer
        owner.flush_text(tokenizer)
        op = op_state.op
        assert isinstance(op, Select | Score)
        choices = op.choices if isinstance(op, Select) else (op.text,)
        try:
            tokenizer.check_length(max(map(len, choices)), programs.context_len)
        except PromptTooLong as error:
            programs.fail_op(owner, op_state, error)
            return
        start_s = programs.clock()
        begin = partial(self._begin, owner, op_state, choices, start_s)
        if num_chars_of_choices(owner, choices) <= LONG_TEXT:
            begin(tokenize_choices(owner, choices, tokenizer))
        else:
            programs.beside.begin(
                owner, lambda is_wanted: tokenize_choices(owner, choices, tokenizer, is_wanted=is_wanted), begin
            )

    def _begin(
        self,
        owner: SequenceState,
        op_state: OpState,
        choices: tuple[str, ...],
        start_s: float,
        tokens: tuple[int, list[list[int]]],
    ) -> None:
        """``tokens``: what ``tokenize_choices`` has found."""
        programs = self._programs
        common, suffixes = tokens
        scoring = Scoring(op_state, owner, choices, common=common, suffixes=suffixes, start_s=start_s)
        longest = max(len(suffix) for suffix in scoring.suffixes)
        if not programs.has_room(owner, op_state, extra=longest):
            return
        prefix = owner.seq.tokens.ids[: scoring.common].tolist()
        for suffix in scoring.suffixes:
            self._add_row(scoring, scoring.rows, prefix, suffix)
            if scoring.needs_unconditional:
                self._add_row(scoring, scoring.unconditional, [], suffix)
        owner.stop_op = partial(self._stop, scoring)
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
            seq = self._programs.new_sequence(scoring.owner.program, TokenBuffer(tokens))
            seq.logits_from = max(len(prefix) - 1, 0)
            row = ScoreRow(scoring, seq, first=seq.logits_from + 1)
            seq.tag = rows[inner] = row
            self._programs.scheduler.submit(seq, max_new=0)
        rows[inner].last[suffix[-1]] = float("nan")

    def finish_row(self, row: ScoreRow) -> None:
        """All log-probabilities of ``row`` are known: take it off the schedule, and end the op after the last row."""
        row.scoring.owner.program.count_row(row.seq)
        row.cached_tokens = row.seq.num_cached
        self._programs.release(row.seq)
        if row.scoring.is_finished:
            self._finish(row.scoring)

    def _finish(self, scoring: Scoring) -> None:
        owner, op_state, op = scoring.owner, scoring.op_state, scoring.op
        programs = self._programs
        owner.stop_op = None
        meta = scoring.meta(now_s=programs.clock())
        if owner.program.settings.trace:
            meta = msgspec.structs.replace(meta, trace=trace_scoring(scoring, meta, programs.tokenizer))
        winner = scoring.choices[meta.index]
        owner.program.stats.queue_s += meta.queue_s
        owner.program.stats.prefill_s += meta.prefill_s
        if op.append:
            programs.scheduler.drop_lease(owner.seq)  # the winner's row has its KV in the cache
            last = owner.segments[-1] if owner.segments else None
            if last is not None and last.kind == "text":
                last = Segment("generated", last.token_start, last.text_start, last.text + winner)
                owner.segments[-1] = last
                owner.text_len += len(winner)
            else:
                owner.note_generated(scoring.common, winner)
            programs.scheduler.truncate(owner.seq, scoring.common)
            owner.seq.tokens.extend(scoring.suffixes[meta.index])
        value: object = winner
        if isinstance(op, Score):
            value = sum(v for v in meta.logprobs[0] if v is not None)
        scoring.unlink()
        programs.finish_op(owner, op_state, value, meta=meta, texts=(winner,))
        programs.ready.append(owner)

    def _stop(self, scoring: Scoring) -> tuple[str, ...]:
        """Take a scoring in progress off the schedule."""
        for row in (*scoring.rows.values(), *scoring.unconditional.values()):
            self._programs.release(row.seq)
        scoring.unlink()
        return ()
