"""Memory straight from the system."""

import mmap

import pytest
import torch
from phloem.runtime.memory.pages import zeroed_pages


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("size", [1, 4096, (2 << 20) + 3, 5 << 20])
def test_pages_are_zeroed_and_can_be_written(size: int, large: bool) -> None:
    pages = zeroed_pages(size, large=large)
    assert pages.shape == (size,) and pages.dtype == torch.uint8 and not pages.any()
    pages.fill_(7)
    assert int(pages.sum(dtype=torch.int64)) == 7 * size


def test_without_anonymous_mappings_memory_is_numpys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("mmap.MAP_ANONYMOUS", raising=False)
    assert not zeroed_pages(3 << 20, large=True).any()


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="this system has no large pages to ask for")
def test_large_pages_begin_at_a_multiple_of_their_size() -> None:
    assert zeroed_pages(5 << 20, large=True).data_ptr() % (2 << 20) == 0
