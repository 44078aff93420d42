"""Masks, penalties and draws: equality with the reference, the distribution, independence of the batch."""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from phloem import kernels
from phloem.kernels import LogitEdits, SampleBatch, reference
from phloem.kernels.backend import REFERENCE, using
from torch import Tensor

# (temperature, top_k, top_p, min_p)
CUTS = [
    (0.0, -1, 1.0, 0.0),
    (1.0, -1, 1.0, 0.0),
    (0.7, 5, 1.0, 0.0),
    (1.3, -1, 0.8, 0.0),
    (1.0, -1, 1.0, 0.1),
    (2.0, 40, 0.5, 0.01),
    (100.0, -1, 0.99, 0.0),
    (1e-3, 3, 0.9, 0.5),
    (1.0, 10**6, 0.3, 1e-6),
    (0.9, 1, 1.0, 0.0),
    (1.0, -1, 5e-324, 0.0),  # zero as a float32
    (0.8, 6, 1e-40, 0.2),
]


def batch_of(cuts: list[tuple[float, int, float, float]], draws: np.ndarray) -> SampleBatch:
    columns = [np.array(column) for column in zip(*cuts, strict=True)] if cuts else [np.zeros(0)] * 4
    types = (np.float32, np.int32, np.float32, np.float32)
    return SampleBatch(*(column.astype(t) for column, t in zip(columns, types, strict=True)), draws)


def random_logits(num_rows: int, vocab_size: int, *, spread: float = 3.0) -> Tensor:
    logits = spread * torch.randn(num_rows, vocab_size)
    logits[:, ::7] = float("-inf")
    return logits


@pytest.mark.parametrize("vocab_size", [2, 15, 33, 1000, 4099])
@pytest.mark.parametrize("spread", [0.1, 3.0, 20.0])
def test_tokens_equal_the_reference(vocab_size: int, spread: float) -> None:
    rng = np.random.default_rng(vocab_size)
    cuts = CUTS * 4
    logits = random_logits(len(cuts), vocab_size, spread=spread)
    batch = batch_of(cuts, rng.random(len(cuts)))
    found, expected = kernels.sample(logits, batch), reference.sample(logits, batch)
    assert torch.equal(found.token_ids, expected.token_ids)
    torch.testing.assert_close(found.logprobs, expected.logprobs, atol=1e-5, rtol=1e-5)


def test_rows_that_want_no_logprob_have_the_same_tokens_and_the_others_the_same_logprobs() -> None:
    rng = np.random.default_rng(0)
    logits = random_logits(2 * len(CUTS), 1000)
    batch = batch_of(CUTS * 2, rng.random(len(logits)))
    wants = np.arange(len(logits)) % 3 == 0
    found, expected = kernels.sample(logits, replace(batch, wants_logprob=wants)), kernels.sample(logits, batch)
    assert torch.equal(found.token_ids, expected.token_ids)
    assert torch.equal(found.logprobs[wants], expected.logprobs[wants])
    order = rng.permutation(len(logits))
    moved = kernels.sample(logits[order], replace(batch, wants_logprob=wants).take(order))
    assert torch.equal(moved.logprobs[wants[order]], expected.logprobs[order][wants[order]])


