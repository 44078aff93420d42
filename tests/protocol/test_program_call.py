"""A program call: whatever order messages come in, each op ends once and ``Closed`` comes once, last."""

import random
import threading
from dataclasses import dataclass, field

import pytest
from phloem.protocol import errors
from phloem.protocol import messages as m
from phloem.protocol import ops as o
from phloem.protocol.program_call import OpFailed, ProgramCall, ProgramEvent, SubmitRefused

STATS = m.ProgramStats(submits=1)
NO = errors.InvalidParams("no").info()


def texts(*ids: int) -> list[o.AnyOp]:
    return [o.Text(op=op, seq=0, text=str(op)) for op in ids]


class Sent:
    """A transport that records the messages it gets, and fails on demand."""

    def __init__(self) -> None:
        self.submits: list[m.Submit] = []
        self.cancels: list[tuple[int | None, int | None]] = []
        self.error: errors.PhloemError | None = None

    def submit(self, submit: m.Submit, call: ProgramCall) -> None:
        if self.error is not None:
            raise self.error
        self.submits.append(submit)

    def cancel(self, program: str, seq: int | None = None, op: int | None = None) -> None:
        self.cancels.append((seq, op))


class Talk:
    def __init__(self) -> None:
        self.sent = Sent()
        self.events: list[ProgramEvent] = []
        self.call = ProgramCall(self.sent, self.events.append, program="p")

    def take(self, *messages: m.RuntimeMessage) -> list[ProgramEvent]:
        """The events of these messages."""
        before = len(self.events)
        for message in messages:
            self.call.take(message)
        return self.events[before:]


@pytest.fixture
def talk() -> Talk:
    return Talk()


def done(op: int) -> m.Done:
    return m.Done("p", op, op)


def failed(op: int, kind: type[errors.PhloemError] = errors.InternalError) -> m.Failed:
    return m.Failed("p", op, kind(f"op {op} failed").info(), (f"partial {op}",))


def delta(op: int, index: int = 0) -> m.Delta:
    return m.Delta(program="p", op=op, text="x", index=index)


CLOSED = m.Closed("p", STATS)


# -- against a model --------------------------------------------------------------------------------------------------


@dataclass
class Model:
    """What the docstring of ``ProgramCall`` says, with lists that are searched."""

    open: list[int] = field(default_factory=list)
    unanswered: list[list[int]] = field(default_factory=list)
    is_accepted: bool = False
    is_over: bool = False

    def submit(self, ids: list[int]) -> None:
        self.open += ids
        self.unanswered.append(ids)

    def take(self, message: m.RuntimeMessage) -> list[tuple[object, ...]]:
        match message:
            case m.Delta(op=op) if op in self.open:
                return [("delta", op, message.index)]
            case m.Done(op=op) | m.Failed(op=op) if op in self.open:
                self.open.remove(op)
                return [("done" if isinstance(message, m.Done) else "failed", op)]
            case m.Accepted() if not self.is_over:
                self.unanswered = self.unanswered[1:]
                self.is_accepted = True
                return [("accepted",)]
            case m.Rejected() if not self.is_over:
                ids, self.unanswered = (self.unanswered[0], self.unanswered[1:]) if self.unanswered else ([], [])
                refused = tuple(op for op in ids if op in self.open)
                self.open = [op for op in self.open if op not in refused]
                self.is_over = not self.is_accepted and not self.unanswered
                return [("refused", refused), *([("closed",)] if self.is_over else [])]
            case m.Closed():
                return self.end()
        return []

    def end(self) -> list[tuple[object, ...]]:
        if self.is_over:
            return []
        self.is_over = True
        ended, self.open, self.unanswered = self.open, [], []
        return [*(("failed", op) for op in ended), ("closed",)]


def shape(event: ProgramEvent) -> tuple[object, ...]:
    match event:
        case m.Delta():
            return ("delta", event.op, event.index)
        case m.Done():
            return ("done", event.op)
        case OpFailed():
            return ("failed", event.op)
        case SubmitRefused():
            return ("refused", event.ops)
        case m.Accepted():
            return ("accepted",)
        case m.Closed():
            return ("closed",)


