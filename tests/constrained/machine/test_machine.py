import json
from functools import partial

import numpy as np
import pytest
from phloem.constrained import GrammarTooComplex, Vocabulary, compile
from phloem.constrained.machine import Machine, walk
from phloem.constrained.machine.machine import DEAD_STATE

from ..conftest import encode


def nested(machine: Machine) -> int:
    """The configuration before a text of ``(`` and ``)`` in balance, made of one state and one frame."""
    done = machine.add_state(None, accepting=True)
    frame = machine.add_frame(lambda result: machine.state("inside", lambda: DEAD_STATE))
    root = machine.add_frame(lambda result: done)

    def fill(row: np.ndarray) -> None:
        row[ord("(")] = machine.push(frame, inside)
        row[ord(")")] = machine.end_state(0)

    inside = machine.state("inside", lambda: machine.add_state(fill))

    def begin(row: np.ndarray) -> None:
        row[ord("(")] = machine.push(root, inside)

    return machine.start(machine.add_state(begin), 0)


@pytest.mark.parametrize(
    ("text", "is_prefix", "may_end"),
    [("()", True, True), ("(()())", True, True), ("(()", True, False), ("())", False, False), (")", False, False)],
)
def test_frames_count_what_is_open(vocabulary: Vocabulary, text: str, is_prefix: bool, may_end: bool) -> None:
    machine = Machine(vocabulary)
    config = machine.advance_bytes(nested(machine), text.encode())
    assert (config >= 0) == is_prefix and (is_prefix and machine.may_end(config)) == may_end


def test_places_are_found_again_after_room_was_made_for_more(vocabulary: Vocabulary) -> None:
    machine, depth = Machine(vocabulary), 70_000  # more stacks than there is room for at first
    start = nested(machine)
    shallow = machine.advance_bytes(start, b"(((")
    room = len(machine.arrays[walk.STACK_FRAME])
    deep = machine.advance_bytes(start, b"(" * depth)
    assert len(machine.arrays[walk.STACK_FRAME]) > room
    assert machine.advance_bytes(start, b"(((") == shallow and machine.advance_bytes(shallow, b"()()") == shallow
    assert machine.advance_bytes(deep, b")" * (depth - 3)) == shallow
    assert machine.may_end(machine.advance_bytes(shallow, b")))"))


def test_a_token_leads_where_its_bytes_lead(vocabulary: Vocabulary) -> None:
    grammar = compile("json_schema", json.dumps({"type": "object", "required": ["name"]}), vocabulary)
    machine, config = grammar.machine, grammar.start
    for token in encode(vocabulary, '{"name": [1, "a", {}], "age": null}'):
        following = machine.advance_bytes(config, vocabulary.tokens[token])
        assert following == machine.advance(config, token) >= 0
        config = following
    assert machine.may_end(config)


def test_a_text_before_the_start_is_read_first(vocabulary: Vocabulary) -> None:
    machine = Machine(vocabulary)
    expr = machine.expressions.literal(b"yes")
    start = machine.start(machine.text(expr), 0)
    before = machine.start_after(b": ", start)
    assert machine.advance_bytes(before, b": ") == start and machine.advance_bytes(before, b"y") == -1


def test_equal_keys_are_one_state_and_one_frame(vocabulary: Vocabulary) -> None:
    machine = Machine(vocabulary)
    make = partial(machine.add_state, None)
    assert machine.state("a", make) == machine.state("a", make) != machine.state("b", make)
    add = partial(machine.add_frame, lambda result: DEAD_STATE)
    assert machine.frame("a", add) == machine.frame("a", add) != machine.frame("b", add)
    assert machine.push(1, DEAD_STATE) == 0


def test_more_states_than_the_limit_are_refused_with_their_number(vocabulary: Vocabulary) -> None:
    machine = Machine(vocabulary, max_states=20)
    assert not machine.is_full
    while machine.num_states < machine.hard_limit:
        machine.add_state(None)
    assert machine.is_full
    for add in (lambda: machine.add_state(None), lambda: machine.add_states(2, lambda row, state: None)):
        with pytest.raises(GrammarTooComplex, match="more than 80 automaton states"):
            add()


