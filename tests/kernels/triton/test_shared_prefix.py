"""Prefixes read once and pools of 8-bit floats: the GPU's attention, interpreted."""

import importlib

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from phloem.kernels import (
    SharedPrefixes,
    paged_attention,
    reference,
    rope_write_kv,
    shared_prefix_attention,
)
from phloem.kernels.shared import PIECE_FIELDS
from phloem.tests.gpu import ON_A_GPU
from phloem.tests.kernels.test_attention import CASES, Case

attention, config, fp8, rope = (
    importlib.import_module(f"phloem.kernels.triton.{name}") for name in ("attention", "config", "fp8", "rope")
)
DEVICE = "cuda" if ON_A_GPU else "cpu"  # of what the test's own kernel reads
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")


def small_splits(split_len: int) -> object:
    return config.CONFIGS[80].with_splits(split_len, block_n=32)


def of_pieces(pieces: list[tuple[int, int, int, int, int]], order: list[int], own_from: list[int]) -> SharedPrefixes:
    numbers = torch.tensor(pieces, dtype=torch.int32).view(-1, PIECE_FIELDS)
    return SharedPrefixes(torch.tensor(order, dtype=torch.int32), numbers, torch.tensor(own_from, dtype=torch.int32))


@pytest.mark.parametrize("num_queries", [(1, 1, 1, 1, 1), (3, 1, 5, 1, 2)])
@pytest.mark.parametrize("soft_cap", [0.0, 2.0])
def test_a_shared_prefix_read_once_gives_what_reading_it_for_each_row_gives(
    num_queries: tuple[int, ...], soft_cap: float
) -> None:
    # Rows 4, 0 and 2 share 2 chunks of 32; 4 and 2 share a third. Rows 1 and 3 share none.
    inputs = Case((100, 97, 130, 40, 112), num_queries, num_heads=4, num_kv_heads=2, head_dim=16).inputs()
    table, row_ids = inputs[3], inputs[4].tolist()
    table[row_ids[0], :64] = table[row_ids[2], :64]
    table[row_ids[4], :96] = table[row_ids[2], :96]
    starts = np.cumsum((0, *num_queries))
    order = [t for row in (4, 2, 0, 1, 3) for t in range(starts[row], starts[row + 1])]
    some, all_three = num_queries[4] + num_queries[2], num_queries[4] + num_queries[2] + num_queries[0]
    pieces = [(0, all_three, 2, 0, 2), (0, 0, 0, 0, 0), (0, 1, 4, 2, 3), (1, some, 4, 2, 3), (0, 0, 0, 0, 0)]
    own_from = np.repeat((2, 0, 3, 0, 3), num_queries).tolist()
    small = small_splits(32)
    options = {"shared": of_pieces(pieces, order, own_from), "scale": 0.2, "soft_cap": soft_cap}
    expected = reference.paged_attention(*inputs, scale=0.2, soft_cap=soft_cap)
    found = attention.shared_prefix_attention(*inputs, **options, config=small)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)
    by_op = shared_prefix_attention(*inputs, **options)  # on the CPU
    torch.testing.assert_close(by_op, expected, atol=2e-5, rtol=1e-4)


def test_a_chunk_of_a_piece_is_read_from_the_piece_s_row_alone() -> None:
    inputs = Case((70, 50), (1, 1), num_heads=4, num_kv_heads=2, head_dim=16).inputs()
    table, row_ids = inputs[3], inputs[4].tolist()
    table[row_ids[1], :32] = table[row_ids[0], :32]
    expected = reference.paged_attention(*inputs, scale=0.2)
    table[row_ids[1], :32] = int(table[row_ids[1], 40])  # must not be read
    shared = of_pieces([(0, 2, 0, 0, 1)], [0, 1], [1, 1])
    found = attention.shared_prefix_attention(*inputs, shared=shared, scale=0.2, config=small_splits(32))
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


