"""Tensor parallelism computes the logits of the unsplit model, for every family's layers and forms of weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from phloem.protocol.errors import InvalidParams, UnknownModel, Unsupported
from phloem.runtime.config import EngineConfig
from phloem.runtime.models import load_model
from phloem.runtime.parallel.mesh import Mesh
from phloem.runtime.parallel.split import RankSplit
from phloem.runtime.parallel.tensor import SplitHead, likeliest, likeliest_by_keys
from phloem.tests.runtime.models.families import FAMILIES, make_family
from phloem.tests.runtime.models.lora import make_adapter
from phloem.tests.runtime.models.stepping import Stepper
from phloem.tests.runtime.models.tiny import make_tiny_gguf, make_tiny_model
from phloem.tests.runtime.parallel.virtual import VirtualGroup, run_all

IDS = np.random.default_rng(0).integers(0, 96, 60).astype(np.int32)
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}
REFUSED = {
    "deepseek_v2": "the model has 32 inner dimensions of an expert, 1 pieces of 32; at most 1 ranks can share",
    "deepseek_v3": "the model has 32 inner dimensions of an expert, 1 pieces of 32; at most 1 ranks",
    "gpt2": "this gpt2 model has matrices stored as .inputs, outputs., which are not split",
    "gpt_neox": "this gpt_neox model has query, key and value rows mixed by head, which are not split",
    "olmo2": "this olmo2 model has one norm over all heads, which are not split",
    "qwen2_moe": "the model has 32 inner dimensions of an expert, 1 pieces of 32; at most 1 ranks",
    "qwen3_moe": "the model has 32 inner dimensions of an expert, 1 pieces of 32; at most 1 ranks",
}

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")


def config(path: Path, **options: Any) -> EngineConfig:
    return EngineConfig(model=str(path), **({"precision": "float32"} | options))


def split_features(group: VirtualGroup, path: Path, options: EngineConfig) -> tuple[SplitHead, torch.Tensor]:
    """One rank's head, and its input for every token of IDS: a prompt in two chunks, then two tokens one by one."""
    model = load_model(path, options, split=RankSplit(group, Mesh(tensor=group.size)))
    assert isinstance(model.head, SplitHead)
    stepper = Stepper(model)
    with torch.inference_mode():
        parts = [
            model.features(stepper.batch([(0, piece, len(piece))]), stepper.kv).clone()
            for piece in (IDS[:31], IDS[31:58], IDS[58:59], IDS[59:])
        ]
    return model.head, torch.cat(parts)


def split_logits(path: Path, size: int, options: EngineConfig) -> torch.Tensor:
    def body(group: VirtualGroup) -> torch.Tensor | None:
        head, features = split_features(group, path, options)
        with torch.inference_mode():
            return head.whole_logits(features) if group.rank == 0 else head.send_whole(features)

    return run_all(size, body)[0]


def whole_logits(path: Path, options: EngineConfig) -> torch.Tensor:
    return Stepper(load_model(path, options)).prefill(0, IDS)


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_compute_the_logits_of_one_or_say_why_not(family: str, tmp_path: Path) -> None:
    path = make_family(tmp_path / family, FAMILIES[family])
    if family in REFUSED:
        with pytest.raises((Unsupported, InvalidParams), match=REFUSED[family]):
            split_logits(path, 2, config(path))
        return
    expected = whole_logits(path, config(path))
    found = split_logits(path, 2, config(path))
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
def test_four_ranks_share_two_key_value_heads(family: str, tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / family, seed=1, family=family, **(MOE if "moe" in family else {}))
    expected = whole_logits(path, config(path))
    assert (split_logits(path, 4, config(path)) - expected).abs().max() <= 1e-4


@pytest.mark.parametrize(
    ("kinds", "precision", "tolerance"),
    [
        ({"weight": "Q4_1", "down_proj": "Q6_K"}, "float32", 1e-5),
        ({"weight": "Q4_1"}, "auto", 0.05),  # 8-bit activations here, without AMX: each model is 5% off float32
        ({"weight": "Q8_0"}, "int16", 0.02),
        ({"weight": "Q4_K"}, "int4", 0.05),
        ({"weight": "F16"}, "bfloat16", 0.05),
    ],
)
def test_packed_weights_are_split_as_they_are(
    kinds: dict[str, str], precision: str, tolerance: float, tmp_path: Path
) -> None:
    width = 512 if any("K" in kind for kind in kinds.values()) else 128  # each rank's columns are whole blocks
    path = make_tiny_gguf(tmp_path / "packed.gguf", seed=5, kinds=kinds, hidden_size=width)
    options = config(path, precision=precision)
    expected = whole_logits(path, options)
    found = split_logits(path, 2, options)
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("size", [2, 4])
def test_keys_and_values_in_eight_bits_are_split_by_heads(size: int, tmp_path: Path) -> None:
    """A last bit of a sum can change a rounded number by a step, which is 1 in 127 of the largest of 16."""
    path = make_tiny_model(tmp_path / "model", seed=1)
    options = config(path, kv_dtype="int8")
    expected = whole_logits(path, options)
    assert (split_logits(path, size, options) - expected).abs().max() <= 5e-3 * expected.abs().max()
    assert (expected - whole_logits(path, config(path))).abs().max() > 1e-3


