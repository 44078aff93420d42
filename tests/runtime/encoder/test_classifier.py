"""Classifiers and rerankers: their logits are those of transformers, alone, in a batch, in an engine and over HTTP."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import phloem
import pytest
import torch
import transformers
from phloem.protocol.errors import InvalidRequest, PromptTooLong, UnknownModel, Unsupported
from phloem.runtime.encoder.config import read_encoder_config
from phloem.runtime.encoder.model import load_encoder
from phloem.runtime.encoder.tokens import load_encoder_tokenizer
from phloem.runtime.server.app import create_app
from phloem.tests.runtime.encoder.tiny_encoder import change, make_encoder
from phloem.tests.runtime.server.doubles import live_server
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
NAME = "tiny-reranker"
QUERY = "cats on mats"
DOCUMENTS = ["The cat sat on the mat.", "rain", "Trees, trees and code! " * 4, "", "the rain, the rain"]
HEAD = "ForSequenceClassification"


@pytest.fixture(scope="module", params=["bert", "distilbert", "modernbert", "mpnet", "roberta", "xlm-roberta"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reranker. RoBERTa's have one token type."""
    types = 2 if request.param == "bert" else 1
    at = tmp_path_factory.mktemp(request.param)
    return make_encoder(at, request.param, head=HEAD, num_labels=1, type_vocab_size=types)


def logits_of(folder: Path, pairs: list[tuple[str, str]]) -> torch.Tensor:
    """transformers' logits, one pair after another, cut as its tokenizers cut pairs."""
    kind = transformers.AutoModelForSequenceClassification
    model = kind.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    found = []
    for first, second in pairs:
        options = {"truncation": True, "max_length": 32, "padding": False, "return_tensors": "pt"}
        given = tokenizer([first], [second], return_token_type_ids=True, **options)
        has_types = getattr(model.config, "type_vocab_size", 1) > 1
        types = {"token_type_ids": given["token_type_ids"]} if has_types else {}
        with torch.inference_mode():
            found.append(model(input_ids=given["input_ids"], **types).logits[0])
    return torch.stack(found)


@pytest.fixture(scope="module")
def wanted(folder: Path) -> torch.Tensor:
    return logits_of(folder, [(QUERY, document) for document in DOCUMENTS])


def test_logits_of_pairs_are_those_of_transformers(folder: Path, wanted: torch.Tensor) -> None:
    encoder, tokenizer = load_encoder(folder), load_encoder_tokenizer(folder)
    given = [tokenizer.encode_pair(QUERY, document) for document in DOCUMENTS]
    ids, firsts = [ids for ids, _ in given], [first for _, first in given]
    found = encoder.logits(ids, firsts)
    assert found.shape == (len(DOCUMENTS), 1) and max(map(len, ids)) == 32
    assert (found - wanted).abs().max() <= 1e-5
    for i in range(len(ids)):
        assert (encoder.logits([ids[i]], [firsts[i]]) - wanted[i]).abs().max() <= 1e-5
    assert encoder.logits([]).shape == (0, 1)
    torch.testing.assert_close(encoder.run(ids, firsts), wanted.sigmoid(), atol=1e-5, rtol=0)
    assert (wanted.max() - wanted.min()) > 0.1


