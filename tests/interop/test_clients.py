"""The clients of the HTTP API against a server with a real model: each test is a cell of docs/interop.md's table."""

import asyncio
import contextlib
import importlib.metadata
import json
import os
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import pytest
from phloem.runtime.weights.resolve import resolve_model
from phloem.tests.interop.cases import CASES, MODEL, RECORDED, Trial, case, serving
from pydantic import BaseModel

pytestmark = pytest.mark.filterwarnings("ignore")  # the clients' own

SYSTEM = {"role": "system", "content": "You answer in one short sentence."}
PARIS = {"role": "user", "content": "What is the capital of France?"}
BERLIN = "Fill in as JSON: Berlin is the capital of Germany."
SENTENCES = ["A cat sits on the mat.", "A cat lies on the rug.", "def main(): return 17 * 4"]
RAIN = "What is the weather in Oslo?"


class City(BaseModel):
    name: str
    country: str


class Weather(BaseModel):
    """The weather in a city."""

    city: Literal["Oslo", "Rome"]


SCHEMA = Weather.model_json_schema()
CHAT_TOOL = {"type": "function", "function": {"name": "weather", "description": "Tells.", "parameters": SCHEMA}}


class Recorder:
    """ASGI middleware that tells a trial each request with a body."""

    def __init__(self, app: Any, trial: Trial) -> None:
        self.app, self.trial = app, trial

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""

        async def heard() -> Any:
            nonlocal body
            message = await receive()
            if message["type"] == "http.request":
                body += message["body"]
                if not message.get("more_body") and scope["method"] == "POST":
                    self.trial.take(scope["method"], scope["path"], body)
            return message

        await self.app(scope, heard, send)


@pytest.fixture(scope="module")
def trial() -> Iterator[Trial]:
    """A server of SmolLM2, or of the model that ``PHLOEM_INTEROP_MODEL`` names, under SmolLM2's name."""
    found = Trial("")
    path = resolve_model(os.environ.get("PHLOEM_INTEROP_MODEL", MODEL))
    with serving(path, lambda app: Recorder(app, found)) as url:
        found.url = url
        yield found
    recorded = json.loads(RECORDED.read_text())
    for client, ran in found.ran.items():
        known = recorded.setdefault(client, {"version": "", "cases": {}})
        if os.environ.get("PHLOEM_RECORD_INTEROP"):
            known["version"] = importlib.metadata.version(client)
            known["cases"] = {what: ran.get(what, known["cases"].get(what)) for what in CASES[client]}
        for what, asked in ran.items():
            assert _fields(asked) == _fields(known["cases"].get(what, [])), (
                f"{client} sends other requests for {what!r} than {RECORDED.name} holds: PHLOEM_RECORD_INTEROP=1 make "
                "test-interop records them"
            )
    if os.environ.get("PHLOEM_RECORD_INTEROP"):
        recorded = {client: recorded[client] for client in CASES if client in recorded}
        RECORDED.write_text(json.dumps(recorded, indent=1, ensure_ascii=False) + "\n")


