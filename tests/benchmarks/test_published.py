"""The page of larger models has the predictions that the planner makes now, beside what others have published."""

from pathlib import Path

import phloem
from phloem.benchmarks.published import TENSORRT, rows, table


def test_the_page_has_the_table_that_the_command_prints() -> None:
    assert table() in (Path(phloem.__file__).parent / "docs" / "parallel.md").read_text()


def test_predictions_for_an_engine_that_multiplies_8_bits_are_within_a_third() -> None:
    found = [row for row in rows() if TENSORRT in row.setup]
    assert len(found) == 14
    for row in found:
        assert abs(row.with_fast_products / row.published - 1) < 0.33, row
