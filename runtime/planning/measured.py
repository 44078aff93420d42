"""This machine's CPU as ``Hardware``, measured with our own kernels in under a minute and kept in a file.

The file is reused while processor, number of threads, torch and the kernels' sources are the same.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ... import kernels, processor
from ...kernels.cpu.recording import Arena, Recording
from ...kernels.cpu.tape import Tape
from ...kernels.linear import GROUP_LEN, Group32, PackedLinear, Precision
from ...kernels.threads import team
from .hardware import CALL_INPUTS, Curve, Hardware
from .host import host_seconds

log = logging.getLogger(__name__)

VERSION = 5  # of the measurements; a new one makes old files unused
ROWS = (1, 2, 4, 8, 16, 32, 64, 256)
SMALL, LARGE = 512, 8192  # outputs of products, all of CALL_INPUTS inputs
TOTAL_BYTES = 192 << 20  # of weights, more than a cache holds
REPEATS = 7


def cpu_hardware(home: Path, *, threads: int = 0, again: bool = False) -> Hardware:
    """Read from the file in ``home``, or measure now and write it there. ``threads`` 0: one per core."""
    count = kernels.set_threads(threads)
    key = _digest_of_kernels(f"{VERSION} {processor.name()} {count} {torch.__version__}")
    path = home / f"cpu-{key}.json"
    if path.exists() and not again:
        data = json.loads(path.read_text())
        for name in ("curves", "product_calls"):
            data[name] = {int(bits): tuple(map(tuple, curve)) for bits, curve in data[name].items()}
        return Hardware(**data)
    log.warning("measuring this CPU's kernels once, for %s", path)
    hardware = measure_cpu(threads)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(hardware), indent=1) + "\n")
    return hardware


def measure_cpu(threads: int = 0) -> Hardware:
    """Measure every kind of kernel as steps run it. Other load on the machine distorts the figures."""
    host_step_s, host_row_s = host_seconds(threads)
    with torch.inference_mode():
        return _measure_kernels(threads, host_step_s, host_row_s)


def _measure_kernels(threads: int, host_step_s: float, host_row_s: float) -> Hardware:
    kernels.warm_up()
    count = kernels.set_kernel_threads(threads)
    torch.manual_seed(0)
    (four, four_call), (eight, eight_call) = (_curves("auto", bits=4), _curves("int16", bits=8))
    kernels.set_threads(threads)
    sixteen, sixteen_call = _curves("bfloat16", bits=16)
    kernels.set_kernel_threads(threads)
    one, many = (_attention_s(rows, 1, 4, 3, 64, new=1) for rows in (1, 16))
    attention_row_s = max(0.0, (many - one) / 15)
    attention_call_s = max(0.0, one - attention_row_s)
    key_rate, score_rate = _attention_rates(many)
    launch_s, element_rate = _line(_norm_s)
    _, gate_rate = _line(_gate_s)
    return Hardware(
        name="cpu",
        memory_bytes=float(processor.memory_bytes()),
        read_rate=0.625e9 / four[0][1],
        product_rate=2e9 * four[-1][0] / four[-1][1],
        launch_s=launch_s,
        host_step_s=host_step_s,
        host_row_s=host_row_s,
        about=f"{processor.name()}, {count} threads, measured",
        curves={4: four, 8: eight, 16: sixteen},
        product_calls={4: four_call, 8: eight_call, 16: sixteen_call},
        attention_call_s=attention_call_s,
        attention_row_s=attention_row_s,
        key_rate=key_rate,
        score_rate=score_rate,
        prefill_score_rate=_prefill_score_rate(),
        element_rate=element_rate,
        gate_rate=gate_rate,
        logit_rate=_logit_rate(),
    )


def _best(work: Callable[[], object]) -> float:
    """Seconds of ``work``'s kernels, from a tape where a step would use one. The minimum: noise only adds time."""
    with Recording(Arena()) as recording:
        work()
    run = work
    if recording.foreign is None and team().can_replay:
        tape = Tape(recording.calls, recording.arena)
        run = partial(tape.replay, team().pool)
    run()
    found = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return min(found)


def _curves(precision: Precision, *, bits: int) -> tuple[Curve, Curve]:
    """By rows: seconds for 1e9 weights, and seconds of a call beside its weights. Two sizes give two equations."""
    small, large = (_products(precision, outputs, bits=bits) for outputs in (SMALL, LARGE))
    rates, calls = [], []
    for rows, few_s, many_s in zip(ROWS, small, large, strict=True):
        weight_s = max(many_s - few_s, many_s / 2) / ((LARGE - SMALL) * CALL_INPUTS)
        rates.append((float(rows), weight_s * 1e9))
        calls.append((float(rows), max(0.0, few_s - weight_s * SMALL * CALL_INPUTS)))
    return tuple(rates), tuple(calls)