@pytest.mark.parametrize("seed", range(300))
def test_in_any_order_of_messages_every_op_ends_once_as_the_model_says(seed):
    rng = random.Random(seed)
    talk, model = Talk(), Model()
    submitted: list[int] = []
    expected: list[tuple[object, ...]] = []
    for _ in range(rng.randrange(1, 60)):
        op = rng.randrange(len(submitted) + 2)
        match rng.randrange(14):
            case 0 | 1 | 2 if not model.is_over:
                ids = list(range(len(submitted), len(submitted) + rng.randrange(4)))
                try:
                    talk.call.submit(texts(*ids))
                except errors.Cancelled:
                    continue
                submitted += ids
                model.submit(ids)
            case 3:
                talk.call.cancel(op=rng.choice([None, op]))
            case 4 if rng.random() < 0.2:
                talk.call.lose(errors.EngineLost("gone"))
                expected += model.end()
            case kind:
                messages = [m.Accepted("p"), m.Rejected("p", [NO]), delta(op, rng.randrange(3)), done(op), failed(op)]
                message = CLOSED if kind == 13 and rng.random() < 0.3 else rng.choice(messages)
                talk.call.take(message)
                expected += model.take(message)
        assert [shape(event) for event in talk.events] == expected
    talk.call.take(CLOSED)
    ends = [event.op for event in talk.events if isinstance(event, m.Done | OpFailed)]
    ends += [op for event in talk.events if isinstance(event, SubmitRefused) for op in event.ops]
    assert sorted(ends) == submitted
    assert sum(isinstance(event, m.Closed) for event in talk.events) == 1 and isinstance(talk.events[-1], m.Closed)
    assert talk.call.is_over and (talk.call.error is None) == all(
        not isinstance(e, OpFailed | SubmitRefused) for e in talk.events
    )


# -- submits ----------------------------------------------------------------------------------------------------------


def test_settings_go_with_the_first_submit_and_more_may_follow(talk):
    settings = m.ProgramSettings(name="tree")
    talk.call.submit(texts(0), settings)
    talk.call.submit(texts(1))
    assert [(one.program, one.settings) for one in talk.sent.submits] == [("p", settings), ("p", None)]
    assert ProgramCall(talk.sent, talk.events.append).program != ProgramCall(talk.sent, talk.events.append).program


@pytest.mark.parametrize(("ids", "twice"), [((1, 2, 2), 2), ((2, 0), 0)])
def test_an_op_id_used_twice_is_named_and_nothing_is_sent(talk, ids, twice):
    talk.call.submit(texts(0))
    with pytest.raises(errors.InvalidRequest, match=f"op id {twice} is used twice"):
        talk.call.submit(texts(*ids))
    assert len(talk.sent.submits) == 1
    assert [shape(event) for event in talk.take(m.Accepted("p"), CLOSED)][1:] == [("failed", 0), ("closed",)]


def test_a_submit_that_the_transport_cannot_send_raises_and_has_no_event(talk):
    talk.sent.error = errors.EngineLost("gone")
    with pytest.raises(errors.EngineLost, match="gone"):
        talk.call.submit(texts(0))
    talk.sent.error = None
    talk.call.submit(texts(0))
    assert [shape(event) for event in talk.take(m.Accepted("p"), done(0), CLOSED)] == [
        ("accepted",), ("done", 0), ("closed",),
    ]  # fmt: skip
    with pytest.raises(errors.InvalidRequest, match="program 'p' is over; start another one"):
        talk.call.submit(texts(1))


def test_an_answer_inside_submit_is_taken(talk):
    talk.sent.submit = lambda submit, call: (call.take(m.Accepted("p")), call.take(done(0)))  # type: ignore[method-assign]
    talk.call.submit(texts(0))
    assert [shape(event) for event in talk.events] == [("accepted",), ("done", 0)]


