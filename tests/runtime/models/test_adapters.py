"""Rows of one batch with different adapters give the tokens of models with merged weights; bad adapters are named."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from phloem.kernels.backend import CPU, triton_backend, using
from phloem.protocol.errors import PhloemError, UnknownModel, Unsupported
from phloem.protocol.messages import ProgramSettings
from phloem.protocol.ops import AnyOp, Close, Fork, Gen, Text
from phloem.protocol.sampling import SamplingParams
from phloem.runtime.config import EngineConfig
from phloem.runtime.engine import EngineCore
from phloem.runtime.executor import Executor
from phloem.runtime.memory import KVPool
from phloem.runtime.models import Model, load_model
from phloem.runtime.scheduler.plan import PlanRow, StepPlan
from phloem.tests.gpu import choose_kernels
from phloem.tests.runtime.engine.driver import Driver, Outcome
from phloem.tests.runtime.executor.stand_in import StandIn, traced
from phloem.tests.runtime.models.lora import make_adapter, merge
from phloem.tests.runtime.models.tiny import make_tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
choose_kernels()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return made_folders(tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same with one layer, for Triton's interpreter: it takes half a second for each layer of a step."""
    return made_folders(tmp_path_factory.mktemp("one layer"), num_layers=1, num_heads=2, num_kv_heads=1)


def made_folders(at: Path, **size: int) -> dict[str, Path]:
    base = make_tiny_model(at / "base", seed=0, **size)
    found = {"base": base}
    for name, options in {
        "poet": {"rank": 4},
        "judge": {"rank": 2, "targets": ("q_proj", "v_proj", "down_proj"), "use_rslora": True},
    }.items():
        found[name] = make_adapter(at / name, base, seed=len(name), **options)
        found[f"merged {name}"] = merge(at / f"merged-{name}", base, found[name])
    return found


def config(folders: dict[str, Path], model: str = "base", **options: object) -> EngineConfig:
    adapters = {} if model != "base" else {name: str(folders[name]) for name in ("poet", "judge")}
    sizes = {"precision": "float32", "num_slots": 512, "max_seq_len": 128}
    return EngineConfig(**{"model": str(folders[model]), "adapters": adapters, **sizes, **options})


def logits(model: Model, adapters: list[int], *, device: StandIn | None = None) -> torch.Tensor:
    """After a prompt of each row, its last token with logits, and then one token more of each."""
    kv = KVPool.for_model(model.config, num_slots=65, dtype=model.kv_dtype)
    executor = Executor(model, kv, max_rows=8, max_len=16, accelerator=device)
    found, end = [], 0
    for count in (5, 1):
        rows = []
        for i, adapter in enumerate(adapters):
            ids = np.arange(end, end + count, dtype=np.int32) * 7 + 3
            slots = np.arange(8 * i, 8 * i + end + count, dtype=np.int32)
            rows.append(PlanRow(i, i, end, ids, slots, end, 1, adapter=adapter))
        found.append(executor.forward(StepPlan(0, tuple(rows))).whole().clone())
        end += count
    return torch.stack(found)


@pytest.mark.parametrize("backend", ["cpu", "triton"])
@pytest.mark.parametrize("has_device", [False, True])
def test_each_row_says_what_the_model_with_its_merged_weights_says(
    folders: dict[str, Path], one_layer: dict[str, Path], backend: str, has_device: bool
) -> None:
    folders = one_layer if backend == "triton" else folders
    expected, device = [], StandIn() if has_device else None
    for name in ("merged poet", "merged judge"):
        expected.append(logits(load_model(folders[name], config(folders, name)), [-1])[:, 0])
    with using(traced(triton_backend() if backend == "triton" else CPU)):
        model = load_model(folders["base"], config(folders))
        found = logits(model, [1, -1, 0, 1], device=device)
        plain = logits(model, [-1, -1, -1, -1], device=device)
    for row, want in ((0, expected[1]), (1, plain[:, 1]), (2, expected[0]), (3, expected[1])):
        torch.testing.assert_close(found[:, row], want, atol=2e-4, rtol=1e-3)
    assert float((expected[0] - plain[:, 0]).abs().max()) > 0.1


