"""Everything there is to know of a GPU, in one command: each kernel checked and timed, then the engine at work.

    python -m benchmarks.gpu --out DIR                        # all parts, in under nine minutes
    python -m benchmarks.gpu --out DIR attention engine       # some
    python -m benchmarks.gpu --out DIR --smoke                # toy sizes through Triton's interpreter, without a GPU

A kernel is checked against the plain-torch reference in float64 inputs' arithmetic, then timed beside its roofline: the
time that moving its bytes or computing its products takes at the rates measured on this very machine. What could not be
measured is left empty, never estimated. Writes ``gpu.json`` and ``gpu.md``.
"""

# ruff: noqa: E402 (the interpreter has to be chosen before a kernel is imported)

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SMOKE = "--smoke" in sys.argv
if SMOKE:
    os.environ["TRITON_INTERPRET"] = "1"  # before any kernel is imported
try:
    import phloem
except ImportError:  # run from a checkout that nobody has installed
    _folder = tempfile.mkdtemp()
    os.symlink(Path(__file__).resolve().parents[1], Path(_folder) / "phloem")
    sys.path.insert(0, _folder)
    import phloem
import torch
from phloem.kernels import reference
from phloem.kernels.backend import triton_backend, using
from phloem.kernels.triton import roofline

from . import RESULTS, header

ROOT = Path(phloem.__file__).parent
TRIALS = 15


@dataclass(frozen=True)
class Figure:
    """One line. Times are milliseconds, medians; ``roofline_ms`` at this machine's measured rates."""

    part: str
    case: str
    error: float | None  # largest, against the reference, relative to the largest result
    ms: float | None = None
    roofline_ms: float | None = None
    bound: str = ""
    other: str = ""  # the machine's own library on the same work
    other_ms: float | None = None
    note: str = ""

    @property
    def share(self) -> float | None:
        """Of the roofline."""
        return None if self.ms is None or self.roofline_ms is None else self.roofline_ms / self.ms


class Bench:
    """The device, its measured rates, and the figures so far."""

    def __init__(self, *, smoke: bool) -> None:
        self.smoke = smoke
        self.device = torch.device("cpu" if smoke else "cuda")
        self.dtype = torch.float32 if smoke else torch.bfloat16
        self.figures: list[Figure] = []
        self.machine = roofline.H200 if smoke else self._measured()

    def _measured(self) -> roofline.Machine:
        """Copy bandwidth of 4 GiB and bfloat16 products of 8192 x 8192, by this machine's own libraries."""
        source = torch.empty(1 << 30, dtype=torch.int32, device=self.device).random_()
        target = torch.empty_like(source)
        copy = 2 * source.numel() * 4 / (self.time(lambda: target.copy_(source)) / 1e3)
        a, b = (torch.randn(8192, 8192, device=self.device, dtype=torch.bfloat16) for _ in range(2))
        flops = 2 * 8192**3 / (self.time(lambda: a @ b) / 1e3)
        return roofline.Machine(torch.cuda.get_device_name(), copy, flops)

    def time(self, call: Callable[[], object]) -> float:
        """Median milliseconds; the second-level cache is overwritten before every trial."""
        call()
        torch.cuda.synchronize()
        flush = torch.empty(64 << 20, dtype=torch.int32, device=self.device)
        taken = []
        for _ in range(TRIALS):
            flush.zero_()
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
    ) -> None:
        """Check and time one case. ``expected`` None: too large for the reference, which checks a smaller case."""
        error = None
        if expected is not None:
            found, wanted = _float(call()), _float(expected())
            error = float((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-9))
            limit = 1e-4 if self.dtype == torch.float32 else 2e-2
            if not error <= limit:
                raise SystemExit(f"{part}, {case}: wrong by {error:.2e} of the largest result (limit {limit:g})")
        if self.smoke:
            self.figures.append(Figure(part, case, error, note=note))
        else:
            other_ms = self.time(other_call) if other_call is not None else None
            ms, least = self.time(call), work.seconds(self.machine) * 1e3
            bound = work.bound(self.machine)
            self.figures.append(Figure(part, case, error, ms, least, bound, other, other_ms, note))
        print(_line(self.figures[-1]), flush=True)

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self.device, dtype=self.dtype)


def _float(x: Any) -> torch.Tensor:
    return (x[0] if isinstance(x, tuple) else x).double()


# -- kernels ----------------------------------------------------------------------------------------------------------


