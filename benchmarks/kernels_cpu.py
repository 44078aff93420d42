"""Time of each CPU kernel in one step of SmolLM2-135M's shapes, by number of rows.

    python -m benchmarks.kernels_cpu [PART ...] [--team own|torch] [--threads N] [--rows 1 4 16 256] [--save]

Parts: linears, head, small_ops, attention, sampling; all by default. Times are milliseconds for all 30 layers: the best
of the repeats, and the median in brackets, which is much larger on a busy machine. For products of packed weights two
shares follow: of the instruction's products per second, with operands in registers, and of the bytes per second that
the team reads from memory. Every layer has its own weights and keys, so they are read from memory as in a real step,
not from a cache. Packed products run from a tape, as in a step. ``--team own`` leaves torch one thread: measure
torch's products (int4, oneDNN) with ``--team torch``. On a busy machine, ``--threads 1 --processor-time`` leaves out
the time in which other processes have the core.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np
import torch
from phloem import kernels
from phloem.kernels.cpu.recording import Arena, Recording
from phloem.kernels.cpu.tape import Tape
from phloem.kernels.linear import PackedLinear, Precision, dequantize
from phloem.kernels.quantized_kv import quantize_kv
from phloem.kernels.threads import team

from . import RESULTS, print_header, save
from .cpu_peaks import bytes_per_s, tile_products_per_s, vector_products_per_s

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 30, 576, 1536, 9, 3, 64, 49_152
SHAPES = {
    "qkv": ((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
    "out": (HIDDEN, HEADS * HEAD_DIM),
    "gate_up": (2 * INNER, HIDDEN),
    "down": (HIDDEN, INNER),
}
CONTEXTS = ((1, 100), (1, 1000), (1, 4000), (4, 100), (16, 100), (16, 1200))  # rows x tokens of context
SHARED = ((16, 1200, 1100), (16, 700, 600))  # rows x tokens of context, and the tokens that all rows share
PREFILLS = ((256, 256), (256, 1000), (256, 4000))  # new tokens x tokens of context

WEIGHT_BYTES = {"int4": 20 / 32, "int8": 34 / 32}  # with scales and zeros of groups of 32
WEIGHTS = {"linears": LAYERS * sum(n * k for n, k in SHAPES.values()), "head": VOCAB * HIDDEN}

Figures = dict[str, tuple[float, float]]  # name -> (best, median) milliseconds


@dataclass(frozen=True, slots=True)
class Timer:
    repeats: int
    clock: Callable[[], float] = time.perf_counter

    def __call__(self, work: Callable[[], object], *, times: int = 1) -> tuple[float, float]:
        work()
        found = []
        for _ in range(self.repeats):
            start = self.clock()
            for _ in range(times):
                work()
            found.append((self.clock() - start) / times * 1e3)
        return min(found), statistics.median(found)


def groups(num_rows: int, row_len: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q = torch.randint(0, 16, (num_rows, row_len), dtype=torch.uint8)
    scale, zero = torch.rand(2, num_rows, row_len // 32) / 8
    return q, scale, zero - 0.06


def linears(timer: Timer, rows: list[int]) -> Iterator[tuple[str, Figures]]:
    """The four products of every layer."""
    weights = [[groups(*shape) for shape in SHAPES.values()] for _ in range(LAYERS)]
    precisions: tuple[Precision, ...] = ("auto", "int8", "int16", "int4", "bfloat16")
    for precision in precisions:
        layers = [[packed(weight, precision) for weight in layer] for layer in weights]
        figures: Figures = {}
        for num_rows in rows:
            xs = {row_len: torch.randn(num_rows, row_len).bfloat16() for _, row_len in SHAPES.values()}

            def step(layers: list[list[PackedLinear]] = layers, xs: dict[int, torch.Tensor] = xs) -> None:
                for layer in layers:
                    for linear in layer:
                        linear(xs[linear.shape[1]])

            figures[str(num_rows)] = timer(taped(step))
        yield layers[0][0].describe(), figures


def taped(work: Callable[[], object]) -> Callable[[], object]:
    """``work``'s kernels from a tape, as in a step; ``work`` itself where it calls more than our kernels."""
    with Recording(Arena()) as recording:
        work()
    if recording.foreign is not None or not team().can_replay:
        return work
    return partial(Tape(recording.calls, recording.arena).replay, team().pool)


def packed(weight: tuple[torch.Tensor, torch.Tensor, torch.Tensor], precision: Precision) -> PackedLinear:
    return PackedLinear(dequantize(weight) if precision == "bfloat16" else weight, precision=precision)


