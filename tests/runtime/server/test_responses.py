"""OpenAI's Responses API through the openai client and raw HTTP, over the string engine and a tiny real one."""

import itertools
import json

import openai
import phloem
import pytest
from phloem.protocol import errors
from phloem.protocol.messages import ThinkingStyle
from phloem.runtime.config import StoreLimits
from phloem.runtime.server.app import create_app
from phloem.runtime.tokenizer import load_chat_template, load_tokenizer
from phloem.tests.runtime.server.doubles import ChatML, ScriptedClient, failing, live_server
from phloem.tests.runtime.server.test_tools import TWO, Seen
from phloem.tests.runtime.string_engine import StringEngine

WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "Tells.",
    "strict": True,
    "parameters": {"type": "object", "properties": {"city": {"enum": ["Rome", "Bonn"]}}, "required": ["city"]},
}
CLOCK = {"type": "function", "name": "clock", "parameters": {"type": "object", "properties": {}}}
THOUGHT = "<think>\nlet me see\n</think>\n\nfour"
LOGPROBS = "message.output_text.logprobs"


def ask(server, **fields):
    return server.http.post("/v1/responses", json={"input": "warm?", **fields})


def events_of(text: str) -> list[dict]:
    """The events of a stream: named as their types, numbered without a gap."""
    found = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def without_ids(value):
    """``value`` without what differs from answer to answer."""
    if isinstance(value, dict):
        changing = ("id", "call_id", "created_at", "cached_tokens")
        return {name: without_ids(inner) for name, inner in value.items() if name not in changing}
    return [without_ids(inner) for inner in value] if isinstance(value, list) else value


def test_a_response_repeats_its_request_and_has_its_output(serve):
    seen = Seen("good day")
    server = serve(StringEngine(reply=seen))
    answer = server.openai.responses.create(
        model="string",
        input=[{"role": "developer", "content": "Short."}, {"role": "user", "content": [TEXT]}],
        instructions="Be kind.",
        max_output_tokens=9,
        temperature=0.5,
        top_p=0.9,
        metadata={"a": "b"},
        user="someone",
        extra_body={"top_k": 5},
    )
    assert answer.id.startswith("resp_") and (answer.status, answer.output_text) == ("completed", "good day")
    assert (answer.instructions, answer.max_output_tokens, answer.temperature) == ("Be kind.", 9, 0.5)
    assert (answer.metadata, answer.tools, answer.tool_choice) == ({"a": "b"}, [], "auto")
    assert answer.usage.output_tokens == 2 and answer.usage.total_tokens == answer.usage.input_tokens + 2
    assert answer.usage.output_tokens_details.reasoning_tokens == 0
    params = seen.gens[0].params
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (9, 0.5, 0.9, 5)
    turns = "".join(f"<|im_start|>{turn}<|im_end|>\n" for turn in ("system\nBe kind.", "system\nShort.", "user\nwarm?"))
    assert seen.prompts[0].startswith(turns)


TEXT = {"type": "input_text", "text": "warm?"}


@pytest.mark.parametrize(
    ("text", "template", "fields", "kinds", "status"),
    [
        ("one two three", None, {}, ["message"], "completed"),
        ("one two three", None, {"include": [LOGPROBS], "top_logprobs": 2}, ["message"], "completed"),
        ("one two three", None, {"max_output_tokens": 2}, ["message"], "incomplete"),
        (TWO, None, {"tools": [WEATHER, CLOCK]}, ["message", "function_call", "function_call"], "completed"),
        (TWO, None, {"tools": [WEATHER, CLOCK], "max_output_tokens": 8}, ["message", "function_call"], "incomplete"),
        (f"{TWO}\nSo.", None, {"tools": [WEATHER, CLOCK]}, ["message", *["function_call"] * 2, "message"], "completed"),
        (THOUGHT, ThinkingStyle(), {}, ["reasoning", "message"], "completed"),
        ("", None, {}, [], "completed"),
    ],
)
def test_a_stream_makes_the_response_that_is_sent_whole(serve, text, template, fields, kinds, status):
    server = serve(StringEngine(reply=Seen(text)), template=ChatML(template))
    whole = ask(server, **fields).json()
    events = events_of(ask(server, **fields, stream=True).text)
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1]["type"] == f"response.{status}" and whole["status"] == status
    assert [item["type"] for item in whole["output"]] == kinds
    assert without_ids(events[-1]["response"]) == without_ids(whole)
    assert whole["incomplete_details"] == ({"reason": "max_output_tokens"} if status == "incomplete" else None)
    check_order(events)


