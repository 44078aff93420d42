"""The engine on a GPU gives the CPU's answers. Twins without a GPU: ``test_triton.py`` and ``test_families.py``."""

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from phloem.protocol.ops import AnyOp, Close, Fork, Gen, GrammarSpec, Select, Text
from phloem.protocol.sampling import SamplingParams
from phloem.runtime.config import EngineConfig
from phloem.runtime.engine import EngineCore
from phloem.runtime.models import load_model
from phloem.tests.runtime.engine.driver import Driver
from phloem.tests.runtime.models.families import FAMILIES, make_family
from phloem.tests.runtime.models.stepping import Stepper
from phloem.tests.runtime.models.tiny import make_tiny_gguf, make_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]
IDS = np.random.default_rng(0).integers(0, 259, 75).astype(np.int32)
TINY_IDS = np.arange(30, 80, dtype=np.int32)  # the smallest vocabulary has 96 tokens


def program() -> list[AnyOp]:
    greedy = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    drawn = SamplingParams(max_tokens=20, temperature=0.8, top_p=0.9, frequency_penalty=0.4, seed=3, ignore_eos=True)
    return [
        Text(op=0, seq=0, text="The same tokens, whoever computes them: "),
        Fork(op=1, seq=0, children=(1, 2)),
        Gen(op=2, seq=0, params=greedy),
        Gen(op=3, seq=1, params=drawn),
        Text(op=4, seq=2, text="a number "),
        Gen(op=5, seq=2, params=greedy, grammar=GrammarSpec("regex", "[0-9]{15}")),
        Select(op=6, seq=0, choices=("yes", "no", "perhaps")),
        *(Close(op=7 + seq, seq=seq) for seq in range(3)),
    ]


def values(path: Path, device: str, *, num_programs: int = 1, **options: Any) -> list[list[object]]:
    sizes = {"precision": "float32", "prefill_chunk": 16, "num_slots": 4096, "max_seq_len": 256}
    engine = EngineCore(EngineConfig(model=str(path), device=device, **(sizes | options)))
    try:
        driver = Driver(engine)
        outcomes = [driver.submit(program()) for _ in range(num_programs)]
        driver.run()
        return [[outcome.value(op) for op in (2, 3, 5, 6)] for outcome in outcomes]
    finally:
        engine.close()


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("options", [{}, {"cuda_graphs": "off"}, {"overlap": "off"}], ids=str)
def test_programs_give_the_cpu_s_answers(family: str, options: dict[str, str], tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path, seed=0, family=family)
    assert values(path, "cuda", num_programs=12, **options) == values(path, "cpu", num_programs=12)


def test_forks_that_read_their_prefix_once_give_the_cpu_s_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_tiny_model(tmp_path, seed=0)
    expected = values(path, "cpu", num_programs=6)
    config = importlib.import_module("phloem.kernels.triton.config")
    for arch, table in list(config.CONFIGS.items()):
        monkeypatch.setitem(config.CONFIGS, arch, replace(table.with_splits(32, block_n=32), shared_least_bytes=0))
    assert values(path, "cuda", num_programs=6) == expected


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_s_logits_are_the_cpu_s(name: str, tmp_path: Path) -> None:
    folder, found = make_family(tmp_path / name, FAMILIES[name]), []
    for device in ("cpu", "cuda"):
        stepper = Stepper(load_model(folder, EngineConfig(model="tiny", precision="float32", device=device)))
        steps = [stepper.step([(0, IDS[:40], 40), (1, IDS[:9], 9)])]
        steps += [stepper.step([(0, IDS[at : at + 1], 1), (1, IDS[at - 31 : at - 30], 1)]) for at in range(40, 44)]
        found.append(torch.cat([step.cpu() for step in steps]))
    assert (found[1] - found[0]).abs().max() <= 1e-4 * found[0].abs().max()


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_packed_weights_of_a_file_give_nearly_the_cpu_s_logits(kind: str, tmp_path: Path) -> None:
    path, found = make_tiny_gguf(tmp_path / "tiny.gguf", seed=1, kinds={"": kind}), []
    for device, precision in (("cpu", "float32"), ("cuda", "auto")):
        stepper = Stepper(load_model(path, EngineConfig(model="tiny", precision=precision, device=device)))
        found.append(
            torch.cat([stepper.step([(0, TINY_IDS[:40], 40)]).cpu(), stepper.step([(0, TINY_IDS[40:41], 1)]).cpu()])
        )
    assert float((found[1] - found[0]).norm() / found[0].norm()) < 0.1  # activations are bfloat16


@pytest.mark.parametrize("options", [{"kv_dtype": "fp8"}, {"precision": "fp8"}], ids=str)
def test_8_bit_floats_stay_near_the_exact_ones(options: dict[str, str], tmp_path: Path) -> None:
    path, found = make_tiny_model(tmp_path, seed=0, family="qwen3"), []
    for chosen in ({"device": "cpu"}, {"device": "cuda", **options}):
        model = load_model(path, EngineConfig(**{"model": "tiny", "precision": "float32", **chosen}))
        stepper = Stepper(model)
        found.append(torch.cat((stepper.prefill(0, TINY_IDS[:10]), stepper.step([(0, TINY_IDS[:1], 1)]))).cpu())
    assert 1e-4 < float((found[1] - found[0]).norm() / found[0].norm()) < 0.25
