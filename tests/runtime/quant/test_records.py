"""Records made of a file's bytes are those that are made of its unpacked groups."""

import pytest
import torch
from phloem.kernels.cpu.packing import pack_int4
from phloem.runtime.quant import GROUP32_KINDS, QuantTensor, pack_records, repack_group32
from phloem.tests.runtime.quant.test_group32 import random_4bit


@pytest.mark.parametrize("kind", GROUP32_KINDS)
@pytest.mark.parametrize(("num_rows", "gain"), [(1, 1.0), (37, 1.0), (64, 0.5), (16, 1.7)])
def test_records_are_those_of_the_unpacked_groups(kind: str, num_rows: int, gain: float) -> None:
    tensor = random_4bit(kind, num_rows, 512)
    q, scale, zero = repack_group32(tensor)
    found = pack_records([tensor], gain=gain)
    assert found is not None and torch.equal(found, pack_int4(q, scale * gain, zero * gain))


def test_matrices_of_several_kinds_are_stacked_in_chunks() -> None:
    """The first has more rows than a thread packs at a time."""
    pieces = [random_4bit("Q4_K", 2080, 1024), random_4bit("Q4_0", 16, 1024), random_4bit("Q4_1", 5, 1024)]
    q, scale, zero = (torch.cat(part) for part in zip(*map(repack_group32, pieces), strict=True))
    found = pack_records(pieces)
    assert found is not None and torch.equal(found, pack_int4(q, scale, zero))
    assert pack_records(pieces[::-1]) is None  # 5 rows end within a block of 16


def test_columns_of_a_matrix_are_packed_alone() -> None:
    part = random_4bit("Q4_1", 32, 512).take_columns(range(64, 192))
    found = pack_records([part])
    assert found is not None and torch.equal(found, pack_int4(*repack_group32(part)))


def test_scales_beyond_float16_and_other_kinds_are_not_packed() -> None:
    blocks = random_4bit("Q4_1", 16, 64)
    assert pack_records([blocks], gain=1e5) is None
    assert pack_records([QuantTensor("Q8_0", torch.zeros(16, 2, 34, dtype=torch.uint8), (16, 64))]) is None
