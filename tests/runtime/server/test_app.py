"""The whole server, through the openai client and raw HTTP, over the string engine."""

import asyncio
import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import msgspec
import openai
import pytest
from phloem.protocol import errors
from phloem.protocol.ops import Gen
from phloem.runtime.server.logs import TextLines
from phloem.tests.runtime.server.doubles import ScriptedClient, rejecting
from phloem.tests.runtime.string_engine import StringEngine
from phloem.tests.runtime.string_tokens import piece_id
from phloem.tests.runtime.wire import wait_until

HELLO = [{"role": "user", "content": "hello there"}]


def numbered(prompt: str, op: Gen) -> list[str]:
    return [f"one two three{index} END four" for index in range(op.n)]


def sse(text: str) -> list[str]:
    """The data of every event."""
    assert text.endswith("\n\n")
    return [block.removeprefix("data: ") for block in text.removesuffix("\n\n").split("\n\n")]


# -- chat -------------------------------------------------------------------------------------------------------------


def test_chat_renders_the_template_and_answers_with_usage(serve):
    seen = []

    def reply(prompt, op):
        seen.append(prompt)
        return "good day"

    server = serve(StringEngine(reply=reply))
    answer = server.openai.chat.completions.create(
        model="string", messages=[{"role": "system", "content": "be kind"}, *HELLO]
    )
    assert seen == [
        "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nhello there<|im_end|>\n<|im_start|>assistant\n"
    ]
    assert answer.object == "chat.completion" and answer.model == "string" and answer.id.startswith("chatcmpl-")
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "good day", "stop")
    assert answer.usage.completion_tokens == 2
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 2
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_an_assistants_answer_may_be_sent_back_as_it_came(serve):
    server = serve()
    answer = server.openai.chat.completions.create(model="string", messages=HELLO)
    back = answer.choices[0].message.model_dump()
    more = server.openai.chat.completions.create(model="string", messages=[*HELLO, back, *HELLO])
    assert more.choices[0].message.content


def test_a_stream_says_what_the_whole_answer_says(serve):
    server = serve(StringEngine(reply=numbered))
    ask = {"model": "string", "messages": HELLO, "n": 3, "stop": " END", "logprobs": True, "top_logprobs": 2}
    whole = server.openai.chat.completions.create(**ask)
    texts, reasons, logprobs, usage = ["", "", ""], {}, [[], [], []], None
    for chunk in server.openai.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            logprobs[choice.index] += choice.logprobs.content if choice.logprobs else []
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert texts == [c.message.content for c in whole.choices] == [f"one two three{i}" for i in range(3)]
    assert reasons == {c.index: c.finish_reason for c in whole.choices}
    assert logprobs == [c.logprobs.content for c in whole.choices]
    assert usage == whole.usage and usage.completion_tokens == 9


def test_usage_is_streamed_only_when_asked_for(serve):
    server = serve()
    body = {"messages": HELLO, "stream": True}
    plain = sse(server.http.post("/v1/chat/completions", json=body).text)
    assert plain[-1] == "[DONE]" and not any("usage" in event for event in plain)
    body["stream_options"] = {"include_usage": True}
    *chunks, last, done = sse(server.http.post("/v1/chat/completions", json=body).text)
    assert done == "[DONE]"
    assert all(json.loads(chunk)["usage"] is None for chunk in chunks)
    assert json.loads(last)["choices"] == [] and json.loads(last)["usage"]["completion_tokens"] == 3


def test_chat_logprobs_carry_tokens_bytes_and_alternatives(serve):
    server = serve(StringEngine(reply=lambda prompt, op: "é è"))
    answer = server.openai.chat.completions.create(model="string", messages=HELLO, logprobs=True, top_logprobs=2)
    first, second = answer.choices[0].logprobs.content
    assert (first.token, first.logprob, bytes(first.bytes).decode()) == ("é", -0.5, "é")
    assert [t.token for t in second.top_logprobs] == [" è", "sap"]


