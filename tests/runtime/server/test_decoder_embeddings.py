"""``/v1/embeddings`` and ``embed()`` of a served decoder: OpenAI's forms, tenants' limits, clients that leave."""

import base64
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import phloem
import pytest
from phloem.protocol.errors import InvalidRequest, PromptTooLong, Unsupported
from phloem.runtime.server.app import create_app
from phloem.runtime.server.tenants import Keys, Tenant, hash_of
from phloem.runtime.tokenizer import load_chat_template, load_tokenizer
from phloem.tests.runtime.models.hf_reference import hf_from_folder, hf_hidden, pooled_vector
from phloem.tests.runtime.server.doubles import live_server
from phloem.tests.runtime.wire import wait_until

NAME = "tiny"
TEXTS = ["the sap rises", "rain", "Grüße aus dem 木", "a longer text about trees, their rings and their leaves " * 3]
Rates = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def engine(tiny_model_path: Path) -> Iterator[phloem.Engine]:
    with phloem.Engine(model=str(tiny_model_path), precision="float32", num_slots=4096, max_seq_len=512) as engine:
        yield engine


@pytest.fixture(scope="module")
def app(engine: phloem.Engine, tiny_model_path: Path) -> Any:
    def made(**options: Any) -> Any:
        tokenizer = load_tokenizer(tiny_model_path)
        template = load_chat_template(tiny_model_path, tokenizer)
        return create_app(engine.client, tokenizer, template, model_name=NAME, **options)

    return made


@pytest.fixture(scope="module")
def http(app: Any) -> Iterator[httpx.Client]:
    with live_server(app()) as url, httpx.Client(base_url=url, timeout=300) as client:
        yield client


@pytest.fixture(scope="module")
def wanted(tiny_model_path: Path) -> Rates:
    """By pooling, the vectors of ``TEXTS`` by transformers, float32 [N, C]."""
    model, tokenizer = hf_from_folder(tiny_model_path), load_tokenizer(tiny_model_path)
    ids = [np.array(tokenizer.encode(text, at_start=True)) for text in TEXTS]
    hidden = [hf_hidden(model, one) for one in ids]
    return {how: np.stack([pooled_vector(one, pooling=how) for one in hidden]) for how in ("last", "mean")}


def vectors_of(body: dict[str, Any]) -> np.ndarray:
    assert [entry["index"] for entry in body["data"]] == list(range(len(body["data"])))
    return np.array([entry["embedding"] for entry in body["data"]])


@pytest.mark.parametrize("pooling", [None, "last", "mean"])
def test_texts_give_their_pooled_hidden_states_and_the_answer_says_how(
    http: httpx.Client, wanted: Rates, tiny_model_path: Path, pooling: str | None
) -> None:
    body = http.post("/v1/embeddings", json={"model": NAME, "input": TEXTS, "pooling": pooling}).json()
    np.testing.assert_allclose(vectors_of(body), wanted[pooling or "last"], atol=1e-5)
    tokenizer = load_tokenizer(tiny_model_path)
    count = sum(len(tokenizer.encode(text, at_start=True)) for text in TEXTS)
    assert body["usage"] == {"prompt_tokens": count, "total_tokens": count}
    assert (body["object"], body["model"], body["pooling"]) == ("list", NAME, pooling or "last")


def test_every_form_of_the_input_gives_the_same_vector(
    http: httpx.Client, wanted: Rates, tiny_model_path: Path
) -> None:
    ids = load_tokenizer(tiny_model_path).encode("rain", at_start=True)
    for given in ("rain", ["rain"], ids, [ids]):
        body = http.post("/v1/embeddings", json={"input": given}).json()
        np.testing.assert_allclose(vectors_of(body), wanted["last"][1:2], atol=1e-5)


def test_openai_s_client_reads_vectors_of_fewer_dimensions(http: httpx.Client, wanted: Rates) -> None:
    whole = wanted["last"]
    with openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0, timeout=300) as client:
        found = client.embeddings.create(model=NAME, input=TEXTS)  # which asks for base64
        short = client.embeddings.create(model=NAME, input=TEXTS, dimensions=5, encoding_format="float")
    np.testing.assert_allclose([entry.embedding for entry in found.data], whole, atol=1e-5)
    cut = whole[:, :5] / np.linalg.norm(whole[:, :5], axis=1, keepdims=True)
    np.testing.assert_allclose([entry.embedding for entry in short.data], cut, atol=1e-5)
    body = http.post("/v1/embeddings", json={"input": "rain", "encoding_format": "base64", "dimensions": 5}).json()
    np.testing.assert_allclose(np.frombuffer(base64.b64decode(body["data"][0]["embedding"]), "<f4"), cut[1], atol=1e-5)


def test_more_inputs_than_one_program_holds(http: httpx.Client) -> None:
    texts = [f"tree {i % 7}" for i in range(600)]
    found = vectors_of(http.post("/v1/embeddings", json={"input": texts}).json())
    assert len(found) == 600
    np.testing.assert_allclose(found[7:], found[:-7], atol=1e-5)
    assert np.abs(found[0] - found[1]).max() > 1e-3


