"""Triton's interpreter for the kernels of this folder: it has to be chosen before they are imported.

With ``PHLOEM_TEST_GPU=1`` the same tests run the compiled kernels on a GPU: arguments are copied there, with their
strides, and what a kernel has written is copied back. Products of float32 are TF32's there, so results may differ more.
"""

import os

import pytest

from .on_a_gpu import ON_A_GPU, move_kernels

if ON_A_GPU:
    os.environ.pop("TRITON_INTERPRET", None)
    move_kernels()
else:
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def _tolerance_of_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    if ON_A_GPU:
        import torch

        inner = torch.testing.assert_close

        def assert_close(found: torch.Tensor, expected: torch.Tensor, **limits: float) -> None:
            given = {name: max(limits.get(name, 0.0), least) for name, least in (("atol", 1e-2), ("rtol", 1e-2))}
            inner(found, expected, **given)

        monkeypatch.setattr(torch.testing, "assert_close", assert_close)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if ON_A_GPU:
        skipped = pytest.mark.skip(reason="about the interpreter")
        for item in items:
            if "interpreted" in item.name or "compiled" in item.nodeid:
                item.add_marker(skipped)