DONE_OF = {
    "response.output_text.delta": ("response.output_text.done", "text"),
    "response.reasoning_text.delta": ("response.reasoning_text.done", "text"),
    "response.function_call_arguments.delta": ("response.function_call_arguments.done", "arguments"),
}


def check_order(events: list[dict]) -> None:
    """Each item is added, filled and done before the next; what is done is the sum of its deltas."""
    output = events[-1]["response"]["output"]
    place, gathered, kinds = -1, "", []
    for event in events[2:-1]:
        kind = event["type"]
        if kind == "response.output_item.added":
            place, gathered = place + 1, ""
            assert event["item"]["status"] == "in_progress"
        assert event["output_index"] == place and event.get("item_id", output[place]["id"]) == output[place]["id"]
        if kind in DONE_OF:
            gathered += event["delta"]
        for done, field in DONE_OF.values():
            if kind == done:
                assert event[field] == gathered
        if kind == "response.output_item.done":
            assert event["item"] == output[place]
        if not (kind in DONE_OF and kinds and kinds[-1] == kind):
            kinds.append(kind.removeprefix("response."))
            kinds[-1] = kind if kind in DONE_OF else kinds[-1]
    assert place == len(output) - 1
    for item in output:
        parts = ["content_part.added"] if item["type"] != "function_call" else []
        delta = {
            "message": "response.output_text.delta",
            "reasoning": "response.reasoning_text.delta",
            "function_call": "response.function_call_arguments.delta",
        }[item["type"]]
        wanted = ["output_item.added", *parts, delta, DONE_OF[delta][0].removeprefix("response.")]
        wanted += ["content_part.done"] * len(parts) + ["output_item.done"]
        assert kinds[: len(wanted)] == wanted
        kinds = kinds[len(wanted) :]
    assert kinds == []


def test_the_clients_stream_gathers_text_and_arguments(serve):
    server = serve(StringEngine(reply=Seen(TWO)))
    with server.openai.responses.stream(model="string", input="warm?", tools=[WEATHER, CLOCK]) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_response()
    assert {"response.output_text.delta", "response.function_call_arguments.done"} <= kinds
    assert [json.loads(item.arguments) for item in final.output if item.type == "function_call"] == [
        {"city": "Rome"},
        {},
    ]


def test_calls_outputs_and_reasoning_go_back_as_items(serve):
    seen = Seen(TWO)
    server = serve(StringEngine(reply=seen))
    first = server.openai.responses.create(model="string", input="warm?", tools=[WEATHER, CLOCK])
    calls = [item for item in first.output if item.type == "function_call"]
    outputs = [
        {"type": "function_call_output", "call_id": call.call_id, "output": f"r{i}"} for i, call in enumerate(calls)
    ]
    reasoning = {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "hm"}],
    }
    items = [{"role": "user", "content": "warm?"}, reasoning, *first.output, *outputs]
    server.openai.responses.create(model="string", input=items, tools=[WEATHER, CLOCK])
    prompt = seen.prompts[1]
    assert f"assistant\n{TWO}<|im_end|>" in prompt
    assert "<tool_response>\nr0\n</tool_response>\n<tool_response>\nr1\n</tool_response>" in prompt
    server.openai.responses.create(model="string", input=outputs, previous_response_id=first.id, tools=[WEATHER, CLOCK])
    assert seen.prompts[2] == prompt


