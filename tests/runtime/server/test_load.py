"""Tenants and full queues as an HTTP client sees them, with a real engine."""

import threading
import time

import httpx
import openai
import pytest
from phloem.protocol import errors
from phloem.runtime.config import EngineConfig
from phloem.runtime.engine import EngineCore
from phloem.tests.runtime.server.doubles import ScriptedClient, rejecting
from phloem.tests.runtime.wire import wait_until
from prometheus_client.parser import text_string_to_metric_families

PROMPT = {"prompt": "to be", "max_tokens": 5, "ignore_eos": True}
HELLO = [{"role": "user", "content": "hello"}]


class Ticks:
    """A clock that a test moves on."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock():
    return Ticks()


@pytest.fixture
def engine(tiny_model_path, clock):
    config = EngineConfig(
        model=str(tiny_model_path), precision="float32", num_threads=1, max_running=1, max_waiting=1, speculative="off"
    )
    engine = EngineCore(config, clock=clock)
    yield engine
    engine.close()


def by_tenant(text: str, name: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == name and sample.labels.get("origin", "generated") == "generated":
                found[sample.labels["tenant"]] = sample.value
    return found


def test_the_tenant_of_each_route_is_counted(engine, serve):
    server = serve(engine)
    server.openai.completions.create(model="string", **{k: PROMPT[k] for k in ("prompt", "max_tokens")}, user="by user")
    for path, body in (
        ("/v1/completions", {**PROMPT, "tenant": "by field", "user": "someone else"}),
        ("/generate", {"text": "to be", "sampling_params": {"max_new_tokens": 5, "ignore_eos": True}, "tenant": "own"}),
        ("/v1/completions", PROMPT),
    ):
        server.http.post(path, json=body).raise_for_status()
    text = server.http.get("/metrics").text
    assert by_tenant(text, "phloem_engine_tenant_runs_total") == {"by user": 1, "by field": 1, "own": 1, "(unnamed)": 1}
    generated = by_tenant(text, "phloem_engine_tenant_tokens_total")
    assert generated["by field"] == generated["own"] == generated["(unnamed)"] == 5


def test_the_tenant_of_a_chat_reaches_the_engine(serve):
    client = ScriptedClient(rejecting(errors.Cancelled("enough")))
    server = serve(client=client)
    for fields, tenant in (({"user": "a"}, "a"), ({"tenant": "b", "user": "a"}, "b"), ({}, ""), ({"user": None}, "")):
        server.http.post("/v1/chat/completions", json={"messages": HELLO, **fields})
        assert client.submits[-1].settings.tenant == tenant
    refused = server.http.post("/v1/chat/completions", json={"messages": HELLO, "user": 7})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "user"


@pytest.mark.parametrize(("retry_after_s", "header"), [(0.0, "1"), (0.2, "1"), (7.3, "8"), (60.0, "60")])
def test_retry_after_is_what_the_engine_expects(serve, retry_after_s, header):
    server = serve(client=ScriptedClient(rejecting(errors.Overloaded("full", retry_after_s=retry_after_s))))
    response = server.http.post("/v1/chat/completions", json={"messages": HELLO})
    assert (response.status_code, response.headers["retry-after"]) == (429, header)
    program = {"program": "p", "ops": [{"t": "close", "op": 0, "seq": 0}]}
    response = server.http.post("/v1/programs", json=program)
    assert (response.status_code, response.headers["retry-after"]) == (429, header)


def test_a_full_queue_tells_how_long_it_will_take(engine, serve, clock):
    """A step takes 50 ms by the engine's clock. After 25 steps it only steps for messages, so the queue stays full."""
    server = serve(engine)
    slow = {**PROMPT, "max_tokens": 250}
    answers: list[httpx.Response] = []
    step, before = engine.step, engine.loop.counters.steps

    def slow_step(inbox):
        if engine.has_work:
            if engine.loop.counters.steps > before + 25 and not inbox:
                time.sleep(0.001)
                return []
            clock.now_s += 0.05
        return step(inbox)

    engine.step = slow_step
    try:
        threads = [
            threading.Thread(target=lambda: answers.append(server.http.post("/v1/completions", json=slow)))
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        wait_until(lambda: engine.scheduler.num_waiting == 1 and engine.loop.counters.steps > before + 25)
        with pytest.raises(openai.RateLimitError) as caught:
            server.openai.completions.create(model="string", prompt="no", max_tokens=5)
        assert 2 <= int(caught.value.response.headers["retry-after"]) <= 25  # at most 475 steps are left
    finally:
        engine.step = step
        for thread in threads:
            thread.join()
    assert [answer.status_code for answer in answers] == [200, 200]
