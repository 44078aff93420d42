"""All figures of a GPU in one command: each kernel is checked and timed, then the engine runs.

    python -m benchmarks.gpu --out DIR                        # all parts: about 80 s once kernels are compiled
    python -m benchmarks.gpu --out DIR attention engine       # two parts
    python -m benchmarks.gpu --out DIR --smoke                # toy sizes through Triton's interpreter, without a GPU

The benchmark checks a kernel against the plain-torch reference on float64 copies of its inputs, then times it beside
its roofline: the time to move its bytes or to compute its products at the rates measured on this machine. A figure
that could not be measured stays empty. Writes ``gpu.json`` and ``gpu.md``.
"""

# ruff: noqa: E402 (the interpreter has to be chosen before a kernel is imported)

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

SMOKE = "--smoke" in sys.argv
if SMOKE:
    os.environ["TRITON_INTERPRET"] = "1"  # set before any kernel is imported
    from phloem.tests.gpu import interpret_without_waste

    interpret_without_waste()
import numpy as np
import torch
from phloem.benchmarks import roofline
from phloem.kernels import SampleBatch, reference
from phloem.kernels.backend import triton_backend, using
from phloem.runtime.executor.accelerator import CudaAccelerator

from . import RESULTS, gpu_kernels, gpu_ranks, header

TRIALS = 15
LARGE_HEADS = (16, 8, 256)  # of Gemma 2 9B
FLUSHED = 512 << 20  # bytes, several times the L2 cache


@dataclass(frozen=True)
class Figure:
    """One line of the report. Times are median milliseconds; ``roofline_ms`` uses this machine's measured rates."""

    part: str
    case: str
    error: float | None  # largest error against the reference, relative to the largest result
    ms: float | None = None
    roofline_ms: float | None = None
    bound: str = ""
    other: str = ""  # the vendor's library on the same work
    other_ms: float | None = None
    note: str = ""

    @property
    def share(self) -> float | None:
        """The roofline's time divided by the measured one."""
        return None if self.ms is None or self.roofline_ms is None else self.roofline_ms / self.ms


