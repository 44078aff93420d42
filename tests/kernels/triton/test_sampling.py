"""Draws and edits by the GPU's kernels, interpreted, against the plain-torch reference."""

import importlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from phloem.kernels import LogitEdits, SampleBatch, reference
from phloem.tests.kernels.test_sampling import CUTS, Params, batch_of, random_logits

sampling, edits, config = (
    importlib.import_module(f"phloem.kernels.triton.{name}") for name in ("sampling", "edits", "config")
)
# The interpreter converts arrays of one element to numbers.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")


def test_the_kernels_are_interpreted() -> None:
    assert type(sampling.draw_kernel).__name__ == "InterpretedFunction"


@pytest.mark.parametrize(("vocab_size", "spread"), [(2, 3.0), (33, 0.1), (1300, 3.0), (700, 20.0)])
def test_tokens_equal_the_reference(vocab_size: int, spread: float) -> None:
    rng = np.random.default_rng(vocab_size)
    logits = random_logits(len(CUTS), vocab_size, spread=spread)
    batch = batch_of(CUTS, rng.random(len(CUTS)))
    found, expected = sampling.sample(logits, batch), reference.sample(logits, batch)
    assert torch.equal(found.token_ids, expected.token_ids)
    torch.testing.assert_close(found.logprobs, expected.logprobs, atol=1e-5, rtol=1e-5)


# Rows of several parts, whose candidates are listed, or too many to be listed. More pivots than a GPU weighs take fewer
# passes; the tests of equality with the reference have both, for lists and for whole rows.
LISTED = config.DrawConfig(part_len=64, block_len=128, num_pivots=32)
OVERFLOWING = replace(LISTED, capacity=16)
in_parts = pytest.mark.parametrize("config", [LISTED, OVERFLOWING], ids=["listed", "overflowing"])


FEW_PIVOTS = replace(OVERFLOWING, num_pivots=4)


