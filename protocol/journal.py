"""What a client keeps of a program so that another engine can carry it on: the ops sent and what came back.

Everything that an engine does follows from the ops, the seeds and the tokens drawn so far. ``replay`` makes the submits
that bring a new engine to the point where the old one was lost:

    finished Gen             ──► the same Gen with its candidates' tokens and texts (``Gen.drawn``): no computation
    streaming Gen, under way ──► the same Gen with the tokens that came: the engine repeats them and draws on
    finished Select          ──► the same Select with its winner as the only choice
    op that has failed       ──► as it was sent; ``Submit.failed`` says how it ended, so what depends on it fails again
    other op                 ──► as it was sent; its result follows from its seed and its inputs

What the caller has had is taken out of the new engine's messages: ends of ops that were reported, and of each stream
the characters and tokens that were delivered. If the engine repeats others than those, the program fails, by name.
"""

from __future__ import annotations

import contextlib
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from random import Random

import msgspec

from .errors import Cancelled, ErrorInfo, InternalError
from .messages import (
    Accepted,
    Cancel,
    Closed,
    Delta,
    Done,
    Failed,
    GenMeta,
    Limits,
    ProgramSettings,
    Rejected,
    RuntimeMessage,
    SelectMeta,
    Submit,
    TokenLogprob,
)
from .ops import AnyOp, Close, Drawn, Gen, Image, Pin, Score, Select, Special, Text
from .sampling import SamplingParams

OP_BYTES = 200  # of an op without its text, in memory
TOKEN_BYTES = 4
CHARS_PER_TOKEN = 4.0  # of text that nobody has tokenized yet
LOGPROB_BYTES = 150  # of one entry, without its alternatives
TOP_BYTES = 100  # of one alternative
NONE_DRAWN: Mapping[int, list[list[int]]] = {}


@dataclass(slots=True)
class _Stream:
    """What was delivered of one candidate. While it is repeated, ``expected`` is the text that has to come again.

    text:  [0, num_again) has come again   [num_again, len(expected)) has yet to come again
    """

    pieces: list[str] = field(default_factory=list)
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    logprobs: list[TokenLogprob] = field(default_factory=list)
    expected: str = ""
    num_again: int = 0
    num_ids_again: int = 0
    num_logprobs_again: int = 0
    num_ids_expected: int = 0
    num_logprobs_expected: int = 0
    num_logprobs_kept: int = 0  # of tokens that the engine repeats and does not compute again

    def begin_again(self, *, is_computed: bool) -> None:
        """An engine will send it again. ``is_computed``: with log-probabilities, because it computes the tokens."""
        self.expected = "".join(self.pieces)
        self.pieces = [self.expected]
        self.num_ids_expected = len(self.token_ids)
        self.num_logprobs_expected = len(self.logprobs) if is_computed else 0
        self.num_logprobs_kept = 0 if is_computed else len(self.logprobs)
        self.num_again = self.num_ids_again = self.num_logprobs_again = 0

    @property
    def is_again(self) -> bool:
        """Whether something that was delivered has yet to come again."""
        return (
            self.num_again < len(self.expected)
            or self.num_ids_again < self.num_ids_expected
            or self.num_logprobs_again < self.num_logprobs_expected
        )

    @property
    def size(self) -> int:
        return sum(map(len, self.pieces)) + TOKEN_BYTES * len(self.token_ids) + _logprobs_size(self.logprobs)

    def without_repetition(self, delta: Delta) -> Delta | None:
        """``delta`` without what was delivered, None if nothing is left. Raises ValueError where it differs."""
        num = min(len(delta.text), len(self.expected) - self.num_again)
        num_ids = min(len(delta.token_ids), self.num_ids_expected - self.num_ids_again)
        num_logprobs = min(len(delta.logprobs), self.num_logprobs_expected - self.num_logprobs_again)
        if delta.text[:num] != self.expected[self.num_again : self.num_again + num]:
            raise ValueError(f"{delta.text[:num]!r} at character {self.num_again:,}")
        ids = self.token_ids[self.num_ids_again : self.num_ids_again + num_ids]
        if delta.token_ids[:num_ids] != tuple(ids):
            raise ValueError(f"tokens {delta.token_ids[:num_ids]} at token {self.num_ids_again:,}")
        self.num_again += num
        self.num_ids_again += num_ids
        self.num_logprobs_again += num_logprobs
        text, token_ids, logprobs = delta.text[num:], delta.token_ids[num_ids:], delta.logprobs[num_logprobs:]
        if not (text or token_ids or logprobs):
            return None
        return msgspec.structs.replace(delta, text=text, token_ids=token_ids, logprobs=logprobs)


