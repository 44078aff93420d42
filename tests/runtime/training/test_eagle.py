"""A head for a tiny model: it learns, runs as trained, is refused for other models, and changes no token."""

import numpy as np
import pytest
import torch
from phloem.cli import main
from phloem.protocol.errors import InvalidParams
from phloem.runtime.config import EngineConfig
from phloem.runtime.engine import EngineCore
from phloem.runtime.quantizing import quantize_model
from phloem.runtime.speculative import EagleGuesser, ModelDrafter, Speculation, load_eagle
from phloem.runtime.training import EagleModule, collect, train_eagle
from phloem.tests.runtime.engine.driver import Driver
from phloem.tests.runtime.models.tiny import make_tiny_model
from phloem.tests.runtime.speculative.oracle import Free
from phloem.tests.runtime.speculative.test_equality import check_equal, made, submit_all
from safetensors.torch import load_file

TEXT = "the sap rises in the spring, the sap falls in the autumn; " * 30


def start(path, **options) -> EngineCore:
    return EngineCore(EngineConfig(model=str(path), precision="float32", num_slots=4096, **options))


@pytest.fixture(scope="module")
def trained(tiny_model_path, tmp_path_factory):
    engine = start(tiny_model_path, speculative="off")
    corpus = collect(engine, ["say a word", "say two"], [TEXT], max_tokens=2000, answer_tokens=40)
    path = tmp_path_factory.mktemp("head") / "head.safetensors"
    report = train_eagle(engine, corpus, path, max_steps=30, num_tokens=200, window=48)
    driver = Driver(engine, check=False)
    outcomes = submit_all(driver, n=2)
    driver.run()
    engine.close()
    return path, report, made(outcomes), corpus


def test_the_corpus_has_each_token_s_feature(tiny_model_path, trained):
    *_, corpus = trained
    engine = start(tiny_model_path)
    for text in corpus.texts[:1] + corpus.texts[-1:]:
        assert text.features.shape == (len(text.token_ids), 64)
    answer = corpus.texts[-1]
    assert 0 < answer.first < len(answer.token_ids) <= answer.first + 40
    logits = engine.model.logits_of(answer.features)
    assert logits.shape[1] == engine.vocab_size
    engine.close()


def test_training_lowers_the_loss_and_the_head_agrees_with_the_model_more_than_by_chance(trained):
    _, report, *_ = trained
    assert report.steps == 30
    assert report.last_loss < 0.95 * report.first_loss
    assert report.first > 0.02 and 0.5 < report.known <= 1.0  # a random token: 0.004


def test_the_loaded_head_computes_what_was_trained(tiny_model_path, trained):
    path, _, _, corpus = trained
    engine = start(tiny_model_path)
    head = load_eagle(path, engine.model, vocab_hash=engine.tokenizer.vocab_hash)
    tensors = load_file(path)
    module = EagleModule(
        head.shape,
        eps=engine.model.config.rms_norm_eps,
        cos_sin=head.cos_sin,
        head=tensors["head.weight"].float(),
        norm=torch.ones(64),
    )
    with torch.no_grad():
        for name, weight in module.weights.items():
            weight.copy_(tensors[f"{name}.weight"].float())
        text = corpus.texts[0]
        embedded = engine.model.embedding.weight[text.token_ids[1:21]]
        wanted = module(text.features[None, :20], embedded[None])[0]
    guesser = EagleGuesser(head, engine.model)
    tokens = text.token_ids.numpy().astype(np.int32)
    for first, count in ((0, 1), (1, 4), (5, 15)):
        guesser.read(3, first, text.features[first : first + count])
        end = first + count
        assert guesser.num_unread(3, tokens[: end + 1]) == count
        logits = guesser.logits(3, tokens[: end + 1])
        torch.testing.assert_close(logits[0], module.head @ wanted[end - 1], rtol=1e-3, atol=1e-3)
    own = guesser.logits(3, tokens[:22])  # continues from the head's own feature
    assert own.shape == (1, 200)
    assert guesser.num_unread(3, tokens[:23]) == 0  # the model's features of these tokens are missing
    engine.close()


@pytest.mark.parametrize("options", [{}, {"prefill_chunk": 50}, {"num_slots": 300}], ids=["plain", "chunked", "tight"])
def test_a_head_changes_no_token(tiny_model_path, trained, options):
    path, _, said, _ = trained
    check_equal(made_with_a_head(tiny_model_path, path, precision="float32", **options), said)


def test_a_head_changes_no_token_over_8_bit_keys_and_values(tiny_model_path, trained, tmp_path):
    # With weights of 4 bits a token's keys have equal bits in every batch.
    model = quantize_model(tiny_model_path, tmp_path / "packed", "int4-g32").path
    options = {"precision": "auto", "kv_dtype": "int8"}
    engine = EngineCore(EngineConfig(model=str(model), num_slots=4096, speculative="off", **options))
    driver = Driver(engine, check=False)
    outcomes = submit_all(driver, n=2)
    driver.run()
    engine.close()
    check_equal(made_with_a_head(model, trained[0], **options), made(outcomes))


def made_with_a_head(model, path, **options):
    """The answers with a head that always proposes."""
    engine = EngineCore(EngineConfig(model=str(model), draft_model=f"eagle:{path}", **{"num_slots": 4096, **options}))
    (drafter,) = [d for d in engine.loop.speculation.drafters if isinstance(d, ModelDrafter)]
    costs = Free()
    costs.estimate[:] = 1.0
    engine.loop.speculation = speculation = Speculation([drafter], max_draft=6, costs=costs, clock=lambda: 0.0)
    driver = Driver(engine, check=False)
    outcomes = submit_all(driver, n=2)
    driver.run()
    assert speculation.proposed["eagle"] > 0  # how many depends on the gains measured
    engine.check()
    engine.close()
    return made(outcomes)


def test_files_that_are_not_a_head_of_the_model_are_refused(tiny_model_path, trained, tmp_path):
    path, *_ = trained
    with pytest.raises(InvalidParams, match="eagle:.*missing.safetensors"):
        start(tiny_model_path, draft_model=f"eagle:{tmp_path}/missing.safetensors")
    with pytest.raises(InvalidParams, match="not a head made by `phloem train-drafter`"):
        start(tiny_model_path, draft_model=f"eagle:{tiny_model_path}/model.safetensors")
    other = make_tiny_model(tmp_path / "other", seed=0, hidden_size=32)
    with pytest.raises(InvalidParams, match="was trained for another model"):
        start(other, draft_model=f"eagle:{path}")


def test_the_command_trains_a_head_and_prints_how_to_use_it(tiny_model_path, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    out = tmp_path / "head.safetensors"
    flags = ["--out", str(out), "--text", str(text), "--tokens", "1600", "--minutes", "0.01"]
    assert main(["train-drafter", str(tiny_model_path), *flags]) == 0
    assert f"--draft-model eagle:{out}" in capsys.readouterr().out
    engine = start(tiny_model_path)
    assert load_eagle(out, engine.model, vocab_hash=engine.tokenizer.vocab_hash).shape.hidden_size == 64
    engine.close()


def test_a_missing_text_file_is_named(tiny_model_path, tmp_path, capsys):
    flags = ["--out", str(tmp_path / "head.safetensors"), "--text", str(tmp_path / "none.txt")]
    assert main(["train-drafter", str(tiny_model_path), *flags]) == 2
    assert "none.txt: [Errno 2] No such file" in capsys.readouterr().err
    assert main(["train-drafter", str(tiny_model_path), "--out", str(tmp_path / "gone" / "head.safetensors")]) == 2
    assert "there is no folder" in capsys.readouterr().err
