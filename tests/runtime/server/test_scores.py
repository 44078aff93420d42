"""``/v1/score`` and ``/rerank`` of a decoder: log-probabilities of continuations and likelihoods of queries."""

import math
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from phloem.runtime.tokenizer import load_tokenizer
from phloem.tests.runtime.models.hf_reference import hf_from_folder, hf_logits

PAIRS = [("the sap rises ", "and falls"), ("the sap rises ", "zzz"), ("a", "b c d")]


def wanted(folder: Path, first: str, second: str) -> float:
    """The sum over the second text's tokens, by transformers."""
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode(first + second, at_start=True)
    start = len(tokenizer.encode(first, at_start=True))
    given = torch.tensor(ids).numpy().astype("int32")
    logprobs = hf_logits(hf_from_folder(folder), given).log_softmax(-1)
    return sum(float(logprobs[at - 1, ids[at]]) for at in range(start, len(ids)))


def test_scores_are_log_probabilities_of_continuations(tiny_server: httpx.Client, tiny_model_path: Path) -> None:
    firsts, seconds = [first for first, _ in PAIRS], [second for _, second in PAIRS]
    answer = tiny_server.post("/v1/score", json={"text_1": firsts, "text_2": seconds}).json()
    found = [entry["score"] for entry in answer["data"]]
    assert found == pytest.approx([wanted(tiny_model_path, *pair) for pair in PAIRS], rel=1e-2)
    assert [entry["index"] for entry in answer["data"]] == [0, 1, 2] and answer["object"] == "list"
    assert answer["usage"]["total_tokens"] >= sum(len(first + second) for first, second in PAIRS)
    one = tiny_server.post("/v1/score", json={"text_1": firsts[0], "text_2": seconds[:2]}).json()
    assert [entry["score"] for entry in one["data"]] == pytest.approx(found[:2], rel=1e-3)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"text_1": "a", "text_2": ["b", ""]}, "text_2 of pair 1 is empty"),
        ({"text_1": "a", "text_2": "b", "truncate": True}, "a decoder's texts are not cut"),
        ({"text_1": ["a", "b"], "text_2": ["c"] * 3}, "give as many of both, or one of either"),
        ({"text_1": "a " * 100_000, "text_2": "b"}, "but"),
        ({"text_1": "a", "text_2": "b", "model": 5}, "model"),
    ],
)
def test_wrong_scores_are_refused_by_name(tiny_server: httpx.Client, body: dict[str, Any], message: str) -> None:
    answer = tiny_server.post("/v1/score", json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and message in f"{error['message']} {error['param']}"
    assert tiny_server.post("/v1/score", json={"text_1": "a", "text_2": "b"}).status_code == 200


DOCUMENTS = ["A kitten is on a rug.", "It rains.", "木 and leaf"]


def likelihood(folder: Path, document: str, query: str) -> float:
    """Of the query's tokens, the geometric mean, by transformers."""
    asked = f"Passage: {document}\nPlease write a question based on this passage.\nQuestion:"
    num_tokens = len(load_tokenizer(folder).encode(f" {query}"))
    return math.exp(wanted(folder, asked, f" {query}") / num_tokens)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank"])
def test_documents_come_by_the_likelihood_of_the_query(
    tiny_server: httpx.Client, tiny_model_path: Path, path: str
) -> None:
    expected = [likelihood(tiny_model_path, document, "cats") for document in DOCUMENTS]
    answer = tiny_server.post(path, json={"query": "cats", "documents": DOCUMENTS}).json()
    found = {one["index"]: one["relevance_score"] for one in answer["results"]}
    assert [found[i] for i in range(3)] == pytest.approx(expected, rel=5e-2)  # the engine computes in bfloat16
    scores = [one["relevance_score"] for one in answer["results"]]
    assert scores == sorted(scores, reverse=True) and answer["usage"]["total_tokens"] > 0
    assert [one["document"]["text"] for one in answer["results"]] == [DOCUMENTS[i] for i in found]
    body = {"query": "cats", "documents": [{"text": text} for text in DOCUMENTS], "top_n": 1, "return_documents": False}
    (best,) = tiny_server.post(path, json=body).json()["results"]
    assert best.keys() == {"index", "relevance_score"} and best["index"] == answer["results"][0]["index"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": ""}, "query is empty"),
        ({"documents": []}, "documents"),
        ({"documents": ["a"] * 2049}, "2,048"),
        ({"documents": ["a " * 100_000]}, "but"),
        ({"truncate": True}, "a decoder's texts are not cut"),
        ({"rank_fields": ["text"]}, "rank_fields"),
        ({"model": 5}, "model"),
        ({"priority": False}, "only 0 is accepted"),
        ({"priority": 1}, "only 0 is accepted"),
    ],
)
def test_wrong_rerankings_are_refused_by_name(tiny_server: httpx.Client, change: dict[str, Any], message: str) -> None:
    body = {"query": "cats", "documents": ["a"]}
    answer = tiny_server.post("/rerank", json=body | change)
    error = answer.json()["error"]
    assert answer.status_code == 400 and message in f"{error['message']} {error['param']}", error
    assert tiny_server.post("/rerank", json=body).status_code == 200


@pytest.mark.model
def test_a_small_model_finds_the_passage_that_answers(smollm2_server: httpx.Client) -> None:
    documents = [
        "Bread is made of flour, water, salt and yeast, and rises before it is baked.",
        "The Seine is a river in France that flows through Paris into the English Channel.",
        "In chess the queen moves any number of squares along a row, a column or a diagonal.",
    ]
    for index, query in enumerate(
        ["How is bread made?", "Which river flows through Paris?", "How may the queen move?"]
    ):
        best = smollm2_server.post("/rerank", json={"query": query, "documents": documents}).json()["results"][0]
        assert best["index"] == index, query
