"""The string engine itself: other tests rely on it, so it has to keep the protocol's rules."""

from phloem.protocol import messages, ops
from phloem.protocol.sampling import SamplingParams
from phloem.tests.runtime.string_engine import StringEngine

ME = b"me"


def run(engine: StringEngine, *submits: messages.ClientMessage) -> list[messages.RuntimeMessage]:
    out = engine.step([(ME, s) for s in submits])
    for _ in range(200):
        if not engine.has_work:
            break
        out += engine.step([])
    return [message for _, message in out]


def submit(*program_ops: ops.AnyOp, program: str = "p") -> messages.Submit:
    return messages.Submit(program=program, ops=list(program_ops))


def done(out: list[messages.RuntimeMessage]) -> dict[int, object]:
    return {m.op: m.value for m in out if isinstance(m, messages.Done)}


def failed(out: list[messages.RuntimeMessage]) -> dict[int, str]:
    return {m.op: m.error.kind for m in out if isinstance(m, messages.Failed)}


def test_a_chat_turn_shows_roles_streams_and_closes() -> None:
    engine = StringEngine(reply=lambda prompt, op: f" you said {prompt.split()[-1]}")
    out = run(
        engine,
        submit(
            ops.Special(op=1, seq=0, ids=(1, 12, 3)),
            ops.Text(op=2, seq=0, text="hello"),
            ops.Gen(op=3, seq=0, stream=True),
            ops.Close(op=4, seq=0),
        ),
    )
    assert done(out)[3] == [" you said hello"]
    assert done(out)[4] == "<|im_start|>user\nhello you said hello"
    assert [m.text for m in out if isinstance(m, messages.Delta)] == [" you", " said", " hello"]
    assert isinstance(out[-1], messages.Closed) and not engine.programs


def test_forks_refs_marks_and_joins_keep_their_order() -> None:
    engine = StringEngine(reply=lambda prompt, op: f"<{prompt}>")
    out = run(
        engine,
        submit(
            ops.Text(op=1, seq=0, text="a"),
            ops.Fork(op=2, seq=0, children=(1, 2)),
            ops.Text(op=3, seq=1, text="b"),
            ops.Gen(op=4, seq=1),
            ops.Ref(op=5, seq=2, source=4),
            ops.Mark(op=6, seq=0),
            ops.Join(op=7, seq=0, children=(1, 2), mode="concate_and_append"),
            ops.Mark(op=8, seq=0, begin=6),
            ops.Rollback(op=9, seq=0, to=6),
            ops.Close(op=10, seq=0),
            ops.Close(op=11, seq=1),
            ops.Close(op=12, seq=2),
        ),
    )
    values = done(out)
    assert values[8] == "b<ab><ab>"
    assert (values[10], values[11], values[12]) == ("a", "ab<ab>", "a<ab>")


def test_stop_strings_max_tokens_and_candidates() -> None:
    engine = StringEngine(reply=lambda prompt, op: [" one two STOP three", " x y z w"])
    params = SamplingParams(stop=("STOP",), max_tokens=3)
    (gen,) = (m for m in run(engine, submit(ops.Gen(op=1, seq=0, n=2, params=params))) if isinstance(m, messages.Done))
    assert gen.value == [" one two ", " x y z"]
    assert [c.finish_reason for c in gen.meta.candidates] == ["stop", "length"]


def test_a_bad_submit_is_rejected_whole_and_names_every_fault() -> None:
    engine = StringEngine()
    bad = submit(
        ops.Gen(op=1, seq=0, params=SamplingParams(max_tokens=-1, min_tokens=0)),
        ops.Ref(op=1, seq=0, source=9),
        ops.Image(op=3, seq=0, hash="h"),
    )
    (rejected,) = run(engine, bad)
    assert isinstance(rejected, messages.Rejected) and rejected.ops == [1, 3]
    assert {e.kind for e in rejected.errors} == {"InvalidParams", "InvalidRequest", "Unsupported"}
    assert not engine.programs


def test_cancel_keeps_the_partial_text_and_fails_what_depends_on_it() -> None:
    engine = StringEngine(reply=lambda prompt, op: " a b c d e f")
    first = engine.step(
        [(ME, submit(ops.Gen(op=1, seq=0), ops.Ref(op=2, seq=5, source=1), ops.Text(op=3, seq=0, text="x")))]
    )
    assert not failed([m for _, m in first])
    out = run(engine, messages.Cancel(program="p", op=1))
    assert failed(out) == {1: "Cancelled", 2: "DependencyFailed", 3: "DependencyFailed"}
    assert next(m.partial for m in out if isinstance(m, messages.Failed)) == (" a",)
    out = run(engine, messages.Cancel(program="p"))
    assert isinstance(out[-1], messages.Closed)


def test_a_deadline_fails_everything_waiting() -> None:
    now = [0.0]
    engine = StringEngine(clock=lambda: now[0])
    program = messages.Submit(
        program="p", ops=[ops.Gen(op=1, seq=0)], settings=messages.ProgramSettings(deadline_s=1.0)
    )
    engine.step([(ME, program)])
    now[0] = 2.0
    out = run(engine)
    assert failed(out) == {1: "DeadlineExceeded"} and isinstance(out[-1], messages.Closed)
