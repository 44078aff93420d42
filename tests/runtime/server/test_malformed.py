"""Malformed requests to every route: each gets an answer that is no 5xx, after little work.

``PHLOEM_FUZZ_CASES=10000`` tries more of them.
"""

import copy
import json
import os
import random
from typing import Any

import httpx
import pytest
from phloem.runtime.server.app import create_app
from phloem.tests.runtime.server.doubles import MODEL, ChatML, WordTokenizer, connected, live_server
from phloem.tests.runtime.string_engine import StringEngine
from phloem.tests.runtime.wire import wait_until

NUM_CASES = int(os.environ.get("PHLOEM_FUZZ_CASES", "400"))
MOST_WORK_PER_BYTE = 64  # characters rendered or tokenized, and bytes answered, for each byte of a body
LEAST_WORK = 50_000

TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "looks",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
    },
}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "it"}'}}
USE = {"type": "tool_use", "id": "c1", "name": "look", "input": {"at": "it"}}
TEXT = {"type": "text", "text": "hello"}
SAMPLING = {"max_tokens": 4, "temperature": 0.5, "top_p": 0.9, "seed": 1, "stop": ["x"], "logit_bias": {"7": 1.0}}
BODIES: dict[str, list[dict[str, Any]]] = {
    "/v1/score": [{"text_1": "a", "text_2": "b"}, {"text_1": ["a"], "text_2": ["b", "c"], "truncate": False}],
    "/v1/chat/completions": [
        {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], **SAMPLING, "n": 2, "logprobs": True},
        {
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": "be kind"}]},
                {"role": "user", "content": "look"},
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "content": "a tree", "tool_call_id": "c1"},
            ],
            "tools": [TOOL],
            "tool_choice": {"type": "function", "function": {"name": "look"}},
            "max_tokens": 4,
        },
        {
            "messages": [{"role": "user", "content": "hello"}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": {"type": "object", "properties": {"b": {"type": "integer"}}}},
            },
        },
    ],
    "/v1/messages": [
        {
            "model": MODEL,
            "max_tokens": 4,
            "system": [{"type": "text", "text": "be kind"}],
            "messages": [
                {"role": "user", "content": "look"},
                {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, USE]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "a tree"}]},
            ],
            "tools": [{"name": "look", "input_schema": TOOL["function"]["parameters"]}],
            "tool_choice": {"type": "any"},
            "stop_sequences": ["x"],
        },
        {
            "max_tokens": 2,
            "messages": [{"role": "user", "content": [TEXT]}, {"role": "assistant", "content": "so"}],
            "output_config": {"format": {"type": "json_schema", "schema": {"type": "null"}}},
            "stream": True,
        },
    ],
    "/v1/messages/count_tokens": [{"messages": [{"role": "user", "content": "look"}], "system": "be kind"}],
    "/v1/responses": [
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "look"}]},
                {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
                {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"at": "it"}'},
                {"type": "function_call_output", "call_id": "c1", "output": "a tree"},
            ],
            "tools": [{"type": "function", **TOOL["function"]}],
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "look"}]},
            "max_output_tokens": 4,
        },
        {
            "input": "hello",
            "text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "null"}}},
            "metadata": {"a": "b"},
            "stream": True,
        },
        {"input": "hello", "include": ["message.output_text.logprobs"], "top_logprobs": 2, "store": False},
    ],
    "/v1/completions": [
        {"prompt": ["one", "two"], **SAMPLING, "echo": True, "logprobs": 2},
        {"prompt": [[100, 101], [102]], "max_tokens": 2, "regex": "[ab]{3}", "stream": True},
        {"prompt": "one", "max_tokens": 2, "guided_choice": ["a", "b"]},
        {"prompt": "one", "max_tokens": 2, "structured_outputs": {"grammar": 'start: "a"', "disable_fallback": True}},
    ],
    "/generate": [
        {"text": "one", "sampling_params": {"max_new_tokens": 3, "temperature": 0.0, "json_schema": {"type": "null"}}},
        {"input_ids": [[100], [101]], "sampling_params": [{"n": 2}, {"ebnf": 'root ::= "a"'}], "stream": True},
    ],
    "/v1/programs": [
        {
            "program": "p",
            "ops": [
                {"t": "text", "op": 0, "seq": 0, "text": "Once"},
                {"t": "fork", "op": 1, "seq": 0, "children": [1]},
                {"t": "gen", "op": 2, "seq": 1, "params": {"max_tokens": 3}},
                {"t": "select", "op": 3, "seq": 0, "choices": ["a", "b"]},
                {"t": "close", "op": 4, "seq": 0},
                {"t": "close", "op": 5, "seq": 1},
            ],
            "settings": {"tenant": "t", "deadline_s": 20.0},
        }
    ],
    "/v1/programs/p": [{"program": "p", "ops": [{"t": "close", "op": 9, "seq": 0}]}],
    "/tokenize": [
        {"prompt": "one two", "add_special_tokens": False, "return_token_strs": True},
        {"messages": [{"role": "user", "content": [TEXT]}], "tools": [TOOL], "add_generation_prompt": False},
    ],
    "/detokenize": [{"model": MODEL, "tokens": [100, 101]}],
    "/flush_cache": [{}],
}


