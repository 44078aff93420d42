"""Usage of tenants and programs: each token has one origin, rows are bounded, counts never decrease."""

import pytest
from phloem.constrained.spec import GrammarSpec
from phloem.protocol import messages as m
from phloem.protocol import ops as o
from phloem.protocol.sampling import SamplingParams
from phloem.runtime.config import EngineConfig
from phloem.runtime.engine import EngineCore
from phloem.runtime.engine.usage import MAX_NAME_LEN, OTHERS, UNNAMED, Usage
from phloem.tests.runtime.engine.driver import CLIENT, Driver

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPT = "the sap rises and the leaves fall "


def make_engine(path, **options) -> EngineCore:
    return EngineCore(
        EngineConfig(model=str(path), precision="float32", num_threads=1, **({"num_slots": 2048} | options))
    )


def asking(engine: EngineCore, what: str) -> dict:
    ((_, answer),) = engine.step([(CLIENT, m.Query(1, what))])
    return answer.value


def ask(prompt: str = PROMPT, params: SamplingParams = GREEDY, **options) -> list[o.AnyOp]:
    return [o.Text(op=0, seq=0, text=prompt), o.Gen(op=1, seq=0, params=params, **options), o.Close(op=2, seq=0)]


@pytest.mark.parametrize("speculative", ["off", "auto"])
def test_each_token_of_a_program_has_one_origin(tiny_model_path, speculative):
    engine = make_engine(tiny_model_path, speculative=speculative)
    driver = Driver(engine)
    settings = m.ProgramSettings(tenant="garden", name="water")
    grammar = GrammarSpec("regex", "(leaf|root)( grows){3}( leaf){8}")
    metas = [driver.run(ask(), settings=settings).done[1].meta for _ in range(3)]
    metas.append(driver.run(ask(params=SamplingParams(max_tokens=90), grammar=grammar), settings=settings).done[1].meta)
    usage = asking(engine, "metrics")["usage"]
    assert set(usage["tenants"]) == {"garden"} and set(usage["programs"]) == {"water"}
    tokens = usage["programs"]["water"]["tokens"]
    assert tokens == usage["tenants"]["garden"]["tokens"]
    candidates = [meta.candidates[0] for meta in metas]
    assert tokens["computed"] + tokens["cached"] == sum(meta.prompt_tokens for meta in metas)
    assert tokens["cached"] == sum(meta.cached_tokens for meta in metas) > 0
    assert tokens["forced"] == sum(candidate.forced_tokens for candidate in candidates) > 0
    made = tokens["generated"] + tokens["forced"] + tokens["drafted"]
    assert made == sum(candidate.completion_tokens for candidate in candidates)
    assert (tokens["drafted"] > 0) == (speculative == "auto") and tokens["generated"] > 0
    assert usage["programs"]["water"]["runs"] == 4
    assert usage["programs"]["water"]["hit_rate"] == pytest.approx(
        tokens["cached"] / sum(meta.prompt_tokens for meta in metas)
    )
    engine.close()


def test_metrics_have_hits_evictions_by_cause_waits_and_preemptions(tiny_model_path):
    engine = make_engine(tiny_model_path, num_slots=300, max_seq_len=250, host_cache_bytes=4 << 20, speculative="off")
    driver = Driver(engine)
    long = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    for n in range(4):
        settings = m.ProgramSettings(tenant=f"t{n % 2}", name="grow")
        driver.submit(ask(f"{n} {PROMPT}", long), settings=settings)
    driver.run()
    engine.step([(CLIENT, m.Query(1, "flush_cache"))])
    metrics = asking(engine, "metrics")
    tenants = metrics["usage"]["tenants"]
    assert metrics["preemptions"] == sum(row["preemptions"] for row in tenants.values()) > 0
    assert metrics["cache_evicted_tokens"]["space"] > 0 and metrics["cache_evicted_tokens"]["flush"] > 0
    assert sum(metrics["queue_seconds"]["counts"]) == 4 and metrics["queue_seconds"]["total"] > 0
    assert sum(row["queue_seconds"] for row in tenants.values()) > 0
    assert 0 <= metrics["cache_hit_rate"] < 1 and metrics["tier_blocks"]["saved"] > 0
    assert asking(engine, "info")["metrics"]["usage"] == metrics["usage"]
    engine.close()


def test_a_running_program_is_counted_and_counts_never_decrease(tiny_model_path):
    engine = make_engine(tiny_model_path)
    driver = Driver(engine)
    driver.submit(ask()[:2], program="p", settings=m.ProgramSettings(name="chat"))
    driver.run()
    running = asking(engine, "metrics")["usage"]["programs"]["chat"]
    assert running["tokens"]["computed"] > 0 and running["runs"] == 1
    driver.submit([o.Close(op=2, seq=0)], program="p")
    driver.run()
    assert asking(engine, "metrics")["usage"]["programs"]["chat"] == running
    engine.close()


def test_the_usage_of_a_cancelled_program_is_kept(tiny_model_path):
    engine = make_engine(tiny_model_path)
    driver = Driver(engine)
    driver.submit(ask(params=SamplingParams(max_tokens=500, ignore_eos=True)), program="p")
    for _ in range(5):
        driver.step()
    driver.say(m.Cancel("p"))
    driver.run()
    tokens = asking(engine, "metrics")["usage"]["programs"][UNNAMED]["tokens"]
    assert tokens["computed"] > 0 and tokens["generated"] + tokens["drafted"] > 0
    engine.close()


def test_names_are_bounded_in_number_and_length():
    usage = Usage(max_names=3)
    one = m.ProgramStats(prefilled_tokens=1)
    for n in range(50):
        usage.end(usage.begin(tenant=f"tenant {n}", name="x" * 10_000), one)
    report = usage.report([])
    assert set(report["tenants"]) == {"tenant 0", "tenant 1", "tenant 2", OTHERS}
    assert report["tenants"][OTHERS]["tokens"]["computed"] == 47
    assert set(report["programs"]) == {"x" * MAX_NAME_LEN} and report["programs"]["x" * MAX_NAME_LEN]["runs"] == 50
