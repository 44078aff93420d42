"""Every token is the same with drafts and without, for drafts of any quality and under any scheduling."""

import itertools
import random

import pytest
from phloem.constrained.spec import GrammarSpec
from phloem.protocol import messages as m
from phloem.protocol import ops as o
from phloem.protocol.sampling import SamplingParams
from phloem.runtime.config import EngineConfig
from phloem.runtime.engine import EngineCore
from phloem.runtime.speculative import LookupDrafter, Speculation
from phloem.tests.runtime.engine.driver import CLIENT, Driver, Outcome
from phloem.tests.runtime.speculative.oracle import Free, Oracle, speculate

P = SamplingParams
REQUESTS: dict[str, tuple[P, GrammarSpec | None]] = {
    "greedy": (P(temperature=0.0, max_tokens=40, ignore_eos=True), None),
    "sampled": (P(temperature=0.8, seed=5, max_tokens=30), None),
    "cut": (P(temperature=1.3, top_p=0.8, top_k=20, min_p=0.01, seed=6, max_tokens=30), None),
    "penalised": (
        P(temperature=0.9, seed=7, max_tokens=30, frequency_penalty=0.7, presence_penalty=0.3, repetition_penalty=1.3),
        None,
    ),
    "biased": (P(temperature=1.0, seed=8, max_tokens=30, logit_bias={65: 4.0, 66: 4.0, 10: -100.0}), None),
    "ended": (P(temperature=1.0, seed=9, max_tokens=60, logit_bias={258: 2.0, 67: 5.0}, min_tokens=9), None),
    "stopped": (P(temperature=1.0, seed=10, max_tokens=60, logit_bias={67: 5.0, 68: 5.0}, stop=("CD", "DDC")), None),
    "logprobs": (P(temperature=0.7, seed=11, max_tokens=20, return_logprob=True, top_logprobs_num=3), None),
    "regex": (P(temperature=1.0, seed=12, max_tokens=40), GrammarSpec("regex", "(abc|abd)[a-f]{3,9} end(ing)?")),
    "json": (
        P(temperature=1.0, seed=13, max_tokens=60),
        GrammarSpec("json_schema", '{"type":"object","properties":{"ab":{"enum":["x","yy"]},"c":{"type":"integer"}}}'),
    ),
}


def start(path, **options) -> EngineCore:
    """Time goes by evenly, so that what is drafted follows from the texts, not from how busy the machine is."""
    options = {"num_slots": 4096, **options}
    ticks = itertools.count()
    return EngineCore(EngineConfig(model=str(path), precision="float32", **options), clock=lambda: 1e-3 * next(ticks))


def submit_all(driver: Driver, *, n: int = 1) -> dict[str, Outcome]:
    outcomes = {}
    for i, (name, (params, grammar)) in enumerate(REQUESTS.items()):
        text = f"the {name} sap rises, the sap falls; " * (1 + i % 3)
        ops = [o.Text(op=0, seq=0, text=text), o.Gen(op=1, seq=0, params=params, grammar=grammar, n=n)]
        outcomes[name] = driver.submit([*ops, o.Close(op=2, seq=0)])
    return outcomes


def made(outcomes: dict[str, Outcome]) -> dict[str, tuple]:
    """The answers: text, tokens, finish reason and log-probabilities."""
    found = {}
    for name, outcome in outcomes.items():
        candidates = []
        for c in outcome.done[1].meta.candidates:
            assert [p.token_id for p in c.logprobs] in ([], [*c.token_ids])
            logprobs = [value for p in c.logprobs for value in (p.logprob, *(t[1] for t in p.top))]
            candidates.append((c.token_ids, c.finish_reason, c.matched_stop, c.completion_tokens, logprobs))
        found[name] = (outcome.value(1), outcome.value(2), candidates)
    return found


def check_equal(found: dict[str, tuple], said: dict[str, tuple]) -> None:
    for name, (texts, whole, candidates) in said.items():
        assert found[name][:2] == (texts, whole), name
        for ours, theirs in zip(found[name][2], candidates, strict=True):
            assert ours[:-1] == theirs[:-1], name
            assert ours[-1] == pytest.approx(theirs[-1], abs=1e-3), name


@pytest.fixture(scope="module")
def truth(tiny_model_path):
    """The answers without drafts, three candidates each, and the tokens of all texts."""
    engine = start(tiny_model_path, speculative="off")
    driver = Driver(engine)
    outcomes = submit_all(driver, n=3)
    driver.run()
    texts = []
    for i, (name, outcome) in enumerate(outcomes.items()):
        prompt = engine.tokenizer.encode(f"the {name} sap rises, the sap falls; " * (1 + i % 3), at_start=True)
        bos = [engine.tokenizer.bos_id] if engine.tokenizer.add_bos else []
        texts += [[*bos, *prompt, *c.token_ids] for c in outcome.done[1].meta.candidates]
    engine.close()
    return made(outcomes), texts


