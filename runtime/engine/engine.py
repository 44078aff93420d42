"""The engine: ``step(inbox) -> outbox``. One model, its KV pool and cache, and every program that runs on them.

Each step: messages in, ops advanced, one forward over whatever the scheduler planned, tokens accepted, messages out.
Holds no socket and starts no thread but the grammar compiler's.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ... import constrained
from ...constrained.peers import Peer, compile_with, load_peer
from ...constrained.spec import GrammarError, GrammarSpec
from ...radix_cache import POLICIES, Event, RadixCache
from ..config import EngineConfig
from ..executor import Accelerator, Executor, SampledToken, SampleRow
from ..protocol.errors import ErrorInfo, PhloemError, ProtocolError
from ..protocol.messages import (
    PROTOCOL_VERSION,
    QUERIES,
    Answer,
    Bye,
    Cancel,
    ClientMessage,
    Hello,
    Limits,
    Ping,
    Pong,
    ProtocolFault,
    Query,
    RuntimeMessage,
    Submit,
    TemplateInfo,
    TokenLogprob,
    Welcome,
)
from ..scheduler import Draft, PlanRow, Scheduler, SchedulerConfig, StepPlan
from ..speculative import Drafter, GrammarDrafter, LookupDrafter, Speculation, StepCosts
from .drafting import DraftPath, draft_rows, wants_of
from .flight import Draw, Flight
from .generation import Candidate
from .interpreter import Interpreter
from .report import EngineReport
from .scoring import ScoreRow
from .tracing import traced_params

if TYPE_CHECKING:
    import torch

    from ..memory import KVPool
    from ..models import Model
    from ..tokenizer import ChatTemplate, Tokenizer

log = logging.getLogger(__name__)

BLOCKS_PER_IDLE_STEP = 16  # of KV, saved while nothing runs
MOST_WAITING_FOR_DRAFTS = 8  # sequences; with more, drafts are worth less than steps without a pause

Outbox = list[tuple[bytes, RuntimeMessage]]


class Engine:
    """Owns the model and the loop's state. Not thread-safe: one thread calls ``step``."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        accelerator: Accelerator | None = None,
    ) -> None:
        """``accelerator``: in the place of the one that the config's device has."""
        from .loading import BLOCK_LEN, load_parts

        parts = load_parts(config, accelerator=accelerator)
        self.config = config
        self.model: Model = parts.model
        self.tokenizer: Tokenizer = parts.tokenizer
        self.template: ChatTemplate | None = parts.template
        self.kv: KVPool = parts.kv
        self.model_path: Path = parts.path
        self.context_len = parts.context_len
        self.vocab_size = parts.model.config.vocab_size
        self.limits = Limits()
        self.clock = clock
        self.cache_events: list[Event] = []  # taken and sent by whoever runs the loop
        self.cache_events_url = ""  # where; set before the first ``welcome``
        self.cache_block_len = BLOCK_LEN
        self.tiers = parts.tiers
        self.cache = RadixCache(
            parts.num_slots,
            policy=POLICIES[config.eviction],
            clock=clock,
            reuse=config.prefix_cache,
            tiers=parts.tiers,
            on_event=self.cache_events.append if config.cache_events_url else None,
            block_len=BLOCK_LEN,
        )
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_running=config.max_running,
                max_step_tokens=config.max_step_tokens,
                prefill_chunk=config.prefill_chunk,
                order=config.order,
                match_window=config.match_window,
                tenant_weights=config.tenant_weights,
            ),
            self.cache,
            clock=clock,
        )
        self.executor = Executor(
            self.model,
            self.kv,
            max_rows=config.max_running,
            max_len=self.context_len,
            num_tokens=self.tokenizer.vocab_size,
            accelerator=parts.accelerator,
            use_graphs=config.cuda_graphs == "auto",
        )
        self.overlaps = self.executor.accelerator is not None and config.overlap == "auto"
        self._flight: Flight | None = None  # given to the device and not read yet
        self._collected_s = -math.inf
        self._grammar_threads = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._grammars: dict[str, Future[constrained.CompiledGrammar]] = {}
        self._vocabulary: constrained.Vocabulary | None = None
        self._grammar_peer: Peer | None = None
        # What the first grammar would have to wait for: the vocabulary's tables and compiled walks.
        self._grammar_threads.submit(self._compile, GrammarSpec("json_schema", '{"type": "boolean"}'))
        self._outbox: Outbox = []
        self.report = EngineReport()
        self.speculation: Speculation | None = None
        if config.speculative != "off":
            costs = StepCosts(slope=0.06 if self.model.device.type == "cpu" else 0.005)
            drafters: list[Drafter] = [
                LookupDrafter(lambda ids, name, limit: self.cache.continuation(ids, namespace=name, limit=limit)),
                GrammarDrafter(),
            ]
            if parts.drafter is not None:
                drafters.append(parts.drafter)
            self.speculation = Speculation(drafters, max_draft=config.max_draft, costs=costs)
        self.interpreter = Interpreter(
            self.scheduler,
            self.tokenizer,
            send=self._send,
            compile_grammar=self.compile_grammar,
            context_len=self.context_len,
            vocab_size=self.vocab_size,
            limits=self.limits,
            max_waiting=config.max_waiting,
            seed=config.seed,
            clock=clock,
            may_draft=self.speculation is not None,
        )

    # -- the face -----------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self.interpreter.compiling) or self._flight is not None

    def welcome(self) -> Welcome:
        return Welcome(
            version=PROTOCOL_VERSION,
            model=self.config.model,
            model_path=str(self.model_path),
            context_len=self.context_len,
            vocab_size=self.vocab_size,
            vocab_hash=self.tokenizer.vocab_hash,
            template=self.template.info() if self.template is not None else TemplateInfo(),
            limits=self.limits,
            capabilities=("text", *(f"grammar:{kind}" for kind in constrained.GRAMMAR_KINDS)),
            cache_events_url=self.cache_events_url,
            eos_ids=tuple(sorted(self.tokenizer.eos_ids)),
        )

    def step(self, inbox: list[tuple[bytes, ClientMessage]]) -> Outbox:
        """Take messages, run at most one forward, and say what there is to say."""
        for client, message in inbox:
            self._receive(client, message)
        interpreter = self.interpreter
        interpreter.check_deadlines()
        interpreter.advance()
        if not (self._run_ahead() if self.overlaps else self._run()):
            self._idle()
        interpreter.advance()
        outbox, self._outbox = self._outbox, []
        return outbox

    def _fail_unschedulable(self) -> None:
        for seq, error in self.scheduler.failed:
            self.interpreter.fail_unschedulable(seq, error)
        self.scheduler.failed.clear()

    def _idle(self) -> None:
        """Nothing can be computed: let others have the processor while somebody waits for them."""
        interpreter = self.interpreter
        if interpreter.compiling:
            wait(
                [owner.activity.future for owner in interpreter.compiling], timeout=0.005, return_when="FIRST_COMPLETED"
            )
        elif self.scheduler.num_reading:
            time.sleep(0.0005)  # blocks come from disk
        elif self.tiers is not None:
            self.tiers.write_behind(BLOCKS_PER_IDLE_STEP)

    def drop_client(self, client_id: bytes) -> None:
        """The client is gone; nobody reads what its programs would say."""
        self.interpreter.drop_client(client_id)
        self._outbox = [(client, message) for client, message in self._outbox if client != client_id]

    def fail_all(self, error: PhloemError) -> Outbox:
        """End every program, after a fault that leaves the engine's state in doubt."""
        self._flight = None
        for program in list(self.interpreter.programs.values()):
            self.interpreter.end_program(program, error)
        outbox, self._outbox = self._outbox, []
        return outbox

    def close(self) -> None:
        self._grammar_threads.shutdown(wait=False, cancel_futures=True)
        if self.tiers is not None:
            if self.tiers.disk is not None:
                self.tiers.flush()
            self.tiers.close()

    # -- messages -----------------------------------------------------------------------------------------------------

    def _send(self, client: bytes, message: RuntimeMessage) -> None:
        self._outbox.append((client, message))

    def _receive(self, client: bytes, message: ClientMessage) -> None:
        match message:
            case Submit():
                self.interpreter.submit(client, message)
            case Cancel():
                self.interpreter.cancel(client, message)
            case Query():
                self._send(client, self._answer(message))
            case Hello(version=version):
                if version != PROTOCOL_VERSION:
                    text = (
                        f"protocol version {version}, but this engine speaks {PROTOCOL_VERSION}; install equal versions"
                    )
                    self._send(client, ProtocolFault(ProtocolError(text).info()))
                else:
                    self._send(client, self.welcome())
            case Ping():
                self._send(client, Pong())
            case Bye():
                self.drop_client(client)

    def _answer(self, query: Query) -> Answer:
        match query.what:
            case "info":
                return Answer(query.id, self.report.info(self))
            case "metrics":
                return Answer(query.id, self.report.metrics(self))
            case "cache_tree":
                return Answer(query.id, self.report.cache_tree(self))
            case "flush_cache":
                if self.speculation is not None:
                    self.speculation.flush()
                return Answer(query.id, self.cache.flush())
            case other:
                message = f"query {other!r} is not one of: {', '.join(QUERIES)}"
                return Answer(query.id, None, ErrorInfo("InvalidRequest", message, "what"))

    # -- grammars -----------------------------------------------------------------------------------------------------

    def compile_grammar(self, spec: GrammarSpec) -> Future[constrained.CompiledGrammar]:
        """The compiled grammar, now or soon; equal specs are compiled once while somebody may still ask."""
        future = self._grammars.pop(spec.key, None)
        if future is None:
            future = self._grammar_threads.submit(self._compile, spec)
        self._grammars[spec.key] = future  # the most recently asked for lies last
        while len(self._grammars) > 256:
            oldest = next(iter(self._grammars))
            if not self._grammars[oldest].done():
                break
            del self._grammars[oldest]
        return future

    def _compile(self, spec: GrammarSpec) -> constrained.CompiledGrammar:
        if self._vocabulary is None:
            self._vocabulary = self.tokenizer.vocabulary()
        if self.config.grammar_engine != "phloem":
            if self._grammar_peer is None:
                self._grammar_peer = load_peer(self.config.grammar_engine, self._vocabulary)
            return cast(constrained.CompiledGrammar, compile_with(self._grammar_peer, spec, self._vocabulary))
        return constrained.compile(spec.kind, spec.text, self._vocabulary, **spec.options)

    # -- one forward --------------------------------------------------------------------------------------------------

    def _run(self) -> bool:
        """A step from beginning to end; False when there was nothing to run."""
        plan = self.scheduler.plan()
        self._fail_unschedulable()
        if plan is None:
            return False
        flight = self._start(plan)
        self._draw(flight)
        self._collect(flight)
        return True

    def _run_ahead(self) -> bool:
        """The next forward is given to the device, then the step before it is read; draws follow when that is known.

            device   | forward n | draw n | forward n + 1            | draw n + 1 | forward n + 2
            host       .. draw n | plan n + 1 | read n: text, grammars, masks | draw n + 1 | plan n + 2 | read n + 1

        So each token is drawn with all known that it depends on, as if nothing ran ahead. A forward whose sequence has
        turned out to be over was in vain: nothing is drawn from it, and its slot is free already.
        """
        before, self._flight = self._flight, None
        if before is not None:
            self._expect_draws(before)
        plan = self.scheduler.plan()
        self._fail_unschedulable()
        flight = self._start(plan) if plan is not None else None
        if before is not None:
            self._collect(before)
        if flight is not None:
            self._draw(flight)
            self._flight = flight
        return before is not None or flight is not None

    def _expect_draws(self, flight: Flight) -> None:
        """Say which of the tokens that are being drawn the next plan may stand on: those that cannot be the last.

        Few sequences wait for their token where guesses at the ones after it have been good: a draft is then more.
        """
        is_few = len(flight.draws) <= MOST_WAITING_FOR_DRAFTS
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

    def _start(self, plan: StepPlan) -> Flight:
        """Give the forward of ``plan`` to the device."""
        live = self.interpreter.live
        start_s = self.clock()
        plan, drafts = self._with_drafts(plan)
        logits = self.executor.forward(plan)  # [L, V]
        self.scheduler.complete(plan, live)
        self.report.count_step(plan, self.interpreter, live)
        owners = [(live[row.seq_id], live[row.seq_id].tag) for row in plan.rows]
        return Flight(plan, drafts, owners, logits, self.executor.features, start_s)

    def _draw(self, flight: Flight) -> None:
        """Give the draws of a step to the device. All tokens before them are known."""
        first = 0
        rows = flight.rows
        for row, (seq, tag) in zip(flight.plan.rows, flight.owners, strict=True):
            part = slice(first, first + row.num_logits - row.num_draft)
            first += row.num_logits
            match tag:
                case Candidate() as candidate:
                    if candidate.finish_reason:
                        continue  # its last token came while this forward ran
                    if candidate.wants_prompt_logprobs:
                        self._want_prompt_logprobs(flight, candidate, row, part)
                    if row.tokens_end == len(seq.tokens):
                        draft = flight.drafts.get(row.seq_id)
                        flight.draws.append(Draw(candidate, row, draft, len(rows), seq.lease))
                        self._note_prefilled(candidate)
                        if candidate.generation.op.params.max_tokens > 0:
                            rows.append(self._sample_row(candidate, part.stop - 1))
                            if draft is not None:
                                left = candidate.generation.op.params.min_tokens - candidate.num_generated
                                rows += draft_rows(draft, rows[-1], min_tokens_left=left)
                case ScoreRow() as score_row if self.interpreter.live.get(row.seq_id) is seq:
                    self._want_scores(flight, score_row, row, part)
        if rows:
            flight.drawn = self.executor.draw(flight.logits, rows)
        flight.readback = self.executor.read(flight.tensors())

    def _collect(self, flight: Flight) -> None:
        """Read a step's results, and take them."""
        assert flight.readback is not None
        asked_s = self.clock()
        values = flight.readback.wait()
        self.report.wait_s += self.clock() - asked_s
        sampled: list[SampledToken] = []
        if flight.drawn is not None:
            count = len(flight.drawn.tensors())
            sampled, values = flight.drawn.tokens(values[:count]), values[count:]
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
                self.interpreter.finish_candidate(draw.candidate)
        for draw in flight.draws:
            if not draw.candidate.finish_reason:  # else it was cancelled, or a sibling's grammar failed in this step
                self.scheduler.settle(draw.candidate.seq)
                self._accept(draw, sampled[draw.at : draw.end], flight)
        end_s = self.clock()
        elapsed_s = end_s - max(flight.start_s, self._collected_s)
        self._collected_s = end_s
        self.report.step_s += elapsed_s
        if self.tiers is not None:
            self.tiers.recompute_s_per_token = self.report.step_s / max(self.report.forward_tokens, 1)
        if self.speculation is not None:
            self.speculation.observe_step(flight.plan.num_tokens, elapsed_s)
            self.speculation.sweep(self.interpreter.live)

    def _with_drafts(self, plan: StepPlan) -> tuple[StepPlan, dict[int, Draft]]:
        """``plan`` with the guesses that are worth running, and these by sequence."""
        if self.speculation is None:
            return plan, {}
        live = self.interpreter.live
        wants = wants_of(plan, live, self.tokenizer, context_len=self.context_len, max_draft=self.speculation.max_draft)
        if not wants:
            return plan, {}
        drafts = self.speculation.propose(wants, num_tokens=plan.num_tokens)
        if not drafts:
            return plan, {}
        plan = self.scheduler.add_drafts(plan, live, drafts)
        rows = [row for row in plan.rows if row.num_draft]
        return plan, {
            row.seq_id: Draft(row.token_ids[-row.num_draft :], row.draft_parents, drafts[row.seq_id].source)
            for row in rows
        }

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

    def _accept(self, draw: Draw, sampled: list[SampledToken], flight: Flight) -> None:
        """Take the drawn token, and as long as the draft foresaw what was taken, the one drawn after that."""
        candidate, row, draft = draw.candidate, draw.row, draw.draft
        seq, start = candidate.seq, row.tokens_end
        followed = DraftPath(draft) if draft is not None else None
        num_followed = 0
        while True:
            token = sampled[0 if followed is None else followed.at + 1]
            if not self._accept_token(candidate, token):
                return
            if followed is None:
                break
            for i, token_id in enumerate(seq.tokens.ids[start + num_followed :].tolist()):
                if not followed.follow(token_id):
                    break
                num_followed += 1
                candidate.num_foreseen += i == 0  # the drawn one; what follows it was forced
            if candidate.finish_reason or start + num_followed < len(seq.tokens):
                break
        if followed is not None and draft is not None:
            if candidate.record is not None:
                at = start - candidate.prompt_len
                candidate.record.note_drafted(at, at + num_followed)
            if draw.has_slots:
                self.scheduler.accept_draft(row, seq, followed.path)
            candidate.num_drafted += len(draft)
            candidate.num_accepted += num_followed
        candidate.note_draft(0 if draft is None else num_followed)
        if self.speculation is not None and candidate.is_drafted:
            self.speculation.observe(seq.seq_id, seq.tokens.ids[start:], draft, num_followed)
            if self.speculation.readers:
                path, at = [] if followed is None else followed.path, flight.rows[draw.at].logits_row
                features = flight.features[[at, *(at + 1 + i for i in path)]]
                for reader in self.speculation.readers:
                    reader.read(seq.seq_id, start - 1, features)
        if candidate.finish_reason:
            if self.speculation is not None and candidate.is_drafted:
                self.speculation.rest(seq.seq_id)
            self.interpreter.finish_candidate(candidate)
        else:
            seq.logits_from = len(seq.tokens) - 1

    def _accept_token(self, candidate: Candidate, token: SampledToken) -> bool:
        """Take one drawn token, and what it forces; False when the grammar has given up and the op with it."""
        generation, matcher = candidate.generation, candidate.matcher
        if matcher is not None and (matcher.error is not None or token.token_id < 0):
            self.interpreter.fail_grammar(candidate, matcher.error or "no token may follow")
            return False
        logprob = self._token_logprob(token) if generation.op.params.return_logprob else None
        try:
            length = len(candidate.seq.tokens)
            text = candidate.accept(token.token_id, logprob, self.tokenizer, self.context_len)
            record = candidate.record
            if record is not None:
                record.note("generated", len(candidate.seq.tokens) - length, token)
            self._stream(candidate, text, "generated")
            if not candidate.finish_reason and candidate.matcher is not None and self.config.jump_forward:
                forced = candidate.matcher.forced_tokens()
                if forced:
                    length = len(candidate.seq.tokens)
                    self._stream(candidate, candidate.accept_forced(forced, self.context_len), "forced")
                    if record is not None:
                        record.note("forced", len(candidate.seq.tokens) - length)
        except GrammarError as error:  # a stop pattern that has grown too large
            self.interpreter.fail_grammar(candidate, str(error))
            return False
        return True

    def _stream(self, candidate: Candidate, text: str, origin: str) -> None:
        delta = candidate.generation.delta(candidate, text, origin=origin)
        if delta is not None:
            self._send(candidate.generation.owner.program.key[0], delta)

    def _token_logprob(self, token: SampledToken) -> TokenLogprob:
        show = self.tokenizer.decode
        top = tuple((i, p, show([i], skip_special=False)) for i, p in token.top)
        return TokenLogprob(token.token_id, token.logprob, show([token.token_id], skip_special=False), top)

    def _want_prompt_logprobs(self, flight: Flight, candidate: Candidate, row: PlanRow, span: slice) -> None:
        """``span``: which logits are those after the row's last tokens; the prompt's own next are looked up in them."""
        params = candidate.generation.op.params
        ids = candidate.seq.tokens.ids
        start = row.tokens_end - (span.stop - span.start)
        if start == 0 and not candidate.prompt_logprobs and params.logprob_start_len == 0:
            text = self.tokenizer.decode([int(ids[0])], skip_special=False)
            candidate.prompt_logprobs.append(TokenLogprob(int(ids[0]), None, text))
        targets = ids[start + 1 : min(row.tokens_end + 1, candidate.prompt_len)].tolist()
        if not targets:
            return
        part = flight.logits.whole()[span][: len(targets)]
        tensors = [self.executor.logprobs_of(part, np.array(targets))]
        if params.top_logprobs_num:
            tensors += self.executor.top_logprobs(part, params.top_logprobs_num)

        def take(values: list[torch.Tensor]) -> None:
            tops: list[list[tuple[int, float]]] = [[]] * len(targets)
            if len(values) > 1:
                pairs = zip(values[1].tolist(), values[2].tolist(), strict=True)
                tops = [list(zip(top_ids, logprobs, strict=True)) for top_ids, logprobs in pairs]
            for token_id, value, top in zip(targets, values[0].tolist(), tops, strict=True):
                candidate.prompt_logprobs.append(self._token_logprob(SampledToken(token_id, value, top)))

        flight.want(tensors, take)

    def _want_scores(self, flight: Flight, score_row: ScoreRow, row: PlanRow, span: slice) -> None:
        """``span``: which logits are those of the row's last positions."""
        part = flight.logits.whole()[span]
        seq = score_row.seq
        tokens, start = seq.tokens.ids, row.end - row.num_logits
        targets = tokens[start + 1 : start + 1 + len(part)]
        last_ids = list(score_row.last) if row.end == len(tokens) else []
        tensors = []
        if len(targets):
            tensors.append(self.executor.logprobs_of(part[: len(targets)], targets))
        if last_ids:
            tensors.append(self.executor.logprobs_of(part[-1:].expand(len(last_ids), -1), np.array(last_ids)))

        def take(values: list[torch.Tensor]) -> None:
            if self.interpreter.live.get(row.seq_id) is not seq:
                return  # cancelled meanwhile
            if len(targets):
                score_row.take_inner(start + 1, values[0].tolist())
            if last_ids:
                score_row.last = dict(zip(last_ids, values[-1].tolist(), strict=True))
                self.interpreter.finish_score_row(score_row)

        flight.want(tensors, take)

    # -- for tests and the idle loop ----------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise AssertionError if a slot is lost, taken twice, or held by nobody."""
        self.cache.check()
        if not self.has_work and not self.interpreter.programs:
            leased = self.cache.num_leased
            assert leased == 0, f"{leased} slots are leased while no program runs"

    def info(self) -> dict[str, Any]:
        return self.report.info(self)
