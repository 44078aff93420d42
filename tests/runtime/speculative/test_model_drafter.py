"""Drafts by another model or by half of the model change no token; drafts by the model itself are all accepted."""

from functools import partial
from itertools import count

import pytest
from phloem.protocol.errors import InvalidParams, UnknownModel
from phloem.runtime.config import EngineConfig
from phloem.runtime.engine import EngineCore
from phloem.runtime.speculative import ModelDrafter, Speculation, StepCosts
from phloem.tests.runtime.engine.driver import Driver
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
    with pytest.raises(InvalidParams, match="it needs speculative=auto"):
        start(tiny_model_path, draft_model="self:1", speculative="off")
    with pytest.raises(UnknownModel, match="no model 'eagle:head.safetensors': it is neither a path here nor an alias"):
        start(tiny_model_path, draft_model="eagle:head.safetensors")


@pytest.mark.model
def test_a_draft_model_of_another_vocabulary_is_refused(tiny_model_path, smollm2_path):
    with pytest.raises(InvalidParams, match=r"another vocabulary \(49,152 tokens\)"):
        start(tiny_model_path, draft_model=str(smollm2_path))