@pytest.mark.parametrize("vocab_size", [2, 33, 1000, 4099])
@pytest.mark.parametrize("share", [0.0, 0.002, 0.3, 1.0])
def test_a_mask_given_to_sample_is_one_applied_before_to_the_bit(vocab_size: int, share: float) -> None:
    rng = np.random.default_rng(vocab_size)
    logits = random_logits(len(CUTS) + 2, vocab_size)
    batch = batch_of([*CUTS, *CUTS[:2]], rng.random(len(logits)))
    rows = torch.from_numpy(rng.permutation(len(logits))[:-2])  # two rows without cuts
    allowed = rng.random((len(rows), 32 * -(-vocab_size // 32))) < share
    mask = torch.from_numpy(np.packbits(allowed, axis=1, bitorder="little").view(np.int32))
    apart = kernels.sample(kernels.apply_bitmask(logits.clone(), mask, rows=rows), batch)
    found = kernels.sample(logits, batch, mask=mask, rows=rows)
    assert torch.equal(found.token_ids, apart.token_ids) and torch.equal(found.logprobs, apart.logprobs)


def test_a_mask_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="bitmask of 1 rows for 2 rows"):
        kernels.sample(torch.zeros(2, 40), SampleBatch.greedy(2), mask=np.zeros((1, 2), np.uint32))


def test_no_rows() -> None:
    sampled = kernels.sample(torch.empty(0, 50), SampleBatch.greedy(0))
    assert sampled.token_ids.shape == (0,) and sampled.logprobs.shape == (0,)


@pytest.mark.parametrize("cut", CUTS)
def test_equal_logits_prefer_low_ids(cut: tuple[float, int, float, float]) -> None:
    logits = torch.zeros(1, 100)
    for draw in (0.0, 0.31, 0.999999):
        batch = batch_of([cut], np.array([draw]))
        assert torch.equal(kernels.sample(logits, batch).token_ids, reference.sample(logits, batch).token_ids)


def test_greedy_takes_the_lowest_of_equal_tokens() -> None:
    logits = torch.zeros(3, 77)
    logits[0, [40, 41, 76]] = 5.0
    logits[1, 76] = 1.0
    logits[2, :] = -3.0
    assert kernels.sample(logits, SampleBatch.greedy(3)).token_ids.tolist() == [40, 76, 0]


def test_a_row_with_every_token_forbidden_has_token_minus_1() -> None:
    logits = torch.full((2, 50), float("-inf"))
    logits[1, 3] = 0.0
    for temperature in (0.0, 1.0):
        sampled = kernels.sample(logits, batch_of([(temperature, -1, 1.0, 0.0)] * 2, np.array([0.5, 0.5])))
        assert sampled.token_ids.tolist() == [-1, 3]
        assert sampled.logprobs.tolist() == [float("-inf"), 0.0]


@pytest.mark.parametrize("cut", [(1.0, -1, 1.0, 0.0), (0.5, -1, 1.0, 0.0), (1.0, 4, 1.0, 0.0), (1.5, -1, 0.7, 0.0)])
def test_draws_follow_the_distribution(cut: tuple[float, int, float, float]) -> None:
    num_draws, vocab_size = 20_000, 12
    logits = torch.linspace(-2, 2, vocab_size)[torch.randperm(vocab_size, generator=torch.Generator().manual_seed(1))]
    temperature, top_k, top_p, _ = cut
    weights = torch.softmax(logits.double() / temperature, dim=0)
    order = weights.argsort(descending=True)
    kept = order[: top_k if top_k > 0 else None]
    before = weights[kept].cumsum(0) - weights[kept]
    kept = kept[before < top_p * weights[kept].sum()]
    expected = torch.zeros(vocab_size, dtype=torch.float64)
    expected[kept] = weights[kept] / weights[kept].sum() * num_draws

    draws = kernels.uniform(np.full(num_draws, 3), np.arange(num_draws))
    batch = batch_of([cut] * num_draws, draws)
    counts = torch.bincount(kernels.sample(logits.expand(num_draws, -1), batch).token_ids, minlength=vocab_size)
    assert (counts[expected == 0] == 0).all()
    chance = expected > 0
    chi_square = float(((counts - expected)[chance] ** 2 / expected[chance]).sum())
    # For 11 degrees of freedom or fewer, 31.3 is passed once in a thousand times; the draws here are fixed.
    assert chi_square < 31.3


@pytest.mark.parametrize("vocab_size", [2, 33, 4099])
@pytest.mark.parametrize("share", [0.01, 1.0])
def test_logits_that_are_no_numbers_give_some_token_of_the_vocabulary(vocab_size: int, share: float) -> None:
    """The kernel read beyond the row and ended the process."""
    logits = random_logits(len(CUTS), vocab_size)
    logits[torch.rand(logits.shape) < share] = float("nan")
    found = kernels.sample(logits, batch_of(CUTS, np.random.default_rng(0).random(len(CUTS))))
    assert ((found.token_ids >= -1) & (found.token_ids < vocab_size)).all()


def test_a_row_does_not_depend_on_its_batch() -> None:
    cuts = CUTS * 2
    logits, draws = random_logits(len(cuts), 5000), np.random.default_rng(0).random(len(cuts))
    together = kernels.sample(logits, batch_of(cuts, draws))
    for row in range(len(cuts)):
        alone = kernels.sample(logits[row : row + 1], batch_of(cuts[row : row + 1], draws[row : row + 1]))
        assert alone.token_ids[0] == together.token_ids[row] and alone.logprobs[0] == together.logprobs[row]


def test_uniform_is_even_and_depends_on_seed_and_position_only() -> None:
    seeds, positions = np.meshgrid(np.arange(-50, 50), np.arange(200))
    draws = kernels.uniform(seeds.ravel(), positions.ravel())
    assert ((draws >= 0) & (draws < 1)).all() and len(np.unique(draws)) == draws.size
    counts = np.bincount((draws * 20).astype(int), minlength=20)
    assert ((counts - 1000) ** 2 / 1000).sum() < 43.8  # one in a thousand for 19 degrees of freedom
    grid = draws.reshape(200, 100)
    assert abs(np.corrcoef(grid[:-1].ravel(), grid[1:].ravel())[0, 1]) < 0.03
    assert abs(np.corrcoef(grid[:, :-1].ravel(), grid[:, 1:].ravel())[0, 1]) < 0.03
    assert kernels.uniform(np.array([7]), np.array([150]))[0] == grid[150, 57]


def test_uniform_equals_the_reference_to_the_bit() -> None:
    ends = np.iinfo(np.int64)
    rng = np.random.default_rng(1)
    seeds = np.concatenate(([ends.min, ends.max, -1, 0], rng.integers(ends.min, ends.max, 1000)))
    positions = np.concatenate(([0, 1, 1 << 40, ends.max], rng.integers(0, 1 << 40, 1000)))
    assert np.array_equal(kernels.uniform(seeds, positions), reference.uniform(seeds, positions))
    with pytest.raises(ValueError, match="seeds of shape"):
        kernels.uniform(np.zeros(2, np.int64), np.zeros(3, np.int64))


def test_rows_that_share_masks_equal_rows_with_their_own() -> None:
    rng = np.random.default_rng(2)
    logits = random_logits(len(CUTS), 1000)
    batch = batch_of(CUTS, rng.random(len(logits)))
    masks = rng.integers(0, 1 << 32, (3, 32), dtype=np.uint32)
    ids = rng.integers(0, 3, len(CUTS) - 2)
    rows = torch.from_numpy(rng.permutation(len(CUTS))[:-2])
    shared = kernels.sample(logits.clone(), batch, mask=masks, rows=rows, ids=ids)
    own = kernels.sample(logits.clone(), batch, mask=masks[ids], rows=rows)
    assert torch.equal(shared.token_ids, own.token_ids) and torch.equal(shared.logprobs, own.logprobs)
    with using(REFERENCE):
        slow = kernels.sample(logits.clone(), batch, mask=masks, rows=rows, ids=ids)
    assert torch.equal(shared.token_ids, slow.token_ids)
    for wrong in (np.full(len(ids), 3), np.full(len(ids), -1), ids[1:]):
        with pytest.raises(ValueError, match="mask"):
            kernels.sample(logits.clone(), batch, mask=masks, rows=rows, ids=wrong)


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 45, 5000])
def test_bitmask(vocab_size: int) -> None:
    rng = np.random.default_rng(0)
    logits = torch.randn(4, vocab_size)
    mask = rng.integers(0, 2**32, (4, (vocab_size + 31) // 32), dtype=np.uint32)
    mask[1], mask[2] = 0xFFFFFFFF, 0
    expected = reference.apply_bitmask(logits.clone(), torch.from_numpy(mask.view(np.int32)))
    assert torch.equal(kernels.apply_bitmask(logits.clone(), mask), expected)
    assert torch.equal(expected[1], logits[1]) and torch.isinf(expected[2]).all()
    some = kernels.apply_bitmask(logits.clone(), mask[2:3], rows=torch.tensor([3]))
    assert torch.equal(some[:3], logits[:3]) and torch.isinf(some[3]).all()


def test_bitmask_of_the_wrong_size_is_refused() -> None:
    with pytest.raises(ValueError, match="33 tokens need 2 words"):
        kernels.apply_bitmask(torch.zeros(1, 33), np.zeros((1, 1), np.uint32))
    with pytest.raises(ValueError, match="2 rows for 1 rows"):
        kernels.apply_bitmask(torch.zeros(1, 32), np.zeros((2, 1), np.uint32))
    with pytest.raises(ValueError, match="row 5"):
        kernels.apply_bitmask(torch.zeros(1, 32), np.zeros((1, 1), np.uint32), rows=torch.tensor([5]))


@dataclass(frozen=True)
class Params:
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)


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
    prompt_lens = [5, 11, 150, 0, 0, 0]
    logits = torch.randn(6, 40)
    edits = LogitEdits.from_params(params, token_ids, prompt_lens)
    assert edits is not None
    expected = reference.apply_edits(logits.clone(), edits)
    found = kernels.apply_edits(logits.clone(), edits)
    torch.testing.assert_close(found, expected)
    assert torch.equal(found[0], logits[0]) and found[3, 9] == float("-inf")
    assert found[4, 0] == logits[4, 0] - 1


def test_penalties_by_hand() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0, 0.5]])
    params = Params(frequency_penalty=0.1, presence_penalty=1.0, repetition_penalty=2.0)
    edits = LogitEdits.from_params([params], [np.array([0, 1, 1, 2])], [2])
    assert edits is not None
    found = kernels.apply_edits(logits, edits)
    # 0 only in the prompt; 1 in the prompt and once generated; 2 once generated; 3 never.
    torch.testing.assert_close(found, torch.tensor([[1.0, -5.1, -0.6, 0.5]]))


