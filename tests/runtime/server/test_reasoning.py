"""Reasoning apart from content in chat completions: whole, streamed, with tools, closed, and sent back."""

import openai
import pytest
from phloem.protocol.messages import ThinkingStyle
from phloem.tests.runtime.server.doubles import ChatML
from phloem.tests.runtime.string_engine import StringEngine

ASK = [{"role": "user", "content": "2 + 2?"}]
CLOCK = {"type": "function", "function": {"name": "clock"}}
THOUGHT = "<think>\nlet me see\n</think>\n\nfour"
CALL = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'


@pytest.fixture
def thinking(serve):
    """``thinking(text, is_forced=False)``: a server whose model answers ``text``; and the prompts that it gets."""

    def start(text: str, *, is_forced: bool = False):
        prompts: list[str] = []

        def reply(prompt, op):
            prompts.append(prompt)
            return text

        template = ChatML(ThinkingStyle(is_forced=is_forced))
        return serve(StringEngine(reply=reply), template=template), prompts

    return start


def test_reasoning_and_content_are_two_fields_whole_and_streamed(thinking):
    server, _ = thinking(THOUGHT)
    ask = {"model": "string", "messages": ASK, "logprobs": True}
    whole = server.openai.chat.completions.create(**ask)
    message = whole.choices[0].message
    assert (message.reasoning_content, message.content) == ("let me see", "four")
    assert whole.usage.completion_tokens_details.reasoning_tokens > 0
    reasoning = content = ""
    logprobs = []
    for chunk in server.openai.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage
        for choice in chunk.choices:
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            content += choice.delta.content or ""
            logprobs += choice.logprobs.content if choice.logprobs else []
    assert (reasoning, content) == ("let me see", "four")
    assert logprobs == whole.choices[0].logprobs.content and usage == whole.usage


def test_a_model_without_tags_has_no_reasoning_field(serve):
    server = serve(StringEngine(reply=lambda prompt, op: THOUGHT))
    answer = server.http.post("/v1/chat/completions", json={"messages": ASK}).json()
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": THOUGHT, "refusal": None}


def test_reasoning_before_a_call_is_apart_from_it(thinking):
    server, _ = thinking(f"<think>\nhm\n</think>\n\n{CALL}")
    answer = server.openai.chat.completions.create(model="string", messages=ASK, tools=[CLOCK])
    message = answer.choices[0].message
    assert (message.reasoning_content, message.content) == ("hm", None)
    assert [call.function.name for call in message.tool_calls] == ["clock"]


@pytest.mark.parametrize(
    ("is_forced", "fields", "ending"),
    [
        (True, {}, "assistant\n"),
        (True, {"reasoning_effort": "none"}, "assistant\n\n</think>\n\n"),
        (False, {"reasoning_effort": "none"}, "assistant\n<think>\n\n</think>\n\n"),
        (True, {"response_format": {"type": "json_object"}}, "assistant\n\n</think>\n\n"),
        (False, {"response_format": {"type": "json_object"}}, "assistant\n"),
        (True, {"tools": [CLOCK], "tool_choice": "required"}, "assistant\n\n</think>\n\n"),
        (True, {"tools": [CLOCK]}, "assistant\n"),
    ],
)
def test_reasoning_is_closed_where_it_is_unwanted_or_a_grammar_begins_with_the_answer(
    thinking, is_forced, fields, ending
):
    server, prompts = thinking("{}", is_forced=is_forced)
    answer = server.http.post("/v1/chat/completions", json={"messages": ASK, **fields}).json()
    assert prompts[0].endswith(ending)
    is_open = is_forced and ending == "assistant\n"
    field = "reasoning_content" if is_open else "content"
    assert answer["choices"][0]["message"][field] == "{}"


def test_reasoning_goes_back_to_the_template(serve):
    seen = []

    class Recording(ChatML):
        def render(self, messages, **options):
            seen.append([message.get("reasoning_content") for message in messages])
            return super().render(messages, **options)

    server = serve(StringEngine(reply=lambda prompt, op: THOUGHT), template=Recording(ThinkingStyle()))
    message = server.openai.chat.completions.create(model="string", messages=ASK).choices[0].message
    server.openai.chat.completions.create(model="string", messages=[*ASK, message, *ASK])
    assert seen == [[None], [None, "let me see", None]]
    with pytest.raises(openai.BadRequestError, match="reasoning_content belongs to the assistant"):
        server.openai.chat.completions.create(model="string", messages=[{**ASK[0], "reasoning_content": "x"}])


def test_other_efforts_are_refused_by_name(thinking):
    server, _ = thinking(THOUGHT)
    with pytest.raises(openai.BadRequestError, match="'reasoning_effort' is not supported.*only \\\\*\"none"):
        server.openai.chat.completions.create(model="string", messages=ASK, reasoning_effort="high")
