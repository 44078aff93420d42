"""Experts are copied to other ranks while a model runs, and no bit of a result changes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from phloem.protocol.errors import InvalidParams
from phloem.protocol.sampling import SamplingParams
from phloem.runtime.config import EngineConfig
from phloem.runtime.engine import EngineCore
from phloem.runtime.models import load_model
from phloem.runtime.parallel import expert_copies, expert_places, experts
from phloem.runtime.parallel.expert_copies import ExpertCopies, MixtureReport
from phloem.runtime.parallel.group import Group, connect
from phloem.runtime.parallel.mesh import Mesh
from phloem.runtime.parallel.split import RankSplit
from phloem.runtime.parallel.tensor import SplitHead
from phloem.tests.runtime.engine.driver import Driver, generate
from phloem.tests.runtime.models.tiny import make_tiny_model
from phloem.tests.runtime.parallel.staged import config, executor_of, steps, whole_logits
from phloem.tests.runtime.parallel.test_group import at_once
from phloem.tests.runtime.parallel.virtual import VirtualGang, run_all
from safetensors.torch import load_file, save_file

MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")


def make_skewed(folder: Path, **sizes: Any) -> Path:
    """A mixture whose experts 0 and 1 are chosen twice as often as the others."""
    path = make_tiny_model(folder, seed=3, family="qwen3_moe", **(MOE | sizes))
    tensors = load_file(path / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("mlp.gate.weight"):
            tensor[:2] *= 6
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_skewed(tmp_path_factory.mktemp("skewed") / "model")


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a tiny model's steps count as long, and its experts have several blocks."""
    monkeypatch.setattr(experts, "SUM_BY_PARTS", 0)
    for module in (experts, expert_places):
        monkeypatch.setattr(module, "BLOCK", 3)


def options_of(path: Path, mesh: Mesh, **options: Any) -> EngineConfig:
    split = {"tensor_parallel": mesh.tensor, "pipeline_parallel": mesh.pipeline, "expert_parallel": mesh.expert}
    return config(path, **({"expert_copies": 1} | split | options))


Found = tuple[list[torch.Tensor], list[MixtureReport]]


