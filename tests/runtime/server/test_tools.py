"""Tool calling over HTTP, through the openai client: whole and streamed, and its turns sent back."""

import json

import openai
import phloem
import pytest
from phloem.protocol import ops
from phloem.runtime.server.app import create_app
from phloem.runtime.tokenizer import load_chat_template, load_tokenizer
from phloem.tests.runtime.server.doubles import live_server
from phloem.tests.runtime.string_engine import StringEngine

ASK = [{"role": "user", "content": "warm?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Bonn"]}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
TWO = (
    'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
)


class Seen:
    """A string engine's reply that remembers what it was asked."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.prompts: list[str] = []
        self.gens: list[ops.Gen] = []

    def __call__(self, prompt: str, op: ops.Gen) -> list[str]:
        self.prompts.append(prompt)
        self.gens.append(op)
        return [self.text] * op.n

    @property
    def tags(self) -> dict:
        return json.loads(self.gens[-1].grammar.text)


def test_calls_come_as_the_openai_client_reads_them(serve):
    seen = Seen(TWO)
    server = serve(StringEngine(reply=seen))
    answer = server.openai.chat.completions.create(model="string", messages=ASK, tools=[WEATHER, CLOCK], n=2)
    for choice in answer.choices:
        assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me see."
        assert [call.function.name for call in choice.message.tool_calls] == ["weather", "clock"]
        assert json.loads(choice.message.tool_calls[0].function.arguments) == {"city": "Rome"}
        assert choice.message.tool_calls[1].function.arguments == "{}"
    ids = [call.id for choice in answer.choices for call in choice.message.tool_calls]
    assert len(set(ids)) == 4 and all(id.startswith("call_") for id in ids)
    assert '"name": "weather", "description": "Tells."' in seen.prompts[0]
    assert [tag["begin"].split('"')[3] for tag in seen.tags["tags"]] == ["weather", "clock"]
    assert seen.tags["tags"][0]["schema"]["additionalProperties"] is False


def test_a_stream_tells_the_same_calls_piece_by_piece(serve):
    server = serve(StringEngine(reply=Seen(TWO)))
    content, calls, reasons, logprobs = "", {}, [], []
    ask = {"model": "string", "messages": ASK, "tools": [WEATHER, CLOCK], "logprobs": True}
    whole = server.openai.chat.completions.create(**ask)
    for chunk in server.openai.chat.completions.create(**ask, stream=True):
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        logprobs += choice.logprobs.content if choice.logprobs else []
        for call in choice.delta.tool_calls or []:
            known = calls.setdefault(call.index, {"id": call.id, "name": call.function.name, "arguments": ""})
            assert known["id"] is not None
            known["arguments"] += call.function.arguments
        if choice.finish_reason:
            reasons.append(choice.finish_reason)
    assert content == "Let me see." and reasons == ["tool_calls"]
    assert [(call["name"], call["arguments"]) for call in calls.values()] == [
        ("weather", '{"city": "Rome"}'),
        ("clock", "{}"),
    ]
    assert logprobs == whole.choices[0].logprobs.content


@pytest.mark.parametrize(
    ("fields", "names", "must", "stops"),
    [
        ({}, 2, False, False),
        ({"tool_choice": "auto", "parallel_tool_calls": False}, 2, False, True),
        ({"tool_choice": "required"}, 2, True, False),
        ({"tool_choice": {"type": "function", "function": {"name": "clock"}}}, 1, True, True),
    ],
)
def test_tool_choice_becomes_a_grammar(serve, fields, names, must, stops):
    seen = Seen("no")
    server = serve(StringEngine(reply=seen))
    answer = server.openai.chat.completions.create(model="string", messages=ASK, tools=[WEATHER, CLOCK], **fields)
    assert (len(seen.tags["tags"]), seen.tags["begin_at_once"], seen.tags["stop_after_first"]) == (names, must, stops)
    assert answer.choices[0].message.content == "no" and answer.choices[0].message.tool_calls is None
    assert answer.choices[0].finish_reason == "stop"


def test_tool_choice_none_is_as_if_there_were_no_tools(serve):
    seen = Seen(TWO)
    server = serve(StringEngine(reply=seen))
    answer = server.openai.chat.completions.create(
        model="string", messages=ASK, tools=[WEATHER], tool_choice="none", response_format={"type": "text"}
    )
    assert answer.choices[0].message.content == TWO and seen.gens[0].grammar is None
    assert "weather" not in seen.prompts[0]


def test_a_call_cut_short_says_so(serve):
    server = serve(StringEngine(reply=Seen('<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"')))
    ask = {"model": "string", "messages": ASK, "tools": [WEATHER], "max_tokens": 5}
    (choice,) = server.openai.chat.completions.create(**ask).choices
    assert choice.finish_reason == "length" and choice.message.tool_calls[0].function.name == "weather"
    chunks = list(server.openai.chat.completions.create(**ask, stream=True))
    assert chunks[-1].choices[0].finish_reason == "length"


def test_calls_and_results_go_back_as_the_model_wrote_and_reads_them(serve):
    seen = Seen(TWO)
    server = serve(StringEngine(reply=seen))
    first = server.openai.chat.completions.create(model="string", messages=ASK, tools=[WEATHER, CLOCK])
    message = first.choices[0].message
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": f"r{i}"} for i, call in enumerate(message.tool_calls)
    ]
    system = {"role": "system", "content": "Be kind."}
    server.openai.chat.completions.create(
        model="string", messages=[system, *ASK, message, *results, *ASK], tools=[WEATHER, CLOCK]
    )
    prompt = seen.prompts[1]
    assert f"assistant\n{TWO}<|im_end|>" in prompt
    answers = "<tool_response>\nr0\n</tool_response>\n<tool_response>\nr1\n</tool_response>"
    assert f"<|im_start|>user\n{answers}<|im_end|>\n<|im_start|>user\nwarm?" in prompt
    assert prompt.startswith("<|im_start|>system\nBe kind.\n\n") and prompt.count("<tools>") == 1


def test_a_real_engine_writes_valid_calls_and_finds_its_prefix_again(tiny_model_path):
    tokenizer = load_tokenizer(tiny_model_path)
    with phloem.Engine(model=str(tiny_model_path), precision="float32", num_slots=8192) as engine:
        app = create_app(engine.client, tokenizer, load_chat_template(tiny_model_path, tokenizer), model_name="tiny")
        with live_server(app) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            ask = {"model": "tiny", "tools": [WEATHER, CLOCK], "temperature": 1.3, "max_tokens": 300}
            messages = list(ASK)
            cached = []
            for seed in range(3):
                answer = client.chat.completions.create(
                    messages=messages,
                    tool_choice={"type": "function", "function": {"name": "weather"}},
                    seed=seed,
                    **ask,
                )
                (call,) = answer.choices[0].message.tool_calls
                arguments = json.loads(call.function.arguments)
                assert arguments["city"] in ("Rome", "Bonn") and set(arguments) <= {"city", "days"}
                messages += [
                    answer.choices[0].message.model_dump(exclude_none=True),
                    {"role": "tool", "tool_call_id": call.id, "content": "warm"},
                ]
                cached.append(answer.usage.prompt_tokens_details.cached_tokens)
    assert cached[0] < cached[1] < cached[2]


def test_allowed_tools_are_the_only_ones_that_are_called_and_all_are_shown(serve):
    """``allowed_tools`` was refused by a message that did not name it."""
    seen = Seen('<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>')
    server = serve(StringEngine(reply=seen))
    for mode in ("auto", "required"):
        allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": "clock"}}]}
        choice = {"type": "allowed_tools", "allowed_tools": allowed}
        server.openai.chat.completions.create(model="string", messages=ASK, tools=[WEATHER, CLOCK], tool_choice=choice)
        assert [tag["begin"].split('"')[3] for tag in seen.tags["tags"]] == ["clock"]
        assert seen.tags["at_least_one"] is (mode == "required")
        assert '"name": "weather"' in seen.prompts[-1] and '"name": "clock"' in seen.prompts[-1]


def test_allowed_tools_that_are_none_are_named(serve):
    server = serve()
    for tools, named in (([{"type": "function", "function": {"name": "sun"}}], "allows 'sun'"), ([], "tool_choice")):
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": tools}}
        with pytest.raises(openai.BadRequestError, match=named):
            server.openai.chat.completions.create(model="string", messages=ASK, tools=[CLOCK], tool_choice=choice)
