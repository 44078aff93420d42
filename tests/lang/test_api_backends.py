"""Backends over foreign APIs: their requests, and their reading of answers, against small local servers."""

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from phloem import assistant, function, gen, select, system, unconditional_likelihood_normalized, user
from phloem.lang.backend.openai import OpenAI
from phloem.lang.backend.runtime_endpoint import HttpBackend, RuntimeEndpoint
from phloem.protocol import errors


class Server:
    """``answer(path, body)`` gives the JSON, or a list of events to stream."""

    def __init__(self, answer):
        self.requests = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def reply(self):
                size = int(self.headers.get("content-length", 0))
                body = json.loads(self.rfile.read(size) or b"null")
                outer.requests.append((self.path, body))
                status, content = 200, answer(self.path, body)
                if isinstance(content, tuple):
                    status, content = content
                if isinstance(content, list) and body and body.get("stream"):
                    data = "".join(f"data: {json.dumps(event)}\n\n" for event in content) + "data: [DONE]\n\n"
                    kind = "text/event-stream"
                else:
                    data, kind = json.dumps(content), "application/json"
                self.send_response(status)
                self.send_header("content-type", kind)
                self.send_header("content-length", str(len(data.encode())))
                self.end_headers()
                self.wfile.write(data.encode())

            do_GET = do_POST = reply

            def log_message(self, *args):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()

    def close(self):
        self.http.shutdown()
        self.http.server_close()


@pytest.fixture
def serve():
    servers = []

    def make(answer):
        servers.append(Server(answer))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


LOGPROBS = {  # of one token, in the form of each API
    "chat": {
        "content": [
            {
                "token": "four",
                "logprob": -0.5,
                "bytes": None,
                "top_logprobs": [
                    {"token": "four", "logprob": -0.5, "bytes": None},
                    {"token": "two", "logprob": -2.0, "bytes": None},
                ],
            }
        ]
    },
    "completions": {
        "tokens": ["four"],
        "token_logprobs": [-0.5],
        "text_offset": [0],
        "top_logprobs": [{"four": -0.5, "two": -2.0}],
    },
}


def logprobs_answer(path, body):
    kind = "chat" if "chat" in path else "completions"
    text = {"message": {"role": "assistant", "content": "four"}} if kind == "chat" else {"text": "four"}
    if body.get("stream"):
        chunk = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
        delta = {"delta": {"content": "four"}} if kind == "chat" else text
        choice = {"index": 0, "logprobs": LOGPROBS[kind], "finish_reason": "stop", **delta}
        usage = {"prompt_tokens": 5, "completion_tokens": 1, "total_tokens": 6}
        return [{**chunk, "choices": [choice]}, {**chunk, "choices": [], "usage": usage}]
    choices = [
        {"index": i, "finish_reason": "stop", "logprobs": LOGPROBS[kind], **text} for i in range(body.get("n", 1))
    ]
    return {"id": "1", "object": "x", "created": 1, "model": "m", "choices": choices}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("model", "asked"), [("gpt-x", (True, 2)), ("gpt-3.5-turbo-instruct", (2, None))])
def test_openais_log_probabilities_reach_the_program(serve, make_openai, model, asked, stream):
    server = serve(logprobs_answer)
    expr = gen("a", return_logprob=True, top_logprobs_num=2)

    @function
    def body(s):
        s += "q" + expr if "instruct" in model else user("q") + assistant(expr)

    s = body.run(backend=make_openai(server, model), stream=stream)
    meta = s.get_meta_info("a")
    assert meta["output_token_logprobs"] == [(-0.5, None, "four")]
    assert meta["output_top_logprobs"] == [[(-0.5, None, "four"), (-2.0, None, "two")]]
    assert meta["finish_reason"] == {"type": "stop"}
    request = server.requests[0][1]
    assert (request["logprobs"], request.get("top_logprobs")) == asked