def test_no_rows_share_nothing() -> None:
    inputs = CASES["none"].inputs()
    assert attention.shared_prefix_attention(*inputs, scale=0.2, shared=of_pieces([], [], [])).shape[0] == 0


@triton.jit
def encode_kernel(x, out, back, count, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    byte = fp8.encode_fp8(tl.load(x + at, mask=at < count, other=0.0))
    tl.store(out + at, byte, mask=at < count)
    tl.store(back + at, fp8.decode_fp8(byte), mask=at < count)


def test_bytes_are_torch_s_8_bit_floats() -> None:
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    every = every[~every.isnan()].sort().values
    between = (every[1:] + every[:-1]) / 2  # ties, which go to the even neighbour
    x = torch.cat((every, between, between * 1.0001, torch.randn(500) * 100, torch.randn(500) * 0.01)).clamp(-448, 448)
    x = x.to(DEVICE)
    out, back = torch.empty(len(x), dtype=torch.uint8, device=DEVICE), torch.empty(len(x), device=DEVICE)
    encode_kernel[(1,)](x, out, back, len(x), BLOCK=2048)
    assert torch.equal(back, x.to(torch.float8_e4m3fn).float())
    assert torch.equal(out.view(torch.float8_e4m3fn).float(), back)
    encode_kernel[(1,)](torch.tensor([1e9, -500.0], device=DEVICE), out, back, 2, BLOCK=2)
    assert back[:2].tolist() == [448.0, -448.0]


@triton.jit
def factors_kernel(bytes_, out, TYPE: tl.constexpr, IS_NATIVE: tl.constexpr):
    at = tl.arange(0, 256)
    tl.store(out + at, fp8.factor_of_fp8(tl.load(bytes_ + at), TYPE, IS_NATIVE).to(tl.float32))


@pytest.mark.parametrize("type_", [tl.float16, tl.bfloat16, tl.float32])
@pytest.mark.parametrize("is_native", [False, True])
def test_bytes_as_factors_are_exact(type_: tl.dtype, is_native: bool) -> None:
    """By bits and by the device's instruction."""
    every = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    numbers = every.view(torch.float8_e4m3fn).float()
    out = torch.empty(256, device=DEVICE)
    factors_kernel[(1,)](every, out, TYPE=type_, IS_NATIVE=is_native)
    assert torch.equal(out[~numbers.isnan()], numbers[~numbers.isnan()])


@pytest.mark.parametrize("name", ["decode", "mixed"])
def test_attention_over_a_pool_of_8_bit_numbers(name: str) -> None:
    inputs = CASES[name].inputs()
    stored = [torch.nan_to_num(cache).to(torch.float8_e4m3fn) for cache in inputs[1:3]]
    expected = reference.paged_attention(inputs[0], *(cache.float() for cache in stored), *inputs[3:], scale=0.2)
    for op in (attention.paged_attention, reference.paged_attention, paged_attention):
        found = op(inputs[0], *stored, *inputs[3:], scale=0.2)
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


def test_keys_and_values_are_written_as_8_bit_numbers() -> None:
    fused = 3 * torch.randn(5, 4, 24)
    table, positions, slots = torch.randn(40, 16), torch.tensor([3, 39, 0, 7, 8]), torch.tensor([4, 0, 6, 2, 9])
    q, k, v = fused.split((2, 1, 1), dim=1)
    stored = [torch.zeros(11, 1, 24, dtype=torch.uint8).view(torch.float8_e4m3fn) for _ in range(2)]
    exact = [torch.zeros(11, 1, 24) for _ in range(2)]
    for write in (rope.rope_write_kv, rope_write_kv):
        write(q.clone(), k, v, table, positions, *stored, slots)
        write(q.clone(), k, v, table, positions, *exact, slots)
        for one, other in zip(stored, exact, strict=True):
            assert np.array_equal(one.float().numpy(), other.to(torch.float8_e4m3fn).float().numpy())
            one.view(torch.uint8).zero_()
