"""Keys and values spread over ranks give the logits of one rank, whoever runs a token and whoever keeps it."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from phloem import kernels
from phloem.protocol.errors import InvalidParams
from phloem.runtime.config import EngineConfig
from phloem.runtime.layers.batch import ForwardBatch, StepArrays
from phloem.runtime.parallel import sequence
from phloem.runtime.parallel.mesh import Mesh
from phloem.runtime.parallel.sequence import OwnedSlots, joined
from phloem.runtime.scheduler.plan import DecodePart, PlanRow, StepPlan
from phloem.tests.runtime.models.families import FAMILIES, make_family
from phloem.tests.runtime.models.lora import make_adapter
from phloem.tests.runtime.models.tiny import make_tiny_gguf, make_tiny_model
from phloem.tests.runtime.parallel.staged import config, staged_logits, whole_logits

MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}
BOTH_WAYS = (8, 1_000)  # tokens of each rank from which they are shared out: the test's prompts, and none

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")


@pytest.fixture(params=BOTH_WAYS, ids=["shared out", "run by all"])
def shared_tokens(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(sequence, "SHARED_TOKENS", request.param)
    return request.param


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("mesh", [Mesh(sequence=2), Mesh(sequence=4)], ids=str)
def test_ranks_compute_the_logits_of_one(family: str, mesh: Mesh, shared_tokens: int, tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / family, seed=1, family=family, **(MOE if "moe" in family else {}))
    found, read = staged_logits(path, mesh, config(path))
    assert (found - whole_logits(path, config(path))).abs().max() <= 1e-4
    head = 4 * 259 * 64
    assert read[1:] == [read[0] - head] * (mesh.sequence - 1)  # the head is read by rank 0 alone


@pytest.mark.parametrize(
    "mesh", [Mesh(tensor=2, sequence=2), Mesh(pipeline=2, sequence=2), Mesh(2, 2, 1, 2), Mesh(2, 1, 2, 2)], ids=str
)
def test_slots_layers_tensors_and_experts_are_split_together(mesh: Mesh, shared_tokens: int, tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "model", seed=1, family="qwen3_moe", **MOE)
    found, _ = staged_logits(path, mesh, config(path))
    assert (found - whole_logits(path, config(path))).abs().max() <= 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_s_attention_is_spread(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows, soft caps, latents, positions that are learned: a prompt shared out, then tokens run by all."""
    monkeypatch.setattr(sequence, "SHARED_TOKENS", 8)
    path = make_family(tmp_path / family, FAMILIES[family])
    expected = whole_logits(path, config(path))
    found, _ = staged_logits(path, Mesh(sequence=3), config(path))
    assert (found - expected).abs().max() <= 1e-4 * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize(
    ("precision", "kv_dtype", "tolerance"),
    [("int16", "auto", 0.02), ("float32", "int8", 1e-4), ("float32", "bfloat16", 1e-4)],
)
def test_packed_weights_and_other_types_of_keys(
    precision: str, kv_dtype: str, tolerance: float, shared_tokens: int, tmp_path: Path
) -> None:
    path = make_tiny_gguf(tmp_path / "packed.gguf", seed=5, kinds={"weight": "Q4_1"}, hidden_size=128)
    options = config(path, precision=precision, kv_dtype=kv_dtype)
    expected = whole_logits(path, options)
    found, _ = staged_logits(path, Mesh(sequence=2), options)
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()


def test_adapters_go_with_the_tokens_of_each_rank(shared_tokens: int, tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "model", seed=2)
    adapter = make_adapter(tmp_path / "adapter", path, seed=3, rank=4, targets=("q_proj", "o_proj", "down_proj"))
    options = config(path, adapters={"poet": str(adapter)})
    found, _ = staged_logits(path, Mesh(tensor=2, sequence=2), options, adapter=0)
    assert (found - whole_logits(path, options, adapter=0)).abs().max() <= 1e-4


