"""Embeddings through the engine: one vector for each input, whatever runs beside it; other requests refused by name."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import phloem
import pytest
from phloem.protocol.errors import (
    EngineLost,
    InvalidParams,
    InvalidRequest,
    LimitExceeded,
    PhloemError,
    PromptTooLong,
    Unsupported,
)
from phloem.protocol.messages import (
    Answer,
    Bye,
    ClientMessage,
    Embed,
    Embedded,
    Forget,
    Query,
    RuntimeMessage,
    Welcome,
)
from phloem.runtime.config import EngineConfig
from phloem.runtime.encoder.engine import MAX_WAITING_SIZE, EncoderEngine, encoder_engine
from phloem.runtime.encoder.model import Encoder
from phloem.runtime.encoder.tokens import load_encoder_tokenizer
from phloem.tests.runtime.encoder.tiny_encoder import TEXTS, make_encoder, reference
from phloem.tests.runtime.string_engine import StringEngine

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module")
def wanted(folder: Path) -> np.ndarray:
    tokenizer = load_encoder_tokenizer(folder)
    return reference(folder, [tokenizer.encode(text) for text in TEXTS]).numpy()


@pytest.fixture
def engine(folder: Path) -> EncoderEngine:
    """Its steps run 64 tokens."""
    return encoder_engine(EngineConfig(model=str(folder), max_step_tokens=64, max_waiting=8))


@pytest.fixture(scope="module")
def thread(folder: Path) -> Iterator[phloem.Engine]:
    with phloem.Engine(model=str(folder)) as engine:
        yield engine


def vectors_of(answer: object) -> np.ndarray:
    assert isinstance(answer, Answer) and isinstance(answer.value, Embedded), answer
    return np.stack([np.frombuffer(vector, "<f4") for vector in answer.value.vectors])


def run(engine: EncoderEngine, *sent: tuple[bytes, Embed]) -> dict[bytes, Answer]:
    """The answer to each client, which sends one request."""
    outbox = engine.step(list(sent))
    while engine.has_work:
        outbox += engine.step([])
    assert len(outbox) == len(sent)
    return {client: answer for client, answer in outbox if isinstance(answer, Answer)}


def test_requests_share_steps_and_get_their_own_vectors(engine: EncoderEngine, wanted: np.ndarray) -> None:
    answers = run(engine, (b"a", Embed(1, list(TEXTS))), (b"b", Embed(1, [TEXTS[1]])), (b"c", Embed(2, TEXTS[::-1])))
    np.testing.assert_allclose(vectors_of(answers[b"a"]), wanted, atol=1e-5)
    np.testing.assert_allclose(vectors_of(answers[b"b"]), wanted[1:2], atol=1e-5)
    np.testing.assert_allclose(vectors_of(answers[b"c"]), wanted[::-1], atol=1e-5)


def test_a_long_request_does_not_keep_a_short_one_waiting(engine: EncoderEngine) -> None:
    outbox = engine.step([(b"long", Embed(1, ["the " * 30] * 50)), (b"short", Embed(1, ["rain"]))])
    assert [client for client, _ in outbox] == [b"short"] and engine.has_work


@pytest.mark.parametrize("wrong", ["the " * 50, [5] * 40, [], [99999]])
def test_a_wrong_input_fails_its_own_request_alone(
    engine: EncoderEngine, wanted: np.ndarray, wrong: str | list[int]
) -> None:
    bad = Embed(1, [TEXTS[0], wrong, TEXTS[1]], truncate=False)
    answers = run(engine, (b"bad", bad), (b"good", Embed(1, list(TEXTS))))
    error = answers[b"bad"].error
    assert error is not None and error.where == "input.1"
    np.testing.assert_allclose(vectors_of(answers[b"good"]), wanted, atol=1e-5)


def test_what_waits_is_bounded(engine: EncoderEngine) -> None:
    full = engine.step([(b"%d" % i, Embed(1, ["the " * 30] * 40)) for i in range(10)])
    kinds = [answer.error.kind for _, answer in full if isinstance(answer, Answer) and answer.error is not None]
    assert kinds == ["Overloaded", "Overloaded"]
    engine.close()
    (huge,) = engine.step([(b"a", Embed(1, ["x" * (MAX_WAITING_SIZE + 1)]))])
    assert isinstance(huge[1], Answer) and huge[1].error is not None and huge[1].error.kind == "Overloaded"


def test_a_client_that_leaves_takes_its_request_along(engine: EncoderEngine) -> None:
    engine.step([(b"gone", Embed(1, ["the " * 30] * 50))])
    assert engine.step([(b"gone", Bye())]) == [] and not engine.has_work


def test_a_request_that_is_forgotten_runs_no_further(engine: EncoderEngine) -> None:
    engine.step([(b"a", Embed(1, ["the " * 30] * 50)), (b"b", Embed(1, ["the " * 30] * 4))])
    outbox = engine.step([(b"a", Forget(1))])
    while engine.has_work:
        outbox += engine.step([])
    assert [client for client, _ in outbox] == [b"b"]


def test_a_cancelled_call_reaches_the_engine() -> None:
    """A string engine that tells what it was sent stands for the encoder's."""
    forgotten = threading.Event()

    class Deaf(StringEngine):
        def welcome(self) -> Welcome:
            return msgspec.structs.replace(super().welcome(), capabilities=("embed",))

        def step(self, inbox: list[tuple[bytes, ClientMessage]]) -> list[tuple[bytes, RuntimeMessage]]:
            sent = {type(message): message for _, message in inbox}
            if Embed in sent:
                asked.append(sent[Embed])
            if sent.get(Forget) == Forget(asked[0].id if asked else 0):
                forgotten.set()
            return super().step(inbox)

    asked: list[Any] = []
    with phloem.Engine.over(Deaf()) as engine:
        assert engine.client.embed(["rain"]).cancel()
        assert forgotten.wait(60) and len(asked) == 1


