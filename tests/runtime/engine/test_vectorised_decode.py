"""Vectorised decoding gives the same plans, answers, deltas and counters as decoding one sequence at a time."""

import random
from pathlib import Path

import msgspec
import pytest
from phloem.protocol import messages as m
from phloem.protocol.ops import AnyOp, Close, Gen, GrammarSpec, Text
from phloem.protocol.sampling import SamplingParams
from phloem.runtime.engine import EngineCore, grammar_states, vectorised_decode
from phloem.runtime.scheduler import StepPlan
from phloem.tests.runtime.engine.driver import Driver
from phloem.tests.runtime.engine.test_overlap import GREEDY, engine_of, mixed, replace_max, shown
from phloem.tests.runtime.executor.stand_in import StandIn

pytestmark = pytest.mark.usefixtures("kernels_as_one_call")

GRAMMARS = [
    GrammarSpec("regex", "[a-z ]{20,40}"),
    GrammarSpec("json_schema", '{"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}'),
]


def rows_of(plan: StepPlan) -> list[tuple[int, int, tuple[int, ...], int]]:
    """Each row's sequence, start, tokens (-1: being drawn) and number of logits, vectorised or not."""
    found = [
        (row.seq_id, row.start, tuple(max(i, -1) for i in row.token_ids.tolist()), row.num_logits) for row in plan.rows
    ]
    part = plan.vectorised
    if part is not None:
        triples = zip(part.seq_ids.tolist(), part.starts.tolist(), part.token_ids.tolist(), strict=True)
        found += [(seq_id, start, (max(token, -1),), 1) for seq_id, start, token in triples]
    return sorted(found)


class Watched:
    """Records an engine's plans, and how many of their rows were vectorised."""

    def __init__(self, engine: EngineCore) -> None:
        self.engine = engine
        self.plans: list[list[tuple[int, int, tuple[int, ...], int]]] = []
        self.num_vectorised = 0
        plan_of = engine.scheduler.plan

        def plan() -> StepPlan | None:
            found = plan_of()
            if found is not None:
                self.plans.append(rows_of(found))
                self.num_vectorised += found.num_vectorised
            return found

        engine.scheduler.plan = plan  # type: ignore[method-assign]


def workload(seed: int) -> list[tuple[int, list[AnyOp], str]]:
    """The step at which each program arrives, its ops and its tenant."""
    rng = random.Random(seed)
    found = []
    for i in range(24):
        params = SamplingParams(
            max_tokens=rng.choice((1, 2, 7, 30, 70)),
            temperature=rng.choice((0.0, 0.8)),
            seed=rng.randrange(100),
            top_p=rng.choice((1.0, 0.9)),
            ignore_eos=rng.random() < 0.7,
            min_tokens=rng.choice((0, 0, 1)),
            stop=("e",) if rng.random() < 0.15 else (),
            stop_token_ids=(101, 32) if rng.random() < 0.15 else (),
            return_logprob=rng.random() < 0.1,
            presence_penalty=0.4 if rng.random() < 0.1 else 0.0,
        )
        grammar = rng.choice(GRAMMARS) if rng.random() < 0.3 else None
        ops: list[AnyOp] = [
            Text(op=0, seq=0, text="once upon a time " * rng.randrange(1, 4) + str(i)),
            Gen(op=1, seq=0, params=params, grammar=grammar, stream=rng.random() < 0.3, n=rng.choice((1, 1, 1, 3))),
            Text(op=2, seq=0, text=" and"),
            Gen(op=3, seq=0, params=replace_max(GREEDY, rng.choice((3, 40)))),
            Close(op=4, seq=0),
        ]
        found.append((rng.randrange(60), ops, rng.choice(("", "a", "b"))))
    return found