@pytest.mark.parametrize(
    ("options", "lies"),
    [
        ({}, 0.0),
        ({}, 0.9),
        ({"jump_forward": False}, 0.15),
        ({"prefill_chunk": 7, "max_step_tokens": 24}, 0.15),
        ({"prefix_cache": False, "num_slots": 600}, 0.15),
        ({"num_slots": 260, "max_running": 12}, 0.15),
    ],
    ids=["right", "wrong", "no jumps", "chunked", "no cache", "preempted"],
)
def test_no_draft_changes_a_token(tiny_model_path, truth, options, lies):
    said, texts = truth
    engine = start(tiny_model_path, **options)
    speculation = speculate(engine, Oracle(texts, vocab_size=engine.vocab_size, lies=lies))
    driver = Driver(engine, check=False)
    outcomes = submit_all(driver, n=3)
    driver.run()
    engine.check()
    check_equal(made(outcomes), said)
    if options.get("num_slots") != 260:
        assert speculation.proposed["oracle"] > 100
        assert (speculation.accepted["oracle"] > 100) == (lies < 0.5)
        if not lies:
            assert speculation.accepted["oracle"] > 0.9 * speculation.proposed["oracle"]
    else:
        assert engine.scheduler.num_preemptions > 0
    assert engine.cache.num_leased == 0 and engine.cache.num_locked == 0
    engine.close()


def test_lookup_changes_no_token_and_finds_earlier_text(tiny_model_path, truth):
    engine = start(tiny_model_path)
    for _ in range(2):
        driver = Driver(engine, check=False)
        outcomes = submit_all(driver, n=3)
        driver.run()
        check_equal(made(outcomes), truth[0])
    # In the second round the cache holds the answers of all first candidates.
    assert engine.metrics()["accepted_tokens"]["prefix"] > 100
    engine.close()


def test_lookup_changes_no_token_where_every_guess_is_run(tiny_model_path, truth):
    engine = start(tiny_model_path, prefix_cache=False)
    lookup = LookupDrafter(lambda ids, name, limit: ids[:0])
    engine.loop.speculation = speculation = Speculation([lookup], max_draft=12, costs=Free(), clock=lambda: 0.0)
    for _ in range(2):
        driver = Driver(engine, check=False)
        outcomes = submit_all(driver, n=3)
        driver.run()
        check_equal(made(outcomes), truth[0])
    assert sum(speculation.accepted.values()) > 50
    engine.check()
    engine.close()


def test_cancelling_a_program_with_drafts_frees_its_slots_and_changes_no_other(tiny_model_path, truth):
    said, texts = truth
    rng = random.Random(3)
    for _ in range(4):
        engine = start(tiny_model_path, num_slots=1500)
        speculate(engine, Oracle(texts, vocab_size=engine.vocab_size, lies=0.1))
        driver = Driver(engine)
        outcomes = submit_all(driver)
        for _ in range(rng.randrange(2, 8)):
            driver.step()
        names = rng.sample(sorted(outcomes), 4)
        for i, name in enumerate(outcomes, 1):
            if name in names and 1 not in outcomes[name].ends:
                driver.say(m.Cancel(f"p{i}"))
        driver.run()
        for name, outcome in outcomes.items():
            assert outcome.ends[1] == 1
            if 1 in outcome.done:
                assert outcome.value(1)[0] == said[name][0][0]
            else:
                assert said[name][0][0].startswith("".join(outcome.failed[1].partial[:1]))
        engine.drop_client(CLIENT)
        engine.check()
        assert engine.cache.num_leased == 0
        engine.close()


@pytest.mark.parametrize(
    ("settings", "params", "drafted"),
    [
        (None, {}, True),
        (None, {"speculative": False}, False),
        (m.ProgramSettings(speculative=False), {}, False),
        (m.ProgramSettings(speculative=False), {"speculative": True}, True),
    ],
)
def test_a_generation_and_a_program_can_switch_drafts_off(tiny_model_path, settings, params, drafted):
    engine = start(tiny_model_path)
    text = "sap leaf root " * 20
    ids = engine.tokenizer.encode(text)
    speculate(engine, Oracle([[*ids, *ids, *ids]], vocab_size=engine.vocab_size, lies=0.0))
    greedy = P(temperature=0.0, max_tokens=12, ignore_eos=True, **params)
    ops = [o.Text(op=0, seq=0, text=text), o.Gen(op=1, seq=0, params=greedy), o.Close(op=2, seq=0)]
    outcome = Driver(engine).run(ops, settings=settings)
    assert (outcome.done[1].meta.candidates[0].drafted_tokens > 0) == drafted
    assert (outcome.closed.stats.drafted_tokens > 0) == drafted
    engine.close()


def test_an_engine_started_without_drafts_makes_none(tiny_model_path):
    engine = start(tiny_model_path, speculative="off")
    greedy = P(temperature=0.0, max_tokens=12, ignore_eos=True, speculative=True)
    outcome = Driver(engine).run([o.Text(op=0, seq=0, text="a b a b a b"), o.Gen(op=1, seq=0, params=greedy)])
    assert outcome.done[1].meta.candidates[0].drafted_tokens == 0
    assert engine.metrics()["drafted_tokens"] == {}
    engine.close()