def _multiply(x: Tensor, products: list[PackedLinear]) -> list[Tensor]:
    return [product(x) for product in products]


def _products(precision: Precision, outputs: int, *, bits: int) -> list[float]:
    """Seconds of one product, for each of ``ROWS``."""
    inputs = CALL_INPUTS
    weight: Tensor | Group32 = torch.randn(outputs, inputs)
    if bits == 4:
        scale = torch.rand(outputs, inputs // GROUP_LEN) / 8
        weight = (torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8), scale, -8 * scale)
    count = TOTAL_BYTES * 8 // (outputs * inputs * bits)
    made = [PackedLinear(weight, precision=precision) for _ in range(count)]
    found = []
    for rows in ROWS:
        x = torch.randn(rows, inputs).bfloat16()
        # Long products find their weights out of the caches with fewer matrices.
        some = made if rows < 64 else made[: -(-count // 8)]
        seconds = _best(partial(_multiply, x, some))
        found.append(seconds / len(some))
    return found


def _attention_rates(rows_s: float) -> tuple[float, float]:
    """(numbers of K and V a second, multiply-adds a second). Two ratios of heads give two equations.

    ``rows_s``: seconds of as many rows without a context.
    """
    rows, context, kv_heads, head_dim = 16, 500, 4, 64
    times = {group: _attention_s(rows, context, kv_heads, group, head_dim, new=1) - rows_s for group in (2, 6)}
    numbers = 2 * rows * context * kv_heads * head_dim
    per_product = max(times[6] - times[2], times[6] * 0.05) / (4 * numbers)
    per_number = max(times[2] / numbers - 2 * per_product, times[2] / numbers * 0.05)
    return 1 / per_number, 1 / per_product


def _prefill_score_rate() -> float:
    new, context, kv_heads, group, head_dim = 256, 1024, 4, 3, 64
    seconds = _attention_s(1, context, kv_heads, group, head_dim, new=new)
    return 2 * new * (context - new / 2) * kv_heads * group * head_dim / seconds


def _attention_s(rows: int, context: int, kv_heads: int, group: int, head_dim: int, *, new: int) -> float:
    """Seconds of one layer. The KV of the layers is larger than the processor's caches."""
    layers, slots = 8, rows * context
    caches = torch.randn(2, slots, kv_heads, head_dim).bfloat16()
    pools = [caches.clone() for _ in range(layers)]
    q = torch.randn(rows * new, kv_heads * group, head_dim).bfloat16()
    table = torch.randperm(slots, dtype=torch.int32).view(rows, context)
    row_ids, starts = torch.arange(rows).int(), torch.arange(0, rows * new + 1, new).int()
    lens = torch.full((rows,), context).int()

    def run() -> None:
        for k, v in pools:
            kernels.paged_attention(q, k, v, table, row_ids, starts, lens, scale=0.125)

    return _best(run) / layers


def _line(seconds: Callable[[int], float]) -> tuple[float, float]:
    """(seconds of a call, numbers a second) of a kernel, from a small call and a large one."""
    few, many = 1 << 9, 1 << 16
    number_s = max(seconds(many) - seconds(few), 1e-9) / (many - few)
    return max(0.0, seconds(few) - few * number_s), 1 / number_s


def _norm_s(numbers: int) -> float:
    x, weight = torch.randn(numbers // 512, 512).bfloat16(), torch.ones(512)
    residual = x.float()
    return _best(lambda: [kernels.rms_norm(x, weight, 1e-5, residual=residual) for _ in range(32)]) / 32


def _gate_s(numbers: int) -> float:
    x = torch.randn(numbers // 512, 512).bfloat16()
    return _best(lambda: [kernels.silu_mul(x) for _ in range(32)]) / 32


def _logit_rate() -> float:
    logits = torch.randn(16, 50_000)
    return logits.numel() / _best(lambda: kernels.sample(logits, kernels.SampleBatch.greedy(16)))


def _digest_of_kernels(salt: str) -> str:
    digest = hashlib.sha256(salt.encode())
    for file in sorted((Path(kernels.__file__).parent / "cpu").glob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]
