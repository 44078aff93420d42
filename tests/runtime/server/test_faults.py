"""Every way in which a request can fail, and the response to its client."""

import httpx
import openai
import pytest
from phloem.protocol import errors, messages
from phloem.tests.runtime.server.doubles import ScriptedClient, failing, rejecting
from phloem.tests.runtime.string_engine import StringEngine

HELLO = [{"role": "user", "content": "hello"}]


TOOL = {"type": "function", "function": {"name": "f"}}
CUT_SHORT = {"name": "f", "arguments": '{"a'}


@pytest.mark.parametrize("outcome", [rejecting, failing])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (errors.InvalidRequest("no"), 400, "invalid_request"),
        (errors.InvalidParams("no"), 400, "invalid_value"),
        (errors.InvalidGrammar("no"), 400, "invalid_grammar"),
        (errors.PromptTooLong("no"), 400, "context_length_exceeded"),
        (errors.LimitExceeded("no"), 400, "limit_exceeded"),
        (errors.UnknownModel("no"), 404, "model_not_found"),
        (errors.Unsupported("no"), 400, "unsupported"),
        (errors.Overloaded("no"), 429, "overloaded"),
        (errors.Cancelled("no"), 499, "cancelled"),
        (errors.DeadlineExceeded("no"), 504, "deadline_exceeded"),
        (errors.EngineLost("no"), 503, "engine_lost"),
        (errors.DependencyFailed("no"), 500, "internal_error"),
        (errors.InternalError("no"), 500, "internal_error"),
    ],
)
def test_every_error_of_the_runtime_has_its_status_and_code(serve, outcome, error, status, code):
    server = serve(client=ScriptedClient(outcome(error)))
    for stream in (False, True):
        response = server.http.post("/v1/chat/completions", json={"messages": HELLO, "stream": stream})
        assert response.status_code == status
        body = response.json()["error"]
        assert (body["message"], body["code"]) == ("no", code)
        assert set(body) == {"message", "type", "param", "code"}
        assert ("retry-after" in response.headers) == (status in (429, 503))


def test_what_the_client_raises_at_submit_is_answered_too(serve):
    def lost(submit):
        raise errors.EngineLost("the engine process ended")

    server = serve(client=ScriptedClient(lost))
    with pytest.raises(openai.InternalServerError, match="the engine process ended") as caught:
        server.openai.chat.completions.create(model="string", messages=HELLO)
    assert caught.value.status_code == 503
    health = server.http.get("/health")
    assert health.status_code == 503 and health.json()["replicas"] == {"ready": 0, "total": 1}
    assert server.http.get("/health/live").status_code == 200
    assert 'phloem_engine_up{replica="0"} 0.0' in server.http.get("/metrics").text


def test_a_program_closed_before_its_end_is_an_internal_error(serve):
    def script(submit):
        return [
            messages.Accepted(program=submit.program),
            messages.Closed(program=submit.program, stats=messages.ProgramStats()),
        ]

    assert serve(client=ScriptedClient(script)).http.post("/generate", json={"text": "a"}).status_code == 500


def test_ids_of_ops_are_not_shown_to_people(serve):
    error = errors.InvalidParams("top_p=3: too much, in op 3 (Gen on sequence 0)", where="op 3 (Gen on sequence 0)")
    body = serve(client=ScriptedClient(rejecting(error))).http.post("/generate", json={"text": "a"}).json()
    assert body["error"]["message"] == "top_p=3: too much" and body["error"]["param"] is None


def test_the_engines_log_stays_in_the_servers(serve):
    error = errors.EngineLost("the engine process 7 was ended by SIGKILL; its log ends:\nFile /home/somebody/secret.py")
    body = serve(client=ScriptedClient(rejecting(error))).http.post("/generate", json={"text": "a"}).json()
    assert body["error"]["message"] == "the engine process 7 was ended by SIGKILL"


def test_a_failure_after_text_ends_the_stream_with_an_error_event(serve):
    client = ScriptedClient(failing(errors.EngineLost("the engine process ended"), after="so far"))
    server = serve(client=client)
    text = server.http.post("/v1/completions", json={"prompt": "a", "stream": True}).text
    first, last = text.removesuffix("\n\n").split("\n\n")
    assert '"text":"so far"' in first
    assert last.startswith('data: {"error":{"message":"the engine process ended"') and "[DONE]" not in text


