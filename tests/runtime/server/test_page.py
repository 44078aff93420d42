"""The page at ``/``: what is served, that it loads nothing from elsewhere, and the routes that it reads.

``tests/browser`` opens it in Chromium.
"""

import re
import time

import httpx
import phloem
import pytest
from phloem.runtime.server.app import create_app
from phloem.runtime.server.page import page_files
from phloem.runtime.tokenizer import load_tokenizer
from phloem.tests.runtime.server.doubles import live_server

FILES = {name: body.decode() for name, body in page_files().items()}
HTML = FILES["index.html"]
SCRIPTS = {name: text for name, text in FILES.items() if name.endswith(".js")}
IDS = re.findall(r'\bid="([^"]+)"', HTML)


def test_the_files_are_served_with_their_types_and_a_strict_policy(serve):
    server = serve(api_key="secret")
    anyone = httpx.Client(base_url=server.url)
    index = anyone.get("/")
    assert index.status_code == 200 and index.headers["content-type"] == "text/html; charset=utf-8"
    assert index.text == HTML
    policy = index.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self';" in policy and "unsafe" not in policy
    for path in re.findall(r'(?:href|src)="(page/[^"]+)"', HTML):
        found = anyone.get(f"/{path}")
        assert found.status_code == 200 and found.text == FILES[path.removeprefix("page/")]
        assert found.headers["content-type"].startswith(("text/css", "text/javascript"))
        assert found.headers["x-content-type-options"] == "nosniff"
        again = anyone.get(f"/{path}", headers={"if-none-match": found.headers["etag"]})
        assert again.status_code == 304 and not again.content
    for name in ("none.js", "__init__.py", "..%2Fapp.py"):
        assert anyone.get(f"/page/{name}").status_code == 404
    for path in ("/engines", "/cache_nodes", "/v1/models"):
        assert anyone.get(path).status_code == 401, "the page's data needs the key"
    anyone.close()


def test_without_the_page_there_is_none(serve):
    server = serve(has_page=False)
    assert server.http.get("/").status_code == 404 and server.http.get("/page/main.js").status_code == 404
    assert server.http.get("/v1/models").status_code == 200


def test_nothing_is_loaded_from_elsewhere_and_nothing_is_inline():
    for name, text in FILES.items():
        assert set(re.findall(r"(?:https?:)?//[\w.]+\.\w+[^\s\"'`]*", text)) <= {"http://www.w3.org/2000/svg"}, name
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|\sstyle=", HTML)
    for name, text in SCRIPTS.items():
        assert not re.search(r"\beval\(|new Function|innerHTML|outerHTML|insertAdjacentHTML|document\.write", text), (
            name
        )
        for module in re.findall(r'from "\./([^"]+)"', text):
            assert module in SCRIPTS, f"{name} imports {module}"


def test_every_id_that_is_named_exists_once():
    assert len(IDS) == len(set(IDS))
    named = re.findall(r'\b(?:for|aria-controls|aria-labelledby)="([^"]+)"', HTML)
    named += [one for several in re.findall(r'aria-describedby="([^"]+)"', HTML) for one in several.split()]
    named += [one for text in SCRIPTS.values() for one in re.findall(r'\$\("([\w-]+)"\)', text)]
    assert set(named) <= set(IDS)
    fields = re.findall(r"<(?:input|textarea|select)[^>]*\bid=\"([^\"]+)\"", HTML)
    assert len(fields) > 10 and set(fields) <= set(re.findall(r'\bfor="([^"]+)"', HTML)), "every field has a label"


def test_every_route_that_the_page_asks_exists(serve):
    server = serve()
    asked = {path for text in SCRIPTS.values() for path in re.findall(r'(?:get|request)\([`"]([\w/]+)', text)}
    assert asked == {"v1/models", "v1/welcome", "v1/chat/completions", "v1/programs", "engines", "cache_nodes"}
    for path in asked:
        assert server.http.get(f"/{path}").status_code != 404


@pytest.fixture(scope="module")
def real(tiny_model_path):
    """A server over a real engine with the tiny model."""
    tokenizer = load_tokenizer(tiny_model_path)
    with phloem.Runtime(model=str(tiny_model_path), num_slots=512, max_running=2) as runtime:
        app = create_app(runtime.client, tokenizer, None, model_name="tiny")
        with live_server(app) as url, httpx.Client(base_url=url, timeout=120) as http:
            yield http


def test_engines_and_cache_nodes_show_what_the_engine_has_done(real):
    body = {"prompt": ["the sap rises", "the sap falls"], "max_tokens": 4, "ignore_eos": True}
    assert real.post("/v1/completions", json=body).status_code == 200
    found = real.get("/engines").json()
    engine = found["engines"]["0"]
    assert engine["metrics"]["steps"] == len(engine["batch"]["steps"]) > 0 and found["replicas"] == []
    assert engine["batch"]["sequences"] == [] and found["now_s"] <= time.time()
    tree = real.get("/cache_nodes").json()
    assert tree["replicas"] == ["0"] and sum(node[2] for node in tree["nodes"]) == tree["slots"]["cached"] > 0
    beginnings = [node[7] for node in tree["nodes"] if node[1] == -1]
    assert any(text.startswith("the sap") for text in beginnings)
    wrong = real.get("/cache_nodes?replica=9")
    assert wrong.status_code == 400 and "replica='9' is not one of: 0" in wrong.json()["error"]["message"]


def test_what_a_long_answer_shows_while_it_runs(real):
    with real.stream(
        "POST", "/v1/completions", json={"prompt": "sap " * 20, "max_tokens": 300, "ignore_eos": True, "stream": True}
    ) as answer:
        chunks = answer.iter_lines()
        next(chunks)
        (row,) = real.get("/engines").json()["engines"]["0"]["batch"]["sequences"]
        assert row["state"] == "running" and row["max_tokens"] == 300 and row["name"] == "/v1/completions"
        used = [node for node in real.get("/cache_nodes").json()["nodes"] if node[3] > 0]
        assert used and all(node[8] == ["/v1/completions"] for node in used)
