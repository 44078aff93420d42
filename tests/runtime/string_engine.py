"""An engine without a model: the ops of the protocol on plain strings, for tests of everything above the engine.

Import it as ``phloem.tests.runtime.string_engine``. Deterministic; a "token" is a word with the blanks before it.
``reply(prompt, op)`` and ``select(prompt, op)`` script its answers:

    reply(prompt, op)  -> the text of every candidate, or a list with one text per candidate
    select(prompt, op) -> index of the winning choice

The chat template is ChatML with invented ids (``SPECIAL_TEXT``); ``Special`` appends their readable form to the prompt.
A ``Gen`` writes one piece of each candidate per step, so streams, cancels and several clients interleave.
Tokens that it brings (``Gen.drawn``) are written anew: they are the same.
A sequence whose op failed accepts no more: its later ops fail as DependencyFailed, only ``Close`` still ends well.
"""

import json
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from phloem.protocol import errors, messages, ops
from phloem.tests.runtime.string_checks import SubmitCheck
from phloem.tests.runtime.string_tokens import CHATML, SPECIAL_TEXT, WORDS, logprobs_of, piece_id, pieces_of

Outbox = list[tuple[bytes, messages.RuntimeMessage]]

CAPABILITIES = ("text", "special", "ref", "gen", "select", "score", "fork", "join", "mark", "rollback", "pin", "close")


def words_for(prompt: str, op: ops.Gen) -> list[str]:
    """The default reply: three words per candidate, fixed by the prompt; the first word of a choices grammar."""
    if op.grammar is not None and op.grammar.kind == "choices":
        return [json.loads(op.grammar.text)[0]] * op.n
    if op.grammar is not None and op.grammar.kind in ("json", "json_schema"):
        return ["{}"] * op.n
    start = zlib.crc32(prompt.encode())
    return [" " + " ".join(WORDS[(start + index * 7 + i) % len(WORDS)] for i in range(3)) for index in range(op.n)]


def first_choice(prompt: str, op: ops.Select) -> int:
    return 0


@dataclass(slots=True)
class _Candidate:
    pieces: list[str]
    finish_reason: str
    matched_stop: str | None


@dataclass(slots=True)
class _Sequence:
    text: str = ""
    fork_at: int = 0
    ancestors: frozenset[int] = frozenset()
    queue: deque[ops.AnyOp] = field(default_factory=deque)
    candidates: list[_Candidate] = field(default_factory=list)  # of the Gen at the head of the queue, once begun
    emitted: int = 0
    prompt_tokens: int = 0
    failure: str = ""
    born: bool = True  # a child is born when its Fork runs
    closing: bool = False  # a Close was accepted: no more ops
    closed: bool = False


@dataclass(slots=True)
class _Program:
    settings: messages.ProgramSettings
    deadline: float | None
    sequences: dict[int, _Sequence] = field(default_factory=dict)
    accepted: dict[int, ops.AnyOp] = field(default_factory=dict)
    awaited: dict[int, list[int]] = field(default_factory=dict)  # Join op -> ops it waits for
    values: dict[int, list[str]] = field(default_factory=dict)  # finished ops that have a text
    points: dict[int, int] = field(default_factory=dict)  # Mark op -> length of the text there
    ended: dict[int, str] = field(default_factory=dict)  # finished op -> "" or why it failed
    submits: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0


