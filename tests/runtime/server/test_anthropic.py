"""Anthropic's Messages API over raw HTTP, with the string engine; the official client is in tests/interop."""

import json

import httpx
import phloem
import pytest
from phloem.protocol import errors
from phloem.protocol.messages import Accepted, CandidateMeta, Done, GenMeta, ThinkingStyle
from phloem.protocol.ops import Gen
from phloem.runtime.server.app import create_app
from phloem.runtime.tokenizer import load_chat_template, load_tokenizer
from phloem.tests.runtime.server.doubles import ChatML, ScriptedClient, failing, live_server, rejecting
from phloem.tests.runtime.server.test_tools import TWO, Seen
from phloem.tests.runtime.string_engine import StringEngine

ASK = [{"role": "user", "content": "warm?"}]
WEATHER = {
    "name": "weather",
    "description": "Tells.",
    "input_schema": {"type": "object", "properties": {"city": {"enum": ["Rome", "Bonn"]}}, "required": ["city"]},
}
CLOCK = {"name": "clock", "input_schema": {"type": "object", "properties": {}}}
THOUGHT = "<think>\nlet me see\n</think>\n\nfour"


def ask(server, **fields):
    return server.http.post("/v1/messages", json={"model": "string", "max_tokens": 50, "messages": ASK, **fields})


def events_of(text: str) -> list[dict]:
    """The events of a stream; each is named as its type is."""
    found = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def gathered(events: list[dict]) -> dict:
    """The message that a stream's events make, as clients put it together."""
    message: dict = {}
    inputs: dict[int, str] = {}
    open_block = None
    for event in events:
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                assert open_block is None and event["index"] == len(message["content"])
                open_block = event["index"]
                message["content"].append(event["content_block"])
            case "content_block_delta":
                assert event["index"] == open_block
                delta, block = event["delta"], message["content"][open_block]
                if delta["type"] == "input_json_delta":
                    inputs[open_block] = inputs.get(open_block, "") + delta["partial_json"]
                else:
                    field = delta["type"].removesuffix("_delta")
                    block[field] += delta[field]
            case "content_block_stop":
                assert event["index"] == open_block
                open_block = None
            case "message_delta":
                message.update(event["delta"], usage=event["usage"])
    for index, text in inputs.items():
        message["content"][index]["input"] = json.loads(text)
    assert open_block is None and events[-1]["type"] == "message_stop"
    return message


def test_a_message_has_text_a_reason_and_usage(serve):
    seen = Seen("good day")
    server = serve(StringEngine(reply=seen))
    system = [
        {"type": "text", "text": "Be ", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "kind."},
    ]
    response = ask(server, system=system, temperature=0.5, top_p=0.9, top_k=7, stop_sequences=["END"])
    answer = response.json()
    assert answer.pop("id").startswith("msg_")
    assert answer == {
        "type": "message",
        "role": "assistant",
        "model": "string",
        "content": [{"type": "text", "text": "good day"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": answer["usage"]["input_tokens"],
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 2,
        },
    }
    assert answer["usage"]["input_tokens"] > 5
    params = seen.gens[0].params
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (50, 0.5, 0.9, 7)
    assert params.stop == ("END",) and params.stop_token_ids == (2,)
    assert seen.prompts[0].startswith("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nwarm?<|im_end|>")


@pytest.mark.parametrize(
    ("text", "fields", "reason", "sequence"),
    [
        ("one two", {}, "end_turn", None),
        ("one END two", {"stop_sequences": ["STOP", " END"]}, "stop_sequence", " END"),
        ("one two three", {"max_tokens": 2}, "max_tokens", None),
        (TWO, {"tools": [WEATHER, CLOCK], "max_tokens": 99}, "tool_use", None),
    ],
)
def test_a_stream_makes_the_message_that_is_sent_whole(serve, text, fields, reason, sequence):
    server = serve(StringEngine(reply=Seen(text)))
    whole = ask(server, **fields).json()
    response = ask(server, **fields, stream=True)
    events = events_of(response.text)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert [event["type"] for event in events[:2]] == ["message_start", "ping"]
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    streamed = gathered(events)
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, sequence)
    for message in (whole, streamed):
        id = message.pop("id").removeprefix("msg_")[:24]
        for block in message["content"]:
            assert id in block.pop("id", id)
        message["usage"].pop("cache_read_input_tokens"), message["usage"].pop("input_tokens")
    assert streamed == whole


