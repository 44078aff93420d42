"""Separating reasoning from answers: whole, streamed, in later turns, with tags split between chunks."""

import pytest
from phloem import assistant, function, gen, separate_reasoning, user
from phloem.lang.reasoning import STYLES
from phloem.protocol import errors
from phloem.protocol.thinking_splitter import ThinkingSplitter

THOUGHT = "<think>\nlet me see\n</think>\n\nfour"


@function
def ask(s, more=False):
    s += user("2 + 2?")
    s += assistant(separate_reasoning(gen("a"), model_type="qwen3"))
    if more:
        s += user("again") + assistant(gen("b"))


def test_the_answer_and_the_reasoning_are_two_variables(connect):
    backend = connect(reply=lambda prompt, op: THOUGHT)
    s = ask.run(backend=backend)
    assert (s["a"], s["a_reasoning_content"]) == ("four", "let me see")
    assert s.messages()[-1] == {"role": "assistant", "content": "four"}
    assert s.stats()["messages"] == 1


def test_later_turns_see_the_answer_alone(connect):
    prompts = []

    def reply(prompt, op):
        prompts.append(prompt)
        return THOUGHT

    s = ask.run(more=True, backend=connect(reply=reply))
    s["b"]
    assert "let me see" not in prompts[1] and "four<|im_end|>" in prompts[1]
    assert s.stats()["messages"] == 2


def test_reasoning_is_separated_while_it_streams(connect):
    s = ask.run(backend=connect(reply=lambda prompt, op: "<think> a b </think> c d"), stream=True)
    assert list(s.text_iter("a")) == [" c", " d"]
    assert "".join(s.text_iter("a_reasoning_content")).strip() == "a b"
    assert "a b" not in "".join(s.text_iter())


@pytest.mark.parametrize(
    ("model", "text", "reasoning", "answer"),
    [
        ("qwen3", THOUGHT, "let me see", "four"),
        ("qwen3", "four", "", "four"),
        ("qwen3", "<thinker", "", "<thinker"),
        ("deepseek-r1", "let me see\n</think>\nfour", "let me see", "four"),
        ("deepseek-r1", "never done", "never done", ""),
        ("kimi", "◁think▷x◁/think▷y", "x", "y"),
        ("qwen3", "<think>a</thi b</think>c", "a</thi b", "c"),
        ("qwen3", "", "", ""),
    ],
)
def test_a_tag_may_be_split_between_chunks(model, text, reasoning, answer):
    for size in (1, 2, 3, 5, 100):
        splitter = ThinkingSplitter(STYLES[model])
        parts = [splitter.push(text[i : i + size]) for i in range(0, len(text), size)] + [splitter.finish()]
        assert "".join(r for r, _ in parts) == reasoning, size
        assert "".join(a for _, a in parts) == answer, size


def test_a_compiled_program_separates_too(connect):
    backend = connect(reply=lambda prompt, op: THOUGHT)
    s = ask.compile(more=True, backend=backend).run(backend=backend)
    assert (s["a"], s["a_reasoning_content"]) == ("four", "let me see")


def test_wrong_use_is_refused(connect):
    with pytest.raises(errors.InvalidRequest, match="model_type 'gpt-9' is unknown; there are 'deepseek-r1'"):
        function(lambda s: s.__iadd__(separate_reasoning(gen("a"), "gpt-9"))).run(backend=connect())
    with pytest.raises(errors.InvalidRequest, match="takes one gen"):
        function(lambda s: s.__iadd__(separate_reasoning("x" + gen("a")))).run(backend=connect())
