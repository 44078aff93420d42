"""Steps of tensor ranks run from tapes with sums between pieces, and have the bits of steps run call by call."""

from pathlib import Path
from typing import Any

import pytest
import torch
from phloem import kernels
from phloem.kernels.cpu.pool import has_pool
from phloem.kernels.linear import Columns
from phloem.runtime.config import EngineConfig
from phloem.runtime.layers.adapters import AdapterRows
from phloem.runtime.models import load_model
from phloem.runtime.parallel.group import Group, connect
from phloem.runtime.parallel.mesh import Mesh
from phloem.runtime.parallel.split import RankSplit
from phloem.runtime.parallel.tensor import RowLinear
from phloem.tests.runtime.executor.test_replays import TwoWays
from phloem.tests.runtime.models.tiny import make_tiny_gguf, make_tiny_model
from phloem.tests.runtime.parallel.test_group import at_once
from phloem.tests.runtime.parallel.virtual import run_all

MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}

pytestmark = pytest.mark.skipif(not has_pool(), reason="without a pool steps run on torch's threads, off the tape")


@pytest.fixture(autouse=True)
def one_thread(every_core: None) -> Any:
    kernels.set_kernel_threads(1)
    yield
    kernels.set_threads(0)


class Copying(RowLinear):
    """Calls torch, which a tape does not hold."""

    def __call__(self, x: torch.Tensor | Columns, rows: AdapterRows | None = None) -> torch.Tensor:
        return super().__call__(x, rows).clone()


def packed(folder: Path) -> EngineConfig:
    """The first rank has two of the three key/value heads."""
    sizes: dict[str, Any] = {"num_layers": 6, "context_length": 1300}
    sizes |= {"num_heads": 6, "num_kv_heads": 3, "head_dim": 32, "hidden_size": 192}
    path = make_tiny_gguf(folder / "tiny.gguf", seed=1, kinds={"weight": "Q4_0"}, **sizes)
    return EngineConfig(model=str(path), max_seq_len=1300)


def two_ways(group: Group, config: EngineConfig, mesh: Mesh) -> int:
    """The number of steps that ran from a tape, each compared with the same step without. The same on every rank."""
    model = load_model(config.model, config, split=RankSplit(group, mesh))
    both = TwoWays(model, num_rows=4)
    both.step({0: 5, 1: 61})
    both.step({2: 520}, num_logits=0)  # too long for a tape
    for i in range(3):
        both.step({0: 1})
        both.step({0: 1, 1: 1, 2: 1})
        both.step({2: 1 + i, 0: 2}, num_logits=1)
    return both.num_replayed


def test_virtual_ranks_replay_the_bits_of_single_calls(tmp_path: Path) -> None:
    config = packed(tmp_path)
    assert run_all(2, lambda group: two_ways(group, config, Mesh(tensor=2))) == [10, 10]


def test_ranks_over_gloo_replay_the_bits_of_single_calls(tmp_path: Path) -> None:
    config = packed(tmp_path)
    groups = at_once([lambda rank=rank: connect(tmp_path, rank=rank, size=2, timeout_s=60.0) for rank in (0, 1)])
    assert at_once([lambda group=group: two_ways(group, config, Mesh(tensor=2)) for group in groups]) == [10, 10]


def test_experts_in_pieces_are_replayed_and_shared_out_ones_are_not(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "moe", seed=1, family="qwen3_moe", **MOE)
    config = EngineConfig(model=str(path), precision="float32")
    for mesh in (Mesh(tensor=2), Mesh(tensor=2, expert=2)):
        models = run_all(2, lambda group, mesh=mesh: load_model(config.model, config, split=RankSplit(group, mesh)))
        assert [model.has_tapes for model in models] == [mesh.expert == 1] * 2


def test_a_shape_that_one_rank_cannot_record_has_no_tape_on_any(tmp_path: Path) -> None:
    config = packed(tmp_path)

    def body(group: Group) -> int:
        model = load_model(config.model, config, split=RankSplit(group, Mesh(tensor=2)))
        both = TwoWays(model, num_rows=1)
        if group.rank == 1:
            both.model.layers[0].mlp.down.__class__ = Copying
        both.step({0: 3})
        both.step({0: 1})
        return both.num_replayed

    assert run_all(2, body) == [0, 0]
