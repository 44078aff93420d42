"""Clients of OpenAI's API work against our server: each example in examples/interop, on the real model."""

import importlib.util
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import phloem
import pytest
from phloem.runtime.server.app import create_app
from phloem.runtime.tokenizer import load_chat_template, load_tokenizer
from phloem.tests.runtime.server.doubles import live_server

pytestmark = [pytest.mark.model, pytest.mark.interop]

EXAMPLES = Path(__file__).parents[2] / "examples" / "interop"


def needs(module: str) -> Any:
    missing = importlib.util.find_spec(module) is None
    return pytest.mark.skipif(missing, reason=f"{module} is not installed (make test-interop)")


@pytest.fixture(scope="module")
def base_url(smollm2_path) -> Iterator[str]:
    tokenizer = load_tokenizer(smollm2_path)
    template = load_chat_template(smollm2_path, tokenizer)
    with phloem.Engine(model=str(smollm2_path)) as engine:
        app = create_app(engine.client, tokenizer, template, model_name="smollm2")
        with live_server(app) as url:
            yield f"{url}/v1"


def run(name: str, base_url: str) -> Any:
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](base_url)


def test_the_openai_client_parses_into_a_pydantic_model(base_url):
    meeting = run("openai_parse", base_url)
    assert type(meeting).__name__ == "Meeting"
    assert (meeting.day, meeting.hour, meeting.people) == ("Friday", 12, ["Tom", "Eva"])


@needs("langchain_openai")
@pytest.mark.filterwarnings("ignore")
def test_langchain_chains_streams_types_and_calls(base_url):
    told = run("langchain_chat", base_url)
    assert "Paris" in told["answer"].content and told["answer"].usage_metadata["output_tokens"] > 0
    assert len(told["pieces"]) > 3 and "Rome" in "".join(told["pieces"])
    assert (told["city"].name, told["city"].country) == ("Berlin", "Germany")
    assert [(call["name"], call["args"]) for call in told["calls"]] == [("weather", {"city": "Oslo"})]


@needs("dspy")
@pytest.mark.filterwarnings("ignore")
def test_dspy_gets_typed_outputs(base_url):
    ages = run("dspy_program", base_url)
    assert ages == {"Tom Becker": 44, "Aiko Mori": 23}
