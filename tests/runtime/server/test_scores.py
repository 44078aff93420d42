"""``/v1/score`` of a decoder: log-probabilities of continuations."""

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
