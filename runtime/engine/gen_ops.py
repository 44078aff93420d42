"""The op ``Gen``: starts once its grammar is compiled, ends when its last candidate has a finish reason."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from ...constrained.spec import GrammarError, GrammarSpec
from ...protocol.errors import InternalError, InvalidGrammar, InvalidParams, InvalidRequest, PhloemError
from ...protocol.messages import CandidateMeta, GenMeta
from ...protocol.ops import Gen
from ...protocol.sampling import SamplingParams
from . import grammar_states
from .generation import Candidate, Generation, TokenRecord
from .healing import Healer, HealMatcher
from .logprobs import token_logprob
from .program import OpState, Program, Segment, SequenceState
from .tracing import trace_generation

if TYPE_CHECKING:
    from ...constrained import CompiledGrammar, Matcher
    from ..executor import SampledToken
    from .mask_thread import MaskThread
    from .programs import Programs

log = logging.getLogger(__name__)

T = TypeVar("T")

_GOLDEN = 0x9E3779B97F4A7C15


class GenOps:
    """Begins and ends the generations of ``programs``. ``compile_grammar`` starts a compilation, or finds one.

    ``masks`` makes their first masks.
    """

    def __init__(
        self,
        programs: Programs,
        *,
        compile_grammar: Callable[[GrammarSpec], Future[CompiledGrammar]],
        masks: MaskThread,
        seed: int,
        may_draft: bool,
        jump_forward: bool,
    ) -> None:
        """``may_draft``: whether tokens may be drafted; a program or a generation may still refuse drafts.

        ``jump_forward``: whether tokens that a grammar forces are appended at once.
        """
        self.compile_grammar = compile_grammar
        self.may_draft = may_draft
        self.jump_forward = jump_forward
        self.compiling: dict[SequenceState, Future[Any]] = {}  # sequences that wait for their grammar
        self._masks = masks
        self._begun: dict[SequenceState, Future[Matcher]] = {}  # those whose first mask is being made
        self._healer = Healer(programs.tokenizer)
        self._programs = programs
        self._seed = seed
        self._num_unseeded = 0

    def start(self, owner: SequenceState, op_state: OpState) -> None:
        """Start the op, or wait for its grammar. The op fails if the grammar is invalid or the context too short."""
        op = op_state.op
        assert isinstance(op, Gen)
        if op.drawn and op.drawn[0].text is not None:
            self._finish_drawn(owner, op_state, op)
            return
        grammar = None
        if op.grammar is not None:
            grammar = self._taken(owner, op_state, self.compile_grammar(op.grammar))
            if grammar is None:
                return
        if not self._has_room(owner, op_state, grammar):
            return
        count, given_back = self._to_give_back(owner, op.params)
        first = None
        if grammar is not None:
            begun = self._begun.pop(owner, None) or self._begin(owner, op, grammar, count, given_back)
            first = self._taken(owner, op_state, begun)
            if first is None:
                if owner in self.compiling:
                    self._begun[owner] = begun
                return
        generation = Generation(op_state, owner, now_s=self._programs.clock())
        self._give_back(owner, count, given_back)
        generation.healed = given_back.decode()
        seed = op.params.seed
        if seed is None:
            self._num_unseeded += 1
            seed = _mixed(self._seed, self._num_unseeded)
        for index in range(op.n):
            candidate_seed = seed if index == 0 else _mixed(seed, index)
            generation.candidates.append(self._candidate(generation, index, candidate_seed, first, given_back))
        owner.stop_op = partial(self._stop, generation)
        least = _least_new(op.params, has_grammar=grammar is not None)
        for candidate in generation.candidates:
            if op.drawn and not self._repeat(candidate, op.drawn[candidate.index].token_ids):
                return
            if candidate.finish_reason:
                self.finish_candidate(candidate)
            else:
                made = candidate.num_generated
                self._programs.scheduler.submit(
                    candidate.seq, max_new=op.params.max_tokens - made, min_new=max(least - made, 0)
                )

    def _taken(self, owner: SequenceState, op_state: OpState, future: Future[T]) -> T | None:
        """What the grammar's threads have made; None if the op is started again once it is, or has failed with it."""
        if not future.done():
            self.compiling[owner] = future
            owner.stop_op = partial(self._stop_waiting, owner)
            return None
        error = future.exception()
        if error is not None:
            self._programs.fail_op(owner, op_state, _grammar_error(error))
            return None
        return future.result()

    def _begin(
        self, owner: SequenceState, op: Gen, grammar: CompiledGrammar, num_given_back: int, given_back: bytes
    ) -> Future[Matcher]:
        """The matcher that the candidates have copies of."""
        most = None
        if op.params.max_tokens and op.params.finish == "closed":
            most = min(op.params.max_tokens, self._programs.context_len - len(owner.seq.tokens) + num_given_back)
        drawn = [candidate.token_ids for candidate in op.drawn]
        return self._masks.begin(grammar, text=given_back, max_tokens=most, drawn=drawn)

    def _has_room(self, owner: SequenceState, op_state: OpState, grammar: CompiledGrammar | None) -> bool:
        """Whether ``max_tokens`` and the context have room for a text of the grammar; the op fails if not."""
        op = op_state.op
        assert isinstance(op, Gen)
        most, least = op.params.max_tokens, None
        if grammar is not None and most and op.params.finish == "closed":
            least = grammar.least_tokens
        if least is not None and most < least:
            message = (
                f"max_tokens={most}: the shortest text of the grammar has {least} tokens; give at least so many, or "
                'finish="cut"'
            )
            self._programs.fail_op(owner, op_state, InvalidParams(message, where="max_tokens"))
            return False
        return self._programs.has_room(owner, op_state, extra=max(1, least or 0) if most else 0)

    def _finish_drawn(self, owner: SequenceState, op_state: OpState, op: Gen) -> None:
        """End the op with the candidates that it brings: nothing is computed."""
        programs, first = self._programs, op.drawn[0]
        if not programs.has_room(owner, op_state, extra=len(first.token_ids)):
            return
        count, given_back = self._to_give_back(owner, op.params)
        self._give_back(owner, count, given_back)
        healed = given_back.decode()
        prompt_len = len(owner.seq.tokens)
        owner.seq.tokens.extend(first.token_ids)
        texts = tuple([drawn.text or "" for drawn in op.drawn])
        owner.note_generated(prompt_len, healed + texts[0])
        owner.num_traced = len(owner.seq.tokens)
        candidates = tuple([CandidateMeta("stop", len(d.token_ids), d.token_ids) for d in op.drawn])
        meta = GenMeta(prompt_tokens=prompt_len, cached_tokens=0, candidates=candidates, healed=healed)
        programs.finish_op(owner, op_state, list(texts), meta=meta, texts=texts)

    def _repeat(self, candidate: Candidate, token_ids: tuple[int, ...]) -> bool:
        """Accept ``token_ids`` as if they had just been drawn; False if the op failed, because they cannot have been.

        Where they stop within a run of tokens that the grammar forces, the whole run is appended, as before.
        """
        tokenizer, context_len = self._programs.tokenizer, self._programs.context_len
        text, num_used = "", 0
        try:
            while num_used < len(token_ids) and not candidate.finish_reason:
                text += candidate.accept(token_ids[num_used], None, tokenizer, context_len)
                num_used += 1
                forced = self._forced(candidate)
                given = token_ids[num_used : num_used + len(forced)]
                if forced[: len(given)] == list(given):
                    text += candidate.accept_forced(forced, context_len)
                    num_used += len(given)
            reason = f"it ends after {num_used} of its {len(token_ids)} tokens" if num_used < len(token_ids) else ""
        except GrammarError as error:
            reason = str(error)
        if reason:
            where = f"drawn, candidate {candidate.index}"
            self._programs.fail_first(candidate.owner, InvalidRequest(f"{where}: {reason}", where="drawn"))
            return False
        candidate.num_repeated = len(candidate.seq.tokens) - candidate.prompt_len
        candidate.seq.logits_from = len(candidate.seq.tokens) - 1
        self._stream(candidate, text, "generated")
        return True

    def _forced(self, candidate: Candidate) -> list[int]:
        """The tokens that the grammar now forces, to be appended at once; none where it takes less to draw them."""
        if candidate.finish_reason or candidate.matcher is None or not self.jump_forward:
            return []
        forced = candidate.matcher.forced_tokens()
        return [] if candidate.seq.is_vectorised and len(forced) < grammar_states.MIN_JUMP else forced

    def accept_token(self, candidate: Candidate, token: SampledToken) -> bool:
        """Accept one drawn token and the tokens that the grammar then forces. False if the op failed by its grammar."""
        programs, matcher = self._programs, candidate.matcher
        if matcher is not None and (matcher.error is not None or token.token_id < 0):
            self._fail_grammar(candidate, matcher.error or "no token may follow")
            return False
        is_wanted = candidate.generation.op.params.return_logprob
        logprob = token_logprob(token, programs.tokenizer) if is_wanted else None
        try:
            length = len(candidate.seq.tokens)
            text = candidate.accept(token.token_id, logprob, programs.tokenizer, programs.context_len)
            record = candidate.record
            if record is not None:
                record.note("generated", len(candidate.seq.tokens) - length, token)
            self._stream(candidate, text, "generated")
            if forced := self._forced(candidate):
                length = len(candidate.seq.tokens)
                self._stream(candidate, candidate.accept_forced(forced, programs.context_len), "forced")
                if record is not None:
                    record.note("forced", len(candidate.seq.tokens) - length)
        except GrammarError as error:  # the grammar or a stop pattern ran into a limit
            self._fail_grammar(candidate, str(error))
            return False
        return True

    def _stream(self, candidate: Candidate, text: str, origin: str) -> None:
        delta = candidate.generation.delta(candidate, text, origin=origin)
        if delta is not None:
            self._programs.send(candidate.owner.program.key[0], delta)

    def _candidate(
        self, generation: Generation, index: int, seed: int, first: Matcher | None, given_back: bytes
    ) -> Candidate:
        """The first candidate continues the op's own sequence, the others continue copies."""
        programs, owner, params = self._programs, generation.owner, generation.op.params
        seq = owner.seq if index == 0 else programs.new_sequence(owner.program, owner.seq.tokens.copy())
        detokenizer = programs.tokenizer.detokenizer(
            params.stop,
            stop_regex=params.stop_regex,
            skip_special=params.skip_special_tokens,
            num_hidden=len(given_back),
        )
        matcher = None if first is None else first.clone()
        candidate = Candidate(generation, index, seq, detokenizer=detokenizer, matcher=matcher, seed=seed)
        allowed = params.speculative
        if allowed is None:
            allowed = owner.program.settings.speculative is not False
        candidate.is_drafted = candidate.may_draft = self.may_draft and allowed
        if owner.program.settings.trace:
            candidate.record = TokenRecord()
        if given_back and matcher is None:
            candidate.healing, candidate.is_drafted = HealMatcher(self._healer, given_back), False
        seq.logits_from = len(seq.tokens) - 1
        if params.return_logprob and params.logprob_start_len >= 0 and index == 0:
            seq.logits_from = min(max(params.logprob_start_len - 1, 0), seq.logits_from)
        seq.tag = candidate
        return candidate

    def _to_give_back(self, owner: SequenceState, params: SamplingParams) -> tuple[int, bytes]:
        """How many of the last tokens of a prompt that may end inside a longer token to remove, and their bytes."""
        last = owner.segments[-1] if owner.segments else None
        if not params.heal or params.max_tokens == 0 or last is None or last.kind != "text":
            return 0, b""
        ids = owner.seq.tokens.ids[max(last.token_start, 1) :].tolist()  # one token has to stay
        count, data = self._healer.to_give_back(ids)
        return (count, data) if count and last.text.endswith(data.decode()) else (0, b"")

    def _give_back(self, owner: SequenceState, count: int, data: bytes) -> None:
        """Remove the last ``count`` tokens, whose bytes are ``data``."""
        if not count:
            return
        last, size = owner.segments[-1], len(data.decode())
        kept = last.text[: len(last.text) - size]
        owner.segments[-1:] = [Segment("text", last.token_start, last.text_start, kept)] if kept else []
        owner.text_len -= size
        self._programs.scheduler.truncate(owner.seq, len(owner.seq.tokens) - count)
        if len(owner.seq.tokens) < owner.fork_tokens:
            owner.fork_tokens = -1

    def poll_grammars(self) -> None:
        """Make the sequences ready whose grammar is compiled."""
        for owner in [owner for owner, future in self.compiling.items() if future.done()]:
            del self.compiling[owner]
            owner.stop_op = None
            self._programs.ready.append(owner)

    def finish_candidate(self, candidate: Candidate) -> None:
        """``candidate`` has a finish reason: take it off the schedule, cut its tokens to its text, maybe end the op."""
        generation, seq = candidate.generation, candidate.seq
        programs = self._programs
        if isinstance(candidate.matched_stop, str):
            kept = candidate.prompt_len + candidate.detokenizer.num_whole_tokens
            programs.scheduler.truncate(seq, kept)
            if candidate.detokenizer.remainder:
                seq.tokens.extend(programs.tokenizer.encode(candidate.detokenizer.remainder))
        if generation.healed:
            self._mend(candidate)
        _count(generation.owner.program, candidate)
        if candidate.index == 0:
            programs.scheduler.park(seq)
        else:
            programs.release(seq)
        if generation.is_finished:
            self._finish(generation)

    def _finish(self, generation: Generation) -> None:
        owner, op_state = generation.owner, generation.op_state
        programs = self._programs
        first = generation.candidates[0]
        owner.stop_op = None
        owner.seq.tag = None
        owner.note_generated(first.prompt_len, generation.healed + first.text)
        meta = generation.meta(now_s=programs.clock())
        if owner.program.settings.trace:
            meta = msgspec.structs.replace(meta, trace=trace_generation(generation, programs.tokenizer))
        stats = owner.program.stats
        stats.queue_s += meta.queue_s
        stats.prefill_s += meta.prefill_s
        stats.decode_s += meta.decode_s
        texts = generation.partial
        generation.candidates.clear()  # they refer to the generation
        programs.finish_op(owner, op_state, list(texts), meta=meta, texts=texts)
        programs.ready.append(owner)

    def _mend(self, candidate: Candidate) -> None:
        """If the output ends inside the text that was given back, restore that text as tokens."""
        generation, seq = candidate.generation, candidate.seq
        tokenizer = self._programs.tokenizer
        size = len(generation.healed.encode())
        written = 0
        for token_id in seq.tokens.ids[candidate.prompt_len :].tolist():
            written += len(tokenizer.token_bytes[token_id])
            if written >= size:
                return
        remainder = candidate.detokenizer.remainder if candidate.detokenizer.matched_stop is not None else ""
        self._programs.scheduler.truncate(seq, candidate.prompt_len)
        seq.tokens.extend(tokenizer.encode(generation.healed + remainder))

    def _fail_grammar(self, candidate: Candidate, reason: str) -> None:
        """Fail the op of ``candidate``, whose grammar ran into a limit; the error carries the text so far."""
        message = f"the grammar could not be followed: {reason}; simplify it"
        self._programs.fail_first(candidate.generation.owner, InvalidGrammar(message))

    def _stop_waiting(self, owner: SequenceState) -> tuple[str, ...]:
        del self.compiling[owner]
        self._begun.pop(owner, None)
        return ()

    def _stop(self, generation: Generation) -> tuple[str, ...]:
        """Take a generation in progress off the schedule; returns the candidates' texts so far."""
        owner = generation.owner
        for candidate in generation.candidates:
            if candidate.index == 0:
                self._programs.scheduler.park(candidate.seq)
            else:
                self._programs.release(candidate.seq)
            if not candidate.finish_reason:
                candidate.finish_reason = "abort"
                _count(owner.program, candidate)
        owner.seq.tag = None
        if generation.healed:
            owner.note_generated(generation.candidates[0].prompt_len, generation.healed)
        partial = generation.partial
        generation.candidates.clear()
        return partial


