"""Stages of layers compute the bits of the whole model; what cannot be staged says why."""

import re
from pathlib import Path

import msgspec
import pytest
import torch
from phloem.protocol.errors import InvalidParams
from phloem.runtime.config import EngineConfig
from phloem.runtime.models import load_model
from phloem.runtime.parallel.mesh import Mesh, mean_layer_weights, stages_of
from phloem.runtime.parallel.pipeline import PipelineStage
from phloem.runtime.parallel.split import RankSplit
from phloem.runtime.weights import open_weights
from phloem.tests.runtime.models.families import FAMILIES, make_family
from phloem.tests.runtime.models.lora import make_adapter
from phloem.tests.runtime.models.tiny import make_tiny_gguf, make_tiny_model
from phloem.tests.runtime.parallel.staged import config, executor_of, staged_logits, steps, whole_logits
from phloem.tests.runtime.parallel.virtual import VirtualGroup, run_all

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")


@pytest.mark.parametrize(
    "family", ["gemma3", "gpt2", "gpt_neox", "olmo2", "deepseek_v2", "qwen3_moe", "smollm3", "granite"]
)
def test_three_stages_have_the_bits_of_the_whole_model(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PipelineStage, "num_micro_steps", lambda self, num_tokens: 1)
    path = make_family(tmp_path / family, FAMILIES[family])
    count = min(3, load_model(path, config(path)).config.num_layers)
    found, _ = staged_logits(path, Mesh(pipeline=count), config(path))
    assert torch.equal(found, whole_logits(path, config(path)))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("mesh", [Mesh(pipeline=2), Mesh(pipeline=4), Mesh(tensor=2, pipeline=2)], ids=str)
def test_micro_steps_compute_the_logits_of_whole_steps(family: str, mesh: Mesh, tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / family, seed=1, family=family, num_layers=4, tied=family == "qwen3")
    found, read = staged_logits(path, mesh, config(path))
    assert (found - whole_logits(path, config(path))).abs().max() <= 1e-4
    sizes = {name: 4 * rows for name, rows in {"table": 259 * 64, "layer": 2 * 64 * 64 + 2 * 64 * 32}.items()}
    layer = sizes["layer"] + 4 * (3 * 64 * 128 + 2 * 64) + (2 * 16 * 4 if family == "qwen3" else 0)
    copied = 4 * 2 * 64 + (2 * 16 * 4 if family == "qwen3" else 0)  # norms, which both tensor ranks of a stage have
    whole = 2 * sizes["table"] + 4 * layer + 4 * 64  # a tied table is read by the first stage and by the last
    assert sum(read) == whole + (mesh.tensor - 1) * (4 * copied + 4 * 64)


def test_packed_weights_and_bfloat16_keep_their_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PipelineStage, "num_micro_steps", lambda self, num_tokens: 1)
    path = make_tiny_gguf(tmp_path / "q.gguf", seed=5, kinds={"weight": "Q4_1", "token_embd": "Q8_0"}, hidden_size=128)
    for precision, kv_dtype in (("int16", "auto"), ("bfloat16", "auto"), ("int16", "int8")):
        options = config(path, precision=precision, kv_dtype=kv_dtype)
        assert torch.equal(staged_logits(path, Mesh(pipeline=2), options)[0], whole_logits(path, options)), options


def test_adapters_lie_on_the_stages_of_their_layers(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "model", seed=2)
    adapter = make_adapter(tmp_path / "adapter", path, seed=3, rank=4, targets=("q_proj", "o_proj", "down_proj"))
    options = config(path, adapters={"poet": str(adapter)})
    expected = whole_logits(path, options, adapter=0)
    for mesh in (Mesh(pipeline=2), Mesh(tensor=2, pipeline=2)):
        found, _ = staged_logits(path, mesh, options, adapter=0)
        assert (found - expected).abs().max() <= 1e-4
    assert (expected - whole_logits(path, options)).abs().max() > 1.0


