"""A server of several models: requests name one or a rule; keys, limits and operators' pages are there once."""

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import phloem
import pytest
from phloem.cluster.client import FleetClient
from phloem.cluster.supervisor import Replica
from phloem.commands.answers import source_at
from phloem.protocol.client import Client
from phloem.protocol.errors import InvalidRequest, PromptTooLong, UnknownModel, Unsupported
from phloem.protocol.model_rules import AnswerCheck, ModelRule, Probe, When
from phloem.runtime.server.models_app import ServedModel, create_models_app
from phloem.runtime.server.routed_bodies import ANSWERS
from phloem.runtime.server.tenants import Keys, Tenant, hash_of
from phloem.tests.lang.fakes import ENDLESS
from phloem.tests.runtime.encoder.tiny_encoder import make_encoder
from phloem.tests.runtime.server.doubles import ChatML, ScriptedClient, WordTokenizer, connected, live_server, rejecting
from phloem.tests.runtime.string_engine import StringEngine
from phloem.tests.runtime.wire import wait_until

GOLD, IRON = "phloem-gold", "phloem-iron"
HARD = Probe(question="Q: {prompt}\nThis is")


class OneReplica:
    """Of a supervisor what the server's pages read; ``drained`` lists what was asked for."""

    def __init__(self) -> None:
        self.state = "ready"
        self.drained: list[tuple[str, bool]] = []

    def replicas(self) -> list[Replica]:
        return [Replica("0", self.state, 1, 7, 0, time.time())]

    def metrics(self, timeout_s: float = 10.0) -> dict[str, Any]:
        return self.ask("metrics", timeout_s)

    def ask(self, what: str, timeout_s: float = 10.0) -> dict[str, Any]:
        answers = {"batch": {"sequences": []}, "metrics": {"running": 1, "usage": {}}}
        return {"0": answers[what]}

    def drain(self, replica: str, *, migrate: bool = False) -> Replica:
        self.drained.append((replica, migrate))
        return self.replicas()[0]


@contextlib.contextmanager
def a_model(name: str, client: Client, *, is_decoder: bool = True) -> Iterator[ServedModel]:
    with contextlib.closing(FleetClient(tokenize=lambda ops: [])) as fleet:
        fleet.add("0", client)
        parts = (WordTokenizer(), ChatML()) if is_decoder else (None, None)
        yield ServedModel(name, fleet, *parts, OneReplica())


def says(name: str) -> StringEngine:
    """A model that says its name, and that finds a prompt with "why" hard."""
    return StringEngine(model=name, reply=lambda prompt, op: f" {name}", select=lambda prompt, op: int("why" in prompt))


def a_rule(**when: Any) -> ModelRule:
    return ModelRule(cheap="small", strong="large", when=When(**when))


RULES = {
    "by-length": a_rule(longer_than_chars=20, tenants=("gold",)),
    "by-probe": a_rule(probe=HARD),
    "by-schema": a_rule(check=AnswerCheck(json_schema={"type": "object", "required": ["a"]})),
    "by-regex": a_rule(check=AnswerCheck(regex=" small")),
    "whole": a_rule(check=AnswerCheck(whole=True)),
}
KEYS = Keys(
    {
        "gold": Tenant(keys=(hash_of(GOLD),), operator=True),
        "iron": Tenant(keys=(hash_of(IRON),), models=("large",), tokens_per_minute=1000),
    }
)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedModel]:
    path: Path = make_encoder(tmp_path_factory.mktemp("encoder"))
    with phloem.Engine(model=str(path)) as engine, a_model("vectors", engine.client, is_decoder=False) as model:
        yield model


@pytest.fixture(scope="module")
def models(encoder: ServedModel) -> Iterator[list[ServedModel]]:
    with contextlib.ExitStack() as stack:
        clients = {name: stack.enter_context(connected(says(name))) for name in ("small", "large")}
        yield [*(stack.enter_context(a_model(name, client)) for name, client in clients.items()), encoder]


@contextlib.contextmanager
def served(models: list[ServedModel], rules: dict[str, ModelRule], **options: Any) -> Iterator[httpx.Client]:
    app = create_models_app(models, rules, **options)
    with live_server(app) as url, httpx.Client(base_url=url, timeout=300) as http:
        yield http


@pytest.fixture(scope="module")
def http(models: list[ServedModel]) -> Iterator[httpx.Client]:
    with served(models, RULES) as http:
        yield http


