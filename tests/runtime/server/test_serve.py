"""``serve`` with real engine processes: its requests, its shutdown, and its answers when its engine dies."""

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from phloem import cli
from phloem.protocol.errors import InvalidRequest, PhloemError
from phloem.runtime.config import EngineConfig
from phloem.runtime.server import serve
from phloem.runtime.server.listener import listen
from phloem.runtime.server.tenants import hash_of, new_key
from phloem.tests.runtime.encoder.tiny_encoder import make_encoder
from phloem.tests.runtime.wire import wait_until

PROGRAM = """
import json, sys
from phloem.cluster.restarts import RestartPolicy
from phloem.protocol.errors import EngineLost
from phloem.runtime.config import EngineConfig
from phloem.runtime.server import serve
config, policy = EngineConfig(model=sys.argv[1], num_threads=1), RestartPolicy(**json.loads(sys.argv[2]))
try:
    sys.exit(serve(config, port=0, model_name="under-test", policy=policy, on_ready=lambda url: print(url, flush=True)))
except EngineLost as error:
    sys.exit(str(error))
"""
HELLO = [{"role": "user", "content": "Name a tree."}]


def process(model: Path, **policy: float) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    return running([sys.executable, "-c", PROGRAM, str(model), json.dumps(policy)])


@contextlib.contextmanager
def running(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as started:
        try:
            yield started
        finally:
            started.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                started.wait(timeout=300)
            started.kill()


def address(started: subprocess.Popen[str], timeout_s: float = 120.0) -> str:
    """What the process prints when it is ready."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=lambda: lines.put(started.stdout.readline()), daemon=True).start()
    line = lines.get(timeout=timeout_s)
    assert line, f"the server ended with {started.wait()} before it was ready: {started.stderr.read()}"
    return line.strip()


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        if sys.platform == "linux":
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        os.kill(pid, 0)
        return True
    return False


def test_a_busy_port_is_an_error_before_the_model_is_looked_at():
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InvalidRequest, match=rf"port {port} on 127\.0\.0\.1 is in use .*--port"):
            serve(EngineConfig(model="/no/such/model"), port=port)


def test_a_model_that_cannot_be_loaded_is_the_engines_own_error():
    with pytest.raises(PhloemError, match="/no/such/model"):
        serve(EngineConfig(model="/no/such/model"), port=0)


@pytest.mark.skipif(sys.platform != "linux", reason="finds the engines in /proc, which only Linux has")
def test_a_signal_while_the_model_loads_leaves_no_process_behind(tiny_model_path):
    with process(tiny_model_path) as started:
        wait_until(lambda: bool(children(started.pid)))
        engines = children(started.pid)
        started.send_signal(signal.SIGTERM)
        assert started.wait(timeout=300) == 0
        wait_until(lambda: not any(map(is_alive, engines)))


def test_tenants_see_no_prefix_of_each_other_and_sighup_reads_the_keys_again(tiny_model_path, tmp_path):
    path, keys = tmp_path / "keys.toml", {name: new_key() for name in ("garden", "kitchen", "cellar", "late")}
    rows = {name: f'[tenants.{name}]\nkeys = ["{hash_of(key)}"]\n' for name, key in keys.items()}
    shared = 'share_cache = "house"\n'
    path.write_text(rows["garden"] + rows["kitchen"] + shared + rows["cellar"] + shared)
    command = [sys.executable, "-m", "phloem", "serve", str(tiny_model_path), "--port", "0", "--num-threads", "1"]
    with running([*command, "--key-file", str(path)]) as started:
        url = re.search(r"http://[\d.:]+", address(started))[0]

        def cached(tenant: str, **fields: object) -> int:
            body = {"prompt": "a prompt that is the same for all " * 4, "max_tokens": 2} | fields
            headers = {"authorization": f"Bearer {keys[tenant]}"}
            answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=300)
            assert answer.status_code == 200, answer.text
            return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

        assert cached("garden") == 0 and cached("garden") > 100
        assert cached("kitchen") == 0, "the prefix of another tenant is not found"
        assert cached("kitchen", cache_salt="tenant:garden/") == 0, "nor by naming its salt"
        assert cached("cellar") > 100, "these two share theirs"

        headers = {"x-api-key": keys["late"]}
        assert httpx.get(f"{url}/usage", headers=headers, timeout=300).status_code == 401
        path.write_text(path.read_text() + rows["late"])
        started.send_signal(signal.SIGHUP)
        wait_until(lambda: httpx.get(f"{url}/usage", headers=headers, timeout=300).status_code == 200)


PROMPTS = [f"prompt {i}" for i in range(6)]
SEEDED = {"temperature": 0.9, "seed": 7}
DIGITS = {"regex": "[0-9]{300}"}


def stream(url: str, begun: threading.Barrier | None, index: int) -> str:
    """A streamed completion's text; ``begun`` is passed after its first text."""
    extra = (SEEDED, DIGITS, {})[index % 3]
    body = {"prompt": PROMPTS[index], "max_tokens": 300, "ignore_eos": True, "temperature": 0, "stream": True} | extra
    text = line = ""
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=300) as response:
        assert response.status_code == 200, response.read()
        for line in filter(None, response.iter_lines()):
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                assert "error" not in chunk, chunk
                text += chunk["choices"][0]["text"]
                if begun is not None and text:
                    begun.wait(timeout=300)
                    begun = None
    assert line == "data: [DONE]"
    return text


