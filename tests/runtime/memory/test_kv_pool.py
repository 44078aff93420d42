"""The KV pool's shapes and the sizes derived from a model and the memory that is free."""

import pytest
import torch
from phloem.runtime.memory import KVPool, slot_size_bytes
from phloem.runtime.weights import ModelConfig

CONFIG = ModelConfig(
    family="llama",
    num_layers=3,
    hidden_size=64,
    intermediate_size=128,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=259,
    max_positions=2048,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_layer_has_its_own_zeroed_rows(dtype: torch.dtype) -> None:
    pool = KVPool.for_model(CONFIG, num_slots=7, dtype=dtype)
    tensors = [*pool.k, *pool.v]
    assert [tensor.shape for tensor in tensors] == [(7, 2, 16)] * 6
    assert all(tensor.dtype == dtype and tensor.is_contiguous() for tensor in tensors)
    assert pool.size_bytes == 7 * slot_size_bytes(CONFIG, dtype)
    for i, tensor in enumerate(tensors):
        tensor.fill_(i + 1)
    assert [float(tensor.sum()) for tensor in tensors] == [(i + 1) * 7 * 32.0 for i in range(6)]


def test_8_bit_vectors_lie_with_their_scales() -> None:
    pool = KVPool.for_model(CONFIG, num_slots=7, dtype=torch.int8)
    assert [(tensor.shape, tensor.dtype) for tensor in (*pool.k, *pool.v)] == [((7, 2, 16 + 2), torch.int8)] * 6
    assert pool.size_bytes == 7 * slot_size_bytes(CONFIG, torch.int8) == 7 * 2 * 3 * 2 * 18


def test_a_new_pool_is_finite() -> None:
    pool = KVPool(2, 1000, 2, 16, torch.bfloat16)
    assert all(not tensor.any() for tensor in (*pool.k, *pool.v))


def test_a_slot_takes_a_token_s_keys_and_values_of_all_layers() -> None:
    assert slot_size_bytes(CONFIG, torch.bfloat16) == 2 * 3 * 2 * 16 * 2
    assert slot_size_bytes(CONFIG, torch.float32) == 2 * 3 * 2 * 16 * 4