def _fields(asked: list[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    return [(one["path"], sorted(one["body"])) for one in asked]


# -- openai -----------------------------------------------------------------------------------------------------------


def assert_similar_first(vectors: list[list[float]]) -> None:
    """Of the vectors of ``SENTENCES``, which have length 1, the first is nearer to the second than to the third."""
    found = np.array(vectors)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1.0, atol=1e-5)
    assert found[0] @ found[1] > found[0] @ found[2]


@contextlib.contextmanager
def openai_client(trial: Trial) -> Iterator[Any]:
    import openai

    with openai.OpenAI(base_url=f"{trial.url}/v1", api_key="none", max_retries=0, timeout=300) as client:
        yield client


@case("openai", "chat")
def test_openai_chat(trial: Trial) -> None:
    with openai_client(trial) as client:
        answer = client.chat.completions.create(model=MODEL, messages=[SYSTEM, PARIS], temperature=0, max_tokens=30)
    assert "Paris" in answer.choices[0].message.content and answer.usage.prompt_tokens_details is not None


@case("openai", "async")
def test_openai_async(trial: Trial) -> None:
    import openai

    async def ask() -> Any:
        async with openai.AsyncOpenAI(base_url=f"{trial.url}/v1", api_key="none", max_retries=0) as client:
            whole = await client.chat.completions.create(
                model=MODEL, messages=[SYSTEM, PARIS], temperature=0, max_tokens=30
            )
            stream = await client.chat.completions.create(
                model=MODEL, messages=[SYSTEM, PARIS], temperature=0, max_tokens=30, stream=True
            )
            return whole, "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    whole, streamed = asyncio.run(ask())
    assert whole.choices[0].message.content == streamed


@case("openai", "streaming")
def test_openai_streaming(trial: Trial) -> None:
    with openai_client(trial) as client:
        chunks = list(
            client.chat.completions.create(
                model=MODEL,
                messages=[SYSTEM, PARIS],
                temperature=0,
                max_tokens=30,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
    assert "Paris" in "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert chunks[-1].usage.completion_tokens > 2


@case("openai", "tools")
def test_openai_tools(trial: Trial) -> None:
    with openai_client(trial) as client:
        messages: list[Any] = [{"role": "user", "content": RAIN}]
        ask = {"model": MODEL, "tools": [CHAT_TOOL], "temperature": 0, "max_tokens": 60}
        message = client.chat.completions.create(messages=messages, tool_choice="required", **ask).choices[0].message
        call = message.tool_calls[0]
        assert json.loads(call.function.arguments) == {"city": "Oslo"}
        messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "It is sunny."}]
        assert client.chat.completions.create(messages=messages, **ask).choices[0].message.content


@case("openai", "`parse`")
def test_openai_parse(trial: Trial) -> None:
    with openai_client(trial) as client:
        answer = client.chat.completions.parse(
            model=MODEL,
            messages=[{"role": "user", "content": BERLIN}],
            response_format=City,
            temperature=0,
            max_tokens=60,
        )
    assert answer.choices[0].message.parsed == City(name="Berlin", country="Germany")


@case("openai", "`.stream()` with `parse`")
def test_openai_stream_with_parse(trial: Trial) -> None:
    with (
        openai_client(trial) as client,
        client.chat.completions.stream(
            model=MODEL,
            messages=[{"role": "user", "content": BERLIN}],
            response_format=City,
            temperature=0,
            max_tokens=60,
        ) as stream,
    ):
        for _ in stream:
            pass
        found = stream.get_final_completion().choices[0].message.parsed
    assert found == City(name="Berlin", country="Germany")


@case("openai", "responses")
def test_openai_responses(trial: Trial) -> None:
    with openai_client(trial) as client:
        ask = {"model": MODEL, "temperature": 0, "max_output_tokens": 30}
        first = client.responses.create(input=PARIS["content"], instructions=SYSTEM["content"], **ask)
        assert "Paris" in first.output_text
        more = client.responses.create(
            input="Why?", instructions=SYSTEM["content"], previous_response_id=first.id, **ask
        )
        held = more.usage.input_tokens_details.cached_tokens
        assert first.usage.total_tokens - 2 <= held < more.usage.input_tokens
        assert client.responses.retrieve(first.id).output_text == first.output_text
        client.responses.delete(first.id)


@case("openai", "responses: tools, streaming, `parse`")
def test_openai_responses_with_tools(trial: Trial) -> None:
    with openai_client(trial) as client:
        tool = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}
        ask = {"model": MODEL, "temperature": 0, "max_output_tokens": 60}
        with client.responses.stream(input=RAIN, tools=[tool], tool_choice="required", **ask) as stream:
            kinds = {event.type for event in stream}
            first = stream.get_final_response()
        assert "response.function_call_arguments.delta" in kinds
        call = next(item for item in first.output if item.type == "function_call")
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "It is sunny."}
        assert client.responses.create(input=[output], previous_response_id=first.id, tools=[tool], **ask).output_text
        assert client.responses.parse(input=BERLIN, text_format=City, **ask).output_parsed.name == "Berlin"


