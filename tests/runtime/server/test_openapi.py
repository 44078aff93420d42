"""The OpenAPI document: every route is in it, and requests and answers are as it says.

``tests/openapi`` makes thousands of requests from it.
"""

import json
import re
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import phloem
import pytest
from phloem.protocol.client import Client
from phloem.runtime.server.openapi import operations
from phloem.tests.runtime.server.test_malformed import BODIES

ROOT = Path(phloem.__file__).parent
_ROUTE = re.compile(r'@(?:router|app)\.(get|post|delete)\(\s*"([^"]+)"')
_CURL = re.compile(
    r"curl [^\n]*?(?:localhost|127\.0\.0\.1):8000(/\S+)[^']*'content-type: application/json' -d '(.*?)'", re.S
)


@pytest.fixture(scope="module")
def document(tiny_server: httpx.Client) -> dict[str, Any]:
    return tiny_server.get("/openapi.json").json()


def check(value: Any, schema: dict[str, Any], document: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator({**schema, "components": document["components"]}).validate(value)


def body_schema(document: dict[str, Any], path: str) -> dict[str, Any]:
    return operations(document)["post", path]["requestBody"]["content"]["application/json"]["schema"]


def check_answer(answer: httpx.Response, path: str, document: dict[str, Any]) -> None:
    """Its status, its type and its body are those of the document."""
    said = operations(document)[answer.request.method.lower(), path]["responses"]
    status = str(answer.status_code)
    found = said.get(status) or said[f"{status[0]}XX"]
    kind = answer.headers["content-type"].partition(";")[0]
    assert kind in found["content"], (path, status, kind)
    assert answer.headers["x-request-id"] and "x-request-id" in found["headers"]
    if kind == "application/json":
        check(answer.json(), found["content"][kind]["schema"], document)


def test_every_route_is_in_the_document_and_says_what_it_does(document):
    files = (ROOT / "runtime" / "server").rglob("*.py")
    routes = {
        (method, path.replace(":path", "")) for file in files for method, path in _ROUTE.findall(file.read_text())
    }
    found = operations(document)
    assert len(routes) > 25 and set(found) == routes
    assert not [place for place, one in found.items() if not one.get("description")]
    assert not [place for place, one in found.items() if not {"4XX", "5XX"} <= set(one["responses"])]
    reads_body = {"/v1/programs/{program}", *BODIES} - {"/v1/programs/p", "/flush_cache"}
    assert {path for (method, path), one in found.items() if "requestBody" in one} >= reads_body


def test_every_schema_is_valid_and_every_reference_has_a_target(document):
    jsonschema.Draft202012Validator.check_schema({"$defs": document["components"]["schemas"]})
    names = set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(document)))
    assert len(names) > 50 and names <= set(document["components"]["schemas"])
    for one in operations(document).values():
        for content in [one.get("requestBody", {}), *one["responses"].values()]:
            for media in content.get("content", {}).values():
                jsonschema.Draft202012Validator.check_schema(media.get("schema", {}))


def test_every_example_of_a_request_in_the_documentation_is_valid(document):
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    examples = [(path, json.loads(body)) for page in pages for path, body in _CURL.findall(page.read_text())]
    assert len(examples) >= 2
    for path, body in examples:
        check(body, body_schema(document, path), document)
    page = (ROOT / "docs" / "http.md").read_text()
    (program,) = re.findall(r'^    (\{"program".*?\]\})$', page, re.S | re.M)
    check(json.loads(program), body_schema(document, "/v1/programs"), document)


def test_every_endpoint_of_the_document_is_in_the_documentation(document):
    page = (ROOT / "docs" / "http.md").read_text()
    known = {"/page/{name}", "/v1/models/{name}"}  # the page's files; /v1/models/{id}
    assert not [path for path in document["paths"] if path not in known and f"{path}" not in page]


