"""Every drafter in every circumstance gives equal answers: greedy, sampled, penalised, stopped and constrained.

The requests are those of ``test_equality``; a cancelled request has a prefix of its answer.
"""

import random

import pytest
from phloem.protocol import messages as m
from phloem.runtime.config import EngineConfig
from phloem.runtime.engine import EngineCore
from phloem.runtime.speculative import (
    Drafter,
    DraftModel,
    GrammarDrafter,
    LookupDrafter,
    ModelDrafter,
    Speculation,
    without_layers,
)
from phloem.tests.runtime.engine.driver import CLIENT, Driver
from phloem.tests.runtime.speculative.oracle import Free, Oracle
from phloem.tests.runtime.speculative.test_equality import made, submit_all


@pytest.fixture(scope="module")
def truth(tiny_model_path):
    engine = EngineCore(
        EngineConfig(model=str(tiny_model_path), precision="float32", num_slots=4096, speculative="off")
    )
    driver = Driver(engine, check=False)
    outcomes = submit_all(driver, n=1)
    driver.run()
    texts = []
    for i, (name, outcome) in enumerate(outcomes.items()):
        prompt = engine.tokenizer.encode(f"the {name} sap rises, the sap falls; " * (1 + i % 3), at_start=True)
        texts += [[*prompt, *c.token_ids] for c in outcome.done[1].meta.candidates]
    engine.close()
    return made(outcomes), texts


def drafters_of(name: str, engine: EngineCore, texts: list[list[int]]) -> list[Drafter]:
    def lookup() -> Drafter:
        return LookupDrafter(lambda ids, space, limit: engine.cache.continuation(ids, namespace=space, limit=limit))

    match name:
        case "lookup":
            return [lookup()]
        case "grammar":
            return [GrammarDrafter()]
        case "oracle":
            return [Oracle(texts, vocab_size=engine.vocab_size, lies=0.2)]
        case "model":
            return [lookup(), ModelDrafter(DraftModel(engine.model, max_len=400), source="draft_model")]
        case _:
            return [ModelDrafter(DraftModel(without_layers(engine.model, 1), max_len=400), source="own_layers")]


class Cheap(Free):
    """Draft tokens cost nothing, and an accepted token saves a second."""

    def __init__(self) -> None:
        super().__init__()
        self.estimate[:] = 1.0


CIRCUMSTANCES = {
    "plain": {"max_running": 4},  # with few sequences more drafts are worth their row
    "all": {"prefill_chunk": 9, "max_step_tokens": 40, "num_slots": 260, "max_running": 12},
}


@pytest.mark.parametrize(
    ("circumstance", "cancelled"),
    [("plain", False), ("all", False), ("all", True)],
    ids=["plain", "chunked and preempted", "chunked, preempted and cancelled"],
)
@pytest.mark.parametrize("drafter", ["lookup", "grammar", "oracle", "model", "layers"])
def test_drafts_change_nothing(tiny_model_path, truth, drafter, circumstance, cancelled):
    said, texts = truth
    options = {"num_slots": 4096, **CIRCUMSTANCES[circumstance]}
    engine = EngineCore(EngineConfig(model=str(tiny_model_path), precision="float32", **options))
    found = drafters_of(drafter, engine, texts)
    engine.loop.speculation = speculation = Speculation(found, max_draft=4, costs=Cheap(), clock=lambda: 0.0)
    driver = Driver(engine, check=False)
    outcomes = submit_all(driver, n=1)
    rng = random.Random(f"{drafter} {circumstance}")
    gone = rng.sample(list(outcomes), 4) if cancelled else []
    for name in gone:
        for _ in range(rng.randrange(4)):
            driver.step()
        if 1 not in outcomes[name].ends:
            driver.say(m.Cancel(f"p{1 + list(outcomes).index(name)}"))
    driver.run()
    engine.check()
    whole = {name: outcome for name, outcome in outcomes.items() if 1 in outcome.done}
    assert set(outcomes) - set(whole) <= set(gone)
    for name, (texts_made, _, candidates) in made(whole).items():
        assert texts_made == said[name][0], name
        for ours, theirs in zip(candidates, said[name][2], strict=True):
            assert ours[:-1] == theirs[:-1], name
            assert ours[-1] == pytest.approx(theirs[-1], abs=1e-3), name
    for name in set(outcomes) - set(whole):
        for whole_text, partial in zip(said[name][0], outcomes[name].failed[1].partial, strict=False):
            assert whole_text.startswith(partial), name
    if not cancelled and drafter != "grammar":  # each grammar occurs once, so there are no counts to draft from
        assert sum(speculation.proposed.values()) > 0
    engine.drop_client(CLIENT)
    engine.check()
    assert engine.cache.num_leased == 0 and engine.cache.num_locked == 0
    engine.close()
