"""``phloem top``: the view of a fleet in a terminal."""

import io

import pytest
from phloem.protocol.errors import EngineLost, InvalidRequest
from phloem.tests.runtime.server.conftest import serving
from phloem.top import longest_programs, render, show_fleet
from rich.console import Console


def page(*, now_s: float, tokens: int, **second: object) -> dict[str, object]:
    load = {
        "programs": 3,
        "running": 2,
        "waiting": 1,
        "forward_tokens": tokens,
        "cache_hit_rate": 0.845,
        "slots_used": 30,
        "slots_cached": 40,
        "slots_total": 120,
    }
    replica = {"epoch": 1, "pid": 11, "restarts": 0, "since_s": 100.0, "silent_s": 0.0, "last_error": "", "load": load}
    first = {**replica, "name": "0", "state": "ready", "is_ready": True}
    other = {**replica, "name": "1", "state": "waiting", "is_ready": False, "pid": 0, "load": None, "restarts": 4}
    return {
        "model": "oak",
        "replicas": [first, {**other, "last_error": "ended by SIGKILL", **second}],
        "programs": 7,
        "waiting": 0,
        "placements": {"prefix": 5, "load": 1200},
        "replays": 9,
        "rebalanced": 3,
        "poisoned": 1,
        "now_s": now_s,
    }


def shown(*pages: object) -> str:
    out = io.StringIO()
    Console(file=out, width=160).print(render(*pages))
    return out.getvalue()


def test_replicas_their_load_and_what_was_placed_are_shown():
    text = shown(page(now_s=280.0, tokens=500))
    head, _, first, second, *foot = text.splitlines()
    assert head == "oak: 1 of 2 replicas ready, 7 programs"
    assert first.split() == ["0", "ready", "11", "3", "min", "0", "3", "2", "1", "84%", "25%"]
    assert second.split() == ["1", "waiting", "3", "min", "4"]
    assert foot == ["placed: load 1,200, prefix 5; replayed 9, rebalanced 3, given up 1", "replica 1: ended by SIGKILL"]


def test_tokens_a_second_are_counted_between_two_pages_of_one_engine():
    before, after = page(now_s=280.0, tokens=500), page(now_s=282.0, tokens=900)
    assert " 200 " in shown(after, before)
    before["replicas"][0]["epoch"] = 2
    assert " 200 " not in shown(after, before)


def test_a_ready_engine_that_does_not_answer_is_shown_as_silent():
    text = shown(page(now_s=280.0, tokens=0, state="ready", silent_s=33.0))
    assert "silent" in text and "33 s" in text


def test_the_longest_programs_are_summed_over_their_sequences_and_shown_first():
    def sequence(program: str, tokens: int, state: str = "running", **more: int) -> dict[str, object]:
        return {"name": "chat", "tenant": "t", "state": state, "tokens": tokens, "program": program, **more}

    first = [sequence("a" * 20, 10, cached=4), sequence("a" * 20, 1200, "waiting", generated=3), sequence("b", 500)]
    engines = {"0": {"batch": {"sequences": first}}, "1": None, "2": {"batch": {"sequences": [sequence("b", 600)]}}}
    programs = longest_programs({"engines": engines}, count=2)
    assert [(found["engine"], found["program"][0], found["tokens"]) for found in programs] == [
        ("0", "a", 1210),
        ("2", "b", 600),
    ]
    out = io.StringIO()
    Console(file=out, width=160).print(render(page(now_s=280.0, tokens=0), programs=programs))
    *_, longest, other = out.getvalue().splitlines()
    assert longest.split() == ["0", "a" * 12, "chat", "t", "1", "1", "1,210", "4", "3"]
    assert other.split()[:2] == ["2", "b"]


def test_a_server_that_is_not_there_or_not_ours_is_an_error_that_says_so():
    def top(url: str) -> None:
        show_fleet(url, api_key=None, every_s=1.0, is_once=True)

    with pytest.raises(EngineLost, match=r"http://127.0.0.1:9: .*; is a server running there\?"):
        top("http://127.0.0.1:9")
    with serving() as serve:
        with pytest.raises(InvalidRequest, match="/fleet answers 400: this server's engine is not supervised here"):
            top(serve().url)
        with pytest.raises(InvalidRequest, match="/fleet answers 401: missing or wrong API key"):
            top(serve(api_key="secret").url)
