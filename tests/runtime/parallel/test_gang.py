"""Ranks as processes: the bits of virtual ranks, and no hang and no lost answer whatever ends or stops.

The restarts take most of the time, so one runtime serves the whole module.
"""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import phloem
import pytest
from phloem.engines import Completion
from phloem.protocol import ops as o
from phloem.protocol.errors import Unsupported
from phloem.protocol.sampling import SamplingParams
from phloem.runtime.config import SPLITS, EngineConfig
from phloem.runtime.engine import EngineCore
from phloem.tests.runtime.engine.driver import Driver
from phloem.tests.runtime.models.tiny import make_tiny_model
from phloem.tests.runtime.parallel.virtual import VirtualGang

MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
PROMPTS = ["the sap rises", "木 and leaf " * 9, "42"]
GREEDY = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
LISTED = {"temperature": 1.2, "top_k": 30, "seed": 5, "max_tokens": 12, "ignore_eos": True}
WHOLE = {"temperature": 0.9, "top_p": 0.9, "seed": 6, "max_tokens": 12, "ignore_eos": True}
LONG = {"temperature": 0.0, "max_new_tokens": 40, "ignore_eos": True}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    path = make_tiny_model(tmp_path_factory.mktemp("gang") / "model", seed=1, family="qwen3_moe", **MOE)
    ranks = {"tensor_parallel": 2, "expert_parallel": 2, "expert_copies": 1, "rank_timeout_s": 4.0}
    sizes = {"num_slots": 4096, "max_step_tokens": 2048, "prefill_chunk": 2048}
    return EngineConfig(model=str(path), precision="float32", num_threads=1, **sizes, **ranks)


@pytest.fixture(scope="module")
def runtime(config: EngineConfig) -> Iterator[phloem.Runtime]:
    with phloem.Runtime(config, replicas=1) as runtime:
        yield runtime


def children(pid: int) -> list[int]:
    """The processes that a process has started."""
    found: list[int] = []
    for tasks in Path(f"/proc/{pid}/task").iterdir():
        found += map(int, (tasks / "children").read_text().split())
    return found


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def drawn(completion: Completion) -> list[tuple[int, float]]:
    return [(one.token_id, one.logprob) for one in completion.meta.candidates[0].logprobs]


def check_bits(runtime: phloem.Runtime, config: EngineConfig, prompts: list[str]) -> None:
    before = runtime.fleet()[0].restarts
    runtime.flush_cache()  # torch's products of other numbers of rows may round otherwise
    engine = EngineCore(config, gang=VirtualGang(config))
    driver = Driver(engine)
    for params in (GREEDY, LISTED, WHOLE):
        for prompt in prompts:
            given: dict[str, Any] = params | {"return_logprob": True, "speculative": False}
            outcome = driver.run(
                [
                    o.Text(op=0, seq=0, text=prompt),
                    o.Gen(op=1, seq=0, params=SamplingParams(**given)),
                    o.Close(op=2, seq=0),
                ]
            )
            expected = [(one.token_id, one.logprob) for one in outcome.done[1].meta.candidates[0].logprobs]
            assert len(expected) == 12
            assert drawn(runtime.generate(prompt, **given)) == expected, (params, prompt)
    assert runtime.fleet()[0].restarts == before
    engine.close()


def test_processes_draw_with_the_bits_of_virtual_ranks(runtime: phloem.Runtime, config: EngineConfig) -> None:
    check_bits(runtime, config, PROMPTS)


def check_tokens(
    runtime: phloem.Runtime, config: EngineConfig, prompts: list[str], *, until: Callable[[], bool] = lambda: True
) -> None:
    """They are those of one rank, also when they are drawn again, at most ten times before ``until`` and once after."""
    whole = dict.fromkeys((*SPLITS, "expert_parallel"), 1)
    driver = Driver(EngineCore(msgspec.structs.replace(config, **whole, expert_copies=0)))
    expected = []
    for prompt in prompts:
        gen = o.Gen(op=1, seq=0, params=SamplingParams(**GREEDY))
        outcome = driver.run([o.Text(op=0, seq=0, text=prompt), gen, o.Close(op=2, seq=0)])
        expected.append(outcome.done[1].meta.candidates[0].token_ids)
    driver.engine.close()
    for _ in range(10):
        is_last = until()
        runtime.flush_cache()
        found = [runtime.generate(prompt, **GREEDY).meta.candidates[0].token_ids for prompt in prompts]
        assert found == expected
        if is_last:
            return
    raise AssertionError("it did not become true")


