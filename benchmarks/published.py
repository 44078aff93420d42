"""Predictions of ``phloem plan`` beside published figures of other engines on several H100s and H200s.

``python -m benchmarks.published`` prints a Markdown table. Nothing is measured: the published figures are constants
here, with their sources, and the predictions follow from datasheets. The last column has the distance with products at
twice the 16-bit rate, where an engine multiplies 8-bit floats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from phloem.runtime.planning import (
    HARDWARE,
    KV_BYTES,
    SHAPES,
    DeviceSplit,
    Goal,
    Hardware,
    ModelShape,
    find_capacity,
    step_time,
)

TENSORRT = "TensorRT-LLM 1.0"
# https://github.com/NVIDIA/TensorRT-LLM/blob/main/docs/source/performance/perf-overview.md (v1.0), 8-bit floats:
# (prompt, answer) -> tokens a second, all requests queued at once.
LLAMA_TWO_H100 = {(128, 2048): 6651, (1000, 1000): 4205, (2048, 2048): 3082, (2048, 128): 762, (5000, 500): 898}
LARGE_LLAMA_EIGHT_H100 = {(128, 2048): 4340, (1000, 1000): 2919, (2048, 2048): 2296, (2048, 128): 453, (5000, 500): 610}
QWEN_EIGHT_H100 = {(128, 2048): 19_658, (1000, 1000): 14_898, (2048, 2048): 9924, (5000, 500): 3225}
# https://github.com/LambdaLabsML/vllm-benchmark/blob/main/benchmark_v0.md, vLLM 0.5.4, 8-bit floats, ShareGPT:
# devices -> (sequences at once, ms between tokens).
LAMBDA = {2: (85, 49.3), 8: (87, 33.7)}
# Mean tokens of ShareGPT's prompts and answers: https://github.com/vllm-project/vllm/issues/7567, of 1,000 requests.
SHAREGPT = Goal(215, 179)
# https://buildkite.com/vllm/performance-benchmark/builds/9515, 16 bit: 8 sequences of 32 and 128 tokens, no scheduling.
VLLM_BATCHES = {("llama-3.3-70b", 4): 2077.5, ("llama-3.1-8b", 1): 833.4}  # ms for all
# https://github.com/gpustack/gpustack/blob/main/docs/performance-lab/qwen3-235b-a22b/h100.md, 16 bit, 500 prompts.
GPUSTACK = (Goal(4000, 184), 931)
# https://docs.nvidia.com/nim/benchmarking/llm/1.0.0/performance: NIM 1.8.0, 8-bit floats, 2 H100, 5,000 and 500 tokens:
# sequences at once -> ms between tokens. The type of keys is not named; 16 bits are assumed.
NIM = {1: 18.58, 5: 21.83, 25: 38.75, 50: 59.73}
NIM_GOAL = Goal(5000, 500)


@dataclass(frozen=True, slots=True)
class Row:
    setup: str
    unit: str
    published: float
    predicted: float
    with_fast_products: float

    @property
    def distances(self) -> str:
        both = (self.predicted, self.with_fast_products)
        return " | ".join(f"{one / self.published - 1:+.0%}" for one in both)


def rows() -> list[Row]:
    return [_row(*case) for case in _cases()]


def _row(setup: str, unit: str, published: float, predict: Callable[[Hardware], float], device: str) -> Row:
    hardware = HARDWARE[device]
    fast = hardware if "16 bit" in setup else replace(hardware, product_rate=2 * hardware.product_rate)
    return Row(setup, unit, published, predict(hardware), predict(fast))


Case = tuple[str, str, float, Callable[[Hardware], float], str]


def _cases() -> Iterator[Case]:
    for (name, devices), all_ms in VLLM_BATCHES.items():
        shape = replace(SHAPES[name], weight_bits=16)
        step = partial(step_ms, shape, rows=8, context=32 + 64, devices=devices)
        yield f"{name}, 16 bit, {devices} H200, vLLM, 8 sequences of 32 + 128", "ms a token", all_ms / 128, step, "h200"
    for devices, (batch, published_ms) in LAMBDA.items():
        prefill, context = batch * SHAREGPT.isl / SHAREGPT.osl, SHAREGPT.isl + SHAREGPT.osl / 2
        shape = _eight_bits("llama-3.3-70b", "bfloat16")
        step = partial(step_ms, shape, rows=batch, context=context, devices=devices, prefill=prefill)
        setup = f"llama-3.1-70b, 8 bit, {devices} H100, vLLM 0.5.4, {batch} sequences"
        yield setup, "ms a token", published_ms, step, "h100"
    for batch, published_ms in NIM.items():
        isl, osl = NIM_GOAL.isl, NIM_GOAL.osl
        sizes = {"rows": batch, "context": isl + osl / 2, "prefill": batch * isl / osl, "seen": isl / 2}
        step = partial(step_ms, _eight_bits("llama-3.3-70b", "bfloat16"), devices=2, **sizes)
        setup = f"llama-3.3-70b, 8 bit, 2 H100, NIM 1.8.0, {batch} at once, {isl:,} + {osl}"
        yield setup, "ms a token", published_ms, step, "h100"
    goal, published = GPUSTACK
    whole = replace(SHAPES["qwen3-235b-a22b"], weight_bits=16)
    rate = partial(tokens_per_s, whole, goal=goal, split=DeviceSplit(8))
    setup = f"qwen3-235b-a22b, 16 bit, 8 H100, vLLM 0.11.0, {goal.isl:,} + {goal.osl}"
    yield setup, "tokens/s", published, rate, "h100"
    cases = (
        ("llama-3.3-70b", DeviceSplit(2), LLAMA_TWO_H100),
        ("llama-3.1-405b", DeviceSplit(8), LARGE_LLAMA_EIGHT_H100),
        ("qwen3-235b-a22b", DeviceSplit(8), QWEN_EIGHT_H100),
    )
    for name, split, table in cases:
        for (isl, osl), published in table.items():
            rate = partial(tokens_per_s, _eight_bits(name, "fp8"), goal=Goal(isl, osl, chunk=8192), split=split)
            setup = f"{name}, 8 bit, {split.tensor} H100, {TENSORRT}, {isl:,} + {osl:,}"
            yield setup, "tokens/s", published, rate, "h100"


def step_ms(
    shape: ModelShape,
    hardware: Hardware,
    *,
    rows: float,
    context: float,
    devices: int,
    prefill: float = 0.0,
    seen: float = SHAREGPT.isl / 2,
) -> float:
    step = step_time(
        shape,
        hardware,
        rows=rows,
        context=context,
        prefill=prefill,
        prefill_context=seen if prefill else 0.0,
        tensor_parallel=devices,
    )
    return 1e3 * step.total


def tokens_per_s(shape: ModelShape, hardware: Hardware, *, goal: Goal, split: DeviceSplit) -> float:
    return find_capacity(shape, hardware, goal, split=split).tokens_per_s


def _eight_bits(name: str, kv: str) -> ModelShape:
    return replace(SHAPES[name], weight_bits=8, kv_bytes=KV_BYTES[kv])


def table() -> str:
    lines = [
        "| set-up | unit | published | predicted | distance | and 8-bit products |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for row in rows():
        digits = 1 if row.unit.startswith("ms") else 0
        values = f"{row.published:,.{digits}f} | {row.predicted:,.{digits}f}"
        lines.append(f"| {row.setup} | {row.unit} | {values} | {row.distances} |")
    return "\n".join(lines)


def main() -> None:
    print(table())


if __name__ == "__main__":
    main()