@pytest.mark.parametrize(
    ("body", "where", "message"),
    [
        ({"input": "a", "dimensions": 1000}, "dimensions", "dimensions is 1,000, but the vectors have"),
        ({"input": "a", "truncate": True}, "truncate", "a decoder's texts are not cut"),
        ({"input": "a", "pooling": "cls"}, "pooling", ""),
        ({"input": ["a", ""]}, "input.1", "input.1 is empty"),
        ({"input": ["a", "sap " * 300]}, "", "but the context is 512"),
        ({"input": [5] * 600}, "input.0", "600 token ids, but the context is 512"),
        ({"input": [[5], [99999]]}, "input.1", "token id 99999"),
        ({"input": []}, "input", "empty list"),
        ({"input": ["a"] * 2049}, "input", "more than 2,048 items"),
        ({"input": "a", "user": "ann"}, "user", "user"),
    ],
)
def test_wrong_requests_are_refused_by_name(http: httpx.Client, body: dict, where: str, message: str) -> None:
    answer = http.post("/v1/embeddings", json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["param"] or "").startswith(where) and message in error["message"], error
    assert http.post("/v1/embeddings", json={"input": "a", "model": "other"}).status_code == 404


def test_embeddings_and_generations_do_not_disturb_each_other(http: httpx.Client, wanted: Rates) -> None:
    asked = {"prompt": "the sap rises", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    alone = http.post("/v1/completions", json=asked).json()["choices"]
    bodies = [("/v1/embeddings", {"input": TEXTS, "pooling": "mean"}), ("/v1/completions", asked)] * 4
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda one: http.post(one[0], json=one[1]).json(), bodies))
    for body in answers[::2]:
        np.testing.assert_allclose(vectors_of(body), wanted["mean"], atol=1e-5)
    assert [body["choices"] for body in answers[1::2]] == [alone] * 4


def test_tokens_count_for_the_tenant(app: Any) -> None:
    keys = Keys({"ann": Tenant(keys=(hash_of("secret"),), tokens_per_minute=100)}, clock=lambda: 0.0)
    with live_server(app(keys=keys)) as url, httpx.Client(base_url=url, timeout=300) as client:
        assert client.post("/v1/embeddings", json={"input": "rain"}).status_code == 401
        client.headers["authorization"] = "Bearer secret"
        count = client.post("/v1/embeddings", json={"input": "rain"}).json()["usage"]["prompt_tokens"]
        wait_until(lambda: client.get("/usage").json()["used"]["prompt_tokens"] == count)
        several = {"input": ["rain " * 20] * 3}
        assert [client.post("/v1/embeddings", json=several).status_code for _ in range(2)] == [200, 429]


def test_a_client_that_leaves_cancels_its_programs(http: httpx.Client, engine: phloem.Engine) -> None:
    host, port = str(http.base_url).removeprefix("http://").strip("/").split(":")
    before = engine.metrics()["forward_tokens"]
    texts = [f"{i} " + "sap " * 100 for i in range(2000)]  # 800,000 tokens: more than run before the client leaves
    body = httpx.Request("POST", http.base_url, json={"input": texts, "pooling": "mean"}).content
    with socket.create_connection((host, int(port)), timeout=60) as client:
        head = f"POST /v1/embeddings HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        client.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        wait_until(lambda: engine.metrics()["forward_tokens"] > before)
    wait_until(lambda: engine.metrics()["programs"] == 0)
    assert engine.metrics()["forward_tokens"] - before < 400_000
    assert http.post("/v1/embeddings", json={"input": "rain"}).status_code == 200


def test_an_engine_embeds_without_http(engine: phloem.Engine, wanted: Rates, tiny_model_path: Path) -> None:
    found = engine.embed(TEXTS, pooling="mean")
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, wanted["mean"], atol=1e-5)
    np.testing.assert_allclose(engine.embed(TEXTS[1]), wanted["last"][1], atol=1e-5)
    ids = load_tokenizer(tiny_model_path).encode(TEXTS[1], at_start=True)
    np.testing.assert_allclose(engine.embed([ids])[0], wanted["last"][1], atol=1e-5)
    assert len(engine.embed(["rain"] * 300)) == 300
    with pytest.raises(PromptTooLong) as long:
        engine.embed(["rain"] * 300 + ["sap " * 300])
    assert long.value.where == "input.300"
    for inputs, error, message in (
        ([], InvalidRequest, "input is empty"),
        (["a", ""], InvalidRequest, r"input\.1 is empty"),
    ):
        with pytest.raises(error, match=message):
            engine.embed(inputs)
    with pytest.raises(Unsupported, match="truncate=True: .* is a decoder, which cuts no text"):
        engine.embed("a", truncate=True)
    with pytest.raises(Unsupported, match="is a decoder, whose embeddings come from programs"):
        engine.client.embed(["a"])


def test_replicas_give_the_same_vectors(tiny_model_path: Path, wanted: Rates) -> None:
    with phloem.Runtime(model=str(tiny_model_path), precision="float32", num_slots=1024, replicas=2) as runtime:
        np.testing.assert_allclose(runtime.embed(TEXTS), wanted["last"], atol=1e-5)
