"""A server of an encoder: OpenAI's embeddings, and a clear refusal of everything else."""

import base64
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import openai
import phloem
import pytest
from phloem.protocol.errors import EngineLost
from phloem.protocol.messages import Embedded
from phloem.runtime.encoder.tokens import load_encoder_tokenizer
from phloem.runtime.server.app import create_app
from phloem.runtime.server.encoder_routes import TEXT_PATHS
from phloem.runtime.server.tenants import Keys, Tenant, hash_of
from phloem.tests.runtime.encoder.tiny_encoder import TEXTS, make_encoder, reference
from phloem.tests.runtime.server.doubles import live_server

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
NAME = "tiny-encoder"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[phloem.Engine]:
    with phloem.Engine(model=str(folder)) as engine:
        yield engine


@pytest.fixture(scope="module")
def http(engine: phloem.Engine) -> Iterator[httpx.Client]:
    app = create_app(engine.client, None, None, model_name=NAME)
    with live_server(app) as url, httpx.Client(base_url=url, timeout=300) as client:
        yield client


@pytest.fixture(scope="module")
def wanted(folder: Path) -> np.ndarray:
    tokenizer = load_encoder_tokenizer(folder)
    return reference(folder, [tokenizer.encode(text) for text in TEXTS]).numpy()


def vectors_of(body: dict) -> np.ndarray:
    assert [entry["index"] for entry in body["data"]] == list(range(len(body["data"])))
    return np.array([entry["embedding"] for entry in body["data"]])


def test_a_list_of_texts_gives_their_vectors_and_the_tokens(
    http: httpx.Client, folder: Path, wanted: np.ndarray
) -> None:
    answer = http.post("/v1/embeddings", json={"model": NAME, "input": TEXTS})
    body = answer.json()
    np.testing.assert_allclose(vectors_of(body), wanted, atol=1e-5)
    tokenizer = load_encoder_tokenizer(folder)
    count = sum(len(tokenizer.encode(text)) for text in TEXTS)
    assert body["usage"] == {"prompt_tokens": count, "total_tokens": count}
    assert (body["object"], body["model"]) == ("list", NAME)


@pytest.mark.parametrize("given", ["rain", ["rain"], [2, 10, 3], [[2, 10, 3]]])
def test_every_form_of_the_input_gives_the_same_vector(
    http: httpx.Client, wanted: np.ndarray, given: str | list[object]
) -> None:
    body = http.post("/v1/embeddings", json={"input": given}).json()
    np.testing.assert_allclose(vectors_of(body), wanted[1:2], atol=1e-5)


def test_base64_has_the_same_numbers(http: httpx.Client, wanted: np.ndarray) -> None:
    body = http.post("/v1/embeddings", json={"input": "rain", "encoding_format": "base64", "dimensions": 48}).json()
    found = np.frombuffer(base64.b64decode(body["data"][0]["embedding"]), "<f4")
    np.testing.assert_allclose(found, wanted[1], atol=1e-5)


def test_openai_s_client_reads_the_vectors(http: httpx.Client, wanted: np.ndarray) -> None:
    with openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0, timeout=300) as client:
        found = client.embeddings.create(model=NAME, input=TEXTS)
        assert [model.id for model in client.models.list()] == [NAME]
    np.testing.assert_allclose([entry.embedding for entry in found.data], wanted, atol=1e-5)


@pytest.mark.parametrize(
    ("body", "where", "message"),
    [
        ({"input": "a", "dimensions": 16}, "dimensions", "dimensions is 16, but the vectors of 'tiny-encoder' have 48"),
        ({"input": ["a", "the " * 50], "truncate": False}, "input.1", "52 tokens, but the model takes 32"),
        ({"input": [5] * 40}, "input.0", "40 tokens, but the model takes 32"),
        ({"input": [99999]}, "input.0", "token id 99999"),
        ({"input": []}, "input", "empty list"),
        ({"input": [[]]}, "input", "empty list of token ids"),
        ({"input": ["a"] * 2049}, "input", "more than 2,048 items"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", ""),
        ({"input": "a", "user": "ann"}, "user", "user"),
        ({"input": "a", "inputs": "b"}, "inputs", ""),
        ({"input": {"text": "a"}}, "input", ""),
    ],
)
def test_wrong_requests_are_refused_by_name(http: httpx.Client, body: dict, where: str, message: str) -> None:
    answer = http.post("/v1/embeddings", json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"].startswith(where) and message in error["message"]
    assert http.post("/v1/embeddings", json={"input": "a", "model": "other"}).status_code == 404


def test_wrong_requests_harm_no_others(http: httpx.Client, wanted: np.ndarray) -> None:
    bodies = [{"input": TEXTS}, {"input": ["a", "the " * 50], "truncate": False}, {"input": [99999]}] * 4
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda body: http.post("/v1/embeddings", json=body), bodies))
    assert [answer.status_code for answer in answers] == [200, 400, 400] * 4
    for answer in answers[::3]:
        np.testing.assert_allclose(vectors_of(answer.json()), wanted, atol=1e-5)