@pytest.mark.parametrize("path", [path for path in BODIES if path != "/v1/programs/p"])
def test_requests_and_their_answers_are_as_the_document_says(tiny_server, document, path):
    for body in BODIES[path]:
        if path != "/flush_cache":
            check(body, body_schema(document, path), document)
        check_answer(tiny_server.post(path, json=body), path, document)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "poet", "content": "a"}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "store": True}),
        ("/v1/completions", {"prompt": "a", "promt": "b"}),
        ("/v1/completions", {"prompt": "a", "n": 0}),
        ("/generate", {"text": "a", "sampling_params": {"n": "2"}}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/programs", {"program": "p", "ops": [{"t": "dance", "op": 0, "seq": 0}]}),
    ],
)
def test_a_body_that_the_document_refuses_is_refused(tiny_server, document, path, body):
    with pytest.raises(jsonschema.ValidationError):
        check(body, body_schema(document, path), document)
    answer = tiny_server.post(path, json=body)
    assert answer.status_code == 400
    check_answer(answer, path, document)


@pytest.mark.parametrize(
    "path",
    [
        *("/", "/version", "/openapi.json", "/health", "/health/live", "/get_model_info", "/server_info", "/metrics"),
        *("/v1/models", "/v1/welcome", "/cache_tree", "/cache_nodes", "/engines", "/fleet", "/usage"),
    ],
)
def test_pages_are_as_the_document_says(tiny_server, document, path):
    check_answer(tiny_server.get(path), path, document)


def test_stored_responses_are_as_the_document_says(tiny_server, document):
    made = tiny_server.post("/v1/responses", json={"input": "hello", "max_output_tokens": 3})
    place = "/v1/responses/{id}"
    check_answer(made, "/v1/responses", document)
    url = f"/v1/responses/{made.json()['id']}"
    for answer in (tiny_server.get(url), tiny_server.delete(url), tiny_server.get(url)):
        check_answer(answer, place, document)
    assert answer.status_code == 404


def test_the_version_is_the_packages(tiny_server):
    assert tiny_server.get("/version").json() == {"version": phloem.__version__}
    assert tiny_server.get("/openapi.json").json()["info"]["version"] == phloem.__version__
    assert tiny_server.get("/docs").status_code == 404


def test_the_endpoint_that_a_decoder_cannot_serve_says_so(tiny_server, document):
    answer = tiny_server.post("/classify", json={"model": "string", "input": "a"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "unsupported", "model")
    assert error["message"].startswith("'string' is a decoder")
    check_answer(answer, "/classify", document)


def test_keys_are_asked_for_only_where_there_are_some(serve, document):
    assert "security" not in document
    server = serve(api_key="secret")
    assert httpx.get(f"{server.url}/openapi.json").status_code == 401
    made = server.http.get("/openapi.json").json()
    assert {next(iter(one)) for one in made["security"]} == set(made["components"]["securitySchemes"])


def test_a_wrong_method_is_told_the_right_ones(shared_server):
    answer = shared_server.http.put("/v1/models")
    assert answer.status_code == 405 and answer.headers["allow"] == "GET" and "PUT" in answer.json()["error"]["message"]


def test_an_answer_to_a_bug_has_the_request_id_and_is_counted_as_one(serve, monkeypatch):
    """It had no id, and was counted as a client that left."""
    server = serve()

    def broken(self: Client, what: str, timeout_s: float = 10.0) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(Client, "query", broken)
    answer = server.http.get("/cache_tree", headers={"x-request-id": "mine"})
    assert answer.status_code == 500 and answer.headers["x-request-id"] == "mine"
    assert answer.json()["error"]["type"] == "server_error"
    monkeypatch.undo()
    metrics = httpx.get(f"{server.url}/metrics").text  # over another connection: uvicorn closes that one
    assert 'phloem_http_responses_total{route="/cache_tree",status="500"} 1.0' in metrics


@pytest.mark.parametrize("query", ["seq=0.0", "op=1.0", "seq=%201", "op=1_0", "seq=", "op=x"])
def test_numbers_of_a_query_are_whole(tiny_server, document, query):
    answer = tiny_server.delete(f"/v1/programs/p?{query}")
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "invalid_value", query.partition("=")[0])
    assert error["message"].endswith("must be a whole number")
    assert tiny_server.delete("/v1/programs/p?seq=0&op=-1").status_code == 200


@pytest.mark.parametrize("value", ["yes", "1", "TRUE", ""])
def test_switches_of_a_query_are_true_or_false(tiny_server, document, value):
    answer = tiny_server.post(f"/fleet/drain/0?migrate={value}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "migrate")