def test_a_full_context_is_told_apart_from_max_tokens(serve):
    def script(submit):
        (gen,) = [op for op in submit.ops if isinstance(op, Gen)]
        candidate = CandidateMeta(finish_reason="length", completion_tokens=3)
        meta = GenMeta(prompt_tokens=9, cached_tokens=4, candidates=(candidate,))
        return [Accepted(program=submit.program), Done(program=submit.program, op=gen.op, value=["a b c"], meta=meta)]

    server = serve(client=ScriptedClient(script))
    assert ask(server, max_tokens=500).json()["stop_reason"] == "model_context_window_exceeded"
    assert ask(server, max_tokens=3).json()["stop_reason"] == "max_tokens"
    usage = ask(server, max_tokens=3).json()["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (5, 4)


def test_calls_and_results_make_the_round(serve):
    seen = Seen(TWO)
    server = serve(StringEngine(reply=seen))
    first = ask(server, tools=[WEATHER, CLOCK]).json()
    text, weather, clock = first["content"]
    assert text == {"type": "text", "text": "Let me see."} and first["stop_reason"] == "tool_use"
    assert (weather["type"], weather["name"], weather["input"]) == ("tool_use", "weather", {"city": "Rome"})
    assert clock["input"] == {} and weather["id"] != clock["id"]
    results = [
        {"type": "tool_result", "tool_use_id": weather["id"], "content": [{"type": "text", "text": "warm"}]},
        {"type": "tool_result", "tool_use_id": clock["id"], "content": "broken", "is_error": True},
        {"type": "text", "text": "And now?"},
    ]
    turns = [*ASK, {"role": "assistant", "content": first["content"]}, {"role": "user", "content": results}]
    ask(server, tools=[WEATHER, CLOCK], messages=turns)
    prompt = seen.prompts[1]
    assert f"assistant\n{TWO}<|im_end|>" in prompt
    answers = "<tool_response>\nwarm\n</tool_response>\n<tool_response>\nError: broken\n</tool_response>"
    assert f"<|im_start|>user\n{answers}<|im_end|>\n<|im_start|>user\nAnd now?" in prompt


@pytest.mark.parametrize(
    ("choice", "names", "must", "stops"),
    [
        (None, 2, False, False),
        ({"type": "auto", "disable_parallel_tool_use": True}, 2, False, True),
        ({"type": "any"}, 2, True, False),
        ({"type": "tool", "name": "clock"}, 1, True, True),
    ],
)
def test_tool_choice_becomes_a_grammar(serve, choice, names, must, stops):
    seen = Seen("no")
    server = serve(StringEngine(reply=seen))
    assert ask(server, tools=[WEATHER, CLOCK], tool_choice=choice).json()["content"][0]["text"] == "no"
    assert (len(seen.tags["tags"]), seen.tags["begin_at_once"], seen.tags["stop_after_first"]) == (names, must, stops)
    ask(server, tools=[WEATHER], tool_choice={"type": "none"})
    assert seen.gens[-1].grammar is None and "weather" not in seen.prompts[-1]


def test_a_call_cut_short_has_what_was_written(serve):
    server = serve(StringEngine(reply=Seen('<tool_call>\n{"name": "weather", "arguments": {"city": "Ro me')))
    answer = ask(server, tools=[WEATHER], max_tokens=6).json()
    assert answer["stop_reason"] == "max_tokens" and answer["content"][0]["input"] == {"city": "Ro"}


def test_neighbours_are_one_turn_and_a_last_assistant_message_begins_the_answer(serve):
    seen = Seen("Paris")
    server = serve(StringEngine(reply=seen), template=ChatML(ThinkingStyle()))
    turns = [*ASK, {"role": "user", "content": "really"}, {"role": "assistant", "content": "It is"}]
    assert ask(server, messages=turns).json()["content"] == [{"type": "text", "text": "Paris"}]
    ending = "user\nwarm?\nreally<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nIt is"
    assert seen.prompts[0].endswith(ending)


def test_reasoning_is_a_block_that_can_be_sent_back(serve):
    seen = Seen(THOUGHT)
    server = serve(StringEngine(reply=seen), template=ChatML(ThinkingStyle()))
    whole, streamed = ask(server).json(), gathered(events_of(ask(server, stream=True).text))
    for message in (whole, streamed):
        assert message["content"] == [
            {"type": "thinking", "thinking": "let me see", "signature": ""},
            {"type": "text", "text": "four"},
        ]
    assert whole["usage"]["output_tokens_details"]["thinking_tokens"] > 0
    turns = [*ASK, {"role": "assistant", "content": whole["content"]}, *ASK]
    assert ask(server, messages=turns, thinking={"type": "adaptive"}).status_code == 200
    ask(server, thinking={"type": "disabled"})
    assert seen.prompts[-1].endswith("assistant\n<think>\n\n</think>\n\n")


def test_a_format_is_a_grammar(serve):
    seen = Seen("{}")
    server = serve(StringEngine(reply=seen))
    schema = {"type": "object", "properties": {}}
    ask(server, output_config={"format": {"type": "json_schema", "schema": schema}}).raise_for_status()
    assert json.loads(seen.gens[0].grammar.text) == schema


THINKING = {"type": "thinking", "thinking": "hm"}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens=-1: must be >= 0"),
        ({"temperature": 101}, "temperature=101"),
        ({"top_k": 0}, "top_k=0: must be -1 (off) or between 1 and 2147483647"),
        ({"stop_sequences": [""]}, "stop_sequences=('',): must be non-empty"),
        ({"tempature": 1}, "unknown field 'tempature'"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "'messages.0.content.0.text' is required"),
        (
            {"messages": [{"role": "user", "content": ["x"]}]},
            "content.0='x': must be an object with a 'type'",
        ),
        (
            {"messages": [{"role": "user", "content": [IMAGE]}]},
            "a content part of type 'image' is not supported: this model reads text only",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": ""}]}]},
            "does not belong to role",
        ),
        ({"messages": [*ASK, {"role": "assistant", "content": "so "}]}, "must not end in a blank"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking of type 'enabled' is not supported"),
        ({"thinking": {"type": "adaptive"}}, "this model does not reason between tags"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "'web_search_20250305' is not supported"),
        ({"tools": [{"name": "a", "input_schema": {"type": 7}}]}, "a JSON schema of type 'object'"),
        ({"tools": [CLOCK, CLOCK]}, "two tools are called 'clock'"),
        ({"tools": [CLOCK], "tool_choice": {"type": "tool", "name": "sun"}}, "asks for 'sun'"),
        ({"tool_choice": {"type": "any"}}, "asks for 'required'"),
        ({"container": "c1"}, "'container' is not supported"),
        ({"service_tier": "priority"}, "'service_tier' is not supported"),
        ({"output_config": {"effort": "high"}}, "'effort' is not supported"),
    ],
)
def test_what_is_wrong_or_not_served_is_named(shared_server, fields, said):
    response = ask(shared_server, **fields)
    body = response.json()
    assert response.status_code == 400 and (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert said in body["error"]["message"] and body["request_id"] == response.headers["x-request-id"]


def test_errors_have_the_shape_of_the_api(serve):
    server = serve(api_key="secret")
    wrong = server.http.post("/v1/messages", json={}, headers={"authorization": "", "x-api-key": "other"})
    assert (wrong.status_code, wrong.json()["error"]["type"]) == (401, "authentication_error")
    right = server.http.post("/v1/messages", json={}, headers={"authorization": "", "x-api-key": "secret"})
    assert right.status_code == 400
    assert (ask(server, model="gpt-9").status_code, ask(server, model="gpt-9").json()["error"]["type"]) == (
        404,
        "not_found_error",
    )
    lost = server.http.post("/v1/messages/nothing", json={})
    assert (lost.status_code, lost.json()["error"]["type"]) == (404, "not_found_error")


def test_an_engines_errors_have_it_too_also_in_a_stream(serve):
    busy = serve(client=ScriptedClient(rejecting(errors.Overloaded("the queue is full", retry_after_s=3))))
    response = ask(busy)
    assert (response.status_code, response.json()["error"]["type"]) == (429, "rate_limit_error")
    assert response.headers["retry-after"] == "3"
    lost = serve(client=ScriptedClient(failing(errors.EngineLost("gone"), after="so far")))
    *_, delta, error = events_of(ask(lost, stream=True).text)
    assert delta["delta"] == {"type": "text_delta", "text": "so far"}
    assert error["error"] == {"type": "overloaded_error", "message": "gone"}


def test_counted_tokens_are_those_of_the_message(tiny_model_path):
    tokenizer = load_tokenizer(tiny_model_path)
    with phloem.Engine(model=str(tiny_model_path), precision="float32", num_slots=8192) as engine:
        app = create_app(engine.client, tokenizer, load_chat_template(tiny_model_path, tokenizer), model_name="tiny")
        with live_server(app) as url:
            body = {"model": "tiny", "system": "Größe", "tools": [WEATHER], "messages": [*ASK, *ASK]}
            with httpx.Client(base_url=url, timeout=300) as http:
                counted = http.post("/v1/messages/count_tokens", json=body).json()
                usages = [http.post("/v1/messages", json={**body, "max_tokens": 1}).json()["usage"] for _ in range(2)]
    for usage in usages:
        assert counted["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert usages[1]["cache_read_input_tokens"] > 0.8 * counted["input_tokens"]