@pytest.mark.parametrize("path", [path.replace("{program}", "p") for path in TEXT_PATHS])
def test_requests_for_text_are_told_that_the_model_is_an_encoder(http: httpx.Client, path: str) -> None:
    answer = http.post(path, json={"input": "a"})
    assert answer.status_code == 400
    assert "'tiny-encoder' is an encoder, which gives embeddings at /v1/embeddings" in answer.json()["error"]["message"]


def test_every_post_of_a_decoder_s_server_is_refused_or_served(
    engine: phloem.Engine, http: httpx.Client, tiny_server: httpx.Client
) -> None:
    def posts(client: httpx.Client) -> set[str]:
        return {path for path, item in client.get("/openapi.json").json()["paths"].items() if "post" in item}

    assert posts(http) >= posts(tiny_server) and "/v1/embeddings" in posts(http)


def test_operators_see_the_server_and_its_metrics(http: httpx.Client) -> None:
    http.post("/v1/embeddings", json={"input": "rain"})
    assert http.get("/health").json()["ready"] is True
    assert http.get("/get_model_info").json()["is_generation"] is False
    assert http.get("/server_info").json()["server"]["capabilities"] == ["embed"]
    metrics = http.get("/metrics").text
    assert "phloem_engine_forward_tokens" in metrics and "phloem_http_prompt_tokens_total" in metrics
    assert http.get("/v1/welcome").status_code == 400 and http.get("/nothing").status_code == 404


def test_tokens_count_for_the_tenant(engine: phloem.Engine) -> None:
    tenant = Tenant(keys=(hash_of("secret"),), tokens_per_minute=100)
    keys = Keys({"ann": tenant}, clock=lambda: 0.0)
    app = create_app(engine.client, None, None, model_name=NAME, keys=keys)
    with live_server(app) as url, httpx.Client(base_url=url, timeout=300) as client:
        assert client.post("/v1/embeddings", json={"input": "rain"}).status_code == 401
        client.headers["authorization"] = "Bearer secret"
        assert client.post("/v1/embeddings", json={"input": "rain"}).status_code == 200
        usage = client.get("/usage").json()
        assert usage["used"]["prompt_tokens"] == 3 and usage["remaining"]["tokens"] == 97
        several = {"input": ["rain " * 20] * 3}
        assert [client.post("/v1/embeddings", json=several).status_code for _ in range(2)] == [200, 429]


class Silent:
    """A client of an engine that does not answer; ``asked`` is set by a request, ``left`` by its end."""

    def __init__(self, engine: phloem.Engine) -> None:
        self.welcome = engine.client.welcome
        self.asked, self.left = threading.Event(), threading.Event()
        self.found: Future[Embedded] = Future()
        self.adapters = self.welcome.adapters

    def embed(self, inputs: object, *, truncate: bool = True) -> Future[Embedded]:
        self.found.add_done_callback(lambda _: self.left.set())
        self.asked.set()
        return self.found


def test_a_client_that_leaves_cancels_its_request(engine: phloem.Engine) -> None:
    silent = Silent(engine)
    with live_server(create_app(silent, None, None, model_name=NAME)) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=60) as client:
            head = f"POST /v1/embeddings HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
            client.sendall(f'{head}content-length: 16\r\n\r\n{{"input":"rain"}}'.encode())
            assert silent.asked.wait(60)
        assert silent.left.wait(60) and silent.found.cancelled()


def test_a_lost_engine_is_a_503_and_a_slow_one_does_not_block_the_server(engine: phloem.Engine) -> None:
    silent = Silent(engine)
    app = create_app(silent, None, None, model_name=NAME)
    with live_server(app) as url, ThreadPoolExecutor(1) as pool, httpx.Client(base_url=url, timeout=300) as client:
        coming = pool.submit(client.post, "/v1/embeddings", json={"input": "rain"})
        assert silent.asked.wait(60)
        assert httpx.get(f"{url}/health/live", timeout=60).status_code == 200
        silent.found.set_exception(EngineLost("gone"))
        assert coming.result(60).status_code == 503
