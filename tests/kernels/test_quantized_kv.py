"""Keys and values of 8 bits: their rounding, and the CPU kernels that write and read them."""

from dataclasses import dataclass

import pytest
import torch
from phloem import kernels
from phloem.kernels import reference
from phloem.kernels.cpu.bfloat import has_bfloat16_pairs
from phloem.kernels.quantized_kv import KV_GROUP_LEN, dequantize_kv, kv_row_len, quantize_kv
from torch import Tensor

HEAD_DIMS = [64, 24, 8, 80, 128]


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_a_number_is_off_by_half_a_scale_and_by_the_rounding_of_the_scale(head_dim: int) -> None:
    x = torch.randn(50, 3, head_dim) * torch.logspace(-6, 6, 50).view(-1, 1, 1)
    x[3, 1] = 0.0
    rows = quantize_kv(x)
    assert rows.dtype == torch.int8 and rows.shape == (50, 3, kv_row_len(head_dim, torch.int8))
    found = dequantize_kv(rows, head_dim)
    for start in range(0, head_dim, KV_GROUP_LEN):
        group, error = x[..., start : start + KV_GROUP_LEN], (found - x)[..., start : start + KV_GROUP_LEN].abs()
        step = group.abs().amax(dim=-1, keepdim=True) / 127 * (1 + 2**-8)
        assert (error <= 0.5001 * step).all()


def test_groups_of_zeros_and_of_tiny_numbers_become_zeros_and_others_keep_their_size() -> None:
    x = torch.zeros(3, 64)
    x[1, :32], x[1, 32:] = 1e-29, 5.0
    x[2, 40] = -3e38
    found = dequantize_kv(quantize_kv(x), 64)
    assert not found[0].any() and not found[1, :32].any()
    torch.testing.assert_close(found[1, 32:], x[1, 32:], rtol=2**-8, atol=0.0)
    torch.testing.assert_close(found[2], x[2], rtol=2**-8, atol=0.0)