def test_a_failed_step_answers_each_request_once(engine: EncoderEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(Encoder, "run", broken)
    with pytest.raises(RuntimeError):
        engine.step([(b"a", Embed(1, ["rain", "code"])), (b"b", Embed(1, ["the " * 30] * 50))])
    failed = engine.fail_all(EngineLost("gone"))
    assert sorted(client for client, _ in failed) == [b"a", b"b"] and not engine.has_work


def test_queries_of_a_cache_are_refused_by_name(engine: EncoderEngine) -> None:
    (answer,) = engine.step([(b"a", Query(1, "cache_tree"))])
    assert isinstance(answer[1], Answer) and answer[1].error is not None and "keeps no cache" in answer[1].error.message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculative": "off"}, "speculative='off'.*is an encoder, which has no such option"),
        ({"num_slots": 9}, "num_slots=9"),
        ({"precision": "int4"}, "encoders run in float32"),
        ({"max_seq_len": 33}, "max_seq_len 33, but .* takes texts of 1 to 32 tokens"),
        ({"max_step_tokens": -1}, "must be at least 1"),
        ({"device": "tpu"}, "device 'tpu'"),
    ],
)
def test_options_that_would_do_nothing_are_refused(folder: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises((InvalidParams, Unsupported), match=message):
        phloem.Engine(model=str(folder), **options)


def test_an_engine_embeds_texts_and_token_ids(thread: phloem.Engine, wanted: np.ndarray) -> None:
    found = thread.embed(TEXTS)
    assert found.dtype == np.float32 and found.shape == (len(TEXTS), 48)
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    np.testing.assert_allclose(thread.embed(TEXTS[0]), wanted[0], atol=1e-5)
    np.testing.assert_allclose(thread.embed([[2, 10, 3]]), thread.embed(["rain"]), atol=1e-6)
    assert thread.encode("rain") == {"embedding": thread.embed("rain").tolist()}
    assert len(thread.embed(["rain"] * 600)) == 600


@pytest.mark.parametrize(
    ("inputs", "kind", "message"),
    [
        ([], InvalidRequest, "input is empty"),
        (["rain", "the " * 50], PromptTooLong, r"input\.1 has 52 tokens, but the model takes 32"),
        (["\ud800"], InvalidRequest, "cannot be sent"),
    ],
)
def test_wrong_inputs_raise(thread: phloem.Engine, inputs: list[str], kind: type[PhloemError], message: str) -> None:
    with pytest.raises(kind, match=message):
        thread.embed(inputs, truncate=False)


def test_too_many_inputs_of_one_message_are_refused(thread: phloem.Engine) -> None:
    with pytest.raises(LimitExceeded, match="2,049 inputs, but one request may have 2,048"):
        thread.client.embed(["rain"] * 2049)


def test_an_encoder_runs_no_programs_and_pools_as_its_folder_says(thread: phloem.Engine) -> None:
    with pytest.raises(Unsupported, match="is an encoder, which gives embeddings and cannot run programs"):
        thread.generate("Hello")
    with pytest.raises(Unsupported, match="pooling='mean'.*an encoder pools as its folder says"):
        thread.embed("rain", pooling="mean")


@pytest.mark.parametrize("replicas", [None, 2])
def test_a_process_gives_the_same_vectors(folder: Path, wanted: np.ndarray, replicas: int | None) -> None:
    with phloem.Runtime(model=str(folder), replicas=replicas) as runtime:
        np.testing.assert_allclose(runtime.embed(TEXTS), wanted, atol=1e-5)
        with pytest.raises(PromptTooLong):
            runtime.embed(["the " * 50], truncate=False)
