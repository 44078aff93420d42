"""The engine on interpreted Triton kernels gives the tokens of the CPU path, with forks and grammars."""

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from phloem.kernels import QuantizedWeight
from phloem.kernels.backend import REFERENCE, triton_backend, using
from phloem.protocol.ops import AnyOp, Close, Fork, Gen, GrammarSpec, Select, Text
from phloem.protocol.sampling import SamplingParams
from phloem.runtime.config import EngineConfig
from phloem.runtime.engine import EngineCore
from phloem.runtime.models import load_model
from phloem.tests.gpu import choose_kernels
from phloem.tests.runtime.engine.driver import Driver
from phloem.tests.runtime.executor.stand_in import HostReads, StandIn, traced
from phloem.tests.runtime.models.stepping import Stepper
from phloem.tests.runtime.models.tiny import make_tiny_gguf, make_tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
choose_kernels()


def program() -> list[AnyOp]:
    greedy = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    drawn = SamplingParams(max_tokens=3, temperature=0.8, top_p=0.9, frequency_penalty=0.4, seed=3, ignore_eos=True)
    digits = GrammarSpec("regex", "[0-9]{3}")
    return [
        Text(op=0, seq=0, text="The same tokens, whoever computes them: "),
        Fork(op=1, seq=0, children=(1, 2)),
        Gen(op=2, seq=0, params=greedy),
        Gen(op=3, seq=1, params=drawn),
        Text(op=4, seq=2, text="a number "),
        Gen(op=5, seq=2, params=greedy, grammar=digits),
        Select(op=6, seq=0, choices=("yes", "no", "perhaps")),
        *(Close(op=7 + seq, seq=seq) for seq in range(3)),
    ]


def family() -> list[AnyOp]:
    greedy = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    ops: list[AnyOp] = [
        Text(op=0, seq=0, text="What all of them have in common, 40 tokens"),
        Fork(op=1, seq=0, children=(1,)),
        Text(op=7, seq=0, text=" and what the elder's children have alone"),
        Text(op=8, seq=1, text=" and what the younger's have, another text"),
        Fork(op=9, seq=0, children=(2,)),
        Fork(op=10, seq=1, children=(3,)),
    ]
    for seq in range(4):
        ops += [Text(op=11 + seq, seq=seq, text=f" {seq}:"), Gen(op=(2, 3, 5, 6)[seq], seq=seq, params=greedy)]
    return [*ops, *(Close(op=20 + seq, seq=seq) for seq in range(4))]


def values(
    path: Path, accelerator: StandIn | None = None, *, ops: list[AnyOp] | None = None, max_seq_len: int = 128
) -> list[object]:
    engine = EngineCore(
        EngineConfig(
            model=str(path),
            precision="float32",
            prefill_chunk=64 if ops else 16,
            num_slots=512,
            max_seq_len=max_seq_len,
        ),
        accelerator=accelerator,
    )
    outcome = Driver(engine).run(program() if ops is None else ops)
    return [outcome.value(op) for op in (2, 3, 5, 6)]


@pytest.fixture(scope="module")
def small_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer with few heads, as the interpreter runs a kernel's programs one by one; the forks have two layers."""
    return make_tiny_model(tmp_path_factory.mktemp("small"), seed=0, num_layers=1, num_heads=2, num_kv_heads=1)


def test_a_program_on_triton_kernels_gives_the_cpu_s_answers(small_path: Path) -> None:
    expected = values(small_path)
    backend = triton_backend()
    kernel = importlib.import_module("phloem.kernels.triton.norm").rms_norm_kernel
    assert type(kernel).__name__ == "InterpretedFunction"
    calls = 0
    inner = backend.paged_attention

    def counted(*args: object, **options: object) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return inner(*args, **options)

    with using(replace(backend, paged_attention=counted)):
        assert values(small_path) == expected
    assert calls >= 4