def test_sampling_fields_reach_the_engine(serve):
    seen = []

    def reply(prompt, op):
        seen.append(op)
        return "x"

    server = serve(StringEngine(reply=reply))
    extensions = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.5, "min_tokens": 2, "stop_token_ids": [7]}
    server.openai.chat.completions.create(
        model="string",
        messages=HELLO,
        max_completion_tokens=9,
        temperature=0.5,
        top_p=0.9,
        frequency_penalty=0.1,
        presence_penalty=0.2,
        seed=11,
        stop=["a", "b"],
        logit_bias={"5": -3},
        user="someone",
        metadata={"a": "b"},
        store=False,
        extra_body={**extensions, "ignore_eos": False},
    )
    params = seen[0].params
    assert (params.max_tokens, params.temperature, params.top_p, params.seed) == (9, 0.5, 0.9, 11)
    assert (params.frequency_penalty, params.presence_penalty, params.repetition_penalty) == (0.1, 0.2, 1.5)
    assert (params.top_k, params.min_p, params.min_tokens, params.stop) == (5, 0.1, 2, ("a", "b"))
    assert params.stop_token_ids == (7, 2), "the template's end of turn stops a chat too"
    assert params.logit_bias == {5: -3.0}


def test_without_max_tokens_a_chat_may_fill_the_context_and_ignore_eos_goes_on(serve):
    seen = []

    def reply(prompt, op):
        seen.append(op.params)
        return "x"

    server = serve(StringEngine(reply=reply, context_len=100))
    server.http.post("/v1/chat/completions", json={"messages": HELLO})
    server.http.post("/v1/chat/completions", json={"messages": HELLO, "ignore_eos": True, "max_tokens": 5})
    assert (seen[0].max_tokens, seen[1].max_tokens) == (100, 5)
    assert seen[1].ignore_eos and seen[1].stop_token_ids == ()


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"regex": "[a-z]+"}, "regex", "[a-z]+"),
        ({"ebnf": 'root ::= "x"'}, "ebnf", 'root ::= "x"'),
        ({"json_schema": {"type": "integer"}}, "json_schema", '{"type": "integer"}'),
        ({"json_schema": '{"type": "integer"}'}, "json_schema", '{"type": "integer"}'),
        ({"response_format": {"type": "json_object"}}, "json_schema", '{"type": "object"}'),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "null"}}}},
            "json_schema",
            '{"type": "null"}',
        ),
        ({"guided_json": {"type": "integer"}}, "json_schema", '{"type": "integer"}'),
        ({"guided_json": '{"type": "integer"}'}, "json_schema", '{"type": "integer"}'),
        ({"guided_regex": "[a-z]+"}, "regex", "[a-z]+"),
        ({"guided_choice": ["a", "ä"]}, "choices", '["a", "ä"]'),
        ({"guided_grammar": '# x ::=\n  root ::= "x"'}, "ebnf", '# x ::=\n  root ::= "x"'),
        ({"guided_grammar": 'start: "x ::="'}, "lark", 'start: "x ::="'),
        ({"structured_outputs": {"json": {"type": "integer"}}}, "json_schema", '{"type": "integer"}'),
        ({"structured_outputs": {"regex": "[a-z]+", "disable_fallback": True}}, "regex", "[a-z]+"),
        ({"structured_outputs": {"choice": ["a"]}}, "choices", '["a"]'),
        ({"structured_outputs": {"grammar": 'root ::= "x"'}}, "ebnf", 'root ::= "x"'),
        ({"structured_outputs": {"json_object": True}}, "json_schema", '{"type": "object"}'),
    ],
)
def test_grammars_reach_the_engine(serve, fields, kind, text):
    seen = []

    def reply(prompt, op):
        seen.append(op.grammar)
        return "{}"

    server = serve(StringEngine(reply=reply))
    assert server.http.post("/v1/chat/completions", json={"messages": HELLO, **fields}).status_code == 200
    assert (seen[0].kind, seen[0].text) == (kind, text)


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_choice": ["oak", "elm"]},
        {"guided_regex": "oak|elm"},
        {"guided_json": {"enum": ["oak", "elm"]}},
        {"guided_grammar": 'root ::= "oak" | "elm"'},
        {"guided_grammar": 'start: "oak" | "elm"'},
        {"structured_outputs": {"choice": ["oak", "elm"]}},
    ],
)
def test_answers_follow_grammars_with_the_names_of_vllm(tiny_server, fields):
    body = {"messages": HELLO, "max_tokens": 20, "seed": 1, **fields}
    (choice,) = tiny_server.post("/v1/chat/completions", json=body).json()["choices"]
    assert choice["message"]["content"].strip('"') in ("oak", "elm") and choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"regex": "a", "guided_json": {}}, "regex", "regex, guided_json exclude each other"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_regex", "guided_regex, guided_choice exclude"),
        (
            {"guided_grammar": "start: A", "structured_outputs": {"json": {}}},
            "guided_grammar",
            "guided_grammar, structured_outputs.json exclude each other",
        ),
        (
            {"structured_outputs": {"regex": "a", "choice": ["a"]}},
            "structured_outputs.regex",
            "structured_outputs.regex, structured_outputs.choice exclude",
        ),
        ({"structured_outputs": {}}, "structured_outputs", "holds no grammar; give json, regex"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs", "holds no grammar"),
        (
            {"structured_outputs": {"json": {}, "whitespace_pattern": " "}},
            None,
            "'whitespace_pattern' is not supported",
        ),
        ({"structured_outputs": {"choices": ["a"]}}, "structured_outputs.choices", "unknown field"),
        ({"guided_choice": []}, "guided_choice", "at least 1 item"),
        ({"guided_choice": [1]}, "guided_choice.0", "must be a valid string"),
        ({"guided_json": {}, "guided_decoding_backend": "outlines"}, None, 'only "auto" is accepted'),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_grammars_that_exclude_each_other_are_refused_by_name(shared_server, path, fields, param, said):
    prompt = {"messages": HELLO} if "chat" in path else {"prompt": "a"}
    answer = shared_server.http.post(path, json={**prompt, **fields})
    error = answer.json()["error"]
    assert answer.status_code == 400 and said in error["message"] and (param is None or error["param"] == param), error


def test_grammar_options_travel_with_the_grammar(serve):
    seen = []

    def reply(prompt, op):
        seen.append(op.grammar.options)
        return "{}"

    server = serve(StringEngine(reply=reply))
    fields = {"json_schema": {}, "grammar_options": {"whitespace": "compact"}}
    server.http.post("/v1/chat/completions", json={"messages": HELLO, **fields}).raise_for_status()
    server.http.post("/generate", json={"text": "a", "sampling_params": fields}).raise_for_status()
    assert seen == [{"whitespace": "compact"}] * 2


def test_response_format_text_is_no_grammar(serve):
    seen = []

    def reply(prompt, op):
        seen.append(op.grammar)
        return "x"

    server = serve(StringEngine(reply=reply))
    server.openai.chat.completions.create(model="string", messages=HELLO, response_format={"type": "text"})
    assert seen == [None]


# -- completions ------------------------------------------------------------------------------------------------------


def test_completions_take_text_lists_and_token_ids(serve):
    server = serve(StringEngine(reply=lambda prompt, op: f"<{prompt}>"))

    def texts(prompt, **more):
        answer = server.openai.completions.create(model="string", prompt=prompt, **more)
        return [(choice.index, choice.text) for choice in answer.choices]

    assert texts("a b") == [(0, "<a b>")]
    assert texts(["a", "b"], n=2) == [(0, "<a>"), (1, "<a>"), (2, "<b>"), (3, "<b>")]
    assert texts([1, 12]) == [(0, "<<|im_start|>user>")]
    assert texts([[1], [2]]) == [(0, "<<|im_start|>>"), (1, "<<|im_end|>>")]
    assert texts("<|im_end|> user", extra_body={"parse_special": True}) == [(0, "<<|im_end|>user>")]


def test_completions_stream_every_prompt(serve):
    server = serve(StringEngine(reply=numbered))
    ask = {"model": "string", "prompt": ["a", "b"], "n": 2, "stop": [" END"]}
    whole = server.openai.completions.create(**ask)
    texts, reasons = [""] * 4, [None] * 4
    for chunk in server.openai.completions.create(**ask, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [c.text for c in whole.choices]
    assert reasons == ["stop"] * 4
    assert whole.usage.completion_tokens == 12


def test_completion_defaults_to_sixteen_tokens_and_says_length(serve):
    server = serve(StringEngine(reply=lambda prompt, op: "w " * 40))
    answer = server.openai.completions.create(model="string", prompt="a")
    assert answer.usage.completion_tokens == 16
    assert answer.choices[0].finish_reason == "length"


def test_echo_puts_the_prompt_first(serve):
    server = serve(StringEngine(reply=lambda prompt, op: " end"))
    ask = {"model": "string", "prompt": ["a b", "c"], "echo": True}
    assert [c.text for c in server.openai.completions.create(**ask).choices] == ["a b end", "c end"]
    texts = ["", ""]
    for chunk in server.openai.completions.create(**ask, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == ["a b end", "c end"]


def test_completion_logprobs_line_up_with_the_text(serve):
    server = serve(StringEngine(reply=lambda prompt, op: "one two three"))
    ask = {"model": "string", "prompt": "a", "logprobs": 2}
    whole = server.openai.completions.create(**ask).choices[0]
    assert whole.logprobs.tokens == ["one", " two", " three"]
    assert whole.logprobs.text_offset == [0, 3, 7]
    assert whole.logprobs.token_logprobs == [-0.5] * 3
    assert list(whole.logprobs.top_logprobs[0]) == ["one", "sap"]
    tokens, offsets = [], []
    for chunk in server.openai.completions.create(**ask, stream=True):
        for choice in chunk.choices:
            if choice.logprobs:
                tokens += choice.logprobs.tokens
                offsets += choice.logprobs.text_offset
    assert (tokens, offsets) == (whole.logprobs.tokens, whole.logprobs.text_offset)


def test_logprobs_name_tokens_by_their_ids_where_that_is_asked_for(serve):
    server = serve(StringEngine(reply=lambda prompt, op: "one two"))
    names = [f"token_id:{piece_id(piece)}" for piece in ("one", " two")]
    more = {"model": "string", "extra_body": {"return_tokens_as_token_ids": True}}
    for stream in (False, True):
        found = server.openai.completions.create(prompt="a", logprobs=2, stream=stream, **more)
        choices = [choice for part in (found if stream else [found]) for choice in part.choices if choice.logprobs]
        assert [name for choice in choices for name in choice.logprobs.tokens] == names
        tops = [list(top) for choice in choices for top in choice.logprobs.top_logprobs]
        assert tops == [[name, "token_id:50"] for name in names]
    answer = server.openai.chat.completions.create(messages=HELLO, logprobs=True, top_logprobs=2, **more)
    tokens = answer.choices[0].logprobs.content
    assert [token.token for token in tokens] == names
    assert [[top.token for top in token.top_logprobs] for token in tokens] == tops
    with pytest.raises(openai.BadRequestError, match="return_tokens_as_token_ids needs logprobs"):
        server.openai.completions.create(prompt="a", **more)
    with pytest.raises(openai.BadRequestError, match="return_tokens_as_token_ids needs logprobs"):
        server.openai.chat.completions.create(messages=HELLO, **more)


# -- many, slow and vanishing clients ---------------------------------------------------------------------------------


def test_sixty_four_requests_at_once_each_get_their_own_answer(serve):
    server = serve(StringEngine(reply=lambda prompt, op: f"said {prompt} " + "on " * 20))

    async def one(client: httpx.AsyncClient, i: int) -> str:
        body = {"prompt": f"p{i}", "max_tokens": 64, "stream": i % 2 == 0}
        response = await client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        if not body["stream"]:
            return response.json()["choices"][0]["text"]
        events = [json.loads(event) for event in sse(response.text)[:-1]]
        return "".join(event["choices"][0]["text"] for event in events)

    async def all_of_them() -> list[str]:
        async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:
            return await asyncio.gather(*(one(client, i) for i in range(64)))

    threads = threading.active_count()
    texts = asyncio.run(all_of_them())
    assert texts == [f"said p{i} " + "on " * 20 for i in range(64)]
    assert threading.active_count() <= threads + 1, "no thread per request"


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_cancels_its_program_at_once(serve, stream):
    engine = StringEngine(reply=lambda prompt, op: "w " * 100_000, step_s=0.002)
    server = serve(engine)
    body = json.dumps({"prompt": "a", "max_tokens": 90_000, "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as client:
        client.sendall(head.encode() + b"\r\n\r\n" + body)
        wait_until(lambda: bool(engine.programs))
        if stream:
            assert client.recv(1000).startswith(b"HTTP/1.1 200")
    wait_until(lambda: not engine.programs)
    assert server.http.get("/server_info").json()["server"]["requests_in_flight"] == 0


def test_a_slow_reader_holds_nobody_up_and_misses_nothing(serve):
    text = "".join(f"word{i} " for i in range(20_000))
    server = serve(StringEngine(reply=lambda prompt, op: text if prompt == "long" else "short", context_len=100_000))
    body = json.dumps({"prompt": "long", "max_tokens": 50_000, "stream": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
        slow.sendall(head.encode() + f"content-length: {len(body)}\r\n\r\n".encode() + body)
        for _ in range(3):
            assert server.openai.completions.create(model="string", prompt="a").choices[0].text == "short"
        wait_until(lambda: not server.engine.programs)  # the engine does not wait for the reader
        received = bytearray()
        while part := slow.recv(1 << 20):
            received += part
    lines = [line[6:] for line in received.split(b"\n") if line.startswith(b"data: {")]
    assert "".join(json.loads(line)["choices"][0]["text"] for line in lines) == text


def test_a_deadline_ends_in_504(serve):
    server = serve(StringEngine(reply=lambda prompt, op: "w " * 10_000, step_s=0.005))
    body = {"prompt": "a", "max_tokens": 10_000, "deadline_s": 0.05}
    response = server.http.post("/v1/completions", json=body)
    assert response.status_code == 504
    assert response.json()["error"]["code"] == "deadline_exceeded"


def test_a_failure_in_mid_stream_is_an_event_and_the_openai_client_raises_it(serve):
    server = serve(StringEngine(reply=lambda prompt, op: "w " * 10_000, step_s=0.005))
    ask = {"model": "string", "prompt": "a", "max_tokens": 10_000, "stream": True}
    with pytest.raises(openai.APIError, match="deadline"):
        for _ in server.openai.completions.create(**ask, extra_body={"deadline_s": 0.1}):
            pass


# -- models, operators ------------------------------------------------------------------------------------------------


def test_a_request_s_model_may_be_an_adapter(serve):
    client = ScriptedClient(rejecting(errors.Overloaded("full")))  # what was asked is looked at, not answered
    client.welcome = msgspec.structs.replace(client.welcome, adapters=("poet",))
    server = serve(client=client)
    assert [model.id for model in server.openai.models.list()] == ["string", "poet"]
    for name, adapter in (("poet", "poet"), ("string", "")):
        for path, asked in (
            ("completions", {"prompt": "a"}),
            ("chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ):
            assert server.http.post(f"/v1/{path}", json={"model": name, **asked}).status_code == 429
            assert client.submits[-1].settings.adapter == adapter
        assert server.http.post("/generate", json={"text": "a", "lora_path": name}).status_code == 429
        assert client.submits[-1].settings.adapter == adapter
    with pytest.raises(openai.NotFoundError, match="this server has 'string', 'poet'"):
        server.openai.models.retrieve("other")
    answer = server.http.post("/generate", json={"text": "a", "lora_path": "other"})
    assert answer.status_code == 404 and answer.json()["error"]["param"] == "lora_path"


def test_models_are_listed_and_found(serve):
    server = serve()
    assert [model.id for model in server.openai.models.list()] == ["string"]
    assert server.openai.models.retrieve("string").owned_by == "phloem"
    with pytest.raises(openai.NotFoundError, match="'other' is not served here; this server has 'string'"):
        server.openai.models.retrieve("other")


def test_health_info_cache_and_metrics_answer(serve):
    server = serve()
    server.openai.completions.create(model="string", prompt="a b")
    ready = {"status": "ok", "live": True, "ready": True, "replicas": {"ready": 1, "total": 1}}
    assert server.http.get("/health").json() == ready and server.http.get("/health/live").json() == {"live": True}
    for refused in (server.http.get("/fleet"), server.http.post("/fleet/drain/0")):
        assert refused.status_code == 400 and "is not supervised here" in refused.json()["error"]["message"]
    assert server.http.get("/get_model_info").json()["max_context_length"] == 4096
    assert server.http.get("/server_info").json()["engine"]["model"] == "string"
    assert server.http.post("/flush_cache").json() == {"flushed": 0}
    assert server.http.get("/flush_cache").status_code == 405
    assert server.http.get("/cache_tree").json()["num_slots"] == 0
    text = server.http.get("/metrics").text
    assert 'phloem_engine_generated_tokens{replica="0"} 3.0' in text and 'phloem_engine_up{replica="0"} 1.0' in text
    assert 'phloem_http_responses_total{route="/v1/completions",status="200"} 1.0' in text
    assert "phloem_http_completion_tokens_total 3.0" in text
    assert "phloem_http_generation_seconds_count 1.0" in text


# -- /generate --------------------------------------------------------------------------------------------------------


def test_generate_answers_in_its_own_shape(serve):
    server = serve(StringEngine(reply=numbered))
    body = {"text": "a b", "sampling_params": {"max_new_tokens": 8, "stop": " END"}, "rid": "mine"}
    answer = server.http.post("/generate", json=body).json()
    assert answer["text"] == "one two three0" and len(answer["output_ids"]) == 3
    info = answer["meta_info"]
    assert info["finish_reason"] == {"type": "stop", "matched": " END"}
    assert (info["id"], info["prompt_tokens"], info["completion_tokens"], info["cached_tokens"]) == ("mine", 2, 3, 0)
    body["sampling_params"] = {"max_new_tokens": 2}
    assert server.http.post("/generate", json=body).json()["meta_info"]["finish_reason"] == {
        "type": "length",
        "length": 2,
    }


def test_generate_takes_batches_candidates_and_token_ids(serve):
    server = serve(StringEngine(reply=lambda prompt, op: prompt.upper()))

    def texts(**body):
        return [answer["text"] for answer in server.http.post("/generate", json=body).json()]

    assert texts(text=["a", "b"]) == ["A", "B"]
    assert texts(input_ids=[[12], [13]]) == ["USER", "ASSISTANT"]
    assert texts(text="a", sampling_params={"n": 2}) == ["A", "A"]
    assert texts(text=["a b", "b"], sampling_params=[{"max_new_tokens": 1}, {"n": 2}]) == ["A", "B", "B"]
    assert server.http.post("/generate", json={"input_ids": [12]}).json()["text"] == "USER"


def test_generate_streams_the_text_so_far(serve):
    server = serve(StringEngine(reply=lambda prompt, op: "one two three"))
    *events, done = sse(server.http.post("/generate", json={"text": "a", "stream": True}).text)
    assert done == "[DONE]"
    texts = [json.loads(event)["text"] for event in events]
    assert texts == ["one", "one two", "one two three", "one two three"]
    assert json.loads(events[0])["meta_info"]["finish_reason"] is None
    assert json.loads(events[-1])["meta_info"]["finish_reason"] == {"type": "stop", "matched": None}


def test_generate_returns_logprobs(serve):
    server = serve(StringEngine(reply=lambda prompt, op: "one two"))
    body = {"text": "a", "return_logprob": True, "top_logprobs_num": 2, "return_text_in_logprobs": True}
    info = server.http.post("/generate", json=body).json()["meta_info"]
    assert [(lp, text) for lp, _, text in info["output_token_logprobs"]] == [(-0.5, "one"), (-0.5, " two")]
    assert [len(top) for top in info["output_top_logprobs"]] == [2, 2]
    del body["return_text_in_logprobs"]
    info = server.http.post("/generate", json=body).json()["meta_info"]
    assert [text for _, _, text in info["output_token_logprobs"]] == [None, None]


# -- who may come in --------------------------------------------------------------------------------------------------


def test_an_api_key_is_asked_for_everywhere_but_at_health(serve):
    server = serve(api_key="secret")
    assert server.openai.completions.create(model="string", prompt="a").choices
    for path in ("/health", "/health/live"):
        assert httpx.get(f"{server.url}{path}", timeout=60.0).status_code == 200
    for path in ("/v1/models", "/metrics", "/cache_tree", "/fleet"):
        answer = httpx.get(f"{server.url}{path}", headers={"authorization": "Bearer wrong"}, timeout=60.0)
        assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"


def test_a_foreign_host_name_gets_nothing_from_a_loopback_server(serve):
    server = serve(hosts=("localhost", "127.0.0.1", "[::1]"))
    assert server.http.get("/v1/models").status_code == 200
    assert server.http.get("/v1/models", headers={"host": "LOCALHOST:80"}).status_code == 200
    answer = server.http.get("/v1/models", headers={"host": "evil.example:80"})
    assert answer.status_code == 403 and "evil.example" in answer.json()["error"]["message"]


def test_cors_is_off_until_an_origin_is_named(serve):
    origin = {"origin": "https://page.example"}
    assert "access-control-allow-origin" not in serve().http.get("/v1/models", headers=origin).headers
    server = serve(cors_origins=("https://page.example",), api_key="secret")
    assert server.http.get("/v1/models", headers=origin).headers["access-control-allow-origin"] == origin["origin"]
    preflight = {**origin, "access-control-request-method": "POST"}
    answer = httpx.options(f"{server.url}/v1/completions", headers={**preflight, "x-request-id": "mine"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (200, "mine")
    other = httpx.options(f"{server.url}/v1/completions", headers={**preflight, "origin": "https://other.example"})
    assert other.status_code == 400 and len(other.headers["x-request-id"]) == 32


def test_requests_from_many_threads_of_the_openai_client(serve):
    server = serve(StringEngine(reply=lambda prompt, op: prompt[::-1]))

    def one(i: int) -> str:
        return server.openai.completions.create(model="string", prompt=f"{i}x").choices[0].text

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(one, range(32))) == [f"{i}x"[::-1] for i in range(32)]


def test_every_response_has_a_request_id(shared_server, caplog):
    http = shared_server.http
    assert http.get("/health/live", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    made = [http.post("/v1/completions", content=b"{").headers["x-request-id"] for _ in range(2)]
    assert len(set(made)) == 2 and all(len(name) == 32 for name in made)
    for strange in ("a" * 129, "two words"):
        assert http.get("/health/live", headers={"x-request-id": strange}).headers["x-request-id"] != strange


def test_an_error_of_the_server_is_logged_with_the_request_id(serve, caplog):
    caplog.handler.setFormatter(TextLines())
    server = serve(client=ScriptedClient(rejecting(errors.InternalError("broken"))))
    answer = server.http.post("/v1/completions", json={"prompt": "a"}, headers={"x-request-id": "find-me"})
    assert answer.status_code == 500
    assert "POST /v1/completions: InternalError: broken [find-me]" in caplog.text
