"""Which shapes steps have, and which of these are recorded before their first step."""

import pytest
from phloem.runtime.executor.replays import MAX_KEPT
from phloem.runtime.executor.tape_shapes import MAX_ROWS, MAX_TOKENS, StepShape, tape_shape, usual_shapes


def shapes(most_rows: int, most_tokens: int) -> set[StepShape]:
    """Those of all steps of so many rows and tokens."""
    found = set()
    for num_tokens in range(1, most_tokens + 1):
        for num_rows in range(1, min(num_tokens, most_rows) + 1):
            least, most = -(-num_tokens // num_rows), num_tokens - num_rows + 1
            for longest in (least, most, *(1 << i for i in range(10) if least < 1 << i < most)):
                for context in (longest, 100, 600):
                    found.add(tape_shape(num_rows, num_tokens, longest=longest, context=max(context, longest)))
    return found - {None}


@pytest.mark.parametrize("max_rows", [1, MAX_ROWS, 64])
def test_all_shapes_of_up_to_32_tokens_are_recorded_ahead(max_rows: int) -> None:
    usual = list(usual_shapes(max_rows))
    assert len(set(usual)) == len(usual)
    small = {shape for shape in usual if shape[1] <= MAX_ROWS}
    assert small == shapes(max_rows, MAX_ROWS) and len(small) == (32 if max_rows == 1 else 161)


def test_every_shape_that_is_recorded_ahead_is_one_that_steps_have() -> None:
    assert set(usual_shapes(64)) <= shapes(20, MAX_TOKENS)


def test_as_many_tapes_are_kept_as_there_are_shapes() -> None:
    assert len(shapes(MAX_ROWS, MAX_TOKENS)) <= MAX_KEPT


def test_one_row_has_its_own_shape_whatever_its_context() -> None:
    for context in (17, 100, 600, 8000):
        assert tape_shape(1, 17, longest=17, context=context) == (1, 17)


def test_the_longer_the_longest_row_the_fewer_rows() -> None:
    found = [tape_shape(2, 20, longest=longest, context=400) for longest in (10, 15, 16, 19)]
    assert found == [(13, 20), (13, 20), (5, 20), (5, 20)]
    assert tape_shape(2, 3, longest=2, context=400) == (3, 3), "a few keys more are read than once"