def texts(url: str, disturb: Callable[[], None] | None = None) -> list[str]:
    """The texts of all prompts, streamed at once; ``disturb`` is called when each stream has begun."""
    begun = threading.Barrier(len(PROMPTS), disturb) if disturb is not None else None
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(partial(stream, url, begun), range(len(PROMPTS))))


def fleet(url: str) -> dict[str, Any]:
    return httpx.get(f"{url}/fleet", timeout=300).json()


def test_an_engine_that_dies_or_hangs_costs_a_pause_until_it_does_so_too_often(tiny_model_path):
    with (
        process(tiny_model_path, step_timeout_s=5.0, max_restarts=2, backoff_s=0.0) as started,
        ThreadPoolExecutor(1) as later,
        httpx.Client(base_url=address(started), timeout=300) as http,
    ):
        url = str(http.base_url)
        (first,) = fleet(url)["replicas"]
        ready = {"status": "ok", "live": True, "ready": True, "replicas": {"ready": 1, "total": 1}}
        assert http.get("/health").json() == ready
        expected = texts(url)
        assert all(len(text) >= 100 for text in expected)
        late = []

        def kill() -> None:
            os.kill(first["pid"], signal.SIGKILL)
            wait_until(lambda: http.get("/health").status_code == 503)
            late.append(later.submit(stream, url, None, 0))  # comes while there is no engine
            assert http.get("/health/live").status_code == 200

        assert texts(url, kill) == expected and late[0].result() == expected[0]
        wait_until(lambda: http.get("/health").json() == ready)
        (second,) = fleet(url)["replicas"]
        assert (second["restarts"], second["epoch"]) == (1, 2) and "SIGKILL" in second["last_error"]

        assert texts(url, partial(os.kill, second["pid"], signal.SIGSTOP)) == expected
        wait_until(lambda: (found := fleet(url)["replicas"][0])["epoch"] == 3 and found["is_ready"])
        page = fleet(url)
        (third,) = page["replicas"]
        assert third["restarts"] == 2 and "has been silent" in third["last_error"]
        assert page["replays"] > 0 and page["engines_lost"] == 2 and page["poisoned"] == 0
        metrics = http.get("/metrics").text
        assert 'phloem_engine_restarts_total{replica="0"} 2.0' in metrics
        assert 'phloem_engine_up{replica="0"} 1.0' in metrics and "phloem_fleet_engines_lost 2.0" in metrics

        os.kill(third["pid"], signal.SIGKILL)
        assert started.wait(timeout=300) == 1
        said = started.stderr.read()
        assert "was lost again after 2 restarts within 600 s" in said and "SIGKILL" in said


def test_two_replicas_serve_on_when_one_is_killed_and_a_signal_ends_all_once_running_answers_are_over(
    tiny_model_path, capsys
):
    command = ["serve", str(tiny_model_path), "--port", "0", "--replicas", "2", "--num-threads", "1"]
    with running([sys.executable, "-m", "phloem", *command]) as started:
        url = address(started).split(" at ")[1].split(",")[0]
        wait_until(lambda: httpx.get(f"{url}/health", timeout=300).json()["replicas"] == {"ready": 2, "total": 2})
        expected = texts(url)
        victim = fleet(url)["replicas"][1]
        assert texts(url, partial(os.kill, victim["pid"], signal.SIGKILL)) == expected
        page = fleet(url)
        assert page["replicas"][0]["restarts"] == 0 and "SIGKILL" in page["replicas"][1]["last_error"]
        assert cli.main(["top", url, "--once"]) == 0
        shown = capsys.readouterr().out
        assert "of 2 replicas ready" in shown and "SIGKILL" in shown
        # On Linux also an engine that is still starting in place of the killed one.
        engines = children(started.pid) if sys.platform == "linux" else [page["replicas"][0]["pid"]]
        body = {"messages": HELLO, "max_tokens": 60, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=300) as response:
            chunks = response.iter_raw()
            next(chunks)
            started.send_signal(signal.SIGINT)
            assert b"".join(chunks).endswith(b"data: [DONE]\n\n")
        assert started.wait(timeout=300) == 0
        assert engines
        wait_until(lambda: not any(map(is_alive, engines)))