def decode_attention(bench: Bench) -> None:
    """GQA, one query a row, at the bars' shapes; then a prefix that all rows share."""
    heads, kv_heads, size = (32, 8, 128) if not bench.smoke else (4, 2, 16)
    cases = [(256, 1024), (256, 8192), (32, 8192), (1, 8192)] if not bench.smoke else [(3, 40), (1, 70)]
    for rows, length in cases:
        _attention(bench, "decode attention", [length] * rows, [1] * rows, heads, kv_heads, size)
    check = [700, 33, 1500] if not bench.smoke else [50, 3, 20]
    _attention(bench, "decode attention", check, [1] * 3, heads, kv_heads, size, checked=True)


def prefill_attention(bench: Bench) -> None:
    heads, kv_heads, size = (32, 8, 128) if not bench.smoke else (4, 2, 16)
    lengths = (4096, 16384, 32768) if not bench.smoke else (40,)
    for length in lengths:
        _attention(bench, "prefill attention", [length], [length], heads, kv_heads, size)
    check = ([900, 300], [900, 40]) if not bench.smoke else ([50, 30], [50, 4])
    _attention(bench, "prefill attention", *check, heads, kv_heads, size, checked=True)


def _attention(
    bench: Bench,
    part: str,
    kv_lens: list[int],
    num_queries: list[int],
    heads: int,
    kv_heads: int,
    size: int,
    *,
    checked: bool = False,
) -> None:
    device = bench.device
    num_slots = sum(kv_lens)
    k, v = bench.randn(num_slots, kv_heads, size), bench.randn(num_slots, kv_heads, size)
    order = torch.randperm(num_slots, device=device).int()
    table = torch.zeros(len(kv_lens), max(kv_lens), dtype=torch.int32, device=device)
    begin = 0
    for row, length in enumerate(kv_lens):
        table[row, :length] = order[begin : begin + length]
        begin += length
    starts = torch.tensor([0, *num_queries], device=device).cumsum(0).int()
    q = bench.randn(int(sum(num_queries)), heads, size)
    rows = torch.arange(len(kv_lens), device=device, dtype=torch.int32)
    inputs = (q, k, v, table, rows, starts, torch.tensor(kv_lens, device=device, dtype=torch.int32))
    work = roofline.attention(
        kv_lens, num_queries, num_heads=heads, num_kv_heads=kv_heads, head_dim=size, element=bench.dtype.itemsize
    )
    other_call = None
    if not bench.smoke and len(kv_lens) == 1 and kv_lens == num_queries:
        dense = [x.transpose(0, 1).unsqueeze(0) for x in (q, k[order.long()], v[order.long()])]

        def other_call() -> object:
            return torch.nn.functional.scaled_dot_product_attention(*dense, is_causal=True, enable_gqa=True)

    scale = size**-0.5
    shown = f"{len(kv_lens)} x {kv_lens[0]:,}" if len(set(kv_lens)) == 1 else f"rows of {kv_lens}"
    bench.add(
        part,
        f"{shown} tokens, {heads}/{kv_heads} heads of {size}",
        lambda: triton_backend().paged_attention(*inputs, scale=scale),
        (lambda: reference.paged_attention(*inputs, scale=scale)) if checked or bench.smoke else None,
        work,
        other="torch SDPA" if other_call is not None else "",
        other_call=other_call,
    )


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
    )


# -- the engine -------------------------------------------------------------------------------------------------------

SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": {
        "family": "qwen3",
        "num_layers": 28,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_heads": 16,
        "num_kv_heads": 8,
        "head_dim": 128,
        "vocab_size": 151_936,
        "tied": True,
        "max_positions": 4096,
    },
    "Llama-3-8B": {
        "family": "llama",
        "num_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "vocab_size": 128_256,
        "max_positions": 4096,
    },
}


def engine(bench: Bench) -> None:
    """256 requests of 100 to 1,024 tokens in and out (nano-vllm's benchmark), then a lone stream of an 8B model."""
    if bench.smoke:
        _serve(bench, "tiny", {}, num_requests=3, most=12, longest=12)
        return
    _serve(bench, "Qwen3-0.6B", SHAPES["Qwen3-0.6B"], num_requests=256, most=1024, longest=1024)
    _serve(bench, "Llama-3-8B", SHAPES["Llama-3-8B"], num_requests=1, most=100, longest=128)


