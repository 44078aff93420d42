"""Candidates that decode steadily, as arrays by row: a token each is looked at by a few calls of numpy.

One whose token may end it, cuts a character that is to be shown, or leads its grammar where none has been is looked at
by itself; for all others text, counters, grammar and output are brought up to date now and then. Never forwards and
never draws.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ..executor import DrawArrays, SampledToken
from ..scheduler import UNTOLD, PlanRow, Sequence
from .flight import Draw, Flight, SteadyDraws
from .generation import Candidate
from .grammar_states import GrammarStates

if TYPE_CHECKING:
    from ...protocol.messages import RuntimeMessage
    from ..scheduler import DecodePart, Scheduler
    from ..speculative import Speculation
    from ..tokenizer import Tokenizer
    from .program import Program

FEWEST = 9  # rows; for fewer, arrays cost more than they save


class SteadyDecoding:
    """Says which of the scheduler's sequences are steady, and knows how each is drawn and when it may end.

    ``accept(candidate, token)`` takes one token as a step without arrays would, and returns whether the candidate's op
    goes on or ends well; ``finish`` is for a candidate that has its finish reason.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        tokenizer: Tokenizer,
        *,
        context_len: int,
        vocab_size: int,
        speculation: Speculation | None,
        overlaps: bool,
        send: Callable[[bytes, RuntimeMessage], None],
        accept: Callable[[Candidate, SampledToken], bool],
        finish: Callable[[Candidate], None],
    ) -> None:
        self._scheduler = scheduler
        self._rows = scheduler.steady
        self._rows.on_told, self._rows.on_left = self._told, self._left
        self._context_len = context_len
        self._speculation = speculation
        # A drafted sequence whose next token is known waits for a guess at those after it.
        self._may_be_drafted = overlaps and (speculation is None or not speculation.readers)
        self._send, self._accept, self._finish = send, accept, finish
        max_rows = len(self._rows.seq_ids)
        self._ends = np.zeros(vocab_size, np.bool_)
        self._ends[[i for i in tokenizer.eos_ids if i < vocab_size]] = True
        self._limits = np.zeros(max_rows, np.int64)  # tokens at which the candidate ends
        self._minds_ends = np.zeros(max_rows, np.bool_)
        self._is_seen = np.zeros(max_rows, np.bool_)  # each of its tokens is looked at
        self._is_streamed = np.zeros(max_rows, np.bool_)
        self._is_mid_text = np.zeros(max_rows, np.bool_)  # of a streamed row: something is held back
        self._texts: dict[bool, dict[int, str]] = {True: {}, False: {}}  # of tokens, without special ones or with
        self._is_masked = np.zeros(max_rows, np.bool_)
        self._grammar_states = GrammarStates(vocab_size)
        self._states = np.full(max_rows, -1, np.int64)  # of masked rows, by number
        self._untold_states = np.zeros((max_rows, UNTOLD), np.int64)
        self._temperature = np.zeros(max_rows, np.float32)
        self._top_k = np.zeros(max_rows, np.int32)
        self._top_p = np.zeros(max_rows, np.float32)
        self._min_p = np.zeros(max_rows, np.float32)
        self._seeds = np.zeros(max_rows, np.int64)
        self._program_ids = np.zeros(max_rows, np.int64)
        self._programs: dict[Program, list[int]] = {}  # (its number here, its rows)
        self._free_program_ids = list(range(max_rows))
        self._forwards = np.zeros(max_rows, np.int64)  # by program number, not told yet
        self._is_counted = np.zeros(max_rows, np.bool_)

    # -- in and out ---------------------------------------------------------------------------------------------------

    def enter(self, flight: Flight) -> None:
        """Make candidates of ``flight`` steady: their draws become arrays. Nothing may be planned on these yet."""
        found = [draw for draw in flight.draws if draw.draft is None and self._is_steady(draw.candidate)]
        if not found or len(found) + len(self._rows) < FEWEST or not self._scheduler.may_be_steady:
            return
        found = [draw for draw in found if self._enter(draw.candidate)]
        taken = set(map(id, found))
        flight.draws = [draw for draw in flight.draws if id(draw) not in taken]
        seqs = [draw.candidate.seq for draw in found]
        rows = np.array([seq.row_id for seq in seqs], np.int64)
        seq_ids = np.array([seq.seq_id for seq in seqs], np.int64)
        ats = np.array([draw.at for draw in found], np.int64)
        flight.steady = flight.steady.joined(SteadyDraws(rows, seq_ids, ats))

    def check_room(self, flight: Flight | None) -> None:
        """Where slots become short, or few rows are left, all go back; ``flight`` is what is being drawn."""
        rows = self._rows
        if not len(rows) or (len(rows) >= FEWEST and self._scheduler.may_be_steady):
            return
        steady = SteadyDraws() if flight is None else flight.steady
        drawn = dict(zip(steady.seq_ids.tolist(), steady.ats.tolist(), strict=True))
        for seq in rows.sequences():
            rows.leave(seq)
            if flight is not None and seq.seq_id in drawn:
                flight.draws.append(_draw_of(seq, drawn[seq.seq_id]))
        if flight is not None:
            flight.steady = SteadyDraws()

    def tell_all(self) -> None:
        """Bring every candidate and program up to date."""
        for seq in self._rows.sequences():
            self._rows.tell(seq)

    def _is_steady(self, candidate: Candidate) -> bool:
        params = candidate.generation.op.params
        return not (
            candidate.finish_reason
            or candidate.record is not None
            or candidate.healing is not None
            or candidate.detokenizer.num_hidden
            or candidate.num_generated < params.min_tokens
            or not candidate.generation.first_token_s
            or params.return_logprob
            or params.frequency_penalty
            or params.presence_penalty
            or params.repetition_penalty != 1.0
            or params.logit_bias
            or (candidate.is_drafted and not self._may_be_drafted)
        )

    def _enter(self, candidate: Candidate) -> bool:
        seq, generation = candidate.seq, candidate.generation
        params, row = generation.op.params, seq.row_id
        if not self._rows.enter(seq):
            return False
        left = params.max_tokens - candidate.num_generated
        self._limits[row] = min(len(seq.tokens) + left, self._context_len)
        self._minds_ends[row] = not params.ignore_eos
        self._is_masked[row] = candidate.matcher is not None
        self._is_seen[row] = bool(params.stop or params.stop_regex or params.stop_token_ids)
        self._is_streamed[row] = generation.op.stream
        self._is_mid_text[row] = candidate.is_mid_text
        self._states[row] = self._number(candidate)
        self._temperature[row] = params.temperature
        self._top_k[row] = params.top_k
        self._top_p[row] = params.top_p
        self._min_p[row] = params.min_p
        self._seeds[row] = candidate.seed
        program = generation.owner.program
        if program not in self._programs:
            self._programs[program] = [self._free_program_ids.pop(), 0]
        entry = self._programs[program]
        entry[1] += 1
        self._program_ids[row] = entry[0]
        return True

    def _told(self, seq: Sequence, ids: np.ndarray) -> None:
        candidate = seq.tag
        assert isinstance(candidate, Candidate)
        program_id, program = self._program_ids.item(seq.row_id), candidate.generation.owner.program
        program.counters.forwards += self._forwards.item(program_id)
        self._forwards[program_id] = 0
        if len(ids):
            candidate.take_seen(ids.tolist())
            self._observe(candidate, ids)
            if candidate.matcher is not None:
                self._grammar_states.follow(candidate.matcher, self._untold_states[seq.row_id, : len(ids)])

    def _left(self, seq: Sequence) -> None:
        candidate = seq.tag
        assert isinstance(candidate, Candidate)
        program = candidate.generation.owner.program
        entry = self._programs[program]
        entry[1] -= 1
        if not entry[1]:
            del self._programs[program]
            self._free_program_ids.append(entry[0])

    def _observe(self, candidate: Candidate, ids: np.ndarray) -> None:
        """No guess was run for these tokens."""
        for _ in range(len(ids) if candidate.is_drafted else 0):
            candidate.note_draft(0)
        if self._speculation is not None and candidate.is_drafted:
            self._speculation.observe(candidate.seq.seq_id, ids, None, 0)

    # -- a step -------------------------------------------------------------------------------------------------------

    def expect(self, flight: Flight) -> None:
        """The next plan may stand on the tokens that are being drawn, but for those that are the last."""
        rows, ats = self._alive(flight.steady)
        if len(rows):
            goes_on = self._rows.known[rows] + 1 < self._limits[rows]
            self._rows.expect(rows[goes_on], ats[goes_on])

    def count_forwards(self, part: DecodePart) -> None:
        """Each program with a row in ``part`` runs in one step more."""
        self._is_counted[:] = False
        self._is_counted[self._program_ids[part.row_ids]] = True
        self._forwards += self._is_counted

    def is_counted(self, program: Program) -> bool:
        """Whether ``count_forwards`` has just counted it."""
        entry = self._programs.get(program)
        return entry is not None and self._is_counted.item(entry[0])

    def draws(self, part: DecodePart) -> tuple[SteadyDraws, DrawArrays]:
        """What is to be drawn from a step whose first rows were ``part``; not for those that have ended meanwhile."""
        logits_rows = np.flatnonzero(self._rows.seq_ids[part.row_ids] == part.seq_ids)
        rows = part.row_ids[logits_rows]
        masked = np.flatnonzero(self._is_masked[rows])
        mask_ids, masks = self._masks_of(rows[masked])
        arrays = DrawArrays(
            logits_rows=logits_rows,
            seeds=self._seeds[rows],
            num_tokens=self._rows.known[rows],
            temperature=self._temperature[rows],
            top_k=self._top_k[rows],
            top_p=self._top_p[rows],
            min_p=self._min_p[rows],
            masked=masked,
            mask_ids=mask_ids,
            masks=masks,
        )
        return SteadyDraws(rows, part.seq_ids[logits_rows], np.arange(len(rows))), arrays

    def take(self, steady: SteadyDraws, token_ids: np.ndarray) -> None:
        """The drawn tokens of a step, int64 [draws]."""
        rows, ats = self._alive(steady)
        if not len(rows):
            return
        ids = token_ids[ats]
        is_seen = self._is_seen[rows] | (self._rows.known[rows] + 1 >= self._limits[rows]) | (ids < 0)
        is_seen |= self._ends[ids] & self._minds_ends[rows]
        is_streamed = self._is_streamed[rows]
        if is_streamed.any():
            is_seen |= is_streamed & self._is_mid_text[rows]
            places = np.flatnonzero(is_streamed & ~is_seen)
            for i, row, token_id in zip(places.tolist(), rows[places].tolist(), ids[places].tolist(), strict=True):
                is_seen[i] = not self._text_of(row, token_id)
        quiet = ~is_seen
        new_rows, new_ids = self._record(rows[quiet], ids[quiet])
        if len(new_rows):  # one of each new step of a grammar shows the others where it leads to
            _, first = np.unique(self._states[new_rows] * len(self._ends) + new_ids, return_index=True)
            self._take_each(new_rows[first], new_ids[first])
            new_rows, new_ids = np.delete(new_rows, first), np.delete(new_ids, first)
            is_alive = self._rows.seq_ids[new_rows] >= 0
            self._take_each(*self._record(new_rows[is_alive], new_ids[is_alive]))
        self._take_each(rows[is_seen], ids[is_seen])

    def _record(self, rows: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Take tokens that end nothing, but for those that lead a grammar where none has been: these are returned."""
        masked = np.flatnonzero(self._is_masked[rows])
        new = masked[:0]
        if len(masked):
            after = self._grammar_states.after(self._states[rows[masked]], ids[masked])
            new, masked, after = masked[after < 0], masked[after >= 0], after[after >= 0]
            self._states[rows[masked]] = after
            self._untold_states[rows[masked], self._rows.num_untold(rows[masked])] = after
        new_rows, new_ids = rows[new], ids[new]
        if len(new):
            rows, ids = np.delete(rows, new), np.delete(ids, new)
        places = np.flatnonzero(self._is_streamed[rows])
        for row, token_id in zip(rows[places].tolist(), ids[places].tolist(), strict=True):
            candidate = self._candidate(row)
            delta = candidate.generation.delta_of(candidate, token_id, self._text_of(row, token_id))
            self._send(candidate.generation.owner.program.key[0], delta)
        self._rows.record(rows, ids)
        return new_rows, new_ids

    def _text_of(self, row: int, token_id: int) -> str:
        """What a token shows where nothing is held back; "" where that is no whole text."""
        candidate = self._candidate(row)
        texts = self._texts[candidate.generation.op.params.skip_special_tokens]
        text = texts.get(token_id)
        if text is None:
            text = texts[token_id] = candidate.detokenizer.text_of(token_id)
        return text

    def _take_each(self, rows: np.ndarray, ids: np.ndarray) -> None:
        seq_ids = self._rows.seq_ids[rows].tolist()
        for row, seq_id, token_id in zip(rows.tolist(), seq_ids, ids.tolist(), strict=True):
            if seq_id >= 0 and self._rows.seq_ids.item(row) == seq_id:  # else a sibling's grammar has failed just now
                self._take_one(self._rows.sequence(row), token_id)

    def _take_one(self, seq: Sequence, token_id: int) -> None:
        rows, candidate = self._rows, seq.tag
        assert isinstance(candidate, Candidate)
        rows.tell(seq)
        known = len(seq.tokens)
        if not self._accept(candidate, SampledToken(token_id, 0.0)):
            return
        self._observe(candidate, seq.tokens.ids[known:])
        if candidate.finish_reason:
            rows.leave(seq)
            if self._speculation is not None and candidate.is_drafted:
                self._speculation.rest(seq.seq_id)
            self._finish(candidate)
        elif len(seq.tokens) == known + 1:
            rows.resume(seq)
            self._is_mid_text[seq.row_id] = candidate.is_mid_text
            if candidate.matcher is not None:
                after = self._number(candidate)
                self._grammar_states.learn(self._states.item(seq.row_id), token_id, after)
                self._states[seq.row_id] = after
        else:  # the grammar has forced more
            rows.leave(seq)

    def _alive(self, steady: SteadyDraws) -> tuple[np.ndarray, np.ndarray]:
        """Rows and draws of the sequences that are still steady."""
        alive = self._rows.seq_ids[steady.row_ids] == steady.seq_ids
        if alive.all():
            return steady.row_ids, steady.ats
        return steady.row_ids[alive], steady.ats[alive]

    def _number(self, candidate: Candidate) -> int:
        """The number of its grammar's state; may take all others away."""
        if self._grammar_states.is_full:
            self.tell_all()
            self._grammar_states.forget()
            self._states[:] = -1
        return self._grammar_states.number_of(candidate.matcher)

    def _candidate(self, row: int) -> Candidate:
        candidate = self._rows.sequence(row).tag
        assert isinstance(candidate, Candidate)
        return candidate

    def _masks_of(self, rows: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
        """Which mask each of ``rows`` has, and the masks, each state's once."""
        if not len(rows):
            return rows, []
        numbers, mask_ids = np.unique(self._states[rows], return_inverse=True)
        masks = [self._grammar_states.masks[number] for number in numbers.tolist() if number >= 0]
        if len(masks) < len(numbers):  # those without a number, which come first, have one each
            mask_ids = mask_ids - 1
            for i in np.flatnonzero(mask_ids < 0).tolist():
                matcher = self._candidate(rows.item(i)).matcher
                assert matcher is not None
                mask_ids[i] = len(masks)
                masks.append(matcher.mask())
        return mask_ids, masks


def _draw_of(seq: Sequence, at: int) -> Draw:
    """The draw of a sequence that was steady when it was drawn."""
    candidate, lease = seq.tag, seq.lease
    assert isinstance(candidate, Candidate) and lease is not None
    end = seq.num_computed
    row = PlanRow(seq.seq_id, seq.row_id, end - 1, seq.tokens.span(end - 1, end), lease.slot_ids[:end], end - 1, 1)
    return Draw(candidate, row, None, at, lease)
