"""Every program that runs on an engine: its sequences, and the one message with which each of its ops ends."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from ...protocol.errors import (
    Cancelled,
    DeadlineExceeded,
    DependencyFailed,
    PhloemError,
    PromptTooLong,
)
from ...protocol.messages import (
    Closed,
    Done,
    Failed,
    OpMeta,
    ProgramSettings,
    RuntimeMessage,
)
from ...protocol.ops import Close, Fork
from ..scheduler import Scheduler, Sequence, TokenBuffer
from .adapters import Adapters
from .beside import Beside
from .program import OpState, Program, SequenceState
from .usage import Usage

if TYPE_CHECKING:
    from ..tokenizer import Tokenizer

ProgramKey = tuple[bytes, str]  # client, program id


class Programs:
    """Owns the programs and their sequences. ``send`` takes (client, message).

    ``by_key`` holds the programs that have not closed, ``live`` every sequence that the scheduler may know by its id.
    ``ready`` holds sequences whose next op the interpreter has to look at.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        tokenizer: Tokenizer,
        *,
        send: Callable[[bytes, RuntimeMessage], None],
        context_len: int,
        adapters: Adapters,
        clock: Callable[[], float],
    ) -> None:
        self.scheduler = scheduler
        self.tokenizer = tokenizer
        self.send = send
        self.context_len = context_len
        self.adapters = adapters
        self.clock = clock
        self.by_key: dict[ProgramKey, Program] = {}
        self.live: dict[int, Sequence] = {}
        self.ready: deque[SequenceState] = deque()
        self.beside = Beside(self.ready)
        self.usage = Usage()
        self._next_seq_id = 0

    # -- beginnings ---------------------------------------------------------------------------------------------------

    def begin(self, key: ProgramKey, settings: ProgramSettings) -> Program:
        rows = self.usage.begin(tenant=settings.tenant, name=settings.name)
        adapter = self.adapters.begin(settings.adapter)
        program = self.by_key[key] = Program(key, settings, now_s=self.clock(), usage_rows=rows, adapter=adapter)
        return program

    def new_state(self, program: Program, id: int, *, unborn: bool = False) -> SequenceState:
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
            adapter=program.adapter,
        )
        self.live[seq.seq_id] = seq
        return seq

    def release(self, seq: Sequence) -> None:
        self.scheduler.remove(seq)
        self.live.pop(seq.seq_id, None)
        seq.tag = None

    def too_long(self, owner: SequenceState, *, num_ids: int = 0, num_chars: int = 0) -> PromptTooLong | None:
        """The error of a sequence that cannot fit the context with so many more tokens or characters, before it is
        tokenized.
        """
        length = len(owner.seq.tokens) + num_ids
        if length > self.context_len:
            return self._prompt_too_long(length, 0)
        try:
            self.tokenizer.check_length(owner.pending_len + num_chars, self.context_len)
        except PromptTooLong as error:
            return error
        return None

    def _prompt_too_long(self, length: int, extra: int) -> PromptTooLong:
        more = f" and at least {extra} to come" if extra else ""
        return PromptTooLong(
            f"{length:,} tokens of prompt{more}, but the context is {self.context_len:,}; "
            "shorten the prompt or start with a larger --max-seq-len"
        )

    def has_room(self, owner: SequenceState, op_state: OpState, *, extra: int) -> bool:
        """Tokenize the pending text and check that ``extra`` more tokens fit the context; the op fails if not."""
        owner.flush_text(self.tokenizer)
        if not len(owner.seq.tokens):
            start = self.tokenizer.bos_id
            owner.seq.tokens.append(min(self.tokenizer.eos_ids) if start is None else start)
        length = len(owner.seq.tokens)
        if length + extra > self.context_len:
            self.fail_op(owner, op_state, self._prompt_too_long(length, extra))
            return False
        return True

    # -- ends of ops --------------------------------------------------------------------------------------------------

    def finish_op(
        self,
        owner: SequenceState,
        op_state: OpState,
        value: object = None,
        *,
        meta: OpMeta | None = None,
        texts: tuple[str, ...] = (),
    ) -> None:
        assert op_state.status == "queued" and owner.queue[0] is op_state
        owner.queue.popleft()
        op_state.status = "done"
        op_state.texts = texts
        self.send(owner.program.key[0], Done(owner.program.id, op_state.op.op, value, meta))
        self._wake(owner, op_state)

    def fail_op(self, owner: SequenceState, op_state: OpState, error: PhloemError) -> None:
        """Fail one op. Later ops of the sequence fail with DependencyFailed when their turn comes."""
        assert op_state.status == "queued"
        partial: tuple[str, ...] = ()
        if owner.queue and owner.queue[0] is op_state and owner.stop_op is not None:
            stop_op, owner.stop_op = owner.stop_op, None
            partial = stop_op()
        owner.queue.remove(op_state)
        op_state.status = "failed"
        op_state.error = error.with_traceback(None)  # whose frames refer to the op and its sequence
        if owner.error is None or op_state.order < owner.error_order:
            owner.error, owner.error_order = error, op_state.order
        self.send(owner.program.key[0], Failed(owner.program.id, op_state.op.op, error.info(), partial))
        if isinstance(op_state.op, Fork):
            for child_id in op_state.op.children:
                child = owner.program.sequences[child_id]
                if child.unborn:
                    child.unborn = False
                    child.error = DependencyFailed(f"the fork that makes sequence {child_id} failed: {error}")
                    child.error_order = op_state.order
                    self.ready.append(child)
        self._wake(owner, op_state)
        self.ready.append(owner)

    def fail_first(self, owner: SequenceState, error: PhloemError) -> None:
        """Fail the op that ``owner`` is computing."""
        self.fail_op(owner, owner.queue[0], error)

    def fail_sequence(self, owner: SequenceState, error: PhloemError, *, close: bool = False) -> None:
        """Fail every op of ``owner`` up to its Close, or with ``close`` every op, and close it."""
        owner.unborn = False
        if owner.error is None:
            owner.error = error
        owner.error_order = -1  # ops that are submitted later fail too
        while owner.queue:
            op_state = owner.queue[0]
            if isinstance(op_state.op, Close) and not close:
                break
            self.fail_op(owner, op_state, error)
        if close and not owner.closed:
            owner.closed = True
            self.release(owner.seq)
        self.ready.append(owner)

    def _wake(self, owner: SequenceState, op_state: OpState) -> None:
        """Make the sequences ready that wait for ``op_state``, or in a join for any op."""
        self.ready.extend(op_state.waiters)
        op_state.waiters.clear()
        if owner.program.joining:
            self.ready.extend(owner.program.joining)

    # -- ends of programs ---------------------------------------------------------------------------------------------

    def end_program(self, program: Program, error: PhloemError) -> None:
        """Fail every op that has not ended, then close the program."""
        for owner in program.sequences.values():
            self.fail_sequence(owner, error, close=True)
        self.close_if_over(program)

    def close_if_over(self, program: Program) -> None:
        """Send Closed once every sequence of ``program`` is closed."""
        if program.is_over and program.key in self.by_key:
            del self.by_key[program.key]
            self.usage.end(program.usage_rows, program.stats)
            self.send(program.key[0], Closed(program.id, program.stats))
            self.scheduler.end_program(program.cache_key)
            self.adapters.end(program.adapter)
            program.unlink()

    def drop_client(self, client: bytes) -> None:
        for program in [p for p in self.by_key.values() if p.key[0] == client]:
            self.end_program(program, Cancelled("the client has gone"))

    def check_deadlines(self) -> None:
        now_s = self.clock()
        late = [p for p in self.by_key.values() if p.deadline_s is not None and now_s >= p.deadline_s]
        for program in late:
            after_s = program.settings.deadline_s
            self.end_program(program, DeadlineExceeded(f"program {program.id!r} passed its deadline of {after_s} s"))