def test_a_stream_of_several_candidates_keeps_them_apart(serve, make_openai):
    server = serve(logprobs_answer)

    @function
    def body(s):
        s += user("q") + assistant(gen("a", n=2, return_logprob=True))

    s = body.run(backend=make_openai(server), stream=True)
    assert "".join(s.text_iter("a")) == "four" and s["a"] == ["four", "four"]
    assert [one["output_token_logprobs"] for one in s.get_meta_info("a")["candidates"]] == [[(-0.5, None, "four")]] * 2
    assert server.requests[0][1]["n"] == 2


def test_a_dtype_holds_in_a_stream_too(serve, make_openai):
    s = function(lambda s: s.__iadd__(user("q") + assistant(gen("a", dtype=int)))).run(
        backend=make_openai(serve(openai_answer)), stream=True
    )
    assert "".join(s.text_iter("a")) == "4" and s["a"] == "4"


def openai_answer(path, body):
    if path.endswith("/chat/completions"):
        if body.get("stream"):
            chunk = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
            words = [{**chunk, "choices": [{"index": 0, "delta": {"content": w}}]} for w in ("four", " legs")]
            usage = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
            return [*words, {**chunk, "choices": [], "usage": usage}]
        choice = {"finish_reason": "stop", "message": {"role": "assistant", "content": "it has 4 legs"}}
        choices = [{"index": i, **choice} for i in range(body.get("n", 1))]
    else:
        choices = [{"index": 0, "finish_reason": "stop", "text": f" after {body['prompt'].split()[-1]}"}]
    usage = {"prompt_tokens": 5, "completion_tokens": 4, "total_tokens": 9}
    return {"id": "1", "object": "x", "created": 1, "model": "m", "choices": choices, "usage": usage}


@function
def legs(s):
    s += system("brief")
    s += user("How many legs has a dog?")
    s += assistant(gen("a", max_tokens=8, temperature=0, stop="."))


@pytest.fixture
def make_openai():
    made = []

    def make(server, model="gpt-x"):
        made.append(OpenAI(model, base_url=server.url + "/v1", api_key="k", max_retries=0))
        return made[-1]

    yield make
    for backend in made:
        backend.shutdown()


def test_openai_chat_sends_messages_and_counts_tokens(serve, make_openai):
    server = serve(openai_answer)
    backend = make_openai(server)
    s = legs.run(backend=backend)
    assert s["a"] == "it has 4 legs" and s.messages()[-1]["content"] == "it has 4 legs"
    path, body = server.requests[0]
    assert path == "/v1/chat/completions"
    assert body["messages"] == [
        {"role": "system", "content": "brief"},
        {"role": "user", "content": "How many legs has a dog?"},
    ]
    assert (body["max_tokens"], body["temperature"], body["stop"]) == (8, 0, ["."])
    assert s.get_meta_info("a")["completion_tokens"] == 4
    assert (backend.token_usage.prompt_tokens, backend.token_usage.completion_tokens) == (5, 4)
    backend.token_usage.reset()
    assert backend.token_usage.prompt_tokens == 0


def test_openai_streams_and_runs_in_an_event_loop(serve, make_openai):
    backend = make_openai(serve(openai_answer))
    s = legs.run(backend=backend, stream=True)
    assert [c for c in s.text_iter("a") if c] == ["four", " legs"] and s["a"] == "four legs"

    async def main():
        return await (await legs.run_async(backend=backend)).get("a")

    assert asyncio.run(main()) == "it has 4 legs"


def test_openai_takes_candidates_schemas_and_dtypes(serve, make_openai):
    server = serve(openai_answer)
    backend = make_openai(server)
    s = function(lambda s: s.__iadd__(user("q") + assistant(gen("a", n=2)))).run(backend=backend)
    assert s["a"] == ["it has 4 legs"] * 2
    s = function(lambda s: s.__iadd__(user("q") + assistant(gen("a", dtype=int)))).run(backend=backend)
    assert s["a"] == "4"
    function(lambda s: s.__iadd__(user("q") + assistant(gen("a", json_schema={"type": "object"})))).run(
        backend=backend
    ).sync()
    assert server.requests[-1][1]["response_format"]["json_schema"]["schema"] == {"type": "object"}


