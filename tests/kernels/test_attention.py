"""Paged attention on the CPU against its reference, and the independence of a row from its batch."""

from dataclasses import dataclass

import pytest
import torch
from phloem import kernels
from phloem.kernels import reference
from phloem.kernels.cpu import attention_plan as planning
from phloem.kernels.quantized_kv import quantize_kv
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """Rows of ``kv_lens`` tokens, the last ``num_queries`` of which are queries, over scattered slots."""

    kv_lens: tuple[int, ...]
    num_queries: tuple[int, ...]
    num_heads: int = 9
    num_kv_heads: int = 3
    head_dim: int = 64

    def inputs(self, dtype: torch.dtype = torch.float32, cache_dtype: torch.dtype = torch.float32) -> list[Tensor]:
        num_rows, num_slots = len(self.kv_lens), sum(self.kv_lens) + 5
        # Unused slots hold NaN: a kernel that reads one is found out.
        caches = [torch.full((num_slots, self.num_kv_heads, self.head_dim), float("nan")) for _ in range(2)]
        order = torch.randperm(num_slots, dtype=torch.int32)
        table = torch.full((num_rows + 2, max(self.kv_lens, default=0) + 3), 2**30, dtype=torch.int32)
        row_ids = torch.randperm(num_rows + 2)[:num_rows].int()
        start = 0
        for row, kv_len in zip(row_ids.tolist(), self.kv_lens, strict=True):
            slots = order[start : start + kv_len]
            table[row, :kv_len] = slots
            for cache in caches:
                cache[slots.long()] = torch.randn(kv_len, self.num_kv_heads, self.head_dim)
            start += kv_len
        starts = torch.tensor([0, *self.num_queries]).cumsum(0).int()
        q = torch.randn(int(starts[-1]), self.num_heads, self.head_dim).to(dtype)
        k_cache, v_cache = (cache.to(cache_dtype) for cache in caches)
        return [q, k_cache, v_cache, table, row_ids, starts, torch.tensor(self.kv_lens, dtype=torch.int32)]


CASES = {
    "none": Case((), ()),
    "one_token": Case((1,), (1,)),
    "decode": Case((100, 64, 65, 1, 513), (1, 1, 1, 1, 1)),
    "mixed": Case((100, 65, 700, 31), (1, 3, 70, 31)),
    "chunks": Case((1500, 1030), (1, 25)),
    "odd_head": Case((70, 20), (9, 1), num_heads=4, num_kv_heads=1, head_dim=24),
    "tiny_head": Case((70, 20), (9, 1), num_heads=4, num_kv_heads=4, head_dim=8),
    "many_heads": Case((90,), (5,), num_heads=71, num_kv_heads=1, head_dim=16),
    "latent": Case((70, 3), (3, 1), num_heads=20, num_kv_heads=1, head_dim=576),
    "wide_head": Case((600, 3), (12, 2), num_heads=14, num_kv_heads=2, head_dim=128),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"sliding_window": 40}, {"soft_cap": 2.0, "sliding_window": 7}])
def test_attention_equals_the_reference(name: str, dtype: torch.dtype, options: dict[str, float]) -> None:
    inputs = CASES[name].inputs(dtype, dtype)
    found = kernels.paged_attention(*inputs, scale=0.2, **options)
    expected = reference.paged_attention(*inputs, scale=0.2, **options)
    close = {"atol": 2e-5, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 2e-2, "rtol": 2e-2}
    torch.testing.assert_close(found, expected, **close)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_and_cache_may_differ_in_type(dtype: torch.dtype) -> None:
    other = torch.bfloat16 if dtype == torch.float32 else torch.float32
    inputs = CASES["mixed"].inputs(dtype, other)
    expected = reference.paged_attention(*inputs, scale=0.1)
    torch.testing.assert_close(kernels.paged_attention(*inputs, scale=0.1), expected, atol=1e-2, rtol=1e-2)