def test_submits_that_cross_the_engine_s_loss_raise_or_end():
    for _ in range(50):
        talk = Talk()
        talk.call.submit(texts(0))
        sent = [0]
        losing = threading.Thread(target=talk.call.lose, args=(errors.EngineLost("gone"),))
        losing.start()
        for op in range(1, 20):
            try:
                talk.call.submit(texts(op))
            except errors.InvalidRequest:
                break
            sent.append(op)
        losing.join()
        assert [event.op for event in talk.events if isinstance(event, OpFailed)] == sent


# -- ends -------------------------------------------------------------------------------------------------------------


def test_a_failure_keeps_its_partial_text_and_a_dependent_one_its_cause(talk):
    talk.call.submit(texts(0, 1, 2))
    first, other, dependent = talk.take(failed(0), failed(1), failed(2, errors.DependencyFailed))
    assert (first.partial, str(first.error)) == (("partial 0",), "op 0 failed")
    assert talk.call.error is first.error and other.error.__cause__ is None
    assert isinstance(dependent.error, errors.DependencyFailed) and dependent.error.__cause__ is first.error


def test_a_refusal_ends_the_ops_of_its_submit_and_sums_up_its_errors(talk):
    talk.call.submit(texts(0, 1))
    talk.call.submit(texts(2))
    talk.take(m.Accepted("p"))
    faults = [errors.InvalidParams(f"fault {i}", where="ops[0]").info() for i in range(6)]
    (refused,) = talk.take(m.Rejected("p", faults, ops=[2]))
    assert refused.ops == (2,) and isinstance(refused.error, errors.InvalidParams) and refused.error.where == "ops[0]"
    assert str(refused.error) == "fault 0 (and 5 more: fault 1; fault 2; fault 3)"
    assert not talk.call.is_over


def test_a_transport_may_refuse_a_later_submit_before_the_first_is_answered(talk):
    talk.call.submit(texts(0))
    talk.call.submit(texts(1))
    talk.call.refuse(talk.sent.submits[1], m.Rejected("p", [NO]))
    assert [shape(event) for event in talk.events] == [("refused", (1,))] and not talk.call.is_over
    assert [shape(event) for event in talk.take(m.Accepted("p"), done(0))] == [("accepted",), ("done", 0)]


def test_a_lost_engine_s_error_is_that_of_every_open_op(talk):
    talk.call.submit(texts(0, 1))
    talk.take(m.Accepted("p"), done(0))
    gone = errors.EngineLost("gone")
    talk.call.lose(gone)
    failure, closed = talk.events[-2:]
    assert (failure.op, failure.error) == (1, gone) and closed.stats == m.ProgramStats()


# -- cancel -----------------------------------------------------------------------------------------------------------


def test_a_program_is_cancelled_once_and_takes_no_more_ops(talk):
    talk.call.cancel()
    talk.call.submit(texts(0))
    talk.call.cancel(op=0)
    talk.call.cancel(seq=3)
    talk.call.submit(texts(1))
    talk.call.cancel()
    talk.call.cancel()
    talk.call.cancel(op=0)
    assert talk.sent.cancels == [(None, 0), (3, None), (None, None)]
    with pytest.raises(errors.Cancelled, match="program 'p' was cancelled"):
        talk.call.submit(texts(2))


def test_nothing_is_cancelled_after_the_end(talk):
    talk.call.submit(texts(0))
    talk.take(m.Accepted("p"), done(0), CLOSED)
    talk.call.cancel()
    assert talk.sent.cancels == []


def test_on_event_may_submit_and_cancel():
    sent = Sent()
    call: ProgramCall

    def on_event(event: ProgramEvent) -> None:
        if isinstance(event, m.Accepted) and len(sent.submits) < 3:
            call.submit(texts(len(sent.submits)))
        elif isinstance(event, m.Done):
            call.cancel()

    call = ProgramCall(sent, on_event)
    call.submit(texts(0))
    for message in (m.Accepted("p"), m.Accepted("p"), m.Accepted("p"), done(1)):
        call.take(message)
    assert [submit.ops[0].op for submit in sent.submits] == [0, 1, 2] and sent.cancels == [(None, None)]
