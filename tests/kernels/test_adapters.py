"""Each token's own low-rank adapter, against the plain reference, alone and beside others."""

import pytest
import torch
from phloem import kernels
from phloem.kernels.backend import CPU, REFERENCE, adapter_tables, using


def tables(count: int, rank: int, width: int, num_outputs: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    down, up = adapter_tables(
        count, rank, width=width, num_outputs=num_outputs, dtype=dtype, device=torch.device("cpu")
    )
    down.copy_(torch.randn(down.shape) / width**0.5)
    up.copy_(torch.randn(up.shape))
    return down, up


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("adapters", "rank", "width", "num_outputs"),
    [
        ([0, 2, -1, 2, 0, -1, 1], 8, 40, 36),
        ([1], 16, 576, 1536),
        ([-1, 0], 3, 17, 5),
        ([2] * 20, 5, 1100, 700),
        ([-1, -1], 4, 16, 16),
        ([], 4, 16, 16),
    ],
)
def test_the_kernel_adds_what_the_reference_adds(
    adapters: list[int],
    rank: int,
    width: int,
    num_outputs: int,
    dtype: torch.dtype,
    num_threads: int,
    every_core: None,
) -> None:
    torch.manual_seed(rank)
    kernels.set_kernel_threads(num_threads)
    down, up = tables(3, rank, width, num_outputs, dtype)
    x = torch.randn(len(adapters), width, dtype=dtype)
    whole = torch.randn(len(adapters), num_outputs + 6, dtype=dtype)
    groups = kernels.Groups(torch.tensor(adapters, dtype=torch.int64), 3)
    found = []
    for backend in (CPU, REFERENCE):
        y = whole.clone()
        with using(backend):
            kernels.add_adapters(y[:, 2 : num_outputs + 2], x, down, up, groups)
        found.append(y)
    kernels.set_threads(0)
    mine, expected = found
    tolerance = 1e-4 if dtype == torch.float32 else 0.06
    torch.testing.assert_close(mine, expected, atol=tolerance, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5)
    without = [t for t, adapter in enumerate(adapters) if adapter < 0]
    assert torch.equal(mine[without], whole[without])
    assert torch.equal(mine[:, :2], whole[:, :2]) and torch.equal(mine[:, -4:], whole[:, -4:])


def test_a_row_s_result_does_not_depend_on_the_others(every_core: None) -> None:
    kernels.set_kernel_threads(2)
    down, up = tables(4, 7, 130, 1000, torch.float32)
    x, y = torch.randn(9, 130), torch.randn(9, 1000)
    ids = torch.tensor([0, 1, 2, 3, -1, 1, 1, 0, 3])
    together = kernels.add_adapters(y.clone(), x, down, up, kernels.Groups(ids, 4))
    for row in range(9):
        one = slice(row, row + 1)
        alone = kernels.add_adapters(y[one].clone(), x[one], down, up, kernels.Groups(ids[one], 4))
        assert torch.equal(alone, together[one])
    kernels.set_threads(0)