def test_the_next_micro_step_is_sent_before_the_first_is_answered(tmp_path: Path) -> None:
    """Virtual ranks take turns: stage 0 has run all its micro-steps when stage 1 begins with the first."""
    path = make_tiny_model(tmp_path / "model", seed=2)
    waiting: list[int] = []

    def body(group: VirtualGroup) -> None:
        model = load_model(path, config(path), split=RankSplit(group, Mesh(pipeline=2)))
        assert model.stage is not None and model.stage.num_micro_steps(1) == 1
        if group.rank:
            group.wait_until(lambda: group.num_waiting(0) == model.stage.num_micro_steps(31))
            waiting.append(group.num_waiting(0))
        executor_of(model).forward(steps()[0])

    run_all(2, body)
    assert waiting == [2]


@pytest.mark.parametrize(("num_stages", "num_tokens", "expected"), [(2, 1, 1), (2, 32, 2), (2, 512, 8), (4, 512, 14)])
def test_micro_steps_are_as_many_as_take_the_least_turns(num_stages: int, num_tokens: int, expected: int) -> None:
    group, cpu = run_all(1, lambda group: group)[0], torch.device("cpu")
    stage = PipelineStage(group, num_stages=num_stages, before=None, after=0, width=1, device=cpu)
    assert stage.num_micro_steps(num_tokens) == expected

    def time_of(count: int) -> float:
        return (count + num_stages - 1) * (8 + num_tokens / count)

    best = min(map(time_of, range(1, num_tokens + 1)))
    assert time_of(expected) <= 1.01 * best


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline_parallel": 0}, "pipeline_parallel=0: it must be 1 to 64"),
        (
            {"tensor_parallel": 16, "pipeline_parallel": 8},
            "tensor_parallel=16 and pipeline_parallel=8: 16 x 8 is 128 ranks, but at most 64 can work together",
        ),
    ],
)
def test_a_mesh_that_no_machine_has_is_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(InvalidParams, match=message):
        Mesh.of(EngineConfig(model="m", **options))


@pytest.mark.parametrize(
    ("num_layers", "vocab_size", "stages", "expected"),
    [
        (5, 259, 2, [3, 2]),
        (8, 259, 4, [2, 2, 2, 2]),
        (9, 259, 4, [2, 3, 2, 2]),  # 259 tokens take as much as 0.45 layers
        (8, 1200, 4, [1, 3, 3, 1]),  # 2.1 layers
        (8, 1200, 2, [4, 4]),
        (4, 99_000, 4, [1, 1, 1, 1]),
        (8, 99_000, 1, [8]),
    ],
)
def test_an_embedding_or_head_that_is_large_takes_the_place_of_layers(
    num_layers: int, vocab_size: int, stages: int, expected: list[int], tmp_path: Path
) -> None:
    config = open_weights(make_tiny_model(tmp_path / "model", seed=1)).config
    found = stages_of(msgspec.structs.replace(config, num_layers=num_layers, vocab_size=vocab_size), stages)
    assert [len(run) for run in found] == expected
    assert [layer for run in found for layer in run] == list(range(num_layers))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_s_weights_are_counted_from_the_config(family: str, tmp_path: Path) -> None:
    """Without biases and norms, which are small in models that are not tiny."""
    path = make_family(tmp_path / family, FAMILIES[family])
    file = open_weights(path)
    sizes = [
        file.tensor(name).numel()
        for name in file.names()
        if re.search(r"\.\d+\.", name) and len(file.tensor(name).shape) > 1
    ]
    assert mean_layer_weights(file.config) == pytest.approx(sum(sizes) / file.config.num_layers, rel=0.05)


def test_more_stages_than_layers_are_refused(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "model", seed=2)
    with pytest.raises(InvalidParams, match="pipeline_parallel=3: the model has 2 layers; at most 2 ranks can each"):
        staged_logits(path, Mesh(pipeline=3), config(path))