def test_queries_may_be_a_slice_of_a_fused_projection() -> None:
    q, *rest = CASES["mixed"].inputs()
    fused = torch.cat((q, torch.randn(len(q), 6, 64)), dim=1)
    found = kernels.paged_attention(fused[:, :9], *rest, scale=0.1)
    assert torch.equal(found, kernels.paged_attention(q, *rest, scale=0.1))


@pytest.mark.parametrize(("threads", "dtype"), [(1, torch.bfloat16), (2, torch.float32), (5, torch.bfloat16)])
@pytest.mark.parametrize("window", [0, 90])
def test_a_row_does_not_depend_on_its_batch_to_the_bit(threads: int, dtype: torch.dtype, window: int) -> None:
    inputs = CASES["chunks"].inputs(dtype, torch.bfloat16)
    q, k_cache, v_cache, table, row_ids, starts, kv_lens = inputs
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = kernels.paged_attention(*inputs, scale=0.125, sliding_window=window)
        for token in range(len(q)):
            row = int(token >= starts[1])
            # The token alone, as a decode step of a row that ends with it.
            kv_len = kv_lens[row : row + 1] - (starts[row + 1] - 1 - token)
            alone = kernels.paged_attention(
                q[token : token + 1],
                k_cache,
                v_cache,
                table,
                row_ids[row : row + 1],
                torch.tensor([0, 1], dtype=torch.int32),
                kv_len.int(),
                scale=0.125,
                sliding_window=window,
            )
            assert torch.equal(alone[0], together[token])
    finally:
        torch.set_num_threads(before)


def test_very_low_and_very_high_scores() -> None:
    inputs = Case((130,), (130,)).inputs()
    inputs[0] = inputs[0] * 1e4
    expected = reference.paged_attention(*inputs, scale=1.0)
    torch.testing.assert_close(kernels.paged_attention(*inputs, scale=1.0), expected, atol=1e-3, rtol=1e-3)


SHARING = {
    # lengths of contexts, tokens that each shares with the first row, and queries
    "children": ((1150, 1100, 1090, 1300), (0, 1088, 1088, 1088), (1, 1, 1, 1)),
    "drafts_beside": ((1200, 1130, 700, 1600), (0, 1080, 600, 1024), (4, 1, 3, 2)),
    "many": ((600,) * 45, (0, *(512 + i % 80 for i in range(44))), (1,) * 45),
    "prompt_beside": ((1200, 1090, 2000), (0, 1050, 1100), (1, 100, 70)),
    "not_from_the_start": ((1200, 1200), (0, -600), (1, 1)),
    "others_in_between": ((1200, 90, 1111, 520), (0, 0, 1100, 513), (1, 1, 1, 1)),
}


@pytest.mark.parametrize("name", SHARING)
@pytest.mark.parametrize("num_heads", [9, 3])
@pytest.mark.parametrize("threads", [1, 3])
def test_rows_that_share_slots_get_what_they_get_alone_to_the_bit(name: str, num_heads: int, threads: int) -> None:
    kv_lens, shared, num_queries = SHARING[name]
    q, k_cache, v_cache, table, row_ids, starts, lens = Case(kv_lens, num_queries, num_heads).inputs(
        torch.bfloat16, torch.bfloat16
    )
    first = table[row_ids[0]].clone()
    for row, count in zip(row_ids.tolist(), shared, strict=True):
        if count > 0:
            table[row, :count] = first[:count]
        elif count < 0:  # the same slots, but not the first
            table[row, 1:-count] = first[1:-count]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    together = kernels.paged_attention(q, k_cache, v_cache, table, row_ids, starts, lens, scale=0.2)
    windowed = kernels.paged_attention(
        q, k_cache, v_cache, table, row_ids, starts, lens, scale=0.2, sliding_window=10_000
    )
    torch.set_num_threads(before)
    assert torch.equal(together, windowed)  # with a window nothing is shared
    for i in range(len(kv_lens)):
        begin, end = int(starts[i]), int(starts[i + 1])
        local = torch.tensor([0, end - begin], dtype=torch.int32)
        alone = kernels.paged_attention(
            q[begin:end], k_cache, v_cache, table, row_ids[i : i + 1], local, lens[i : i + 1], scale=0.2
        )
        assert torch.equal(together[begin:end], alone)


