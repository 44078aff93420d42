"""Images in the language and over HTTP, on a tiny random vision model."""

import base64
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import phloem
import pytest
from phloem import assistant, function, gen, image, user
from phloem.protocol import errors
from phloem.runtime.server.app import create_app
from phloem.runtime.server.remote_images import AllowedHosts
from phloem.runtime.tokenizer import load_chat_template, load_tokenizer
from phloem.tests.runtime.server.doubles import live_server
from phloem.tests.runtime.server.image_host import ImageHost, image_host
from phloem.tests.runtime.vision.tiny_vision import picture

CAT, DOG = picture(21), picture(22, format="JPEG")


@pytest.fixture(scope="module")
def runtime(vision_folder: Path) -> Iterator[phloem.Engine]:
    with phloem.Engine(model=str(vision_folder), precision="float32", num_slots=4096, num_threads=1) as engine:
        yield engine


@pytest.fixture(scope="module")
def http(runtime: phloem.Engine, vision_folder: Path) -> Iterator[httpx.Client]:
    tokenizer = load_tokenizer(vision_folder)
    template = load_chat_template(vision_folder, tokenizer)
    app = create_app(runtime.client, tokenizer, template, model_name="tiny")
    with live_server(app) as url, httpx.Client(base_url=url, timeout=300) as client:
        yield client


@pytest.fixture
def host() -> Iterator[ImageHost]:
    with image_host() as host:
        host.image = CAT
        yield host


@pytest.fixture
def fetching(runtime: phloem.Engine, vision_folder: Path, host: ImageHost) -> Iterator[httpx.Client]:
    """A server that fetches images from ``host``."""
    tokenizer = load_tokenizer(vision_folder)
    template = load_chat_template(vision_folder, tokenizer)
    hosts = AllowedHosts([f"127.0.0.1:{host.port}"])
    app = create_app(runtime.client, tokenizer, template, model_name="tiny", image_hosts=hosts)
    with live_server(app) as url, httpx.Client(base_url=url, timeout=300) as client:
        yield client


@function
def looks(s, picture, question="what?"):
    s += user("look: " + image(picture) + question)
    s += assistant(gen("answer", max_tokens=8, temperature=0.0, ignore_eos=True))


def test_a_program_takes_images_as_bytes_and_paths(runtime: phloem.Engine, tmp_path: Path) -> None:
    (tmp_path / "cat.png").write_bytes(CAT)
    runtime.flush_cache()  # other tests use the same pictures
    first = looks.run(CAT, backend=runtime)
    again = looks.run(str(tmp_path / "cat.png"), backend=runtime)
    other = looks.run(DOG, backend=runtime)
    assert first["answer"] == again["answer"] != other["answer"]
    again.sync()
    assert again.stats()["cached_tokens"] == again.stats()["prompt_tokens"] - 1
    assert other.stats()["cached_tokens"] < 20


def test_a_hostile_image_fails_the_program_by_name(runtime: phloem.Engine) -> None:
    with pytest.raises(
        errors.DependencyFailed,
        match="an earlier op failed: 9 bytes that begin with 6e 6f 20 69 6d 61 67 65 are no image",
    ):
        looks.run(b"no image!", backend=runtime)["answer"]


def data_url(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def image_part(url: str) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": url}}


def ask(http: httpx.Client, *parts: str | bytes | dict[str, object], **changes: object) -> httpx.Response:
    content: list[object] = []
    for part in parts:
        if isinstance(part, bytes):
            part = image_part(data_url(part))
        content.append({"type": "text", "text": part} if isinstance(part, str) else part)
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 8, "temperature": 0.0}
    return http.post("/v1/chat/completions", json={"ignore_eos": True, **body, **changes})


def test_a_chat_with_data_urls_says_what_the_program_says(http: httpx.Client, runtime: phloem.Engine) -> None:
    found = ask(http, "look: ", CAT, "what?").json()
    assert found["choices"][0]["message"]["content"] == looks.run(CAT, backend=runtime)["answer"]
    assert found["usage"]["prompt_tokens"] > 60
    other = ask(http, "look: ", DOG, "what?").json()
    assert other["choices"][0]["message"]["content"] != found["choices"][0]["message"]["content"]
    two = ask(http, CAT, DOG, "which?").json()
    assert two["usage"]["prompt_tokens"] > found["usage"]["prompt_tokens"] + 40


def test_a_text_that_spells_the_image_token_stays_text(http: httpx.Client) -> None:
    plain = ask(http, "an <image> and").json()["usage"]["prompt_tokens"]
    assert plain == ask(http, "an (image) and").json()["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("https://example.com/cat.png", "images are not fetched; send a data URL"),
        ("file:///etc/passwd", "images are not fetched"),
        ("data:image/png;base64,@@@", "a data URL whose base64 is damaged"),
        ("data:image/png;base64,", "an image of 0 bytes"),
        (data_url(b"no image!"), "are no image that is read; send one of JPEG, PNG, WEBP, GIF"),
        ("data:image/png;base64," + "A" * (12 << 20), "bytes, but the limit is 8,388,608; send a smaller file"),
    ],
    ids=["https", "file", "base64", "empty", "no image", "large"],
)
def test_a_bad_image_url_is_a_bad_request(http: httpx.Client, url: str, says: str) -> None:
    content = [{"type": "image_url", "image_url": {"url": url}}]
    answer = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": content}]})
    assert answer.status_code == 400 and says in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("role", "part", "says"),
    [
        ("system", {"type": "image_url", "image_url": {"url": "data:"}}, "images belong to messages of role 'user'"),
        ("user", {"type": "image_url", "image_url": "data:"}, "an image part is {"),
        ("user", {"type": "image_url", "image_url": {"url": "data:", "detail": "low"}}, "detail 'low' of an image"),
        ("user", {"type": "input_audio", "input_audio": {}}, "'input_audio' is not supported"),
    ],
)
def test_a_bad_part_is_refused_by_name(http: httpx.Client, role: str, part: dict[str, object], says: str) -> None:
    answer = http.post("/v1/chat/completions", json={"messages": [{"role": role, "content": [part]}]})
    assert answer.status_code == 400 and says in answer.json()["error"]["message"]


