"""Drafts by another model or by half of the model change no token; drafts by the model itself are all accepted."""

from functools import partial
from itertools import count

import numpy as np
import pytest
import torch
from phloem.protocol.errors import InvalidParams, UnknownModel
from phloem.protocol.messages import LoadAdapter, ProgramSettings
from phloem.protocol.ops import Close, Gen, Text
from phloem.protocol.sampling import SamplingParams
from phloem.runtime.config import EngineConfig
from phloem.runtime.engine import EngineCore
from phloem.runtime.speculative import DraftModel, ModelDrafter, Speculation, StepCosts, without_layers
from phloem.tests.runtime.engine.driver import Driver
from phloem.tests.runtime.models.lora import make_adapter
from phloem.tests.runtime.models.tiny import make_tiny_model
from phloem.tests.runtime.speculative.oracle import Free
from phloem.tests.runtime.speculative.test_equality import check_equal, made, submit_all


def start(path, **options) -> EngineCore:
    return EngineCore(EngineConfig(model=str(path), precision="float32", **{"num_slots": 4096, **options}))


@pytest.fixture(scope="module")
def said(tiny_model_path):
    engine = start(tiny_model_path, speculative="off")
    driver = Driver(engine, check=False)
    outcomes = submit_all(driver, n=2)
    driver.run()
    engine.close()
    return made(outcomes)


class Cheap(Free):
    """A forward of the target costs one second here."""

    def __init__(self) -> None:
        super().__init__()
        self.estimate[:] = 1.0


def drafted_by_model_alone(engine: EngineCore) -> Speculation:
    """Only the model drafts, its forwards take no time, and every step takes the same time by the engine's clock."""
    assert engine.loop.speculation is not None
    (drafter,) = [d for d in engine.loop.speculation.drafters if isinstance(d, ModelDrafter)]
    drafter = ModelDrafter(drafter.guesser, source=drafter.source, clock=lambda: 0.0)
    engine.loop.clock = partial(next, count(1.0))
    engine.loop.speculation = Speculation([drafter], max_draft=6, costs=Cheap(), clock=lambda: 0.0)
    return engine.loop.speculation


@pytest.mark.parametrize("draft", ["same", "other", "self:1"])
def test_a_draft_model_changes_no_token(tiny_model_path, tmp_path, said, draft):
    other = {"same": str(tiny_model_path), "self:1": "self:1"}.get(draft)
    if other is None:
        other = str(make_tiny_model(tmp_path / "other", seed=7, num_layers=1, hidden_size=32, max_positions=512))
    engine = start(tiny_model_path, draft_model=other, prefill_chunk=50)
    speculation = drafted_by_model_alone(engine)
    driver = Driver(engine, check=False)
    outcomes = submit_all(driver, n=2)
    driver.run()
    check_equal(made(outcomes), said)
    proposed, accepted = sum(speculation.proposed.values()), sum(speculation.accepted.values())
    assert proposed > 50
    if draft == "same":
        # Equal distributions and random numbers: the drafter lacks only penalties, biases and grammars.
        free = [outcomes[name].done[1].meta.candidates[0] for name in ("greedy", "sampled", "cut", "logprobs")]
        assert all(c.accepted_tokens == c.drafted_tokens > 5 for c in free)
    assert accepted < proposed
    engine.check()
    engine.close()


def test_a_draft_model_that_is_never_accepted_soon_stops_running(tiny_model_path, tmp_path):
    other = make_tiny_model(tmp_path / "other", seed=7, num_layers=1, hidden_size=32)
    engine = start(tiny_model_path, draft_model=str(other))
    (drafter,) = [d for d in engine.loop.speculation.drafters if isinstance(d, ModelDrafter)]
    engine.loop.speculation = Speculation([drafter], max_draft=6, costs=StepCosts(slope=0.06))
    num_fed = 0
    logits = drafter.guesser.logits

    def counted(*args):
        nonlocal num_fed
        num_fed += 1
        return logits(*args)

    drafter.guesser.logits = counted
    driver = Driver(engine, check=False)
    outcomes = submit_all(driver)
    driver.run()
    made_tokens = sum(outcome.done[1].meta.candidates[0].completion_tokens for outcome in outcomes.values())
    assert num_fed < made_tokens
    engine.close()