@pytest.fixture(scope="module")
def guarded(models: list[ServedModel]) -> Iterator[httpx.Client]:
    """Under keys."""
    with served(models, RULES, keys=KEYS) as http:
        yield http


def chat(http: httpx.Client, model: str | None, text: str = "Hi", **more: Any) -> httpx.Response:
    named = {} if model is None else {"model": model}
    return http.post("/v1/chat/completions", json={**named, "messages": [{"role": "user", "content": text}], **more})


def told(answer: httpx.Response) -> tuple[str, str, str]:
    """The answer's text, the model that it names, and the rule's reason."""
    body = answer.json()
    text = body["choices"][0]["message"]["content"].strip()
    return text, body["model"], answer.headers.get("x-phloem-reason", "")


# -- models -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("named", "answering"), [("small", "small"), ("large", "large"), (None, "small")], ids=["first", "second", "none"]
)
def test_a_request_goes_to_the_model_that_it_names_or_to_the_first(http, named, answering):
    assert told(chat(http, named)) == (answering, answering, "")


def test_every_api_takes_a_models_name_in_its_body_or_in_the_query(http):
    messages = {"model": "large", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}
    assert http.post("/v1/messages", json=messages).json()["content"][0]["text"].strip() == "large"
    assert (
        http.post("/v1/completions", json={"model": "large", "prompt": "Hi"}).json()["choices"][0]["text"] == " large"
    )
    answer = http.post("/v1/responses", json={"model": "large", "input": "Hi"}).json()
    assert answer["output"][0]["content"][0]["text"].strip() == "large"
    assert http.get(f"/v1/responses/{answer['id']}").json()["model"] == "large"  # one store for all models
    assert http.post("/generate?model=large", json={"text": "Hi"}).json()["text"] == " large"
    assert http.get("/get_model_info?model=large").json()["served_model_name"] == "large"


def test_a_response_of_one_model_is_continued_by_another(http):
    first = http.post("/v1/responses", json={"model": "large", "input": "Hi"}).json()
    again = {"model": "small", "input": "Go on", "previous_response_id": first["id"]}
    answer = http.post("/v1/responses", json=again).json()
    assert (answer["model"], answer["output"][0]["content"][0]["text"].strip()) == ("small", "small")


def test_a_stream_comes_from_its_model(http):
    answer = chat(http, "large", stream=True)
    assert answer.text.count("data: ") > 1
    assert '"model":"large"' in answer.text
    assert " large" in answer.text


def test_an_encoder_gives_vectors_beside_decoders_and_refuses_text(http):
    answer = http.post("/v1/embeddings", json={"model": "vectors", "input": "rain"}).json()
    assert (answer["model"], len(answer["data"])) == ("vectors", 1)
    refused = chat(http, "vectors")
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unsupported")


def test_a_program_runs_on_the_model_of_the_query(http):
    ops = [{"t": "text", "op": 0, "seq": 0, "text": "Hi"}, {"t": "gen", "op": 1, "seq": 0, "params": {"max_tokens": 4}}]
    program = {"program": "p1", "ops": [*ops, {"t": "close", "op": 2, "seq": 0}]}
    assert '"value":[" large"]' in http.post("/v1/programs?model=large", json=program).text
    assert http.get("/v1/welcome?model=large").json()["model"] == "large"


def test_a_runtime_endpoint_names_its_model(http):
    @phloem.function
    def ask(s):
        s += "Hi" + phloem.gen("answer", max_tokens=4)

    for name in ("small", "large"):
        endpoint = phloem.RuntimeEndpoint(str(http.base_url), model=name)
        assert ask.run(backend=endpoint)["answer"] == f" {name}"
        endpoint.shutdown()
    with pytest.raises(phloem.InvalidRequest, match="'huge' is not served here"):
        phloem.RuntimeEndpoint(str(http.base_url), model="huge")


def test_a_command_asks_the_model_that_it_names(http):
    for name in ("small", "large"):
        source = source_at(str(http.base_url), api_key=None, model=name)
        assert (source.name, source.backend.get_model_name()) == (name, name)
        source.backend.shutdown()
    with pytest.raises(UnknownModel, match="does not serve 'huge'; it has: small, large, vectors"):
        source_at(str(http.base_url), api_key=None, model="huge")


