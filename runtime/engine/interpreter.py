"""Programs as they run: ops taken in order, turned into sequences for the scheduler, and answered once each.

Knows text, tokens and grammars; never touches a tensor. The engine calls it with what a step computed.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING

from ...constrained.spec import GrammarSpec
from ...protocol.errors import (
    Cancelled,
    DeadlineExceeded,
    DependencyFailed,
    ErrorInfo,
    InternalError,
    InvalidGrammar,
    InvalidRequest,
    Overloaded,
    PhloemError,
    PromptTooLong,
)
from ...protocol.messages import (
    Accepted,
    Cancel,
    Closed,
    Done,
    Failed,
    GenMeta,
    Limits,
    ProgramSettings,
    ProgramStats,
    Rejected,
    RuntimeMessage,
    SelectMeta,
    Submit,
)
from ...protocol.ops import Close, Fork, Gen, Join, Mark, Pin, Ref, Rollback, Score, Select, Special, Text
from ..scheduler import PoolTooSmall, Scheduler, Sequence, TokenBuffer
from .gen_ops import GenOps, WaitingForGrammar
from .generation import Candidate, Generation
from .program import OpState, Program, SequenceState
from .score_ops import ScoreOps
from .scoring import ScoreRow, Scoring
from .submission import find_faults
from .usage import Usage

if TYPE_CHECKING:
    from ...constrained import CompiledGrammar
    from ..tokenizer import Tokenizer

log = logging.getLogger(__name__)

ProgramKey = tuple[bytes, str]


class Interpreter:
    """Owns every program. ``send`` takes (client, message); ``compile_grammar`` starts a compilation."""

    def __init__(
        self,
        scheduler: Scheduler,
        tokenizer: Tokenizer,
        *,
        send: Callable[[bytes, RuntimeMessage], None],
        compile_grammar: Callable[[GrammarSpec], Future[CompiledGrammar]],
        context_len: int,
        vocab_size: int,
        limits: Limits,
        max_waiting: int,
        adapters: tuple[str, ...] = (),
        seed: int,
        clock: Callable[[], float],
        may_draft: bool = False,
    ) -> None:
        """``may_draft``: whether tokens may be guessed ahead; a program or a generation may refuse."""
        self.scheduler = scheduler
        self.tokenizer = tokenizer
        self.send = send
        self.context_len = context_len
        self.vocab_size = vocab_size
        self.limits = limits
        self.max_waiting = max_waiting
        self.adapters = adapters
        self.clock = clock
        self.programs: dict[ProgramKey, Program] = {}
        self.live: dict[int, Sequence] = {}
        self.usage = Usage()
        self._ready: deque[SequenceState] = deque()
        self._num_coming = 0  # sequences with something to run, accepted since the scheduler was told last
        self._next_seq_id = 0
        self.generations = GenOps(self, compile_grammar=compile_grammar, seed=seed, may_draft=may_draft)
        self.scorings = ScoreOps(self)

    # -- what clients say ---------------------------------------------------------------------------------------------

    def submit(self, client: bytes, submit: Submit) -> None:
        key = (client, submit.program)
        program = self.programs.get(key)
        faults = find_faults(
            submit,
            program,
            limits=self.limits,
            vocab_size=self.vocab_size,
            adapters=self.adapters,
            check_stop=self.tokenizer.stop_pattern,
        )
        if not faults and (num_waiting := self._num_in_line()) >= self.max_waiting:
            message = f"{num_waiting:,} sequences are waiting already (max_waiting); try again later"
            faults = [(-1, Overloaded(message, retry_after_s=self.scheduler.drained_in_s()).info())]
        if faults:
            ids = [op.op for op in submit.ops]
            self.send(client, Rejected(submit.program, [error for _, error in faults], ids))
            return
        if program is None:
            settings = submit.settings or ProgramSettings()
            rows = self.usage.begin(tenant=settings.tenant, name=settings.name)
            program = Program(key, settings, now_s=self.clock(), usage_rows=rows)
            self.programs[key] = program
        self.send(client, Accepted(submit.program))
        program.counters.submits += 1
        program.counters.ops += len(submit.ops)
        for op in submit.ops:
            owner = program.sequences.get(op.seq) or self._new_state(program, op.seq)
            op_state = OpState(op, program.next_order)
            program.next_order += 1
            program.ops[op.op] = op_state
            owner.queue.append(op_state)
            self._ready.append(owner)
            if isinstance(op, Fork):
                for child in op.children:
                    self._new_state(program, child, unborn=True)
            elif isinstance(op, Gen) and op.grammar is not None:
                self.generations.compile_grammar(op.grammar)
        self._num_coming += len({op.seq for op in submit.ops if isinstance(op, Gen | Select | Score)})
        if not submit.ops:
            self._close_if_over(program)

    def _num_in_line(self) -> int:
        """Sequences that wait, and those accepted since the last step for which there is no free row."""
        num_free = self.scheduler.config.max_running - len(self.scheduler.running)
        return self.scheduler.num_waiting + max(0, self._num_coming - num_free)

    def cancel(self, client: bytes, cancel: Cancel) -> None:
        program = self.programs.get((client, cancel.program))
        if program is None:
            return  # it ended while the message travelled
        if cancel.op is not None:
            op_state = program.ops.get(cancel.op)
            # A Close goes on: without it the sequence, and its program, would never end.
            if op_state is not None and op_state.status == "queued" and not isinstance(op_state.op, Close):
                owner = program.sequences[op_state.op.seq]
                self.fail_op(owner, op_state, Cancelled(f"op {cancel.op} was cancelled"))
        elif cancel.seq is not None:
            owner_or_none = program.sequences.get(cancel.seq)
            if owner_or_none is not None:
                self._fail_sequence(owner_or_none, Cancelled(f"sequence {cancel.seq} was cancelled"))
        else:
            self.end_program(program, Cancelled(f"program {program.id!r} was cancelled"))

    def drop_client(self, client: bytes) -> None:
        for program in [p for p in self.programs.values() if p.key[0] == client]:
            self.end_program(program, Cancelled("the client has gone"))

    def end_program(self, program: Program, error: PhloemError) -> None:
        """Fail whatever has not ended, then close."""
        for owner in program.sequences.values():
            self._fail_sequence(owner, error, close=True)
        self._close_if_over(program)

    def check_deadlines(self) -> None:
        now_s = self.clock()
        late = [p for p in self.programs.values() if p.deadline_s is not None and now_s >= p.deadline_s]
        for program in late:
            after_s = program.settings.deadline_s
            self.end_program(program, DeadlineExceeded(f"program {program.id!r} passed its deadline of {after_s} s"))

    # -- ops in order -------------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Run ops until every sequence waits: for the model, a grammar, another sequence, or more ops."""
        self.generations.poll_grammars()
        while self._ready:
            owner = self._ready.popleft()
            try:
                self._advance_sequence(owner)
            except Exception as error:  # one program's trouble must not become another's
                log.exception("op of program %s failed", owner.program.id)
                self._fail_sequence(owner, InternalError(f"{type(error).__name__}: {error}"))
        self._num_coming = 0

    def _advance_sequence(self, owner: SequenceState) -> None:
        while owner.queue and owner.activity is None and not owner.unborn:
            op_state = owner.queue[0]
            op = op_state.op
            if owner.error is not None and owner.error_order < op_state.order and not isinstance(op, Close):
                cause = owner.error
                self.fail_op(owner, op_state, DependencyFailed(f"an earlier op failed: {cause}"))
                continue
            match op:
                case Text():
                    owner.append_text(op.text)
                    self.finish_op(owner, op_state)
                case Special():
                    owner.append_special(op.ids, self.tokenizer)
                    self.finish_op(owner, op_state)
                case Ref():
                    if not self._paste(owner, op_state, op):
                        return
                case Gen():
                    self.generations.start(owner, op_state)
                case Select() | Score():
                    self.scorings.start(owner, op_state)
                case Fork():
                    self._fork(owner, op_state, op)
                case Join():
                    if not self._join(owner, op_state, op):
                        return
                case Mark():
                    self._mark(owner, op_state, op)
                case Rollback():
                    self._rollback(owner, op_state, op)
                case Pin():
                    self._pin(owner, op_state, op)
                case Close():
                    owner.closed = True
                    text = owner.text
                    self.release(owner.seq)
                    self.finish_op(owner, op_state, text)
                    self._close_if_over(owner.program)
                case _:
                    raise AssertionError(op)

    def _paste(self, owner: SequenceState, op_state: OpState, op: Ref) -> bool:
        source = owner.program.ops[op.source]
        if source.status == "queued":
            source.waiters.append(owner)
            return False
        if source.status == "failed":
            self.fail_op(owner, op_state, DependencyFailed(f"op {op.source}, which this one pastes: {source.error}"))
        elif op.index >= len(source.texts):
            message = f"index {op.index}: op {op.source} has {len(source.texts)} texts"
            self.fail_op(owner, op_state, InvalidRequest(message))
        else:
            text = source.texts[op.index]
            owner.append_text(text)
            self.finish_op(owner, op_state, text, texts=(text,))
        return True

    def _fork(self, owner: SequenceState, op_state: OpState, op: Fork) -> None:
        owner.flush_text(self.tokenizer)
        self.scheduler.commit(owner.seq)
        for child_id in op.children:
            child = owner.program.sequences[child_id]
            if child.unborn:
                child.start_as(owner)
                self._ready.append(child)
        self.finish_op(owner, op_state)

    def _join(self, owner: SequenceState, op_state: OpState, op: Join) -> bool:
        children = [owner.program.sequences[i] for i in op.children]
        if any(self._is_before(child, op_state.order) for child in children):
            if owner not in owner.program.joining:
                owner.program.joining.append(owner)
            return False
        if owner in owner.program.joining:
            owner.program.joining.remove(owner)
        if op.mode == "concate_and_append":
            for child in children:
                if child.error is not None and child.error_order < op_state.order:
                    error = DependencyFailed(f"sequence {child.id}, which is joined: {child.error}")
                    self.fail_op(owner, op_state, error)
                    return True
            for child in children:
                if child.fork_tokens < 0:  # its first token holds text of before the fork
                    owner.append_text(child.text_since(child.fork_text))
                    continue
                child.flush_text(self.tokenizer)
                ids = child.seq.tokens.ids[child.fork_tokens :].tolist()
                owner.append_tokens(ids, child.text_since(child.fork_text), "generated", self.tokenizer)
        self.finish_op(owner, op_state)
        return True

    @staticmethod
    def _is_before(child: SequenceState, order: int) -> bool:
        """True while ``child`` still has ops that were submitted before ``order``."""
        busy = child.unborn or child.activity is not None
        return (busy and not child.closed) or bool(child.queue and child.queue[0].order < order)

    def _mark(self, owner: SequenceState, op_state: OpState, op: Mark) -> None:
        if op.begin is None:
            owner.marks[op.op] = owner.text_end
            self.finish_op(owner, op_state)
        elif op.begin in owner.marks:
            text = owner.text_since(owner.marks[op.begin])
            self.finish_op(owner, op_state, text, texts=(text,))
        else:
            self.fail_op(owner, op_state, InvalidRequest(f"mark {op.begin} is not of sequence {owner.id}"))

    def _rollback(self, owner: SequenceState, op_state: OpState, op: Rollback) -> None:
        position = owner.marks.get(op.to)
        if position is None or position > owner.text_end:
            self.fail_op(owner, op_state, InvalidRequest(f"mark {op.to} is not of sequence {owner.id}"))
            return
        num_segments, num_tokens, pending = owner.rollback_point(position)
        del owner.segments[num_segments:]
        owner.text_len = position - len(pending)
        owner.pending_text = pending
        self.scheduler.truncate(owner.seq, num_tokens)
        owner.num_traced = min(owner.num_traced, num_tokens)
        self.finish_op(owner, op_state)

    def _pin(self, owner: SequenceState, op_state: OpState, op: Pin) -> None:
        owner.flush_text(self.tokenizer)
        self.scheduler.commit(owner.seq)
        cache = self.scheduler.cache
        pinned = cache.pin(owner.seq.tokens.ids, ttl_s=op.ttl_s, namespace=owner.seq.namespace)
        self.finish_op(owner, op_state, pinned)

    # -- beginnings and ends ------------------------------------------------------------------------------------------

    def has_room(self, owner: SequenceState, op_state: OpState, *, extra: int) -> bool:
        """Tokenize what is pending and see that it fits the context with ``extra`` more; else the op fails."""
        owner.flush_text(self.tokenizer)
        if not len(owner.seq.tokens):
            start = self.tokenizer.bos_id
            owner.seq.tokens.append(min(self.tokenizer.eos_ids) if start is None else start)
        length = len(owner.seq.tokens)
        if length + extra > self.context_len:
            message = (
                f"{length:,} tokens of prompt and at least {extra} to come, but the context is {self.context_len:,}; "
                "shorten the prompt or start with a larger --max-seq-len"
            )
            self.fail_op(owner, op_state, PromptTooLong(message))
            return False
        return True

    def _new_state(self, program: Program, id: int, *, unborn: bool = False) -> SequenceState:
        state = SequenceState(program, id, self.new_sequence(program, TokenBuffer()), unborn=unborn)
        program.sequences[id] = state
        return state

    def new_sequence(self, program: Program, tokens: TokenBuffer) -> Sequence:
        self._next_seq_id += 1
        seq = Sequence(
            self._next_seq_id,
            tokens,
            program=program.cache_key,
            kind=program.usage_rows[1],
            namespace=program.namespace,
            priority=program.settings.priority,
            tenant=program.settings.tenant,
            deadline_s=math.inf if program.deadline_s is None else program.deadline_s,
            adapter=self.adapters.index(program.settings.adapter) if program.settings.adapter else -1,
        )
        self.live[seq.seq_id] = seq
        return seq

    def release(self, seq: Sequence) -> None:
        self.scheduler.remove(seq)
        self.live.pop(seq.seq_id, None)

    def finish_op(
        self,
        owner: SequenceState,
        op_state: OpState,
        value: object = None,
        *,
        meta: GenMeta | SelectMeta | None = None,
        texts: tuple[str, ...] = (),
    ) -> None:
        assert op_state.status == "queued" and owner.queue[0] is op_state
        owner.queue.popleft()
        op_state.status = "done"
        op_state.texts = texts
        self.send(owner.program.key[0], Done(owner.program.id, op_state.op.op, value, meta))
        self._wake(owner, op_state)

    def fail_op(self, owner: SequenceState, op_state: OpState, error: PhloemError) -> None:
        """End one op as failed; the sequence's later ops will fail for its sake."""
        assert op_state.status == "queued"
        partial: tuple[str, ...] = ()
        if owner.queue and owner.queue[0] is op_state:
            partial = self._stop_activity(owner)
        owner.queue.remove(op_state)
        op_state.status = "failed"
        op_state.error = error
        if owner.error is None or op_state.order < owner.error_order:
            owner.error, owner.error_order = error, op_state.order
        info: ErrorInfo = error.info()
        self.send(owner.program.key[0], Failed(owner.program.id, op_state.op.op, info, partial))
        if isinstance(op_state.op, Fork):
            for child_id in op_state.op.children:
                child = owner.program.sequences[child_id]
                if child.unborn:
                    child.unborn = False
                    child.error = DependencyFailed(f"the fork that makes sequence {child_id} failed: {error}")
                    child.error_order = op_state.order
                    self._ready.append(child)
        self._wake(owner, op_state)
        self._ready.append(owner)

    def _fail_sequence(self, owner: SequenceState, error: PhloemError, *, close: bool = False) -> None:
        owner.unborn = False
        if owner.error is None:
            owner.error = error
        owner.error_order = -1  # nothing that is still to be done can go well
        while owner.queue:
            op_state = owner.queue[0]
            if isinstance(op_state.op, Close) and not close:
                break
            self.fail_op(owner, op_state, error)
        if close and not owner.closed:
            owner.closed = True
            self.release(owner.seq)
        self._ready.append(owner)

    def _stop_activity(self, owner: SequenceState) -> tuple[str, ...]:
        """Take the op in progress off the schedule; what it had generated so far."""
        activity, owner.activity = owner.activity, None
        match activity:
            case Generation():
                return self.generations.stop(activity)
            case Scoring():
                self.scorings.stop(activity)
            case WaitingForGrammar():
                self.generations.compiling.remove(owner)
        return ()

    def fail_unschedulable(self, seq: Sequence, error: PoolTooSmall) -> None:
        """The scheduler found that ``seq`` can never run."""
        tag = seq.tag
        assert isinstance(tag, Candidate | ScoreRow)
        owner = tag.generation.owner if isinstance(tag, Candidate) else tag.scoring.owner
        message = f"{error}; shorten the prompt or start with a larger --num-slots"
        self.fail_op(owner, owner.queue[0], PromptTooLong(message))

    def fail_grammar(self, candidate: Candidate, reason: str) -> None:
        """The grammar gave up while ``candidate`` was written: its op fails and keeps what there is."""
        owner = candidate.generation.owner
        message = f"the grammar could not be followed: {reason}; simplify it"
        self.fail_op(owner, owner.queue[0], InvalidGrammar(message))

    def make_ready(self, owner: SequenceState) -> None:
        """``owner``'s next op can be looked at."""
        self._ready.append(owner)

    def _wake(self, owner: SequenceState, op_state: OpState) -> None:
        self._ready.extend(op_state.waiters)
        op_state.waiters.clear()
        if owner.program.joining:
            self._ready.extend(owner.program.joining)

    def _close_if_over(self, program: Program) -> None:
        if program.is_over and program.key in self.programs:
            del self.programs[program.key]
            self.usage.end(program.usage_rows, program.counters)
            stats = _stats(program)
            self.send(program.key[0], Closed(program.id, stats))
            self.scheduler.end_program(program.cache_key)


def _stats(program: Program) -> ProgramStats:
    counters = program.counters
    return ProgramStats(**{name: getattr(counters, name) for name in ProgramStats.__struct_fields__})
