"""Every Triton kernel, run by Triton's interpreter, against the plain-torch reference."""

import importlib
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from phloem.kernels import reference
from phloem.kernels.cpu import rope as cpu_rope
from phloem.tests.kernels.test_attention import CASES, Case, spans

attention, norm, rope, activation, edits, config = (
    importlib.import_module(f"phloem.kernels.triton.{name}")
    for name in ("attention", "norm", "rope", "activation", "edits", "config")
)
# The interpreter converts arrays of one element to numbers.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
DTYPES = [torch.float32, torch.bfloat16]


def config_of(q: torch.Tensor) -> Any:
    """``AttentionShapes`` for these queries."""
    return config.CONFIGS[80].attention_of(q.shape[2], q.dtype)


def close(dtype: torch.dtype) -> dict[str, float]:
    return {"atol": 2e-5, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 3e-2, "rtol": 2e-2}


def test_the_kernels_are_interpreted() -> None:
    assert type(norm.rms_norm_kernel).__name__ == "InterpretedFunction"


SMALL = {name: case for name, case in CASES.items() if name != "chunks"}
LONG = {"chunks": Case((1100, 600), (1, 5), num_heads=4, num_kv_heads=2, head_dim=16), "decode": CASES["decode"]}


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("options", [{}, {"soft_cap": 2.0, "sliding_window": 7}])
def test_attention_in_one_piece(name: str, options: dict[str, float]) -> None:
    inputs = SMALL[name].inputs()
    found = attention.paged_attention(*inputs, scale=0.2, config=config_of(inputs[0]).prefill, **options)
    torch.testing.assert_close(found, reference.paged_attention(*inputs, scale=0.2, **options), **close(torch.float32))


@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize("options", [{}, {"soft_cap": 2.0, "sliding_window": 40}])
def test_attention_in_splits(name: str, options: dict[str, float]) -> None:
    inputs = LONG[name].inputs()
    small = replace(config_of(inputs[0]).decode, split_len=256)
    found = attention.paged_attention(*inputs, scale=0.2, config=small, **options)
    torch.testing.assert_close(found, reference.paged_attention(*inputs, scale=0.2, **options), **close(torch.float32))


def test_each_block_of_queries_finds_its_row_among_many() -> None:
    """More rows than the kernel looks at at once, with and without a whole block of queries."""
    rng = np.random.default_rng(3)
    counts = rng.integers(1, 12, 140)
    lens = tuple((counts + rng.integers(0, 4, 140)).tolist())
    inputs = Case(lens, tuple(counts.tolist()), num_heads=3, num_kv_heads=1).inputs()
    small = config.AttentionConfig(block_m=16, block_n=16, num_warps=4, num_stages=2)
    found = attention.paged_attention(*inputs, scale=0.2, config=small)
    torch.testing.assert_close(found, reference.paged_attention(*inputs, scale=0.2), **close(torch.float32))


@pytest.mark.parametrize("num_heads", [5, 16, 40])
@pytest.mark.parametrize("lens", [((30, 9), (1, 1)), ((20, 40), (3, 5))])
def test_attention_with_wide_heads_that_are_key_and_value(
    num_heads: int, lens: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    """As latent attention reads its pool: one vector of more than 256 numbers for all heads, more than fit a block."""
    q, k, _, *rows = Case(*lens, num_heads=num_heads, num_kv_heads=1, head_dim=264).inputs()
    found = attention.paged_attention(q, k, k, *rows, scale=0.06)
    torch.testing.assert_close(found, reference.paged_attention(q, k, k, *rows, scale=0.06), **close(torch.float32))


@pytest.mark.parametrize("name", ["none", "one_token", "decode", "mixed", "latent"])
@pytest.mark.parametrize("split_len", [0, 32])
@pytest.mark.parametrize(("window", "soft_cap"), [(0, 0.0), (20, 2.0)])
def test_attention_to_some_keys_of_each_row(name: str, split_len: int, window: int, soft_cap: float) -> None:
    case = {"decode": Case((100, 64, 1), (1, 1, 1)), "mixed": Case((100, 65), (1, 20))}.get(name, CASES[name])
    *inputs, _ = case.inputs()
    ends, firsts = spans(case, window=window)
    options = {"scale": 0.2, "firsts": firsts, "soft_cap": soft_cap}
    given = replace(config_of(inputs[0]).prefill, split_len=split_len)
    found = attention.partial_attention(*inputs, ends, config=given, **options)
    for one, other in zip(found, reference.partial_attention(*inputs, ends, **options), strict=True):
        torch.testing.assert_close(one, other, **close(torch.float32))


def test_keys_alone_are_written_without_values() -> None:
    rng = torch.Generator().manual_seed(5)
    q, k = torch.randn(3, 4, 24, generator=rng), torch.randn(3, 1, 24, generator=rng)
    table = torch.randn(9, 8, generator=rng)
    positions, slots = torch.tensor([4, 8, 0]), torch.tensor([6, 1, 3])
    found = []
    for write in (reference.rope_write_kv, cpu_rope.rope_write_kv, rope.rope_write_kv):
        cache, queries = torch.zeros(7, 1, 24), q.clone()
        write(queries, k, None, table, positions, cache, cache, slots)
        found.append(torch.cat((queries.flatten(), cache.flatten())))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], atol=1e-5, rtol=1e-5)
    assert found[0][-7 * 24 :].view(7, 24).any(dim=1).tolist() == [False, True, False, True, False, False, True]


