"""Requests that are too long are refused before the work is done; long ones do not hold the others."""

import json
import threading

import httpx
import pydantic
import pytest
from phloem.protocol import errors
from phloem.protocol.messages import Limits, Submit
from phloem.protocol.ops import Text
from phloem.protocol.program_call import ProgramCall
from phloem.runtime.server.schemas import ChatRequest
from phloem.tests.runtime.server.doubles import ChatML, ScriptedClient, rejecting
from phloem.tests.runtime.string_tokens import CHATML
from phloem.tests.runtime.wire import wait_until

MOST = Limits().max_ops_per_submit


def chat(*contents: str) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": content} for content in contents]}


class Idle:
    """A client that no request may reach."""

    def script(self, submit: Submit) -> list[object]:
        raise AssertionError("the request was submitted")


class Watched(ChatML):
    """A template that counts what it renders, and waits at ``gate`` if there is one."""

    def __init__(self, gate: threading.Event | None = None) -> None:
        self.num_messages = 0
        self.threads: list[str] = []
        self.gate = gate

    def render(self, messages, **options):
        self.num_messages += len(messages)
        self.threads.append(threading.current_thread().name)
        if self.gate is not None:
            assert self.gate.wait(timeout=300)
        return super().render(messages, **options)

    def info(self):
        return CHATML


@pytest.fixture
def idle():
    return ScriptedClient(Idle().script)


@pytest.mark.parametrize(
    ("path", "body", "code", "message"),
    [
        ("/v1/chat/completions", chat(*["x"] * 100_000), "limit_exceeded", f"messages: more than {MOST:,} items"),
        ("/v1/chat/completions", chat(*["x"] * 4_000), "limit_exceeded", "fewer messages or prompts"),
        ("/v1/chat/completions", chat("a" * 15_000_000), "context_length_exceeded", "15,000,000 characters"),
        ("/v1/chat/completions", chat(*["a" * 1000] * 600), "context_length_exceeded", "600,000 characters"),
        ("/v1/completions", {"prompt": "a" * 15_000_000}, "context_length_exceeded", "15,000,000 characters"),
        ("/v1/completions", {"prompt": ["a"] * 100_000}, "limit_exceeded", "prompt"),
        ("/v1/completions", {"prompt": ["a"] * 3_000}, "limit_exceeded", "3,000 prompts, but at most 1,365 fit"),
        ("/v1/completions", {"prompt": [1] * 5_000}, "context_length_exceeded", "5,000 token ids"),
        ("/v1/completions", {"prompt": [1] * 2_000_000}, "limit_exceeded", "prompt"),
        ("/generate", {"text": "a" * 15_000_000}, "context_length_exceeded", "15,000,000 characters"),
        ("/generate", {"input_ids": [[1] * 5_000]}, "context_length_exceeded", "5,000 token ids"),
        (
            "/generate",
            {"text": "<|im_end|>" * 100_000, "parse_special": True},
            "context_length_exceeded",
            "1,000,000 characters",
        ),
        (
            "/v1/programs",
            {"program": "p", "ops": [{"t": "close", "op": i, "seq": i} for i in range(100_000)]},
            "limit_exceeded",
            f"100,000 ops, but one submit may hold {MOST:,}",
        ),
    ],
)
def test_what_cannot_fit_is_refused_before_it_is_rendered_or_sent(serve, idle, path, body, code, message):
    """100,000 messages kept the server's only thread busy while nobody else was answered."""
    template = Watched()
    server = serve(client=idle, template=template)
    answer = server.http.post(path, json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["code"] == code and message in error["message"], error
    assert template.num_messages <= 4_000 and len(error["message"]) < 1000


def test_a_long_request_is_rendered_on_a_thread_and_others_are_answered_meanwhile(serve):
    gate = threading.Event()
    template = Watched(gate)
    server = serve(template=template)
    answers = []
    late = threading.Thread(
        target=lambda: answers.append(server.http.post("/v1/chat/completions", json=chat(*["word"] * 900)))
    )
    late.start()
    wait_until(lambda: template.threads)
    assert httpx.get(f"{server.url}/health/live").status_code == 200
    assert server.http.post("/v1/completions", json={"prompt": "a"}).status_code == 200
    gate.set()
    late.join()
    assert answers[0].status_code == 200 and template.threads[0].startswith("requests")


def test_a_request_whose_client_leaves_is_not_begun(serve):
    gate = threading.Event()
    template = Watched(gate)
    server = serve(template=template)
    first = threading.Thread(target=lambda: server.http.post("/v1/chat/completions", json=chat(*["word"] * 900)))
    first.start()
    wait_until(lambda: template.threads)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/chat/completions", json=chat(*["word"] * 901), timeout=0.5)
    wait_until(lambda: 'phloem_http_responses_total{route="/v1/chat/completions",status="499"} 1.0' in metrics(server))
    gate.set()
    first.join()
    assert template.num_messages == 900


def metrics(server) -> str:
    return httpx.get(f"{server.url}/metrics").text


def test_of_many_tools_the_doubled_name_is_found():
    names = [f"tool{min(i, MOST - 2)}" for i in range(MOST)]
    body = {
        "messages": [{"role": "user", "content": "a"}],
        "tools": [{"type": "function", "function": {"name": name}} for name in names],
    }
    with pytest.raises(pydantic.ValidationError, match=f"two functions are called 'tool{MOST - 2}'"):
        ChatRequest.model_validate_json(json.dumps(body))
    body["tools"] = body["tools"][:-1]
    assert len(ChatRequest.model_validate_json(json.dumps(body)).tools) == MOST - 1


def test_a_doubled_op_id_is_found_in_one_pass():
    """The search was quadratic: in 200,000 ops it took a minute."""
    call = ProgramCall(ScriptedClient(rejecting(errors.Cancelled("not reached"))), lambda event: None)
    ops = [Text(op=min(i, 199_998), seq=0, text="") for i in range(200_000)]
    with pytest.raises(errors.InvalidRequest, match="op id 199998 is used twice"):
        call.submit(ops)
