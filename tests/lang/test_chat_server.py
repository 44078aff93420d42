"""A server with OpenAI's chat completions, asked over httpx alone: whole answers, streams, errors and a cancel."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from phloem import assistant, function, gen, user
from phloem.commands.answers import Wanted, source_at
from phloem.lang.backend.chat_server import ChatServer
from phloem.protocol.errors import Cancelled, EngineLost, InvalidRequest, PhloemError, UnknownModel

HANGING_S = 60.0


class Stranger(BaseHTTPRequestHandler):
    """A server of another project, with one model. The last message says what it does."""

    server: "Strangers"

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self.say(200, {"data": [{"id": "oak"}, {"id": "elm"}]})
        else:
            self.say(404, {"detail": "no such page"})

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.requests.append(request)
        asked = request["messages"][-1]["content"]
        if asked == "refuse":
            self.say(400, {"error": {"message": "too hot"}})
        elif not request.get("stream"):
            choice = {"message": {"content": "Hello."}, "finish_reason": "stop"}
            self.say(200, {"choices": [choice], "usage": {"prompt_tokens": 7, "completion_tokens": 2}})
        else:
            self.send_response(200)
            self.end_headers()
            self.event({"choices": [{"delta": {"role": "assistant"}}]})
            self.event({"choices": [{"delta": {"content": "Hel"}}]})
            if asked == "break":
                self.event({"error": {"message": "out of memory"}})
            elif asked == "endless":
                self.until_gone()
            else:
                self.event({"choices": [{"delta": {"content": "lo."}, "finish_reason": "length"}]})
                usage = {"prompt_tokens": 7, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 3}}
                self.event({"choices": [], "usage": usage})
                self.wfile.write(b"data: [DONE]\n\n")

    def until_gone(self) -> None:
        try:
            while True:
                self.event({"choices": [{"delta": {"content": " w"}}]})
        except OSError:
            self.server.left.set()

    def event(self, data: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(data)}\n\n".encode())

    def say(self, status: int, data: dict[str, Any]) -> None:
        body = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None: ...


class Strangers(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Stranger)
        self.requests: list[dict[str, Any]] = []
        self.left = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}"


@pytest.fixture
def stranger() -> Iterator[Strangers]:
    with Strangers() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def backend(stranger: Strangers) -> Iterator[ChatServer]:
    made = ChatServer(stranger.url, model_name="oak")
    yield made
    made.shutdown()


@function
def ask(s: Any, question: str) -> None:
    s += user(question)
    s += assistant(gen("answer", max_tokens=9, temperature=0))


def test_an_answer_comes_whole_and_as_a_stream(stranger: Strangers, backend: ChatServer) -> None:
    state = ask.run("hi", backend=backend)
    assert (state["answer"], state.get_meta_info("answer")["completion_tokens"]) == ("Hello.", 2)
    state = ask.run("hi", backend=backend, stream=True)
    assert list(filter(None, state.text_iter("answer"))) == ["Hel", "lo."]
    meta = state.get_meta_info("answer")
    assert (meta["finish_reason"], meta["cached_tokens"]) == ({"type": "length"}, 3)
    sent = stranger.requests[0]
    assert (sent["model"], sent["max_tokens"], sent["temperature"]) == ("oak", 9, 0)
    assert sent["messages"] == [{"role": "user", "content": "hi"}]


def test_what_the_server_says_is_the_error(backend: ChatServer) -> None:
    with pytest.raises(InvalidRequest, match="400 too hot"):
        ask.run("refuse", backend=backend)["answer"]
    with pytest.raises(PhloemError, match="out of memory"):
        list(ask.run("break", backend=backend, stream=True).text_iter("answer"))
    with pytest.raises(EngineLost, match="is a server running there"):
        ask.run("hi", backend=ChatServer("http://127.0.0.1:9", model_name="oak"))["answer"]


def test_a_cancelled_stream_is_closed(stranger: Strangers, backend: ChatServer) -> None:
    state = ask.run("endless", backend=backend, stream=True)
    pieces = state.text_iter("answer")
    next(pieces)
    state.cancel("answer")
    assert stranger.left.wait(HANGING_S), "the server still writes"
    with pytest.raises(Cancelled):
        state["answer"]


def test_a_server_of_another_project_is_found_by_its_address(stranger: Strangers) -> None:
    for url, model, name in ((stranger.url, None, "oak"), (f"{stranger.url}/v1/", "elm", "elm")):
        source = source_at(url, api_key=None, model=model)
        asking = source.converse([{"role": "user", "content": "hi"}], Wanted({"temperature": 0.5}))
        assert "".join(asking) == "Hello." and source.name == name
        answer = asking.reply()
        assert (answer.finish_reason, answer.prompt_tokens, answer.cached_tokens) == ("length", 7, 3)
        source.backend.shutdown()
    assert [request["model"] for request in stranger.requests] == ["oak", "elm"]
    with pytest.raises(UnknownModel, match="does not serve 'ash'; it has: oak, elm"):
        source_at(stranger.url, api_key=None, model="ash")


def test_what_such_a_server_cannot_do_is_refused_by_name(stranger: Strangers) -> None:
    source = source_at(stranger.url, api_key=None, model=None)
    for wanted, name in ((Wanted({"top_k": 3}), "top_k=3"), (Wanted(regex="a+"), "regex='a+'")):
        with pytest.raises(InvalidRequest, match=f"{name[:5]}.*the OpenAI API has no such parameter"):
            list(source.converse([{"role": "user", "content": "hi"}], wanted))
    assert stranger.requests == []
    source.backend.shutdown()