@dataclass(frozen=True)
class Write:
    """A step's write of ``num_tokens`` keys and values to scattered slots of a pool that was full before."""

    num_tokens: int
    head_dim: int
    rotary: int
    num_heads: int = 4
    num_kv_heads: int = 2

    def caches(self) -> list[Tensor]:
        shape = (self.num_tokens + 7, self.num_kv_heads, kv_row_len(self.head_dim, torch.int8))
        return [torch.randint(-128, 128, shape, dtype=torch.int8) for _ in range(2)]

    def inputs(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        q, k, v = torch.randn(self.num_tokens, sum(heads), self.head_dim).to(dtype).split(heads, dim=1)
        return q, k, v, torch.randn(90, self.rotary), torch.randint(0, 90, (self.num_tokens,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shape", [Write(9, 64, 64), Write(5, 24, 16), Write(3, 8, 8), Write(1, 80, 32), Write(0, 64, 64)]
)
def test_a_write_stores_the_references_bytes_and_touches_no_other_slot(shape: Write, dtype: torch.dtype) -> None:
    q, k, v, cos_sin, positions = shape.inputs(dtype)
    found, expected = (caches := shape.caches()), [cache.clone() for cache in caches]
    slots = torch.randperm(shape.num_tokens + 7)[: shape.num_tokens]
    untouched = torch.ones(shape.num_tokens + 7, dtype=torch.bool).index_fill(0, slots, value=False)
    before = [cache[untouched].clone() for cache in caches]
    own, other = q.clone(), q.clone()
    kernels.rope_write_kv(own, k, v, cos_sin, positions, *found, slots)
    reference.rope_write_kv(other, k, v, cos_sin, positions, *expected, slots)
    torch.testing.assert_close(own, other)
    assert torch.equal(found[1], expected[1])  # values are not rotated
    assert all(torch.equal(cache[untouched], kept) for cache, kept in zip(found, before, strict=True))
    # A rotated key may differ in its last bit, and so its byte by one.
    keys, wanted = (dequantize_kv(cache[slots], shape.head_dim) for cache in (found[0], expected[0]))
    if shape.num_tokens:
        assert float((keys - wanted).abs().max()) <= 1.01 * float(wanted.abs().max()) / 127


def test_keys_and_values_that_are_not_finite_stay_so() -> None:
    shape = Write(3, 64, 64)
    q, k, v, cos_sin, positions = shape.inputs(torch.float32)
    k[0, 0, 3], v[1, 1, 40], v[2, 0, 0] = torch.nan, torch.inf, -torch.inf
    caches = shape.caches()
    kernels.rope_write_kv(q, k, v, cos_sin, positions, *caches, torch.arange(3))
    keys, values = (dequantize_kv(cache[:3], 64) for cache in caches)
    assert keys[0, 0].isnan().any() and keys[1].isfinite().all()
    assert values[1, 1, 32:48].isnan().all() and values[2, 0, :16].isnan().all()
    assert values[1, 1, :32].isfinite().all() and values[1, 1, 48:].isfinite().all() and values[0].isfinite().all()


@dataclass(frozen=True)
class Step:
    """Rows of ``kv_lens`` tokens over scattered slots, the last ``num_queries`` of which are queries. Each row but the
    first has ``shared`` slots in common with it.
    """

    kv_lens: tuple[int, ...]
    num_queries: tuple[int, ...]
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 64
    shared: int = 0

    def inputs(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        num_rows, num_slots = len(self.kv_lens), sum(self.kv_lens)
        shape = (num_slots + 5, self.num_kv_heads, self.head_dim)
        caches = [quantize_kv(torch.randn(shape)) for _ in range(2)]
        table = torch.full((num_rows, max(self.kv_lens, default=0)), 2**30, dtype=torch.int32)
        order, start = torch.randperm(num_slots + 5, dtype=torch.int32), 0
        for row, kv_len in enumerate(self.kv_lens):
            table[row, :kv_len] = order[start : start + kv_len]
            table[row, : self.shared] = table[0, : self.shared]
            start += kv_len
        starts = torch.tensor([0, *self.num_queries]).cumsum(0).int()
        q = torch.randn(int(starts[-1]), self.num_heads, self.head_dim).to(dtype)
        lens = torch.tensor(self.kv_lens, dtype=torch.int32)
        return q, *caches, table, torch.arange(num_rows, dtype=torch.int32), starts, lens


STEPS = {
    "none": Step((), ()),
    "one_token": Step((1,), (1,)),
    "mixed": Step((100, 65, 700, 31), (1, 3, 70, 31)),
    "shared": Step((1150, 1100, 1090), (1, 1, 4), shared=1050),
    "odd_head": Step((70, 20), (9, 1), num_heads=4, num_kv_heads=1, head_dim=24),
    "tiny_head": Step((70, 20), (9, 1), num_heads=4, num_kv_heads=4, head_dim=8),
    "wide_head": Step((600, 3), (12, 2), num_heads=8, num_kv_heads=2, head_dim=128),
}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"soft_cap": 2.0, "sliding_window": 40}])
def test_attention_has_the_bits_of_an_unpacked_pool(name: str, dtype: torch.dtype, options: dict[str, float]) -> None:
    q, k_cache, v_cache, *rest = STEPS[name].inputs(dtype)
    found = kernels.paged_attention(q, k_cache, v_cache, *rest, scale=0.2, **options)
    head_dim = q.shape[2]
    in_words = dtype == torch.bfloat16 and has_bfloat16_pairs() and head_dim % 32 == 0
    unpacked = [dequantize_kv(cache, head_dim) for cache in (k_cache, v_cache)]
    pool = [cache.to(torch.bfloat16 if in_words else torch.float32) for cache in unpacked]
    assert torch.equal(found, kernels.paged_attention(q, *pool, *rest, scale=0.2, **options))
    close = {"atol": 2e-5, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 2e-2, "rtol": 2e-2}
    torch.testing.assert_close(
        found, reference.paged_attention(q, k_cache, v_cache, *rest, scale=0.2, **options), **close
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_gets_what_it_gets_alone_to_the_bit(dtype: torch.dtype) -> None:
    q, k_cache, v_cache, table, row_ids, starts, kv_lens = STEPS["shared"].inputs(dtype)
    together = kernels.paged_attention(q, k_cache, v_cache, table, row_ids, starts, kv_lens, scale=0.2)
    for token in range(len(q)):
        row = int(torch.searchsorted(starts, token, right=True)) - 1
        kv_len = kv_lens[row : row + 1] - (starts[row + 1] - 1 - token)
        alone = kernels.paged_attention(
            q[token : token + 1],
            k_cache,
            v_cache,
            table,
            row_ids[row : row + 1],
            torch.tensor([0, 1], dtype=torch.int32),
            kv_len.int(),
            scale=0.2,
        )
        assert torch.equal(alone[0], together[token])
