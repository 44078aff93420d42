"""Programs over HTTP: from a server's routes, and from the language through ``RuntimeEndpoint("http://...")``."""

import asyncio
import json
import threading

import httpx
import pytest
from phloem import RuntimeEndpoint, assistant, function, gen, select, user
from phloem.protocol import errors
from phloem.tests.runtime.server.doubles import ScriptedClient, failing, rejecting
from phloem.tests.runtime.string_engine import StringEngine
from phloem.tests.runtime.wire import wait_until

OPS = [
    {"t": "text", "op": 0, "seq": 0, "text": "hello"},
    {"t": "gen", "op": 1, "seq": 0, "stream": True},
    {"t": "close", "op": 2, "seq": 0},
]


def echo(prompt, op):
    return f" <{prompt.split()[-1]}>"


@pytest.fixture
def connect(serve):
    """``connect(engine)``: a backend over http:// to a server with that engine."""
    backends = []

    def make(engine=None, **options):
        server = serve(engine, **options)
        backends.append(RuntimeEndpoint(server.url, api_key=options.get("api_key")))
        return backends[-1], server

    yield make
    for backend in backends:
        backend.shutdown()


def lines(response):
    return [json.loads(line) for line in response.text.splitlines() if line]


def test_a_submit_streams_its_messages_as_lines_until_the_program_is_closed(serve):
    server = serve(StringEngine(reply=lambda prompt, op: " one two"))
    response = server.http.post("/v1/programs", json={"program": "p", "ops": OPS})
    assert response.status_code == 200 and response.headers["content-type"] == "application/x-ndjson"
    found = lines(response)
    assert [line["m"] for line in found] == ["accepted", "done", "delta", "delta", "done", "done", "closed"]
    assert "".join(line["text"] for line in found if line["m"] == "delta") == " one two"
    assert found[-3]["value"] == [" one two"] and {line["program"] for line in found} == {"p"}


def test_what_is_wrong_with_a_submit_is_said_with_a_status(serve):
    server = serve(api_key="secret")
    post = server.http.post
    assert httpx.post(f"{server.url}/v1/programs", json={}, timeout=60.0).status_code == 401
    assert httpx.get(f"{server.url}/v1/welcome", timeout=60.0).status_code == 401
    unreadable = post("/v1/programs", json={"program": "p", "ops": [{"t": "gne", "op": 0, "seq": 0}]})
    assert unreadable.status_code == 400 and "gne" in unreadable.json()["error"]["message"]
    unknown = post("/v1/programs", json={"program": "p", "ops": [], "spam": 1})
    assert unknown.status_code == 400 and "spam" in unknown.json()["error"]["message"]
    nameless = post("/v1/programs", json={"program": "", "ops": OPS})
    assert nameless.status_code == 400 and nameless.json()["error"]["param"] == "program"
    gone = post("/v1/programs/q", json={"program": "q", "ops": OPS})
    assert gone.status_code == 400 and "is not running here" in gone.json()["error"]["message"]
    other = post("/v1/programs/q", json={"program": "p", "ops": OPS})
    assert other.status_code == 400 and "of program 'p', the path of 'q'" in other.json()["error"]["message"]
    assert post("/v1/programs", content=b"{}").status_code == 415
    assert server.http.delete("/v1/programs/q").status_code == 200


def test_what_the_engine_refuses_is_a_status_and_the_engines_own_message(serve):
    server = serve(client=ScriptedClient(rejecting(errors.PromptTooLong("9 tokens, but 8 fit"))))
    response = server.http.post("/v1/programs", json={"program": "p", "ops": OPS})
    assert response.status_code == 400 and response.json()["error"]["code"] == "context_length_exceeded"
    assert response.json()["rejected"]["errors"] == [{"kind": "PromptTooLong", "message": "9 tokens, but 8 fit"}]


def test_a_client_that_goes_away_has_its_program_cancelled(serve):
    server = serve(StringEngine(reply=lambda prompt, op: " word" * 100_000, step_s=0.1, context_len=1_000_000))
    endless = [*OPS]
    endless[1] = OPS[1] | {"params": {"max_tokens": 100_000}}  # 10,000 s
    with server.http.stream("POST", "/v1/programs", json={"program": "p", "ops": endless}) as response:
        lines_of_response = response.iter_lines()  # if it went away, so would the connection
        assert "failed" not in next(lines_of_response)
        wait_until(lambda: server.engine.programs == ["p"])
    wait_until(lambda: not server.engine.programs)