def head(timer: Timer, rows: list[int]) -> Iterator[tuple[str, Figures]]:
    """Logits in float32."""
    weight = torch.randn(VOCAB, HIDDEN)
    precisions: tuple[Precision, ...] = ("int8", "int16", "bfloat16")
    for precision in precisions:
        linear = PackedLinear(weight, precision=precision, out_dtype=torch.float32)
        xs = {num_rows: torch.randn(num_rows, HIDDEN).bfloat16() for num_rows in rows}
        yield linear.describe(), {str(n): timer(lambda x=x, linear=linear: linear(x), times=3) for n, x in xs.items()}


def small_ops(timer: Timer, rows: list[int]) -> Iterator[tuple[str, Figures]]:
    """The ops between the products of every layer: two norms with residual, rope with the KV write, silu-mul."""
    weight, cos_sin = torch.randn(HIDDEN), torch.randn(4096, HEAD_DIM)
    caches = torch.zeros(2, 8192, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16)
    each: dict[str, Figures] = {"rms_norm, twice": {}, "rope_write_kv": {}, "silu_mul": {}}
    for n in rows:
        x, residual = torch.randn(n, HIDDEN).bfloat16(), torch.randn(n, HIDDEN)
        gate_up = torch.randn(n, 2 * INNER).bfloat16()
        q, k, v = torch.randn(n, HEADS + 2 * KV_HEADS, HEAD_DIM).bfloat16().split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        positions, slots = torch.arange(n), torch.randperm(8192)[:n]
        works: tuple[Callable[[], object], ...] = (
            lambda x=x, r=residual: kernels.rms_norm(x, weight, 1e-5, residual=r),
            lambda q=q, k=k, v=v, p=positions, s=slots: kernels.rope_write_kv(q, k, v, cos_sin, p, *caches, s),
            lambda x=gate_up: kernels.silu_mul(x),
        )
        for figures, work, times in zip(each.values(), works, (2, 1, 1), strict=True):
            figures[str(n)] = timer(repeated(work, times * LAYERS))
    yield from each.items()


