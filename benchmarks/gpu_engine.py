"""The engine on published shapes with random weights, for ``benchmarks.gpu``.

Each workload runs three times on one engine, with different prompts. The first two capture graphs and compile kernels;
the third is timed. The roofline is the time to read each step's weights and every token's context from memory and to
compute the prompts, at the machine's measured rates.
"""

from __future__ import annotations

import gc
import random
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import torch
from phloem.benchmarks.roofline import DeviceSpec
from phloem.protocol.messages import Failed, Rejected, Submit
from phloem.protocol.ops import Close, Gen, Special
from phloem.protocol.sampling import SamplingParams
from phloem.runtime.config import EngineConfig
from phloem.runtime.engine import EngineCore
from phloem.runtime.memory import slot_size_bytes

from .shapes import write_shape

if TYPE_CHECKING:
    from phloem.runtime.weights.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that arrive at once. Their lengths are drawn with seed 0, each between two bounds."""

    shape: str
    num_requests: int
    prompt: tuple[int, int]
    output: tuple[int, int]
    compares: bool = False  # also run without overlap


WORKLOADS = (
    Workload("Qwen3-0.6B", 256, (100, 1024), (100, 1024), compares=True),  # nano-vllm's and mini-sglang's benchmark
    Workload("Llama-3-8B", 1, (100, 100), (256, 256)),
    Workload("Qwen3-30B-A3B", 64, (100, 1024), (128, 128)),
)
TOYS = (
    Workload("Qwen3-0.6B", 2, (4, 12), (2, 4), compares=True),
    Workload("Llama-3-8B", 1, (5, 5), (3, 3)),
    Workload("Qwen3-30B-A3B", 2, (4, 9), (3, 3)),
)


@dataclass(frozen=True, slots=True)
class Result:
    """``step_ms``: median time of a step. ``host_ms``: the median of a step's part that did not wait for the device."""

    case: str
    num_tokens: int
    steps: int
    graphs: int
    seconds: float
    step_ms: float
    host_ms: float
    least_s: float
    least_step_ms: float


def serve(workload: Workload, spec: DeviceSpec, *, is_smoke: bool) -> list[Result]:
    first, lengths = requests(workload)
    with tempfile.TemporaryDirectory() as folder:
        path = write_shape(workload.shape, Path(folder) / "shape", is_toy=is_smoke)
        engine = _engine(path, workload, is_smoke=is_smoke)
    results = []
    gc.collect()
    gc.freeze()  # as the engine process does
    try:
        warm_ups = 0 if is_smoke else 2
        for round_, overlaps in enumerate((*[True] * (warm_ups + 1), *[False] * workload.compares)):
            engine.loop.overlaps = overlaps
            most = min(10_001, engine.vocab_size)
            prompts = [[(token + round_) % most for token in prompt] for prompt in first]  # start with an empty cache
            found = _run(engine, workload, prompts, lengths, spec)
            if round_ >= warm_ups:
                results.append(found)
    finally:
        engine.close()
        gc.unfreeze()
    return results


def requests(workload: Workload) -> tuple[list[list[int]], list[int]]:
    """Prompts and numbers of tokens to generate. With 256 requests they equal those of nano-vllm's benchmark."""
    rng = random.Random(0)
    prompts = [
        [rng.randint(0, 10_000) for _ in range(rng.randint(*workload.prompt))] for _ in range(workload.num_requests)
    ]
    return prompts, [rng.randint(*workload.output) for _ in range(workload.num_requests)]


def least_seconds(config: ModelConfig, prompts: list[list[int]], lengths: list[int], spec: DeviceSpec) -> float:
    """The roofline in bfloat16: read each token's context and each step's weights, and compute the prompts."""
    contexts = sum(len(p) * n + n * (n - 1) // 2 for p, n in zip(prompts, lengths, strict=True))
    # A step decodes the rows that have not ended by then.
    running = [sum(length > step for length in lengths) for step in range(max(lengths))]
    weights = sum(weight_count(config, rows) for rows in running) * 2
    products = 2 * weight_count(config, 1) * sum(map(len, prompts))
    slot = slot_size_bytes(config, torch.bfloat16)
    return (contexts * slot + weights) / spec.copy + products / spec.flops


def _engine(path: Path, workload: Workload, *, is_smoke: bool) -> EngineCore:
    config = EngineConfig(
        model=str(path),
        weights="random",
        device="cpu" if is_smoke else "cuda",
        precision="float32" if is_smoke else "bfloat16",
        max_running=workload.num_requests,
        max_seq_len=64 if is_smoke else 4096,
        max_step_tokens=16 if is_smoke else 8192,
        prefill_chunk=8 if is_smoke else 4096,
        max_waiting=workload.num_requests + 1,
        speculative="off",
    )
    if not is_smoke:
        return EngineCore(config)
    from phloem.tests.runtime.executor.stand_in import StandIn

    return EngineCore(config, accelerator=StandIn())


def _run(
    engine: EngineCore, workload: Workload, prompts: list[list[int]], lengths: list[int], spec: DeviceSpec
) -> Result:
    inbox = []
    for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        params = SamplingParams(max_tokens=length, temperature=0.6, ignore_eos=True, seed=i)
        ops = [Special(op=0, seq=0, ids=tuple(prompt)), Gen(op=1, seq=0, params=params), Close(op=2, seq=0)]
        inbox.append((b"bench", Submit(program=str(i), ops=ops)))
    counters = engine.loop.counters
    steps = counters.steps
    times, waits = [time.perf_counter()], [counters.wait_s]
    outbox = engine.step(inbox)
    times.append(time.perf_counter())
    waits.append(counters.wait_s)
    while engine.has_work:
        outbox += engine.step([])
        times.append(time.perf_counter())
        waits.append(counters.wait_s)
    failures = [message for _, message in outbox if isinstance(message, Failed | Rejected)]
    if failures:
        raise SystemExit(f"engine, {workload.shape}: {failures[0]}")
    seconds, steps = times[-1] - times[0], counters.steps - steps
    step_s, wait_s = ([after - before for before, after in pairwise(each)] for each in (times, waits))
    config, num_tokens = engine.model.config, sum(lengths)
    slot = slot_size_bytes(config, torch.bfloat16)
    last = max(map(len, prompts)) + max(lengths) // 2
    graphs = engine.executor.graphs
    return Result(
        case=f"{workload.shape}, {len(prompts)} requests, {num_tokens:,} tokens out"
        + ("" if engine.loop.overlaps else ", no overlap"),
        num_tokens=num_tokens,
        steps=steps,
        graphs=graphs.num_graphs if graphs is not None else 0,
        seconds=seconds,
        step_ms=1e3 * median(step_s),
        host_ms=1e3 * median(step - wait for step, wait in zip(step_s, wait_s, strict=True)),
        least_s=least_seconds(config, prompts, lengths, spec),
        least_step_ms=1e3 * (2 * weight_count(config, 1) + last * slot) / spec.copy,
    )


def weight_count(config: ModelConfig, rows: int) -> float:
    """The weights that a step of ``rows`` tokens reads, with the expected number of experts that the tokens select."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_len, kv_len = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    blocks: float = 3 * hidden * inner
    if config.num_experts:
        taken = config.num_experts * (1 - (1 - config.experts_per_token / config.num_experts) ** rows)
        blocks = 3 * hidden * config.expert_size * taken + hidden * config.num_experts
    layer = hidden * (q_len + 2 * kv_len) + q_len * hidden + blocks
    return config.num_layers * layer + config.vocab_size * hidden