def test_rows_without_edits_cost_nothing() -> None:
    assert LogitEdits.from_params([Params()] * 3, [np.zeros(0, np.int32)] * 3, [0] * 3) is None


def test_ids_beyond_the_vocabulary_are_refused() -> None:
    edits = LogitEdits.from_params([Params(presence_penalty=1.0)], [np.array([50])], [0])
    assert edits is not None
    with pytest.raises(ValueError, match="token 50: must be between 0 and 49"):
        kernels.apply_edits(torch.zeros(1, 50), edits)
    with pytest.raises(ValueError, match="token -1"):
        kernels.gather_logprobs(torch.zeros(1, 50), torch.tensor([-1]))


def test_wishes_of_another_number_of_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="wants_logprob of 3 rows for 2 rows of logits"):
        kernels.sample(torch.zeros(2, 8), replace(SampleBatch.greedy(2), wants_logprob=np.ones(3, np.bool_)))


def test_parameters_of_another_number_of_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="2 rows for 1 rows"):
        kernels.sample(torch.zeros(1, 50), SampleBatch.greedy(2))
    with pytest.raises(ValueError, match="1 draws for 2 rows"):
        SampleBatch.from_params([Params()] * 2, uniforms=np.zeros(1))


@pytest.mark.parametrize("vocab_size", [3, 100, 4099])
def test_logprobs(vocab_size: int) -> None:
    logits = random_logits(5, vocab_size)
    logits[4] = 0.5  # all equal
    ids = torch.randint(1, vocab_size, (5,))
    expected = reference.gather_logprobs(logits, ids)
    torch.testing.assert_close(kernels.gather_logprobs(logits, ids), expected, atol=1e-5, rtol=1e-5)
    for k in (1, 2, min(90, vocab_size), vocab_size):
        found, expected_top = kernels.top_logprobs(logits, k), reference.top_logprobs(logits, k)
        assert torch.equal(found[0], expected_top[0])
        torch.testing.assert_close(found[1], expected_top[1], atol=1e-5, rtol=1e-5)


def test_top_of_more_than_the_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="top_logprobs of 51 tokens"):
        kernels.top_logprobs(torch.zeros(1, 50), 51)


def test_from_params_reads_every_field() -> None:
    params = [Params(), replace(Params(), temperature=0.5, top_k=7, top_p=0.25, min_p=0.125)]
    batch = SampleBatch.from_params(params, uniforms=np.array([0.1, 0.2]))
    assert batch.temperature.tolist() == [1.0, 0.5] and batch.top_k.tolist() == [-1, 7]
    assert batch.top_p.tolist() == [1.0, 0.25] and batch.min_p.tolist() == [0.0, 0.125]
    assert batch.draw.tolist() == [0.1, 0.2]
