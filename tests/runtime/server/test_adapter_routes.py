"""Adapters over HTTP: who may load them, from where, and that requests can name them at once."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import phloem
import pytest
from phloem.runtime.server.app import create_app
from phloem.runtime.server.tenants import Keys, Tenant, hash_of
from phloem.runtime.tokenizer import load_tokenizer
from phloem.tests.runtime.models.lora import make_adapter
from phloem.tests.runtime.server.doubles import live_server


@pytest.fixture(scope="module")
def root(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    make_adapter(folder / "poet", tiny_model_path, seed=0, rank=2)
    return folder


@pytest.fixture(scope="module")
def http(tiny_model_path: Path, root: Path) -> Iterator[httpx.Client]:
    tenants = {
        "boss": Tenant(keys=(hash_of("boss-key"),), operator=True),
        "guest": Tenant(keys=(hash_of("guest-key"),), models=("tiny", "poet")),
        "other": Tenant(keys=(hash_of("other-key"),), models=("tiny",)),
    }
    options = {"precision": "float32", "num_slots": 2048, "num_threads": 1, "adapter_folder": str(root)}
    with phloem.Engine(model=str(tiny_model_path), **options) as engine:
        tokenizer = load_tokenizer(tiny_model_path)
        app = create_app(engine.client, tokenizer, None, model_name="tiny", keys=Keys(tenants), takes_adapters=True)
        with live_server(app) as url, httpx.Client(base_url=url, timeout=60) as client:
            yield client


def key(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}-key"}


def complete(http: httpx.Client, model: str, who: str = "boss") -> httpx.Response:
    body = {"model": model, "prompt": "a", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    return http.post("/v1/completions", json=body, headers=key(who))


def names(http: httpx.Client, who: str = "boss") -> list[str]:
    return [one["id"] for one in http.get("/v1/models", headers=key(who)).json()["data"]]


def test_an_operator_loads_one_and_those_who_may_can_name_it_at_once(http: httpx.Client) -> None:
    assert complete(http, "poet").status_code == 404
    answer = http.post("/v1/adapters", json={"name": "poet", "path": "poet"}, headers=key("boss"))
    assert answer.status_code == 200 and answer.json()["data"][0]["id"] == "poet", answer.text
    plain, poet = (complete(http, name).json()["choices"][0]["text"] for name in ("tiny", "poet"))
    assert plain != poet == complete(http, "poet", "guest").json()["choices"][0]["text"]
    assert (names(http), names(http, "guest"), names(http, "other")) == (["tiny", "poet"], ["tiny", "poet"], ["tiny"])
    assert complete(http, "poet", "other").status_code == 404
    again = http.post("/v1/adapters", json={"name": "poet", "path": "poet"}, headers=key("boss"))
    assert again.status_code == 400 and "is loaded already" in again.json()["error"]["message"]
    gone = http.delete("/v1/adapters/poet", headers=key("boss"))
    assert gone.json() == {"object": "list", "data": []} == http.get("/v1/adapters", headers=key("boss")).json()
    assert complete(http, "poet").status_code == 404 and names(http) == ["tiny"]
    assert http.delete("/v1/adapters/poet", headers=key("boss")).status_code == 404


def test_vllm_s_names_do_the_same(http: httpx.Client, root: Path) -> None:
    body = {"lora_name": "bard", "lora_path": str(root / "poet")}
    answer = http.post("/v1/load_lora_adapter", json=body, headers=key("boss"))
    assert answer.status_code == 200 and names(http) == ["tiny", "bard"], answer.text
    answer = http.post("/v1/unload_lora_adapter", json={"lora_name": "bard"}, headers=key("boss"))
    assert answer.status_code == 200 and names(http) == ["tiny"]


@pytest.mark.parametrize("path", ["/v1/adapters", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"])
def test_only_operators_may(http: httpx.Client, path: str) -> None:
    answer = http.post(path, json={"name": "x", "path": "poet"}, headers=key("guest"))
    assert answer.status_code == 403 and answer.json()["error"]["code"] == "operators_only"


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"name": "x", "path": "/etc"}, 400, "is no folder in"),
        ({"name": "x", "path": "../.."}, 400, "is no folder in"),
        ({"name": "tiny", "path": "poet"}, 400, "'tiny' is the model's own name"),
        ({"name": "x"}, 400, "path"),
        ({"name": "x", "path": "poet", "rank": 3}, 400, "rank"),
    ],
)
def test_wrong_bodies_are_named(http: httpx.Client, body: dict[str, object], status: int, message: str) -> None:
    answer = http.post("/v1/adapters", json=body, headers=key("boss"))
    assert answer.status_code == status and message in answer.json()["error"]["message"], answer.text


def test_a_server_without_a_folder_refuses_by_name(tiny_model_path: Path, root: Path) -> None:
    with phloem.Engine(model=str(tiny_model_path), precision="float32", num_slots=512, num_threads=1) as engine:
        app = create_app(engine.client, load_tokenizer(tiny_model_path), None, model_name="tiny")
        with live_server(app) as url:
            body = {"name": "poet", "path": str(root / "poet")}
            answer = httpx.post(f"{url}/v1/adapters", json=body, timeout=60)
            assert answer.status_code == 400 and "start it with --adapter-folder DIR" in answer.text