def test_the_other_apis_read_images_as_a_chat_does(http: httpx.Client) -> None:
    chat = ask(http, "look: ", CAT, "what?", ignore_eos=False).json()
    expected = chat["choices"][0]["message"]["content"]
    assert expected
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(CAT).decode()}
    texts = [{"type": "text", "text": "look: "}, {"type": "text", "text": "what?"}]
    limits = {"temperature": 0.0}
    content = [texts[0], {"type": "image", "source": source}, texts[1]]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 8, **limits}
    found = http.post("/v1/messages", json=body).raise_for_status().json()
    assert found["content"][0]["text"] == expected
    usage = found["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == chat["usage"]["prompt_tokens"]
    parts = [{"type": "input_text", "text": "look: "}, {"type": "input_image", "image_url": data_url(CAT)}]
    item = {"role": "user", "content": [*parts, {"type": "input_text", "text": "what?"}]}
    body = {"input": [item], "max_output_tokens": 8, "store": False, **limits}
    found = http.post("/v1/responses", json=body).raise_for_status().json()
    assert found["output"][0]["content"][0]["text"] == expected
    assert found["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("path", "part", "says"),
    [
        (
            "/v1/messages",
            {"type": "image", "source": {"type": "url", "url": "https://a.b/c"}},
            "images are not fetched",
        ),
        (
            "/v1/messages",
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "@@@"}},
            "whose base64 is damaged",
        ),
        (
            "/v1/messages/count_tokens",
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
            "an image's tokens are not counted",
        ),
        ("/v1/responses", {"type": "input_image", "image_url": "https://a.b/c"}, "images are not fetched"),
        ("/v1/responses", {"type": "input_image", "image_url": "data:", "file_id": "f"}, "file_id"),
    ],
)
def test_the_other_apis_refuse_images_that_the_request_does_not_hold(
    http: httpx.Client, path: str, part: dict[str, object], says: str
) -> None:
    turn = [{"role": "user", "content": [part]}]
    body = {"input": turn, "store": False} if "responses" in path else {"messages": turn}
    answer = http.post(path, json=body if path != "/v1/messages" else {"max_tokens": 8, **body})
    assert answer.status_code == 400 and says in answer.json()["error"]["message"], answer.text


def test_remote_images_of_all_three_apis_are_read_as_sent_ones_are(
    fetching: httpx.Client, host: ImageHost, http: httpx.Client
) -> None:
    expected = ask(http, "look: ", CAT, "what?", ignore_eos=False).json()["choices"][0]["message"]["content"]
    url = host.url("/to?/cat.png")
    found = ask(fetching, "look: ", image_part(url), "what?", ignore_eos=False).json()
    assert found["choices"][0]["message"]["content"] == expected
    content: list[object] = [
        {"type": "text", "text": "look: "},
        {"type": "image", "source": {"type": "url", "url": url}},
    ]
    messages = [{"role": "user", "content": [*content, {"type": "text", "text": "what?"}]}]
    body: dict[str, object] = {"messages": messages, "max_tokens": 8, "temperature": 0.0}
    assert fetching.post("/v1/messages", json=body).json()["content"][0]["text"] == expected
    content = [{"type": "input_text", "text": "look: "}, {"type": "input_image", "image_url": url}]
    item = {"role": "user", "content": [*content, {"type": "input_text", "text": "what?"}]}
    body = {"input": [item], "max_output_tokens": 8, "temperature": 0.0, "store": False}
    assert fetching.post("/v1/responses", json=body).json()["output"][0]["content"][0]["text"] == expected
    assert len(host.asked) == 6


def test_a_remote_file_that_is_no_image_is_refused_by_its_content(fetching: httpx.Client, host: ImageHost) -> None:
    host.image = b"<html>no image</html>"
    answer = ask(fetching, image_part(host.url("/cat.png")))
    assert answer.status_code == 400 and "are no image that is read" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("url", "changes", "says"),
    [
        ("http://elsewhere.example/cat.png", {}, "fetches no images from 'elsewhere.example'; send a data URL"),
        ("/cat.png", {"model": "other"}, "'other' is not served here"),
        ("/cat.png", {"stop": 5}, "stop"),
        ("/none", {}, "was answered with status 404"),
    ],
)
def test_a_refused_request_says_why_and_calls_no_other_host(
    fetching: httpx.Client, host: ImageHost, url: str, changes: dict[str, object], says: str
) -> None:
    answer = ask(fetching, image_part(url if "//" in url else host.url(url)), **changes)
    assert answer.status_code in (400, 404) and says in answer.json()["error"]["message"], answer.text
    assert [path for path, _ in host.asked] == (["/none"] if url == "/none" else [])


def test_other_requests_are_answered_while_an_image_is_fetched(fetching: httpx.Client, host: ImageHost) -> None:
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(ask, fetching, "look: ", image_part(host.url("/slow")), "what?")
        while not host.asked:
            time.sleep(0.001)
        assert ask(fetching, "hello").status_code == 200
        assert not coming.done()
        host.go_on.set()
        assert coming.result().status_code == 200
