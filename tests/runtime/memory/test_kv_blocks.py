"""Copying KV blocks to bytes and back."""

import numpy as np
import pytest
import torch
from phloem.runtime.memory import KVBlocks, KVPool


def pool_of(dtype: torch.dtype) -> KVPool:
    pool = KVPool(3, 40, 2, 16, dtype)
    rng = torch.Generator().manual_seed(0)
    for layer in (*pool.k, *pool.v):
        layer.copy_(torch.randn(layer.shape, generator=rng) * (100 if dtype == torch.int8 else 1))
    return pool


SLOTS = np.array([[3, 1, 4, 15], [9, 2, 6, 5]], np.int32)
TARGETS = np.array([[20, 21, 22, 23], [31, 30, 29, 28]], np.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn])
def test_auto_restores_every_bit(dtype):
    pool = pool_of(dtype)
    blocks = KVBlocks(pool, block_len=4)
    saved = blocks.save(SLOTS)
    assert [len(block) for block in saved] == [blocks.size_bytes] * 2
    blocks.load(TARGETS, saved)
    for layer in (*pool.k, *pool.v):
        assert torch.equal(layer.float()[TARGETS.reshape(-1)], layer.float()[SLOTS.reshape(-1)])


def test_int8_restores_within_half_a_step_of_each_vector():
    pool = pool_of(torch.float32)
    pool.k[1][3, 0] = 0.0
    blocks = KVBlocks(pool, block_len=4, format="int8")
    saved = blocks.save(SLOTS)
    assert [len(block) for block in saved] == [blocks.size_bytes] * 2
    blocks.load(TARGETS, saved)
    for layer in (*pool.k, *pool.v):
        want, got = layer[SLOTS.reshape(-1)], layer[TARGETS.reshape(-1)]
        step = want.abs().amax(dim=-1, keepdim=True) / 127
        assert ((got - want).abs() <= 0.501 * step).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_restores_within_a_sixteenth_of_each_number(dtype):
    pool = pool_of(dtype)
    pool.k[1][3, 0] = 0.0
    pool.v[0][3, 0] = torch.logspace(-9, 4, 16)
    blocks = KVBlocks(pool, block_len=4, format="fp8")
    saved = blocks.save(SLOTS)
    assert [len(block) for block in saved] == [blocks.size_bytes] * 2
    assert blocks.size_bytes == KVBlocks(pool, block_len=4, format="int8").size_bytes
    blocks.load(TARGETS, saved)
    for layer in (*pool.k, *pool.v):
        want, got = layer[SLOTS.reshape(-1)].float(), layer[TARGETS.reshape(-1)].float()
        floor = want.abs().amax(dim=-1, keepdim=True) / 2**18
        assert ((got - want).abs() <= torch.maximum(want.abs() / 15.5, floor)).all()


def test_a_block_of_another_size_is_refused_before_anything_is_written():
    blocks = KVBlocks(pool_of(torch.float32), block_len=4)
    with pytest.raises(ValueError, match="but this pool's have"):
        blocks.load(SLOTS[:1], [b"short"])
