"""Overlap of host and device changes no answer, and the host waits only for the previous step."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from phloem.kernels.backend import CPU, using
from phloem.protocol import messages as m
from phloem.protocol.ops import AnyOp, Close, Fork, Gen, GrammarSpec, Join, Score, Select, Text
from phloem.protocol.sampling import SamplingParams
from phloem.runtime.config import EngineConfig
from phloem.runtime.engine import EngineCore
from phloem.tests.runtime.engine.driver import CLIENT, Driver, Outcome
from phloem.tests.runtime.executor.stand_in import HostReads, StandIn, traced

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
WORDS = ["a river", "the orchard", "seven lamps", "a door", "the map", "salt", "an engine", "the tide"]


def engine_of(
    path: Path, accelerator: StandIn | None = None, *, has_grammars: bool = True, **options: Any
) -> EngineCore:
    """``has_grammars``: some programs have one, so the vocabulary's tables are made before the first step."""
    settings: dict[str, object] = {"num_slots": 1024, "max_seq_len": 160, "prefill_chunk": 16, "max_running": 8}
    engine = EngineCore(
        EngineConfig(model=str(path), precision="float32", num_threads=1, **(settings | options)),
        accelerator=accelerator,
    )
    if has_grammars:
        engine.grammars.wait_until_ready()  # so that programs with and without a grammar run together
    return engine


def story(i: int, params: SamplingParams, *, grammar: GrammarSpec | None = None, n: int = 1) -> list[AnyOp]:
    text = f"Tell me of {WORDS[i % len(WORDS)]}, number {i}: "
    return [
        Text(op=0, seq=0, text=text),
        Gen(op=1, seq=0, params=params, grammar=grammar, n=n, stream=i % 2 == 0),
        Text(op=2, seq=0, text=" and then "),
        Gen(op=3, seq=0, params=replace_max(params, 5)),
        Close(op=4, seq=0),
    ]


def replace_max(params: SamplingParams, max_tokens: int) -> SamplingParams:
    return msgspec.structs.replace(params, max_tokens=max_tokens, min_tokens=0)


def mixed() -> list[list[AnyOp]]:
    """Programs with every feature that can end, delay or change a sequence."""
    drawn = SamplingParams(max_tokens=9, temperature=0.9, top_p=0.9, seed=5, ignore_eos=True)
    programs = [
        story(0, GREEDY),
        story(1, drawn),
        story(2, SamplingParams(max_tokens=14, temperature=0, stop=("e", "a"))),
        story(3, SamplingParams(max_tokens=10, temperature=0.7, seed=1, frequency_penalty=0.6, repetition_penalty=1.2)),
        story(4, GREEDY, grammar=GrammarSpec("regex", "[0-9]{3}-(lighthouse|lantern)")),
        story(5, GREEDY, grammar=GrammarSpec("json_schema", '{"enum": ["one", "only", 12]}')),
        story(6, SamplingParams(max_tokens=8, min_tokens=4, temperature=1.2, seed=9, stop_token_ids=(101, 32, 97))),
        story(7, SamplingParams(max_tokens=6, return_logprob=True, top_logprobs_num=3, logprob_start_len=0, seed=4)),
        story(8, SamplingParams(max_tokens=5, temperature=0.8, seed=2, ignore_eos=True), n=3),
        story(9, SamplingParams(max_tokens=0, temperature=0)),
        [
            Text(op=0, seq=0, text="One of three: "),
            Fork(op=1, seq=0, children=(1, 2)),
            Gen(op=2, seq=1, params=GREEDY),
            Gen(op=3, seq=2, params=drawn),
            Select(op=4, seq=0, choices=("the first", "the second", "none")),
            Score(op=5, seq=0, text=" indeed"),
            *(Close(op=6 + seq, seq=seq) for seq in (1, 2)),
            Join(op=8, seq=0, children=(1, 2), mode="concate_and_append"),
            Gen(op=9, seq=0, params=GREEDY),
            Close(op=10, seq=0),
        ],
    ]
    return programs


def answers(engine: EngineCore, programs: list[list[AnyOp]]) -> list[object]:
    driver = Driver(engine)
    outcomes = [driver.submit(ops) for ops in programs]
    driver.run()
    engine.close()
    return [shown(outcome) for outcome in outcomes]