def test_an_unusable_draft_model_is_refused_by_name(tiny_model_path, tmp_path):
    with pytest.raises(InvalidParams, match="self:N takes N of the model's layers, 1 to 1"):
        start(tiny_model_path, draft_model="self:2")
    with pytest.raises(InvalidParams, match="max_draft=4 limits drafts; it needs speculative=auto"):
        EngineCore(EngineConfig(model=str(tiny_model_path), speculative="off", max_draft=4))
    with pytest.raises(InvalidParams, match="it needs speculative=auto"):
        start(tiny_model_path, draft_model="self:1", speculative="off")
    with pytest.raises(UnknownModel, match="no model 'eagle:head.safetensors': it is neither a path here nor an alias"):
        start(tiny_model_path, draft_model="eagle:head.safetensors")


@pytest.mark.model
def test_a_draft_model_of_another_vocabulary_is_refused(tiny_model_path, smollm2_path):
    with pytest.raises(InvalidParams, match=r"another vocabulary \(49,152 tokens\)"):
        start(tiny_model_path, draft_model=str(smollm2_path))


@pytest.fixture(scope="module")
def adapters(tiny_model_path, tmp_path_factory) -> dict[str, str]:
    at = tmp_path_factory.mktemp("drafts")
    ranks = {"poet": 4, "judge": 2}
    return {
        name: str(make_adapter(at / name, tiny_model_path, seed=rank, rank=rank, lora_alpha=3 * rank))
        for name, rank in ranks.items()
    }


def texts_of(engine: EngineCore) -> tuple[list[list[int]], int, int]:
    """Tokens of texts with either adapter and with none, side by side; how many were drafted and accepted."""
    driver = Driver(engine, check=False)
    outcomes = []
    for adapter in ("poet", "judge", "", "poet"):
        params = SamplingParams(max_tokens=30, temperature=0.7 * (adapter == "judge"), seed=5, ignore_eos=True)
        ops = [Text(op=0, seq=0, text=f"The text of {adapter}"), Gen(op=1, seq=0, params=params), Close(op=2, seq=0)]
        outcomes.append(driver.submit(ops, settings=ProgramSettings(adapter=adapter)))
    driver.run()
    candidates = [outcome.done[1].meta.candidates[0] for outcome in outcomes]
    engine.check()
    engine.close()
    drafted, accepted = (sum(getattr(c, f"{name}_tokens") for c in candidates) for name in ("drafted", "accepted"))
    return [outcome.value(1) for outcome in outcomes], drafted, accepted


def test_draft_adapters_change_no_token_and_raise_the_accepted_share(tiny_model_path, adapters):
    expected, _, _ = texts_of(start(tiny_model_path, adapters=adapters, speculative="off"))
    assert len({str(text) for text in expected}) > 2
    shares = {}
    for draft, given in (
        (str(tiny_model_path), adapters),
        (str(tiny_model_path), {"poet": adapters["poet"]}),
        (str(tiny_model_path), {}),
        ("self:1", {}),
    ):
        engine = start(tiny_model_path, adapters=adapters, draft_model=draft, draft_adapters=given)
        drafted_by_model_alone(engine)
        found, drafted, accepted = texts_of(engine)
        assert found == expected and drafted > 30
        shares[draft == "self:1", len(given)] = accepted / drafted
    assert shares[False, 2] == 1.0 > shares[False, 1] > shares[False, 0]


def test_drafts_by_the_model_s_own_layers_use_its_adapters(tiny_model_path, adapters):
    """Also an adapter that came later: the two models share the tables."""
    engine = start(tiny_model_path, adapters={"judge": adapters["judge"]})
    change = LoadAdapter(1, "poet", adapters["poet"])
    guesser = DraftModel(without_layers(engine.model, 1), max_len=100)
    text = np.arange(20, dtype=np.int32)
    before = [guesser.logits(number, text, number).clone() for number in (-1, 0)]
    engine.step([(b"operator", change)])
    after = [guesser.logits(10 + number, text, number).clone() for number in (-1, 0, 1)]
    assert torch.equal(before[0], after[0]) and torch.equal(before[1], after[1])
    assert all(float((after[i] - after[j]).abs().max()) > 0.1 for i, j in ((0, 1), (0, 2), (1, 2)))
    engine.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "there is no draft model; name one with draft_model"),
        ({"draft_model": "self:1"}, "draft_model='self:1' drafts with the model's own adapters; leave it out"),
        ({"draft_model": "x"}, "the model has no adapter of that name; there are poet"),
        ({"draft_model": "x", "adapters": {}}, "the model has no adapter of that name; there are none"),
    ],
)
def test_draft_adapters_without_an_effect_are_refused(tiny_model_path, adapters, options, message):
    given = {"adapters": {"poet": adapters["poet"]}, "draft_adapters": {"cook": "/x"}} | options
    with pytest.raises(InvalidParams, match=f"draft adapter 'cook'='/x': {message}"):
        start(tiny_model_path, **given)