def test_the_list_of_models_has_all_and_the_rules(http):
    cards = {card["id"]: card for card in http.get("/v1/models").json()["data"]}
    assert list(cards) == ["small", "large", "vectors", *RULES]
    assert http.get("/v1/models/by-probe").json() == cards["by-probe"]
    assert http.get("/v1/models/huge").status_code == 404


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/embeddings"])
def test_an_unknown_model_is_a_404_that_names_all(http, path):
    answer = http.post(path, json={"model": "huge"})
    assert answer.status_code == 404
    message = answer.json()["error"]["message"]
    assert "'huge' is not served here; this server has 'small', 'large', 'vectors', 'by-length'" in message
    if path != "/v1/messages":
        assert answer.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("content", "kind", "status", "code"),
    [
        (b'{"model": "large", "messages": [', "application/json", 400, "invalid_json"),
        (b"\xff", "application/json", 400, "invalid_json"),
        (b"[1]", "application/json", 400, "invalid_json"),
        (b'{"model": 5, "messages": []}', "application/json", 400, "invalid_value"),
        (b'{"model": "large"}', "application/json", 400, "missing_field"),
        (
            b'{"model": "large", "messages": [{"role": "user", "content": "x"}], "colour": 1}',
            "application/json",
            400,
            "unknown_field",
        ),
        (b'{"model": "large"}', "text/plain", 415, "unsupported_media_type"),
        (b'{"model": "by-length", "messages": 5}', "application/json", 400, "invalid_value"),
        (b" " * (17 << 20), "application/json", 413, "body_too_large"),
    ],
)
def test_a_wrong_body_has_the_answer_of_a_server_of_one_model(http, content, kind, status, code):
    answer = http.post("/v1/chat/completions", content=content, headers={"content-type": kind})
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


def test_a_query_and_a_body_that_name_two_models_are_refused(http):
    answer = http.post("/v1/completions?model=small", json={"model": "large", "prompt": "Hi"})
    assert answer.status_code == 400
    assert "the query names the model 'small', the body 'large'" in answer.json()["error"]["message"]


def test_an_unknown_path_is_a_404(http):
    assert http.get("/nowhere").json()["error"]["code"] == "unknown_url"
    assert http.get("/v1/chat/completions").status_code == 405


# -- rules ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "text", "expected"),
    [
        ("by-length", "x" * 20, ("small", "small", "cheap")),
        ("by-length", "x" * 21, ("large", "large", "length")),
        ("by-probe", "why", ("large", "large", "probe")),
        ("by-probe", "Hi", ("small", "small", "cheap")),
        ("by-regex", "Hi", ("small", "small", "cheap")),
        ("by-schema", "Hi", ("large", "large", "check")),
        ("whole", "Hi", ("small", "small", "cheap")),
    ],
)
def test_a_rule_chooses_the_model_and_tells_why(http, rule, text, expected):
    answer = chat(http, rule, text)
    assert told(answer) == expected
    assert answer.headers["x-phloem-rule"] == rule


def test_a_rule_measures_a_whole_conversation_and_no_images(http):
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "x" * 10}]},
        {"role": "assistant", "content": "y" * 11},
    ]
    body = {"model": "by-length", "messages": [*turns, {"role": "user", "content": "z"}]}
    assert http.post("/v1/chat/completions", json=body).headers["x-phloem-reason"] == "length"
    ids = {"model": "by-length", "prompt": [5, 6, 7, 8]}  # 16 characters
    assert http.post("/v1/completions", json=ids).headers["x-phloem-reason"] == "cheap"


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/generate"]
)
def test_an_answer_of_every_api_is_checked(http, path):
    body: dict[str, Any] = {"model": "by-schema", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}
    if path == "/v1/completions":
        body = {"model": "by-schema", "prompt": "Hi"}
    elif path == "/v1/responses":
        body = {"model": "by-schema", "input": "Hi"}
    elif path == "/generate":
        path, body = "/generate?model=by-schema", {"text": "Hi"}
    answer = http.post(path, json=body)
    assert (answer.status_code, answer.headers["x-phloem-reason"]) == (200, "check")
    assert "large" in answer.text
    assert '"small"' not in answer.text