def random_steps(rng: np.random.Generator, *, num_rows: int, max_len: int) -> Iterator[StepPlan]:
    """Rows that grow, are cut back and change places; every slot that a row brings is a new one."""
    slots, free = [np.zeros(0, np.int32) for _ in range(num_rows)], iter(rng.permutation(100_000).astype(np.int32))
    known = [0] * num_rows
    for step in range(40):
        rows = []
        for row in rng.permutation(num_rows)[: rng.integers(1, num_rows + 1)]:
            keep = int(rng.integers(0, len(slots[row]) + 1)) if rng.random() < 0.3 else len(slots[row])
            cached, new = int(rng.integers(0, 9)) if rng.random() < 0.3 else 0, int(rng.integers(1, 9))
            start = min(keep + cached, max_len - new)
            more = np.fromiter((next(free) for _ in range(start + new - min(keep, start))), np.int32)
            slots[row] = np.concatenate((slots[row][: min(keep, start)], more))
            stale_from = min(known[row], keep, start)
            known[row] = start + new
            ids = np.zeros(new, np.int32)
            rows.append(PlanRow(int(row), int(row), start, ids, slots[row].copy(), stale_from, int(rng.integers(0, 2))))
            if len(slots[row]) >= max_len - 9:
                slots[row], known[row] = slots[row][:3], 3
        yield StepPlan(step, tuple(rows))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_each_slot_has_one_owner_and_each_token_sees_all_before_it(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence, "SHARED_TOKENS", 4)
    rng, window, num_rows, max_len = np.random.default_rng(size), 5, 5, 64
    kinds = {"windows": frozenset({0, window}), "spare_slot": 99_999, "max_rows": num_rows, "max_len": max_len}
    ranks = [OwnedSlots(rank, size, **kinds) for rank in range(size)]
    table = np.zeros((num_rows, max_len), np.int32)
    for plan in random_steps(rng, num_rows=num_rows, max_len=max_len):
        step = StepArrays.of(plan)
        ForwardBatch.from_arrays(step, table)
        batches = [rank.batch(step) for rank in ranks]
        for t, (row, position) in enumerate(zip(step.token_rows.tolist(), step.positions.tolist(), strict=True)):
            for first, wanted in ((None, 0), (window, max(0, position + 1 - window))):
                found: list[int] = []
                for rank, batch in enumerate(batches):
                    assert batch.spread is not None
                    low = 0 if first is None else int(batch.spread.firsts[first][t])
                    local = batch.slot_table[row, low : int(batch.spread.ends[t])]
                    found += [int(slot) * size + rank for slot in local]
                assert sorted(found) == sorted(table[row, wanted : position + 1].tolist())
        is_shared_out = step.num_tokens >= 4 * size
        assert sum(batch.num_tokens for batch in batches) == step.num_tokens * (1 if is_shared_out else size)
        for rank, batch in enumerate(batches):
            spread = batch.spread
            assert spread is not None and spread.num_logits == len(step.logits_rows)
            mine = step.out_slots[step.out_slots % size == rank] // size
            if spread.shares is None:
                written = batch.out_slots.numpy()
                assert written[written != 99_999].tolist() == mine.tolist() and len(written) == step.num_tokens
                assert batch.logits_rows.tolist() == step.logits_rows.tolist()
            else:
                assert spread.shares.slots.tolist() == mine.tolist() and sum(spread.shares.taken) == len(mine)
                of_logits = [r + spread.own.start for r in batch.logits_rows.tolist()]
                assert of_logits == [r for r in step.logits_rows.tolist() if r in spread.own]
                assert spread.shares.num_logits[rank] == len(of_logits)
                for other, tokens in enumerate(spread.shares.given):
                    owners = step.out_slots[spread.own.start + tokens.numpy()] % size
                    assert (owners == other).all()


