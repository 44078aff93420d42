"""Ranks that each have a GPU, as far as none is needed: stand-ins for GPUs, interpreted kernels, captured collectives.

The tests marked ``gpu`` run over NCCL, on one GPU or on as many as there are.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import phloem
import pytest
import torch
from phloem.kernels.backend import CPU, triton_backend, using
from phloem.protocol.errors import LimitExceeded
from phloem.protocol.ops import AnyOp, Close, Fork, Gen, GrammarSpec, Select, Text
from phloem.protocol.sampling import SamplingParams
from phloem.runtime.config import EngineConfig
from phloem.runtime.engine import EngineCore
from phloem.runtime.executor.accelerator import CudaAccelerator
from phloem.runtime.executor.executor import prefix_finder
from phloem.runtime.memory import KVPool, slot_size_bytes
from phloem.runtime.models import load_model
from phloem.runtime.parallel.group import added, links_of
from phloem.runtime.parallel.links import NcclLink
from phloem.runtime.parallel.mesh import Mesh
from phloem.runtime.parallel.split import RankSplit
from phloem.tests.gpu import choose_kernels
from phloem.tests.runtime.engine.driver import Driver
from phloem.tests.runtime.executor.stand_in import HostReads, StandIn, traced
from phloem.tests.runtime.models.tiny import make_tiny_model
from phloem.tests.runtime.parallel.process_groups import Loopback
from phloem.tests.runtime.parallel.staged import staged_logits, whole_logits
from phloem.tests.runtime.parallel.virtual import VirtualGang, run_all

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
choose_kernels()

MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
# Where tensors lie in host memory on a machine with GPUs too: orders, and a step's integers before they are copied.
HOST_MEMORY = {f"runtime/{name}.py" for name in ("parallel/order_line", "layers/batch", "layers/spread")}
SIZES: dict[str, Any] = {"precision": "float32", "prefill_chunk": 32, "num_slots": 512, "max_seq_len": 128}


def program(prompt: str) -> list[AnyOp]:
    """Draws from a few tokens of each rank and from all logits, masks, a fork, and a selection."""
    greedy = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, return_logprob=True)
    listed = SamplingParams(max_tokens=2, temperature=0.9, top_k=20, seed=4, ignore_eos=True)
    penalised = SamplingParams(max_tokens=3, temperature=0.8, top_p=0.9, frequency_penalty=0.4, seed=3, ignore_eos=True)
    return [
        Text(op=0, seq=0, text=prompt),
        Fork(op=1, seq=0, children=(1, 2)),
        Gen(op=2, seq=0, params=greedy),
        Gen(op=3, seq=1, params=penalised),
        Text(op=4, seq=2, text="a "),
        Gen(op=5, seq=2, params=greedy, grammar=GrammarSpec("regex", "[0-9]{3}")),
        Gen(op=6, seq=2, params=listed),
        Select(op=7, seq=0, choices=("yes", "no")),
        *(Close(op=8 + seq, seq=seq) for seq in range(3)),
    ]


def answers(
    config: EngineConfig, devices: list[StandIn] | None = None, *, ops: list[AnyOp] | None = None
) -> tuple[list[object], list[float]]:
    """The values of the program's ops, and the log-probabilities of a greedy text."""
    ops = program("The same tokens, whoever makes them: ") if ops is None else ops
    gang = None if devices is None else VirtualGang(config, devices[1:])
    engine = EngineCore(config, accelerator=None if devices is None else devices[0], gang=gang)
    try:
        outcome = Driver(engine).run(ops)
        assert outcome.rejected is None and not outcome.failed
        logprobs = [one.logprob for one in outcome.done[2].meta.candidates[0].logprobs]
        return [outcome.value(op.op) for op in ops if isinstance(op, Gen | Select)], logprobs
    finally:
        engine.close()


def check_graphs(devices: list[StandIn]) -> None:
    """Every rank has captured the same graphs, with the sums in them."""
    for device in devices:
        assert device.graphs and all(graph.num_replays for graph in device.graphs)
    first, *others = [[[call[0] for call in graph.calls] for graph in device.graphs] for device in devices]
    assert all("sum" in calls for calls in first) and all(other == first for other in others)


@pytest.mark.parametrize(
    ("ranks", "split"),
    [
        (2, {"tensor_parallel": 2}),
        (4, {"tensor_parallel": 2, "pipeline_parallel": 2}),
        (2, {"sequence_parallel": 2}),
    ],
    ids=["tensors", "stages of tensors", "sequences"],
)
@pytest.mark.parametrize("overlap", ["auto", "off"])
def test_ranks_on_gpus_give_the_answers_of_one_on_a_cpu(
    ranks: int, split: dict[str, int], overlap: str, tiny_model_path: Path
) -> None:
    """All but CUDA, NCCL and the GPU's kernels: graphs with collectives in them, draws that go from rank to rank on the
    device, and a host that waits for nothing but one readback a step.
    """
    options = SIZES | {"model": str(tiny_model_path)}
    expected, logprobs = answers(EngineConfig(**options))
    devices = [StandIn() for _ in range(ranks)]
    backend = traced(replace(CPU, reads_packed=True))  # which is how GPUs are known
    with using(backend), HostReads(devices[0]) as reads:
        found, close = answers(EngineConfig(**options, **split, overlap=overlap), devices)
    assert found == expected and close == pytest.approx(logprobs, abs=1e-4)
    assert {place.file for place in reads.found} <= HOST_MEMORY
    if split == {"tensor_parallel": 2}:
        check_graphs(devices)
    else:
        assert not any(device.graphs for device in devices)