def _count(program: Program, candidate: Candidate) -> None:
    stats = program.stats
    stats.prompt_tokens += candidate.prompt_len + candidate.num_repeated
    stats.cached_tokens += candidate.cached_tokens
    stats.prefilled_tokens += max(candidate.prefilled_tokens, 0)
    stats.generated_tokens += candidate.num_generated
    stats.forced_tokens += candidate.num_forced
    stats.drafted_tokens += candidate.num_drafted
    stats.accepted_tokens += candidate.num_accepted
    stats.drawn_draft_tokens += candidate.num_drawn_drafts
    stats.preemptions += candidate.seq.num_preempted


def _mixed(seed: int, index: int) -> int:
    """A seed for candidate ``index``, derived from ``seed``, in the signed 64-bit range."""
    value = (seed * _GOLDEN + index * 0xD1B54A32D192ED03 + 0x2545F4914F6CDD1D) & 0xFFFFFFFFFFFFFFFF
    value ^= value >> 29
    return (value * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF) - 2**63


def _grammar_error(error: BaseException) -> PhloemError:
    if isinstance(error, GrammarError):
        return InvalidGrammar(str(error), where=error.where)
    log.error("grammar compilation failed", exc_info=error)
    return InternalError(f"grammar compilation failed: {type(error).__name__}: {error}")


def _least_new(params: SamplingParams, *, has_grammar: bool) -> int:
    """The fewest tokens that the generation can have: ``max_tokens`` when nothing else can end it."""
    has_end = has_grammar or not params.ignore_eos or params.stop or params.stop_token_ids or params.stop_regex
    return params.min_tokens if has_end else params.max_tokens
