"""Values that repeat a program's text are bounded: a program of a kilobyte could be answered with gigabytes."""

from phloem.protocol import ops as o
from phloem.tests.runtime.engine.driver import Driver


def test_pasting_what_was_marked_does_not_double_without_end(driver: Driver) -> None:
    """60 ops made a text of 2**30 characters."""
    ops: list[o.AnyOp] = [o.Mark(op=0, seq=0), o.Text(op=1, seq=0, text="a" * 1000)]
    for i in range(30):
        ops.append(o.Mark(op=2 + 2 * i, seq=0, begin=0))
        ops.append(o.Ref(op=3 + 2 * i, seq=0, source=2 + 2 * i))
    ops.append(o.Close(op=99, seq=0))
    outcome = driver.run(ops)
    errors = [failed.error for failed in outcome.failed.values()]
    assert errors[0].kind == "PromptTooLong" and "give at most" in errors[0].message
    assert {error.kind for error in errors[1:]} == {"DependencyFailed"}
    assert outcome.closed is not None and len(str(outcome.value(99))) <= 4096


def test_marks_of_a_long_text_return_a_bounded_number_of_characters(driver: Driver) -> None:
    text = "b" * driver.engine.limits.max_submit_bytes
    ops: list[o.AnyOp] = [o.Mark(op=0, seq=0), o.Text(op=1, seq=0, text=text)]
    ops += [o.Mark(op=2 + i, seq=0, begin=0) for i in range(5)]
    ops.append(o.Close(op=99, seq=0))
    outcome = driver.run(ops)
    assert all(outcome.value(2 + i) == text for i in range(4))
    assert outcome.failed[6].error.kind == "LimitExceeded"
    assert "more than 67,108,864 characters" in outcome.failed[6].error.message
    assert outcome.value(99) is None and outcome.closed is not None
