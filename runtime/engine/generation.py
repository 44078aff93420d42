"""One ``Gen`` being computed: its candidates, and how an accepted token changes their text, grammar and tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...constrained.spec import GrammarError
from ...protocol.messages import CandidateMeta, Delta, GenMeta, TokenLogprob
from ...protocol.ops import Gen
from ..scheduler import Sequence

if TYPE_CHECKING:
    from ...constrained import Matcher
    from ..executor import SampledToken
    from ..tokenizer import Detokenizer, Tokenizer
    from .healing import HealMatcher
    from .program import OpState, SequenceState

MOST_STEPS_WITHOUT_DRAFT = 31


class TokenRecord:
    """Of one candidate of a traced program: for each output token its origin and, if it was drawn, the draw."""

    __slots__ = ("drawn", "origins")

    def __init__(self) -> None:
        self.origins: list[str] = []
        self.drawn: list[SampledToken | None] = []

    def note(self, origin: str, count: int, drawn: SampledToken | None = None) -> None:
        self.origins += [origin] * count
        self.drawn += [drawn] * count

    def note_drafted(self, start: int, end: int) -> None:
        """Tokens [start, end) of the output were draft tokens that the model confirmed."""
        for i in range(start, min(end, len(self.origins))):
            if self.origins[i] == "generated":
                self.origins[i] = "drafted"


class Candidate:
    """One of the ``n`` continuations of a prompt. The first ``prompt_len`` tokens of its sequence are the prompt."""

    __slots__ = (
        "cached_tokens",
        "detokenizer",
        "draft_pause",
        "draft_waits",
        "finish_reason",
        "generation",
        "healing",
        "index",
        "is_awaited",
        "is_drafted",
        "logprobs",
        "matched_stop",
        "matcher",
        "may_draft",
        "num_accepted",
        "num_asked",
        "num_drafted",
        "num_drawn_drafts",
        "num_forced",
        "num_generated",
        "num_repeated",
        "prefilled_tokens",
        "prompt_len",
        "prompt_logprobs",
        "record",
        "seed",
        "seq",
        "unsent_ids",
        "unsent_logprobs",
    )

    def __init__(
        self,
        generation: Generation,
        index: int,
        seq: Sequence,
        *,
        detokenizer: Detokenizer,
        matcher: Matcher | None,
        seed: int,
    ) -> None:
        self.generation = generation
        self.index = index
        self.seq = seq
        self.prompt_len = len(seq.tokens)
        self.detokenizer = detokenizer
        self.matcher = matcher
        self.seed = seed
        self.num_generated = 0
        self.num_forced = 0
        self.num_repeated = 0  # tokens that came with the op (``Gen.drawn``)
        self.is_drafted = self.may_draft = False  # drafts allowed: now, and once it is healed
        self.is_awaited = False  # a token was drawn that is accepted once its grammar's masks are made
        self.healing: HealMatcher | None = None  # without a grammar, until the given-back text is written
        self.num_asked = self.num_drafted = self.num_accepted = 0
        self.num_drawn_drafts = 0  # drawn tokens that were draft tokens
        self.draft_pause, self.draft_waits = 0, 0  # see waits_for_draft
        self.finish_reason = ""
        self.matched_stop: str | int | None = None
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob] = []
        self.record: TokenRecord | None = None  # of a traced program
        self.unsent_ids: list[int] = []
        self.unsent_logprobs: list[TokenLogprob] = []
        self.cached_tokens = 0
        self.prefilled_tokens = -1

    @property
    def owner(self) -> SequenceState:
        return self.generation.owner

    @property
    def output_ids(self) -> list[int]:
        return self.seq.tokens.ids[self.prompt_len :].tolist()

    @property
    def text(self) -> str:
        return self.detokenizer.text

    @property
    def is_closed_early(self) -> bool:
        """Whether the tokens that were left took tokens out of a mask; then the text is complete."""
        if self.matcher is None:
            return False
        is_ended = self.finish_reason == "stop" and self.matched_stop is None
        return self.matcher.is_closed_early or (is_ended and self.matcher.ends_by_limit)

    @property
    def is_mid_text(self) -> bool:
        """Whether a streaming op holds output back: tokens that show no text yet, or part of a character."""
        return self.generation.op.stream and (bool(self.unsent_ids) or self.detokenizer.is_mid_character)

    @property
    def wants_prompt_logprobs(self) -> bool:
        params = self.generation.op.params
        return params.return_logprob and params.logprob_start_len >= 0 and not self.num_generated

    @property
    def waits_for_draft(self) -> bool:
        """Whether the next step should wait for this step's token, so that a draft can follow it."""
        return self.is_drafted and self.draft_waits <= 0

    def note_draft(self, num_accepted: int) -> None:
        """Record how many draft tokens a step accepted. While none are accepted, the pauses between drafts double."""
        if num_accepted:
            self.draft_pause = self.draft_waits = 0
        elif self.draft_waits > 0:
            self.draft_waits -= 1
        else:
            self.draft_waits = self.draft_pause = min(2 * self.draft_pause + 1, MOST_STEPS_WITHOUT_DRAFT)

    def accept(self, token_id: int, logprob: TokenLogprob | None, tokenizer: Tokenizer, context_len: int) -> str:
        """Append a sampled token; returns the text that can be shown now. Sets ``finish_reason`` on the last token.

        Raises GrammarError when the grammar runs into one of its limits.
        """
        params = self.generation.op.params
        self.num_generated += 1
        if logprob is not None:
            self.logprobs.append(logprob)
            self.unsent_logprobs.append(logprob)
        if token_id in params.stop_token_ids or (token_id in tokenizer.eos_ids and not params.ignore_eos):
            self.matched_stop = token_id
            return self._finish("stop")
        if self.matcher is not None and not self.matcher.accept(token_id):
            raise GrammarError(self.matcher.error or f"token {token_id}, which the mask allowed, was refused")
        if self.healing is not None and not self.healing.accept(token_id):
            raise GrammarError(self.healing.error or f"token {token_id} was refused")
        return self._append(token_id, context_len)

    def take_seen(self, token_ids: list[int]) -> None:
        """Record tokens that are already in the sequence, do not end the text, and have been streamed."""
        self.num_generated += len(token_ids)
        self.detokenizer.extend(token_ids)

    def accept_forced(self, token_ids: list[int], context_len: int) -> str:
        """Append tokens that the grammar forces, up to the end of the generation; returns the text to show."""
        text = ""
        for token_id in token_ids:
            if self.finish_reason:
                break
            if self.matcher is None or not self.matcher.accept(token_id):
                raise GrammarError((self.matcher and self.matcher.error) or f"forced token {token_id} was refused")
            self.num_generated += 1
            self.num_forced += 1
            text += self._append(token_id, context_len)
        return text

    def _append(self, token_id: int, context_len: int) -> str:
        self.seq.tokens.append(token_id)
        self.unsent_ids.append(token_id)
        text = self.detokenizer.push(token_id)
        if self.detokenizer.is_hidden:
            self.num_generated -= 1  # the token only repeats text that was given back
            if self.matcher is not None and self.matcher.has_limit:
                most = self.generation.op.params.max_tokens - self.num_generated
                self.matcher.limit_rest(min(most, context_len - len(self.seq.tokens)))
        if self.healing is not None and not self.detokenizer.num_hidden:
            self.healing, self.is_drafted = None, self.may_draft
        if self.detokenizer.matched_stop is not None:
            self.matched_stop = self.detokenizer.matched_stop
            return text + self._finish("stop")
        params = self.generation.op.params
        if self.matcher is not None and self.num_generated >= params.min_tokens and self.matcher.must_end():
            return text + self._finish("stop")  # the grammar allows only an end token
        if self.num_generated >= params.max_tokens or len(self.seq.tokens) >= context_len:
            return text + self._finish("stop" if self.is_closed_early else "length")
        return text

    def _finish(self, reason: str) -> str:
        self.finish_reason = reason
        return self.detokenizer.finish()

    def meta(self) -> CandidateMeta:
        return CandidateMeta(
            finish_reason=self.finish_reason,
            completion_tokens=self.num_generated,
            token_ids=tuple(self.output_ids),
            matched_stop=self.matched_stop,
            logprobs=tuple(self.logprobs),
            forced_tokens=self.num_forced,
            drafted_tokens=self.num_drafted,
            accepted_tokens=self.num_accepted,
            closed_by_budget=self.is_closed_early,
        )