@case("openai", "embeddings")
def test_openai_embeddings(trial: Trial) -> None:
    with openai_client(trial) as client:
        found = client.embeddings.create(model=MODEL, input=SENTENCES, extra_body={"pooling": "mean"})
        short = client.embeddings.create(model=MODEL, input=SENTENCES[0], dimensions=64, encoding_format="float")
    assert found.model_extra == {"pooling": "mean"} and found.usage.prompt_tokens > 10
    assert_similar_first([entry.embedding for entry in found.data])
    assert len(short.data[0].embedding) == 64


# -- anthropic --------------------------------------------------------------------------------------------------------

GREEDY = {"temperature": 0}  # its newest client has no sampling parameters of its own


@contextlib.contextmanager
def anthropic_client(trial: Trial) -> Iterator[Any]:
    import anthropic

    with anthropic.Anthropic(base_url=trial.url, api_key="none", max_retries=0, timeout=300) as client:
        yield client


@case("anthropic", "messages")
def test_anthropic_messages(trial: Trial) -> None:
    ask = {"model": MODEL, "max_tokens": 30, "system": SYSTEM["content"], "messages": [PARIS]}
    with anthropic_client(trial) as client:
        message = client.messages.create(**ask, extra_body=GREEDY)
        assert "Paris" in message.content[0].text and message.stop_reason in ("end_turn", "max_tokens")
        del ask["max_tokens"]
        counted = client.messages.count_tokens(**ask).input_tokens
        assert counted == message.usage.input_tokens + message.usage.cache_read_input_tokens


@case("anthropic", "streaming")
def test_anthropic_streaming(trial: Trial) -> None:
    ask = {"model": MODEL, "max_tokens": 30, "system": SYSTEM["content"], "messages": [PARIS]}
    with anthropic_client(trial) as client, client.messages.stream(**ask, extra_body=GREEDY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert "Paris" in text and final.content[0].text == text and final.usage.output_tokens > 2


@case("anthropic", "tools")
def test_anthropic_tools(trial: Trial) -> None:
    tools = [{"name": "weather", "description": "Tells.", "input_schema": SCHEMA}]
    messages: list[Any] = [{"role": "user", "content": RAIN}]
    ask = {"model": MODEL, "max_tokens": 60, "tools": tools, "extra_body": GREEDY}
    with anthropic_client(trial) as client:
        with client.messages.stream(**ask, messages=messages, tool_choice={"type": "any"}) as stream:
            first = stream.get_final_message()
        call = next(block for block in first.content if block.type == "tool_use")
        assert call.input == {"city": "Oslo"} and first.stop_reason == "tool_use"
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "It is sunny."}
        messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        assert client.messages.create(**ask, messages=messages).content


@case("anthropic", "`parse`")
def test_anthropic_parse(trial: Trial) -> None:
    with anthropic_client(trial) as client:
        message = client.messages.parse(
            model=MODEL,
            max_tokens=60,
            messages=[{"role": "user", "content": BERLIN}],
            output_format=City,
            extra_body=GREEDY,
        )
    assert message.parsed_output == City(name="Berlin", country="Germany")


# -- litellm ----------------------------------------------------------------------------------------------------------


@case("litellm", "chat, streaming, `response_format`")
def test_litellm_as_openai(trial: Trial) -> None:
    import litellm

    ask = {"model": f"openai/{MODEL}", "api_base": f"{trial.url}/v1", "api_key": "none", "temperature": 0}
    whole = litellm.completion(messages=[SYSTEM, PARIS], max_tokens=30, **ask).choices[0].message.content
    stream = litellm.completion(messages=[SYSTEM, PARIS], max_tokens=30, stream=True, **ask)
    assert "Paris" in whole and "".join(chunk.choices[0].delta.content or "" for chunk in stream) == whole
    typed = litellm.completion(
        messages=[{"role": "user", "content": BERLIN}], response_format=City, max_tokens=60, **ask
    )
    assert City.model_validate_json(typed.choices[0].message.content).name == "Berlin"


@case("litellm", "tools")
def test_litellm_tools(trial: Trial) -> None:
    import litellm

    answer = litellm.completion(
        model=f"openai/{MODEL}",
        api_base=f"{trial.url}/v1",
        api_key="none",
        messages=[{"role": "user", "content": RAIN}],
        tools=[CHAT_TOOL],
        tool_choice="required",
        temperature=0,
        max_tokens=60,
    )
    assert json.loads(answer.choices[0].message.tool_calls[0].function.arguments) == {"city": "Oslo"}


