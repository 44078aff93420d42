"""Vectorised decoding: sequences that take one token a step are kept as numpy arrays by row, not one by one.

A step over hundreds of sequences then costs the host a few numpy calls. The `Sequence`, its text, counters and grammar
matcher are synchronised every ``MAX_UNSYNCED`` tokens, when somebody looks, and when the sequence is removed.

    tokens of a row:  [0, num_synced) in ``Sequence.tokens`` as well   [num_synced, num_tokens) here only
    next token:       at position ``num_computed``, once it is drawn or its draw is known

A token is accepted one by one, as without arrays, only where it may end the text, cuts a character that is to be
streamed, or takes a grammar from a state by a token that was not seen there before.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..executor import DrawArrays, SampledToken
from ..scheduler import DecodePart, PlanRow, Sequence
from .flight import Draw, StepInFlight, VectorDraws
from .generation import Candidate
from .grammar_states import GrammarStates, StepAtOnce

if TYPE_CHECKING:
    from ...protocol.messages import RuntimeMessage
    from ..scheduler import Scheduler
    from ..speculative import Speculation
    from ..tokenizer import Tokenizer
    from .program import Program

MIN_ROWS = 9  # with fewer rows, arrays cost more than they save
MAX_UNSYNCED = 64  # tokens of a row that its sequence does not have yet
SLOT_WINDOW = 64  # slots copied from a lease at once, at most


@dataclass(frozen=True, slots=True)
class _Drawn:
    """What is drawn for rows of which none came or went since. The masks and lengths of ``arrays`` are old."""

    part_rows: np.ndarray
    draws: VectorDraws
    arrays: DrawArrays


class VectorisedDecode:
    """Owns every vectorised sequence; ``plan`` gives the scheduler their part of a step.

    ``accept(candidate, token)`` takes one token as a step without arrays would, and returns whether the candidate's op
    goes on or ends well. ``finish`` is called for a candidate that has its finish reason. ``prepare`` returns what each
    candidate's grammar has to be awaited for before it takes tokens; ``defer(draw, token, future)`` accepts the draw
    after that.
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
        prepare: Callable[[list[tuple[Candidate, list[int]]]], list[Future[None] | None]],
        step_at_once: StepAtOnce,
        jump_forward: bool,
        defer: Callable[[Draw, SampledToken, Future[None]], None],
    ) -> None:
        scheduler.vectorised = self
        self._scheduler = scheduler
        self._slot_chunk = scheduler.config.slot_chunk
        self._context_len = context_len
        self._speculation = speculation
        # Without overlap the next token of a sequence is known when it is planned, so it can get a draft instead.
        self._can_be_drafted = overlaps
        self._send, self._accept, self._finish = send, accept, finish
        self._prepare, self._defer = prepare, defer
        self._step_at_once, self._jump_forward = step_at_once, jump_forward
        max_rows = scheduler.config.max_running
        self._sequences: dict[int, Sequence] = {}  # by row
        self._drawn: _Drawn | None = None  # of the last step; None since a row came or went
        self._seq_ids = np.full(max_rows, -1, np.int64)  # -1: no vectorised sequence has this row
        # Tokens and slots.
        self._num_tokens = np.zeros(max_rows, np.int64)  # whose value is known
        self._num_synced = np.zeros(max_rows, np.int64)
        self._num_computed = np.zeros(max_rows, np.int64)
        self._unsynced_ids = np.zeros((max_rows, MAX_UNSYNCED), np.int32)
        self._next_ids = np.zeros(max_rows, np.int32)  # below 0: -1 - draw, as in ``PlanRow``
        self._has_next = np.zeros(max_rows, np.bool_)
        self._slots = np.zeros((max_rows, max(SLOT_WINDOW, self._slot_chunk)), np.int32)
        self._slots_start = np.zeros(max_rows, np.int64)
        self._slots_end = np.zeros(max_rows, np.int64)
        # What the scheduler asks about.
        self._prompt_lens = np.zeros(max_rows, np.int64)
        self._max_new = np.zeros(max_rows, np.int64)
        self._tenant_ids = np.zeros(max_rows, np.int64)
        self._tenants: dict[str, int] = {}
        # Where a candidate ends, and what it shows.
        self._is_eos = np.zeros(vocab_size, np.bool_)
        self._is_eos[[i for i in tokenizer.eos_ids if i < vocab_size]] = True
        self._max_lens = np.zeros(max_rows, np.int64)  # tokens at which the candidate ends
        self._stops_at_eos = np.zeros(max_rows, np.bool_)
        self._free_until = np.zeros(max_rows, np.int64)  # see ``_free_tokens``
        self._is_streamed = np.zeros(max_rows, np.bool_)
        self._is_mid_text = np.zeros(max_rows, np.bool_)  # of a streamed row: its detokenizer holds text back
        self._texts: dict[bool, dict[int, str]] = {True: {}, False: {}}  # by skip_special_tokens, then token
        # How it is drawn.
        self._is_masked = np.zeros(max_rows, np.bool_)
        self._grammar_states = GrammarStates(vocab_size)
        self._states = np.full(max_rows, -1, np.int64)  # of masked rows, by number
        self._unsynced_states = np.zeros((max_rows, MAX_UNSYNCED), np.int64)
        self._temperature = np.zeros(max_rows, np.float32)
        self._top_k = np.zeros(max_rows, np.int32)
        self._top_p = np.zeros(max_rows, np.float32)
        self._min_p = np.zeros(max_rows, np.float32)
        self._seeds = np.zeros(max_rows, np.int64)
        # Whose it is.
        self._program_ids = np.zeros(max_rows, np.int64)
        self._programs: dict[Program, list[int]] = {}  # (its number here, its rows)
        self._free_program_ids = list(range(max_rows))
        self._forwards = np.zeros(max_rows, np.int64)  # by program number, not yet in the program's counters
        self._is_counted = np.zeros(max_rows, np.bool_)

    def __len__(self) -> int:
        return len(self._sequences)

    # -- in and out ---------------------------------------------------------------------------------------------------

    def add_from(self, flight: StepInFlight) -> None:
        """Vectorise candidates of ``flight``: their draws become arrays. Nothing may be planned on these draws yet."""
        found = [draw for draw in flight.draws if draw.draft is None and self._can_vectorise(draw.candidate)]
        if not found or len(found) + len(self) < MIN_ROWS or not self._scheduler.can_vectorise:
            return
        for draw in found:
            self._add(draw.candidate)
        taken = set(map(id, found))
        flight.draws = [draw for draw in flight.draws if id(draw) not in taken]
        seqs = [draw.candidate.seq for draw in found]
        rows = np.array([seq.row_id for seq in seqs], np.int64)
        seq_ids = np.array([seq.seq_id for seq in seqs], np.int64)
        ats = np.array([draw.at for draw in found], np.int64)
        flight.vectorised = flight.vectorised.joined(VectorDraws(rows, seq_ids, ats))

    def check_room(self, flight: StepInFlight | None) -> None:
        """Remove all sequences when slots become short or few rows are left. ``flight`` is the step being drawn."""
        if not len(self) or (len(self) >= MIN_ROWS and self._scheduler.can_vectorise):
            return
        drawn: dict[int, int] = {}
        if flight is not None:
            drawn = dict(zip(flight.vectorised.seq_ids.tolist(), flight.vectorised.ats.tolist(), strict=True))
            flight.vectorised = VectorDraws()
        for seq in list(self._sequences.values()):
            self.remove(seq)
            if flight is not None and seq.seq_id in drawn:
                flight.draws.append(_draw_of(seq, drawn[seq.seq_id]))

    def remove(self, seq: Sequence) -> None:
        """Synchronise ``seq`` and remove it."""
        self.synchronise(seq)
        row = seq.row_id
        del self._sequences[row]
        self._seq_ids[row] = -1
        self._has_next[row] = False
        seq.is_vectorised = False
        self._drawn = None
        seq.logits_from = len(seq.tokens) - 1
        program = _candidate_of(seq).generation.owner.program
        entry = self._programs[program]
        entry[1] -= 1
        if not entry[1]:
            del self._programs[program]
            self._free_program_ids.append(entry[0])
        if not self._sequences:
            self._tenants.clear()

    def synchronise(self, seq: Sequence) -> None:
        """Bring ``seq``, its lease, candidate and program up to date."""
        lease, row, candidate = seq.lease, seq.row_id, _candidate_of(seq)
        assert lease is not None and seq.is_vectorised
        computed, num_synced, num_tokens = (
            self._num_computed.item(row),
            self._num_synced.item(row),
            self._num_tokens.item(row),
        )
        seq.num_run += computed - seq.num_computed
        seq.num_computed = seq.table_len = computed
        lease.mark_fresh()
        program_id = self._program_ids.item(row)
        candidate.generation.owner.program.stats.forwards += self._forwards.item(program_id)
        self._forwards[program_id] = 0
        if num_synced < num_tokens:
            ids = self._unsynced_ids[row, : num_tokens - num_synced]
            seq.tokens.extend(ids)
            self._num_synced[row] = num_tokens
            candidate.take_seen(ids.tolist())
            self._observe(candidate, ids)
            if candidate.matcher is not None:
                self._grammar_states.follow(candidate.matcher, self._unsynced_states[row, : len(ids)])

    def synchronise_all(self) -> None:
        for seq in self._sequences.values():
            self.synchronise(seq)

    def _can_vectorise(self, candidate: Candidate) -> bool:
        seq, params = candidate.seq, candidate.generation.op.params
        if (
            candidate.finish_reason
            or candidate.is_awaited
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
            or (candidate.is_drafted and not self._can_be_drafted)
        ):
            return False
        lease = seq.lease
        if seq.state != "running" or seq.next_draw or lease is None or not 0 <= seq.num_pending <= 1:
            return False
        return min(seq.table_len, lease.stale_from) >= seq.num_computed  # else the executor lacks some of its slots

    def _add(self, candidate: Candidate) -> None:
        seq, generation = candidate.seq, candidate.generation
        params, row, length = generation.op.params, seq.row_id, len(seq.tokens)
        seq.is_vectorised = True
        self._sequences[row] = seq
        self._seq_ids[row] = seq.seq_id
        self._num_tokens[row] = self._num_synced[row] = length
        self._num_computed[row] = self._slots_start[row] = self._slots_end[row] = seq.num_computed
        self._has_next[row] = seq.num_computed < length
        self._next_ids[row] = seq.tokens.ids[-1]
        self._prompt_lens[row] = seq.prompt_len
        self._max_new[row] = seq.max_new
        self._tenant_ids[row] = self._tenants.setdefault(seq.tenant, len(self._tenants))
        self._max_lens[row] = min(length + params.max_tokens - candidate.num_generated, self._context_len)
        self._stops_at_eos[row] = not params.ignore_eos
        self._is_masked[row] = candidate.matcher is not None
        self._is_streamed[row] = generation.op.stream
        self._is_mid_text[row] = candidate.is_mid_text
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
        self._states[row] = self._number(candidate)
        self._free_until[row] = self._free_tokens(candidate)
        self._drawn = None

    def _observe(self, candidate: Candidate, ids: np.ndarray) -> None:
        """Tell the drafters of tokens for which no draft was run."""
        for _ in range(len(ids) if candidate.is_drafted else 0):
            candidate.note_draft(0)
        if self._speculation is not None and candidate.is_drafted:
            self._speculation.observe(candidate.seq.seq_id, ids, None, 0)

    # -- what the scheduler asks --------------------------------------------------------------------------------------

    def plan(self) -> DecodePart | None:
        """All rows whose next token is known; takes the slots that they need, for which there has to be room."""
        rows = np.flatnonzero(self._has_next)
        if not len(rows):
            return None
        starts = self._num_computed[rows]
        short = starts >= self._slots_end[rows]
        if short.any():
            self._fetch_slots(rows[short])
        slots = self._slots[rows, starts - self._slots_start[rows]]
        return DecodePart(self._seq_ids[rows], rows, starts, self._next_ids[rows], slots)

    def complete(self, part: DecodePart) -> dict[str, int]:
        """The KV of ``part`` is in its slots; returns how many tokens each tenant has run."""
        rows = part.row_ids
        self._num_computed[rows] = part.starts + 1
        self._has_next[rows] = False
        if len(self._tenants) == 1:
            return dict.fromkeys(self._tenants, len(rows))
        counts = np.bincount(self._tenant_ids[rows], minlength=len(self._tenants)).tolist()
        return {tenant: n for tenant, n in zip(self._tenants, counts, strict=True) if n}

    def slots_to_come(self, *, usual: int, least: int) -> int:
        """As ``scheduler.sequence.slots_to_come`` for all vectorised sequences."""
        rows = np.fromiter(self._sequences, np.int64, len(self._sequences))
        made, most = self._num_tokens[rows] - self._prompt_lens[rows], self._max_new[rows]
        expected = np.maximum(usual - made, least)
        bounded = (most >= 0) & (most < made + expected)
        return int(np.where(bounded, np.maximum(most - made, 0), expected).sum())

    def _fetch_slots(self, rows: np.ndarray) -> None:
        """Copy the slots that the leases of ``rows`` already hold; a lease without slots left takes a chunk."""
        leases, places = [], []
        for row in rows.tolist():
            lease = self._sequences[row].lease
            assert lease is not None
            start = self._num_computed.item(row)
            held = lease.slot_ids[start : start + self._slots.shape[1]]
            if len(held):
                self._slots[row, : len(held)] = held
                self._slots_start[row], self._slots_end[row] = start, start + len(held)
            else:
                leases.append(lease)
                places.append(row)
        if leases:
            n = self._slot_chunk
            self._slots[places, :n] = self._scheduler.cache.extend_all(leases, n)
            self._slots_start[places] = self._num_computed[places]
            self._slots_end[places] = self._num_computed[places] + n

    # -- a step -------------------------------------------------------------------------------------------------------

    def expect(self, flight: StepInFlight) -> None:
        """The next plan may use the tokens that ``flight`` is drawing, except each candidate's last one."""
        rows, ats = self._alive(flight.vectorised)
        if len(rows):
            goes_on = self._num_tokens[rows] + 1 < self._max_lens[rows]
            rows = rows[goes_on]
            self._next_ids[rows] = -1 - ats[goes_on]
            self._has_next[rows] = True

    def count_forwards(self, part: DecodePart) -> None:
        """Count one more forward for each program with a row in ``part``."""
        self._is_counted[:] = False
        self._is_counted[self._program_ids[part.row_ids]] = True
        self._forwards += self._is_counted

    def is_counted(self, program: Program) -> bool:
        """Whether the last ``count_forwards`` counted ``program``."""
        entry = self._programs.get(program)
        return entry is not None and self._is_counted.item(entry[0])

    def draws(self, part: DecodePart) -> tuple[VectorDraws, DrawArrays]:
        """What is to be drawn from a step whose first rows were ``part``; sequences that have ended are left out."""
        drawn = self._drawn
        if drawn is None or not np.array_equal(drawn.part_rows, part.row_ids):
            drawn = self._drawn = self._drawn_of(part)
        rows = drawn.draws.row_ids
        mask_ids, masks = self._masks_of(rows[drawn.arrays.masked])
        return drawn.draws, drawn.arrays.at(self._num_tokens[rows], mask_ids, masks)

    def _drawn_of(self, part: DecodePart) -> _Drawn:
        logits_rows = np.flatnonzero(self._seq_ids[part.row_ids] == part.seq_ids)
        rows = part.row_ids[logits_rows]
        arrays = DrawArrays(
            logits_rows=logits_rows,
            seeds=self._seeds[rows],
            num_tokens=self._num_tokens[rows],
            temperature=self._temperature[rows],
            top_k=self._top_k[rows],
            top_p=self._top_p[rows],
            min_p=self._min_p[rows],
            wants_logprob=np.zeros(len(rows), np.bool_),
            masked=np.flatnonzero(self._is_masked[rows]),
            takes_highest=len(rows) == len(part) and not self._temperature[rows].any(),
        )
        return _Drawn(part.row_ids, VectorDraws(rows, part.seq_ids[logits_rows], np.arange(len(rows))), arrays)

    def accept(self, drawn: VectorDraws, token_ids: np.ndarray) -> None:
        """Accept the drawn tokens of a step, int64 [draws]."""
        rows, ats = self._alive(drawn)
        if not len(rows):
            return
        ids = token_ids[ats]
        is_checked = (self._num_tokens[rows] + 1 >= self._free_until[rows]) | (ids < 0)
        is_end = self._is_eos[ids]
        if is_end.any():
            is_checked |= is_end & self._stops_at_eos[rows]
        is_streamed = self._is_streamed[rows]
        if is_streamed.any():
            is_checked |= is_streamed & self._is_mid_text[rows]
            places = np.flatnonzero(is_streamed & ~is_checked)
            for i, row, token_id in zip(places.tolist(), rows[places].tolist(), ids[places].tolist(), strict=True):
                is_checked[i] = not self._text_of(row, token_id)
        if is_checked.any():
            unchecked = ~is_checked
            new_rows, new_ids = self._accept_arrays(rows[unchecked], ids[unchecked])
        else:
            new_rows, new_ids = self._accept_arrays(rows, ids)
        if len(new_rows):  # of equal grammar steps one is accepted alone; the others then know the state after it
            _, first = np.unique(self._states[new_rows] * len(self._is_eos) + new_ids, return_index=True)
            self._accept_each(new_rows[first], new_ids[first])
            new_rows, new_ids = np.delete(new_rows, first), np.delete(new_ids, first)
            is_alive = self._seq_ids[new_rows] >= 0
            self._accept_each(*self._accept_arrays(new_rows[is_alive], new_ids[is_alive]))
        self._accept_each(rows[is_checked], ids[is_checked])

    def _accept_arrays(self, rows: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Accept tokens that end nothing; returns those whose grammar state after the token is not known yet."""
        new_rows, new_ids = rows[:0], ids[:0]
        is_masked = self._is_masked[rows]
        if is_masked.any():
            are_all = bool(is_masked.all())
            masked_rows, masked_ids = (rows, ids) if are_all else (rows[is_masked], ids[is_masked])
            after = self._grammar_states.after(
                self._states[masked_rows], masked_ids, self._step_at_once, jumps=self._jump_forward
            )
            if -1 in after:
                is_new = np.zeros(len(rows), np.bool_)
                is_new[is_masked] = after < 0
                new_rows, new_ids = rows[is_new], ids[is_new]
                rows, ids = rows[~is_new], ids[~is_new]
                masked_rows, after = masked_rows[after >= 0], after[after >= 0]
            self._states[masked_rows] = after
            self._unsynced_states[masked_rows, self._num_tokens[masked_rows] - self._num_synced[masked_rows]] = after
        places = np.flatnonzero(self._is_streamed[rows])
        for row, token_id in zip(rows[places].tolist(), ids[places].tolist(), strict=True):
            candidate = _candidate_of(self._sequences[row])
            delta = candidate.generation.delta_of(candidate, token_id, self._text_of(row, token_id))
            self._send(candidate.generation.owner.program.key[0], delta)
        self._append(rows, ids)
        return new_rows, new_ids

    def _append(self, rows: np.ndarray, ids: np.ndarray) -> None:
        """Append one token to each of ``rows``."""
        num_tokens = self._num_tokens[rows]
        num_unsynced = num_tokens - self._num_synced[rows]
        self._unsynced_ids[rows, num_unsynced] = ids
        num_tokens += 1
        self._num_tokens[rows] = num_tokens
        has_next = self._num_computed[rows] < num_tokens
        if has_next.any():
            self._next_ids[rows] = ids
            self._has_next[rows] = has_next
        if len(rows) and num_unsynced.max() + 1 >= MAX_UNSYNCED:
            for row in rows[num_unsynced + 1 >= MAX_UNSYNCED].tolist():
                self.synchronise(self._sequences[row])

    def _accept_each(self, rows: np.ndarray, ids: np.ndarray) -> None:
        seq_ids = self._seq_ids[rows].tolist()
        each = zip(rows.tolist(), seq_ids, ids.tolist(), strict=True)
        asked = [(row, seq_id, token_id) for row, seq_id, token_id in each if seq_id >= 0]
        sequences = [self._sequences[row] for row, _, _ in asked]
        for seq in sequences:
            self.synchronise(seq)
        tokens = [[token_id] for _, _, token_id in asked]
        futures = self._prepare(list(zip(map(_candidate_of, sequences), tokens, strict=True)))
        for (row, seq_id, token_id), seq, future in zip(asked, sequences, futures, strict=True):
            if self._seq_ids.item(row) == seq_id:  # else a sibling's grammar has failed just now
                self._accept_one(seq, token_id, future)

    def _accept_one(self, seq: Sequence, token_id: int, future: Future[None] | None) -> None:
        """Accept the token of a sequence that is up to date, or have it accepted once the future is done."""
        candidate, row = _candidate_of(seq), seq.row_id
        before = len(seq.tokens)
        token = SampledToken(token_id, 0.0)
        if future is not None:
            self.remove(seq)
            self._scheduler.postpone(seq)
            self._defer(_draw_of(seq, 0), token, future)
            return
        if not self._accept(candidate, token):
            return
        self._observe(candidate, seq.tokens.ids[before:])
        if candidate.finish_reason:
            self.remove(seq)
            if self._speculation is not None and candidate.is_drafted:
                self._speculation.rest(seq.seq_id)
            self._finish(candidate)
        elif len(seq.tokens) == before + 1:
            self._num_tokens[row] = self._num_synced[row] = before + 1
            self._next_ids[row] = seq.tokens.ids[-1]
            self._has_next[row] = self._num_computed[row] <= before
            self._is_mid_text[row] = candidate.is_mid_text
            if candidate.matcher is not None:
                after = self._number(candidate)
                self._grammar_states.learn(self._states.item(row), token_id, after)
                self._states[row] = after
                self._free_until[row] = self._free_tokens(candidate)
        else:  # the grammar has forced more tokens
            self.remove(seq)

    def _alive(self, drawn: VectorDraws) -> tuple[np.ndarray, np.ndarray]:
        """Rows and draws of the sequences that are still vectorised."""
        alive = self._seq_ids[drawn.row_ids] == drawn.seq_ids
        if alive.all():
            return drawn.row_ids, drawn.ats
        return drawn.row_ids[alive], drawn.ats[alive]

    # -- text and grammar ---------------------------------------------------------------------------------------------

    def _text_of(self, row: int, token_id: int) -> str:
        """The token's text when the detokenizer holds nothing back; "" where its bytes end inside a character."""
        candidate = _candidate_of(self._sequences[row])
        texts = self._texts[candidate.generation.op.params.skip_special_tokens]
        text = texts.get(token_id)
        if text is None:
            text = texts[token_id] = candidate.detokenizer.text_of(token_id)
        return text

    def _free_tokens(self, candidate: Candidate) -> int:
        """The number of the sequence's tokens before which a token neither ends the candidate, unless it is an end
        token, nor comes so near a limit of tokens that it changes a mask; 0 if each has to be looked at for itself."""
        params, matcher, most = candidate.generation.op.params, candidate.matcher, 1 << 60
        if params.stop or params.stop_regex or params.stop_token_ids:
            return 0
        if matcher is not None and matcher.has_limit:
            most = len(candidate.seq.tokens) - matcher.num_tokens + matcher.free_until
        return min(most, self._max_lens.item(candidate.seq.row_id))

    def _number(self, candidate: Candidate) -> int:
        """The number of its grammar's state. Where numbers have run out, all rows lose theirs first."""
        if self._grammar_states.is_full:
            self.synchronise_all()
            self._grammar_states.forget()
            self._states[:] = -1
        return self._grammar_states.number_of(candidate.matcher)

    def _masks_of(self, rows: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
        """Which mask each of ``rows`` has, and the masks; rows in equal states share one."""
        if not len(rows):
            return rows, []
        masks: list[np.ndarray] = []
        places: dict[int, int] = {}  # in ``masks``, by state
        mask_ids: list[int] = []
        for i, state in enumerate(self._states[rows].tolist()):
            place = places.get(state)
            if place is None:
                place = len(masks)
                if state >= 0:
                    places[state] = place
                    masks.append(self._grammar_states.masks[state])
                else:  # a state without a number has a mask of its own
                    matcher = _candidate_of(self._sequences[rows.item(i)]).matcher
                    assert matcher is not None
                    masks.append(matcher.mask())
            mask_ids.append(place)
        return np.array(mask_ids, np.int64), masks


def _candidate_of(seq: Sequence) -> Candidate:
    candidate = seq.tag
    assert isinstance(candidate, Candidate)
    return candidate


def _draw_of(seq: Sequence, at: int) -> Draw:
    """The draw of a sequence that was vectorised when it was drawn."""
    lease, end = seq.lease, seq.num_computed
    assert lease is not None
    row = PlanRow(seq.seq_id, seq.row_id, end - 1, seq.tokens.span(end - 1, end), lease.slot_ids[:end], end - 1, 1)
    return Draw(_candidate_of(seq), row, None, at, lease)
