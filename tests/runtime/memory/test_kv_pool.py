"""The KV pool's shapes and the sizes derived from a model and the memory that is free."""

from pathlib import Path

import pytest
import torch
from phloem.runtime.memory import KVPool, size_slots, slot_size_bytes
from phloem.runtime.memory.kv_pool import free_host_bytes, kv_budget_bytes
from phloem.runtime.protocol.errors import LimitExceeded
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


def test_a_new_pool_is_finite() -> None:
    pool = KVPool(2, 1000, 2, 16, torch.bfloat16)
    assert all(not tensor.any() for tensor in (*pool.k, *pool.v))


def test_slots_are_what_fits_and_no_more() -> None:
    each = slot_size_bytes(CONFIG, torch.bfloat16)
    assert each == 2 * 3 * 2 * 16 * 2
    assert size_slots(CONFIG, 10 * each) == 10
    assert size_slots(CONFIG, 11 * each - 1) == 10
    assert size_slots(CONFIG, 10 * each, dtype=torch.float32) == 5


def test_a_budget_below_one_token_is_refused_with_both_sizes() -> None:
    with pytest.raises(LimitExceeded, match="100 bytes for keys and values, but one token takes 384"):
        size_slots(CONFIG, 100)


def test_free_memory_is_the_lesser_of_machine_and_control_group(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 100 kB\nMemFree: 10 kB\nMemAvailable:   64 kB\n")
    assert free_host_bytes(tmp_path) == 65536
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("1000\n")
    assert free_host_bytes(tmp_path) == 65536
    (group / "memory.max").write_text("5000\n")
    assert free_host_bytes(tmp_path) == 4000
    (group / "memory.current").write_text("6000\n")
    assert free_host_bytes(tmp_path) == 0


def test_a_cpu_s_budget_is_part_of_what_is_free() -> None:
    assert 0 < kv_budget_bytes("cpu") < free_host_bytes()