# Rows by name: the slots of a tree of prompts, as (tokens, parent, tokens shared with the parent).
TREES = {
    "short": {"a": (200, "", 0), "b": (190, "a", 150), "c": (201, "a", 200)},
    "two_programs": {
        "a": (450, "", 0),
        "a2": (470, "a", 448),
        "b": (440, "a", 130),
        "b2": (441, "b", 430),
        "a3": (455, "a", 450),
    },
    "three_levels": {
        "a": (1300, "", 0),
        "b": (900, "a", 640),
        "c": (1250, "a", 1200),
        "d": (800, "b", 790),
        "e": (70, "a", 66),
        "f": (640, "b", 600),
        "g": (90, "", 0),
    },
}


def tree_inputs(name: str, num_queries: int, dtype: torch.dtype) -> list[Tensor]:
    rows = TREES[name]
    case = Case(tuple(length for length, *_ in rows.values()), (num_queries,) * len(rows))
    inputs = case.inputs(dtype, dtype)
    table, ids = inputs[3], dict(zip(rows, inputs[4].tolist(), strict=True))
    for row, (_, parent, shared) in rows.items():
        if parent:
            table[ids[row], :shared] = table[ids[parent], :shared]
    return inputs


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize(("num_queries", "dtype"), [(1, torch.bfloat16), (3, torch.float32), (1, torch.int8)])
@pytest.mark.parametrize("threads", [1, 3])
def test_rows_of_a_tree_get_what_they_get_alone_to_the_bit(
    name: str, num_queries: int, dtype: torch.dtype, threads: int
) -> None:
    inputs = tree_inputs(name, num_queries, torch.bfloat16 if dtype == torch.int8 else dtype)
    if dtype == torch.int8:
        inputs[1], inputs[2] = (quantize_kv(cache.nan_to_num()) for cache in inputs[1:3])
    q, k_cache, v_cache, table, row_ids, _, lens = inputs
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    together = kernels.paged_attention(*inputs, scale=0.2)
    torch.set_num_threads(before)
    local = torch.tensor([0, num_queries], dtype=torch.int32)
    for i in range(len(lens)):
        part = slice(i * num_queries, (i + 1) * num_queries)
        alone = kernels.paged_attention(
            q[part], k_cache, v_cache, table, row_ids[i : i + 1], local, lens[i : i + 1], scale=0.2
        )
        assert torch.equal(together[part], alone)


