"""What a request leaves in the log: its line, its id in every line, and no prompt unless the log is told to take it."""

import io
import json
import logging
import subprocess
import sys

import pytest
from phloem.protocol import errors
from phloem.runtime.server.logs import set_up_logs
from phloem.runtime.server.tenants import Keys, Tenant, hash_of
from phloem.tests.runtime.server.doubles import ScriptedClient, failing, rejecting
from phloem.tests.runtime.string_engine import StringEngine
from phloem.tests.runtime.wire import wait_until

KEY = "phloem-key"
ASK = {"prompt": "a secret prompt", "max_tokens": 3}


@pytest.fixture
def log():
    """``log(format, requests)`` sets the log up and returns a function that gives its lines."""
    root, stream = logging.getLogger(), io.StringIO()
    handler = logging.StreamHandler(stream)
    levels = {name: logging.getLogger(name).level for name in ("phloem.requests", "phloem.prompts")}
    formatters = [(other, other.formatter) for other in root.handlers]
    root.addHandler(handler)

    def start(format, requests):
        set_up_logs(format, requests)
        return lambda: stream.getvalue().splitlines()

    yield start
    root.removeHandler(handler)
    for other, formatter in formatters:
        other.setFormatter(formatter)
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def ask(server, **fields):
    headers = {"authorization": f"Bearer {KEY}", "x-request-id": "mine"}
    return server.http.post("/v1/completions?api_key=hidden", json=ASK | fields, headers=headers)


def served(serve, **options):
    keys = Keys({"garden": Tenant(keys=(hash_of(KEY),), operator=True)})
    return serve(options.pop("engine", None), keys=keys, **options)


def test_a_request_leaves_one_line_without_its_prompt_or_query(serve, log):
    lines = log("json", "lines")
    assert ask(served(serve, engine=StringEngine(reply=lambda prompt, op: "a b"))).status_code == 200
    wait_until(lambda: len(lines()) == 1)
    line = json.loads(lines()[0])
    assert line.pop("seconds") >= 0 and line.pop("time").endswith("+00:00")
    assert line == {
        "level": "info",
        "logger": "phloem.requests",
        "message": "POST /v1/completions 200",
        "request_id": "mine",
        "tenant": "garden",
        "prompt_tokens": 3,
        "completion_tokens": 2,
    }


def test_prompts_are_logged_only_where_it_is_asked_for(serve, log):
    server = served(serve)
    lines = log("text", "none")

    def is_over(count: int) -> bool:
        """Whether ``count`` requests have been counted, which is when each has left its lines."""
        counted = f'phloem_http_responses_total{{route="/v1/completions",status="200"}} {count}.0'
        return counted in server.http.get("/metrics", headers={"authorization": f"Bearer {KEY}"}).text

    def of_completions() -> list[str]:
        return [line for line in lines() if "GET /metrics" not in line]

    for i, (requests, count) in enumerate((("none", 0), ("prompts", 2), ("lines", 3)), start=1):
        log("text", requests)
        ask(server)
        wait_until(lambda: is_over(i))  # noqa: B023
        wait_until(lambda: len(of_completions()) >= count)  # noqa: B023
    prompt, *rest = of_completions()
    assert len(rest) == 2
    assert "phloem.prompts: prompt [mine]" in prompt and "'a secret prompt'" in prompt
    assert not any("secret" in line for line in rest)
    assert all("phloem.requests: POST /v1/completions 200 [mine] seconds=" in line for line in rest)


def test_an_error_has_the_requests_id_and_its_code_and_is_counted(serve, log):
    lines = log("json", "lines")
    server = served(serve, client=ScriptedClient(rejecting(errors.InternalError("broken"))))
    assert ask(server).status_code == 500
    wait_until(lambda: len(lines()) == 2)
    error, line = map(json.loads, lines())
    assert (error["level"], error["request_id"]) == ("error", "mine") and "broken" in error["message"]
    assert (line["message"], line["error"]) == ("POST /v1/completions 500", "internal_error")
    wrong = server.http.get("/v1/models", headers={"x-request-id": "other", "authorization": "Bearer x"})
    assert wrong.status_code == 401
    wait_until(lambda: len(lines()) == 3)
    assert json.loads(lines()[2])["request_id"] == "other"
    assert json.loads(lines()[2])["error"] == "invalid_api_key"


def test_errors_are_counted_by_code_those_within_streams_too(serve):
    server = serve(client=ScriptedClient(failing(errors.DeadlineExceeded("late"), after="some")))
    assert "deadline_exceeded" in server.http.post("/v1/completions", json=ASK | {"stream": True}).text
    server.http.post("/v1/completions", json={"prompt": "a", "promt": 1})

    def counted(code: str) -> bool:
        return f'phloem_http_errors_total{{code="{code}"}} 1.0' in server.http.get("/metrics").text

    wait_until(lambda: counted("deadline_exceeded") and counted("unknown_field"))


def test_an_exception_stays_one_line_of_json():
    program = (
        "import logging\n"
        "from phloem.runtime.server.logs import set_up_logs\n"
        "logging.basicConfig()\n"
        "set_up_logs('json', 'none')\n"
        "try: 1 / 0\n"
        "except ZeroDivisionError: logging.getLogger('x').exception('it %s', 'broke')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    line = json.loads(done.stderr)
    assert line["message"] == "it broke" and "ZeroDivisionError" in line["exception"] and "request_id" not in line
