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
def _tolerance_of_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    if ON_A_GPU:
        import torch

        inner = torch.testing.assert_close

        def assert_close(found: torch.Tensor, expected: torch.Tensor, **limits: float) -> None:
            given = {name: max(limits.get(name, 0.0), least) for name, least in (("atol", 0.1), ("rtol", 2e-2))}
            inner(found, expected, **given)

        monkeypatch.setattr(torch.testing, "assert_close", assert_close)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if ON_A_GPU:
        skipped = pytest.mark.skip(reason="about the interpreter")
        for item in items:
            if "interpreted" in item.name or "compiled" in item.nodeid:
                item.add_marker(skipped)