def test_states_made_at_once_leave_those_ready_to_be_used_later(vocabulary: Vocabulary) -> None:
    machine = Machine(vocabulary, max_states=40)
    machine.make_ready(3)
    before = machine.num_states
    first = machine.add_state(None)
    several = machine.add_states(5, lambda row, state: row.__setitem__(ord("a"), state))
    last = [machine.add_state(lambda row: row.__setitem__(ord("b"), several)) for _ in range(40)]
    assert machine.num_states == before + 46 and last[0] == first + 1
    assert len({first, *range(several, several + 5), *last}) == 46
    for state in (*last, several + 4):
        codes = machine.row(state)
        byte, code = (ord("a"), state) if state == several + 4 else (ord("b"), several)
        assert codes[byte] == code and (codes > 0).sum() == 1


def test_sparse_rows_are_made_where_a_text_gets_and_do_not_count_as_states_of_their_own(vocabulary: Vocabulary) -> None:
    machine = Machine(vocabulary, max_states=20)
    last = machine.add_state(None, accepting=True)
    base = machine.text(machine.expressions.literal(b"z"))
    begins = np.array([0, 2, 3, 3], np.int32)

    def moves_of(first: int) -> tuple[np.ndarray, np.ndarray]:
        codes = (ord("a"), ord("c"), first + 1), (ord("t"), ord("u"), last), (0, 256, first + 2)
        return begins, np.array(codes, np.int32)

    first = machine.add_sparse_states(3, moves_of, base)
    delta = machine.arrays[walk.DELTA]
    assert not delta[first : first + 3].any() and not machine.is_full
    start = machine.start(first, 0)
    assert machine.advance_bytes(start, b"t") == machine.start(last, 0)
    assert machine.advance_bytes(start, b"a") == machine.advance_bytes(start, b"b") == machine.start(first + 1, 0)
    assert machine.advance_bytes(start, b"c") == -1 and machine.advance_bytes(start, b"z") >= 0
    assert not delta[first + 1].any()
    assert (machine.row(first + 1) > 0).tolist() == vocabulary.has_byte.tolist()  # no other byte has a token
    assert (machine.row(first + 2) == machine.row(base)).all()


def test_results_of_any_size_are_told_apart(vocabulary: Vocabulary) -> None:
    machine = Machine(vocabulary)
    answers = [0, 1, (1 << 24) - 1, 1 << 24, 1 << 100, (1 << 100) + 1]
    results = [machine.result(bits) for bits in answers]
    assert len(set(results)) == len(answers) and [machine.bits(result) for result in results] == answers
    assert results == [machine.result(bits) for bits in answers]


def test_what_follows_a_frame_is_asked_once_and_kept_as_the_table_grows(vocabulary: Vocabulary) -> None:
    machine = Machine(vocabulary)
    asked: list[int] = []
    states = [machine.add_state(None) for _ in range(3)]

    def returns(result: int) -> int:
        asked.append(result)
        return states[result % 3]

    frame = machine.add_frame(returns)
    for _ in range(2):
        assert [machine.after(frame, result) for result in range(40_000)] == [states[r % 3] for r in range(40_000)]
    assert asked == list(range(40_000))


def test_the_row_after_a_value_is_made_with_what_the_frame_returns(vocabulary: Vocabulary) -> None:
    machine = Machine(vocabulary)
    made: list[str] = []

    def adding(name: str, byte: str) -> int:
        def fill(row: np.ndarray) -> None:
            made.append(name)
            row[ord(byte)] = machine.end_state(0)

        return machine.add_state(fill)

    plain, pushed = adding("plain", ","), adding("pushed", ":")
    replacing = machine.add_frame(lambda result: plain)
    returned = {0: DEAD_STATE, 1: plain, 2: machine.push(replacing, pushed), 3: walk.EXITED}
    frame = machine.add_frame(returned.__getitem__)
    for result in returned:
        machine.make_row_after(frame, result)
        assert machine.after(frame, result) == returned[result]
    assert made == ["plain", "pushed"]
    assert [machine.row(plain)[ord(c)] > 0 for c in ",:"] == [True, False]
    assert [machine.row(pushed)[ord(c)] > 0 for c in ",:"] == [False, True]
    assert made == ["plain", "pushed"]  # both rows were there