def shown(outcome: Outcome, *, with_forced: bool = True) -> object:
    """What a program got; how many of its tokens were forced depends on what ran beside it where many rows decode."""
    found: list[object] = []
    for op, done in sorted(outcome.done.items()):
        meta = done.meta
        if isinstance(meta, m.GenMeta):
            for c in meta.candidates:
                found.append((c.token_ids, c.finish_reason, c.matched_stop, c.completion_tokens))
                found += [c.forced_tokens] if with_forced else []
                found += [rounded(t) for t in c.logprobs]
            found += [rounded(t) for t in meta.prompt_logprobs]
            found.append(meta.prompt_tokens)
        if isinstance(meta, m.SelectMeta):
            found.append((meta.index, [round(score, 3) for score in meta.scores]))
        found.append((op, done.value))
    texts: dict[tuple[int, int], str] = {}
    for delta in outcome.deltas:
        texts[delta.op, delta.index] = texts.get((delta.op, delta.index), "") + delta.text
    return found, texts, sorted(outcome.failed), outcome.ends


def rounded(token: m.TokenLogprob) -> object:
    return (token.token_id, token.logprob and round(token.logprob, 3), [top[0] for top in token.top])


@pytest.mark.parametrize("graphs", ["auto", "off"])
@pytest.mark.parametrize("speculative", ["auto", "off"])
def test_answers_with_overlap_equal_those_without(tiny_model_path: Path, graphs: str, speculative: str) -> None:
    want = answers(engine_of(tiny_model_path, speculative=speculative), mixed())
    device = StandIn()
    with using(traced(CPU)):
        got = answers(engine_of(tiny_model_path, device, speculative=speculative, cuda_graphs=graphs), mixed())
        step = answers(engine_of(tiny_model_path, StandIn(), speculative=speculative, overlap="off"), mixed())
    assert got == want
    assert step == want
    assert bool(device.graphs) is (graphs == "auto")


def long_story(i: int, params: SamplingParams) -> list[AnyOp]:
    return [Text(op=0, seq=0, text=f"{i} {WORDS[i % 8]}"), Gen(op=1, seq=0, params=params), Close(op=2, seq=0)]


@pytest.mark.parametrize("num_slots", [100, 150, 900])
def test_overlap_with_preemption_changes_no_answer(tiny_model_path: Path, num_slots: int) -> None:
    long = SamplingParams(max_tokens=70, temperature=0, ignore_eos=True)
    stopped = SamplingParams(max_tokens=70, temperature=0, stop=("e", "a", "t"))
    programs = [long_story(i, (long, stopped, GREEDY)[i % 3]) for i in range(12)]
    want = answers(engine_of(tiny_model_path, has_grammars=False, num_slots=num_slots), programs)
    ahead = engine_of(tiny_model_path, StandIn(), has_grammars=False, num_slots=num_slots)
    assert answers(ahead, programs) == want
    assert (ahead.scheduler.num_preemptions > 0) is (num_slots < 900)


def test_overlap_changes_no_answer_when_a_sequence_just_fits_the_pool(tiny_model_path: Path) -> None:
    """The last token needs no slot of its own, so the pool may be full by then."""
    params = SamplingParams(max_tokens=40, temperature=0, stop=("e",))
    text = [Text(op=0, seq=0, text="A lone sequence: "), Gen(op=1, seq=0, params=params), Close(op=2, seq=0)]
    options: dict[str, Any] = {"has_grammars": False, "speculative": "off"}
    alone = answers(engine_of(tiny_model_path, **options), [text])
    for num_slots in range(18, 60, 3):
        options["num_slots"] = num_slots
        want = answers(engine_of(tiny_model_path, **options), [text])
        assert answers(engine_of(tiny_model_path, StandIn(), **options), [text]) == want
        if want == alone:
            return
    raise AssertionError("no pool was large enough")


def test_vectorised_decode_waits_once_a_step_and_reads_nothing_else(tiny_model_path: Path) -> None:
    device = StandIn()
    engine = engine_of(tiny_model_path, device, max_running=10)
    driver = Driver(engine)
    params = SamplingParams(max_tokens=60, temperature=0.8, seed=3, top_p=0.9, ignore_eos=True)
    penalised = SamplingParams(max_tokens=60, temperature=0, presence_penalty=0.3, ignore_eos=True)
    masked = GrammarSpec("regex", "[a-z]{60}")
    engine.grammars.compile(masked).result()  # so that it starts with the others
    plain = [story(0, params), story(1, GREEDY), story(2, penalised), story(3, params, grammar=masked)]
    for ops in [*plain, *(story(i, params) for i in range(4, 8)), *(story(8, params),) * 2]:
        driver.submit(ops[:2] + ops[4:])
    with using(traced(CPU)), HostReads(device) as reads:
        while engine.scheduler.num_waiting or not engine.scheduler.running or engine.generations.compiling:
            driver.step()
        for _ in range(6):
            driver.step()
        device.log.clear()
        for _ in range(20):
            driver.step()
        assert reads.found == []
    assert device.log.count("wait") == 20
    assert device.log.count("download") == 20
    # In each step the host queues the forward, reads the previous step, then queues the draws.
    for step in " ".join(device.log).split("download")[1:-1]:
        assert step.split().index("wait") > step.split().index("replay"), step
    assert device.log.count("replay") == 20