def test_a_program_over_http_is_one_message_and_says_what_it_says_over_ipc(connect):
    backend, server = connect(StringEngine(reply=echo, select=lambda prompt, op: 1), api_key="secret")

    @function
    def tree(s, topic):
        s += user("about " + topic)
        forks = s.fork(3)
        forks += lambda i: f" idea{i}" + gen("idea")
        forks.join()
        s += assistant(s.ref("idea", sep=",") + gen("best") + select("c", [" a", " b"]))

    s = tree.run("trees", backend=backend)
    assert s["idea"] == [" <idea0>", " <idea1>", " <idea2>"] and s["c"] == " b"
    assert s.messages()[-1]["role"] == "assistant" and s.stats()["messages"] == 1
    assert tree.compile(backend=backend).run("roots", backend=backend)["best"] == s["best"]
    assert len(tree.run_batch([{"topic": str(i)} for i in range(20)], backend=backend)) == 20
    assert backend.get_model_name() == server.engine.welcome().model
    assert backend.flush_cache() is True and isinstance(backend.get_server_info(), dict)
    with pytest.raises(errors.Unsupported, match="metrics are at"):
        backend.client.query("metrics")


def test_a_program_over_http_branches_on_values(connect):
    backend, _server = connect(StringEngine(reply=echo))

    @function
    def branching(s):
        s += "one" + gen("a")
        s += " yes" if s["a"] == " <one>" else " no"
        s += gen("b")

    s = branching.run(backend=backend)
    assert s["b"] == " <yes>" and s.stats()["messages"] == 2


def test_a_program_over_http_streams_as_it_is_generated(connect):
    def reply(prompt, op):
        return " one two three"

    backend, _server = connect(StringEngine(reply=reply))

    @function
    def body(s):
        s += "count" + gen("a") + "."

    s = body.run(backend=backend, stream=True)
    assert list(s.text_iter()) == ["count", " one", " two", " three", "."]

    async def stream():
        s = await body.run_async(backend=backend, stream=True)
        return [text async for text in s.text_async_iter("a")]

    assert asyncio.run(stream()) == [" one", " two", " three"]


def test_cancels_and_deadlines_reach_the_engine_over_http(connect):
    backend, server = connect(StringEngine(reply=lambda prompt, op: " word" * 100000))

    @function
    def body(s):
        s += "go" + gen("a", max_tokens=100000)

    s = body.run(backend=backend, stream=True)
    next(s.text_iter("a"))
    s.cancel()
    with pytest.raises(errors.Cancelled):
        s["a"]
    assert s.text(partial=True).startswith("go word")
    with pytest.raises(errors.DeadlineExceeded):
        body.run(backend=backend, deadline_s=0.05)["a"]
    wait_until(lambda: not server.engine.programs)


def test_errors_over_http_are_the_errors_they_are_elsewhere(connect, serve):
    backend, _server = connect()

    @function
    def body(s):
        s += "x" + gen("a", top_p=7.0)

    with pytest.raises(errors.InvalidParams, match="top_p=7"):
        body.run(backend=backend)["a"]

    failed = serve(client=ScriptedClient(failing(errors.Overloaded("full"), after="ab")))
    over = RuntimeEndpoint(failed.url)
    s = function(lambda s: s.__iadd__("x" + gen("a"))).run(backend=over)
    with pytest.raises(errors.Overloaded, match="full"):
        s["a"]
    assert s.text(partial=True) == "xab"
    over.shutdown()
    over.shutdown()
    with pytest.raises(errors.EngineLost, match="was closed"):
        function(lambda s: s.__iadd__("x" + gen("a"))).run(backend=over)["a"]
    with pytest.raises(errors.InvalidRequest, match="API key"):
        RuntimeEndpoint(serve(api_key="secret").url, api_key="wrong")


def test_a_stream_that_breaks_is_a_lost_engine(connect):
    backend, _server = connect(StringEngine(reply=lambda prompt, op: " word" * 100000))

    @function
    def body(s):
        s += "go" + gen("a", max_tokens=100000)

    s = body.run(backend=backend, stream=True)
    chunks = s.text_iter("a")
    next(chunks)
    threading.Timer(0.1, backend.shutdown).start()
    with pytest.raises(errors.Cancelled, match="the client was closed"):
        list(chunks)