class StringEngine:
    """The engine interface of the runtime: what ``serve_engine`` drives."""

    def __init__(
        self,
        *,
        reply: Callable[[str, ops.Gen], str | Sequence[str]] = words_for,
        select: Callable[[str, ops.Select], int] = first_choice,
        model: str = "string",
        context_len: int = 4096,
        template: messages.TemplateInfo = CHATML,
        limits: messages.Limits | None = None,
        heartbeat_s: float = 1.0,
        step_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._reply = reply
        self._select = select
        self._step_s = step_s
        self._clock = clock
        self._limits = limits or messages.Limits()
        self._programs: dict[tuple[bytes, str], _Program] = {}
        self._welcome = messages.Welcome(
            version=messages.PROTOCOL_VERSION,
            model=model,
            model_path="",
            context_len=context_len,
            vocab_size=30100,
            vocab_hash="string",
            template=template,
            limits=self._limits,
            capabilities=CAPABILITIES,
            heartbeat_s=heartbeat_s,
        )
        self._counts = {"submits": 0, "rejected": 0, "ops_done": 0, "ops_failed": 0, "generated_tokens": 0}

    @property
    def has_work(self) -> bool:
        return any(s.queue for p in self._programs.values() for s in p.sequences.values())

    @property
    def programs(self) -> list[str]:
        return [name for _, name in self._programs]

    def welcome(self) -> messages.Welcome:
        return self._welcome

    def drop_client(self, client_id: bytes) -> None:
        for key in [key for key in self._programs if key[0] == client_id]:
            del self._programs[key]

    def fail_all(self, error: errors.PhloemError) -> Outbox:
        """End every program: each unfinished op fails with ``error``."""
        out: Outbox = []
        for key, program in list(self._programs.items()):
            for sequence in program.sequences.values():
                for op in list(sequence.queue):
                    self._fail(key, program, sequence, op, error, out)
                sequence.closed = True
            self._close_if_over(key, program, out)
        return out

    def close(self) -> None:
        self._programs.clear()

    def step(self, inbox: list[tuple[bytes, messages.ClientMessage]]) -> Outbox:
        out: Outbox = []
        for client_id, message in inbox:
            if isinstance(message, messages.Submit):
                self._submit(client_id, message, out)
            elif isinstance(message, messages.Cancel):
                self._cancel(client_id, message, out)
            elif isinstance(message, messages.Query):
                out.append((client_id, self._answer(message)))
            elif isinstance(message, messages.Bye):
                self.drop_client(client_id)
        if self._step_s and self.has_work:
            time.sleep(self._step_s)
        for key in list(self._programs):
            self._advance(key, out)
        return out

    # -- messages -----------------------------------------------------------------------------------------------------

    def _submit(self, client_id: bytes, submit: messages.Submit, out: Outbox) -> None:
        key = (client_id, submit.program)
        program = self._programs.get(key)
        check = SubmitCheck(limits=self._limits, vocab_size=self._welcome.vocab_size)
        if program is not None:
            check.accepted = dict(program.accepted)
            check.lineage = {seq: s.ancestors for seq, s in program.sequences.items()}
            check.closing = {seq for seq, s in program.sequences.items() if s.closing}
        check.run(submit, is_first=program is None)
        if check.faults:
            self._counts["rejected"] += 1
            rejected = messages.Rejected(program=submit.program, errors=check.faults, ops=sorted(check.bad_ops))
            out.append((client_id, rejected))
            return
        if program is None:
            settings = submit.settings or messages.ProgramSettings()
            deadline = None if settings.deadline_s is None else self._clock() + settings.deadline_s
            program = self._programs[key] = _Program(settings, deadline)
        self._counts["submits"] += 1
        program.submits += 1
        for op in submit.ops:
            sequence = program.sequences.setdefault(op.seq, _Sequence())
            if isinstance(op, ops.Fork):
                lineage = sequence.ancestors | {op.seq}
                program.sequences.update({child: _Sequence(ancestors=lineage, born=False) for child in op.children})
            elif isinstance(op, ops.Join):
                program.awaited[op.op] = [o.op for o in program.accepted.values() if o.seq in op.children]
            elif isinstance(op, ops.Close):
                sequence.closing = True
            program.accepted[op.op] = op
            sequence.queue.append(op)
        out.append((client_id, messages.Accepted(program=submit.program)))
        for op_id, error in submit.failed.items():
            op = program.accepted[op_id]
            self._fail(key, program, program.sequences[op.seq], op, errors.from_info(error), out)

    def _cancel(self, client_id: bytes, cancel: messages.Cancel, out: Outbox) -> None:
        key = (client_id, cancel.program)
        program = self._programs.get(key)
        if program is None:
            return  # it ended while the message was under way
        why = errors.Cancelled("cancelled by the client")
        for seq, sequence in program.sequences.items():
            if cancel.seq is not None and cancel.seq != seq:
                continue
            for op in list(sequence.queue):
                if cancel.op is None or cancel.op == op.op:
                    self._fail(key, program, sequence, op, why, out)
            if cancel.op is None:
                sequence.closing = sequence.closed = True
        self._close_if_over(key, program, out)

    def _answer(self, query: messages.Query) -> messages.Answer:
        if query.what == "info":
            return messages.Answer(id=query.id, value={"model": self._welcome.model, "device": "none"})
        if query.what == "metrics":
            return messages.Answer(id=query.id, value=dict(self._counts))
        if query.what == "cache_tree":
            texts = [s.text for p in self._programs.values() for s in p.sequences.values()]
            return messages.Answer(id=query.id, value={"num_slots": 0, "children": texts})
        if query.what == "flush_cache":
            return messages.Answer(id=query.id, value=0)
        message = f"unknown query {query.what!r}; it is one of {', '.join(messages.QUERIES)}"
        return messages.Answer(id=query.id, error=errors.InvalidRequest(message, where="what").info())

    # -- running ------------------------------------------------------------------------------------------------------

    def _advance(self, key: tuple[bytes, str], out: Outbox) -> None:
        program = self._programs[key]
        if program.deadline is not None and self._clock() > program.deadline:
            why = errors.DeadlineExceeded(f"the program's deadline of {program.settings.deadline_s} s has passed")
            for sequence in program.sequences.values():
                for op in list(sequence.queue):
                    self._fail(key, program, sequence, op, why, out)
                sequence.closed = True
        wrote: set[int] = set()  # sequences whose Gen has written its piece of this step
        moved = True
        while moved:
            moved = False
            for seq, sequence in list(program.sequences.items()):
                while sequence.queue and seq not in wrote and self._run(key, program, seq, sequence, wrote, out):
                    moved = True
        self._close_if_over(key, program, out)

    def _run(
        self,
        key: tuple[bytes, str],
        program: _Program,
        seq: int,
        sequence: _Sequence,
        wrote: set[int],
        out: Outbox,
    ) -> bool:
        """Run the op at the head of a sequence; False when it has to wait."""
        op = sequence.queue[0]
        if not sequence.born and not sequence.failure:
            return False
        if sequence.failure and not isinstance(op, ops.Close):
            self._fail(key, program, sequence, op, errors.DependencyFailed(sequence.failure), out)
            return True
        match op:
            case ops.Text():
                self._append(program, sequence, op.text)
                self._done(key, program, sequence, op, None, out)
            case ops.Special():
                self._append(program, sequence, "".join(SPECIAL_TEXT[t] for t in op.ids))
                self._done(key, program, sequence, op, None, out)
            case ops.Ref():
                return self._paste(key, program, sequence, op, out)
            case ops.Gen():
                wrote.add(seq)
                self._generate(key, program, sequence, op, out)
            case ops.Select():
                self._choose(key, program, sequence, op, out)
            case ops.Score():
                self._score(key, program, sequence, op, out)
            case ops.Fork():
                for child in op.children:
                    branch = program.sequences[child]
                    branch.text, branch.fork_at, branch.born = sequence.text, len(sequence.text), True
                self._done(key, program, sequence, op, None, out)
            case ops.Join():
                return self._join(key, program, sequence, op, out)
            case ops.Mark(begin=None):
                program.points[op.op] = len(sequence.text)
                self._done(key, program, sequence, op, None, out)
            case ops.Mark(begin=int(begin)):
                text = sequence.text[program.points[begin] :]
                self._done(key, program, sequence, op, text, out, texts=[text])
            case ops.Rollback():
                sequence.text = sequence.text[: program.points[op.to]]
                self._done(key, program, sequence, op, None, out)
            case ops.Pin():
                self._done(key, program, sequence, op, len(pieces_of(sequence.text)), out)
            case ops.Close():
                sequence.closed = True
                self._done(key, program, sequence, op, sequence.text, out)
            case _:
                raise AssertionError(f"unchecked op {op!r}")
        return True

    def _paste(self, key: tuple[bytes, str], program: _Program, sequence: _Sequence, op: ops.Ref, out: Outbox) -> bool:
        """False while what it pastes is not there yet."""
        if op.source not in program.ended:
            return False
        if why := program.ended[op.source]:
            cause = errors.DependencyFailed(f"op {op.source} failed: {why}")
            self._fail(key, program, sequence, op, cause, out)
            return True
        texts = program.values[op.source]
        if op.index >= len(texts):
            error = errors.InvalidRequest(f"index {op.index}, but op {op.source} has {len(texts)} candidates")
            self._fail(key, program, sequence, op, error, out)
            return True
        self._append(program, sequence, texts[op.index])
        self._done(key, program, sequence, op, texts[op.index], out)
        return True

    def _join(self, key: tuple[bytes, str], program: _Program, sequence: _Sequence, op: ops.Join, out: Outbox) -> bool:
        """False while something of its children is not done."""
        if any(awaited not in program.ended for awaited in program.awaited[op.op]):
            return False
        failed = [f"op {a} failed: {why}" for a in program.awaited[op.op] if (why := program.ended[a])]
        if failed:
            self._fail(key, program, sequence, op, errors.DependencyFailed(failed[0]), out)
            return True
        if op.mode == "concate_and_append":
            for child in op.children:
                branch = program.sequences[child]
                self._append(program, sequence, branch.text[branch.fork_at :])
        self._done(key, program, sequence, op, None, out)
        return True

    def _append(self, program: _Program, sequence: _Sequence, text: str) -> None:
        sequence.text += text
        program.prompt_tokens += len(pieces_of(text))

    def _generate(
        self, key: tuple[bytes, str], program: _Program, sequence: _Sequence, op: ops.Gen, out: Outbox
    ) -> None:
        if not sequence.candidates:
            prompt_len = len(pieces_of(sequence.text))
            if prompt_len > self._welcome.context_len:
                message = f"{prompt_len:,} tokens, but max_seq_len is {self._welcome.context_len:,}; shorten the prompt"
                self._fail(key, program, sequence, op, errors.PromptTooLong(message), out)
                return
            replies = self._reply(sequence.text, op)
            texts = [replies] * op.n if isinstance(replies, str) else list(replies)
            assert len(texts) == op.n, f"reply gave {len(texts)} texts for n={op.n}"
            sequence.candidates = [_finish(text, op) for text in texts]
            sequence.emitted = 0
            sequence.prompt_tokens = prompt_len
        at = sequence.emitted
        sequence.emitted += 1
        for index, candidate in enumerate(sequence.candidates):
            if at >= len(candidate.pieces):
                continue
            piece = candidate.pieces[at]
            program.generated_tokens += 1
            self._counts["generated_tokens"] += 1
            if op.stream:
                delta = messages.Delta(
                    program=key[1],
                    op=op.op,
                    text=piece,
                    token_ids=(piece_id(piece),),
                    logprobs=logprobs_of([piece], op),
                    index=index,
                )
                out.append((key[0], delta))
        if sequence.emitted < max(len(c.pieces) for c in sequence.candidates):
            return
        metas = tuple(
            messages.CandidateMeta(
                finish_reason=c.finish_reason,
                completion_tokens=len(c.pieces),
                token_ids=tuple(piece_id(p) for p in c.pieces),
                matched_stop=c.matched_stop,
                logprobs=logprobs_of(c.pieces, op),
            )
            for c in sequence.candidates
        )
        texts = ["".join(c.pieces) for c in sequence.candidates]
        meta = messages.GenMeta(prompt_tokens=sequence.prompt_tokens, cached_tokens=0, candidates=metas)
        sequence.text += texts[0]
        sequence.candidates = []
        self._done(key, program, sequence, op, texts, out, texts=texts, meta=meta)

    def _choose(
        self, key: tuple[bytes, str], program: _Program, sequence: _Sequence, op: ops.Select, out: Outbox
    ) -> None:
        index = self._select(sequence.text, op)
        winner = op.choices[index]
        ids = tuple(tuple(piece_id(p) for p in pieces_of(choice)) for choice in op.choices)
        meta = messages.SelectMeta(
            index=index,
            scores=tuple(-0.5 if i == index else -1.5 for i in range(len(op.choices))),
            token_ids=ids,
            logprobs=tuple(tuple(-0.5 if i == index else -1.5 for _ in row) for i, row in enumerate(ids)),
            prompt_tokens=len(pieces_of(sequence.text)),
        )
        if op.append:
            self._append(program, sequence, winner)
        self._done(key, program, sequence, op, winner, out, texts=[winner], meta=meta)

    def _score(
        self, key: tuple[bytes, str], program: _Program, sequence: _Sequence, op: ops.Score, out: Outbox
    ) -> None:
        logprobs = tuple(-1.0 for _ in pieces_of(op.text))
        ids = tuple(piece_id(p) for p in pieces_of(op.text))
        meta = messages.SelectMeta(index=0, scores=(sum(logprobs),), token_ids=(ids,), logprobs=(logprobs,))
        if op.append:
            self._append(program, sequence, op.text)
        self._done(key, program, sequence, op, float(sum(logprobs)), out, meta=meta)

    def _done(
        self,
        key: tuple[bytes, str],
        program: _Program,
        sequence: _Sequence,
        op: ops.AnyOp,
        value: object,
        out: Outbox,
        *,
        texts: list[str] | None = None,
        meta: messages.GenMeta | messages.SelectMeta | None = None,
    ) -> None:
        sequence.queue.remove(op)
        program.ended[op.op] = ""
        program.values[op.op] = texts if texts is not None else [value] if isinstance(value, str) else []
        self._counts["ops_done"] += 1
        out.append((key[0], messages.Done(program=key[1], op=op.op, value=value, meta=meta)))

    def _fail(
        self,
        key: tuple[bytes, str],
        program: _Program,
        sequence: _Sequence,
        op: ops.AnyOp,
        error: errors.PhloemError,
        out: Outbox,
    ) -> None:
        partial: tuple[str, ...] = ()
        if isinstance(op, ops.Gen) and sequence.candidates and sequence.queue[0] is op:
            partial = tuple("".join(c.pieces[: sequence.emitted]) for c in sequence.candidates)
            sequence.text += partial[0]
            sequence.candidates = []
        sequence.queue.remove(op)
        sequence.failure = sequence.failure or f"op {op.op} failed: {error.message}"
        program.ended[op.op] = error.message
        self._counts["ops_failed"] += 1
        if isinstance(op, ops.Fork):  # the children never began
            for child in op.children:
                branch = program.sequences[child]
                branch.failure = f"op {op.op} failed: {error.message}"
        if isinstance(op, ops.Close):
            sequence.closed = True
        out.append((key[0], messages.Failed(program=key[1], op=op.op, error=error.info(), partial=partial)))

    def _close_if_over(self, key: tuple[bytes, str], program: _Program, out: Outbox) -> None:
        if any(not s.closed or s.queue for s in program.sequences.values()):
            return
        stats = messages.ProgramStats(
            submits=program.submits,
            ops=len(program.accepted),
            prompt_tokens=program.prompt_tokens,
            prefilled_tokens=program.prompt_tokens,
            generated_tokens=program.generated_tokens,
        )
        out.append((key[0], messages.Closed(program=key[1], stats=stats)))
        del self._programs[key]


def _finish(text: str, op: ops.Gen) -> _Candidate:
    """Apply stop strings, ``ignore_eos`` and ``max_tokens`` to a scripted text."""
    cuts = [(text.find(stop), stop) for stop in op.params.stop if stop in text]
    matched: str | None = None
    if cuts:
        at, matched = min(cuts)
        text = text[:at]
    pieces = pieces_of(text)
    if op.params.ignore_eos and matched is None and pieces:
        pieces = (pieces * (op.params.max_tokens // len(pieces) + 1))[: op.params.max_tokens]
        return _Candidate(pieces, "length", None)
    if len(pieces) > op.params.max_tokens:
        return _Candidate(pieces[: op.params.max_tokens], "length", None)
    return _Candidate(pieces, "stop", matched)


def make() -> StringEngine:
    """A factory for an engine process: ``phloem.tests.runtime.string_engine:make``."""
    return StringEngine()