def test_an_answer_at_its_limit_fails_the_check_of_whole_answers(models):
    with (
        connected(StringEngine(reply=lambda prompt, op: " a b c d e")) as client,
        a_model("small", client) as cheap,
        served([cheap, models[1]], {"whole": RULES["whole"]}) as http,
    ):
        assert told(chat(http, "whole", max_tokens=3)) == ("large", "large", "check")
        body = {"model": "whole", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
        assert http.post("/v1/messages", json=body).headers["x-phloem-reason"] == "check"


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        (
            "/v1/chat/completions",
            {"choices": [{"message": {"content": None, "tool_calls": [{}]}, "finish_reason": "tool_calls"}]},
            (None, False),
        ),
        (
            "/v1/messages",
            {"content": [{"type": "text", "text": "So"}, {"type": "tool_use"}], "stop_reason": "tool_use"},
            (None, False),
        ),
        ("/v1/responses", {"output": [{"type": "function_call"}], "status": "completed"}, (None, False)),
        (
            "/v1/responses",
            {
                "output": [{"type": "reasoning"}, {"type": "message", "content": [{"text": "a"}, {"text": "b"}]}],
                "status": "incomplete",
            },
            ("ab", True),
        ),
        ("/generate", {"text": "a", "meta_info": {"finish_reason": {"type": "length"}}}, ("a", True)),
    ],
)
def test_answers_are_read_of_every_api_and_calls_of_tools_are_no_text(path, body, expected):
    assert list(ANSWERS[path](body)) == [expected]


def test_a_long_body_goes_where_its_model_says(http):
    assert told(chat(http, "by-length", "word " * 4000, max_tokens=4)) == ("large", "large", "length")


def test_a_prompt_that_the_cheap_model_cannot_hold_is_for_the_strong_one(models):
    client = ScriptedClient(rejecting(PromptTooLong("9 tokens, but 8 fit")))
    cheap = ServedModel("small", client, WordTokenizer(), ChatML(), OneReplica())
    with served([cheap, models[1]], {"whole": RULES["whole"], "by-probe": RULES["by-probe"]}) as http:
        assert told(chat(http, "whole")) == ("large", "large", "check")
        assert told(chat(http, "by-probe")) == ("large", "large", "probe")


def test_a_client_that_leaves_before_the_check_ends_the_cheap_answer_and_asks_no_other(models):
    asked: list[str] = []
    cheap = StringEngine(reply=lambda prompt, op: ENDLESS, step_s=0.002)
    strong = StringEngine(reply=lambda prompt, op: asked.append(prompt) or " large")
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(connected(engine)) for engine in (cheap, strong)]
        pair = [stack.enter_context(a_model(*both)) for both in zip(("small", "large"), clients, strict=True)]
        http = stack.enter_context(served(pair, {"by-regex": RULES["by-regex"]}))
        body = json.dumps({"model": "by-regex", "prompt": "Hi", "max_tokens": 4000}).encode()
        fields = f"host: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        with socket.create_connection((http.base_url.host, http.base_url.port)) as line:
            line.sendall(f"POST /v1/completions HTTP/1.1\r\n{fields}\r\n\r\n".encode() + body)
            wait_until(lambda: bool(cheap.programs))
        wait_until(lambda: not cheap.programs)
        wait_until(lambda: 'phloem_http_responses_total{route="/v1/completions",status="499"} 1.0' in metrics_of(http))
        assert asked == []


def metrics_of(http: httpx.Client) -> str:
    return http.get("/metrics").text


def test_an_error_of_the_cheap_model_is_the_answer(http):
    answer = chat(http, "whole", temperature=-1)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "temperature")
    assert answer.headers["x-phloem-reason"] == "cheap"


def test_a_stream_takes_every_rule_but_one_with_a_check(http):
    assert chat(http, "by-length", "x" * 21, stream=True).headers["x-phloem-reason"] == "length"
    assert chat(http, "by-probe", "why", stream=True).headers["x-phloem-reason"] == "probe"
    refused = chat(http, "whole", stream=True)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stream")
    assert "rule 'whole' has a check" in refused.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/messages/count_tokens", "/v1/programs?model=whole"])
def test_a_path_that_writes_no_text_refuses_a_rule(http, path):
    answer = http.post(path, json={"model": "whole"})
    assert answer.status_code == 400
    assert "rule 'whole' chooses who writes a text" in answer.json()["error"]["message"]