@case("litellm", "embeddings")
def test_litellm_embeddings(trial: Trial) -> None:
    import litellm

    about = {"model": f"openai/{MODEL}", "api_base": f"{trial.url}/v1", "api_key": "none"}
    found = litellm.embedding(input=SENTENCES, extra_body={"pooling": "mean"}, encoding_format="float", **about)
    assert_similar_first([entry["embedding"] for entry in found.data])


@case("litellm", "as `anthropic/MODEL`")
def test_litellm_as_anthropic(trial: Trial) -> None:
    import litellm

    ask = {"model": f"anthropic/{MODEL}", "api_base": trial.url, "api_key": "none", "temperature": 0, "max_tokens": 30}
    whole = litellm.completion(messages=[SYSTEM, PARIS], **ask).choices[0].message.content
    stream = litellm.completion(messages=[SYSTEM, PARIS], stream=True, **ask)
    assert "Paris" in whole and "".join(chunk.choices[0].delta.content or "" for chunk in stream) == whole


# -- langchain-openai -------------------------------------------------------------------------------------------------


def langchain_model(trial: Trial, **options: Any) -> Any:
    from langchain_openai import ChatOpenAI

    options = {"temperature": 0, "max_tokens": 60, **options}
    return ChatOpenAI(base_url=f"{trial.url}/v1", api_key="none", model=MODEL, max_retries=0, **options)


@case("langchain-openai", "chains, streams")
def test_langchain_chains(trial: Trial) -> None:
    told = [("system", SYSTEM["content"]), ("user", PARIS["content"])]
    model = langchain_model(trial, max_tokens=30)
    whole = model.invoke(told)
    pieces = [chunk.content for chunk in model.stream(told)]
    assert "Paris" in whole.content and "".join(pieces) == whole.content and len(pieces) > 2
    assert whole.usage_metadata["output_tokens"] > 2


@case("langchain-openai", "`with_structured_output`")
def test_langchain_structured_output(trial: Trial) -> None:
    model = langchain_model(trial)
    assert model.with_structured_output(City).invoke(BERLIN) == City(name="Berlin", country="Germany")
    for method in ("json_schema", "function_calling"):
        assert isinstance(model.with_structured_output(City, method=method).invoke(BERLIN), City)


@case("langchain-openai", "`bind_tools`")
def test_langchain_tools(trial: Trial) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage

    bound = langchain_model(trial).bind_tools([CHAT_TOOL], tool_choice="any")
    asked = [HumanMessage(RAIN)]
    called = bound.invoke(asked)
    assert called.tool_calls[0]["args"] == {"city": "Oslo"}
    result = ToolMessage("It is sunny.", tool_call_id=called.tool_calls[0]["id"])
    assert langchain_model(trial).bind_tools([CHAT_TOOL]).invoke([*asked, called, result]).content


@case("langchain-openai", "`use_responses_api`")
def test_langchain_responses(trial: Trial) -> None:
    model = langchain_model(trial, use_responses_api=True, max_tokens=30)
    told = [("system", SYSTEM["content"]), ("user", PARIS["content"])]
    whole = model.invoke(told)
    assert "Paris" in whole.text
    assert "".join(chunk.text for chunk in model.stream(told)) == whole.text


@case("langchain-openai", "`OpenAIEmbeddings`")
def test_langchain_embeddings(trial: Trial) -> None:
    from langchain_openai import OpenAIEmbeddings

    # Without check_embedding_ctx_length=False it sends token ids of OpenAI's own vocabulary.
    model = OpenAIEmbeddings(
        base_url=f"{trial.url}/v1",
        api_key="none",
        model=MODEL,
        check_embedding_ctx_length=False,
        model_kwargs={"extra_body": {"pooling": "mean"}},
    )
    vectors = model.embed_documents(SENTENCES)
    assert_similar_first(vectors)
    assert model.embed_query(SENTENCES[0]) == pytest.approx(vectors[0], abs=1e-3)