def test_experts_on_gpu_kernels_give_the_answers_of_one_rank_on_a_cpu(tmp_path: Path) -> None:
    """Triton kernels, interpreted. Which rank has the experts of a token is not known to the host."""
    path = make_tiny_model(tmp_path / "model", seed=1, family="qwen3_moe", max_positions=128, num_layers=1, **MOE)
    options = SIZES | {"model": str(path), "speculative": "off"}
    ops = [op for op in program("sap ") if op.op in (0, 1, 2, 3, 8, 9)]
    expected, logprobs = answers(EngineConfig(**options), ops=ops)
    devices = [StandIn(), StandIn()]
    with using(traced(triton_backend())), HostReads(devices[0]) as reads:
        split = {"tensor_parallel": 2, "expert_parallel": 2}
        found, close = answers(EngineConfig(**options, **split), devices, ops=ops)
    assert found == expected and close == pytest.approx(logprobs, abs=1e-4)
    assert {place.file for place in reads.found} <= HOST_MEMORY
    check_graphs(devices)


def test_every_rank_measures_its_memory_and_the_one_with_least_decides(tiny_model_path: Path) -> None:
    options = SIZES | {"model": str(tiny_model_path), "num_slots": 0, "gpu_memory_fraction": 0.5}
    mib = 1 << 20
    devices = [StandIn(memory=(free * mib, 100 * mib), peak_bytes=mib) for free in (90, 60)]
    found = []
    for split in ({"tensor_parallel": 2}, {"pipeline_parallel": 2}):
        config = EngineConfig(**options, **split)
        engine = EngineCore(config, accelerator=devices[0], gang=VirtualGang(config, devices[1:]))
        each = slot_size_bytes(engine.model.config, engine.kv.dtype, num_layers=len(engine.model.layers))
        found.append(engine.cache.num_slots)
        assert found[-1] == (50 - 40 - 2) * mib // each - 1
        engine.close()
    assert found[0] == found[1]  # half of the heads, half of the layers
    full = [StandIn(memory=(free * mib, 100 * mib), peak_bytes=mib) for free in (90, 40)]
    config = EngineConfig(**options, tensor_parallel=2)
    with pytest.raises(LimitExceeded, match=r"fraction 0\.5 of 104,857,600 bytes leaves 0") as of_rank_1:
        EngineCore(config, accelerator=full[0], gang=VirtualGang(config, full[1:]))
    assert "rank 1 has no memory left for keys and values; raise gpu" in str(of_rank_1.value.__context__)


def test_ranks_with_different_numbers_of_heads_share_no_prefixes(tmp_path: Path) -> None:
    """Whether a step has a graph with shared prefixes must be the same on all ranks."""
    uneven = make_tiny_model(tmp_path / "uneven", seed=1, num_heads=6, num_kv_heads=3, head_dim=16)
    even = make_tiny_model(tmp_path / "even", seed=1)
    for path, is_even in ((uneven, False), (even, True)):
        config = EngineConfig(model=str(path), precision="float32")
        models = run_all(2, lambda group, c=config: load_model(c.model, c, split=RankSplit(group, Mesh(tensor=2))))
        for model in models:
            kv = KVPool.for_model(model.config, num_slots=8, dtype=model.kv_dtype)
            with using(triton_backend()):
                finder = prefix_finder(model, kv, num_rows=4, max_len=64)
            assert model.is_even is is_even and (finder is not None) is is_even


def test_a_rank_that_sends_to_itself_gets_what_it_sent() -> None:
    link = NcclLink(Loopback())
    x, y = torch.arange(6.0), torch.empty(6)
    link.move([(x, 0)], [(y, 0)])()
    assert torch.equal(x, y)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")
def test_one_rank_sends_to_itself_over_nccl_eagerly_and_from_a_graph(tmp_path: Path) -> None:
    device = torch.device("cuda:0")
    store = torch.distributed.FileStore(str(tmp_path / "ranks"), 1)
    link = links_of(store, device, rank=0, size=1, timeout_s=60.0)["cuda"]
    x, y = torch.randn(64, 4096, device=device), torch.empty(64, 4096, device=device)

    def run() -> torch.Tensor:
        link.move([(x, 0)], [(y, 0)])()
        return added([x, y])

    assert torch.equal(run(), 2 * x)
    graph, total = CudaAccelerator(device).capture(run)
    x.normal_()
    graph.replay()
    assert torch.equal(total, 2 * x)
    del graph
    link.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")
@pytest.mark.parametrize("mesh", [Mesh(tensor=2), Mesh(2, 1, 2), Mesh(pipeline=2), Mesh(sequence=2)], ids=str)
def test_virtual_ranks_on_one_gpu_compute_the_logits_of_one_rank(mesh: Mesh, tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "model", seed=1, family="qwen3_moe", **MOE)
    options = EngineConfig(model=str(path), precision="float32", device="cuda")
    expected = whole_logits(path, options)
    found, _ = staged_logits(path, mesh, options)
    assert (found - expected).abs().max() <= 1e-2 * expected.abs().max()  # products in TF32


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="torch finds fewer than two CUDA devices")
@pytest.mark.parametrize("split", ["tensor_parallel", "pipeline_parallel", "sequence_parallel"])
def test_two_gpus_over_nccl_give_the_texts_of_one(split: str, tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "model", seed=1)
    options = {"model": str(path), "precision": "float32", "device": "cuda", "num_slots": 2048, "max_seq_len": 256}
    texts = []
    for config in (EngineConfig(**options), EngineConfig(**options, **{split: 2})):
        with phloem.Runtime(config) as runtime:
            drawn = [runtime.generate(f"{i} sap ", temperature=0.0, max_tokens=40) for i in range(8)]
            texts.append([one.text for one in drawn])
    assert texts[0] == texts[1]