@dataclass(slots=True)
class _Entry:
    """An accepted op, open until its end is delivered; ``op`` is then as short as a replay allows."""

    op: AnyOp
    is_open: bool = True
    error: ErrorInfo | None = None
    streams: dict[int, _Stream] = field(default_factory=dict)  # of a Gen under way, by candidate

    @property
    def size(self) -> int:
        streams = sum(stream.size for stream in self.streams.values())
        return _op_size(self.op) + streams + (len(self.error.message) if self.error is not None else 0)


class Journal:
    """Of one program. The caller locks.

    Beyond ``max_bytes`` (an estimate of the memory it takes) it keeps nothing, and the program cannot be replayed:
    ``is_whole`` is False. ``limits``: of the engines that a replay is sent to.
    """

    def __init__(self, program: str, *, max_bytes: int, limits: Limits | None = None) -> None:
        self.is_whole = True
        self.progress = 0  # grows with every new token and every end of an op that was not a repetition
        self.num_open = 0  # ops without an end
        self.num_bytes = 0
        self._program = program
        self._max_bytes = max_bytes
        self._limits = limits or Limits()
        self._settings: ProgramSettings | None = None
        self._entries: dict[int, _Entry] = {}  # of accepted ops, in order
        self._unanswered: deque[Submit] = deque()
        self._num_accepted = 0  # submits
        self._cancelled_ops: set[int] = set()
        self._cancelled_seqs: set[int] = set()
        self._num_repeats = 0  # submits of a repetition that the caller knows to be accepted, unanswered as yet
        self._repeated: set[tuple[int, int]] = set()  # (op, candidate) of streams that come again
        self._is_empty = False  # what it held was too much, and is gone

    @property
    def is_accepted(self) -> bool:
        """Whether an engine has accepted a submit of the program."""
        return self._num_accepted > 0

    @property
    def is_repeating(self) -> bool:
        """Whether the next answer to a submit is one that the caller has had already."""
        return self._num_repeats > 0

    @property
    def settings(self) -> ProgramSettings | None:
        return self._settings

    @property
    def name(self) -> str:
        return "" if self._settings is None else self._settings.name

    @property
    def unanswered_ops(self) -> list[AnyOp]:
        return [op for submit in self._unanswered for op in submit.ops]

    @property
    def open_ops(self) -> list[AnyOp]:
        """Ops without an end, as far as they are kept."""
        return [entry.op for entry in self._entries.values() if entry.is_open] + self.unanswered_ops

    @property
    def num_streamed(self) -> int:
        """Tokens that the streams under way have delivered, of the longest candidate of each."""
        lengths = [
            max((len(stream.token_ids) for stream in entry.streams.values()), default=0)
            for entry in self._entries.values()
            if entry.streams
        ]
        return sum(lengths)

    @property
    def num_prompt_tokens(self) -> int:
        """Of the text that was sent, estimated by its length."""
        ops = [*(entry.op for entry in self._entries.values()), *self.unanswered_ops]
        return int(sum(len(op.text) for op in ops if isinstance(op, Text)) / CHARS_PER_TOKEN)

    @property
    def goes_on(self) -> bool:
        """Whether a replay continues each generation under way after the tokens that it has, as far as they are told.

        Those whose log-probabilities would be missing are drawn again from the beginning.
        """
        gens = [op for op in self.open_ops if isinstance(op, Gen)]
        if gens and self._is_traced:
            return False
        return not any(op.params.return_logprob and (not op.stream or op.params.logprob_start_len >= 0) for op in gens)

    @property
    def deadline_s(self) -> float | None:
        return None if self._settings is None else self._settings.deadline_s

    # -- what is sent -------------------------------------------------------------------------------------------------

    def sent(self, message: Submit | Cancel) -> None:
        """A message that the program's client has sent, seeds filled in; not the cancel of the whole program."""
        if isinstance(message, Submit):
            self.num_open += len(message.ops)
        if self._is_empty:
            return
        if isinstance(message, Submit):
            if message.settings is not None:
                self._settings = message.settings
            self._unanswered.append(message)
            self._grow(_submit_size(message))
        elif message.op is not None:
            entry = self._entries.get(message.op)
            if (entry is not None and entry.is_open) or message.op in {op.op for op in self.unanswered_ops}:
                self._cancelled_ops.add(message.op)
        elif message.seq is not None:
            there = [entry.op for entry in self._entries.values()] + self.unanswered_ops
            if any(op.seq == message.seq for op in there):
                self._cancelled_seqs.add(message.seq)

    def refused(self, submit: Submit) -> None:
        """Nothing of ``submit`` was taken."""
        with contextlib.suppress(ValueError):  # it is not kept
            self._unanswered.remove(submit)
            self.num_open -= len(submit.ops)
            self._grow(-_submit_size(submit))

    # -- what comes back ----------------------------------------------------------------------------------------------

    def came(self, message: RuntimeMessage) -> RuntimeMessage | None:
        """A message of the engine: what to hand to the caller of it, or None where it repeats what the caller has.

        Raises InternalError where a repeated stream differs from what was delivered.
        """
        if self._is_empty:
            self.progress += 1
            self.num_open -= type(message) is Done or type(message) is Failed
            return message
        match message:
            case Delta():
                return self._streamed(message)
            case Done():
                return self._done(message)
            case Failed():
                return self._failed(message)
            case Accepted():
                if self._num_repeats:
                    self._num_repeats -= 1
                    self._empty_if_too_large()
                    return None
                if self._unanswered:
                    self._num_accepted += 1
                    self._entries.update((op.op, _Entry(op)) for op in self._unanswered.popleft().ops)
            case Rejected() if self._unanswered:
                self.refused(self._unanswered[0])
            case Closed(stats=stats):
                stats = msgspec.structs.replace(stats, submits=self._num_accepted)
                return msgspec.structs.replace(message, stats=stats)
        return message

    def _streamed(self, delta: Delta) -> Delta | None:
        entry = self._entries.get(delta.op)
        if entry is None or not entry.is_open:
            return None
        stream = entry.streams.get(delta.index)
        if stream is None:
            stream = entry.streams[delta.index] = _Stream()
        elif self._repeated and (delta.op, delta.index) in self._repeated:
            try:
                new = stream.without_repetition(delta)
            except ValueError as error:
                raise self._differs(delta.op, str(error)) from None
            if not stream.is_again:
                self._repeated.discard((delta.op, delta.index))
                self._empty_if_too_large()
            if new is None:
                return None
            delta = new
        self.progress += 1
        stream.pieces.append(delta.text)
        stream.token_ids.extend(delta.token_ids)
        size = len(delta.text) + TOKEN_BYTES * len(delta.token_ids)
        if delta.logprobs:
            stream.logprobs.extend(delta.logprobs)
            size += _logprobs_size(delta.logprobs)
        self._grow(size)
        return delta

    def _done(self, done: Done) -> Done | None:
        entry = self._entries.get(done.op)
        if entry is None or not entry.is_open:
            return None
        if self._repeated and any((done.op, index) in self._repeated for index in entry.streams):
            raise self._differs(done.op, "its end")
        before, op, meta = entry.size, entry.op, done.meta
        if isinstance(op, Gen) and isinstance(meta, GenMeta):
            if any(stream.num_logprobs_kept for stream in entry.streams.values()):
                meta = _with_kept_logprobs(meta, entry.streams)
                done = msgspec.structs.replace(done, meta=meta)
            if op.params.max_tokens:  # else all it does is to compute the prompt
                pairs = zip(meta.candidates, done.value, strict=True)
                entry.op = _finished(op, tuple([Drawn(candidate.token_ids, text) for candidate, text in pairs]))
        elif isinstance(op, Select) and isinstance(meta, SelectMeta) and not self._is_traced:
            winner = (op.choices[meta.index],)
            entry.op = msgspec.structs.replace(op, choices=winner, method="token_length_normalized")
        entry.is_open = False
        entry.streams = {}
        self.num_open -= 1
        self.progress += 1
        self._grow(entry.size - before)
        return done

    def _failed(self, failed: Failed) -> Failed | None:
        entry = self._entries.get(failed.op)
        if entry is None or not entry.is_open:
            return None
        before = entry.size
        self._repeated.difference_update([(failed.op, index) for index in entry.streams])
        entry.is_open, entry.error = False, failed.error
        entry.streams = {}
        self.num_open -= 1
        self.progress += 1
        self._grow(entry.size - before)
        return failed

    def pin(self, op: int) -> Pin | None:
        """Op ``op``, if it is a pin."""
        entry = self._entries.get(op)
        return entry.op if entry is not None and isinstance(entry.op, Pin) else None

    def before(self, op: int) -> list[AnyOp]:
        """The ops before op ``op`` that have ended well, as short as a replay allows. Images have their data, which may
        have been sent by another op.
        """
        sent = [entry.op for entry in self._entries.values()]
        images = {one.hash: one.data for one in sent if isinstance(one, Image) and one.data}
        found: list[AnyOp] = []
        for entry in self._entries.values():
            if entry.op.op == op:
                break
            if not entry.is_open and entry.error is None:
                kept_op = entry.op
                if isinstance(kept_op, Image):
                    kept_op = msgspec.structs.replace(kept_op, data=images[kept_op.hash])
                found.append(kept_op)
        return found

    # -- again --------------------------------------------------------------------------------------------------------

    def replay(self, *, elapsed_s: float, drawn: Mapping[int, list[list[int]]] = NONE_DRAWN) -> list[Submit | Cancel]:
        """The messages for a new engine, in order; a deadline is shortened by ``elapsed_s``.

        ``drawn``: by op the tokens that the last engine has said its candidates had. A generation that does not stream
        goes on from them; one that returns log-probabilities, which these tokens would lack, is computed again.

        Each submit is to be accepted before the next one is sent: an engine that refuses one would take the next for a
        new program. Calling it starts a new repetition: ``came`` then expects the new engine's messages from the
        beginning.
        """
        assert self.is_whole
        self._repeated.clear()
        ops: list[AnyOp] = []
        failed: dict[int, ErrorInfo] = {}
        for entry in self._entries.values():
            ops.append(self._again(entry, drawn))
            error = entry.error or (self._cancellation(entry.op) if entry.is_open else None)
            if error is not None and not isinstance(entry.op, Close):
                failed[entry.op.op] = error
        submits = [
            Submit(self._program, part, failed={op.op: failed[op.op] for op in part if op.op in failed})
            for part in self._parts(ops)
        ]
        self._num_repeats = len(submits)
        for submit in self._unanswered:
            errors = {op.op: self._cancellation(op) for op in submit.ops}
            cancelled = {op: error for op, error in errors.items() if error is not None}
            submits.append(msgspec.structs.replace(submit, settings=None, failed=cancelled))
        if submits and (settings := self._settings) is not None:
            if settings.deadline_s is not None:
                settings = msgspec.structs.replace(settings, deadline_s=max(settings.deadline_s - elapsed_s, 0.001))
            submits[0] = msgspec.structs.replace(submits[0], settings=settings)
        return [*submits, *(Cancel(self._program, seq=seq) for seq in sorted(self._cancelled_seqs))]

    def _again(self, entry: _Entry, drawn: Mapping[int, list[list[int]]]) -> AnyOp:
        """The op to send; its streams begin again."""
        op = entry.op
        if entry.is_open and isinstance(op, Gen) and not op.stream and op.op in drawn:
            if self._is_traced or op.params.return_logprob or len(drawn[op.op]) != op.n:
                return op
            return msgspec.structs.replace(op, drawn=tuple([Drawn(tuple(ids)) for ids in drawn[op.op]]))
        if not (entry.is_open and isinstance(op, Gen) and entry.streams):
            return op
        returns_prompt = op.params.return_logprob and op.params.logprob_start_len >= 0
        is_computed = self._is_traced or returns_prompt
        for index, stream in entry.streams.items():
            stream.begin_again(is_computed=is_computed)
            if stream.is_again:
                self._repeated.add((op.op, index))
        if is_computed:
            return op
        ids = [entry.streams[i].token_ids if i in entry.streams else () for i in range(op.n)]
        return msgspec.structs.replace(op, drawn=tuple([Drawn(tuple(part)) for part in ids]))

    def _cancellation(self, op: AnyOp) -> ErrorInfo | None:
        """Why an op without an end has to fail: the caller has cancelled it or its sequence."""
        if isinstance(op, Close):
            return None
        if op.op in self._cancelled_ops:
            return Cancelled(f"op {op.op} was cancelled").info()
        if op.seq in self._cancelled_seqs:
            return Cancelled(f"sequence {op.seq} was cancelled").info()
        return None

    def _parts(self, ops: list[AnyOp]) -> Iterator[list[AnyOp]]:
        """``ops`` in as few submits as the limits allow."""
        most_ops, most_bytes = self._limits.max_ops_per_submit, self._limits.max_submit_bytes // 2
        part: list[AnyOp] = []
        size = 0
        for op in ops:
            op_size = len(msgspec.msgpack.encode(op))
            if part and (len(part) == most_ops or size + op_size > most_bytes):
                yield part
                part, size = [], 0
            part.append(op)
            size += op_size
        if part:
            yield part

    # -- inside -------------------------------------------------------------------------------------------------------

    @property
    def _is_traced(self) -> bool:
        return self._settings is not None and self._settings.trace

    def _grow(self, size: int) -> None:
        self.num_bytes += size
        if self.num_bytes > self._max_bytes:
            self.give_up()

    def give_up(self) -> None:
        """Keep no more than a repetition under way needs; the program cannot be replayed from now on."""
        self.is_whole = False
        self._empty_if_too_large()

    def _empty_if_too_large(self) -> None:
        if not self.is_whole and not self._num_repeats and not self._repeated:
            self._is_empty = True
            self._entries.clear()
            self._unanswered.clear()
            self.num_bytes = 0

    def _differs(self, op: int, what: str) -> InternalError:
        return InternalError(
            f"program {self._program!r} was carried on by another engine, which wrote another text in op {op}: {what}; "
            "what was delivered of it stands, and the program ends here"
        )


