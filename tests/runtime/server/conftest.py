import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import phloem
import pytest
from phloem.runtime.server.app import create_app
from phloem.runtime.tokenizer import load_chat_template, load_tokenizer
from phloem.tests.runtime.server.doubles import MODEL, ChatML, WordTokenizer, connected, live_server
from phloem.tests.runtime.string_engine import StringEngine


class Served:
    """A live server over a string engine, and clients to it."""

    def __init__(self, url: str, engine: StringEngine | None, api_key: str) -> None:
        self.url = url
        self.engine = engine
        self.openai = openai.OpenAI(base_url=f"{url}/v1", api_key=api_key, max_retries=0, timeout=300)
        self.http = httpx.Client(base_url=url, headers={"authorization": f"Bearer {api_key}"}, timeout=300)

    def close(self) -> None:
        self.openai.close()
        self.http.close()


@contextlib.contextmanager
def serving() -> Iterator[Callable[..., Served]]:
    with contextlib.ExitStack() as stack:

        def start(engine: StringEngine | None = None, *, client: object = None, **options: object) -> Served:
            if client is None:
                engine = engine or StringEngine()
                client = stack.enter_context(connected(engine))
            app = create_app(client, WordTokenizer(), options.pop("template", ChatML()), model_name=MODEL, **options)
            served = Served(stack.enter_context(live_server(app)), engine, str(options.get("api_key") or "none"))
            stack.callback(served.close)
            return served

        yield start


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    """``serve(engine)`` or ``serve(client=...)``: starts a server that lives as long as the test."""
    with serving() as start:
        yield start


@contextlib.contextmanager
def served_model(path: Path) -> Iterator[httpx.Client]:
    """A client of a server over a real engine."""
    with phloem.Engine(model=str(path), num_slots=4096) as engine:
        tokenizer = load_tokenizer(path)
        template = load_chat_template(path, tokenizer)
        app = create_app(engine.client, tokenizer, template, model_name=MODEL)
        with live_server(app) as url, httpx.Client(base_url=url, timeout=300) as http:
            yield http


@pytest.fixture(scope="module")
def tiny_server(tiny_model_path: Path) -> Iterator[httpx.Client]:
    """A client of a server of a tiny random model."""
    with served_model(tiny_model_path) as http:
        yield http


@pytest.fixture(scope="module")
def smollm2_server(smollm2_path: Path) -> Iterator[httpx.Client]:
    """A client of a server of SmolLM2."""
    with served_model(smollm2_path) as http:
        yield http


@pytest.fixture(scope="module")
def shared_server() -> Iterator[Served]:
    """A server for tests that only read."""
    with serving() as start:
        yield start()
