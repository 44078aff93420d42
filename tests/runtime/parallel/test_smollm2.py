"""SmolLM2 with 9 query heads and 3 key/value heads, split evenly and unevenly, or its slots spread, in float32.

With ``PHLOEM_SOAK_RANKS`` (``make soak-ranks``) the texts are those of more meshes, of virtual ranks and of processes.
"""

import logging
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from phloem.protocol import ops as o
from phloem.protocol.sampling import SamplingParams
from phloem.runtime.config import EngineConfig
from phloem.runtime.engine import EngineCore
from phloem.runtime.models import load_model
from phloem.runtime.parallel import sequence
from phloem.runtime.parallel.gang import Gang, LocalGang
from phloem.runtime.parallel.mesh import Mesh
from phloem.runtime.parallel.split import RankSplit
from phloem.runtime.parallel.tensor import SplitHead
from phloem.tests.runtime.engine.driver import Driver, prompts
from phloem.tests.runtime.models.stepping import Stepper
from phloem.tests.runtime.parallel.staged import staged_logits, whole_logits
from phloem.tests.runtime.parallel.virtual import VirtualGang, VirtualGroup, run_all

pytestmark = pytest.mark.model
log = logging.getLogger(__name__)

IDS = np.random.default_rng(0).integers(1000, 40_000, 12).astype(np.int32)
MARGIN = 1e-3  # between the two likeliest tokens: nearer ones may change places


MESHES = {
    **{f"{ranks} tensors": {"tensor_parallel": ranks} for ranks in (2, 4)},
    **{f"{ranks} stages": {"pipeline_parallel": ranks} for ranks in (2, 4)},
    **{f"{ranks} sequences": {"sequence_parallel": ranks} for ranks in (2, 4)},
    "2 stages of 2 tensors": {"tensor_parallel": 2, "pipeline_parallel": 2},
}
IS_LONG = "PHLOEM_SOAK_RANKS" in os.environ
NUM_PROMPTS = 20 if IS_LONG else 8
CASES = [(mesh, "virtual") for mesh in (MESHES if IS_LONG else ("2 tensors", "2 sequences"))]
CASES += [(mesh, "processes") for mesh in MESHES if IS_LONG]


def config(path: Path, **split: int) -> EngineConfig:
    sizes = {"max_seq_len": 1024, "num_slots": 4096, "num_threads": 1, "rank_timeout_s": 300.0}
    return EngineConfig(model=str(path), precision="float32", **sizes, **split)


def answers(
    options: EngineConfig, *, count: int, length: int, gang: Gang | None = None
) -> list[list[tuple[int, float]]]:
    """Of each prompt the greedy tokens, and each one's margin before the next likeliest."""
    engine = EngineCore(options, gang=gang)
    driver = Driver(engine, check=False)
    params = SamplingParams(
        temperature=0.0, max_tokens=length, ignore_eos=True, return_logprob=True, top_logprobs_num=2
    )
    outcomes = [
        driver.submit([o.Text(op=0, seq=0, text=text), o.Gen(op=1, seq=0, params=params), o.Close(op=2, seq=0)])
        for text in prompts(count, seed=5, longest=60)
    ]
    driver.run()
    engine.close()
    found = []
    for outcome in outcomes:
        tokens = outcome.done[1].meta.candidates[0].logprobs
        found.append([(one.token_id, one.top[0][1] - one.top[1][1]) for one in tokens])
    return found


@pytest.fixture(scope="module")
def expected_logits(smollm2_path: Path) -> torch.Tensor:
    return Stepper(load_model(smollm2_path, config(smollm2_path))).prefill(0, IDS)


@pytest.mark.parametrize("ranks", [2, 3])
def test_logits_are_those_of_one_rank(smollm2_path: Path, expected_logits: torch.Tensor, ranks: int) -> None:

    def body(group: VirtualGroup) -> torch.Tensor | None:
        model = load_model(
            smollm2_path, config(smollm2_path, tensor_parallel=ranks), split=RankSplit(group, Mesh(tensor=group.size))
        )
        stepper, head = Stepper(model), model.head
        assert isinstance(head, SplitHead)
        with torch.inference_mode():
            features = model.features(stepper.batch([(0, IDS, len(IDS))]), stepper.kv)
            return head.whole_logits(features) if group.rank == 0 else head.send_whole(features)

    found = run_all(ranks, body)[0]
    assert (found - expected_logits).abs().max() <= 1e-4 * expected_logits.abs().max()


def test_logits_of_spread_slots_are_those_of_one_rank(smollm2_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence, "SHARED_TOKENS", 8)  # the prompt is shared out, its last tokens are not
    options = config(smollm2_path)
    expected = whole_logits(smollm2_path, options)
    found, _ = staged_logits(smollm2_path, Mesh(sequence=4), options)
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.fixture(scope="module")
def expected_answers(smollm2_path: Path) -> list[list[tuple[int, float]]]:
    return answers(config(smollm2_path), count=NUM_PROMPTS, length=8)


@pytest.mark.parametrize(("mesh", "kind"), CASES)
def test_greedy_texts_of_many_prompts_are_those_of_one_rank(
    smollm2_path: Path, expected_answers: list[list[tuple[int, float]]], mesh: str, kind: str
) -> None:
    options = config(smollm2_path, **MESHES[mesh])
    gang = VirtualGang(options) if kind == "virtual" else LocalGang(options)
    found = answers(options, count=NUM_PROMPTS, length=8, gang=gang)
    num_equal = sum(
        [token for token, _ in one] == [token for token, _ in other]
        for one, other in zip(found, expected_answers, strict=True)
    )
    log.info("%s, %s: %d of %d texts are equal to the last token", mesh, kind, num_equal, NUM_PROMPTS)
    for one, other in zip(found, expected_answers, strict=True):
        for (token, _), (wanted, margin) in zip(one, other, strict=True):
            if token != wanted:
                assert margin <= MARGIN
                break