def test_a_decode_of_many_rows_is_that_of_single_rows() -> None:
    kinds = {"windows": frozenset({0}), "spare_slot": 99, "max_rows": 3, "max_len": 20}
    one, other = (OwnedSlots(1, 2, **kinds) for _ in range(2))
    for at in range(6):
        slots = np.array([at, 30 + at, 50 + at // 2], np.int32)
        rows, starts, ids = np.arange(3), np.full(3, at), np.zeros(3, np.int32)
        decode = StepPlan(at, (), DecodePart(rows, rows, starts, ids, slots))
        plain = [PlanRow(i, i, at, ids[:1], np.array([*[0] * at, slots[i]], np.int32), at, 1) for i in range(3)]
        batches = one.batch(StepArrays.of(decode)), other.batch(StepArrays.of(StepPlan(at, tuple(plain))))
        first, second = batches
        assert first.spread is not None and second.spread is not None
        assert torch.equal(first.spread.ends, second.spread.ends) and torch.equal(first.slot_table, second.slot_table)
        assert torch.equal(first.out_slots, second.out_slots) and torch.equal(first.kv_lens, second.kv_lens)


def test_parts_over_any_keys_join_to_attention_over_all() -> None:
    rng = torch.Generator().manual_seed(1)
    tokens, heads, kv_heads, dim, length = 5, 4, 2, 16, 600
    q = torch.randn(tokens, heads, dim, generator=rng)
    k, v = (torch.randn(length, kv_heads, dim, generator=rng) for _ in range(2))
    owner = torch.randint(0, 4, (length,), generator=rng)
    owner[owner == 3] = 0  # one rank owns nothing, another most
    rows = (torch.zeros(1, dtype=torch.int32), torch.tensor([0, tokens], dtype=torch.int32))
    whole = kernels.paged_attention(
        q, k, v, torch.arange(length, dtype=torch.int32)[None], *rows, torch.tensor([length]), scale=0.3
    )
    parts = []
    for rank in range(4):
        held = (owner == rank).nonzero().flatten()
        table = torch.zeros(1, length, dtype=torch.int32)
        table[0, : len(held)] = held.int()
        ends = torch.tensor([int((held <= length - tokens + t).sum()) for t in range(tokens)], dtype=torch.int32)
        out, logs = kernels.partial_attention(q, k, v, table, *rows, ends, scale=0.3)
        parts.append(torch.cat((out, logs.unsqueeze(2)), 2))
    torch.testing.assert_close(joined(parts), whole, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sequence_parallel": 0}, "sequence_parallel=0: it must be 1 to 64"),
        (
            {"tensor_parallel": 8, "sequence_parallel": 16},
            "tensor_parallel=8 and sequence_parallel=16: 8 x 1 x 16 is 128 ranks, but at most 64 can work together",
        ),
        ({"expert_parallel": 2, "sequence_parallel": 2}, "expert_parallel=2: experts are shared out over the ranks of"),
    ],
)
def test_a_mesh_that_no_machine_has_is_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(InvalidParams, match=message):
        Mesh.of(EngineConfig(model="m", **options))


def test_ranks_stand_in_the_order_of_stages_slots_and_tensors() -> None:
    mesh = Mesh(tensor=2, pipeline=2, sequence=3)
    assert mesh.size == 12 and [mesh.stage_of(rank) for rank in (5, 6)] == [0, 1]
    assert [(mesh.sequence_rank_of(rank), mesh.tensor_rank_of(rank)) for rank in (6, 7, 8, 11)] == [
        *((0, 0), (0, 1)),
        *((1, 0), (2, 1)),
    ]
    assert list(mesh.sequence_ranks(9)) == [7, 9, 11] and list(mesh.tensor_ranks(9)) == [8, 9]
    assert list(mesh.head_ranks()) == [6, 7]
    assert [mesh.pool_slots(count) for count in (6, 7)] == [3, 4] and Mesh(tensor=2).pool_slots(7) == 7
