"""What an engine reports while it works: its last steps, its sequences, and the nodes of its cache."""

from phloem.protocol import ops as o
from phloem.protocol.sampling import SamplingParams
from phloem.runtime.config import EngineConfig
from phloem.runtime.engine import EngineCore
from phloem.runtime.engine.report import batch, cache_nodes
from phloem.tests.runtime.engine.driver import Driver


def test_steps_and_sequences_are_reported_as_they_run(tiny_model_path):
    engine = EngineCore(EngineConfig(model=str(tiny_model_path), precision="float32", num_slots=1024, max_running=2))
    driver = Driver(engine, check=False)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    for i in range(3):
        driver.submit(
            [
                o.Text(op=0, seq=0, text=f"the sap rises in spring {i}"),
                o.Gen(op=1, seq=0, params=params),
                o.Close(op=2, seq=0),
            ]
        )
    driver.step()
    driver.step()
    engine.loop.vectorised.synchronise_all()
    found = batch(engine.loop)
    assert [row["state"] for row in found["sequences"]] == ["running", "running", "waiting"]
    first, last = found["sequences"][0], found["sequences"][-1]
    assert first["max_tokens"] == 6 and 1 <= first["generated"] <= 6 and not first["has_grammar"]
    assert first["tokens"] >= first["computed"] > 0 and last["computed"] == 0
    driver.run()
    steps = batch(engine.loop)["steps"]
    counters = engine.loop.counters
    assert len(steps) == counters.steps and sum(step.tokens for step in steps) == counters.forward_tokens
    assert sum(step.rows for step in steps) == counters.forward_rows
    assert abs(sum(step.seconds for step in steps) - counters.step_s) < 1e-9
    assert [step.step for step in steps] == sorted(step.step for step in steps)
    assert steps[0].running + steps[0].waiting == 3 and max(step.used_slots for step in steps) > 0
    assert batch(engine.loop)["sequences"] == []
    nodes = cache_nodes(engine.cache, engine.programs)
    assert nodes["num_hidden"] == 0 and nodes["slots"]["cached"] == sum(node.num_tokens for node in nodes["nodes"]) > 0
    assert nodes["evicted_tokens"]["space"] == 0
    engine.close()
