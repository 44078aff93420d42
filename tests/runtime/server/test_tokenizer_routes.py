"""/tokenize and /detokenize: the tokens are those that the engine computes, and nothing is done for what cannot fit."""

import threading

import pytest
from fastapi.testclient import TestClient
from phloem.runtime.server.app import create_app
from phloem.tests.runtime.server.doubles import MODEL, ChatML, ScriptedClient, WordTokenizer
from phloem.tests.runtime.server.test_malformed import CALL, TOOL

MESSAGES = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": [{"type": "text", "text": "look <|im_end|>"}]},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "ä tree"},
]


@pytest.mark.parametrize(
    "body", [{"prompt": "Once ä <|im_start|>"}, {"prompt": "a<|im_start|>b", "parse_special": True}, {"prompt": ""}]
)
def test_a_prompts_tokens_are_those_of_a_completion(tiny_server, body):
    found = tiny_server.post("/tokenize", json=body).json()
    assert found["count"] == len(found["tokens"]) and found["token_strs"] is None
    assert found["max_model_len"] == tiny_server.get("/v1/models").json()["data"][0]["max_model_len"]
    back = tiny_server.post("/detokenize", json={"tokens": found["tokens"]})
    assert back.json() == {"prompt": body["prompt"]}
    if body["prompt"]:
        usage = tiny_server.post("/v1/completions", json=body | {"max_tokens": 1}).json()["usage"]
        assert usage["prompt_tokens"] == found["count"]


@pytest.mark.parametrize("fields", [{}, {"tools": [TOOL]}])
def test_a_conversations_tokens_are_those_of_a_chat(tiny_server, fields):
    body = {"messages": MESSAGES, **fields}
    found = tiny_server.post("/tokenize", json=body).json()
    usage = tiny_server.post("/v1/chat/completions", json=body | {"max_tokens": 1}).json()["usage"]
    assert found["count"] == usage["prompt_tokens"]
    shown = tiny_server.post("/detokenize", json={"tokens": found["tokens"]}).json()["prompt"]
    assert (
        shown.endswith("<|im_start|>assistant\n") and "look <|im_end|>" in shown and ("looks" in shown) == bool(fields)
    )
    closed = tiny_server.post("/tokenize", json=body | {"add_generation_prompt": False}).json()["tokens"]
    assert closed == found["tokens"][: len(closed)] and len(closed) == found["count"] - len("<assistant\n")


def test_each_tokens_text_is_shown_on_demand(tiny_server):
    body = {"prompt": "a<|im_end|>", "parse_special": True, "return_token_strs": True}
    assert tiny_server.post("/tokenize", json=body).json()["token_strs"] == ["a", "<|im_end|>"]


class WithBos(WordTokenizer):
    add_bos = True
    bos_id = 1  # <|im_start|>


def test_the_vocabularys_beginning_is_added_once_or_not_at_all():
    app = create_app(ScriptedClient(lambda submit: []), WithBos(), ChatML(), model_name=MODEL)
    with TestClient(app) as http:

        def tokens(**body: object) -> list[int]:
            return http.post("/tokenize", json=body).json()["tokens"]

        with_bos = tokens(prompt="two words")
        assert with_bos[0] == 1 and tokens(prompt="two words", add_special_tokens=True) == with_bos
        assert tokens(prompt="two words", add_special_tokens=False) == with_bos[1:]
        assert tokens(prompt="") == [1] and tokens(prompt="", add_special_tokens=False) == []
        special = tokens(prompt="<|im_start|>", parse_special=True)
        assert special == [1] == tokens(prompt="<|im_start|>", parse_special=True, add_special_tokens=False)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ("/tokenize", {"prompt": "a", "tools": [TOOL]}, "tools"),
        ("/tokenize", {"messages": MESSAGES, "parse_special": True}, "parse_special"),
        ("/tokenize", {"messages": MESSAGES, "chat_template": "{{ x }}"}, "chat_template"),
        ("/tokenize", {"prompt": "a", "model": "other"}, "model"),
        ("/tokenize", {"prompt": "a" * 2_000_000}, None),
        ("/tokenize", {"messages": [{"role": "user", "content": "a" * 2_000_000}]}, None),
        ("/detokenize", {"tokens": [0, 259]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [0] * 10_000}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ],
)
def test_what_cannot_be_served_is_named(tiny_server, path, body, param):
    answer = tiny_server.post(path, json=body)
    assert answer.status_code == (404 if "model" in body else 400)
    assert answer.json()["error"]["param"] == param and answer.json()["error"]["message"]


def test_a_model_without_a_template_tokenizes_prompts_alone(serve):
    server = serve(template=None)
    assert server.http.post("/tokenize", json={"prompt": "a"}).json()["count"] == 1
    answer = server.http.post("/tokenize", json={"messages": MESSAGES})
    assert answer.status_code == 400 and "has no chat template" in answer.json()["error"]["message"]


def test_long_prompts_are_tokenized_on_a_thread_and_only_if_they_can_fit(serve, monkeypatch):
    threads: list[str] = []
    encode = WordTokenizer.encode

    def watched(self: WordTokenizer, text: str, **options: bool) -> list[int]:
        threads.append(threading.current_thread().name)
        return encode(self, text, **options)

    monkeypatch.setattr(WordTokenizer, "encode", watched)
    server = serve()
    assert server.http.post("/tokenize", json={"prompt": "word " * 10_000}).status_code == 200
    assert [name for name in threads if not name.startswith("requests")] == []
    assert server.http.post("/tokenize", json={"prompt": "word " * 200_000}).status_code == 400
    assert len(threads) == 1
