"""The roofline's bytes and flops against a count by the definition."""

import pytest
import torch
from phloem.benchmarks import roofline
from phloem.kernels.linear import quantize_int8
from phloem.kernels.quantized_weight import pack_int4, pack_int8


@pytest.mark.parametrize("window", [0, 1, 5, 100])
def test_attention_counts_the_pairs_that_see_each_other(window: int) -> None:
    kv_lens, num_queries = (7, 1, 30), (3, 1, 30)
    pairs, keys = 0, 0
    for length, queries in zip(kv_lens, num_queries, strict=True):
        seen = {(p, k) for p in range(length - queries, length) for k in range(p + 1) if not window or k > p - window}
        pairs += len(seen)
        keys += len({k for _, k in seen})
    work = roofline.attention(kv_lens, num_queries, num_heads=4, num_kv_heads=2, head_dim=8, window=window)
    assert work.flops == pairs * 4 * (2 * 8 + 2 * 8)
    assert work.bytes == keys * 2 * 2 * 8 * 2 + 34 * 2 * 4 * 8 * 2 + 4 * keys + 36


def test_the_roofline_is_the_slower_of_moving_and_computing() -> None:
    device = roofline.DeviceSpec("slow", copy=10.0, flops=100.0)
    moving, computing = roofline.Work(50.0, 100.0), roofline.Work(5.0, 1000.0)
    assert moving.seconds(device) == 5.0 and moving.bound(device) == "memory"
    assert computing.seconds(device) == 10.0 and computing.bound(device) == "compute"


def test_long_decoding_is_bound_by_memory_and_long_prefill_by_products() -> None:
    shape = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    decode = roofline.attention([8192] * 256, [1] * 256, **shape)
    assert decode.bound(roofline.H200) == "memory"
    assert decode.seconds(roofline.H200) == pytest.approx(256 * 8192 * 8 * 128 * 2 * 2 / 4.3e12, rel=0.02)
    prefill = roofline.attention([8192], [8192], **shape)
    assert prefill.bound(roofline.H200) == "compute"
    assert prefill.flops == pytest.approx(2 * 8192**2 * 32 * 128, rel=0.01)


def test_sampling_reads_the_logits_once_and_penalties_go_over_the_vocabulary_twice() -> None:
    assert roofline.sample(4, 1000).bytes == 4 * (4 * 1000 + 60)
    assert roofline.penalties(4, 1000, seen=10).bytes == 4 * (2 * 4 * 1000 + 120)
    assert roofline.sample(256, 128_256).bound(roofline.H200) == "memory"


def test_a_shared_prefix_is_counted_once() -> None:
    shape = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    lens = [8192 + 64] * 64
    once = roofline.shared_prefix_attention(8192, lens, **shape)
    apart = roofline.attention(lens, [1] * 64, **shape)
    assert once.flops == apart.flops
    assert apart.bytes - once.bytes == 63 * 8192 * (2 * 8 * 128 * 2 + 4)
    assert apart.seconds(roofline.H200) / once.seconds(roofline.H200) > 10


def test_packed_weights_are_read_at_their_own_size() -> None:
    few = {kind: roofline.quantized_product(1, 4096, 1024, kind=kind) for kind in ("int4", "int8", "fp8")}
    for work, kind in ((pack_int4(*groups()), "int4"), (pack_int8(*quantize_int8(torch.randn(8, 256))), "int8")):
        stored = sum(x.numel() * x.element_size() for x in (work.values, work.scale, work.zero) if x is not None)
        assert few[kind].bytes - 2 * (4096 + 1024) == stored / (8 * 256) * 4096 * 1024
    assert all(work.bound(roofline.H200) == "memory" for work in few.values())
    assert roofline.quantized_product(4096, 4096, 1024, kind="int4").bound(roofline.H200) == "compute"


def groups() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randint(0, 16, (8, 256), dtype=torch.uint8), torch.rand(8, 8), torch.rand(8, 8)


def test_experts_are_read_once_and_computed_for_each_token() -> None:
    shape = {"hidden": 2048, "inner": 768, "top_k": 8}
    one, many = (roofline.mix_experts(n, **shape, taken=taken) for n, taken in ((1, 8), (4096, 128)))
    assert one.bytes == 8 * 3 * 2048 * 768 * 2 + 2 * 2048 * 2 + 64
    assert many.flops == 4096 * one.flops == 4096 * 8 * 3 * 2 * 2048 * 768
    assert one.bound(roofline.H200) == "memory"


def test_an_adapter_adds_little_to_its_product() -> None:
    work = roofline.add_adapters(64, 4096, 4096, rank=16, adapters=8)
    assert work.bytes == 2 * (8 * 16 * 8192 + 64 * 3 * 4096) + 12 * 64
    assert work.flops == 64 * 16 * 8192 * 2
