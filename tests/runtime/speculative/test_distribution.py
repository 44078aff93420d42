"""Drawn tokens have the target's distribution with drafts as without: a chi-square test on a small vocabulary."""

import math

import msgspec
import numpy as np
import pytest
import torch
from phloem import kernels
from phloem.protocol.sampling import SamplingParams
from phloem.runtime.engine.drafting import draft_rows
from phloem.runtime.executor import Executor, SampleRow
from phloem.runtime.scheduler import Draft

V = 12
NUM_TEXTS = 60_000
LENGTH = 3  # tokens of a text
P = SamplingParams


class Chain:
    """A model that is a table: the logits depend only on the last token."""

    device = torch.device("cpu")
    has_tapes = True
    sequence = None

    class config:
        vocab_size = V


LOGITS = torch.tensor(np.random.default_rng(5).normal(0.0, 1.5, (V, V)), dtype=torch.float32)
EXECUTOR = Executor(Chain(), None, max_rows=1, max_len=1)  # type: ignore[arg-type]


def probabilities(params: P, text: tuple[int, ...]) -> np.ndarray:
    """The distribution of the next token, with the parameters applied in the documented order; float64."""
    logits = LOGITS[text[-1]].double().numpy().copy()
    for token, value in params.logit_bias.items():
        logits[token] += value
    for token in set(text):
        penalty = params.repetition_penalty
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    for token in set(text[1:]):
        logits[token] -= params.frequency_penalty * text[1:].count(token) + params.presence_penalty
    weights = np.exp((logits - logits.max()) / params.temperature)
    order = np.argsort(-weights, kind="stable")
    if params.top_k > 0:
        weights[order[params.top_k :]] = 0.0
    before = np.cumsum(weights[order]) - weights[order]
    weights[order[before >= params.top_p * weights.sum()]] = 0.0
    return weights / weights.sum()


def draws(row: SampleRow, seeds: np.ndarray) -> np.ndarray:
    """The tokens that ``seeds`` draw for ``row``."""
    logits = LOGITS[int(row.token_ids[-1])].clone().unsqueeze(0)
    EXECUTOR.constrain(logits, EXECUTOR.masks_of([row], None))
    edits = kernels.LogitEdits.from_params([row.params], [row.token_ids], [row.prompt_len])
    if edits is not None:
        kernels.apply_edits(logits, edits)
    batch = kernels.SampleBatch.from_params(
        [row.params] * len(seeds), uniforms=kernels.uniform(seeds, np.full(len(seeds), len(row.token_ids)))
    )
    return kernels.sample(logits.expand(len(seeds), -1).contiguous(), batch).token_ids.numpy()


def drawn(params: P, draft: Draft, num_texts: int) -> dict[tuple[int, ...], int]:
    """Texts after token 0: their first step verifies ``draft``, later steps have no draft."""
    first = SampleRow(0, params, 0, np.array([0], np.int32), 1)
    seeds = np.arange(num_texts, dtype=np.int64)
    after = np.stack([draws(row, seeds) for row in (first, *draft_rows(draft, first, min_tokens_left=0))])
    groups: dict[tuple[int, ...], list[int]] = {}
    for seed in range(num_texts):
        text = [0]
        for i, token in enumerate(after[:, seed].tolist()):
            text.append(token)
            if i == len(draft) or token != draft.token_ids.item(i):
                break
        groups.setdefault(tuple(text), []).append(seed)
    counts: dict[tuple[int, ...], int] = {}
    while groups:
        text, members = groups.popitem()
        if len(text) > LENGTH:
            key = text[1 : LENGTH + 1]
            counts[key] = counts.get(key, 0) + len(members)
            continue
        found = draws(msgspec.structs.replace(first, token_ids=np.array(text, np.int32)), np.array(members, np.int64))
        for token in np.unique(found).tolist():
            more = [seed for seed, one in zip(members, found.tolist(), strict=True) if one == token]
            groups.setdefault((*text, token), []).extend(more)
    return counts


def surprise(counts: dict[tuple[int, ...], int], params: P, num_texts: int) -> float:
    """Chi-square, in standard deviations above its mean; texts expected fewer than five times are pooled."""
    statistic, cells, pooled, pooled_seen = 0.0, 0, 0.0, 0

    def walk(text: tuple[int, ...], chance: float) -> None:
        nonlocal statistic, cells, pooled, pooled_seen
        if len(text) > LENGTH:
            expected, seen = chance * num_texts, counts.get(text[1:], 0)
            if expected < 5.0:
                pooled, pooled_seen = pooled + expected, pooled_seen + seen
            else:
                statistic += (seen - expected) ** 2 / expected
                cells += 1
            return
        for token, p in enumerate(probabilities(params, text)):
            if p > 0.0:
                walk((*text, token), chance * p)
            else:
                assert not any(key[: len(text)] == (*text[1:], token) for key in counts), "an impossible token"

    walk((0,), 1.0)
    if pooled >= 5.0:
        statistic += (pooled_seen - pooled) ** 2 / pooled
        cells += 1
    freedom = cells - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


LIKELY = [int(LOGITS[0].argmax())]
LIKELY.append(int(LOGITS[LIKELY[0]].argmax()))
DRAFT = Draft(np.array([LIKELY[0], LIKELY[1], 3], np.int32))


@pytest.mark.parametrize(
    "params",
    [
        P(temperature=1.0),
        P(temperature=0.6, top_p=0.85),
        P(temperature=1.4, top_k=7),
        P(temperature=0.9, frequency_penalty=0.8, presence_penalty=0.4, repetition_penalty=1.3, logit_bias={3: 1.0}),
    ],
    ids=["plain", "top-p", "top-k", "penalties and bias"],
)
def test_texts_with_drafts_have_the_target_s_distribution(params):
    counts = drawn(params, DRAFT, NUM_TEXTS)
    assert sum(counts.values()) == NUM_TEXTS
    assert abs(surprise(counts, params, NUM_TEXTS)) < 4.5


def test_the_chi_square_test_detects_a_slightly_different_distribution():
    counts = drawn(P(temperature=1.05), DRAFT, NUM_TEXTS)
    assert surprise(counts, P(temperature=1.0), NUM_TEXTS) > 10.0
