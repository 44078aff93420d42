"""The step loop: runs the forward of a plan, draws tokens from its logits, and accepts them.

On an accelerator the device computes the next step while the host accepts the last one (``overlaps``); on a CPU each
step runs from beginning to end.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ...protocol.errors import PromptTooLong
from ..executor import SampledToken, SampleRow
from ..scheduler import Draft, StepPlan
from .drafting import draft_rows, wants_of
from .embedding_ops import PooledRow, want_vector
from .flight import DeferredDraw, Draw, StepInFlight
from .generation import Candidate
from .logprobs import want_prompt_logprobs, want_scores
from .scoring import ScoreRow
from .tracing import traced_params
from .vectorised_decode import VectorisedDecode

if TYPE_CHECKING:
    from ...constrained import Matcher
    from ...radix_cache import Tiers
    from ..executor import Executor
    from ..speculative import Speculation
    from .embedding_ops import EmbeddingOps
    from .gen_ops import GenOps
    from .mask_thread import MaskThread
    from .programs import Programs
    from .score_ops import ScoreOps

MAX_RECENT = 240  # steps that are remembered for a report
MAX_WAITING_FOR_DRAFTS = 8  # decoding sequences; with more, steps without a pause are worth more than drafts


@dataclass(slots=True)
class StepCounters:
    """Counts since the engine started.

    ``step_s`` is the time of all steps that had a forward; ``wait_s`` is the part of it in which the host waited for
    the device's results.
    """

    steps: int = 0
    forward_tokens: int = 0
    forward_rows: int = 0
    step_s: float = 0.0
    wait_s: float = 0.0


class StepRecord(NamedTuple):
    """One step. ``rows`` and ``tokens`` of its forward; the other counts are those at its end."""

    step: int
    rows: int
    tokens: int
    drafted: int
    seconds: float
    running: int
    waiting: int
    used_slots: int
    cached_slots: int


class StepLoop:
    """Runs the scheduler's plans on the executor and hands the results to generations, scorings and embeddings."""

    def __init__(
        self,
        programs: Programs,
        generations: GenOps,
        scorings: ScoreOps,
        embeddings: EmbeddingOps,
        executor: Executor,
        *,
        masks: MaskThread,
        speculation: Speculation | None,
        tiers: Tiers | None,
        overlaps: bool,
        clock: Callable[[], float],
    ) -> None:
        self.masks = masks
        self.scheduler = programs.scheduler
        self.programs = programs
        self.executor = executor
        self.counters = StepCounters()
        self.recent: deque[StepRecord] = deque(maxlen=MAX_RECENT)
        self.tokenizer = programs.tokenizer
        self.context_len = programs.context_len
        self.speculation = speculation
        self.tiers = tiers
        self.overlaps = overlaps
        self.clock = clock
        self.flight: StepInFlight | None = None  # given to the device, not read yet
        self.deferred: list[DeferredDraw] = []  # in the order of their draws
        self._generations = generations
        self._scorings = scorings
        self._embeddings = embeddings
        self._collected_s = -math.inf
        self.vectorised = VectorisedDecode(
            self.scheduler,
            self.tokenizer,
            context_len=self.context_len,
            vocab_size=executor.model.config.vocab_size,
            speculation=speculation,
            overlaps=overlaps,
            send=programs.send,
            accept=generations.accept_token,
            finish=generations.finish_candidate,
            prepare=self._prepare_all,
            step_at_once=masks.step_at_once,
            jump_forward=generations.jump_forward,
            defer=lambda draw, token, future: self._defer(DeferredDraw(draw, [token], future)),
        )

    def run(self) -> bool:
        """Run at most one forward. False when there was nothing to run and nothing to read."""
        self._accept_deferred()
        return self._run_ahead() if self.overlaps else self._run()

    def drop(self) -> None:
        """Discard the step that the device is computing, and the draws that are deferred."""
        self.flight = None
        self.deferred.clear()
        if self.speculation is not None:
            self.speculation.drop_steps()

    def _run(self) -> bool:
        """Run one step from beginning to end."""
        self.vectorised.check_room(None)
        plan = self._without_failed(self.scheduler.plan())
        if plan is None:
            return False
        flight = self._start(plan)
        self._draw(flight)
        self._collect(flight)
        self.vectorised.add_from(flight)
        return True

    def _run_ahead(self) -> bool:
        """Give the next forward to the device, read the step before it, then give the device the next draws.

            device   | forward n | draw n | forward n + 1            | draw n + 1 | forward n + 2
            host       .. draw n | plan n + 1 | read n: text, grammars, masks | draw n + 1 | plan n + 2 | read n + 1

        So every draw has the tokens, masks and penalties that it depends on, as without overlap. If a sequence ends
        with step n, its row of forward n + 1 is wasted: nothing is drawn from it, and its slots are free already.
        """
        before, self.flight = self.flight, None
        self.vectorised.check_room(before)
        if before is not None:
            self._expect_draws(before)
        plan = self._without_failed(self.scheduler.plan())
        flight = self._start(plan) if plan is not None else None
        if before is not None:
            self._collect(before)
        if flight is not None:
            self._draw(flight)
            self.flight = flight
        return before is not None or flight is not None

    def _without_failed(self, plan: StepPlan | None) -> StepPlan | None:
        """Fail the ops of sequences that can never run, and remove from ``plan`` the other rows of these ops and the
        rows that read what those were to compute.
        """
        if not self.scheduler.failed:
            return plan
        for seq, error in self.scheduler.failed:
            if seq.tag is None:
                continue  # its op has failed with another of its sequences
            assert isinstance(seq.tag, Candidate | ScoreRow | PooledRow)
            message = f"{error}; shorten the prompt or start with a larger --num-slots"
            self.programs.fail_first(seq.tag.owner, PromptTooLong(message))
        self.scheduler.failed.clear()
        return None if plan is None else self.scheduler.without_ended(plan, self.programs.live)

    def _expect_draws(self, flight: StepInFlight) -> None:
        """Tell the scheduler which tokens of ``flight`` the next plan may use: those that cannot end their candidate.

        With few sequences, a candidate whose drafts were accepted lately is left out, so that its next step can have
        a draft, which needs the token's value.
        """
        is_few = len(flight.draws) + len(flight.vectorised) <= MAX_WAITING_FOR_DRAFTS
        self.vectorised.add_from(flight)
        self.vectorised.expect(flight)
        for draw in flight.draws:
            candidate = draw.candidate
            params = candidate.generation.op.params
            if candidate.finish_reason or draw.draft is not None or draw.at >= self.executor.num_fed:
                continue
            if candidate.num_generated + 1 >= params.max_tokens or len(candidate.seq.tokens) + 1 >= self.context_len:
                continue
            if is_few and self.speculation is not None and candidate.waits_for_draft:
                continue
            self.scheduler.expect(candidate.seq, draw.at)

    def _start(self, plan: StepPlan) -> StepInFlight:
        """Give the forward of ``plan`` to the device."""
        live = self.programs.live
        start_s = self.clock()
        plan, drafts = self._with_drafts(plan)
        is_pooled = any(isinstance(live[row.seq_id].tag, PooledRow) for row in plan.rows)
        logits = self.executor.forward(plan, needs_all=not is_pooled)  # [L, V]
        self.scheduler.complete(plan, live)
        self._count(plan)
        owners = [(live[row.seq_id], live[row.seq_id].tag) for row in plan.rows]
        return StepInFlight(plan, drafts, owners, logits, start_s, self.executor.is_cold)

    def _count(self, plan: StepPlan) -> None:
        """Count ``plan``, once for each program that has a row in it."""
        counters = self.counters
        counters.steps += 1
        counters.forward_tokens += plan.num_tokens
        counters.forward_rows += len(plan.rows) + plan.num_vectorised
        programs = set()
        for row in plan.rows:
            tag = self.programs.live[row.seq_id].tag
            if isinstance(tag, Candidate | ScoreRow | PooledRow):
                programs.add(tag.owner.program)
        if plan.vectorised is not None:
            self.vectorised.count_forwards(plan.vectorised)
            programs = {program for program in programs if not self.vectorised.is_counted(program)}
        for program in programs:
            program.stats.forwards += 1

    def _draw(self, flight: StepInFlight) -> None:
        """Give the draws of a step to the device. Every token before the draws is accepted."""
        first, rows, arrays, live = flight.plan.num_vectorised, flight.rows, None, self.programs.live
        if flight.plan.vectorised is not None:
            flight.vectorised, arrays = self.vectorised.draws(flight.plan.vectorised)
        num_vectorised = len(flight.vectorised)
        for row, (seq, tag) in zip(flight.plan.rows, flight.owners, strict=True):
            part = slice(first, first + row.num_logits - row.num_draft)
            first += row.num_logits
            match tag:
                case Candidate() as candidate:
                    if candidate.finish_reason or candidate.is_awaited:
                        continue  # it ended while this forward ran, or it was preempted with its next token drawn
                    if candidate.wants_prompt_logprobs:
                        want_prompt_logprobs(flight, candidate, row, part, self.executor, self.tokenizer)
                    if row.tokens_end == len(seq.tokens):
                        draft = flight.drafts.get(row.seq_id)
                        flight.draws.append(Draw(candidate, row, draft, num_vectorised + len(rows), seq.lease))
                        self._note_prefilled(candidate)
                        if candidate.generation.op.params.max_tokens > 0:
                            rows.append(self._sample_row(candidate, part.stop - 1))
                            if draft is not None:
                                left = candidate.generation.op.params.min_tokens - candidate.num_generated
                                rows += draft_rows(draft, rows[-1], min_tokens_left=left)
                case ScoreRow() as score_row if live.get(row.seq_id) is seq:
                    want_scores(flight, score_row, row, part, self.executor, live, self._scorings.finish_row)
                case PooledRow() as pooled if live.get(row.seq_id) is seq:
                    want_vector(flight, pooled, row, part, live, self._embeddings.finish_row)
        if rows or num_vectorised:
            flight.drawn = self.executor.draw(flight.logits, rows, arrays)
        flight.readback = self.executor.read(flight.tensors())

    def _collect(self, flight: StepInFlight) -> None:
        """Wait for a step's results and accept them."""
        assert flight.readback is not None
        asked_s = self.clock()
        values = flight.readback.wait()
        self.counters.wait_s += self.clock() - asked_s
        sampled: list[SampledToken] = []
        first = min((draw.at for draw in flight.draws), default=0)
        drawn = flight.drawn
        if drawn is not None:
            count = len(drawn.tensors())
            ids = drawn.ids(values)
            sampled = drawn.tokens(values[:count], first=first) if flight.draws else []
            values = values[count:]
        for tensors, take in flight.wants:
            take(values[: len(tensors)])
            values = values[len(tensors) :]
        now_s = self.clock()
        for draw in flight.draws:
            generation = draw.candidate.generation
            if generation.first_token_s == 0.0:
                generation.first_token_s = now_s
            if generation.op.params.max_tokens == 0 and not draw.candidate.finish_reason:
                draw.candidate.finish_reason = "length"
                self._generations.finish_candidate(draw.candidate)
        if drawn is not None and len(flight.vectorised):
            self.vectorised.accept(flight.vectorised, ids)
        drawing = [
            (draw, sampled[draw.at - first : draw.end - first])
            for draw in flight.draws
            if not draw.candidate.finish_reason
        ]
        futures = self._prepare_all([(draw.candidate, _followed(draw, tokens)) for draw, tokens in drawing])
        for (draw, tokens), future in zip(drawing, futures, strict=True):
            if not draw.candidate.finish_reason:  # else the op was cancelled, or failed with a sibling's grammar
                self.scheduler.settle(draw.candidate.seq)
                if future is None:
                    self._accept(draw, tokens)
                else:
                    self.scheduler.postpone(draw.candidate.seq)
                    self._defer(DeferredDraw(draw, tokens, future))
        end_s = self.clock()
        elapsed_s = end_s - max(flight.start_s, self._collected_s)
        self._collected_s = end_s
        self.counters.step_s += elapsed_s
        self._record(flight, elapsed_s)
        if self.tiers is not None:
            self.tiers.recompute_s_per_token = self.counters.step_s / max(self.counters.forward_tokens, 1)
        if self.speculation is not None:
            self.speculation.observe_step(flight.plan.num_tokens, elapsed_s, is_usual=not flight.is_cold)
            self.speculation.sweep(self.programs.live)

    def _record(self, flight: StepInFlight, elapsed_s: float) -> None:
        scheduler, cache, plan = self.scheduler, self.scheduler.cache, flight.plan
        self.recent.append(
            StepRecord(
                plan.step,
                len(plan.rows) + plan.num_vectorised,
                plan.num_tokens,
                sum(map(len, flight.drafts.values())),
                elapsed_s,
                len(scheduler.running),
                scheduler.num_waiting,
                cache.num_locked + cache.num_leased,
                cache.num_cached,
            )
        )

    def _with_drafts(self, plan: StepPlan) -> tuple[StepPlan, dict[int, Draft]]:
        """``plan`` with the drafts that are worth running, and these drafts by sequence."""
        if self.speculation is None:
            return plan, {}
        live = self.programs.live
        wants = wants_of(
            plan,
            live,
            self.tokenizer,
            masks=self.masks,
            context_len=self.context_len,
            max_draft=self.speculation.max_draft,
        )
        drafts = self.speculation.propose(wants, num_tokens=plan.num_tokens)
        if not drafts:
            return plan, {}
        plan = self.scheduler.add_drafts(plan, live, drafts)
        return plan, {row.seq_id: drafts[row.seq_id].cut(row.num_draft) for row in plan.rows if row.num_draft}

    def _sample_row(self, candidate: Candidate, logits_row: int) -> SampleRow:
        params = candidate.generation.op.params
        if candidate.record is not None:
            params = traced_params(params)
        too_short = candidate.num_generated < params.min_tokens
        return SampleRow(
            logits_row=logits_row,
            params=params,
            seed=candidate.seed,
            token_ids=candidate.seq.tokens.ids,
            prompt_len=candidate.prompt_len,
            matcher=candidate.matcher,
            mask=None if candidate.healing is None else candidate.healing.mask(),
            banned=self.tokenizer.eos_ids | set(params.stop_token_ids) if too_short else frozenset(),
        )

    @staticmethod
    def _note_prefilled(candidate: Candidate) -> None:
        if candidate.prefilled_tokens < 0:
            candidate.prefilled_tokens = candidate.seq.num_run
            candidate.cached_tokens = candidate.seq.num_cached

    # -- accepting ----------------------------------------------------------------------------------------------------

    def _prepare_all(self, asked: list[tuple[Candidate, list[int]]]) -> list[Future[None] | None]:
        """What has to be awaited before each candidate's grammar takes its tokens; None where nothing has to."""
        matchers = [_asked_matcher(candidate, token_ids) for candidate, token_ids in asked]
        prepared = [(matcher, ids) for matcher, (_, ids) in zip(matchers, asked, strict=True) if matcher is not None]
        if not prepared:
            return [None] * len(asked)
        found = iter(self.masks.prepare_all(prepared))
        return [None if matcher is None else next(found) for matcher in matchers]

    def _defer(self, deferred: DeferredDraw) -> None:
        """Accept the draw in a later step."""
        self.masks.counters.num_deferred += 1
        deferred.draw.candidate.is_awaited = True
        self.deferred.append(deferred)

    def _accept_deferred(self) -> None:
        """Accept the deferred draws whose masks are made, and drop those of candidates that have ended."""
        waiting, self.deferred = self.deferred, []
        for deferred in waiting:
            candidate = deferred.draw.candidate
            if candidate.finish_reason:
                continue
            if not deferred.future.done():
                self.deferred.append(deferred)
                continue
            deferred.future.result()
            candidate.is_awaited = False
            self._accept(deferred.draw, deferred.sampled)

    def _accept(self, draw: Draw, sampled: list[SampledToken]) -> None:
        """Accept the drawn token, and while the accepted tokens equal the draft's, the draw after the last of them."""
        candidate, row, draft = draw.candidate, draw.row, draw.draft
        seq, start = candidate.seq, row.tokens_end
        guessed = [] if draft is None else draft.token_ids.tolist()
        num_followed = 0
        while True:
            if not self._generations.accept_token(candidate, sampled[num_followed]):
                return
            if draft is None:
                break
            made = seq.tokens.ids[start + num_followed :].tolist()
            for i, (token_id, guess) in enumerate(zip(made, guessed[num_followed:], strict=False)):
                if token_id != guess:
                    break
                num_followed += 1
                candidate.num_drawn_drafts += i == 0  # token 0 was drawn; the grammar forced the others
            if candidate.finish_reason or start + num_followed < len(seq.tokens):
                break
        if draft is not None:
            if candidate.record is not None:
                at = start - candidate.prompt_len
                candidate.record.note_drafted(at, at + num_followed)
            if draw.has_slots:
                self.scheduler.accept_draft(row, seq, num_followed)
            candidate.num_drafted += len(draft)
            candidate.num_accepted += num_followed
        candidate.note_draft(num_followed)
        if self.speculation is not None and candidate.is_drafted:
            self.speculation.observe(seq.seq_id, seq.tokens.ids[start:], draft, num_followed)
        if candidate.finish_reason:
            if self.speculation is not None and candidate.is_drafted:
                self.speculation.rest(seq.seq_id)
            self._generations.finish_candidate(candidate)
        else:
            seq.logits_from = len(seq.tokens) - 1


def _asked_matcher(candidate: Candidate, token_ids: list[int]) -> Matcher | None:
    """The matcher that takes these tokens; None if there is none, or no token was allowed: accepting fails by name."""
    return candidate.matcher if token_ids and token_ids[-1] >= 0 else None


def _followed(draw: Draw, sampled: list[SampledToken]) -> list[int]:
    """The draws that are accepted: as long as each one equals its draft token, and the one after the last of them."""
    guessed = [] if draw.draft is None else draw.draft.token_ids.tolist()
    drawn = [token.token_id for token in sampled]
    num_equal = next((i for i, guess in enumerate(guessed) if drawn[i] != guess), len(guessed))
    return drawn[: num_equal + 1]