def test_processes_copy_experts_and_draw_the_tokens_of_one_rank_before_and_after(
    runtime: phloem.Runtime, config: EngineConfig
) -> None:
    """Each prompt is one step, which is long enough for copies to be used. A review, due after so many tokens, looks at
    one of two mixtures, and not each gains by copies.
    """

    def copies() -> Any:
        return runtime.info()["expert_copies"]

    assert copies()["num_copied"] == 0
    prompts = [f"{i} of the leaves rose, " * 84 for i in range(5)]
    check_tokens(runtime, config, prompts, until=lambda: copies()["num_copied"] >= 1)
    assert any(one["copies"] for one in copies()["mixtures"])


async def ended_midway(runtime: phloem.Runtime, prompt: str, pid: int, number: signal.Signals) -> str:
    """The text of a long generation; ``pid`` gets the signal once its first piece has come."""
    text = ""
    async for piece in runtime.async_generate(prompt, LONG):
        if not text:
            os.kill(pid, number)
        text += piece
    return text


def test_a_program_goes_on_after_the_loss_of_rank_0_and_no_process_stays(runtime: phloem.Runtime) -> None:
    prompt = "rank 0 is killed " * 4
    expected = runtime.generate(prompt, None, temperature=0.0, max_tokens=40, ignore_eos=True).text
    before = runtime.fleet()[0]
    (other,) = children(before.pid)
    midway = ended_midway(runtime, prompt, before.pid, signal.SIGKILL)
    assert asyncio.run(asyncio.wait_for(midway, 240.0)) == expected
    assert runtime.fleet()[0].restarts > before.restarts
    assert not is_alive(other) and not is_alive(before.pid)


def test_a_rank_is_lost_while_nothing_runs_and_the_next_program_is_answered(runtime: phloem.Runtime) -> None:
    before = runtime.fleet()[0]
    os.kill(children(before.pid)[0], signal.SIGKILL)
    assert runtime.generate("idle", **GREEDY).text == runtime.generate("idle", **GREEDY).text
    assert runtime.fleet()[0].restarts > before.restarts


def test_stages_draw_with_the_bits_of_virtual_ranks_and_outlive_a_stopped_rank(config: EngineConfig) -> None:
    """Two stages of two ranks that each have half of the experts; one of the last stage is stopped."""
    staged = msgspec.structs.replace(config, pipeline_parallel=2)
    with phloem.Runtime(staged, replicas=1) as runtime:
        check_bits(runtime, staged, [PROMPTS[1]])
        check_tokens(runtime, staged, PROMPTS)
        expected = runtime.generate("stage " * 9, None, temperature=0.0, max_tokens=40, ignore_eos=True).text
        before = runtime.fleet()[0]
        ranks = sorted(children(before.pid))
        midway = ended_midway(runtime, "stage " * 9, ranks[2], signal.SIGSTOP)
        assert asyncio.run(asyncio.wait_for(midway, 240.0)) == expected
        assert runtime.fleet()[0].restarts > before.restarts
        assert not any(map(is_alive, [before.pid, *ranks]))


def test_spread_slots_draw_with_the_bits_of_virtual_ranks_and_outlive_a_killed_rank(config: EngineConfig) -> None:
    """Prompts of more than 32 tokens are shared out between the two ranks. A rank's end is noticed in any split as in
    this one.
    """
    spread = msgspec.structs.replace(config, tensor_parallel=1, expert_parallel=1, expert_copies=0, sequence_parallel=2)
    with phloem.Runtime(spread, replicas=1) as runtime:
        check_bits(runtime, spread, PROMPTS[:2])
        check_tokens(runtime, spread, [*PROMPTS, "leaf " * 90])
        expected = runtime.generate("slot " * 9, None, temperature=0.0, max_tokens=40, ignore_eos=True).text
        before = runtime.fleet()[0]
        (other,) = children(before.pid)
        midway = ended_midway(runtime, "slot " * 9, other, signal.SIGKILL)
        assert asyncio.run(asyncio.wait_for(midway, 240.0)) == expected
        assert runtime.fleet()[0].restarts > before.restarts
        assert not is_alive(other) and not is_alive(before.pid)


def test_an_engine_on_a_thread_refuses_ranks(config: EngineConfig) -> None:
    with pytest.raises(
        Unsupported, match=r"tensor_parallel=2: an engine on a thread has one process; use phloem.Runtime"
    ):
        phloem.Engine(config)
