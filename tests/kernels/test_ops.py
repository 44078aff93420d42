"""The ops on the CPU against their references: odd sizes, no row, one row, both types."""

import pytest
import torch
from phloem import kernels
from phloem.kernels import reference

FLOATS = (torch.float32, torch.bfloat16)
DEEP = {torch.float32: {"atol": 1e-5, "rtol": 1e-5}, torch.bfloat16: {"atol": 1e-2, "rtol": 1.6e-2}}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("residual_dtype", FLOATS)
@pytest.mark.parametrize("shape", [(0, 7), (1, 7), (1, 576), (37, 100), (129, 65), (5, 3, 24)])
def test_rms_norm(dtype: torch.dtype, residual_dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, residual = torch.randn(shape).to(dtype), torch.randn(shape).to(residual_dtype)
    weight = torch.randn(shape[-1]).to(residual_dtype)
    before = x.clone(), residual.clone()
    for given in (None, residual):
        y, total = kernels.rms_norm(x, weight, 1e-5, residual=given)
        expected_y, expected_total = reference.rms_norm(x, weight, 1e-5, residual=given)
        torch.testing.assert_close(y, expected_y, **DEEP[dtype])
        assert torch.equal(total, expected_total)
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("num_tokens", "num_heads", "width"), [(0, 2, 8), (1, 3, 64), (9, 2, 24), (70, 5, 16)])
def test_rms_norm_of_heads_inside_a_fused_projection(
    dtype: torch.dtype, num_tokens: int, num_heads: int, width: int
) -> None:
    heads = torch.randn(num_tokens, num_heads + 3, width).to(dtype)[:, 1 : num_heads + 1]
    residual = torch.randn(num_tokens, num_heads, width)
    for x, given in ((heads, None), (heads, residual), (heads.flatten(1), None), (heads.transpose(0, 1), None)):
        weight = torch.randn(x.shape[-1])
        y, total = kernels.rms_norm(x, weight, 1e-5, residual=given)
        expected_y, expected_total = reference.rms_norm(x, weight, 1e-5, residual=given)
        torch.testing.assert_close(y, expected_y, **DEEP[dtype])
        assert torch.equal(total, expected_total)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(0, 6), (1, 2), (1, 3072), (16, 1000), (100, 2, 38)])
@pytest.mark.parametrize("name", ["silu_mul", "gelu_mul"])
def test_gated_activations(dtype: torch.dtype, shape: tuple[int, ...], name: str) -> None:
    x = (10 * torch.randn(shape)).to(dtype)
    torch.testing.assert_close(getattr(kernels, name)(x), getattr(reference, name)(x), **DEEP[dtype])


@pytest.mark.parametrize("name", ["silu_mul", "gelu_mul"])
@pytest.mark.parametrize("copies", [1, 5])
def test_gated_activations_of_the_extremes(name: str, copies: int) -> None:
    gates = torch.tensor([[-1e8, -1e4, -90.0, 90.0, 1e4, 1e8]]).repeat(1, copies)
    found = getattr(kernels, name)(torch.cat((gates, torch.ones_like(gates)), dim=1))
    torch.testing.assert_close(found, gates.clamp_min(0.0))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("cache_dtype", FLOATS)
@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "num_kv_heads", "head_dim", "rotary"),
    [(0, 3, 1, 8, 8), (1, 9, 3, 64, 64), (33, 4, 2, 80, 32), (7, 2, 2, 24, 24), (150, 6, 1, 128, 128)],
)
def test_rope_write_kv_of_a_fused_projection(
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rotary: int,
) -> None:
    qkv = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim).to(dtype)
    angles = torch.rand(50, rotary // 2) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    positions, slots = torch.randint(0, 50, (num_tokens,)), torch.randperm(200)[:num_tokens]
    caches = [torch.randn(200, num_kv_heads, head_dim).to(cache_dtype) for _ in range(2)]
    results = []
    for op in (kernels.rope_write_kv, reference.rope_write_kv):
        ours, (k_cache, v_cache) = qkv.clone(), [cache.clone() for cache in caches]
        q, k, v = ours.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
        op(q, k, v, cos_sin, positions, k_cache, v_cache, slots)
        assert torch.equal(ours[:, num_heads:], qkv[:, num_heads:])
        results.append((q.clone(), k_cache, v_cache))
    for found, expected in zip(*results, strict=True):
        # A sum rounded once or twice may fall on either side of the middle of two bfloat16 values.
        torch.testing.assert_close(found, expected, **DEEP[found.dtype])
    untouched = torch.ones(200, dtype=torch.bool)
    untouched[slots] = False
    assert torch.equal(results[0][1][untouched], caches[0][untouched])


def test_rope_keeps_lengths_and_turns_by_position_difference() -> None:
    angles = torch.arange(64).unsqueeze(1) * torch.tensor([1.0, 0.1, 0.01, 0.001])
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    q, k = torch.randn(1, 1, 8).expand(2, 1, 8).clone(), torch.randn(1, 1, 8).expand(2, 1, 8).clone()
    cache = torch.zeros(2, 1, 8)
    length = q.norm()
    kernels.rope_write_kv(q, k, k, cos_sin, torch.tensor([9, 40]), cache, cache.clone(), torch.tensor([0, 1]))
    torch.testing.assert_close(q.norm(), length)
    torch.testing.assert_close((q[0] * cache[0]).sum(), (q[1] * cache[1]).sum())


def test_other_types_take_the_reference() -> None:
    x = torch.randn(3, 8, dtype=torch.float64)
    assert kernels.silu_mul(x).dtype == torch.float64
