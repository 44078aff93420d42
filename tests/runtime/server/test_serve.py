"""``serve`` with real engine processes: what it takes, how it ends, and what it says when its engine dies."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from phloem.protocol.errors import InvalidRequest, PhloemError
from phloem.runtime.config import EngineConfig
from phloem.runtime.server import serve
from phloem.runtime.server.listener import listen
from phloem.tests.runtime.wire import wait_until

PROGRAM = """
import sys
from phloem.runtime.config import EngineConfig
from phloem.runtime.server import serve
config = EngineConfig(model=sys.argv[1], num_threads=1)
sys.exit(serve(config, port=0, model_name="under-test", on_ready=lambda url: print(url, flush=True)))
"""
HELLO = [{"role": "user", "content": "Name a tree."}]


@contextlib.contextmanager
def process(model: Path) -> Iterator[subprocess.Popen[str]]:
    started = subprocess.Popen([sys.executable, "-c", PROGRAM, str(model)], stdout=subprocess.PIPE, text=True)
    try:
        yield started
    finally:
        started.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            started.wait(timeout=300)
        started.kill()
        started.wait()
        started.stdout.close()


def address(started: subprocess.Popen[str], timeout_s: float = 120.0) -> str:
    """What the process prints when it is ready."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=lambda: lines.put(started.stdout.readline()), daemon=True).start()
    line = lines.get(timeout=timeout_s)
    assert line, f"the server ended with {started.wait()} before it was ready"
    return line.strip()


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_a_busy_port_is_an_error_before_the_model_is_looked_at():
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InvalidRequest, match=rf"port {port} on 127\.0\.0\.1 is in use .*--port"):
            serve(EngineConfig(model="/no/such/model"), port=port)


def test_a_model_that_cannot_be_loaded_is_the_engines_own_error():
    with pytest.raises(PhloemError, match="/no/such/model"):
        serve(EngineConfig(model="/no/such/model"), port=0)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_signal_while_the_model_loads_leaves_no_process_behind(tiny_model_path):
    with process(tiny_model_path) as started:
        wait_until(lambda: bool(children(started.pid)))
        engines = children(started.pid)
        started.send_signal(signal.SIGTERM)
        assert started.wait(timeout=300) == 0
        wait_until(lambda: not any(map(is_alive, engines)))


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_signal_ends_server_and_engine_and_running_answers_get_their_time(tiny_model_path):
    with process(tiny_model_path) as started:
        url = address(started)
        engines = children(started.pid)
        body = {"messages": HELLO, "max_tokens": 60, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=300) as response:
            chunks = response.iter_raw()
            next(chunks)
            started.send_signal(signal.SIGINT)
            assert b"".join(chunks).endswith(b"data: [DONE]\n\n")
        assert started.wait(timeout=300) == 0
        wait_until(lambda: not any(map(is_alive, engines)))


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_killed_engine_is_503_for_who_waits_and_who_comes_after(tiny_model_path):
    with process(tiny_model_path) as started:
        url = address(started)
        (engine,) = children(started.pid)
        body = {"prompt": "a", "max_tokens": 100_000, "ignore_eos": True}
        waiting: queue.SimpleQueue[httpx.Response] = queue.SimpleQueue()

        def wait() -> None:
            waiting.put(httpx.post(f"{url}/v1/completions", json=body, timeout=300))

        threading.Thread(target=wait, daemon=True).start()
        info = f"{url}/server_info"
        wait_until(lambda: httpx.get(info, timeout=60.0).json()["server"]["requests_in_flight"] == 1)
        os.kill(engine, signal.SIGKILL)
        after = httpx.post(f"{url}/v1/completions", json=body, timeout=300)
        for response in (waiting.get(timeout=300), after):
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "engine_lost"
            assert "SIGKILL" in response.json()["error"]["message"]
        assert httpx.get(f"{url}/health", timeout=300).status_code == 503


@pytest.mark.model
def test_a_real_model_chats_streams_caches_and_follows_schemas(smollm2_path):
    schema = {
        "type": "object",
        "properties": {"tree": {"type": "string", "maxLength": 12}, "is_tall": {"type": "boolean"}},
        "required": ["tree", "is_tall"],
        "additionalProperties": False,
    }
    with process(smollm2_path) as started, openai.OpenAI(base_url=f"{address(started)}/v1", api_key="x") as client:
        ask = {"model": "under-test", "messages": HELLO, "max_tokens": 12, "temperature": 0}
        whole = client.chat.completions.create(**ask)
        text, usage = "", None
        for chunk in client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}):
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
            usage = chunk.usage or usage
        assert text == whole.choices[0].message.content != ""
        assert whole.usage.prompt_tokens_details.cached_tokens == 0
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