def repeated(work: Callable[[], object], times: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(times):
            work()

    return run


def attention(timer: Timer, rows: list[int]) -> Iterator[tuple[str, Figures]]:
    """Decode rows and prefill chunks over scattered slots; ``rows`` is not used."""
    for dtype in (torch.bfloat16, torch.float32, torch.int8):
        figures: Figures = {}
        cases = [(r, n, 1, 0) for r, n in CONTEXTS] + [(r, n, 1, shared) for r, n, shared in SHARED]
        for num_rows, kv_len, num_new, shared in cases + [(1, n, new, 0) for new, n in PREFILLS]:
            num_slots = num_rows * kv_len
            caches = torch.randn(LAYERS, 2, num_slots, KV_HEADS, HEAD_DIM)
            caches = quantize_kv(caches) if dtype == torch.int8 else caches.to(dtype)
            q = torch.randn(num_rows * num_new, HEADS, HEAD_DIM).bfloat16()
            table = torch.randperm(num_slots, dtype=torch.int32).view(num_rows, kv_len)
            table[:, :shared] = table[0, :shared]
            starts = torch.arange(0, len(q) + 1, num_new, dtype=torch.int32)
            row_ids, kv_lens = torch.arange(num_rows, dtype=torch.int32), torch.full((num_rows,), kv_len).int()

            def step(
                q: torch.Tensor = q,
                caches: torch.Tensor = caches,
                rest: tuple[torch.Tensor, ...] = (table, row_ids, starts, kv_lens),
            ) -> None:
                for k_cache, v_cache in caches:
                    kernels.paged_attention(q, k_cache, v_cache, *rest, scale=0.125)

            name = f"{num_rows} x {kv_len}" if num_new == 1 else f"{num_new} new of {kv_len}"
            name += f", {shared} shared" if shared else ""
            figures[name] = timer(step)
        yield str(dtype).removeprefix("torch."), figures


def sampling(timer: Timer, rows: list[int]) -> Iterator[tuple[str, Figures]]:
    """One step's sampling, from logits that are as peaked as a model's."""
    cuts = {
        "greedy": (0.0, -1, 1.0, 0.0),
        "temperature": (0.8, -1, 1.0, 0.0),
        "top_k 50": (1.0, 50, 1.0, 0.0),
        "top_p 0.9": (1.0, -1, 0.9, 0.0),
        "min_p 0.05": (1.0, -1, 1.0, 0.05),
    }
    for name, (temperature, top_k, top_p, min_p) in cuts.items():
        figures: Figures = {}
        for n in rows:
            logits = torch.randn(n, VOCAB) * 2
            logits[:, :40] += torch.linspace(14, 5, 40)
            batch = kernels.SampleBatch(
                np.full(n, temperature, np.float32),
                np.full(n, top_k, np.int32),
                np.full(n, top_p, np.float32),
                np.full(n, min_p, np.float32),
                kernels.uniform(np.zeros(n, np.int64), np.arange(n)),
            )
            figures[str(n)] = timer(lambda logits=logits, batch=batch: kernels.sample(logits, batch), times=5)
        yield name, figures
    masks = {n: np.random.default_rng(0).integers(0, 2**32, (n, VOCAB // 32), dtype=np.uint32) for n in rows}
    logits = {n: torch.randn(n, VOCAB) for n in rows}
    yield (
        "bitmask",
        {str(n): timer(lambda n=n: kernels.apply_bitmask(logits[n], masks[n]), times=5) for n in rows},
    )


@dataclass(frozen=True, slots=True)
class Peaks:
    """Of the team: byte products a second in vectors and in tiles, and bytes a second read from memory."""

    vector_products: float
    tile_products: float
    bytes_read: float

    def shares(self, num_weights: int, label: str, rows: int, seconds: float) -> tuple[float, float]:
        """(of the byte products, of the bytes) that a product took in so many seconds.

        One product of a weight and an x of 16 bits is two of bytes in vectors; one of bfloat16 in tiles takes as long
        as two of bytes.
        """
        is_tiled = label.endswith("(AMX)")
        planes = 2 if is_tiled or "int16" in label else 1
        peak = self.tile_products if is_tiled else self.vector_products
        products, read = planes * num_weights * rows / seconds, num_weights * WEIGHT_BYTES[label[:4]] / seconds
        return products / peak if peak else 0.0, read / self.bytes_read


PARTS = {part.__name__: part for part in (linears, head, small_ops, attention, sampling)}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("parts", nargs="*", choices=[*PARTS, []], metavar="PART", help=", ".join(PARTS))
    options.add_argument("--threads", type=int, default=0, help="0: one per core")
    options.add_argument("--team", choices=["own", "torch"], default="own", help="thread pool that runs the kernels")
    options.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 16, 32, 256])
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--save", action="store_true", help="write the figures to benchmarks/results")
    options.add_argument(
        "--processor-time", action="store_true", help="of one thread, for a busy machine; needs --threads 1"
    )
    chosen = options.parse_args()
    if chosen.processor_time and chosen.threads != 1:
        options.error(f"--processor-time with --threads {chosen.threads}: only one thread's time is read; --threads 1")
    choose = kernels.set_kernel_threads if chosen.team == "own" else kernels.set_threads
    report = print_header(team=chosen.team, threads=choose(chosen.threads))
    kernels.warm_up()
    torch.manual_seed(0)
    clock = time.thread_time if chosen.processor_time else time.perf_counter
    timer, size = Timer(chosen.repeats, clock), team().size
    peaks = Peaks(vector_products_per_s(clock) * size, tile_products_per_s(clock) * size, bytes_per_s(clock))
    report["peaks"] = asdict(peaks)
    print(
        f"peaks of the team: {peaks.vector_products / 1e9:,.0f} GMAC/s of bytes in vectors, "
        f"{peaks.tile_products / 1e9:,.0f} in tiles, {peaks.bytes_read / 1e9:.1f} GB/s read from memory"
    )
    for name in chosen.parts or PARTS:
        print(f"\n{name}, ms: best (median)")
        report[name] = {}
        for label, figures in PARTS[name](timer, chosen.rows):
            report[name][label] = figures
            cells = (f"{key}: {best:.2f} ({median:.2f})" for key, (best, median) in figures.items())
            print(f"  {label:<20} " + "   ".join(cells), flush=True)
            if name in WEIGHTS and label.startswith(tuple(WEIGHT_BYTES)) and " by " in label:
                shares = {k: peaks.shares(WEIGHTS[name], label, int(k), best / 1e3) for k, (best, _) in figures.items()}
                report.setdefault("shares", {})[f"{name} {label}"] = shares
                cells = (f"{key}: {products:.0%}, {read:.0%}" for key, (products, read) in shares.items())
                print(f"  {'':<20} of the peaks: " + "   ".join(cells), flush=True)
    if chosen.save:
        save(RESULTS / "kernels_cpu.json", report)


if __name__ == "__main__":
    main()