def junk(rng: random.Random) -> Any:
    deep: Any = []
    for _ in range(rng.choice((3, 150, 400))):
        deep = [deep] if rng.random() < 0.5 else {"properties": deep}
    return rng.choice(
        (
            None,
            True,
            0,
            -1,
            2**31,
            -(2**63) - 1,
            10**400,
            1e308,
            0.1,
            "",
            "x",
            "\u0000",
            "\ud800",
            "\ue000",
            "<|im_start|>",
            "a" * 3000,
            [],
            {},
            [[]],
            [None],
            [1, "a"],
            {"a": 1},
            {"": {}},
            {"type": 7},
            {"properties": 7},
            {"$ref": "#"},
            {"$ref": "#/$defs/none"},
            {"enum": []},
            {"type": "object", "properties": []},
            {"anyOf": {}},
            json.dumps(deep),
            deep,
        )
    )


def places(value: Any) -> list[tuple[Any, Any]]:
    """(container, key) of everything inside ``value``."""
    found = []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += [(value, key), *places(inner)]
    return found


def malformed(rng: random.Random, body: dict[str, Any]) -> bytes:
    body = copy.deepcopy(body)
    for _ in range(rng.choice((1, 1, 2, 4))):
        there = places(body)
        if not there:
            break
        container, key = rng.choice(there)
        match rng.randrange(5):
            case 0 | 1:
                container[key] = junk(rng)
            case 2:
                del container[key]
            case 3 if isinstance(container, dict):
                container[rng.choice(("x", "properties", "stream", "n", "role", "seq", ""))] = junk(rng)
            case _ if isinstance(container, list):
                container += container[key : key + 1] * rng.choice((1, 50))
    data = json.dumps(body).encode()
    match rng.randrange(8):
        case 0:
            return data[: rng.randrange(len(data))]
        case 1:
            at = rng.randrange(len(data))
            return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
    return data


class Work:
    """Counts what a tokenizer and a template are given."""

    def __init__(self) -> None:
        self.amount = 0
        self.tokenizer, self.template = CountingTokenizer(self), CountingTemplate(self)


class CountingTokenizer(WordTokenizer):
    def __init__(self, work: Work) -> None:
        super().__init__()
        self.work = work

    def encode(self, text: str, **options: Any) -> list[int]:
        self.work.amount += len(text)
        return super().encode(text, **options)


class CountingTemplate(ChatML):
    def __init__(self, work: Work) -> None:
        super().__init__()
        self.work = work

    def render(self, messages: list[dict[str, Any]], **options: Any) -> list[Any]:
        self.work.amount += sum(len(str(message)) for message in messages)
        return super().render(messages, **options)


def test_malformed_requests_cost_little_and_are_never_the_servers_fault():
    """A tool whose ``properties`` was no object, and arguments nested 1,000 deep, were answered with 500."""
    engine, work, client_errors = StringEngine(), Work(), 0
    with (
        connected(engine) as client,
        live_server(create_app(client, work.tokenizer, work.template, model_name=MODEL)) as url,
        httpx.Client(base_url=url, timeout=300, headers={"content-type": "application/json"}) as http,
    ):
        paths = list(BODIES)
        for seed in range(NUM_CASES):
            rng = random.Random(seed)
            path = rng.choice(paths)
            body = malformed(rng, rng.choice(BODIES[path]))
            work.amount = 0
            answer = http.post(path, content=body)
            done = work.amount + len(answer.content)
            assert answer.status_code < 500, (seed, path, body[:2000], answer.text[:500])
            assert done <= LEAST_WORK + MOST_WORK_PER_BYTE * len(body), (seed, path, body[:2000], done)
            if answer.status_code >= 400:
                client_errors += 1
                assert answer.json()["error"]["message"], (seed, answer.text)
        assert client_errors > NUM_CASES / 2
        assert http.get("/health").status_code == 200
        wait_until(lambda: not engine.has_work)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"properties": 7}, "properties"),
        ({"properties": ["a"]}, "properties"),
        ({"type": "object", "$defs": 7}, "defs"),
    ],
)
def test_a_tools_schema_that_is_none_is_named(tiny_server, change, named):
    """The server answered 500: it took every ``properties`` for an object."""
    tool = {"type": "function", "function": {"name": "look", "parameters": change}}
    answer = tiny_server.post(
        "/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}], "tools": [tool], "max_tokens": 4}
    )
    assert answer.status_code == 400 and named in answer.json()["error"]["message"], answer.text


def test_arguments_that_are_nested_too_deep_are_refused(shared_server):
    """json raises RecursionError, which was answered with 500."""
    call = copy.deepcopy(CALL)
    call["function"]["arguments"] = '{"a":' * 100_000 + "1" + "}" * 100_000
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "b", "tool_call_id": "c1"},
    ]
    answer = shared_server.http.post("/v1/chat/completions", json={"messages": messages})
    assert answer.status_code == 400 and "arguments" in answer.json()["error"]["message"], answer.text


@pytest.mark.parametrize(("seq", "op"), [("x", "1"), ("1", "1.5"), ("9" * 5000, "1")])
def test_a_wrong_query_is_named(shared_server, seq, op):
    """The error had another form than all others, and status 422."""
    answer = shared_server.http.delete("/v1/programs/p", params={"seq": seq, "op": op})
    assert answer.status_code == 400 and answer.json()["error"]["param"] in ("seq", "op")