def ranks_body(path: Path, mesh: Mesh, **options: Any) -> Callable[[Group], Found]:
    """The logits of the steps before any review, with a review between every two steps, and after them."""
    given = options_of(path, mesh, **options)

    def body(group: Group) -> Found:
        model = load_model(path, given, split=RankSplit(group, mesh, expert_copies=given.expert_copies))
        copies = ExpertCopies(model, group, given)
        assert isinstance(model.head, SplitHead)
        found = []
        with torch.inference_mode():
            for num_reviews in (0, 2, 0):
                executor, made = executor_of(model), []
                for step in steps():
                    features = executor.forward(step).features
                    made.append(
                        model.head.whole_logits(features) if group.rank == 0 else model.head.send_whole(features)
                    )
                    for _ in range(num_reviews):
                        copies.review()
                found.append(torch.cat(made) if group.rank == 0 else torch.empty(0))
            for _ in range(2 // mesh.pipeline):  # each mixture once
                copies.review()
        return found, copies.reports()

    return body


def check(found: Found, num_mixtures: int) -> None:
    (before, during, after), reports = found
    assert torch.equal(during, before) and torch.equal(after, before)
    assert [one.layer for one in reports] == list(range(num_mixtures))
    for one in reports:
        assert one.copies and one.shared < one.at_home


@pytest.mark.parametrize("mesh", [Mesh(4, 1, 4), Mesh(4, 1, 2), Mesh(2, 2, 2)], ids=str)
def test_no_bit_changes_before_during_and_after_a_copy(mesh: Mesh, path: Path) -> None:
    found = run_all(mesh.size, ranks_body(path, mesh))[0]
    check(found, 2)
    assert (found[0][0] - whole_logits(path, config(path))).abs().max() <= 1e-4


def test_bfloat16_keeps_its_bits_too(path: Path) -> None:
    check(run_all(4, ranks_body(path, Mesh(4, 1, 4), precision="bfloat16"))[0], 2)


def test_processes_copy_the_weights_that_virtual_ranks_copy(path: Path, tmp_path: Path) -> None:
    mesh = Mesh(2, 1, 2)
    expected = run_all(2, ranks_body(path, mesh))[0]
    calls = [
        lambda rank=rank: ranks_body(path, mesh)(connect(tmp_path, rank=rank, size=2, timeout_s=60.0))
        for rank in range(2)
    ]
    found = at_once(calls)[0]
    assert all(torch.equal(one, other) for one, other in zip(found[0], expected[0], strict=True))
    assert found[1] == expected[1] and found[1][0].copies


@pytest.mark.parametrize("mesh", [Mesh(4, 1, 4), Mesh(2, 2, 2)], ids=str)
def test_an_engine_reviews_its_experts_and_answers_as_before(
    mesh: Mesh, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    prompts = ["the sap rises " * 4, "leaves " * 9]
    answers, infos = [], []
    for review_tokens in (1 << 30, 50):
        monkeypatch.setattr(expert_copies, "REVIEW_TOKENS", review_tokens)
        options = options_of(path, mesh, num_slots=2048, num_threads=1)
        engine = EngineCore(options, gang=VirtualGang(options))
        driver = Driver(engine)
        answers.append([generate(driver, prompt, params)[0] for prompt in prompts])
        driver.step()  # idle
        infos.append(engine.info()["expert_copies"])
        engine.close()
    assert answers[0] == answers[1]
    assert infos[0] == {"spare_bytes": infos[1]["spare_bytes"], "num_copied": 0, "mixtures": []}
    assert infos[1]["spare_bytes"] == (2 // mesh.pipeline) * 3 * 64 * 64 * 4
    assert infos[1]["num_copied"] >= 2 and [one["layer"] for one in infos[1]["mixtures"]] == [0, 1]
    assert any(one["copies"] for one in infos[1]["mixtures"])


def test_the_busiest_of_four_ranks_has_less_than_half_of_its_excess_left(path: Path) -> None:
    """Counted on 3,000 tokens whose experts 0 and 1, both at home on rank 0, are chosen by half of them."""
    weights = torch.full((250, 2), 0.5)
    rng = np.random.default_rng(4)
    chance = np.array([6.0, 6, 1, 2, 1, 2, 1, 1])
    choices = [
        np.stack([rng.choice(8, 2, replace=False, p=chance / chance.sum()) for _ in range(250)]) for _ in range(12)
    ]
    mesh = Mesh(4, 1, 4)

    def body(group: Group) -> list[np.ndarray]:
        given = options_of(path, mesh)
        model = load_model(path, given, split=RankSplit(group, mesh, expert_copies=1))
        mixture = model.layers[0].mlp
        assert isinstance(mixture, experts.SplitExperts) and mixture.copies is not None
        copied, found = mixture.copies, []
        for ids in choices:
            copied.results(torch.ones(250, 64), weights, torch.from_numpy(ids.astype(np.int32)))
            found.append(copied.tokens.copy())
            copied.review()
        return found

    made = run_all(4, body)
    assert all(np.array_equal(one, other) for rank in made[1:] for one, other in zip(rank, made[0], strict=True))
    at_home, shared = np.sum(made[0][2:], axis=0)  # the first two reviews make the copies
    share = [tokens.max() / tokens.sum() for tokens in (at_home, shared)]
    assert share[0] > 0.5 and share[1] < 0.30  # 0.25 is even


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel": 2}, "expert_copies=1: it must be 0, or above 0 with expert_parallel of 2 or more"),
        ({"tensor_parallel": 2, "expert_parallel": 2, "expert_copies": -1}, "expert_copies=-1: it must be 0, or"),
        ({"tensor_parallel": 4, "expert_parallel": 4, "expert_copies": 7}, "expert_copies=7: of 8 experts a part"),
    ],
)
def test_copies_that_cannot_be_are_refused(path: Path, options: dict[str, int], message: str) -> None:
    given = config(path, **({"expert_copies": 1} | options))
    with pytest.raises(InvalidParams, match=message):
        EngineCore(given, gang=VirtualGang(given) if given.expert_copies > 1 else None)
