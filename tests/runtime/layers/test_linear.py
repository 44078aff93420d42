"""Stacked linears are the products with each weight, whatever mix of formats they come in."""

from typing import Any

import pytest
import torch
from phloem.kernels.cpu.recording import Arena, Recording
from phloem.kernels.cpu.tape import Tape
from phloem.runtime.layers.linear import as_float, stacked_linear
from phloem.runtime.quant import FORMATS, QuantTensor

K = 64


def weight(kind: str, num_rows: int, seed: int) -> torch.Tensor | QuantTensor:
    rng = torch.Generator().manual_seed(seed)
    if kind == "float":
        return torch.randn(num_rows, K, generator=rng) / 8
    form = FORMATS[kind]
    data = torch.randint(0, 256, (num_rows, K // form.block_len, form.block_bytes), generator=rng, dtype=torch.uint8)
    for start in (0, 2) if kind.endswith("1") else (0,):
        data[:, :, start : start + 2] = torch.tensor([0.0125], dtype=torch.float16).view(torch.uint8)
    return QuantTensor.from_bytes(kind, data.flatten(), (num_rows, K))


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int4", "auto"])
@pytest.mark.parametrize("kinds", [("Q4_1",), ("Q4_0", "Q4_1", "Q5_1"), ("float", "Q4_0", "float"), ("Q8_0", "float")])
@pytest.mark.parametrize("num_rows", [1, 3, 40])
def test_products_of_a_stack(kinds: tuple[str, ...], precision: Any, has_bias: bool, num_rows: int) -> None:
    weights = [weight(kind, 32 * (i + 1), seed=i) for i, kind in enumerate(kinds)]
    biases = [torch.linspace(-1, 1, w.shape[0]) for w in weights] if has_bias else None
    dtype = torch.float32 if precision == "float32" else torch.bfloat16
    x = torch.randn(num_rows, K, generator=torch.Generator().manual_seed(9)).to(dtype)
    got = stacked_linear(weights, biases, precision=precision)(x)
    want = x.float() @ torch.cat([as_float(w) for w in weights]).T
    if biases is not None:
        want = want + torch.cat(biases)
    assert got.dtype == dtype
    rounded = precision == "int4" and set(kinds) - {"Q4_0", "Q4_1"}  # these lose bits on purpose
    limit = 1e-5 if precision == "float32" else 0.12 if rounded else 0.02
    assert (got.float() - want).abs().max() <= limit * want.abs().max()


def test_auto_keeps_four_bits_and_makes_few_products() -> None:
    mixed = [weight(kind, 32, seed=i) for i, kind in enumerate(("Q4_0", "Q4_1", "Q8_0", "float"))]
    assert len(stacked_linear(mixed, precision="auto").parts) == 3  # 4-bit groups, 8-bit groups, floats
    assert len(stacked_linear(mixed, precision="bfloat16").parts) == 1
    assert len(stacked_linear(mixed, precision="int4").parts) == 1


def test_results_can_be_wider_than_inputs() -> None:
    x = torch.randn(2, K).bfloat16()
    head = stacked_linear([weight("float", 32, seed=0)], precision="bfloat16", out_dtype=torch.float32)
    assert head(x).dtype == torch.float32


def test_a_stack_of_several_products_can_be_replayed() -> None:
    stack = stacked_linear([weight("Q4_1", 48, seed=0), weight("Q8_0", 32, seed=1)], precision="auto")
    x = torch.randn(3, K, generator=torch.Generator().manual_seed(2)).bfloat16()
    with Recording(Arena()) as recording:
        recorded = stack(x)
    assert len(stack.parts) == 2 and recording.foreign is None
    Tape(recording.calls, recording.arena).replay(None)
    assert torch.equal(recorded, torch.cat([part(x) for part in stack.parts], dim=-1))