def test_a_rule_that_a_server_cannot_follow_is_refused(models):
    def refused(rules: dict[str, ModelRule], kind: type[Exception] = InvalidRequest) -> str:
        with pytest.raises(kind) as caught:
            create_models_app(models, rules)
        return str(caught.value)

    assert "rule 'small': this is the name of a model" in refused({"small": a_rule(longer_than_chars=1)})
    wrong = ModelRule(cheap="small", strong="huge", when=When(longer_than_chars=1))
    assert "'huge' is not served; there are 'small', 'large', 'vectors'" in refused({"auto": wrong})
    holds = a_rule(check=AnswerCheck(holds=bool))
    assert "when.check.holds: it is of programs" in refused({"auto": holds}, Unsupported)
    schema = a_rule(check=AnswerCheck(json_schema={"type": "colour"}))
    assert "rule 'auto', when.check.json_schema: " in refused({"auto": schema})
    with pytest.raises(InvalidRequest, match="'small' is the name of two models"):
        create_models_app([models[0], models[0]], {})


# -- keys and pages ---------------------------------------------------------------------------------------------------


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_one_gate_guards_all_models(guarded):
    body = {"model": "large", "prompt": "Hi"}
    assert guarded.post("/v1/completions", json=body).status_code == 401
    answer = guarded.post("/v1/completions", json=body, headers=bearer(IRON))
    assert answer.json()["choices"][0]["text"] == " large"
    assert int(answer.headers["x-ratelimit-remaining-tokens"]) < 1000
    assert guarded.get("/fleet", headers=bearer(IRON)).status_code == 403
    used = guarded.get("/usage", headers=bearer(IRON)).json()["used"]
    assert used["requests"] >= 1


def test_a_tenant_sees_its_models_and_the_rules_between_them(guarded):
    ids = [card["id"] for card in guarded.get("/v1/models", headers=bearer(IRON)).json()["data"]]
    assert ids == ["large"]
    for name in ("small", "by-length"):
        answer = guarded.post("/v1/completions", json={"model": name, "prompt": "Hi"}, headers=bearer(IRON))
        assert answer.status_code == 404
        assert answer.json()["error"]["message"].endswith("this server has 'large'")


def test_a_rule_knows_the_tenant_by_its_key(guarded):
    answer = guarded.post("/v1/completions", json={"model": "by-length", "prompt": "Hi"}, headers=bearer(GOLD))
    assert (answer.headers["x-phloem-reason"], answer.json()["model"]) == ("tenant", "large")


def test_the_operators_pages_show_the_engines_of_all_models(http, models):
    fleet = http.get("/fleet").json()
    assert fleet["model"] == "small, large, vectors"
    assert [replica["name"] for replica in fleet["replicas"]] == ["small/0", "large/0", "vectors/0"]
    assert list(http.get("/engines").json()["engines"]) == ["small/0", "large/0", "vectors/0"]
    assert http.post("/fleet/drain/large/0?migrate=true").json()["name"] == "large/0"
    assert models[1].supervisor.drained == [("0", True)]
    assert "small/0, large/0, vectors/0" in http.post("/fleet/drain/0").json()["error"]["message"]


def test_a_server_is_ready_while_each_model_has_an_engine(http, models):
    assert http.get("/health").json()["replicas"] == {"ready": 3, "total": 3}
    models[1].supervisor.state = "waiting"
    try:
        answer = http.get("/health")
        assert (answer.status_code, answer.json()["replicas"]) == (503, {"ready": 2, "total": 3})
    finally:
        models[1].supervisor.state = "ready"


def test_metrics_name_models_rules_and_what_was_saved(models):
    with served(models, RULES) as http:
        chat(http, "by-length", "Hi")
        chat(http, "by-length", "x" * 30)
        chat(http, "by-schema", "Hi")
        text = http.get("/metrics").text
    lines = text.splitlines()
    assert 'phloem_routed_total{model="small",reason="cheap",rule="by-length"} 1.0' in lines
    assert 'phloem_routed_total{model="large",reason="length",rule="by-length"} 1.0' in lines
    assert 'phloem_routed_total{model="large",reason="check",rule="by-schema"} 1.0' in lines
    assert 'phloem_routed_cheap_tokens_total{rule="by-length"} 1.0' in lines
    assert 'phloem_routed_dropped_tokens_total{rule="by-schema"} 1.0' in lines
    assert 'phloem_engine_up{model="large",replica="0"} 1.0' in lines
    assert 'phloem_engine_restarts_total{model="vectors",replica="0"} 0.0' in lines
    assert 'phloem_http_responses_total{route="/v1/chat/completions",status="200"} 3.0' in lines
    kinds = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(kinds) == len(set(kinds))  # a scraper refuses a family that comes twice


def test_the_document_and_the_page_are_there_once(http):
    assert "/v1/chat/completions" in http.get("/openapi.json").json()["paths"]
    assert http.get("/").status_code == 200