def run(engine: EngineCore, seed: int) -> tuple[Watched, list[object]]:
    watched = Watched(engine)
    driver = Driver(engine)
    rng = random.Random(seed + 1)
    for grammar in GRAMMARS:  # plans must not depend on the time that compiling takes
        engine.grammars.compile(grammar).result()
    coming = workload(seed)
    outcomes = []
    for step in range(70):
        for i, (when, ops, tenant) in enumerate(coming):
            if when == step:
                settings = m.ProgramSettings(tenant=tenant)
                outcomes.append(driver.submit(ops, program=f"p{i}", settings=settings))
        if rng.random() < 0.1:
            driver.say(m.Cancel(f"p{rng.randrange(24)}", op=rng.choice((None, 1))))
        if rng.random() < 0.05:
            assert engine.metrics()["running"] == len(engine.scheduler.running)
        driver.step()
    driver.run()
    engine.close()
    stats = []
    for outcome in outcomes:
        closed = outcome.closed
        assert closed is not None
        deltas = [
            (d.op, d.index, d.text, d.token_ids, d.origin)
            for d in sorted(outcome.deltas, key=lambda d: (d.op, d.index))  # in order for each candidate
        ]
        counters = msgspec.structs.replace(closed.stats, queue_s=0.0, prefill_s=0.0, decode_s=0.0)
        stats.append((shown(outcome), deltas, counters))
    return watched, stats


@pytest.mark.parametrize(
    ("num_slots", "seed", "ahead"), [(400, 0, True), (400, 1, False), (4000, 2, True), (4000, 2, False)]
)
def test_plans_answers_and_counters_equal_those_of_decoding_one_by_one(
    tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, ahead: bool, num_slots: int
) -> None:
    options = {"max_running": 12, "num_slots": num_slots, "speculative": "off", "max_step_tokens": 64}
    monkeypatch.setattr(grammar_states, "MIN_JUMP", 1)  # forced tokens are appended at once in both ways
    found = []
    for min_rows in (1, 4, 1000):
        monkeypatch.setattr(vectorised_decode, "MIN_ROWS", min_rows)
        found.append(run(engine_of(tiny_model_path, StandIn() if ahead else None, **options), seed))
    for watched, answers in found[:2]:
        assert watched.plans == found[2][0].plans
        assert answers == found[2][1]
    assert found[0][0].num_vectorised > (400 if num_slots == 4000 else 0)
    assert found[2][0].num_vectorised == 0


def test_few_forced_tokens_are_drawn_and_answers_stay_the_same(
    tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs of one forced token, of a few and of many."""
    regex = GrammarSpec("regex", "(a[0-9]){3}(bcd[0-9]){3}(efghij[0-9]){3}k")
    monkeypatch.setattr(vectorised_decode, "MIN_ROWS", 1)
    found = []
    for min_jump in (1, 4, 1000):
        monkeypatch.setattr(grammar_states, "MIN_JUMP", min_jump)
        driver = Driver(engine_of(tiny_model_path, None, num_slots=4000, speculative="off"))
        gens = [Gen(op=1, seq=0, params=SamplingParams(seed=i, max_tokens=60), grammar=regex) for i in range(3)]
        outcomes = [driver.submit([Text(op=0, seq=0, text="a"), gen]) for gen in gens]
        driver.run()
        metas = [outcome.done[1].meta for outcome in outcomes]
        candidates = [meta.candidates[0] for meta in metas if isinstance(meta, m.GenMeta)]
        found.append([candidate.token_ids for candidate in candidates])
        assert [candidate.forced_tokens for candidate in candidates] == [{1: 30, 4: 19, 1000: 0}[min_jump]] * 3
    assert found[0] == found[1] == found[2] and len(set(found[0])) == 3


def test_forgetting_grammar_states_changes_no_answer(tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"max_running": 12, "num_slots": 4000, "speculative": "off", "max_step_tokens": 64}
    monkeypatch.setattr(vectorised_decode, "MIN_ROWS", 1)
    found = []
    for most in (3, 8_192):
        monkeypatch.setattr(grammar_states, "MOST_STATES", most)
        found.append(run(engine_of(tiny_model_path, StandIn(), **options), 5))
    assert found[0][1] == found[1][1]
    assert found[0][0].plans == found[1][0].plans


@pytest.mark.parametrize("speculative", ["auto", "off"])
@pytest.mark.parametrize("ahead", [True, False])
def test_every_kind_of_op_answers_the_same(
    tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch, speculative: str, ahead: bool
) -> None:
    answers = []
    for min_rows in (1, 1000):
        monkeypatch.setattr(vectorised_decode, "MIN_ROWS", min_rows)
        engine = engine_of(tiny_model_path, StandIn() if ahead else None, speculative=speculative, num_slots=4000)
        driver = Driver(engine)
        outcomes = [driver.submit(ops) for ops in mixed()]
        driver.run()
        engine.close()
        answers.append([shown(outcome) for outcome in outcomes])
    assert answers[0] == answers[1]
