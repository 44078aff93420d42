"""Machines as rates: what they read and multiply in a second. Never measures; ``measured`` does that for a CPU."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

Curve = tuple[tuple[float, float], ...]  # (rows, seconds for a thousand million weights), rows ascending


@dataclass(frozen=True, slots=True)
class Hardware:
    """Rates of one device, and of the host that drives it.

    Where ``curves`` has the weights' bits, products cost what it says beside ``product_call``; elsewhere they are a
    roofline of ``read_rate`` and ``product_rate``. ``read_rate`` (bytes/s) and ``product_rate`` (operations/s, 16-bit)
    are what is reached, not what is printed on the box.
    """

    name: str
    memory_bytes: float
    read_rate: float
    product_rate: float
    launch_s: float  # of each kernel but products and attention
    host_step_s: float  # a step's planning, sampling and sending, beyond the kernels
    host_row_s: float  # and of each row in it
    about: str = ""
    curves: dict[int, Curve] | None = None
    product_calls: dict[int, Curve] | None = None  # (rows, seconds) beside the weights; inputs are CALL_INPUTS wide
    attention_call_s: float = 0.0  # of each layer's attention beside the context
    attention_row_s: float = 0.0  # and of each row in it
    key_rate: float = 0.0  # numbers of K and V read and widened a second; 0: a roofline of the two rates
    score_rate: float = 0.0  # multiply-adds of queries with K and V, few queries a row
    prefill_score_rate: float = 0.0  # the same, many queries a row
    element_rate: float = 0.0  # numbers that norms and rope pass a second
    gate_rate: float = 0.0  # numbers that activations pass a second
    logit_rate: float = 0.0  # logits that a greedy choice looks at a second

    def product_s(self, outputs: int, inputs: int, rows: float, *, bits: int, weight_bytes: float) -> float:
        """A matrix product of ``rows`` rows at once."""
        weights = outputs * inputs
        curve = (self.curves or {}).get(bits)
        if curve:
            return weights / 1e9 * interpolate(curve, rows) + self._call_s(inputs, rows, bits)
        return max(weights * weight_bytes / self.read_rate, 2 * weights * rows / self.product_rate)

    def _call_s(self, inputs: int, rows: float, bits: int) -> float:
        """What a product costs beside its weights: sharing it between threads, and rounding its rows where it does."""
        call = (self.product_calls or {}).get(bits)
        if not call:
            return self.launch_s
        least = call[0][1]
        return least + max(0.0, interpolate(call, rows) - least) * inputs / CALL_INPUTS


CALL_INPUTS = 1024


def interpolate(curve: Sequence[tuple[float, float]], x: float) -> float:
    """Linear between points, proportional beyond the last one."""
    last_x, last_y = curve[-1]
    if x >= last_x:
        return last_y * x / last_x
    at = bisect_left(curve, (x, 0.0))
    if at == 0:
        return curve[0][1]
    (x0, y0), (x1, y1) = curve[at - 1], curve[at]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


# Datasheet rates: dense bfloat16 operations and memory bytes a second, of which steps reach these shares.
READ_SHARE, PRODUCT_SHARE = 0.75, 0.6


def _gpu(name: str, memory_gb: float, terabytes_s: float, teraflops: float) -> Hardware:
    return Hardware(
        name,
        memory_bytes=memory_gb * 1e9,
        read_rate=terabytes_s * 1e12 * READ_SHARE,
        product_rate=teraflops * 1e12 * PRODUCT_SHARE,
        launch_s=3e-6,
        host_step_s=4e-4,
        host_row_s=5e-6,
        about=f"datasheet {terabytes_s} TB/s, {teraflops:g} TFLOPS, of which {READ_SHARE:.0%} and {PRODUCT_SHARE:.0%}",
    )


_ALL = (
    _gpu("h200", 141, 4.8, 989),
    _gpu("h100", 80, 3.35, 989),
    _gpu("a100-80g", 80, 2.04, 312),
    _gpu("l40s", 48, 0.864, 362),
    _gpu("l4", 24, 0.3, 121),
)
HARDWARE = {hardware.name: hardware for hardware in _ALL}