@pytest.mark.parametrize(
    ("vocab_size", "spread", "config"),
    [
        *((vocab_size, 3.0, config) for vocab_size in (65, 196) for config in (LISTED, FEW_PIVOTS)),
        *((195, 0.1, FEW_PIVOTS), (196, 20.0, LISTED)),
    ],
)
def test_rows_of_several_parts_equal_the_reference(vocab_size: int, spread: float, config: Any) -> None:
    cuts = [*CUTS, (1.0, 30, 1.0, 0.05), (0.6, 90, 1.0, 0.0), (1.0, -1, 0.999, 0.0)]
    logits = random_logits(len(cuts), vocab_size, spread=spread)
    batch = batch_of(cuts, np.random.default_rng(vocab_size).random(len(cuts)))
    found, expected = sampling.sample(logits, batch, config=config), reference.sample(logits, batch)
    assert torch.equal(found.token_ids, expected.token_ids)
    torch.testing.assert_close(found.logprobs, expected.logprobs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("share", "has_rows", "config"),
    [
        *((share, share < 0.8, LISTED) for share in (0.0, 0.01, 0.5, 1.0)),
        *((0.01, False, LISTED), (0.01, True, OVERFLOWING), (1.0, False, OVERFLOWING)),
    ],
)
def test_a_mask_given_to_sample_is_one_applied_before(share: float, has_rows: bool, config: Any) -> None:
    rng, vocab_size = np.random.default_rng(1), 163
    cuts = [*CUTS[:6], *CUTS[:2]]  # each kind of cut, and two rows that a mask of some rows leaves out
    logits = random_logits(len(cuts), vocab_size)
    batch = batch_of(cuts, rng.random(len(cuts)))
    rows = torch.from_numpy(rng.permutation(len(logits))[:-2]) if has_rows else None
    num_lines = len(logits) if rows is None else len(rows)
    allowed = rng.random((num_lines, 32 * -(-vocab_size // 32))) < share
    mask = torch.from_numpy(np.packbits(allowed, axis=1, bitorder="little").view(np.int32))
    expected = reference.sample(reference.apply_bitmask(logits.clone(), mask, rows=rows), batch)
    kept = logits.clone()
    found = sampling.sample(logits, batch, mask=mask, rows=rows, config=config)
    assert torch.equal(found.token_ids, expected.token_ids) and torch.equal(logits, kept)
    torch.testing.assert_close(found.logprobs, expected.logprobs, atol=1e-5, rtol=1e-5)


@in_parts
def test_a_row_does_not_depend_on_its_batch(config: Any) -> None:
    logits, draws = random_logits(len(CUTS), 131), np.random.default_rng(0).random(len(CUTS))
    together = sampling.sample(logits, batch_of(CUTS, draws), config=config)
    for row in range(0, len(CUTS), 2):  # greedy, and each kind of cut
        alone = sampling.sample(
            logits[row : row + 1], batch_of(CUTS[row : row + 1], draws[row : row + 1]), config=config
        )
        assert alone.token_ids[0] == together.token_ids[row] and alone.logprobs[0] == together.logprobs[row]


@pytest.mark.filterwarnings("ignore:All-NaN")
@pytest.mark.filterwarnings("ignore:invalid value")
@in_parts
@pytest.mark.parametrize("share", [0.01, 1.0])
def test_logits_that_are_no_numbers_give_some_token_of_the_vocabulary(share: float, config: Any) -> None:
    logits = random_logits(len(CUTS), 131)
    logits[torch.rand(logits.shape) < share] = float("nan")
    found = sampling.sample(logits, batch_of(CUTS, np.random.default_rng(0).random(len(CUTS))), config=config)
    assert ((found.token_ids >= -1) & (found.token_ids < 131)).all()


@pytest.mark.parametrize("draw", [0.0, 0.31, 0.999999])
def test_equal_logits_prefer_low_ids(draw: float) -> None:
    logits = torch.zeros(len(CUTS), 100)
    logits[:, ::2] = -0.0  # equal to 0, whatever its bits
    batch = batch_of(CUTS, np.full(len(CUTS), draw))
    assert torch.equal(sampling.sample(logits, batch).token_ids, reference.sample(logits, batch).token_ids)


@in_parts
def test_cuts_within_ties_keep_as_many_as_the_reference(config: Any) -> None:
    logits = torch.randint(0, 4, (3, 260)).float()
    cuts = [(1.0, 90, 1.0, 0.0), (0.5, 150, 0.9, 0.0), (1.0, -1, 0.5, 0.0)]
    for draw in (0.05, 0.5, 0.9999):
        batch = batch_of(cuts, np.full(3, draw))
        assert torch.equal(
            sampling.sample(logits, batch, config=config).token_ids, reference.sample(logits, batch).token_ids
        )


def test_no_rows_and_a_row_in_which_nothing_is_allowed() -> None:
    assert sampling.sample(torch.empty(0, 50), SampleBatch.greedy(0)).token_ids.shape == (0,)
    logits = torch.full((2, 50), float("-inf"))
    logits[1, 3] = 0.0
    for temperature in (0.0, 1.0):
        sampled = sampling.sample(logits, batch_of([(temperature, -1, 1.0, 0.0)] * 2, np.array([0.5, 0.5])))
        assert sampled.token_ids.tolist() == [-1, 3]
        assert sampled.logprobs.tolist() == [float("-inf"), 0.0]


def test_parameters_of_another_number_of_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="2 rows for 1 rows"):
        sampling.sample(torch.zeros(1, 50), SampleBatch.greedy(2))


def test_penalties_and_bias() -> None:
    rng = np.random.default_rng(0)
    params = [
        Params(),
        Params(frequency_penalty=0.5, presence_penalty=-0.25),
        Params(repetition_penalty=1.7),
        Params(frequency_penalty=1.0, repetition_penalty=0.5, logit_bias={3: 2.0, 9: float("-inf")}),
        Params(logit_bias={0: -1.0}),
        Params(presence_penalty=1.0),
    ]
    token_ids = [rng.integers(0, 40, n).astype(np.int32) for n in (5, 30, 300, 17, 0, 0)]
    made = LogitEdits.from_params(params, token_ids, [5, 11, 150, 0, 0, 0])
    assert made is not None
    logits = torch.randn(6, 1040)
    expected = reference.apply_edits(logits.clone(), made)
    torch.testing.assert_close(edits.apply_edits(logits.clone(), made), expected)


def test_ids_beyond_the_vocabulary_are_refused() -> None:
    made = LogitEdits.from_params([Params(presence_penalty=1.0)], [np.array([50])], [0])
    assert made is not None
    with pytest.raises(ValueError, match="token 50: must be between 0 and 49"):
        edits.apply_edits(torch.zeros(1, 50), made)