def test_a_previous_response_is_the_conversation_so_far_without_its_instructions(serve):
    seen = Seen("good day")
    server = serve(StringEngine(reply=seen))
    first = server.openai.responses.create(model="string", input="warm?", instructions="Be kind.")
    second = server.openai.responses.create(model="string", input="And now?", previous_response_id=first.id)
    third = server.openai.responses.create(model="string", input="Then?", previous_response_id=second.id)
    assert third.previous_response_id == second.id
    turn = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    said = turn.format("warm?") + "good day<|im_end|>\n" + turn.format("And now?")
    assert seen.prompts[1] == said
    assert seen.prompts[2] == said + "good day<|im_end|>\n" + turn.format("Then?")


def test_stored_responses_can_be_read_and_deleted_by_their_key_alone(serve):
    server = serve()
    first = server.openai.responses.create(model="string", input="warm?")
    assert server.openai.responses.retrieve(first.id) == first
    other = openai.OpenAI(base_url=server.openai.base_url, api_key="another", max_retries=0)
    with other:
        with pytest.raises(openai.NotFoundError, match=f"no stored response '{first.id}'"):
            other.responses.retrieve(first.id)
        with pytest.raises(openai.NotFoundError):
            other.responses.delete(first.id)
        with pytest.raises(openai.BadRequestError, match="belongs to another key") as caught:
            other.responses.create(model="string", input="x", previous_response_id=first.id)
        assert caught.value.code == "previous_response_not_found" and caught.value.param == "previous_response_id"
    streamed = server.http.get(f"/v1/responses/{first.id}?stream=true")
    assert streamed.status_code == 400 and "'stream' is not supported" in streamed.json()["error"]["message"]
    server.openai.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        server.openai.responses.retrieve(first.id)


def test_what_shall_not_be_stored_is_not(serve):
    server = serve()
    answer = server.openai.responses.create(model="string", input="warm?", store=False)
    assert answer.store is False and server.http.get(f"/v1/responses/{answer.id}").status_code == 404
    small = serve(stored=StoreLimits(max_count=0))
    answer = small.openai.responses.create(model="string", input="warm?")
    assert answer.store is False and small.http.get(f"/v1/responses/{answer.id}").status_code == 404


def test_streamed_responses_are_stored_too(serve):
    server = serve()
    events = events_of(ask(server, stream=True).text)
    assert server.http.get(f"/v1/responses/{events[-1]['response']['id']}").json() == events[-1]["response"]


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_tool_choice_becomes_a_grammar(serve, mode):
    seen = Seen("no")
    server = serve(StringEngine(reply=seen))
    allowed = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "clock"}]}
    ask(server, tools=[WEATHER, CLOCK], tool_choice=allowed).raise_for_status()
    assert len(seen.tags["tags"]) == 1 and seen.tags["at_least_one"] is (mode == "required")
    assert '"name": "weather"' in seen.prompts[0]
    ask(server, tools=[WEATHER, CLOCK], tool_choice={"type": "function", "name": "weather"}).raise_for_status()
    assert len(seen.tags["tags"]) == 1 and seen.tags["stop_after_first"]
    ask(server, tools=[WEATHER], tool_choice="none").raise_for_status()
    assert seen.gens[-1].grammar is None and "weather" not in seen.prompts[-1]


def test_a_format_is_a_grammar(serve):
    seen = Seen("{}")
    server = serve(StringEngine(reply=seen))
    schema = {"type": "object", "properties": {}}
    ask(server, text={"format": {"type": "json_schema", "name": "x", "schema": schema}}).raise_for_status()
    ask(server, text={"format": {"type": "json_object"}}).raise_for_status()
    ask(server, text={"format": {"type": "text"}}).raise_for_status()
    assert [gen.grammar and json.loads(gen.grammar.text) for gen in seen.gens] == [schema, {"type": "object"}, None]


IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "'input.0.content.0.text' is required"),
        ({"input": [{}]}, "input.0: must be an object with a 'type', one of message, function_call"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "an item of type 'item_reference' is not supported"),
        ({"input": [{"role": "user", "content": [IMAGE]}], "store": False}, "type 'input_image' is not supported"),
        ({"input": [{"role": "user", "content": [IMAGE]}]}, "images are not stored: send store=false"),
        (
            {"input": [{"role": "system", "content": [IMAGE]}], "store": False},
            "images belong to messages of role 'user'",
        ),
        ({"input": [{"role": "user", "content": [IMAGE | {"detail": "low"}]}], "store": False}, "detail"),
        ({"input": [{"role": "tool", "content": "x"}]}, "'user', 'assistant', 'system' or 'developer'"),
        ({"max_output_tokens": -1}, "max_output_tokens=-1: must be >= 0"),
        ({"max_tokens": 5}, "unknown field 'max_tokens'"),
        ({"background": True}, "'background' is not supported"),
        ({"conversation": "conv_1"}, "'conversation' is not supported"),
        ({"truncation": "auto"}, "'truncation' is not supported"),
        ({"reasoning": {"effort": "high"}}, "'effort' is not supported"),
        ({"tools": [{"type": "web_search"}]}, "a tool of type 'web_search' is not supported"),
        ({"tools": [{**CLOCK, "parameters": {"type": 7}}]}, "a JSON schema of type 'object'"),
        ({"tools": [CLOCK, CLOCK]}, "two functions are called 'clock'"),
        ({"tools": [CLOCK], "tool_choice": {"type": "function", "name": "sun"}}, "asks for 'sun'"),
        ({"tool_choice": "required"}, "asks for 'required'"),
        ({"include": ["reasoning.encrypted_content"]}, "'reasoning.encrypted_content' is not supported"),
        ({"top_logprobs": 3}, "top_logprobs needs"),
        ({"include": [LOGPROBS], "tools": [CLOCK]}, "without tools and reasoning"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "a schema goes with type 'json_schema'"),
        ({"stream_options": {}}, "stream_options is only allowed with stream=true"),
        ({"previous_response_id": "resp_1"}, "no stored response 'resp_1'"),
    ],
)
def test_what_is_wrong_or_not_served_is_named(shared_server, fields, said):
    response = ask(shared_server, **fields)
    assert response.status_code == 400, response.text
    assert said in response.json()["error"]["message"]


def test_a_stream_that_fails_says_so(serve):
    server = serve(client=ScriptedClient(failing(errors.EngineLost("gone"), after="so far")))
    *_, delta, last = events_of(ask(server, stream=True).text)
    assert delta["delta"] == "so far" and last["type"] == "response.failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "gone"}
    assert server.http.get(f"/v1/responses/{last['response']['id']}").status_code == 404


def test_a_conversation_stays_in_the_cache_token_for_token(tiny_model_path):
    """A random model's text has other tokens when it is tokenized anew; the answer's own tokens are sent instead."""
    tokenizer = load_tokenizer(tiny_model_path)
    with phloem.Engine(model=str(tiny_model_path), precision="float32", num_slots=8192) as engine:
        app = create_app(engine.client, tokenizer, load_chat_template(tiny_model_path, tokenizer), model_name="tiny")
        with live_server(app) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            ask = {"model": "tiny", "max_output_tokens": 40, "extra_body": {"ignore_eos": True}}
            answers = [client.responses.create(input="Größe?", **ask)]
            for turn in range(3):
                answers.append(
                    client.responses.create(input=f"And {turn}?", previous_response_id=answers[-1].id, **ask)
                )
    for before, after in itertools.pairwise(answers):
        held = after.usage.input_tokens_details.cached_tokens
        assert before.usage.total_tokens - 2 <= held < after.usage.input_tokens
