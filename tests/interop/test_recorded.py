"""What the clients sent is answered over raw HTTP, without them; and the table in docs/interop.md says what ran."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import phloem
import pytest
from phloem.tests.interop import test_clients  # the cases
from phloem.tests.interop.cases import CASES, RECORDED, serving

KNOWN = json.loads(RECORDED.read_text())
REQUESTS = {
    f"{client}: {what} ({number})": asked
    for client, known in KNOWN.items()
    for what, several in known["cases"].items()
    for number, asked in enumerate(several)
}


@pytest.fixture(scope="module")
def answers(smollm2_path: Path) -> Iterator[dict[str, httpx.Response]]:
    """The answer to each request, all sent at once."""
    with serving(smollm2_path) as url, httpx.Client(base_url=url, timeout=300) as http, ThreadPoolExecutor(16) as pool:
        sent = {
            name: pool.submit(http.request, asked["method"], asked["path"], json=asked["body"])
            for name, asked in REQUESTS.items()
        }
        yield {name: answer.result() for name, answer in sent.items()}


@pytest.mark.model
@pytest.mark.parametrize("name", REQUESTS)
def test_what_a_client_sent_is_answered_as_it_asked(answers: dict[str, httpx.Response], name: str) -> None:
    asked, response = REQUESTS[name]["body"], answers[name]
    if "previous_response_id" in asked:  # of a response of the recorded run
        assert response.status_code == 400 and response.json()["error"]["code"] == "previous_response_not_found"
        return
    assert response.status_code == 200, response.text
    if name.startswith("anthropic: messages (1)"):
        assert response.json()["input_tokens"] > 5
        return
    content, calls = _READERS[REQUESTS[name]["path"]](response, bool(asked.get("stream")))
    for function, arguments in calls:
        jsonschema.validate(json.loads(arguments), _parameters(asked["tools"], function))
    if asked.get("tool_choice") not in (None, "auto"):
        assert calls
    else:
        assert content or calls
    if (schema := _schema(asked)) is not None:
        jsonschema.validate(json.loads(content), schema)


def _parameters(tools: list[dict[str, Any]], name: str) -> dict[str, Any]:
    functions = [tool.get("function", tool) for tool in tools]
    (found,) = [one for one in functions if one["name"] == name]
    return found.get("parameters") or found["input_schema"]


def _schema(asked: dict[str, Any]) -> dict[str, Any] | None:
    """The schema that the answer must follow."""
    chat = asked.get("response_format") or {}
    places = (
        chat.get("json_schema"),
        asked.get("text", {}).get("format"),
        asked.get("output_config", {}).get("format"),
    )
    found = next((place["schema"] for place in places if place), None)
    return {"type": "object"} if chat.get("type") == "json_object" else found


Read = tuple[str, list[tuple[str, str]]]  # the text, and the calls: names and arguments


def _events(response: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def _chat(response: httpx.Response, is_stream: bool) -> Read:
    if not is_stream:
        message = response.json()["choices"][0]["message"]
        functions = [call["function"] for call in message.get("tool_calls", ())]
        return message["content"] or "", [(one["name"], one["arguments"]) for one in functions]
    assert response.text.endswith("data: [DONE]\n\n")
    text, calls = "", []
    for delta in (choice["delta"] for event in _events(response) for choice in event["choices"]):
        text += delta.get("content") or ""
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(calls):
                calls.append((call["function"]["name"], ""))
            calls[-1] = (calls[-1][0], calls[-1][1] + call["function"]["arguments"])
    return text, calls


def _responses(response: httpx.Response, is_stream: bool) -> Read:
    answer = _events(response)[-1]["response"] if is_stream else response.json()
    texts = [item["content"][0]["text"] for item in answer["output"] if item["type"] == "message"]
    calls = [item for item in answer["output"] if item["type"] == "function_call"]
    return "".join(texts), [(call["name"], call["arguments"]) for call in calls]


def _messages(response: httpx.Response, is_stream: bool) -> Read:
    if not is_stream:
        blocks = response.json()["content"]
        calls = [(block["name"], json.dumps(block["input"])) for block in blocks if block["type"] == "tool_use"]
        return "".join(block.get("text", "") for block in blocks), calls
    events = _events(response)
    assert events[-1]["type"] == "message_stop"
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    begun = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    written = "".join(delta.get("partial_json", "") for delta in deltas)
    calls = [(block["name"], written) for block in begun if block["type"] == "tool_use"]
    return "".join(delta.get("text", "") for delta in deltas), calls


def _embeddings(response: httpx.Response, is_stream: bool) -> tuple[str, list[tuple[str, str]]]:
    return "".join(str(entry["embedding"]) for entry in response.json()["data"]), []


_READERS = {
    "/v1/chat/completions": _chat,
    "/v1/responses": _responses,
    "/v1/messages": _messages,
    "/v1/embeddings": _embeddings,
}


def test_every_case_was_recorded() -> None:
    assert test_clients.CASES is CASES
    recorded = [(client, list(known["cases"])) for client, known in KNOWN.items()]
    assert recorded == [(client, list(cases)) for client, cases in CASES.items()]


def test_the_table_says_what_ran() -> None:
    rows = [f"| `{client}` {known['version']} | {'; '.join(known['cases'])} |" for client, known in KNOWN.items()]
    page = (Path(phloem.__file__).parent / "docs" / "interop.md").read_text()
    table = "\n".join(["| client | what is tested |", "|---|---|", *rows])
    assert table in page, f"the table of docs/interop.md should be:\n{table}"