def planned_pieces(inputs: list[Tensor], *, most_queries: int) -> list[tuple[int, int, list[int]]]:
    """(first tile, end tile, rows) of the pieces that rows of one block share."""
    _, k_cache, _, table, row_ids, starts, lens = inputs
    num_rows, heads = len(lens), k_cache.shape[1]
    plan = torch.zeros(
        planning.plan_words(num_rows, int(starts[-1]), table.shape[1], block=4, num_kv_heads=heads)
    ).long()
    call = planning.PlanCall(
        starts.data_ptr(), lens.data_ptr(), num_rows, heads, 3, 4, 64, 0, plan.data_ptr(), table.data_ptr(),
        table.stride(0), row_ids.data_ptr(), most_queries, 0, 0,
    )  # fmt: skip
    planning.plan_attention(call)
    at, found = (int(plan[planning.RUNS]) - plan.data_ptr()) // 8, []
    for _ in range(int(plan[planning.NUM_SHARED]) // heads):
        piece = at + planning.DONE + heads
        for _ in range(int(plan[at + planning.PIECES])):
            first, end, members = plan[piece : piece + planning.PIECE_FIELDS].tolist()
            piece += planning.PIECE_FIELDS
            found.append((first, end, plan[piece : piece + members].tolist()))
            piece += members
        assert piece == at + int(plan[at + planning.RUN_LEN]) <= len(plan)
        at = piece
    return found


def test_tiles_that_rows_share_are_planned_once() -> None:
    inputs = tree_inputs("two_programs", 1, torch.float32)
    common, of_a, of_b = (0, 2, [0, 1, 2, 3, 4]), (2, 7, [0, 1, 4]), (2, 6, [2, 3])
    assert planned_pieces(inputs, most_queries=21) == [common, of_b, of_a]
    # Where queries of three rows fit, the others have a run of their own.
    assert planned_pieces(inputs, most_queries=3) == [(0, 2, [0, 1, 2]), (2, 7, [0, 1]), (0, 2, [3, 4])]
    assert planned_pieces(tree_inputs("short", 1, torch.float32), most_queries=21) == [
        (0, 2, [0, 1, 2]),
        (2, 3, [0, 2]),
    ]


def spans(case: Case, *, window: int = 0, seed: int = 0) -> tuple[Tensor, Tensor | None]:
    """For each query how many keys of its row it sees, any number in ascending order, and the first of these."""
    rng = torch.Generator().manual_seed(seed)
    parts = [
        torch.randint(0, kv_len + 1, (count,), generator=rng).sort().values
        for kv_len, count in zip(case.kv_lens, case.num_queries, strict=True)
    ]
    ends = torch.cat([*parts, torch.zeros(0, dtype=torch.int64)]).int()
    return ends, (ends - window).clamp_min(0) if window else None


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("window", "soft_cap"), [(0, 0.0), (70, 2.0)])
def test_attention_to_some_keys_of_each_row_equals_the_reference(
    name: str, dtype: torch.dtype, window: int, soft_cap: float
) -> None:
    *inputs, _ = CASES[name].inputs(dtype, dtype)
    ends, firsts = spans(CASES[name], window=window)
    options = {"scale": 0.2, "firsts": firsts, "soft_cap": soft_cap}
    found = kernels.partial_attention(*inputs, ends, **options)
    expected = reference.partial_attention(*inputs, ends, **options)
    close = {"atol": 2e-5, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 2e-2, "rtol": 2e-2}
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one, other, **close)
    assert (found[1].isinf() == (ends == 0).unsqueeze(1)).all() and (found[0][ends == 0] == 0).all()


@pytest.mark.parametrize("name", ["mixed", "chunks"])
def test_attention_to_all_keys_has_the_bits_of_paged_attention(name: str) -> None:
    *inputs, kv_lens = CASES[name].inputs()
    starts = inputs[-1].tolist()
    ends = torch.cat(
        [
            torch.arange(end - count, end) + 1
            for end, count in zip(kv_lens.tolist(), CASES[name].num_queries, strict=True)
        ]
    )
    assert len(ends) == starts[-1]
    found, _ = kernels.partial_attention(*inputs, ends.int(), scale=0.2)
    assert torch.equal(found, kernels.paged_attention(*inputs, kv_lens, scale=0.2))


def test_rows_that_share_slots_get_the_keys_that_they_would_get_alone_to_the_bit() -> None:
    case = Case((1300, 1290, 1200, 600), (2, 1, 3, 1))
    q, k_cache, v_cache, table, row_ids, starts, _ = case.inputs(torch.bfloat16, torch.bfloat16)
    first = table[row_ids[0]].clone()
    for row in row_ids.tolist():
        table[row, :550] = first[:550]
    for lows in ((513, 512, 511, 0), (1290, 1024, 600, 600)):
        ends = torch.cat([torch.arange(low, low + count) for low, count in zip(lows, case.num_queries, strict=True)])
        found = kernels.partial_attention(q, k_cache, v_cache, table, row_ids, starts, ends, scale=0.2)
        for i in range(len(row_ids)):
            begin, end = int(starts[i]), int(starts[i + 1])
            local = torch.tensor([0, end - begin], dtype=torch.int32)
            alone = kernels.partial_attention(
                q[begin:end], k_cache, v_cache, table, row_ids[i : i + 1], local, ends[begin:end], scale=0.2
            )
            assert torch.equal(found[0][begin:end], alone[0]) and torch.equal(found[1][begin:end], alone[1])
