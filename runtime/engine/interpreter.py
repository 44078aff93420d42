"""Programs as they run: submits are checked, and ops are carried out in order until each sequence has to wait."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ...protocol.errors import (
    Cancelled,
    DependencyFailed,
    InternalError,
    InvalidRequest,
    LimitExceeded,
    Overloaded,
    PhloemError,
    from_info,
)
from ...protocol.messages import Accepted, Cancel, Limits, ProgramSettings, Rejected, Submit
from ...protocol.ops import (
    Close,
    Embedding,
    Fork,
    Gen,
    Image,
    Join,
    Mark,
    Pin,
    Ref,
    Rollback,
    Score,
    Select,
    Special,
    Text,
)
from ..tokenizer.tokenizer import LONG_TEXT
from .program import OpState, SequenceState
from .submission import find_faults

if TYPE_CHECKING:
    from .embedding_ops import EmbeddingOps
    from .gen_ops import GenOps
    from .image_ops import ImageOps
    from .programs import Programs
    from .score_ops import ScoreOps

log = logging.getLogger(__name__)


RETURNED_SUBMITS = 4  # values that repeat a program's text have as many characters as so many of the largest submits


class Interpreter:
    """Carries out the ops of ``programs``.

    Ops that need the model go to ``generations``, ``scorings`` and ``embeddings``.
    """

    def __init__(
        self,
        programs: Programs,
        generations: GenOps,
        scorings: ScoreOps,
        embeddings: EmbeddingOps,
        *,
        vocab_size: int,
        limits: Limits,
        max_waiting: int,
        images: ImageOps | None = None,
    ) -> None:
        """``max_waiting``: sequences that may wait for a free row; submits beyond it are rejected as Overloaded.
        ``images``: None for a model that takes none.
        """
        self._programs = programs
        self._generations = generations
        self._scorings = scorings
        self._embeddings = embeddings
        self._images = images
        self._scheduler = programs.scheduler
        self._tokenizer = programs.tokenizer
        self._vocab_size = vocab_size
        self._limits = limits
        self._max_waiting = max_waiting
        self._num_coming = 0  # sequences with something to run, accepted since the last ``advance``

    # -- messages of clients ------------------------------------------------------------------------------------------

    def submit(self, client: bytes, submit: Submit) -> None:
        key = (client, submit.program)
        program = self._programs.by_key.get(key)
        faults = find_faults(
            submit,
            program,
            limits=self._limits,
            vocab_size=self._vocab_size,
            adapters=self._programs.adapters.names,
            check_stop=self._tokenizer.stop_pattern,
            takes_images=self._images is not None,
        )
        if not faults and (num_waiting := self._num_in_line()) >= self._max_waiting:
            message = f"{num_waiting:,} sequences are waiting already (max_waiting); try again later"
            faults = [(-1, Overloaded(message, retry_after_s=self._scheduler.drained_in_s()).info())]
        if faults:
            ids = [op.op for op in submit.ops]
            self._programs.send(client, Rejected(submit.program, [error for _, error in faults], ids))
            return
        if program is None:
            program = self._programs.begin(key, submit.settings or ProgramSettings())
        self._programs.send(client, Accepted(submit.program))
        program.stats.submits += 1
        program.stats.ops += len(submit.ops)
        for op in submit.ops:
            owner = program.sequences.get(op.seq) or self._programs.new_state(program, op.seq)
            op_state = OpState(op, program.next_order)
            program.next_order += 1
            program.ops[op.op] = op_state
            owner.queue.append(op_state)
            self._programs.ready.append(owner)
            if isinstance(op, Fork):
                for child in op.children:
                    self._programs.new_state(program, child, unborn=True)
            elif isinstance(op, Gen) and op.grammar is not None:
                self._generations.compile_grammar(op.grammar)
        for op_id, error in submit.failed.items():
            op_state = program.ops[op_id]
            self._programs.fail_op(program.sequences[op_state.op.seq], op_state, from_info(error))
        self._num_coming += len({op.seq for op in submit.ops if isinstance(op, Gen | Select | Score | Embedding)})
        if not submit.ops:
            self._programs.close_if_over(program)

    def _num_in_line(self) -> int:
        """Sequences that wait, and sequences accepted since the last step for which no row is free."""
        num_free = self._scheduler.config.max_running - len(self._scheduler.running)
        return self._scheduler.num_waiting + max(0, self._num_coming - num_free)

    def cancel(self, client: bytes, cancel: Cancel) -> None:
        program = self._programs.by_key.get((client, cancel.program))
        if program is None:
            return  # the program ended before the message arrived
        if cancel.op is not None:
            op_state = program.ops.get(cancel.op)
            # A Close is not cancelled: without it the sequence and its program would never end.
            if op_state is not None and op_state.status == "queued" and not isinstance(op_state.op, Close):
                owner = program.sequences[op_state.op.seq]
                self._programs.fail_op(owner, op_state, Cancelled(f"op {cancel.op} was cancelled"))
        elif cancel.seq is not None:
            owner_or_none = program.sequences.get(cancel.seq)
            if owner_or_none is not None:
                self._programs.fail_sequence(owner_or_none, Cancelled(f"sequence {cancel.seq} was cancelled"))
        else:
            self._programs.end_program(program, Cancelled(f"program {program.id!r} was cancelled"))

    # -- ops in order -------------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Run ops until every sequence waits: for the model, a grammar, another sequence, or more ops."""
        self._generations.poll_grammars()
        self._programs.beside.poll(self._fail_beside)
        if self._images is not None:
            self._images.poll()
        while self._programs.ready:
            owner = self._programs.ready.popleft()
            try:
                self._advance_sequence(owner)
            except Exception as error:  # a fault in one program must not stop the others
                log.exception("op of program %s failed", owner.program.id)
                self._programs.fail_sequence(owner, InternalError(f"{type(error).__name__}: {error}"))
        self._num_coming = 0

    def _fail_beside(self, owner: SequenceState, error: BaseException) -> None:
        """Work for ``owner`` on a thread has failed."""
        if not isinstance(error, PhloemError):
            log.error("an op of program %s failed", owner.program.id, exc_info=error)
            error = InternalError(f"{type(error).__name__}: {error}")
        self._programs.fail_sequence(owner, error)

    def _is_tokenized(self, owner: SequenceState) -> bool:
        """False for a long pending text, which is tokenized on a thread: ``owner`` then waits for it."""
        if owner.stop_op is not None:
            return False
        if owner.pending_len <= LONG_TEXT:
            return True
        text, at_start, tokenizer = owner.pending_text, owner.is_at_start, self._tokenizer
        self._programs.beside.begin(
            owner,
            lambda is_wanted: tokenizer.encode(text, at_start=at_start),
            lambda ids: owner.take_encoded(ids, tokenizer),
        )
        return False

    def _advance_sequence(self, owner: SequenceState) -> None:
        while owner.queue and owner.stop_op is None and not owner.unborn:
            op_state = owner.queue[0]
            op = op_state.op
            if owner.error is not None and owner.error_order < op_state.order and not isinstance(op, Close):
                cause = owner.error
                self._programs.fail_op(owner, op_state, DependencyFailed(f"an earlier op failed: {cause}"))
                continue
            if not isinstance(op, Text | Ref | Mark | Rollback | Close):
                num_ids = len(op.ids) if isinstance(op, Special) else 0
                if (too_long := self._programs.too_long(owner, num_ids=num_ids)) is not None:
                    self._programs.fail_op(owner, op_state, too_long)
                    continue
                if not self._is_tokenized(owner):
                    return
            match op:
                case Text():
                    owner.append_text(op.text)
                    self._programs.finish_op(owner, op_state)
                case Special():
                    owner.append_special(op.ids, self._tokenizer)
                    self._programs.finish_op(owner, op_state)
                case Image():
                    assert self._images is not None, "refused at the submit"
                    self._images.start(owner, op_state, op)
                case Ref():
                    if not self._paste(owner, op_state, op):
                        return
                case Gen():
                    self._generations.start(owner, op_state)
                case Select() | Score():
                    self._scorings.start(owner, op_state)
                case Embedding():
                    self._embeddings.start(owner, op_state)
                case Fork():
                    self._fork(owner, op_state, op)
                case Join():
                    if not self._join(owner, op_state, op):
                        if owner not in owner.program.joining:
                            owner.program.joining.append(owner)
                        return
                    if owner in owner.program.joining:
                        owner.program.joining.remove(owner)
                case Mark():
                    self._mark(owner, op_state, op)
                case Rollback():
                    self._rollback(owner, op_state, op)
                case Pin():
                    self._pin(owner, op_state, op)
                case Close():
                    owner.closed = True
                    text = owner.text if self._may_return(owner, owner.text_end) else None
                    self._programs.release(owner.seq)
                    self._programs.finish_op(owner, op_state, text)
                    self._programs.close_if_over(owner.program)
                case _:
                    raise AssertionError(op)

    def _paste(self, owner: SequenceState, op_state: OpState, op: Ref) -> bool:
        source = owner.program.ops[op.source]
        if source.status == "queued":
            source.waiters.append(owner)
            return False
        if source.status == "failed":
            self._programs.fail_op(
                owner, op_state, DependencyFailed(f"op {op.source}, which this one pastes: {source.error}")
            )
        elif op.index >= len(source.texts):
            message = f"index {op.index}: op {op.source} has {len(source.texts)} texts"
            self._programs.fail_op(owner, op_state, InvalidRequest(message))
        else:
            text = source.texts[op.index]
            if (too_long := self._programs.too_long(owner, num_chars=len(text))) is not None:
                self._programs.fail_op(owner, op_state, too_long)
            elif not self._may_return(owner, len(text)):
                self._programs.fail_op(owner, op_state, self._returned_too_much())
            else:
                owner.append_text(text)
                self._programs.finish_op(owner, op_state, text, texts=(text,))
        return True

    def _may_return(self, owner: SequenceState, num_chars: int) -> bool:
        """Count the characters of a value, and say whether the program's values may have so many in all.

        Each such op can repeat the whole text, so without a limit a small program would be answered with gigabytes.
        """
        owner.program.returned_chars += num_chars
        return owner.program.returned_chars <= RETURNED_SUBMITS * self._limits.max_submit_bytes

    def _returned_too_much(self) -> LimitExceeded:
        most = RETURNED_SUBMITS * self._limits.max_submit_bytes
        text = f"the values of this program's marks, pastes and closes have more than {most:,} characters"
        return LimitExceeded(f"{text}; mark shorter parts, or run several programs")

    def _fork(self, owner: SequenceState, op_state: OpState, op: Fork) -> None:
        owner.flush_text(self._tokenizer)
        self._scheduler.commit(owner.seq)
        for child_id in op.children:
            child = owner.program.sequences[child_id]
            if child.unborn:
                child.start_as(owner)
                self._programs.ready.append(child)
        self._programs.finish_op(owner, op_state)

    def _join(self, owner: SequenceState, op_state: OpState, op: Join) -> bool:
        children = [owner.program.sequences[i] for i in op.children]
        if any(self._is_before(child, op_state.order) for child in children):
            return False
        if op.mode == "concate_and_append":
            for child in children:
                if child.error is not None and child.error_order < op_state.order:
                    error = DependencyFailed(f"sequence {child.id}, which is joined: {child.error}")
                    self._programs.fail_op(owner, op_state, error)
                    return True
            tokenized = [self._is_tokenized(child) for child in children]  # all of them begin
            if not all(tokenized):
                return False
            for child in children:
                if (too_long := self._programs.too_long(owner)) is not None:
                    self._programs.fail_op(owner, op_state, too_long)
                    return True
                if child.fork_tokens < 0:  # its first token holds text of before the fork
                    owner.append_text(child.text_since(child.fork_text))
                    continue
                child.flush_text(self._tokenizer)
                ids = child.seq.tokens.ids[child.fork_tokens :].tolist()
                owner.append_tokens(ids, child.text_since(child.fork_text), "generated", self._tokenizer)
        self._programs.finish_op(owner, op_state)
        return True

    @staticmethod
    def _is_before(child: SequenceState, order: int) -> bool:
        """True while ``child`` still has ops that were submitted before ``order``."""
        busy = child.unborn or child.stop_op is not None
        return (busy and not child.closed) or bool(child.queue and child.queue[0].order < order)

    def _mark(self, owner: SequenceState, op_state: OpState, op: Mark) -> None:
        if op.begin is None:
            owner.marks[op.op] = owner.text_end
            self._programs.finish_op(owner, op_state)
        elif op.begin in owner.marks:
            begin = owner.marks[op.begin]
            if not self._may_return(owner, max(0, owner.text_end - begin)):
                self._programs.fail_op(owner, op_state, self._returned_too_much())
                return
            text = owner.text_since(begin)
            self._programs.finish_op(owner, op_state, text, texts=(text,))
        else:
            self._programs.fail_op(owner, op_state, InvalidRequest(f"mark {op.begin} is not of sequence {owner.id}"))

    def _rollback(self, owner: SequenceState, op_state: OpState, op: Rollback) -> None:
        position = owner.marks.get(op.to)
        if position is None or position > owner.text_end:
            self._programs.fail_op(owner, op_state, InvalidRequest(f"mark {op.to} is not of sequence {owner.id}"))
            return
        num_segments, num_tokens, pending = owner.rollback_point(position)
        del owner.segments[num_segments:]
        owner.text_len = position - len(pending)
        owner.pending_text = pending
        self._scheduler.truncate(owner.seq, num_tokens)
        owner.num_traced = min(owner.num_traced, num_tokens)
        self._programs.finish_op(owner, op_state)

    def _pin(self, owner: SequenceState, op_state: OpState, op: Pin) -> None:
        owner.flush_text(self._tokenizer)
        self._scheduler.commit(owner.seq)
        cache = self._scheduler.cache
        pinned = cache.pin(owner.seq.tokens.ids, ttl_s=op.ttl_s, namespace=owner.seq.namespace)
        self._programs.finish_op(owner, op_state, pinned)
