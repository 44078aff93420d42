"""The op ``Embedding``: pooled hidden states equal transformers', alone and among other work."""

import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from phloem.protocol import messages as m
from phloem.protocol import ops as o
from phloem.runtime.config import EngineConfig
from phloem.runtime.engine import EngineCore
from phloem.runtime.tokenizer import load_tokenizer
from phloem.tests.runtime.engine.driver import GREEDY, Driver, generate, prompts
from phloem.tests.runtime.models.hf_reference import hf_from_folder, hf_from_gguf, hf_hidden, pooled_vector

TEXTS = [text for text in prompts(12, seed=3, longest=500) if text]


def embed(texts: list[str], *, pooling: str = "last") -> list[o.AnyOp]:
    """Ops that compute the vector of each text; op 3i + 1 is text i's."""
    ops: list[o.AnyOp] = []
    for seq, text in enumerate(texts):
        ops.append(o.Text(op=3 * seq, seq=seq, text=text))
        ops.append(o.Embedding(op=3 * seq + 1, seq=seq, pooling=pooling))
        ops.append(o.Close(op=3 * seq + 2, seq=seq))
    return ops


def vectors(outcome: Any, count: int) -> np.ndarray:
    """float32 [count, C]."""
    return np.stack([np.frombuffer(outcome.value(3 * i + 1), "<f4") for i in range(count)])


@pytest.fixture(scope="module")
def wanted(tiny_model_path: Path) -> dict[str, np.ndarray]:
    """By pooling, the vectors of ``TEXTS`` by transformers, float32 [N, C]."""
    model, tokenizer = hf_from_folder(tiny_model_path), load_tokenizer(tiny_model_path)
    ids = [np.array(tokenizer.encode(text, at_start=True)) for text in TEXTS]
    hidden = [hf_hidden(model, one) for one in ids]
    return {how: np.stack([pooled_vector(one, pooling=how) for one in hidden]) for how in ("last", "mean")}


def assert_close(found: np.ndarray, wanted: np.ndarray, *, relative: float) -> None:
    np.testing.assert_allclose(np.linalg.norm(found, axis=-1), 1.0, atol=1e-6)
    assert np.linalg.norm(found - wanted, axis=-1).max() < relative


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_vectors_equal_transformers_hidden_states(driver: Driver, wanted: dict[str, np.ndarray], pooling: str) -> None:
    together = vectors(driver.run(embed(TEXTS, pooling=pooling)), len(TEXTS))
    assert_close(together, wanted[pooling], relative=1e-4)
    again = vectors(driver.run(embed(TEXTS, pooling=pooling)), len(TEXTS))  # prefixes are in the cache now
    assert_close(again, together, relative=1e-5)
    driver.engine.cache.flush()
    alone = np.concatenate([vectors(driver.run(embed([text], pooling=pooling)), 1) for text in TEXTS])
    assert_close(alone, together, relative=1e-5)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_chunks_of_a_prompt_preemptions_and_other_work_change_nothing(
    start: Any, wanted: dict[str, np.ndarray], pooling: str
) -> None:
    driver = start(num_slots=700, max_running=6, prefill_chunk=16, max_step_tokens=48)
    texts = driver.submit(embed(TEXTS, pooling=pooling))
    others = [driver.submit([o.Text(op=0, seq=0, text=text), o.Gen(op=1, seq=0, params=GREEDY)]) for text in TEXTS[:4]]
    driver.run()
    assert_close(vectors(texts, len(TEXTS)), wanted[pooling], relative=1e-4)
    quiet = start(num_slots=4096)
    assert [other.value(1) for other in others] == [generate(quiet, text)[0] for text in TEXTS[:4]]


def test_last_uses_the_cache_and_mean_computes_every_token(driver: Driver) -> None:
    text = "the sap rises in spring " * 8
    for pooling in ("last", "mean", "last", "mean"):
        outcome = driver.run(embed([text], pooling=pooling))
    cached = driver.run(embed([text])).done[1].meta
    whole = outcome.done[1].meta
    assert isinstance(cached, m.EmbeddingMeta) and cached.cached_tokens == cached.prompt_tokens - 1
    assert isinstance(whole, m.EmbeddingMeta) and whole.cached_tokens == 0
    stats = outcome.closed.stats
    assert (stats.prompt_tokens, stats.prefilled_tokens, stats.cached_tokens) == (whole.prompt_tokens,) * 2 + (0,)