def test_the_second_text_s_type_counts(tmp_path: Path) -> None:
    folder = make_encoder(tmp_path, head=HEAD, num_labels=1)
    encoder, tokenizer = load_encoder(folder), load_encoder_tokenizer(folder)
    ids, first = tokenizer.encode_pair(QUERY, DOCUMENTS[0])
    assert 0 < first < len(ids)
    assert (encoder.logits([ids], [first]) - encoder.logits([ids])).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("fields", "scores"),
    [
        ({"num_labels": 3}, "softmax"),
        ({"num_labels": 1}, "sigmoid"),
        ({"num_labels": 1, "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, "logits"),
        ({"num_labels": 3, "sbert_ce_default_activation_function": "torch.nn.Sigmoid"}, "sigmoid"),
    ],
)
def test_scores_are_what_the_config_says(fields: dict[str, Any], scores: str, tmp_path: Path) -> None:
    folder = make_encoder(tmp_path, head=HEAD, **fields)
    config = read_encoder_config(folder)
    assert config.scores == scores and len(config.labels) == fields["num_labels"]
    want = logits_of(folder, [("rain", "the cat")])
    want = {"softmax": want.softmax(1), "sigmoid": want.sigmoid(), "logits": want}[scores]
    ids, first = load_encoder_tokenizer(folder).encode_pair("rain", "the cat")
    torch.testing.assert_close(load_encoder(folder).run([ids], [first]), want, atol=1e-5, rtol=0)


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_modernbert_s_head_pools_as_its_config_says(pooling: str, tmp_path: Path) -> None:
    options = {"classifier_pooling": pooling, "classifier_bias": True, "classifier_activation": "relu"}
    folder = make_encoder(tmp_path, "modernbert", head=HEAD, num_labels=3, **options)
    pairs = [(QUERY, document) for document in DOCUMENTS]
    given = [load_encoder_tokenizer(folder).encode_pair(*pair) for pair in pairs]
    found = load_encoder(folder).logits([ids for ids, _ in given], [first for _, first in given])
    torch.testing.assert_close(found, logits_of(folder, pairs), atol=1e-5, rtol=1e-5)
    change(folder / "config.json", classifier_pooling="max")
    with pytest.raises(Unsupported, match="classifier_pooling 'max' is not served; served: cls, mean"):
        load_encoder(folder)


def test_a_classifier_s_texts_and_labels(tmp_path: Path) -> None:
    labels = {0: "good", 1: "bad", 2: "so"}
    folder = make_encoder(tmp_path, "roberta", head=HEAD, num_labels=3, id2label=labels, type_vocab_size=1)
    tokenizer = load_encoder_tokenizer(folder)
    want = load_encoder(folder).run([tokenizer.encode(text) for text in DOCUMENTS[:2]])
    with phloem.Engine(model=str(folder)) as engine:
        assert engine.welcome.labels == ("good", "bad", "so") and engine.welcome.capabilities == ("score",)
        np.testing.assert_allclose(engine.classify(DOCUMENTS[:2]), want, atol=1e-6)
        np.testing.assert_allclose(engine.classify(DOCUMENTS[0]), want[0], atol=1e-6)
        assert engine.classify([("a", "b")] * 300).shape == (300, 3)
        with pytest.raises(Unsupported, match=r"a classifier of 3 labels, but a reranker has one; use classify\(\)"):
            engine.rerank("a", ["b"])
        with pytest.raises(Unsupported, match="is a classifier, which scores texts and gives no embeddings"):
            engine.embed("rain")
        with pytest.raises(InvalidRequest, match="both texts and pairs of texts"):
            engine.classify(["a", ("a", "b")])
        with pytest.raises(PromptTooLong, match="input.1 has 52 tokens, but the model takes 32"):
            engine.classify(["a", "the " * 50], truncate=False)
        with pytest.raises(InvalidRequest, match="input is empty"):
            engine.classify([])


def test_a_reranker_s_documents_and_an_embedding_model_s_refusal(
    folder: Path, wanted: torch.Tensor, tmp_path: Path
) -> None:
    with phloem.Engine(model=str(folder)) as engine:
        np.testing.assert_allclose(engine.rerank(QUERY, DOCUMENTS), wanted[:, 0].sigmoid(), atol=1e-5)
    refusal = pytest.raises(Unsupported, match="gives embeddings and has no classification layer for scores")
    with phloem.Engine(model=str(make_encoder(tmp_path))) as engine, refusal:
        engine.rerank(QUERY, DOCUMENTS)


def test_replicas_give_the_same_scores(tmp_path: Path) -> None:
    folder = make_encoder(tmp_path, head=HEAD, num_labels=1)
    want = logits_of(folder, [(QUERY, document) for document in DOCUMENTS])[:, 0].sigmoid()
    with phloem.Runtime(model=str(folder), replicas=2) as runtime:
        for _ in range(3):
            np.testing.assert_allclose(runtime.rerank(QUERY, DOCUMENTS), want, atol=1e-5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["BertForTokenClassification"]}, "a BertForTokenClassification has an output layer"),
        ({"architectures": ["RobertaForSequenceClassification"]}, "a RobertaForSequenceClassification has an output"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.Tanh"}}, "scores by torch.nn.Tanh are not served"),
    ],
)
def test_other_heads_are_refused_by_name(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = make_encoder(tmp_path, head=HEAD, num_labels=1)
    change(folder / "config.json", **fields)
    with pytest.raises(Unsupported, match=message):
        read_encoder_config(folder)


@pytest.mark.parametrize("names", [[], {}, {"0": 5}, {"1": "a"}, "many"])
def test_labels_that_are_no_names_are_refused(names: Any, tmp_path: Path) -> None:
    folder = make_encoder(tmp_path, head=HEAD, num_labels=1)
    change(folder / "config.json", id2label=names)
    with pytest.raises(UnknownModel, match="id2label"):
        read_encoder_config(folder)


def test_a_classifier_without_its_layer_and_one_with_a_stranger_are_refused(tmp_path: Path) -> None:
    folder = make_encoder(tmp_path, head=HEAD, num_labels=1)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"other.weight": torch.zeros(2)}, folder / "model.safetensors")
    with pytest.raises(Unsupported, match="tensor other.weight belongs to no layer"):
        load_encoder(folder)
    del tensors["classifier.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UnknownModel, match=r"has no tensor classifier\.weight"):
        load_encoder(folder)


# -- over HTTP --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def http(folder: Path) -> Iterator[httpx.Client]:
    with phloem.Engine(model=str(folder)) as engine:
        app = create_app(engine.client, None, None, model_name=NAME)
        with live_server(app) as url, httpx.Client(base_url=url, timeout=300) as client:
            yield client


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank"])
def test_rerank_gives_the_most_relevant_first(http: httpx.Client, wanted: torch.Tensor, path: str) -> None:
    body = {"model": NAME, "query": QUERY, "documents": [DOCUMENTS[0], *({"text": text} for text in DOCUMENTS[1:])]}
    answer = http.post(path, json=body).json()
    scores = wanted[:, 0].sigmoid()
    order = scores.argsort(descending=True, stable=True).tolist()
    assert [found["index"] for found in answer["results"]] == order
    assert [found["document"]["text"] for found in answer["results"]] == [DOCUMENTS[i] for i in order]
    np.testing.assert_allclose([found["relevance_score"] for found in answer["results"]], scores[order], atol=1e-5)
    assert answer["model"] == NAME and answer["usage"]["total_tokens"] > 30
    few = http.post(path, json=body | {"top_n": 2, "return_documents": False}).json()["results"]
    assert [found["index"] for found in few] == order[:2] and "document" not in few[0]


@pytest.mark.parametrize(
    ("first", "second"), [(QUERY, DOCUMENTS), ([QUERY], DOCUMENTS), ([QUERY] * len(DOCUMENTS), DOCUMENTS)]
)
def test_score_gives_a_number_for_each_pair(http: httpx.Client, wanted: torch.Tensor, first: Any, second: Any) -> None:
    answer = http.post("/v1/score", json={"text_1": first, "text_2": second}).json()
    assert [entry["index"] for entry in answer["data"]] == list(range(len(DOCUMENTS)))
    np.testing.assert_allclose([x["score"] for x in answer["data"]], wanted[:, 0].sigmoid(), atol=1e-5)
    assert (answer["object"], answer["data"][0]["object"]) == ("list", "score")


def test_classify_gives_the_scores_of_every_label(tmp_path: Path) -> None:
    folder = make_encoder(tmp_path, head=HEAD, num_labels=3, id2label={0: "good", 1: "bad", 2: "so"})
    with phloem.Engine(model=str(folder)) as engine:
        want = engine.classify(DOCUMENTS)
        app = create_app(engine.client, None, None, model_name=NAME)
        with live_server(app) as url, httpx.Client(base_url=url, timeout=300) as client:
            answer = client.post("/classify", json={"input": DOCUMENTS, "model": NAME}).json()
            one = client.post("/classify", json={"input": DOCUMENTS[1]}).json()
            refused = client.post("/rerank", json={"query": "a", "documents": ["b"]})
            wrong = client.post("/classify", json={"input": "the " * 50, "truncate": False})
    np.testing.assert_allclose([entry["probs"] for entry in answer["data"]], want, atol=1e-6)
    labels = [("good", "bad", "so")[i] for i in want.argmax(1)]
    assert [entry["label"] for entry in answer["data"]] == labels and one["data"][0]["label"] == labels[1]
    assert answer["data"][2]["index"] == 2 and answer["data"][2]["num_classes"] == 3
    assert refused.status_code == wrong.status_code == 400
    assert "which gives scores of 3 labels at /classify" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/rerank", {"query": "a", "documents": []}, "documents"),
        ("/rerank", {"query": "a", "documents": ["a"], "top_n": -1}, "top_n"),
        ("/rerank", {"query": "a", "documents": ["a"], "rank_fields": ["x"]}, "'rank_fields' is not supported"),
        ("/rerank", {"query": "a", "documents": ["the " * 50], "truncate": False}, "but the model takes 32"),
        ("/rerank", {"query": "a", "documents": ["a"] * 2049}, "2,048"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "give as many of both, or one of either"),
        ("/v1/score", {"text_1": "a"}, "text_2"),
        ("/v1/embeddings", {"input": "a"}, "is an encoder, which gives scores at /v1/rerank and /v1/score"),
        ("/v1/chat/completions", {"messages": []}, "is an encoder, which gives scores at /v1/rerank and /v1/score"),
    ],
)
def test_wrong_requests_are_refused_by_name(http: httpx.Client, path: str, body: dict[str, Any], message: str) -> None:
    answer = http.post(path, json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and message in f"{error['message']} {error['param']}"