def test_attention_in_bfloat16_with_an_entry_s_own_config() -> None:
    for name in ("decode", "mixed"):
        inputs = CASES[name].inputs(torch.bfloat16, torch.bfloat16)
        found = attention.paged_attention(*inputs, scale=0.1)
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found, reference.paged_attention(*inputs, scale=0.1), **close(torch.bfloat16))


def test_a_row_s_result_does_not_depend_on_its_batch() -> None:
    case = CASES["decode"]
    inputs = case.inputs()
    q, k, v, table, row_ids, _, kv_lens = inputs
    together = attention.paged_attention(*inputs, scale=0.2)
    for r in range(len(row_ids)):
        one = torch.tensor([0, 1], dtype=torch.int32)
        alone = attention.paged_attention(
            q[r : r + 1], k, v, table, row_ids[r : r + 1], one, kv_lens[r : r + 1], scale=0.2
        )
        assert torch.equal(alone[0], together[r])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 100), (5, 576), (0, 64)])
@pytest.mark.parametrize("residual_dtype", [None, *DTYPES])
def test_rms_norm(dtype: torch.dtype, shape: tuple[int, int], residual_dtype: torch.dtype | None) -> None:
    x, weight = torch.randn(shape).to(dtype), torch.rand(shape[1])
    residual = None if residual_dtype is None else torch.randn(shape).to(residual_dtype)
    before = x.clone()
    found = norm.rms_norm(x, weight, 1e-5, residual=residual)
    expected = reference.rms_norm(x, weight, 1e-5, residual=residual)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, **close(one.dtype))
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 8), (1, 2), (3, 70), (2, 4, 3000)])
@pytest.mark.parametrize("name", ["silu_mul", "gelu_mul"])
def test_gated_activations(dtype: torch.dtype, shape: tuple[int, ...], name: str) -> None:
    x = (4 * torch.randn(shape)).to(dtype)
    torch.testing.assert_close(getattr(activation, name)(x), getattr(reference, name)(x), **close(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "rotary"), [(9, 3, 64, 64), (4, 1, 24, 16), (2, 2, 8, 8)]
)
def test_rope_write_kv(
    dtype: torch.dtype, normed: bool, num_heads: int, num_kv_heads: int, head_dim: int, rotary: int
) -> None:
    tokens = 5
    fused = torch.randn(tokens, num_heads + 2 * num_kv_heads, head_dim).to(dtype)
    table = torch.randn(40, rotary)
    positions, slots = torch.tensor([3, 39, 0, 7, 8]), torch.tensor([4, 0, 6, 2, 9])
    norms = {"q_norm": torch.rand(head_dim), "k_norm": torch.rand(head_dim), "eps": 1e-5}
    results = []
    for module in (rope, reference, cpu_rope):
        q, k, v = fused.clone().split((num_heads, num_kv_heads, num_kv_heads), dim=1)
        caches = [torch.zeros(11, num_kv_heads, head_dim, dtype=dtype) for _ in range(2)]
        if normed:
            q = module.norm_rope_write_kv(q, k, v, table, positions, *caches, slots, **norms)
        else:
            module.rope_write_kv(q, k, v, table, positions, *caches, slots)
        results.append((q, *caches))
    for found in results[1:]:
        for one, other in zip(results[0], found, strict=True):
            torch.testing.assert_close(one, other, **close(one.dtype))


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 3000])
@pytest.mark.parametrize("rows", [None, [2, 0]])
def test_apply_bitmask(vocab_size: int, rows: list[int] | None) -> None:
    logits = torch.randn(3, vocab_size)
    count = 3 if rows is None else len(rows)
    mask = torch.randint(-(2**31), 2**31, (count, (vocab_size + 31) // 32), dtype=torch.int64).int()
    index = None if rows is None else torch.tensor(rows)
    found = edits.apply_bitmask(logits.clone(), mask, rows=index)
    assert torch.equal(found, reference.apply_bitmask(logits.clone(), mask, rows=index))


def kernels_of(module: ModuleType) -> list[str]:
    return [name for name in vars(module) if name.endswith("_kernel")]


def test_every_kernel_of_the_folder_is_known_here() -> None:
    known = [name for module in (attention, norm, rope, activation, edits) for name in kernels_of(module)]
    assert sorted(known) == [
        "add_bias_kernel",
        "apply_bitmask_kernel",
        "attention_kernel",
        "count_tokens_kernel",
        "gated_kernel",
        "join_kernel",
        "penalise_kernel",
        "rms_norm_kernel",
        "rope_write_kv_kernel",
    ]