def test_the_sequence_goes_on_after_its_vector(driver: Driver) -> None:
    text = "the sap rises"
    ops = [
        o.Text(op=0, seq=0, text=text),
        o.Embedding(op=1, seq=0, pooling="mean"),
        o.Gen(op=2, seq=0, params=GREEDY),
        o.Embedding(op=3, seq=0),
        o.Close(op=4, seq=0),
    ]
    outcome = driver.run(ops)
    assert outcome.value(2) == generate(driver, text)[0]
    assert outcome.value(1) == driver.run(embed([text], pooling="mean")).value(1)
    assert outcome.value(3) != driver.run(embed([text])).value(1) and len(outcome.value(3)) == len(outcome.value(1))
    assert set(outcome.ends.values()) == {1}


def test_a_cancelled_embedding_leaves_nothing_behind(start: Any) -> None:
    driver = start(num_slots=4096, prefill_chunk=16, max_step_tokens=32)
    outcome = driver.submit(embed(TEXTS, pooling="mean"), program="p")
    driver.step()
    driver.say(m.Cancel("p"))
    driver.run()
    assert outcome.closed is not None and outcome.failed and not driver.engine.programs.live
    assert {failed.error.kind for failed in outcome.failed.values()} == {"Cancelled"}
    driver.engine.check()


def test_a_text_that_is_too_long_fails_alone(start: Any) -> None:
    driver = start(num_slots=4096, max_seq_len=64)
    outcome = driver.run(embed(["sap", "sap " * 40]))
    assert len(np.frombuffer(outcome.value(1), "<f4")) == driver.engine.welcome().embedding_size
    error = outcome.failed[4].error
    assert error.kind == "PromptTooLong" and "but the context is 64 tokens" in error.message


def test_a_text_ends_with_the_token_that_its_tokenizer_puts_there(
    start: Any, tmp_path: Path, tiny_model_path: Path
) -> None:
    folder = shutil.copytree(tiny_model_path, tmp_path / "ends")
    spec = msgspec.json.decode((folder / "tokenizer.json").read_bytes())
    end = next(token for token in spec["added_tokens"] if token["special"])
    pieces = [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": end["content"], "type_id": 0}}]
    special = {end["content"]: {"id": end["content"], "ids": [end["id"]], "tokens": [end["content"]]}}
    spec["post_processor"] = {"type": "TemplateProcessing", "single": pieces, "pair": pieces, "special_tokens": special}
    (folder / "tokenizer.json").write_bytes(msgspec.json.encode(spec))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.text_end_id == end["id"] and load_tokenizer(tiny_model_path).text_end_id is None
    given = [o.Text(op=0, seq=0, text="sap"), o.Embedding(op=1, seq=0), o.Close(op=2, seq=0)]
    ids = (*tokenizer.encode("sap", at_start=True), end["id"])
    as_ids = [o.Special(op=0, seq=0, ids=ids), o.Embedding(op=1, seq=0), o.Close(op=2, seq=0)]
    engine = EngineCore(EngineConfig(model=str(folder), precision="float32", num_threads=1, num_slots=4096))
    try:
        driver = Driver(engine)
        assert_close(vectors(driver.run(given), 1), vectors(driver.run(as_ids), 1), relative=1e-5)
        assert driver.run(given).done[1].meta.prompt_tokens == len(ids)
    finally:
        engine.close()


@pytest.mark.model
def test_a_real_model_s_vectors_equal_transformers(smollm2_path: Path) -> None:
    texts = ["The sap rises in spring.", "Bäume haben Ringe. " * 6, "木"]
    model, tokenizer = hf_from_gguf(smollm2_path), load_tokenizer(smollm2_path)
    hidden = [hf_hidden(model, np.array(tokenizer.encode(text, at_start=True))) for text in texts]
    engine = EngineCore(EngineConfig(model=str(smollm2_path), precision="float32", num_threads=1, num_slots=1024))
    try:
        driver = Driver(engine)
        for pooling in ("last", "mean"):
            wanted = np.stack([pooled_vector(one, pooling=pooling) for one in hidden])
            found = vectors(driver.run(embed(texts, pooling=pooling)), len(texts))
            assert_close(found, wanted, relative=1e-4)
    finally:
        engine.close()