def _serve(bench: Bench, name: str, shape: dict[str, Any], *, num_requests: int, most: int, longest: int) -> None:
    from phloem.runtime.config import EngineConfig
    from phloem.runtime.engine import Engine
    from phloem.runtime.protocol.messages import Failed, Submit
    from phloem.runtime.protocol.ops import Close, Gen, Special
    from phloem.runtime.protocol.sampling import SamplingParams
    from phloem.tests.runtime.models.tiny import VOCAB_SIZE, make_tiny_model

    rng = random.Random(0)
    least = min(100, most // 2)
    prompts = [
        [rng.randrange(min(10_000, VOCAB_SIZE - 3)) for _ in range(rng.randint(least, most))]
        for _ in range(num_requests)
    ]
    lengths = [rng.randint(min(100, longest // 2), longest) for _ in range(num_requests)]
    with tempfile.TemporaryDirectory() as folder:
        path = make_tiny_model(Path(folder) / name, seed=0, dtype=bench.dtype, **shape)
        config = EngineConfig(
            model=str(path),
            device=bench.device.type,
            precision="float32" if bench.smoke else "bfloat16",
            max_running=max(num_requests, 1),
            num_slots=sum(map(len, prompts)) + sum(lengths) + 1024,
            max_seq_len=2048 if not bench.smoke else 64,
            max_waiting=num_requests + 1,
        )
        server = Engine(config)
    inbox = []
    for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        params = SamplingParams(max_tokens=length, temperature=0.6, ignore_eos=True, seed=i)
        ops = [Special(op=0, seq=0, ids=tuple(prompt)), Gen(op=1, seq=0, params=params), Close(op=2, seq=0)]
        inbox.append((b"bench", Submit(program=str(i), ops=ops)))
    start = time.perf_counter()
    outbox = server.step(inbox)
    steps = 1
    while server.has_work:
        outbox += server.step([])
        steps += 1
    seconds = time.perf_counter() - start
    failures = [message for _, message in outbox if isinstance(message, Failed)]
    if failures:
        raise SystemExit(f"engine, {name}: {failures[0].error}")
    tokens = sum(lengths)
    case = f"{name}, {num_requests} requests, {tokens:,} tokens out"
    if bench.smoke:
        bench.figures.append(Figure("engine", case, None, note=f"{steps} steps"))
    else:
        bench.figures.append(
            Figure("engine", case, None, 1e3 * seconds, note=f"{tokens / seconds:,.0f} tokens/s, {steps} steps")
        )
    print(_line(bench.figures[-1]), flush=True)


PARTS: dict[str, Callable[[Bench], None]] = {
    "decode_attention": decode_attention,
    "prefill_attention": prefill_attention,
    "elementwise": elementwise,
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


def report(bench: Bench, about: dict[str, Any]) -> str:
    machine = (
        "Triton's interpreter, toy sizes: no times"
        if bench.smoke
        else (
            f"{bench.machine.name}: copies at {bench.machine.copy / 1e12:.2f} TB/s, bfloat16 products at "
            f"{bench.machine.flops / 1e12:.0f} TFLOP/s, both measured"
        )
    )
    lines = [
        "# GPU figures",
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
    """Under the interpreter tensors lie on the CPU, whose own kernels are not meant here."""
    if not smoke:
        yield
        return
    with using(triton_backend()):
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--smoke", action="store_true", help="toy sizes through the interpreter")
    arguments = parser.parse_args()
    unknown = [part for part in arguments.parts if part not in PARTS]
    if unknown:
        parser.error(f"unknown part {unknown[0]!r}; parts are {', '.join(PARTS)}")
    if not arguments.smoke and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device here; --smoke runs toy sizes through Triton's interpreter")
    torch.manual_seed(0)
    about = header()
    bench = Bench(smoke=arguments.smoke)
    arguments.out.mkdir(parents=True, exist_ok=True)
    with _backend(arguments.smoke):
        for name in arguments.parts or PARTS:
            PARTS[name](bench)
            made = {**about, "machine_rates": asdict(bench.machine), "smoke": arguments.smoke}
            figures = [{**asdict(figure), "share": figure.share} for figure in bench.figures]
            (arguments.out / "gpu.json").write_text(json.dumps({**made, "figures": figures}, indent=2) + "\n")
            (arguments.out / "gpu.md").write_text(report(bench, about))


if __name__ == "__main__":
    main()
