"""``phloem ps``: a server's model and engines, once."""

import io
import json
from collections.abc import Iterator
from typing import Any

import pytest
from phloem import cli
from phloem.commands.ps import render, report
from phloem.tests.runtime.server.conftest import Served, serving
from rich.console import Console

METRICS = {
    "running": 3,
    "waiting": 2,
    "programs": 4,
    "slots": {"total": 200, "cached": 100, "locked": 20, "leased": 30},
    "cache_hit_rate": 0.845,
    "memory_bytes": 312_400_000,
}
INFO = {"server": {"model": "oak", "uptime_s": 400.0}, "engine": {"context_len": 2048, "precision": "auto"}}


def page() -> dict[str, Any]:
    replica = {"state": "ready", "pid": 11, "since_s": 100.0}
    return {
        "engines": {"0": {"metrics": METRICS, "batch": {}}, "1": None, "2": None},
        "replicas": [
            {**replica, "name": "0"},
            {**replica, "name": "1"},
            {**replica, "name": "2", "state": "starting", "pid": 0},
        ],
        "requests_in_flight": 5,
        "now_s": 280.0,
    }


def test_engines_are_shown_with_state_rows_queue_cache_and_memory() -> None:
    out = io.StringIO()
    Console(file=out, width=160).print(render(report(INFO, page()), "http://x"))
    head, _, *rows = out.getvalue().splitlines()
    assert head == "oak at http://x: up 7 min, 5 requests in flight, context 2,048 tokens, precision auto"
    assert [row.split() for row in rows] == [
        ["0", "ready", "11", "3", "min", "3", "2", "4", "50%", "25%", "84%", "312", "MB"],
        ["1", "silent", "11", "3", "min"],
        ["2", "starting", "3", "min"],
    ]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving() as start:
        yield start(api_key="secret")


def test_an_engine_that_is_not_supervised_is_reported_as_json_could_be() -> None:
    found = report(INFO, {**page(), "replicas": [], "engines": {"0": {"metrics": METRICS, "batch": {}}}})
    assert json.loads(json.dumps(found))["engines"] == [
        {
            "engine": "0",
            "state": "ready",
            "pid": None,
            "up_s": None,
            "rows": 3,
            "queue": 2,
            "programs": 4,
            "cached_share": 0.5,
            "used_share": 0.25,
            "hit_rate": 0.845,
            "memory_bytes": 312_400_000,
        }
    ]


def test_what_is_wrong_is_one_line(
    server: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PHLOEM_API_KEY", raising=False)
    assert cli.main(["ps", server.url]) == 2
    assert "/server_info answers 401: missing or wrong API key" in capsys.readouterr().err
    assert cli.main(["ps", "http://127.0.0.1:9"]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said.endswith("; is a server running there?\n")