class Generation:
    """All candidates of one ``Gen``. The first candidate uses the program's own sequence."""

    __slots__ = ("candidates", "first_token_s", "healed", "op", "op_state", "owner", "start_s")

    def __init__(self, op_state: OpState, owner: SequenceState, *, now_s: float) -> None:
        assert isinstance(op_state.op, Gen)
        self.op: Gen = op_state.op
        self.op_state = op_state
        self.owner = owner
        self.candidates: list[Candidate] = []
        self.start_s = now_s
        self.healed = ""  # the text of the prompt tokens that were given back
        self.first_token_s = 0.0

    @property
    def is_finished(self) -> bool:
        return all(candidate.finish_reason for candidate in self.candidates)

    @property
    def partial(self) -> tuple[str, ...]:
        return tuple(candidate.text for candidate in self.candidates)

    def delta(self, candidate: Candidate, text: str, *, origin: str) -> Delta | None:
        """The delta to stream now; None if the op does not stream or there is nothing to show."""
        if not self.op.stream or not (text or (candidate.finish_reason and candidate.unsent_ids)):
            return None
        ids, logprobs = tuple(candidate.unsent_ids), tuple(candidate.unsent_logprobs)
        candidate.unsent_ids, candidate.unsent_logprobs = [], []
        return Delta(
            program=self.owner.program.id,
            op=self.op.op,
            text=text,
            token_ids=ids,
            logprobs=logprobs,
            index=candidate.index,
            origin=origin,
        )

    def delta_of(self, candidate: Candidate, token_id: int, text: str) -> Delta:
        """As ``delta``, for a drawn token that shows ``text`` while nothing else is held back."""
        return Delta(self.owner.program.id, self.op.op, text, (token_id,), index=candidate.index)

    def meta(self, *, now_s: float) -> GenMeta:
        first = self.candidates[0]
        admitted_s = first.seq.admitted_s or now_s
        first_token_s = self.first_token_s or now_s
        return GenMeta(
            prompt_tokens=first.prompt_len,
            cached_tokens=min(first.cached_tokens, first.prompt_len),
            candidates=tuple(candidate.meta() for candidate in self.candidates),
            queue_s=max(0.0, admitted_s - self.start_s),
            prefill_s=max(0.0, first_token_s - admitted_s),
            decode_s=max(0.0, now_s - first_token_s),
            prompt_logprobs=tuple(first.prompt_logprobs),
            start_s=self.start_s - self.owner.program.start_s,
            healed=self.healed,
        )