def with_seeds(submit: Submit, rng: Random) -> Submit:
    """Draws depend on (seed, position) alone, so with a seed of the client's every engine draws the same."""
    if not any(isinstance(op, Gen) and op.params.seed is None and op.params.temperature for op in submit.ops):
        return submit
    return msgspec.structs.replace(
        submit, ops=[_with_seed(op, rng) if isinstance(op, Gen) else op for op in submit.ops]
    )


def _with_seed(op: Gen, rng: Random) -> Gen:
    if op.params.seed is not None or not op.params.temperature:
        return op
    params = msgspec.structs.replace(op.params, seed=rng.getrandbits(63))
    return msgspec.structs.replace(op, params=params)


def _finished(op: Gen, drawn: tuple[Drawn, ...]) -> Gen:
    """An op that ends at once with ``drawn``; only its healing still matters."""
    params = SamplingParams(max_tokens=op.params.max_tokens, heal=op.params.heal)
    return Gen(op=op.op, seq=op.seq, params=params, n=op.n, drawn=drawn)


def _with_kept_logprobs(meta: GenMeta, streams: dict[int, _Stream]) -> GenMeta:
    """``meta`` with the log-probabilities of repeated tokens, which had come in deltas, before those of the others."""
    candidates = []
    for index, candidate in enumerate(meta.candidates):
        if index in streams:
            kept = streams[index].logprobs[: streams[index].num_logprobs_kept]
            candidate = msgspec.structs.replace(candidate, logprobs=(*kept, *candidate.logprobs))
        candidates.append(candidate)
    return msgspec.structs.replace(meta, candidates=tuple(candidates))


def _submit_size(submit: Submit) -> int:
    return size_of(submit.ops)


def size_of(ops: Iterable[AnyOp]) -> int:
    """The memory that ``ops`` take, in bytes, estimated."""
    return sum(map(_op_size, ops))


def _op_size(op: AnyOp) -> int:
    match op:
        case Text() | Score():
            return OP_BYTES + len(op.text)
        case Special():
            return OP_BYTES + 8 * len(op.ids)
        case Select():
            return OP_BYTES + sum(map(len, op.choices))
        case Image():
            return OP_BYTES + len(op.data)
        case Gen():
            size = OP_BYTES + 50 * len(op.params.logit_bias) + (len(op.grammar.text) if op.grammar is not None else 0)
            return size + sum(8 * len(drawn.token_ids) + len(drawn.text or "") for drawn in op.drawn)
    return OP_BYTES


def _logprobs_size(logprobs: Iterable[TokenLogprob]) -> int:
    return sum(LOGPROB_BYTES + TOP_BYTES * len(logprob.top) for logprob in logprobs)
