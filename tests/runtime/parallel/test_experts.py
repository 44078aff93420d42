"""Whole experts on other ranks compute the logits of one rank, whichever way their results travel."""

from pathlib import Path

import pytest
import torch
from phloem.protocol.errors import InvalidParams
from phloem.runtime.config import EngineConfig
from phloem.runtime.parallel import experts
from phloem.runtime.parallel.mesh import Mesh
from phloem.runtime.weights import open_weights
from phloem.tests.runtime.models.families import FAMILIES, make_family
from phloem.tests.runtime.models.tiny import make_tiny_model
from phloem.tests.runtime.parallel.staged import config, staged_logits, whole_logits
from phloem.tests.runtime.parallel.test_expert_copies import ranks_body
from phloem.tests.runtime.parallel.virtual import VirtualGroup, run_all

MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2")
FOUR = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    at = tmp_path_factory.mktemp("mixtures")
    found = {family: make_family(at / family, FAMILIES[family]) for family in MIXTURES}
    return found | {"eight": make_tiny_model(at / "eight", seed=3, family="qwen3_moe", num_layers=2, **FOUR)}


@pytest.mark.parametrize("family", MIXTURES)
def test_two_ranks_of_experts_compute_the_logits_of_one_however_results_travel(
    family: str, paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 5 experts one rank has 3 and the other 2."""
    expected = whole_logits(paths[family], config(paths[family]))
    mesh = Mesh(tensor=2, expert=2)
    summed, read = staged_logits(paths[family], mesh, config(paths[family]))
    assert (summed - expected).abs().max() <= 1e-4 * max(1.0, float(expected.abs().max()))
    monkeypatch.setattr(experts, "SUM_BY_PARTS", 0)
    exchanged, _ = staged_logits(paths[family], mesh, config(paths[family]))
    assert torch.equal(exchanged, summed)
    file = open_weights(paths[family])
    total = sum(file.tensor(name).numel() for name in file.names() if not name.endswith("inv_freq"))
    assert 4 * total < sum(read) < 1.25 * 4 * total  # the tiny models repeat norms, routers and latent vectors


@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v2"])
def test_a_mixture_with_an_expert_for_all_tokens_has_copies_of_the_others(
    family: str, paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experts, "SUM_BY_PARTS", 0)
    (before, during, after), reports = run_all(2, ranks_body(paths[family], Mesh(2, 1, 2)))[0]
    assert torch.equal(during, before) and torch.equal(after, before)
    assert any(one.copies for one in reports)
    expected = whole_logits(paths[family], config(paths[family]))
    assert (before - expected).abs().max() <= 1e-4 * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("mesh", [Mesh(4, 1, 4), Mesh(4, 1, 2), Mesh(2, 2, 2)], ids=str)
def test_experts_are_combined_with_tensors_and_stages(
    mesh: Mesh, paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = whole_logits(paths["eight"], config(paths["eight"]))
    summed, read = staged_logits(paths["eight"], mesh, config(paths["eight"]))
    assert (summed - expected).abs().max() <= 1e-4
    monkeypatch.setattr(experts, "SUM_BY_PARTS", 0)
    exchanged, again = staged_logits(paths["eight"], mesh, config(paths["eight"]))
    assert torch.equal(exchanged, summed) and again == read
    # Each expert's bytes are read by one rank, or once in parts.
    file = open_weights(paths["eight"])
    mixed = sum(4 * file.tensor(name).numel() for name in file.names() if ".experts." in name)
    rest = sum(4 * file.tensor(name).numel() for name in file.names() if ".experts." not in name)
    assert mixed < sum(read) <= mixed + mesh.tensor * rest
    assert max(read) <= mixed / mesh.size + rest


def test_exchanged_results_are_fewer_bytes_than_sums(paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A token that takes 2 of 8 experts has results on 1.5 of 4 ranks, and its sum comes from one."""
    sent = 0
    send = VirtualGroup.send

    def count(self: VirtualGroup, x: torch.Tensor, to: int) -> None:
        nonlocal sent
        sent += x.numel() if x.dtype == torch.float32 and x.ndim == 2 and x.shape[-1] == 64 else 0
        send(self, x, to)

    monkeypatch.setattr(VirtualGroup, "send", count)
    found = []
    for limit in (1 << 30, 0):
        monkeypatch.setattr(experts, "SUM_BY_PARTS", limit)
        sent = 0
        staged_logits(paths["eight"], Mesh(4, 1, 4), config(paths["eight"]))
        found.append(sent)
    whole = 2 * 60 * 64  # numbers in the results of two layers for all tokens
    exchanged = found[1] - (found[0] - 4 * 3 * whole)  # less what else is sent: short sums send all to all
    assert 3 * whole < exchanged < 0.8 * (3 + 3) * whole  # a sum by parts sends 3 of 4 results and 3 copies of the sum


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        (
            (1, 1, 2),
            "expert_parallel=2: experts are shared out over the ranks of tensor_parallel=1, which it must divi",
        ),
        ((4, 1, 3), "expert_parallel=3: .* tensor_parallel=4, which it must divide; set tensor_parallel=3, or another"),
        ((2, 1, 0), "expert_parallel=0: it must be 1 to 64"),
    ],
)
def test_a_mesh_that_cannot_share_out_experts_says_why(mesh: tuple[int, int, int], message: str) -> None:
    tensor, pipeline, expert = mesh
    options = {"tensor_parallel": tensor, "pipeline_parallel": pipeline, "expert_parallel": expert}
    with pytest.raises(InvalidParams, match=message):
        Mesh.of(EngineConfig(model="m", **options))


def test_a_model_with_too_few_experts_is_refused(tmp_path: Path) -> None:
    dense = make_tiny_model(tmp_path / "dense", seed=1)
    with pytest.raises(InvalidParams, match="expert_parallel=2: this llama model has no experts; leave it at 1"):
        staged_logits(dense, Mesh(2, 1, 2), config(dense))
    few = make_tiny_model(tmp_path / "few", seed=1, family="qwen3_moe", **(FOUR | {"num_experts": 3}))
    with pytest.raises(InvalidParams, match="expert_parallel=4: this qwen3_moe model has 3 experts; at most as many"):
        staged_logits(few, Mesh(4, 1, 4), config(few))