def test_one_prompt_that_fails_cancels_the_others(serve):
    def script(submit):
        gens = [op.op for op in submit.ops if type(op).__name__ == "Gen"]
        error = errors.PromptTooLong("9 tokens, but").info()
        return [
            messages.Accepted(program=submit.program),
            messages.Failed(program=submit.program, op=gens[1], error=error),
        ]

    client = ScriptedClient(script)
    assert serve(client=client).http.post("/v1/completions", json={"prompt": ["a", "b"]}).status_code == 400
    assert client.cancelled == [client.submits[0].program]


def test_a_prompt_beyond_the_context_names_both_lengths(serve):
    server = serve(StringEngine(context_len=20))
    with pytest.raises(openai.BadRequestError) as caught:
        server.openai.chat.completions.create(
            model="string", messages=[{"role": "user", "content": "word " * 40}], stream=True
        )
    assert caught.value.code == "context_length_exceeded"
    assert "max_seq_len is 20" in str(caught.value)


def test_an_unknown_model_is_404(serve):
    with pytest.raises(openai.NotFoundError) as caught:
        serve().openai.chat.completions.create(model="gpt-9", messages=HELLO)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_a_model_without_a_chat_template_refuses_chats(serve):
    server = serve(template=None)
    with pytest.raises(openai.BadRequestError, match="has no chat template; send a prompt of its own"):
        server.openai.chat.completions.create(model="string", messages=HELLO)
    assert server.openai.completions.create(model="string", prompt="a").choices


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("chat", {"tempreature": 1}, "tempreature", "unknown field 'tempreature'"),
        ("chat", {"tempreature": 1}, "tempreature", "did you mean 'temperature'?"),
        ("chat", {"messages": [{"role": "user", "content": "a", "colour": 1}]}, "messages.0.colour", "unknown field"),
        ("chat", {"tools": [{"type": "function"}]}, "tools.0.function", "is required"),
        ("chat", {"tools": [{"type": "custom"}]}, "tools.0.type", "must be 'function'"),
        ("chat", {"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name", "pattern"),
        ("chat", {"tools": [TOOL, TOOL]}, "tools", "two functions are called 'f'"),
        ("chat", {"tools": [TOOL], "response_format": {"type": "json_object"}}, "tools", "exclude each other"),
        ("chat", {"tool_choice": "required"}, "tool_choice", "asks for 'required', but tools has none"),
        (
            "chat",
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice",
            "asks for 'g', but tools has f",
        ),
        ("chat", {"functions": [{"name": "f"}]}, "functions", "'functions' is not supported"),
        ("chat", {"store": True}, "store", "only false is accepted"),
        ("chat", {"audio": {}}, "audio", "not supported"),
        ("chat", {"reasoning_effort": "high"}, "reasoning_effort", "not supported"),
        ("chat", {"messages": []}, "messages", "at least 1 item"),
        ("chat", {"messages": [{"role": "oracle", "content": "a"}]}, "messages.0.role", "must be one of system"),
        ("chat", {"messages": [{"role": "function", "content": "a"}]}, "messages.0.role", "as role 'tool'"),
        ("chat", {"messages": [{"role": "tool", "content": "a"}]}, "messages.0", "tool_call_id goes with role 'tool'"),
        (
            "chat",
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "function": CUT_SHORT}]}]},
            "messages.0.tool_calls.0.function",
            "arguments must be a JSON object, as text",
        ),
        ("chat", {"messages": [{"role": "user"}]}, "messages.0", "needs content"),
        (
            "chat",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages.0.content",
            "'image_url' is not supported",
        ),
        ("chat", {"max_tokens": -1}, "max_tokens", "max_tokens=-1: must be >= 0"),
        ("chat", {"max_completion_tokens": -1}, "max_completion_tokens", "max_completion_tokens=-1"),
        ("chat", {"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens", "differ"),
        ("chat", {"temperature": -1}, "temperature", "temperature=-1.0: must be between 0 and 100"),
        ("chat", {"temperature": "hot"}, "temperature", "temperature='hot': must be a valid number"),
        ("chat", {"stop": 5}, "stop", "stop=5"),
        ("chat", {"stop": ""}, "stop", "non-empty"),
        ("chat", {"n": 0}, "n", "n=0"),
        ("chat", {"n": 1000}, "n", "n=1000: must be at most 128"),
        ("chat", {"logit_bias": {"99999999": 1}}, "logit_bias", "99999999 must be below 30100"),
        ("chat", {"top_logprobs": 3}, "top_logprobs", "needs logprobs=true"),
        ("chat", {"top_logprobs": 30, "logprobs": True}, "top_logprobs", "less than or equal to 20"),
        ("chat", {"stream_options": {"include_usage": True}}, "stream_options", "only allowed with stream=true"),
        ("chat", {"regex": "a", "ebnf": "b"}, "regex", "exclude each other"),
        ("chat", {"grammar_options": {"whitespace": "compact"}}, "grammar_options", "need a grammar"),
        ("chat", {"response_format": {"type": "xml"}}, "response_format.type", "must be 'text'"),
        ("chat", {"response_format": {"type": "json_schema"}}, "response_format", "goes with type 'json_schema'"),
        ("chat", {"deadline_s": 0}, "deadline_s", "greater than 0"),
        ("completions", {}, "prompt", "the field 'prompt' is required"),
        ("completions", {"prompt": []}, "prompt", "empty list"),
        ("completions", {"prompt": [1, 99999999]}, "prompt", "token id 99999999, but the vocabulary has 30,100"),
        ("completions", {"prompt": "a", "suffix": "b"}, "suffix", "not supported"),
        ("completions", {"prompt": "a", "best_of": 3}, "best_of", "best_of=3 is not supported"),
        ("completions", {"prompt": "a", "echo": True, "stream": True, "logprobs": 1}, "stream", "cannot be streamed"),
        ("generate", {}, "text", "give either text or input_ids"),
        ("generate", {"text": "a", "sampling_params": {"max_tokens": 3}}, "sampling_params.max_tokens", "unknown"),
        ("generate", {"text": "a", "sampling_params": {"max_new_tokens": -3}}, "max_new_tokens", "must be >= 0"),
        (
            "generate",
            {"text": "a", "sampling_params": {"no_stop_trim": True}},
            "sampling_params.no_stop_trim",
            "not supported",
        ),
        ("generate", {"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params", "1 entries for 2 prompts"),
    ],
)
def test_a_bad_field_is_named_with_its_value_and_limit(shared_server, path, body, param, message):
    if path == "chat":
        body = {"messages": HELLO, **body}
    urls = {"chat": "/v1/chat/completions", "completions": "/v1/completions", "generate": "/generate"}
    response = shared_server.http.post(urls[path], json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert message in error["message"]


@pytest.mark.parametrize("body", [b"{", b"[]", b"3", b'"x"', b"\xff", b'{"prompt": "\\ud800"}'])
def test_a_body_that_is_no_json_object_is_400(shared_server, body):
    response = shared_server.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_json"


def test_another_content_type_is_415(shared_server):
    response = shared_server.http.post("/v1/completions", data={"prompt": "a"})
    assert response.status_code == 415
    assert "send application/json" in response.json()["error"]["message"]


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_beyond_the_limit_is_413(serve, chunked):
    server = serve(max_body_bytes=1000)
    body = b'{"prompt": "' + b"a" * 2000 + b'"}'
    content = iter([body[:500], body[500:]]) if chunked else body
    response = server.http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert response.status_code == 413
    assert "1,000 bytes" in response.json()["error"]["message"]


def test_unknown_paths_and_methods_answer_in_the_same_shape(shared_server):
    response = shared_server.http.get("/v1/assistants")
    assert response.status_code == 404 and response.json()["error"]["code"] == "unknown_url"
    assert shared_server.http.get("/v1/completions").status_code == 405


def test_a_bug_is_a_500_without_its_trace(serve):
    def broken(submit):
        raise RuntimeError("a secret detail")

    response = httpx.post(f"{serve(client=ScriptedClient(broken)).url}/generate", json={"text": "a"}, timeout=60.0)
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error" and "secret" not in response.text