def test_host_reads_finds_a_call_that_waits_for_the_device() -> None:
    device = StandIn()
    from phloem.kernels import reference

    x = torch.zeros(2, 8)
    starts, ones = torch.tensor([0, 1, 2], dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    cache = torch.zeros(4, 1, 8)
    with HostReads(device) as reads:
        reference.paged_attention(
            x.view(2, 1, 8), cache, cache, torch.zeros(2, 4, dtype=torch.int32), starts[:2], starts, ones, scale=1.0
        )
    file = "kernels/reference.py"
    assert {(place.what, place.file) for place in reads.found} == {("tolist", file), ("__int__", file)}


def test_cancel_drops_the_token_being_drawn_and_frees_its_slots(tiny_model_path: Path) -> None:
    engine = engine_of(tiny_model_path, StandIn(), speculative="off")
    driver = Driver(engine)
    kept = driver.submit(story(1, GREEDY), program="kept")
    for program in ("op", "all"):
        driver.submit(story(2, SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)), program=program)
    for _ in range(8):
        driver.step()
    assert engine.loop.flight is not None and len(engine.loop.flight.draws) == 3
    driver.say(m.Cancel("op", op=1))
    driver.say(m.Cancel("all"))
    driver.run()
    assert driver.outcomes["all"].failed[1].error.kind == "Cancelled"
    assert driver.outcomes["op"].failed[1].error.kind == "Cancelled"
    alone = Driver(engine_of(tiny_model_path, speculative="off")).run(story(1, GREEDY))
    assert kept.value(1) == alone.value(1) and kept.value(3) == alone.value(3)
    assert engine.cache.num_leased == 0


def test_a_client_can_leave_while_a_step_is_computed(tiny_model_path: Path) -> None:
    engine = engine_of(tiny_model_path, StandIn(), speculative="off")
    driver = Driver(engine)
    driver.submit(story(0, SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)))
    for _ in range(6):
        driver.step()
    engine.drop_client(CLIENT)
    assert engine.has_work  # the step that is being computed
    driver.run()
    assert not engine.has_work and engine.cache.num_leased == 0


def test_few_sequences_wait_for_drafts_while_these_are_accepted(tiny_model_path: Path) -> None:
    """A grammar with little choice: drafts are accepted, so the engine waits for tokens to draft after them."""
    ops = [
        Text(op=0, seq=0, text="abcabcabcabcabcabcabcabc"),
        Gen(op=1, seq=0, params=replace_max(GREEDY, 60), grammar=GrammarSpec("regex", "([abc]{3}){20}")),
        Close(op=2, seq=0),
    ]
    want = Driver(engine_of(tiny_model_path, speculative="off", jump_forward=False)).run(ops)
    engine = engine_of(tiny_model_path, StandIn(), jump_forward=False)
    got = Driver(engine).run(ops)
    assert got.value(1) == want.value(1)
    assert engine.metrics()["drafted_tokens"]


@pytest.mark.parametrize("order", ["shortest_remaining", "oldest_program"])
def test_sequences_that_yield_to_more_urgent_ones_give_equal_answers(tiny_model_path: Path, order: str) -> None:
    """Twelve long sequences, ten at a time; short ones, with a higher priority where the order uses it, come later."""
    long, short = (SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in (90, 6))
    programs = [long_story(i, long if i < 12 else short) for i in range(20)]
    priorities = [1 if i < 12 or order == "shortest_remaining" else 0 for i in range(20)]
    options: dict[str, Any] = {"has_grammars": False, "num_slots": 4000}
    want = answers(engine_of(tiny_model_path, **options), programs)
    for device in (None, StandIn()):
        engine = engine_of(tiny_model_path, device, order=order, max_running=10, speculative="off", **options)
        driver, outcomes = Driver(engine), []
        for i, (ops, priority) in enumerate(zip(programs, priorities, strict=True)):
            outcomes.append(driver.submit(ops, settings=m.ProgramSettings(priority=priority)))
            for _ in range(0 if i < 11 else 4):
                driver.step()
        driver.run()
        assert [shown(outcome) for outcome in outcomes] == want
        assert engine.scheduler.counters.num_yields > 0
        engine.close()