def run(engine: EngineCore, adapters: list[str]) -> list[list[object]]:
    """Programs of forks that decode side by side, more of them than are drawn one by one."""
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    driver, outcomes = Driver(engine), []
    for adapter in adapters:
        ops: list[AnyOp] = [Text(op=0, seq=0, text="The same text for all"), Fork(op=1, seq=0, children=(1, 2, 3))]
        ops += [Text(op=2 + i, seq=i, text=f" {i}:") for i in range(4)]
        ops += [Gen(op=10 + i, seq=i, params=params) for i in range(4)]
        ops += [Close(op=20 + i, seq=i) for i in range(4)]
        outcomes.append(driver.submit(ops, settings=ProgramSettings(adapter=adapter)))
    driver.run()
    return [[outcome.value(10 + i) for i in range(4)] for outcome in outcomes]


def test_programs_choose_their_adapter_and_share_no_cache_beyond_it(folders: dict[str, Path]) -> None:
    engine = EngineCore(config(folders))
    assert engine.welcome().adapters == ("poet", "judge")
    found = run(engine, ["poet", "", "judge", "poet"])
    plain = run(EngineCore(config(folders, adapters={})), [""])[0]
    assert found[1] == plain
    for at, name in ((0, "poet"), (2, "judge"), (3, "poet")):
        (expected,) = run(EngineCore(config(folders, f"merged {name}")), [""])
        assert found[at] == expected != plain


def test_an_unknown_adapter_is_refused_with_those_that_there_are(folders: dict[str, Path]) -> None:
    for engine, hint in (
        (EngineCore(config(folders)), "there are poet, judge"),
        (EngineCore(config(folders, adapters={})), "this engine has none"),
    ):
        outcome: Outcome = Driver(engine).run([Text(op=0, seq=0, text="a")], settings=ProgramSettings(adapter="cook"))
        assert outcome.rejected is not None
        (error,) = outcome.rejected.errors
        assert error.kind == "UnknownModel" and f"adapter 'cook' is unknown; {hint}" in error.message


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"use_dora": True}, Unsupported, "use_dora=True"),
        ({"bias": "all"}, Unsupported, "bias='all'"),
        ({"r": None}, UnknownModel, "r=None"),
    ],
)
def test_a_config_that_asks_for_more_is_refused(
    folders: dict[str, Path], tmp_path: Path, change: dict[str, object], error: type[PhloemError], message: str
) -> None:
    path = make_adapter(tmp_path / "other", folders["base"], seed=1, rank=2)
    told = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps(told | change))
    with pytest.raises(error, match=message):
        load_model(folders["base"], config(folders, adapters={"other": str(path)}))


def test_what_does_not_fit_the_model_is_refused_at_start(folders: dict[str, Path], tmp_path: Path) -> None:
    wide = make_tiny_model(tmp_path / "wide", seed=0, hidden_size=96)
    deep = make_tiny_model(tmp_path / "deep", seed=0, num_layers=3)
    cases = {
        "q_proj of layer 0 is 64 x 96, but the model's is 64 x 64": make_adapter(tmp_path / "a", wide, seed=0, rank=2),
        "has layer 2, but the model's last is 1": make_adapter(tmp_path / "b", deep, seed=0, rank=2),
        "lm_head.lora_A.weight changes what is not adapted here": make_adapter(
            tmp_path / "c", deep, seed=0, rank=2, targets=("lm_head",)
        ),
        "adapter_config.json cannot be read": tmp_path / "nowhere",
    }
    for message, path in cases.items():
        with pytest.raises(PhloemError, match=message):
            load_model(folders["base"], config(folders, adapters={"other": str(path)}))
