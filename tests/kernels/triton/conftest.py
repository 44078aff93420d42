"""Triton's interpreter for the kernels of this folder: it has to be chosen before they are imported.

With ``PHLOEM_TEST_GPU=1`` the same tests run the compiled kernels on a GPU: arguments are copied there, with their
strides, and what a kernel has written is copied back. Products are of bfloat16 or TF32 there, so results may differ
more.
"""

import pytest
from phloem.tests.gpu import ON_A_GPU, choose_kernels

choose_kernels()
if ON_A_GPU:
    from .on_a_gpu import move_kernels

    move_kernels()


@pytest.fixture(autouse=True)
def _tolerance_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded factors move sums of large terms that nearly cancel, so errors are compared with the whole result."""
    if ON_A_GPU:
        import torch

        def assert_close(found: torch.Tensor, expected: torch.Tensor, *, rtol: float = 0.0, **limits: float) -> None:
            finite = expected.isfinite()
            assert found.shape == expected.shape and torch.equal(found[~finite], expected[~finite])
            error = (found[finite].double() - expected[finite].double()).norm()
            assert error <= max(1e-2, rtol) * expected[finite].double().norm(), f"wrong by {error}"

        monkeypatch.setattr(torch.testing, "assert_close", assert_close)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if ON_A_GPU:
        skipped = pytest.mark.skip(reason="about the interpreter")
        for item in items:
            if "interpreted" in item.name or "every_kernel" in item.name or "compiled" in item.nodeid:
                item.add_marker(skipped)