class Bench:
    """The device, its measured rates, and the figures so far."""

    def __init__(self, *, smoke: bool, machine: roofline.DeviceSpec | None = None) -> None:
        """``machine`` None: its rates are measured, which takes about a second; under the interpreter an H200's."""
        self.smoke = smoke
        self.device = torch.device("cpu" if smoke else "cuda")
        self.dtype = torch.float32 if smoke else torch.bfloat16
        self.figures: list[Figure] = []
        self.faults: list[str] = []
        self.machine = machine or (roofline.H200 if smoke else self._measured())

    def _measured(self) -> roofline.DeviceSpec:
        """The rates of copying 4 GiB and of bfloat16 products of 8192 x 8192, with the vendor's libraries."""
        source = torch.empty(1 << 30, dtype=torch.int32, device=self.device).random_()
        target = torch.empty_like(source)
        copy_ms = self.time(
            lambda: target.copy_(source), in_graph=False
        )  # in a graph the copy engine would do it, slower
        copy = 2 * source.numel() * 4 / (copy_ms / 1e3)
        a, b = (torch.randn(8192, 8192, device=self.device, dtype=torch.bfloat16) for _ in range(2))
        flops = 2 * 8192**3 / (self.time(lambda: a @ b) / 1e3)
        return roofline.DeviceSpec(torch.cuda.get_device_name(), copy, flops)

    def time(self, call: Callable[[], object], *, in_graph: bool = True) -> float:
        """Median milliseconds of ``call`` as a CUDA graph, so that the host's time to launch it does not count.

        ``in_graph`` False: of a plain call, for one that a graph cannot hold. The L2 cache is overwritten before every
        trial, by reads: written lines would be stored while the call runs. That also gives the host time to queue a
        plain call.
        """
        call()
        torch.cuda.synchronize()
        if in_graph:
            graph, _ = CudaAccelerator(self.device).capture(lambda: (call(), torch.empty(0))[1])
            call = graph.replay
        flush = torch.zeros(FLUSHED // 4, device=self.device)
        taken = []
        for _ in range(TRIALS):
            flush.sum()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            end.synchronize()
            taken.append(start.elapsed_time(end))
        return sorted(taken)[TRIALS // 2]

    def add(
        self,
        part: str,
        case: str,
        call: Callable[[], Any],
        expected: Callable[[], Any] | None,
        work: roofline.Work,
        *,
        other: str = "",
        other_call: Callable[[], object] | None = None,
        note: str = "",
        timed: Callable[[], object] | None = None,
        in_graph: bool = True,
        other_in_graph: bool = True,
    ) -> None:
        """Check and time one case. ``expected`` is None if the case is too large for the reference. ``timed``: what is
        timed if not ``call``. See ``time`` for ``in_graph``.
        """
        error = None
        if expected is not None:
            found, wanted = _float(call()), _float(expected())
            error = float((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-9))
            limit = 1e-4 if self.dtype == torch.float32 else 2e-2
            if not error <= limit:
                self.fault(f"{part}, {case}: wrong by {error:.2e} of the largest result (limit {limit:g})")
                return
        figure = Figure(part, case, error, note=note)
        if not self.smoke:
            other_ms = self.time(other_call, in_graph=other_in_graph) if other_call is not None else None
            ms, least = self.time(timed or call, in_graph=in_graph), work.seconds(self.machine) * 1e3
            bound = work.bound(self.machine)
            figure = Figure(part, case, error, ms, least, bound, other, other_ms, note)
        self.show(figure)

    def note(self, part: str, case: str, error: float, *, limit: float) -> None:
        """A case that is checked and not timed."""
        if not error <= limit:
            self.fault(f"{part}, {case}: wrong by {error:.2e} of the largest result (limit {limit:g})")
            return
        self.show(Figure(part, case, error))

    def show(self, figure: Figure) -> None:
        """Add a line to the report, and print it."""
        self.figures.append(figure)
        print(_line(figure), flush=True)

    def fault(self, what: str) -> None:
        """A wrong result or an error. The other cases run; the command ends with 1."""
        self.faults.append(what)
        print(f"FAULT: {what}", flush=True)

    def end(self) -> None:
        """Raises SystemExit if there are faults."""
        if self.faults:
            raise SystemExit(f"{len(self.faults)} faults, the first: {self.faults[0]}")

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self.device, dtype=self.dtype)


def _float(x: Any) -> torch.Tensor:
    return (x[0] if isinstance(x, tuple) else x).double()


# -- kernels ----------------------------------------------------------------------------------------------------------


def decode_attention(bench: Bench) -> None:
    """Grouped-query attention with one query a row."""
    cases = [(256, 1024), (256, 8192), (32, 8192), (1, 8192)] if not bench.smoke else [(3, 40), (1, 70)]
    for rows, length in cases:
        _attention(bench, "decode attention", [length] * rows, [1] * rows)
    check = [700, 33, 1500] if not bench.smoke else [50, 3, 20]
    _attention(bench, "decode attention", check, [1] * 3, checked=True)
    _attention(bench, "decode attention", check, [1] * 3, heads=LARGE_HEADS, checked=True)
    _attention(bench, "decode attention", *cases_of_large(bench, 1), heads=LARGE_HEADS)


def prefill_attention(bench: Bench) -> None:
    lengths = (4096, 16384, 32768) if not bench.smoke else (40,)
    for length in lengths:
        _attention(bench, "prefill attention", [length], [length])
    check = ([900, 300], [900, 40]) if not bench.smoke else ([50, 30], [50, 4])
    _attention(bench, "prefill attention", *check, checked=True)
    _attention(bench, "prefill attention", *check, heads=LARGE_HEADS, checked=True)
    _attention(bench, "prefill attention", *cases_of_large(bench, 4096), heads=LARGE_HEADS)


def cases_of_large(bench: Bench, num_queries: int) -> tuple[list[int], list[int]]:
    """Contexts and queries for ``LARGE_HEADS``."""
    rows, length = (1, num_queries) if num_queries > 1 else (64, 4096)
    return ([length] * rows, [num_queries] * rows) if not bench.smoke else ([20], [min(num_queries, 20)])


def _attention(
    bench: Bench,
    part: str,
    kv_lens: list[int],
    num_queries: list[int],
    *,
    heads: tuple[int, int, int] = gpu_kernels.HEADS,
    checked: bool = False,
) -> None:
    inputs, size = gpu_kernels.rows_of(bench, kv_lens, num_queries, heads=heads)
    work = roofline.attention(kv_lens, num_queries, **size, element=bench.dtype.itemsize)
    other_call = None
    if not bench.smoke and len(kv_lens) == 1 and kv_lens == num_queries:
        other_call = partial(torch_attention, inputs)

    scale = size["head_dim"] ** -0.5
    shown = f"{len(kv_lens)} x {kv_lens[0]:,}" if len(set(kv_lens)) == 1 else f"rows of {kv_lens}"
    bench.add(
        part,
        f"{shown} tokens, {size['num_heads']}/{size['num_kv_heads']} heads of {size['head_dim']}",
        lambda: triton_backend().paged_attention(*inputs, scale=scale),
        (lambda: reference.paged_attention(*inputs, scale=scale)) if checked or bench.smoke else None,
        work,
        other="torch SDPA" if other_call is not None else "",
        other_call=other_call,
    )


def torch_attention(inputs: tuple[torch.Tensor, ...]) -> object:
    """torch's own attention on the keys of one row, which it reads in the order of slots: any order is as fast."""
    dense = [x.transpose(0, 1).unsqueeze(0) for x in inputs[:3]]
    return torch.nn.functional.scaled_dot_product_attention(*dense, is_causal=True, enable_gqa=True)


def elementwise(bench: Bench) -> None:
    """The kernels that only move memory, at 4,096 rows."""
    rows, width, inner = (4096, 4096, 14336) if not bench.smoke else (3, 48, 40)
    heads, kv_heads, size, vocab = (32, 8, 128, 128_256) if not bench.smoke else (3, 1, 16, 100)
    element = bench.dtype.itemsize
    triton = triton_backend()
    x, residual = bench.randn(rows, width), torch.randn(rows, width, device=bench.device)
    weight = torch.rand(width, device=bench.device)
    bench.add(
        "rms_norm + residual",
        f"{rows:,} x {width:,}",
        lambda: triton.rms_norm(x, weight, 1e-5, residual=residual),
        lambda: reference.rms_norm(x, weight, 1e-5, residual=residual),
        roofline.rms_norm(rows, width, element=element, residual_element=4),
    )
    gates = bench.randn(rows, 2 * inner)
    bench.add(
        "silu_mul",
        f"{rows:,} x {inner:,}",
        lambda: triton.silu_mul(gates),
        lambda: reference.silu_mul(gates),
        roofline.silu_mul(rows, inner, element=element),
    )
    table = torch.randn(rows, size, device=bench.device)
    positions, slots = torch.arange(rows, device=bench.device), torch.randperm(rows, device=bench.device)
    fused = bench.randn(rows, heads + 2 * kv_heads, size)

    def write(rope: Callable[..., None]) -> torch.Tensor:
        q, k, v = fused.clone().split((heads, kv_heads, kv_heads), dim=1)
        caches = [torch.zeros(rows, kv_heads, size, device=bench.device, dtype=bench.dtype) for _ in range(2)]
        rope(q, k, v, table, positions, *caches, slots)
        return torch.cat([q.flatten(), *(cache.flatten() for cache in caches)])

    error = float((_float(write(triton.rope_write_kv)) - _float(write(reference.rope_write_kv))).abs().max())
    q, k, v = fused.split((heads, kv_heads, kv_heads), dim=1)
    caches = [torch.zeros(rows, kv_heads, size, device=bench.device, dtype=bench.dtype) for _ in range(2)]
    bench.add(
        "rope + KV write",
        f"{rows:,} tokens, {heads}/{kv_heads} heads of {size}",
        lambda: triton.rope_write_kv(q, k, v, table, positions, *caches, slots),
        None,
        roofline.rope_write_kv(rows, num_heads=heads, num_kv_heads=kv_heads, head_dim=size, element=element),
        note=f"largest difference {error:.1e}",
    )
    few = 256 if not bench.smoke else 2
    logits = torch.randn(few, vocab, device=bench.device)
    words = torch.randint(-(2**31), 2**31, (few, (vocab + 31) // 32), device=bench.device).int()
    bench.add(
        "bitmask",
        f"{few:,} x {vocab:,}",
        lambda: triton.apply_bitmask(logits, words).nan_to_num(neginf=-1e4),
        lambda: reference.apply_bitmask(logits.clone(), words).nan_to_num(neginf=-1e4),
        roofline.apply_bitmask(few, vocab, forbidden=0.5),
        note="half of the tokens forbidden",
        timed=lambda: triton.apply_bitmask(logits, words),
    )


def sampling(bench: Bench) -> None:
    """Draws from rows of logits: greedy, at a temperature, with cuts, with cuts of flat logits, and with masks."""
    vocab = 128_256 if not bench.smoke else 300
    from phloem.kernels.triton import sampling as triton_sampling

    num_words = (vocab + 31) // 32
    for rows in (1, 256) if not bench.smoke else (2,):
        logits = 4 * torch.randn(rows, vocab, device=bench.device)
        words = torch.randint(-(2**31), 2**31, (rows, num_words), device=bench.device).int()
        for name, source, temperature, top_k, top_p, mask in (
            ("greedy", logits, 0.0, -1, 1.0, None),
            ("temperature", logits, 0.8, -1, 1.0, None),
            ("top-k and top-p", logits, 0.8, 50, 0.9, None),
            ("top-p", logits, 0.8, -1, 0.9, None),
            ("top-p, flat", logits / 8, 1.0, -1, 0.9, None),
            ("temperature, masked", logits, 0.8, -1, 1.0, words),
        ):
            rng = np.random.default_rng(0)
            columns = [np.full(rows, value) for value in (temperature, top_k, top_p, 0.0)]
            batch = SampleBatch(*columns, rng.random(rows))
            has_cuts = top_k > 0 or top_p < 1
            parameters = torch.from_numpy(np.stack([*columns, batch.draw])).to(bench.device) if temperature else None
            bench.add(
                "sampling",
                f"{rows:,} x {vocab:,}, {name}",
                lambda source=source, batch=batch, mask=mask: triton_sampling.sample(
                    source, batch, mask=mask
                ).token_ids.float(),
                lambda source=source, batch=batch, mask=mask: reference.sample(
                    source if mask is None else reference.apply_bitmask(source.clone(), mask), batch
                ).token_ids.float(),
                roofline.Work(4.0 * rows * (vocab + (0 if mask is None else num_words))),
                timed=lambda source=source, parameters=parameters, mask=mask, has_cuts=has_cuts: triton_sampling.draw(
                    source, parameters, has_cuts=has_cuts, mask=mask
                ),
            )


# -- the engine -------------------------------------------------------------------------------------------------------


def engine(bench: Bench) -> None:
    """Published shapes with random weights: 256 requests at once, one stream, and a mixture of experts."""
    from .gpu_engine import TOYS, WORKLOADS, serve

    if bench.smoke:
        # A stand-in graph records calls of kernels, not the interpreter's operations inside them.
        from phloem.tests.runtime.executor.stand_in import traced

        with using(traced(triton_backend())):
            for workload in TOYS:
                for found in serve(workload, bench.machine, is_smoke=True):
                    note = f"{found.steps} steps, {found.graphs} graphs"
                    bench.show(Figure("engine", found.case, None, note=note))
        return
    for workload in WORKLOADS:
        for found in serve(workload, bench.machine, is_smoke=False):
            note = f"{found.steps} steps, {found.graphs} graphs"
            note += f", {found.num_tokens / found.seconds:,.0f} tokens/s, host {found.host_ms:.2f} ms a step"
            figures = [
                Figure("engine", found.case, None, 1e3 * found.seconds, 1e3 * found.least_s, "memory", note=note)
            ]
            if workload.num_requests == 1:
                name = f"{workload.shape}, batch 1"
                figures.append(Figure("decode step", name, None, found.step_ms, found.least_step_ms, "memory"))
            for figure in figures:
                bench.show(figure)
        gc.collect()  # free the memory for the next model
        torch.cuda.empty_cache()


PARTS: dict[str, Callable[[Bench], None]] = {
    "decode_attention": decode_attention,
    "prefill_attention": prefill_attention,
    "elementwise": elementwise,
    "sampling": sampling,
    **gpu_kernels.PARTS,
    **gpu_ranks.PARTS,
    "engine": engine,
}


# -- the report -------------------------------------------------------------------------------------------------------


def _line(figure: Figure) -> str:
    def shown(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    cells = [
        figure.part,
        figure.case,
        shown(figure.error, ".1e"),
        shown(figure.ms, ".3f"),
        shown(figure.roofline_ms, ".3f"),
        shown(figure.share, ".0%"),
        f"{figure.other} {shown(figure.other_ms, '.3f')}".strip(),
        figure.note,
    ]
    return "| " + " | ".join(cells) + " |"


def report(bench: Bench, about: dict[str, Any], title: str = "GPU figures") -> str:
    machine = (
        "Triton's interpreter, toy sizes: no times"
        if bench.smoke
        else (
            f"{bench.machine.name}: copies at {bench.machine.copy / 1e12:.2f} TB/s, bfloat16 products at "
            f"{bench.machine.flops / 1e12:.0f} TFLOP/s, both measured"
        )
    )
    lines = [
        f"# {title}",
        "",
        f"{machine}. `{about['command']}`, commit {about['commit']}, torch {about['torch']}.",
        "",
        "| part | case | error | ms | roofline, ms | of it | other, ms | note |",
        "|---|---|---|---|---|---|---|---|",
        *[_line(figure) for figure in bench.figures],
    ]
    return "\n".join(lines) + "\n"


@contextlib.contextmanager
def _backend(smoke: bool) -> Iterator[None]:
    """The Triton backend. Under the interpreter tensors lie on the CPU, so the device would select the CPU kernels."""
    if not smoke:
        yield
        return
    with using(triton_backend()):
        yield


def selected(parts: Mapping[str, object], doc: str) -> tuple[list[str], Path | None]:
    """The command line: the names of the parts to run, and the folder of the report; None: none is written."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(parts)} (default: all)")
    parser.add_argument("--out", type=Path, help=f"default: {RESULTS}; with --smoke: nothing is written")
    parser.add_argument("--smoke", action="store_true", help="toy sizes through the interpreter")
    arguments = parser.parse_args()
    unknown = [part for part in arguments.parts if part not in parts]
    if unknown:
        parser.error(f"unknown part {unknown[0]!r}; parts are {', '.join(parts)}")
    if not arguments.smoke and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device here; --smoke runs toy sizes through Triton's interpreter")
    out = arguments.out or (None if arguments.smoke else RESULTS)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    return arguments.parts or list(parts), out


def main() -> None:
    names, out = selected(PARTS, __doc__ or "")
    torch.manual_seed(0)
    about = header()
    bench = Bench(smoke=SMOKE)
    with _backend(SMOKE):
        for name in names:
            try:
                PARTS[name](bench)
            except Exception as error:
                traceback.print_exc()
                bench.fault(f"{name}: {type(error).__name__}: {error}")
            made = {**about, "machine_rates": asdict(bench.machine), "smoke": SMOKE, "faults": bench.faults}
            figures = [{**asdict(figure), "share": figure.share} for figure in bench.figures]
            if out is not None:
                (out / "gpu.json").write_text(json.dumps({**made, "figures": figures}, indent=2) + "\n")
                (out / "gpu.md").write_text(report(bench, about))
    bench.end()


if __name__ == "__main__":
    main()
