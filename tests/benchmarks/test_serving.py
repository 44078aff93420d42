"""The serving benchmark: it reads streams however they are cut, and its figures add up."""

import asyncio
import json

import pytest
from phloem.benchmarks import header, serving
from phloem.runtime.server.app import create_app
from phloem.tests.runtime.server.doubles import MODEL, ChatML, WordTokenizer, connected, live_server
from phloem.tests.runtime.string_engine import StringEngine

ENTRY = {"name": "n", "kind": "thing", "year": 1999, "tags": ["t"], "finished": True}
STREAM = (
    b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
    b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
    b'data: {"choices":[{"delta":{"content":"b"}}]}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":5,'
    b'"prompt_tokens_details":{"cached_tokens":4}}}\n\ndata: [DONE]\n\n'
)


@pytest.mark.parametrize("size", [1, 7, 60, 1000])
def test_a_stream_is_read_alike_however_it_is_cut(size):
    chunks = [(float(i), STREAM[i : i + size]) for i in range(0, len(STREAM), size)]
    answer = serving.read_answer(chunks)
    assert (answer.text, answer.prompt_tokens, answer.cached_tokens, answer.completion_tokens) == ("ab", 9, 4, 5)
    assert answer.first_s <= answer.last_s <= len(STREAM)
    assert answer.first_s >= (STREAM.index(b'"a"') // size) * size


def test_without_usage_the_pieces_are_counted():
    answer = serving.read_answer([(1.0, STREAM[: STREAM.index(b'data: {"choices":[],')])])
    assert (answer.completion_tokens, answer.prompt_tokens) == (2, 0)


def test_an_error_in_the_stream_ends_the_benchmark():
    with pytest.raises(SystemExit, match="lost"):
        serving.read_answer([(0.0, b'data: {"error":{"message":"lost"}}\n\n')])


def test_only_what_follows_the_schema_counts():
    assert serving.follows_schema(json.dumps(ENTRY))
    for change in ({"year": 3000}, {"year": True}, {"kind": "idea"}, {"tags": []}, {"more": 1}, {"name": 5}):
        assert not serving.follows_schema(json.dumps({**ENTRY, **change}))
    assert not serving.follows_schema(json.dumps(ENTRY)[:-1])


def test_every_workload_runs_and_its_figures_add_up(tmp_path, capsys):
    out = tmp_path / "deep" / "result.json"

    def reply(prompt, op):
        return json.dumps(ENTRY) if op.grammar is not None else "some words"

    with connected(StringEngine(reply=reply)) as client:
        app = create_app(client, WordTokenizer(), ChatML(), model_name=MODEL)
        with live_server(app) as url:
            assert serving.main(["--url", url, "--model", MODEL, "--out", str(out), "--repeats", "2"]) == 0
    result = json.loads(out.read_text())
    assert set(header()) <= set(result)
    found = {figures["workload"]: figures for figures in result["workloads"]}
    assert list(found) == list(serving.WORKLOADS)
    assert found["single"]["output_tokens"] == 2 * 128
    assert found["concurrent"]["output_tokens"] == 2 * 32 * 128
    assert found["shared-prefix"]["output_tokens"] == 2 * 32 * 32
    assert found["classification"]["output_tokens"] == 2 * 32 * 4
    assert found["chats"]["output_tokens"] == 2 * 8 * 6 * 48
    assert found["json-schema"]["valid"] == 64
    assert all(len(figures["tokens_per_s"]) == 2 for figures in found.values())
    printed = capsys.readouterr().out
    assert "machine:" in printed and "commit:" in printed and "shared-prefix" in printed


def test_an_unknown_workload_is_named(capsys):
    with pytest.raises(SystemExit):
        serving.main(["--workloads", "single,doubled"])
    assert "unknown workload 'doubled'" in capsys.readouterr().err


def test_servers_that_cannot_be_asked_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        serving.parsed(["--url", "https://127.0.0.1"])
    assert "must be http://HOST" in capsys.readouterr().err
    target = serving.Target(f"http://127.0.0.1:{serving.free_port()}", extensions=True, model="m")
    with pytest.raises(SystemExit, match="is a server running there"):
        asyncio.run(target.flush())