def test_the_gpu_s_loop_with_graphs_and_triton_kernels_gives_the_cpu_s_answers(small_path: Path) -> None:
    """The whole CUDA path except CUDA: overlap, graphs and Triton kernels. No kernel's caller waits."""
    expected = values(small_path)
    device = StandIn()
    with using(traced(triton_backend())), HostReads(device) as reads:
        assert values(small_path, device) == expected
    assert reads.found == []
    assert device.graphs and all(graph.num_replays for graph in device.graphs)


def test_forks_read_their_prefix_once_and_draw_the_same_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tree of two levels: two parents with one system prompt, and two children each."""
    path = make_tiny_model(tmp_path, seed=0, num_heads=2, num_kv_heads=1, max_positions=96)
    expected = values(path, ops=family(), max_seq_len=96)
    config = importlib.import_module("phloem.kernels.triton.config")
    table = config.CONFIGS[80]
    monkeypatch.setitem(config.CONFIGS, 80, replace(table.with_splits(32, block_n=32), shared_least_bytes=0))
    device, backend = StandIn(), triton_backend()
    depths: set[int] = set()
    inner = backend.shared_prefix_attention

    def noted(*args: Any, **options: Any) -> torch.Tensor:
        depths.update(options["shared"].own_from.tolist())
        return inner(*args, **options)

    with using(traced(replace(backend, shared_prefix_attention=noted))), HostReads(device) as reads:
        assert values(path, device, ops=family(), max_seq_len=96) == expected
    assert reads.found == []
    assert depths >= {1, 2}  # some share only the system prompt, others their parent's text too
    assert any(graph.num_replays for graph in device.graphs)


@pytest.mark.parametrize("options", [{"kv_dtype": "fp8"}, {"precision": "fp8"}])
def test_8_bit_keys_and_values_and_8_bit_weights_stay_near_the_exact_ones(
    options: dict[str, str], tmp_path: Path
) -> None:
    path = make_tiny_model(tmp_path, seed=0, family="qwen3")
    prompt, found = np.arange(30, 40, dtype=np.int32), []
    for backend, chosen in ((REFERENCE, {}), (triton_backend(), options)):
        with using(backend):
            stepper = Stepper(load_model(path, EngineConfig(**{"model": "tiny", "precision": "float32", **chosen})))
            found.append(torch.cat((stepper.prefill(0, prompt), stepper.step([(0, prompt[:1], 1)]))))
            if "kv_dtype" in chosen:
                assert stepper.kv.k[0].dtype == torch.float8_e4m3fn and stepper.kv.k[0].float().any()
    assert 1e-4 < float((found[1] - found[0]).norm() / found[0].norm()) < 0.25


def test_a_mixture_s_experts_are_packed_as_8_bit_floats_and_stay_near_the_exact_ones(tmp_path: Path) -> None:
    experts = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    sparse = {"decoder_sparse_step": 1, "mlp_only_layers": []}
    path = make_tiny_model(tmp_path, seed=0, family="qwen3_moe", **experts, **sparse)
    prompt, found = np.arange(30, 40, dtype=np.int32), []
    for backend, precision in ((REFERENCE, "float32"), (triton_backend(), "fp8")):
        with using(backend):
            model = load_model(path, EngineConfig(model="tiny", precision=precision))
            found.append(Stepper(model).prefill(0, prompt))
    assert isinstance(model.layers[0].mlp.gate_up, QuantizedWeight)
    assert 1e-4 < float((found[1] - found[0]).norm() / found[0].norm()) < 0.25


def test_a_file_of_packed_weights_runs_them_packed(tmp_path: Path) -> None:
    path = make_tiny_gguf(tmp_path / "tiny.gguf", seed=1, kinds={"": "Q4_1", "v_proj": "Q8_0"})
    prompt, found = np.arange(30, 40, dtype=np.int32), []
    for backend, precision in ((REFERENCE, "float32"), (triton_backend(), "auto")):
        with using(backend):
            model = load_model(path, EngineConfig(model="tiny", precision=precision))
            found.append(Stepper(model).prefill(0, prompt))
    kinds = {part.describe() for part in model.layers[0].attention.qkv.parts}
    assert kinds == {"int4 packed", "int8 packed"}
    assert float((found[1] - found[0]).norm() / found[0].norm()) < 0.1  # activations are bfloat16
