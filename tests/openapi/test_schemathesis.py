"""Requests that schemathesis makes from /openapi.json, to a real server with a tiny model: `make test-openapi`.

No answer is a 5xx, each is as the document says, and none takes 5 s. ``PHLOEM_OPENAPI_EXAMPLES`` is their number.
``--hypothesis-seed`` repeats a run. The twin without schemathesis is tests/runtime/server/test_openapi.py.
"""

import logging
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
from phloem.tests.runtime.server.test_serve import address, running

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed (make test-openapi)")
from schemathesis import GenerationMode  # noqa: E402
from schemathesis.specs.openapi import checks  # noqa: E402

pytestmark = [pytest.mark.openapi, pytest.mark.filterwarnings("ignore")]  # schemathesis's own warnings

log = logging.getLogger(__name__)

NUM_EXAMPLES = int(os.environ.get("PHLOEM_OPENAPI_EXAMPLES", "2000"))
MOST_S = 5.0
CHECKS = [
    schemathesis.checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
]
QUIET = hypothesis.settings(deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck))
MESSAGES = [{"role": "user", "content": "hello"}]
PLAIN: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "hello"},
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 8},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/generate": {"text": "hello"},
    "/tokenize": {"messages": MESSAGES},
    "/detokenize": {"tokens": [1, 2]},
}
SERVE = """
import sys
from phloem.runtime.config import EngineConfig
from phloem.runtime.server import serve
config = EngineConfig(model=sys.argv[1], num_slots=4096, max_seq_len=512, num_threads=1)
sys.exit(serve(config, port=0, model_name="tiny", on_ready=lambda url: print(url, flush=True)))
"""


@pytest.fixture(scope="module")
def url(tiny_model_path) -> Iterator[str]:
    with running([sys.executable, "-c", SERVE, str(tiny_model_path)]) as started:
        yield address(started)


class Asking:
    """Sends cases of one operation and mode; counts answers by status and keeps the slowest."""

    def __init__(self, operation: Any, mode: GenerationMode) -> None:
        self.operation = operation
        self.mode = mode
        self.statuses: Counter[int] = Counter()
        self.slowest = 0.0, ""  # seconds, and the request as a command
        self._rng = random.Random(operation.label)

    def run(self, num_cases: int) -> None:
        cases = self.operation.as_strategy(generation_mode=self.mode)
        hypothesis.settings(QUIET, max_examples=num_cases)(hypothesis.given(case=cases)(self.send))()

    def send(self, case: Any) -> None:
        if self.mode is GenerationMode.POSITIVE and isinstance(case.body, dict):
            case.body = self._thinned(case.body)
        begun_s = time.perf_counter()
        response = case.call(timeout=300)
        took_s = time.perf_counter() - begun_s
        self.slowest = max(self.slowest, (took_s, case.as_curl_command()))
        self.statuses[response.status_code] += 1
        if response.status_code != 504 or "deadline_s" not in str(case.body):  # what the request asked for
            case.validate_response(response, checks=CHECKS)

    def _thinned(self, body: dict[str, Any]) -> dict[str, Any]:
        """With a few of its fields, mostly beside a prompt that is served: a body of random fields is mostly refused.

        Every program comes to an end.
        """
        schema = next(iter(self.operation.body)).definition["schema"]
        plain = PLAIN.get(self.operation.path, {}) if self._rng.random() < 0.8 else {}
        kept = {*schema.get("required", ()), *self._rng.sample(list(body), min(len(body), self._rng.randrange(4)))}
        kept -= {*plain, "prompt", "messages"} if plain else set()
        thinned = {name: value for name, value in body.items() if name in kept} | plain
        if self.operation.path == "/v1/programs":
            thinned["settings"] = {"deadline_s": 0.2}
        return thinned


def test_requests_made_from_the_document_are_answered_as_it_says(url):
    operations = [found.ok() for found in schemathesis.openapi.from_url(f"{url}/openapi.json").get_all_operations()]
    with_body = [one for one in operations if one.body]
    num_cases = max(1, NUM_EXAMPLES // (2 * len(with_body)))
    faults = []
    asked = []
    for operation in operations:
        modes = list(GenerationMode) if operation.body or operation.query else [GenerationMode.POSITIVE]
        for mode in modes:
            asking = Asking(operation, mode)
            asked.append(asking)
            try:
                asking.run(num_cases)
            except Exception as fault:
                faults.append(f"{operation.label}, {mode.value}: {fault}")
            log.info("%s %s %s, %.2f s", operation.label, mode.value, dict(asking.statuses), asking.slowest[0])
    assert len(operations) > 25 and sum(sum(one.statuses.values()) for one in asked) >= 0.95 * NUM_EXAMPLES
    faults += [f"{took_s:.1f} s: {command}" for took_s, command in (one.slowest for one in asked) if took_s >= MOST_S]
    assert not faults, "\n\n".join(faults)