def test_openai_completion_models_continue_any_text(serve, make_openai):
    server = serve(openai_answer)
    s = function(lambda s: s.__iadd__("say" + gen("a") + " and" + gen("b"))).run(
        backend=make_openai(server, "gpt-3.5-turbo-instruct")
    )
    assert s.text() == "say after say and after and"
    assert [path for path, _ in server.requests] == ["/v1/completions"] * 2


def test_what_a_chat_api_cannot_do_is_refused_by_name(serve, make_openai):
    backend = make_openai(serve(openai_answer))
    cases = [
        (lambda s: s.__iadd__("text" + gen("a")), errors.InvalidRequest, "writes assistant turns only"),
        (lambda s: s.__iadd__(assistant("It" + gen("a"))), errors.InvalidRequest, "does not directly follow"),
        (
            lambda s: s.__iadd__(assistant(gen("a", regex="x"))),
            errors.InvalidRequest,
            "regex='x': the OpenAI API",
        ),
        (lambda s: s.__iadd__(assistant(select("a", ["x", "y"]))), errors.Unsupported, r"OpenAI has no select\(\)"),
    ]
    for body, kind, message in cases:
        s = function(body).run(backend=backend)
        with pytest.raises(kind, match=message):
            s["a"]


def native_answer(path, body):
    if path == "/get_model_info":
        return {"model_path": "some/chatml-model"}
    if path in ("/flush_cache", "/server_info"):
        return {"flushed": 3}
    if isinstance(body["text"], list):
        return [{"text": "", "meta_info": scored(text)} for text in body["text"]]
    if body.get("stream"):
        return [{"text": t, "meta_info": {"completion_tokens": i}} for i, t in enumerate((" a", " a b", " a b c"))]
    if "bad" in body["text"]:
        return 400, {"error": {"message": "no such thing"}}
    return {"text": f" <{body['text'].split()[-1]}>", "meta_info": {"prompt_tokens": 3, "completion_tokens": 1}}


def scored(text):
    """One token a word; a word's log-probability is minus its length."""
    words = text.split()
    return {
        "prompt_tokens": len(words),
        "input_token_logprobs": [(float(-len(w)), hash(w) % 1000, w) for w in words],
        "output_token_logprobs": [],
    }


def test_an_http_runtime_is_driven_through_generate(serve):
    server = serve(native_answer)
    backend = RuntimeEndpoint(server.url, chat_template_name="default")

    @function
    def body(s):
        s += "say" + gen("a", dtype=int, max_tokens=3)
        s += (
            " or"
            + select("c", [" longer", " no"])
            + select("d", [" longer", " no"], 0.0, unconditional_likelihood_normalized)
        )

    s = body.run(backend=backend)
    assert s["a"] == " <say>" and s["c"] == " no" and s["d"] == " longer"
    assert s.get_meta_info("c")["normalized_prompt_logprobs"] == [-6.0, -2.0]
    request = server.requests[1][1]
    assert request["sampling_params"]["max_new_tokens"] == 3 and request["sampling_params"]["regex"].startswith("[-+]?")
    assert list(function(lambda s: s.__iadd__("x" + gen("a"))).run(backend=backend, stream=True).text_iter("a")) == [
        " a",
        " b",
        " c",
    ]
    assert backend.flush_cache() and backend.get_server_info() == {"flushed": 3}
    s = function(lambda s: s.__iadd__("bad" + gen("a"))).run(backend=backend)
    with pytest.raises(errors.InvalidRequest, match="400.*no such thing"):
        s["a"]
    backend.shutdown()


def test_a_wrong_or_silent_endpoint_is_an_error_that_names_it():
    with pytest.raises(errors.InvalidRequest, match="must begin with http://"):
        RuntimeEndpoint("localhost:30000")
    with pytest.raises(errors.InvalidRequest, match="api_key: a tcp:// runtime takes none"):
        RuntimeEndpoint("tcp://127.0.0.1:1", api_key="k")
    with pytest.raises(errors.EngineLost, match="is a server running there"):
        HttpBackend("http://127.0.0.1:9")
