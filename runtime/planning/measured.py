"""This machine's CPU as ``Hardware``: measured once with our own kernels, about ten seconds, and kept in a file."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from ... import kernels
from ...kernels.linear import PackedLinear, Precision
from .hardware import Curve, Hardware

log = logging.getLogger(__name__)

VERSION = 1  # of what is measured
ROWS = (1, 2, 4, 8, 16, 32, 64, 256)
WEIGHTS = (1536, 1024)  # of one product; as many of them as do not stay in a cache
NUM_PRODUCTS = 48
REPEATS = 5
HOST_STEP_S, HOST_ROW_S = 6e-4, 2.5e-5  # of ``phloem bench --profile``, without kernels
LAUNCH_S = 1e-6  # of a call on a tape


def cpu_hardware(home: Path, *, threads: int = 0, again: bool = False) -> Hardware:
    """From the file in ``home``, or measured now and written there. ``threads`` 0: one per core."""
    count = kernels.set_threads(threads)
    key = hashlib.sha256(f"{VERSION} {_processor()} {count} {torch.__version__}".encode()).hexdigest()[:12]
    path = home / f"cpu-{key}.json"
    if path.exists() and not again:
        data = json.loads(path.read_text())
        data["curves"] = {int(bits): tuple(map(tuple, curve)) for bits, curve in data["curves"].items()}
        return Hardware(**data)
    log.warning("measuring this CPU's kernels once, for %s", path)
    hardware = measure_cpu(threads)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(hardware), indent=1) + "\n")
    return hardware


@torch.inference_mode()
def measure_cpu(threads: int = 0) -> Hardware:
    """Runs every kind of kernel; other work on the machine shows in the figures."""
    kernels.warm_up()
    count = kernels.set_kernel_threads(threads)
    torch.manual_seed(0)
    four, eight = _curve("int8", grouped=True), _curve("int16", grouped=False)
    kernels.set_threads(threads)
    sixteen = _curve("bfloat16", grouped=False)
    kernels.set_kernel_threads(threads)
    key_rate, score_rate = _attention_rates()
    return Hardware(
        name="cpu",
        memory_bytes=float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        read_rate=0.625e9 / four[0][1],
        product_rate=2e9 * four[-1][0] / four[-1][1],
        launch_s=LAUNCH_S,
        host_step_s=HOST_STEP_S,
        host_row_s=HOST_ROW_S,
        about=f"{_processor()}, {count} threads, measured",
        curves={4: four, 8: eight, 16: sixteen},
        key_rate=key_rate,
        score_rate=score_rate,
        prefill_score_rate=_prefill_score_rate(),
        element_rate=_element_rate(),
        logit_rate=_logit_rate(),
    )


def _best(work: Callable[[], object]) -> float:
    """Seconds; the best, because whatever disturbs only adds."""
    work()
    found = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return min(found)


def _curve(precision: Precision, *, grouped: bool) -> Curve:
    outputs, inputs = WEIGHTS
    if grouped:
        q = torch.randint(0, 16, WEIGHTS, dtype=torch.uint8)
        scale = torch.rand(outputs, inputs // 32) / 8
        products = [PackedLinear((q, scale, -8 * scale), precision=precision) for _ in range(NUM_PRODUCTS)]
    else:
        weight = torch.randn(WEIGHTS)
        products = [PackedLinear(weight, precision=precision) for _ in range(NUM_PRODUCTS)]
    points = []
    for rows in ROWS:
        x = torch.randn(rows, inputs).bfloat16()
        # Long products need no repeats over all the weights to be out of the caches.
        some = products if rows < 64 else products[: NUM_PRODUCTS // 4]
        seconds = _best(lambda x=x, some=some: [product(x) for product in some])  # type: ignore[misc]
        points.append((float(rows), seconds / (len(some) * outputs * inputs) * 1e9))
    return tuple(points)


def _attention_rates() -> tuple[float, float]:
    """(numbers of K and V a second, multiply-adds a second): two heads ratios give two equations."""
    rows, context, kv_heads, head_dim = 16, 500, 4, 64
    times = {}
    for group in (2, 6):
        times[group] = _attention_s(rows, context, kv_heads, group, head_dim, new=1)
    numbers = 2 * rows * context * kv_heads * head_dim
    per_product = max(times[6] - times[2], times[6] * 0.05) / (4 * numbers)
    per_number = max(times[2] / numbers - 2 * per_product, times[2] / numbers * 0.05)
    return 1 / per_number, 1 / per_product


def _prefill_score_rate() -> float:
    new, context, kv_heads, group, head_dim = 256, 1024, 4, 3, 64
    seconds = _attention_s(1, context, kv_heads, group, head_dim, new=new)
    return 2 * new * (context - new / 2) * kv_heads * group * head_dim / seconds


def _attention_s(rows: int, context: int, kv_heads: int, group: int, head_dim: int, *, new: int) -> float:
    """One layer, of caches big enough that each layer finds its own in memory."""
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


def _element_rate() -> float:
    x, weight, residual = torch.randn(16, 4096).bfloat16(), torch.ones(4096), torch.randn(16, 4096)
    return x.numel() / _best(lambda: kernels.rms_norm(x, weight, 1e-5, residual=residual))


def _logit_rate() -> float:
    logits = torch.randn(16, 50_000)
    return logits.numel() / _best(lambda: kernels.sample(logits, kernels.SampleBatch.greedy(16)))


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
