"""An engine on a split model gives the answers of an engine on the whole one, for every kind of op and option."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from phloem.constrained.spec import GrammarSpec
from phloem.protocol import messages as m
from phloem.protocol import ops as o
from phloem.protocol.errors import InvalidParams, Unsupported
from phloem.protocol.sampling import SamplingParams
from phloem.runtime.config import SPLITS, EngineConfig
from phloem.runtime.engine import EngineCore
from phloem.tests.runtime.engine.driver import CLIENT, GREEDY, Driver, generate, prompts
from phloem.tests.runtime.models.lora import make_adapter
from phloem.tests.runtime.models.tiny import make_tiny_model
from phloem.tests.runtime.parallel.virtual import VirtualGang

P = SamplingParams
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}
JSON = '{"type":"object","properties":{"ab":{"enum":["x","yy"]},"c":{"type":"integer"}}}'
# Draws from a few tokens of each rank, draws from all logits, and products of the head for other reasons.
REQUESTS: dict[str, tuple[P, GrammarSpec | None]] = {
    "greedy": (P(temperature=0.0, max_tokens=20, ignore_eos=True), None),
    "top_k": (P(temperature=1.3, top_k=20, top_p=0.9, min_p=0.01, seed=6, max_tokens=20), None),
    "sampled": (P(temperature=0.8, seed=5, max_tokens=20), None),
    "penalised": (P(temperature=0.9, seed=7, max_tokens=20, frequency_penalty=0.7, repetition_penalty=1.3), None),
    "biased": (P(temperature=1.0, seed=8, max_tokens=20, logit_bias={65: 4.0, 66: 4.0, 10: -100.0}), None),
    "logprobs": (P(temperature=0.0, max_tokens=9, return_logprob=True, top_logprobs_num=3, logprob_start_len=0), None),
    "regex": (P(temperature=0.0, max_tokens=30), GrammarSpec("regex", "(abc|abd)[a-f]{3,9} end(ing)?")),
    "json": (P(temperature=1.0, seed=13, max_tokens=40), GrammarSpec("json_schema", JSON)),
}

# Of each kind of split: the model, its ranks of tensors, and the rest of its options.
KINDS: dict[str, tuple[str, int, dict[str, int]]] = {
    "tensors": ("llama", 2, {}),
    "stages": ("llama", 1, {"pipeline_parallel": 2}),
    "sequences": ("llama", 1, {"sequence_parallel": 2}),
    "experts": ("qwen3_moe", 2, {"expert_parallel": 2, "expert_copies": 1}),
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    at = tmp_path_factory.mktemp("models")
    return {
        "llama": make_tiny_model(at / "llama", seed=1),
        "qwen3": make_tiny_model(at / "qwen3", seed=2, family="qwen3"),
        "qwen3_moe": make_tiny_model(at / "moe", seed=3, family="qwen3_moe", **MOE),
    }


@pytest.fixture(scope="module")
def whole(paths: dict[str, Path]) -> Callable[..., dict[str, Any]]:
    """The answers of an engine of one rank, which are asked for by many tests and made once."""

    @functools.cache
    def whole(model: str) -> dict[str, Any]:
        engine = EngineCore(config_of(paths[model], tensor_parallel=1))
        found = answers(Driver(engine))
        engine.check()
        engine.close()
        return found

    return whole


def config_of(path: Path, **options: Any) -> EngineConfig:
    return EngineConfig(**({"model": str(path), "precision": "float32", "num_slots": 2048, "num_threads": 1} | options))


@pytest.fixture
def start(paths: dict[str, Path]) -> Iterator[Callable[..., Driver]]:
    """Starts an engine on ``ranks`` ranks of tensors, and ``pipeline_parallel`` stages if the options have it."""
    engines: list[EngineCore] = []

    def start(ranks: int, model: str = "llama", **options: Any) -> Driver:
        config = config_of(paths[model], **({"tensor_parallel": ranks} | options))
        engines.append(EngineCore(config, gang=VirtualGang(config) if config.num_ranks > 1 else None))
        return Driver(engines[-1])

    yield start
    for engine in engines:
        engine.drop_client(CLIENT)
        engine.check()
        engine.close()


def answers(driver: Driver) -> dict[str, Any]:
    """The tokens of every request, all at once, and the log-probabilities of one."""
    outcomes = {}
    for i, (name, (params, grammar)) in enumerate(REQUESTS.items()):
        text = f"the {name} sap rises, the sap falls; " * (1 + i % 3)
        ops = [o.Text(op=0, seq=0, text=text), o.Gen(op=1, seq=0, params=params, grammar=grammar)]
        outcomes[name] = driver.submit([*ops, o.Close(op=2, seq=0)])
    driver.run()
    found = {}
    for name, outcome in outcomes.items():
        assert outcome.rejected is None and not outcome.failed, name
        found[name] = outcome.done[1].meta.candidates[0]
    return found


@pytest.mark.parametrize(
    ("model", "ranks", "stages", "experts", "sequences"),
    [
        ("llama", 2, 1, 1, 1),
        ("llama", 4, 1, 1, 1),
        ("qwen3", 2, 1, 1, 1),
        ("qwen3_moe", 2, 1, 2, 1),
        ("llama", 1, 2, 1, 1),
        ("qwen3", 2, 2, 1, 1),
        ("qwen3_moe", 4, 1, 2, 1),
        ("llama", 1, 1, 1, 2),
        ("qwen3", 1, 1, 1, 4),
        ("qwen3_moe", 2, 1, 2, 2),
        ("llama", 1, 2, 1, 2),
    ],
)
def test_every_kind_of_draw_is_that_of_one_rank(
    start: Callable[..., Driver],
    whole: Callable[..., dict[str, Any]],
    model: str,
    ranks: int,
    stages: int,
    experts: int,
    sequences: int,
) -> None:
    split = {"pipeline_parallel": stages, "expert_parallel": experts, "sequence_parallel": sequences}
    expected, found = whole(model), answers(start(ranks, model, **split))
    assert {name: one.token_ids for name, one in found.items()} == {
        name: one.token_ids for name, one in expected.items()
    }
    for one, other in zip(found["logprobs"].logprobs, expected["logprobs"].logprobs, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [top[0] for top in one.top] == [top[0] for top in other.top]


@pytest.mark.parametrize(
    "options",
    [
        {"prefix_cache": False},
        {"prefill_chunk": 7, "max_step_tokens": 24},
        {"num_slots": 160, "max_running": 8},  # sequences are preempted
        {"speculative": "off"},
    ],
    ids=lambda options: "-".join(options),
)
@pytest.mark.parametrize("split", KINDS)
def test_options_change_no_answer_of_two_ranks(
    start: Callable[..., Driver], whole: Callable[..., dict[str, Any]], options: dict[str, Any], split: str
) -> None:
    model, ranks, given = KINDS[split]
    expected, found = whole(model), answers(start(ranks, model, **given, **options))
    assert {name: one.token_ids for name, one in found.items()} == {
        name: one.token_ids for name, one in expected.items()
    }


@pytest.mark.parametrize("split", KINDS)
def test_keys_and_values_in_eight_bits_are_those_of_one_rank(start: Callable[..., Driver], split: str) -> None:
    model, ranks, given = KINDS[split]
    whole, parts = start(1, model, kv_dtype="int8"), start(ranks, model, kv_dtype="int8", **given)
    expected, found = answers(whole), answers(parts)
    assert {name: one.token_ids for name, one in found.items()} == {
        name: one.token_ids for name, one in expected.items()
    }
    assert parts.engine.info()["kv_dtype"] == "int8"
    assert 2 * parts.engine.info()["kv_bytes"] <= 1.01 * whole.engine.info()["kv_bytes"]  # a spare slot for sequences


@pytest.mark.parametrize("split", KINDS)
def test_forks_select_scores_and_joins_are_those_of_one_rank(start: Callable[..., Driver], split: str) -> None:
    model, ranks, given = KINDS[split]

    def run(driver: Driver) -> list[object]:
        ops: list[o.AnyOp] = [o.Text(op=0, seq=0, text="the phloem "), o.Fork(op=1, seq=0, children=(1, 2))]
        for child in (1, 2):
            ops.append(o.Text(op=10 + child, seq=child, text=f"child {child}: "))
            ops.append(o.Gen(op=20 + child, seq=child, params=GREEDY, n=1))
        ops.append(o.Join(op=30, seq=0, children=(1, 2), mode="concate_and_append"))
        ops += [o.Select(op=31, seq=0, choices=("yes", "no", "perhaps so")), o.Gen(op=32, seq=0, params=GREEDY)]
        outcome = driver.run([*ops, o.Close(op=33, seq=0), o.Close(op=34, seq=1), o.Close(op=35, seq=2)])
        assert outcome.rejected is None
        return [outcome.value(op) for op in (21, 22, 31, 32, 33)]

    assert run(start(ranks, model, **given)) == run(start(1, model))


def test_vectors_beside_generations_are_those_of_one_rank(start: Callable[..., Driver]) -> None:
    def run(driver: Driver) -> tuple[Any, ...]:
        outcomes = []
        for text in prompts(2):
            vector = [o.Text(op=0, seq=0, text=text), o.Embedding(op=1, seq=0, pooling="mean"), o.Close(op=2, seq=0)]
            outcomes.append(driver.submit(vector))
            outcomes.append(driver.submit([o.Text(op=0, seq=0, text=text), o.Gen(op=1, seq=0, params=GREEDY)]))
        driver.run()
        return tuple(outcome.value(1) for outcome in outcomes)

    expected = run(start(1))
    for split in SPLITS:
        found = run(start(1, **{split: 2}))
        assert found[1::2] == expected[1::2]
        for one, other in zip(found[::2], expected[::2], strict=True):
            vector = np.frombuffer(one, np.float32)
            assert len(vector) == 64 and np.allclose(vector, np.frombuffer(other, np.float32), atol=1e-4)


@pytest.mark.parametrize("split", KINDS)
def test_drafts_are_accepted_by_two_ranks(start: Callable[..., Driver], split: str) -> None:
    """A text that is generated again is drafted from the cache."""
    params = P(temperature=0.0, max_tokens=40, ignore_eos=True)
    model, ranks, given = KINDS[split]
    driver, alone = start(ranks, model, **given), start(1, model)
    first = generate(driver, "sap " * 20, params)[0]
    again, meta = generate(driver, "sap " * 20, params)
    assert again == first == generate(alone, "sap " * 20, params)[0]
    assert sum(one.accepted_tokens for one in meta.candidates) > 10


@pytest.mark.parametrize("split", KINDS)
def test_adapters_are_those_of_one_rank(
    start: Callable[..., Driver], paths: dict[str, Path], tmp_path: Path, split: str
) -> None:
    model, ranks, given = KINDS[split]
    targets = ("q_proj", "o_proj", *(("up_proj",) if model == "llama" else ()))  # experts have no adapters
    adapters = {"poet": str(make_adapter(tmp_path / "poet", paths[model], seed=4, rank=3, targets=targets))}

    def run(driver: Driver) -> list[object]:
        settings = [m.ProgramSettings(adapter="poet"), None]
        outcomes = [
            driver.submit([o.Text(op=0, seq=0, text=text), o.Gen(op=1, seq=0, params=GREEDY)], settings=one)
            for text in prompts(3)
            for one in settings
        ]
        driver.run()
        return [outcome.value(1) for outcome in outcomes]

    found = run(start(ranks, model, adapters=adapters, **given))
    assert found == run(start(1, model, adapters=adapters))
    assert found[0] != found[1]


def test_ranks_read_their_shares_and_follow_numbered_orders(start: Callable[..., Driver]) -> None:
    driver = start(2)
    generate(driver, "hello")
    ranks = driver.engine.info()["ranks"]
    whole = 4 * (2 * 259 * 64 + 64 + 2 * (2 * 64 + 64 * 64 * 2 + 2 * 32 * 64 + 3 * 64 * 128))
    assert sum(one["read"] for one in ranks) == whole + ranks[0]["replicated"]
    assert ranks[0]["replicated"] == ranks[1]["replicated"] == 4 * 64 * 5
    assert driver.engine.ranks is not None
    before = driver.engine.ranks.leader.num_orders
    generate(driver, "hello again", P(temperature=0.0, max_tokens=1))
    assert driver.engine.ranks.leader.num_orders == before + 2  # a plan, and a shortlist of tokens


def test_a_stage_holds_the_keys_and_values_of_its_layers_alone(start: Callable[..., Driver]) -> None:
    whole, staged = start(1).engine, start(1, pipeline_parallel=2).engine
    assert staged.info()["num_layers"] == whole.info()["num_layers"] == 2
    assert 2 * staged.info()["kv_bytes"] == whole.info()["kv_bytes"]
    read = [one["read"] for one in staged.info()["ranks"]]
    layer = 4 * (2 * 64 + 64 * 64 * 2 + 2 * 32 * 64 + 3 * 64 * 128)
    assert read == [4 * 259 * 64 + layer, 4 * 259 * 64 + layer + 4 * 64]


def test_two_ranks_that_spread_the_slots_have_twice_as_many_and_keep_half_of_each_sequence(
    start: Callable[..., Driver],
) -> None:
    whole, spread = start(1).engine, start(1, sequence_parallel=2, num_slots=4096).engine
    assert spread.info()["num_slots"] == 4096 == 2 * whole.info()["num_slots"]
    slot_bytes = whole.info()["kv_bytes"] // 2048
    assert spread.info()["kv_bytes"] == whole.info()["kv_bytes"] + slot_bytes  # one to spare
    generate(Driver(spread), "sap " * 30)
    written = int(spread.kv.k[0][:-1].abs().sum((1, 2)).count_nonzero())
    assert 60 <= written <= 70  # of 121 tokens and an answer of 12
    ranks = spread.info()["ranks"]
    head = 4 * 259 * 64
    assert ranks[0]["read"] - head == ranks[1]["read"] == ranks[0]["replicated"] == ranks[1]["replicated"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel": 0}, "tensor_parallel=0: it must be 1 to 64"),
        ({"tensor_parallel": 2, "rank_timeout_s": 0.0}, "rank_timeout_s=0.0: it must be above 0"),
        ({"tensor_parallel": 2, "device": "cuda:1"}, "device='cuda:1' with tensor_parallel=2: each rank has a GPU of"),
        ({"tensor_parallel": 2, "host_cache_bytes": 1 << 30}, "tensor_parallel=2 with host_cache_bytes"),
        ({"tensor_parallel": 2, "disk_cache": "/tmp/x"}, "tensor_parallel=2 with disk_cache"),
        ({"tensor_parallel": 2, "draft_model": "self:1"}, "tensor_parallel=2 with draft_model='self:1'"),
        ({"pipeline_parallel": 2, "shared_cache": "s3://a/b"}, "pipeline_parallel=2 with shared_cache='s3://a/b'"),
        ({"pipeline_parallel": 2, "disk_cache": "/tmp/x"}, "pipeline_parallel=2 with disk_cache"),
        ({"sequence_parallel": 2, "host_cache_bytes": 1 << 30}, "sequence_parallel=2 with host_cache_bytes"),
        ({"pipeline_parallel": 65}, "pipeline_parallel=65: it must be 1 to 64"),
    ],
)
def test_what_is_not_combined_is_refused_by_name(paths: dict[str, Path], options: dict[str, Any], message: str) -> None:
    with pytest.raises((InvalidParams, Unsupported), match=message):
        EngineCore(EngineConfig(model=str(paths["llama"]), **options))
