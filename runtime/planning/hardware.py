"""Machines as rates: bytes read and operations done a second. ``measured`` finds those of this machine's CPU."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

Curve = tuple[tuple[float, float], ...]  # (rows, seconds for 1e9 weights), rows ascending


@dataclass(frozen=True, slots=True)
class Hardware:
    """Rates of one device, and of the host that drives it.

    Matrix products cost what ``curves`` and ``product_calls`` say for the weights' bits; without a curve they follow a
    roofline of ``read_rate`` and ``product_rate``. ``read_rate`` (bytes/s) and ``product_rate`` (operations/s, 16-bit)
    are rates that steps reach, below those of the datasheet.
    """

    name: str
    memory_bytes: float
    read_rate: float
    product_rate: float
    launch_s: float  # of each kernel, except products and attention if they are measured
    host_step_s: float  # planning, sampling and sending of a step, without the kernels
    host_row_s: float  # the same, for each row of a step
    about: str = ""
    curves: dict[int, Curve] | None = None
    product_calls: dict[int, Curve] | None = (
        None  # (rows, seconds) of a call beside its weights, with CALL_INPUTS inputs
    )
    attention_call_s: float = 0.0  # each layer's attention, without its context
    attention_row_s: float = 0.0  # the same, for each row
    key_rate: float = 0.0  # numbers of K and V read a second; 0: roofline of the two rates
    score_rate: float = 0.0  # multiply-adds a second of queries with K and V, one query a row
    prefill_score_rate: float = 0.0  # the same, many queries a row
    element_rate: float = 0.0  # numbers a second in norms and rope
    gate_rate: float = 0.0  # numbers a second in activations
    logit_rate: float = 0.0  # logits a second of a greedy draw
    link_rate: float = 0.0  # bytes a second to the other devices of a tensor-parallel group; 0: there are none
    collective_s: float = 0.0  # of a collective of the group, without its bytes

    def transfer_s(self, size_bytes: float, *, count: int = 1) -> float:
        """Seconds of ``count`` collectives or messages in which a device sends so many bytes to others."""
        return count * self.collective_s + size_bytes / self.link_rate

    def product_s(self, outputs: int, inputs: int, rows: float, *, bits: int, weight_bytes: float) -> float:
        """Seconds of a matrix product of ``rows`` rows."""
        weights = outputs * inputs
        curve = (self.curves or {}).get(bits)
        if curve:
            return weights / 1e9 * interpolate(curve, rows) + self._call_s(inputs, rows, bits)
        return max(weights * weight_bytes / self.read_rate, 2 * weights * rows / self.product_rate)

    def _call_s(self, inputs: int, rows: float, bits: int) -> float:
        """Seconds of a product beside its weights: dividing it between threads, and quantising its input rows."""
        call = (self.product_calls or {}).get(bits)
        if not call:
            return self.launch_s
        least = call[0][1]
        return least + max(0.0, interpolate(call, rows) - least) * inputs / CALL_INPUTS


CALL_INPUTS = 1024


def interpolate(curve: Sequence[tuple[float, float]], x: float) -> float:
    """Linear between points, constant before the first, proportional beyond the last."""
    last_x, last_y = curve[-1]
    if x >= last_x:
        return last_y * x / last_x
    at = bisect_left(curve, (x, 0.0))
    if at == 0:
        return curve[0][1]
    (x0, y0), (x1, y1) = curve[at - 1], curve[at]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


# The shares of the datasheet's rates (dense bfloat16 operations and memory bytes a second) that steps reach.
READ_SHARE, PRODUCT_SHARE, LINK_SHARE = 0.75, 0.6, 0.75
COLLECTIVE_S = 12e-6  # an assumption: eight devices behind one switch, a tensor of some kilobytes


def _gpu(name: str, memory_gb: float, terabytes_s: float, teraflops: float, link_gb_s: float = 0.0) -> Hardware:
    """``link_gb_s``: in one direction."""
    links = f", links of {link_gb_s:g} GB/s, of which {LINK_SHARE:.0%}" if link_gb_s else ""
    return Hardware(
        name,
        memory_bytes=memory_gb * 1e9,
        read_rate=terabytes_s * 1e12 * READ_SHARE,
        product_rate=teraflops * 1e12 * PRODUCT_SHARE,
        launch_s=3e-6,
        host_step_s=4e-4,
        host_row_s=5e-6,
        about=f"datasheet {terabytes_s} TB/s, {teraflops:g} TFLOPS, of which {READ_SHARE:.0%} and {PRODUCT_SHARE:.0%}"
        + links,
        link_rate=link_gb_s * 1e9 * LINK_SHARE,
        collective_s=COLLECTIVE_S if link_gb_s else 0.0,
    )


_ALL = (
    _gpu("h200", 141, 4.8, 989, 450),
    _gpu("h100", 80, 3.35, 989, 450),
    _gpu("a100-80g", 80, 2.04, 312, 300),
    _gpu("l40s", 48, 0.864, 362),
    _gpu("l4", 24, 0.3, 121),
)
HARDWARE = {hardware.name: hardware for hardware in _ALL}