# -- instructor -------------------------------------------------------------------------------------------------------


def instructor_finds(trial: Trial, mode: str) -> City:
    import instructor
    import openai

    with openai.OpenAI(base_url=f"{trial.url}/v1", api_key="none", max_retries=0, timeout=300) as client:
        wrapped = instructor.from_openai(client, mode=getattr(instructor.Mode, mode))
        return wrapped.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Berlin is the capital of Germany."}],
            response_model=City,
            temperature=0,
            max_tokens=80,
            max_retries=0,
        )


@case("instructor", "`Mode.TOOLS`")
def test_instructor_tools(trial: Trial) -> None:
    assert isinstance(instructor_finds(trial, "TOOLS"), City)


@case("instructor", "`Mode.JSON_SCHEMA`")
def test_instructor_json_schema(trial: Trial) -> None:
    assert isinstance(instructor_finds(trial, "JSON_SCHEMA"), City)


@case("instructor", "`Mode.JSON`")
def test_instructor_json(trial: Trial) -> None:
    assert isinstance(instructor_finds(trial, "JSON"), City)


# -- dspy -------------------------------------------------------------------------------------------------------------


def dspy_finds(trial: Trial, adapter: str) -> Any:
    import dspy

    lm = dspy.LM(
        f"openai/{MODEL}", api_base=f"{trial.url}/v1", api_key="none", temperature=0, max_tokens=80, cache=False
    )
    find = dspy.Predict("sentence -> name: str, age: int")
    find.demos = [
        dspy.Example(sentence="Ann Lee is a nurse of 31.", name="Ann Lee", age=31),
        dspy.Example(sentence="At 58, Omar Haddad still plays football.", name="Omar Haddad", age=58),
    ]
    with dspy.context(lm=lm, adapter=getattr(dspy, adapter)()):
        return find(sentence="Tom Becker is a driver of 44.")


@case("dspy", "`JSONAdapter`")
def test_dspy_json(trial: Trial) -> None:
    found = dspy_finds(trial, "JSONAdapter")
    assert (found.name, found.age) == ("Tom Becker", 44)


@case("dspy", "`ChatAdapter`")
def test_dspy_chat(trial: Trial) -> None:
    found = dspy_finds(trial, "ChatAdapter")
    assert (found.name, found.age) == ("Tom Becker", 44)


# -- outlines ---------------------------------------------------------------------------------------------------------


@case("outlines", "typed answers through `from_openai`")
def test_outlines(trial: Trial) -> None:
    import outlines

    with openai_client(trial) as client:
        text = outlines.from_openai(client, MODEL)(BERLIN, City, temperature=0, max_tokens=60)
    assert City.model_validate_json(text) == City(name="Berlin", country="Germany")


# -- guidance ---------------------------------------------------------------------------------------------------------


@case("guidance", "`gen` and `json` through `models.OpenAI`")
def test_guidance_openai(trial: Trial) -> None:
    import guidance

    model = guidance.models.OpenAI(MODEL, echo=False, base_url=f"{trial.url}/v1", api_key="none")
    with guidance.user():
        model += BERLIN
    with guidance.assistant():
        written = model + guidance.gen("text", max_tokens=12)
        filled = model + guidance.json("city", schema=City, max_tokens=80)
    assert written["text"]
    assert City.model_validate_json(filled["city"])


# -- llm --------------------------------------------------------------------------------------------------------------


@case("llm", "prompts, streams, schemas")
def test_llm(trial: Trial) -> None:
    from llm.default_plugins.openai_models import Chat

    model = Chat(MODEL, model_name=MODEL, api_base=f"{trial.url}/v1", supports_schema=True)
    ask = {"key": "none", "system": SYSTEM["content"], "temperature": 0, "max_tokens": 40}
    assert "Paris" in model.prompt(PARIS["content"], stream=False, **ask).text()
    assert "Paris" in "".join(model.prompt(PARIS["content"], stream=True, **ask))
    typed = model.prompt(BERLIN, schema=City, stream=False, key="none", temperature=0, max_tokens=60).text()
    assert City.model_validate_json(typed).name == "Berlin"