@pytest.mark.model
def test_a_real_model_chats_streams_caches_and_follows_schemas(smollm2_path):
    schema = {
        "type": "object",
        "properties": {"tree": {"type": "string", "maxLength": 12}, "is_tall": {"type": "boolean"}},
        "required": ["tree", "is_tall"],
        "additionalProperties": False,
    }
    with (
        process(smollm2_path) as started,
        contextlib.closing(openai.OpenAI(base_url=f"{(url := address(started))}/v1", api_key="x")) as client,
    ):
        ask = {"model": "under-test", "messages": HELLO, "max_tokens": 12, "temperature": 0}
        whole = client.chat.completions.create(**ask)
        text, usage = "", None
        for chunk in client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}):
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
            usage = chunk.usage or usage
        assert text == whole.choices[0].message.content != ""
        assert whole.usage.prompt_tokens_details.cached_tokens == 0
        assert [(one["restarts"], one["last_error"]) for one in fleet(url)["replicas"]] == [(0, "")]
        assert usage.prompt_tokens_details.cached_tokens >= usage.prompt_tokens - 1
        assert usage.completion_tokens == whole.usage.completion_tokens

        form = {"type": "json_schema", "json_schema": {"name": "tree", "schema": schema}}
        answer = client.chat.completions.create(**{**ask, "max_tokens": 100}, response_format=form)
        value = json.loads(answer.choices[0].message.content)
        assert set(value) == {"tree", "is_tall"} and isinstance(value["is_tall"], bool)

        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="under-test", prompt="tree " * 9000, stream=True)
        assert caught.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="under-test", prompt="a", extra_body={"regex": "[a-"})
        assert caught.value.code == "invalid_grammar"
        logprobs = (
            client.completions.create(
                model="under-test",
                prompt="The capital of France is",
                echo=True,
                logprobs=1,
                max_tokens=1,
                temperature=0,
            )
            .choices[0]
            .logprobs
        )
        assert logprobs.tokens[-1] == " Paris" and logprobs.token_logprobs[0] is None
        assert all(-30 < value <= 0 for value in logprobs.token_logprobs[1:])


@pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
def test_an_encoder_is_served_beside_a_decoder_with_rules(tiny_model_path, tmp_path):
    rules = tmp_path / "rules.toml"
    rules.write_text('[auto]\ncheap = "chat"\nstrong = "vectors"\nwhen.longer_than_chars = 100\n')
    models = [f"chat={tiny_model_path}", f"vectors={make_encoder(tmp_path / 'encoder')}"]
    command = [sys.executable, "-m", "phloem", "serve", *models, "--rules", str(rules), "--port", "0"]
    with running([*command, "--num-threads", "1", "--num-slots", "2048"]) as started:
        url = re.search(r"http://[\d.:]+", address(started))[0]
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        found = client.embeddings.create(model="vectors", input=["the cat", "the tree"])
        assert [len(entry.embedding) for entry in found.data] == [48, 48] and found.usage.prompt_tokens == 8
        forced = {"ignore_eos": True}
        answer = client.chat.completions.create(model="auto", messages=HELLO, max_tokens=4, extra_body=forced)
        assert (answer.model, answer.usage.completion_tokens) == ("chat", 4)
        replicas = httpx.get(f"{url}/fleet").json()["replicas"]
        assert [(replica["name"], replica["is_ready"]) for replica in replicas] == [
            ("chat/0", True),
            ("vectors/0", True),
        ]
        assert 'phloem_routed_total{model="chat",reason="cheap",rule="auto"} 1.0' in httpx.get(f"{url}/metrics").text
        started.send_signal(signal.SIGTERM)
        assert started.wait(timeout=300) == 0