def test_adapters_are_split_with_their_layers(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "model", seed=2)
    targets = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    adapter = make_adapter(tmp_path / "adapter", path, seed=3, rank=4, targets=targets)
    options = config(path, adapters={"poet": str(adapter)})

    def logits(group: VirtualGroup | None) -> torch.Tensor | None:
        model = load_model(path, options, split=None if group is None else RankSplit(group, Mesh(tensor=group.size)))
        stepper = Stepper(model)
        batch = stepper.batch([(0, IDS, len(IDS))])
        with torch.inference_mode():
            features = model.features(batch.with_adapters(torch.zeros(len(IDS), dtype=torch.int64), 1), stepper.kv)
            if group is None:
                return model.logits_of(features)
            assert isinstance(model.head, SplitHead)
            return model.head.whole_logits(features) if group.rank == 0 else model.head.send_whole(features)

    expected, found = logits(None), run_all(3, logits)[0]
    assert expected is not None and (found - expected).abs().max() <= 1e-4
    assert (expected - whole_logits(path, config(path))).abs().max() > 1.0
    other = make_tiny_model(tmp_path / "other", seed=2, hidden_size=32)
    with pytest.raises(
        UnknownModel, match="of layer 0 is 64 x 128, but the model's is 32 x 128; it was made for another model"
    ):
        wrong = config(other, adapters={"poet": str(adapter)})
        run_all(2, lambda group: load_model(other, wrong, split=RankSplit(group, Mesh(tensor=group.size))))


@pytest.mark.parametrize("k", [1, 5, 64])
def test_a_shortlist_has_the_likeliest_tokens_and_the_sum_of_all(k: int, tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "model", seed=4)
    rows = np.array([2, 7])
    words = np.random.default_rng(1).integers(0, 1 << 32, (2, 9), dtype=np.uint32)
    words[1] = 0
    words[1, 5] = 6  # tokens 161 and 162, both of rank 1 of 2 ranks
    num_tokens = 250

    def body(group: VirtualGroup) -> Any:
        head, features = split_features(group, path, config(path))
        given = {"num_tokens": num_tokens, "rows": rows, "words": words}
        with torch.inference_mode():
            if group.rank:
                return head.send_whole(features), head.send_shortlist(features, k, **given)
            return head.whole_logits(features).numpy(), head.shortlist(features, k, **given)

    made, found = run_all(2, body)[0]
    logits = torch.from_numpy(made.copy())
    logits[:, num_tokens:] = float("-inf")
    bits = torch.from_numpy(np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, :259])
    logits[torch.from_numpy(rows)] = logits[torch.from_numpy(rows)].masked_fill(bits == 0, float("-inf"))
    assert torch.allclose(found.logsumexp, logits.logsumexp(1), atol=1e-5)
    assert (found.token_ids.diff(dim=1) > 0).all()
    assert torch.equal(found.logits, logits.gather(1, found.token_ids))
    best = likeliest(logits, k)
    for row in range(len(logits)):
        is_allowed = logits[row, best[row]] > float("-inf")
        assert set(best[row][is_allowed].tolist()) <= set(found.token_ids[row].tolist())


@pytest.mark.parametrize("find", [likeliest, likeliest_by_keys])
def test_of_equal_logits_the_lower_ids_are_likeliest(find: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0, 3.0, 2.0], [5.0, 4.0, 4.0, 4.0, 4.0, 4.0]])
    assert find(logits, 2).tolist() == [[1, 2], [0, 1]]
    assert find(logits, 3).tolist() == [[1, 2, 4], [0, 1, 2]]
    zeros = torch.tensor([[-1.0, 0.0, -0.0, float("-inf"), -2.0]])
    assert find(zeros, 1).tolist() == [[1]] and find(zeros, 4).tolist() == [[0, 1, 2, 4]]


def test_keys_find_the_likeliest_that_a_host_finds() -> None:
    rng = torch.Generator().manual_seed(3)
    for k in (1, 7, 64):
        logits = torch.randn(9, 500, generator=rng).mul(4).round() / 4  # with many equal ones
        logits[2, 5:] = float("-inf")
        found, expected = likeliest_by_keys(logits, k), likeliest(logits, k)
        assert torch.equal(found[:2], expected[:2]) and torch.equal(found[3:], expected[3:])
        assert torch.equal(logits.gather(1, found), logits.gather(1, expected))
