"""What programs written for SGLang rely on, rows 16 to 24: streams, arguments, batches, traces, dtypes, the log."""

import asyncio
import logging

import pytest
from phloem import assistant, function, gen, gen_int, global_config, system, user
from phloem.lang.expressions import SglArgument, SglVariable
from phloem.protocol import errors
from phloem.protocol.ops import Gen
from phloem.tests.lang.fakes import Fake, run, says


def test_row_16_streams_yield_every_text_or_one_variables():
    body = says("a", gen("x"), " b", gen("y"), "c")
    s = run(body, Fake(), stream=True)
    assert list(s.text_iter()) == ["a", " one", " two", " b", " one", " two", "c"]
    assert list(run(body, Fake(), stream=True).text_iter("y")) == [" one", " two"]
    assert list(run(body, Fake()).text_iter()) == ["a <a> b <b>c"]
    assert list(run(body, Fake()).text_iter("y")) == [" <b>"]


def test_row_16_streams_carry_meta_data_in_an_event_loop():
    async def main():
        s = run(says("a", gen("x")), Fake(), stream=True)
        return [item async for item in s.text_async_iter("x", return_meta_data=True)]

    items = asyncio.run(main())  # one item or two: pieces that have come meanwhile are one
    assert "".join(text for text, _ in items) == " one two" and items[-1][1] == {"completion_tokens": 2}


def test_row_17_bound_arguments_win_and_unknown_ones_are_named(backend):
    @function
    def body(s, word):
        s += word + gen("x")

    assert body.bind(word="a").run(word="b", backend=backend)["x"] == " <a>"
    with pytest.raises(AssertionError, match=r"bind\(wrd=\.\.\.\): body\(\) has no such argument; it has word"):
        body.bind(wrd="a")


@function
def two(s, a, b="y"):
    s += a + b + gen("x")


def test_row_18_batches_take_dicts_and_tuples_and_keep_their_order(backend):
    assert two.run_batch([], backend=backend) == []
    states = two.run_batch([{"a": "p"}, ("q",), ["r", "z"]], backend=backend)
    assert [s["x"] for s in states] == [" <py>", " <qy>", " <rz>"]
    found = two.run_batch([(str(i),) for i in range(300)], backend=backend, generator_style=True)
    assert [s["x"] for s in found] == [f" <{i}y>" for i in range(300)]
    with pytest.raises(errors.InvalidRequest, match="Given arguments mismatch the SGL function signature"):
        two.run_batch([("a", "b", "c")], backend=backend)
    with pytest.raises(errors.InvalidRequest, match="Given arguments mismatch"):
        two.run_batch([{"c": "d"}], backend=backend)


@pytest.mark.parametrize(("length", "is_cached"), [(64, False), (65, True)])
def test_row_19_a_batch_caches_a_common_prefix_longer_than_64_characters(length, is_cached):
    backend = Fake()
    backend.precache_in_batch = True

    @function
    def body(s, topic, word):
        s += topic + word + gen("x")

    body.bind(topic="t" * length).run_batch([("a",), ("b",)], backend=backend)
    assert backend.prefixes == (["t" * length] if is_cached else [])
    body.bind(topic="t" * 80).run_batch([("a",)], backend=backend)
    assert len(backend.prefixes) == is_cached


def test_row_19_role_prefixes_count_and_a_switch_turns_it_off(monkeypatch):
    backend = Fake()
    backend.precache_in_batch = True
    body = function(lambda s, word: s.__iadd__(system("s" * 60) + user(word) + assistant(gen("x"))))
    body.run_batch([("a",), ("b",)], backend=backend)
    assert backend.prefixes == ["SYSTEM:" + "s" * 60 + "\nUSER:"]
    monkeypatch.setattr(global_config, "enable_precache_with_tracing", False)
    body.run_batch([("a",), ("b",)], backend=backend)
    assert len(backend.prefixes) == 1


def test_row_20_a_trace_has_holes_for_arguments_and_takes_part_in_nothing_unknown(backend):
    @function
    def inner(s, word):
        s += "in " + word

    @function
    def body(s, word, count):
        s += "a" + word + gen("x")
        inner(word)
        s += s["x"]

    trace = body.trace(backend=backend)
    assert any(isinstance(node, SglArgument) for node in trace.flatten_nodes())
    assert isinstance(trace.variables["x"], SglVariable)
    with pytest.raises(TypeError, match=r"Cannot put argument inside a f-string.*write s \+= \"...\" \+ word"):
        function(lambda s, word: s.__iadd__(f"a {word}")).trace(backend=backend)
    with pytest.raises(TypeError, match="argument 'word' is not known while the program is traced"):
        function(lambda s, word: s.__iadd__("yes" if word else "no")).trace(backend=backend)
    with pytest.raises(TypeError, match="is not known while the program is traced"):
        function(lambda s, word: s.__iadd__("a" * len(word))).trace(backend=backend)


def test_row_21_a_dtype_keeps_the_text_and_numbers_stop_at_blanks(connect):
    backend = connect(reply=lambda prompt, op: ["42"])
    s = run(says("n=", gen_int("x", stop="#")), backend)
    assert s["x"] == "42"
    (op,) = [op for op in backend.client.submits[0].ops if isinstance(op, Gen)]
    assert op.grammar.text == r"[-+]?[0-9]+[ \n]*" and op.params.stop == ("#", " ", "\n")


def test_row_21_a_dtype_beats_a_regex_with_a_warning():
    with pytest.warns(UserWarning, match=r"dtype=<class 'int'> and regex: dtype is used"):
        expr = gen("x", dtype=int, regex="[a-z]")
    assert expr.grammar == gen("x", dtype=int).grammar


def test_row_24_verbosity_2_logs_the_text_of_finished_programs(monkeypatch, caplog):
    monkeypatch.setattr(global_config, "verbosity", 2)
    with caplog.at_level(logging.INFO, logger="phloem"):
        run(says("a", gen("x")), Fake(), use_thread=False)
    assert "program ended: a <a>" in caplog.text


def test_asked_wrong_arguments_of_a_program_are_pythons_own_errors(backend):
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'a'"):
        two.run(backend=backend)
    with pytest.raises(TypeError, match="unexpected keyword argument 'c'; it takes a, b"):
        two.run(a="x", c="y", backend=backend)
    with pytest.raises(errors.InvalidRequest, match=r"run_batch\(\) does not know 'temprature'"):
        two.run_batch([("a",)], backend=backend, temprature=1)
