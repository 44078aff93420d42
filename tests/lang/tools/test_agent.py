"""Programs that call tools: what the model is asked, what becomes of its calls, and what the loop reuses."""

import asyncio
import itertools
import json

import phloem
import pytest
from phloem.lang.tools.calls import ToolCalls
from phloem.protocol import errors, ops


def call(name, /, **arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


@phloem.tool
def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


@phloem.tool
def fail(why: str) -> str:
    """Fails."""
    raise RuntimeError(why)


def tags_of(backend, op_index=0):
    gens = [op for submit in backend.client.submits for op in submit.ops if isinstance(op, ops.Gen)]
    grammar = gens[op_index].grammar
    return None if grammar is None else json.loads(grammar.text)


@pytest.mark.parametrize(
    ("choice", "parallel", "begins", "at_once", "stops"),
    [
        ("auto", True, ["add", "fail"], False, False),
        ("auto", False, ["add", "fail"], False, True),
        ("required", True, ["add", "fail"], True, False),
        ("fail", True, ["fail"], True, True),
    ],
)
def test_the_grammar_says_which_calls_can_be_written(connect, choice, parallel, begins, at_once, stops):
    @phloem.function
    def ask(s):
        s += "Q" + phloem.gen("calls", tools=[add, fail], tool_choice=choice, parallel_tool_calls=parallel)

    backend = connect(reply=lambda prompt, op: call("fail", why="x"))
    (only,) = ask.run(backend=backend)["calls"]
    assert only.name == "fail" and only.arguments == {"why": "x"}
    tags = tags_of(backend)
    assert [tag["begin"] for tag in tags["tags"]] == [f'<tool_call>\n{{"name": "{n}", "arguments": ' for n in begins]
    assert (tags["begin_at_once"], tags["at_least_one"], tags["stop_after_first"]) == (at_once, at_once, stops)
    assert tags["tags"][-1]["schema"]["additionalProperties"] is False


def test_without_calls_the_text_is_the_answer_and_none_restricts_nothing(connect):
    @phloem.function
    def ask(s):
        s += "Q" + phloem.gen("calls", tools=[add], tool_choice="none")

    backend = connect(reply=lambda prompt, op: "just " + call("add", a=1))
    calls = ask.run(backend=backend)["calls"]
    assert isinstance(calls, ToolCalls) and not calls and calls.text == "just " + call("add", a=1)
    assert tags_of(backend) is None


def test_run_tools_appends_the_results_as_turns(connect):
    @phloem.function
    def ask(s):
        with s.system():
            s += "Be brief." + phloem.describe_tools([add, fail])
        s.user("2+3?")
        with s.assistant():
            s += phloem.gen("calls", tools=[add, fail])
        s.ret_value = s.run_tools("calls")
        with s.assistant():
            s += phloem.gen("answer")

    text = call("add", a=2, b=3) + "\n" + call("fail", why="no power")
    prompts = []

    def reply(prompt, op):
        prompts.append(prompt)
        return text if op.grammar else "5."

    backend = connect(reply=reply)
    results = []

    @phloem.function
    def keep(s):
        ask.func(s)
        results.extend(s.ret_value)

    s = keep.run(backend=backend)
    assert s["answer"] == "5." and s.raw("calls") == text
    assert [r.text for r in results] == ["5", '{"error": "RuntimeError: no power"}']
    assert results[0].value == 5 and not results[0].is_error and isinstance(results[1].error, RuntimeError)
    assert json.dumps(add.schema()) + "\n" + json.dumps(fail.schema()) in prompts[0]
    turn = "<tool_response>\n5\n</tool_response>\n<tool_response>\n" + results[1].text + "\n</tool_response>"
    assert prompts[1].endswith(text + "<|im_end|>\n<|im_start|>user\n" + turn + "<|im_end|>\n<|im_start|>assistant\n")
    assert [m["role"] for m in s.messages()] == ["system", "user", "assistant", "user", "assistant"]
    assert s.stats()["messages"] == 2


def adding(prompt, op):
    """Adds 1 until it has 3."""
    said = prompt.count("<tool_response>")
    return call("add", a=said) if op.grammar and said < 3 else f"It is {said}."


def test_an_agent_calls_until_it_can_answer(connect):
    run = phloem.agent("Count to 3.", tools=[add], system="Count.", backend=connect(reply=adding))
    assert run.answer == "It is 3." and run.finished and run.turns == 4
    assert [c.arguments["a"] for c in run.calls] == [0, 1, 2] and [r.value for r in run.results] == [1, 2, 3]
    assert run.state["agent"] == "It is 3." and run.state["agent0"][0].name == "add"


def test_the_last_turn_allowed_has_to_answer(connect):
    run = phloem.agent("Count to 3.", tools=[add], max_turns=2, backend=connect(reply=adding))
    assert (run.turns, run.finished, run.answer) == (2, False, "It is 1.")
    with pytest.raises(errors.InvalidRequest, match="max_turns=0: must be 1 or more"):
        phloem.agent("x", tools=[add], max_turns=0, backend=connect())


def test_a_required_call_is_required_once(connect):
    backend = connect(reply=adding)
    phloem.agent("Count.", tools=[add], tool_choice="required", backend=backend)
    assert [tags_of(backend, i)["at_least_one"] for i in range(3)] == [True, False, False]


def test_arguments_that_a_tool_refuses_become_a_result(connect):
    from typing import Annotated

    from pydantic import AfterValidator

    def even(x: int) -> int:
        if x % 2:
            raise ValueError("must be even")
        return x

    @phloem.tool
    def halve(x: Annotated[int, AfterValidator(even)]) -> int:
        """Halve."""
        return x // 2

    replies = iter([call("halve", x=3), call("halve", x=4), "two"])
    run = phloem.agent("?", tools=[halve], backend=connect(reply=lambda prompt, op: next(replies)))
    assert run.results[0].is_error and "must be even" in run.results[0].text
    assert run.results[1].text == "2" and run.answer == "two"


def test_async_tools_of_one_turn_run_at_the_same_time(connect):
    waiting, both = [], asyncio.Event()

    @phloem.tool
    async def slow(name: str) -> str:
        """Slow."""
        waiting.append(name)
        if len(waiting) == 2:
            both.set()
        await asyncio.wait_for(both.wait(), 10)
        return name.upper()

    replies = iter([call("slow", name="a") + "\n" + call("slow", name="b"), "AB"])

    @phloem.function
    async def program(s):
        s.user("?")
        return await phloem.run_agent_async(s, tools=[slow])

    async def main():
        state = await program.run(backend=connect(reply=lambda prompt, op: next(replies)))
        return state.ret_value

    run = asyncio.run(main())
    assert [r.text for r in run.results] == ["A", "B"] and run.answer == "AB"

    @phloem.function
    def plain(s):
        s.user("?")
        phloem.run_agent(s, tools=[slow])

    replies = iter([call("slow", name="a")])
    with pytest.raises(errors.InvalidRequest, match="'slow' is async; use await"):
        plain.run(backend=connect(reply=lambda prompt, op: next(replies)))


def test_run_tools_refuses_a_variable_without_calls(connect):
    @phloem.function
    def ask(s):
        s += "Q" + phloem.gen("x")
        s.run_tools("x")

    with pytest.raises(errors.InvalidRequest, match=r"'x' was not made by gen\('x', tools"):
        ask.run(backend=connect())


# -- on an engine -----------------------------------------------------------------------------------------------------


@phloem.tool
def move(steps: int, to: bool) -> str:
    """Move."""
    return f"moved {steps} {to}"


@pytest.mark.parametrize("seed", range(4))
def test_every_call_a_model_can_write_is_valid(engine, seed):
    @phloem.function
    def ask(s):
        s += "Q" + phloem.gen("calls", tools=[add, move], tool_choice="required", parallel_tool_calls=False)

    calls = ask.run(backend=engine, temperature=1.5, seed=seed, max_new_tokens=300)["calls"]
    assert len(calls) == 1 and calls.text == ""
    assert isinstance(calls[0].run(), int | str)


def test_each_turn_of_an_agent_finds_the_earlier_turns_in_the_cache(engine):
    @phloem.function
    def chat(s):
        s.user("go")
        for turn in range(3):
            name = f"turn{turn}"
            s += phloem.assistant(phloem.gen(name, tools=[move], tool_choice="move"))
            s.run_tools(name)

    s = chat.run(backend=engine, temperature=0.7, seed=1, max_new_tokens=300)
    metas = [s.get_meta_info(f"turn{i}") for i in range(3)]
    for before, after in itertools.pairwise(metas):
        # A turn ends with its last token, and with what that forces: nobody has computed these yet.
        not_computed = 2 + before["forced_tokens"]
        assert after["cached_tokens"] >= before["prompt_tokens"] + before["completion_tokens"] - not_computed
        assert after["cached_tokens"] > before["cached_tokens"]


@pytest.mark.model
def test_a_real_model_calls_a_tool_and_reads_its_result(smollm2_path):
    @phloem.tool
    def get_temperature(city: str) -> str:
        """The temperature in a city right now.

        Args:
            city: name of the city
        """
        return f"{city}: 31 degrees"

    with phloem.Engine(model=str(smollm2_path), num_slots=4096) as engine:
        run = phloem.agent(
            "How warm is it in Paris?",
            tools=[get_temperature],
            tool_choice="get_temperature",
            max_turns=2,
            backend=engine,
            temperature=0,
            max_new_tokens=60,
        )
    assert run.calls[0].arguments == {"city": "Paris"}
    assert run.answer
