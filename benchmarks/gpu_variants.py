"""Launch configurations of the GPU kernels, each checked and timed: the figures behind ``kernels/triton/config.py``.

    python -m benchmarks.gpu_variants                          # all parts
    python -m benchmarks.gpu_variants sampling --out DIR       # one part: attention, products or sampling
    python -m benchmarks.gpu_variants --smoke                  # two variants of toy sizes, interpreted, without a GPU

A case is one op on one size; its variants are values of the configuration classes. Several processes compile all of
them first. Each is compared with the plain-torch reference on new random inputs; the right ones are timed beside
torch's own op. A configuration that does not fit the device is reported as such. Writes ``gpu_variants.md``.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import header, roofline
from .gpu import (
    SMOKE,
    Bench,
    Figure,
    report,
    selected,
    torch_attention,
)  # before any kernel: it chooses the interpreter
from .gpu_kernels import HEADS, packed, prefix_pieces, rows_of

# isort: split
from phloem.kernels import SampleBatch, reference
from phloem.kernels.triton import attention, dense, edits, quantized, row, sampling, unpack
from phloem.kernels.triton.config import AttentionConfig, BlockConfig, DrawConfig, ProductConfig, RowConfig, config_of
from triton.runtime.errors import OutOfResources

PROCESSES = 12  # that compile
Call = Callable[[Any], Any]


def distance(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def share_of_others(found: Tensor, wanted: Tensor) -> float:
    return float((found != wanted).double().mean())


@dataclass(frozen=True)
class Case:
    """Variants of one op on one size. Each call takes what ``large`` or ``small`` returns.

    ``small`` makes inputs with fewer rows for the same builds: the reference has memory for them.
    """

    name: str
    small: Callable[[], Any]
    large: Callable[[], Any]
    expected: Call
    variants: dict[str, Call]
    work: roofline.Work
    other: str = ""
    other_call: Call | None = None
    error: Callable[[Tensor, Tensor], float] = distance
    limit: float = 1e-2


def compare(bench: Bench, case: Case) -> None:
    """Check all variants, then time the right ones and torch's op."""
    inputs = case.small()
    wanted, errors = case.expected(inputs), {}
    for name, call in islice(case.variants.items(), 2 if SMOKE else None):
        try:
            error = case.error(call(deepcopy(inputs)), wanted)  # a mask is applied in place
        except OutOfResources as refusal:
            bench.show(Figure(case.name, name, None, note=f"does not fit: {refusal}"))
            continue
        except Exception as failure:
            bench.fault(f"{case.name}, {name}: {type(failure).__name__}: {failure}")
            continue
        if error <= case.limit:
            errors[name] = error
        else:
            bench.fault(f"{case.name}, {name}: error {error:.2e} (limit {case.limit:g})")
    if SMOKE:
        for name, error in errors.items():
            bench.show(Figure(case.name, name, error))
        return
    del inputs, wanted
    inputs = case.large()
    least, bound = case.work.seconds(bench.machine) * 1e3, case.work.bound(bench.machine)
    if case.other_call is not None:
        bench.show(Figure(case.name, case.other, None, bench.time(partial(case.other_call, inputs)), least, bound))
    for name, error in errors.items():
        bench.show(Figure(case.name, name, error, bench.time(partial(case.variants[name], inputs)), least, bound))


def named(*configs: Any) -> dict[str, Any]:
    """Configurations by the fields that are not the default."""

    def name(config: Any) -> str:
        shown = ((field, getattr(config, field.name)) for field in fields(config))
        return ", ".join(f"{field.name} {value}" for field, value in shown if value != field.default)

    return {name(config) or "default": config for config in configs}


# -- attention --------------------------------------------------------------------------------------------------------

_A = AttentionConfig
PREFILL = named(
    *(_A(128, 64, 8, stages, max_registers=most) for stages in (2, 3) for most in (128, 0)),
    *(_A(128, 32, 8, 3), _A(128, 32, 8, 5), _A(128, 128, 8, 3), _A(64, 64, 4, 3), _A(128, 64, 4, 3)),
)
DECODE = named(
    *(_A(16, 128, 4, 2, 1024), _A(16, 128, 4, 2, 256), _A(16, 128, 8, 2, 1024), _A(16, 64, 4, 2, 1024)),
    *(_A(16, 64, 4, 3, 1024), _A(16, 64, 4, 3, 512), _A(16, 64, 4, 3, 256), _A(16, 64, 2, 3, 512)),
    *(_A(16, 32, 4, 4, 512), _A(16, 32, 4, 3, 512)),
)
SHARED = named(
    *(_A(128, 64, 8, 3, 1024), _A(128, 64, 8, 3, 512), _A(128, 64, 8, 3, 256), _A(128, 32, 8, 3, 512)),
    *(_A(64, 64, 4, 3, 512), _A(64, 32, 4, 3, 512), _A(128, 64, 8, 2, 512, max_registers=128)),
)


def attend(inputs: tuple[Tensor, ...], config: AttentionConfig | None = None) -> Tensor:
    return attention.paged_attention(*inputs, scale=inputs[0].shape[2] ** -0.5, config=config)


def attended(inputs: tuple[Tensor, ...]) -> Tensor:
    return reference.paged_attention(*(x.float() for x in inputs[:3]), *inputs[3:], scale=inputs[0].shape[2] ** -0.5)


def attention_cases(bench: Bench) -> Iterator[Case]:
    """Prefill and decoding with 16-bit and 8-bit pools, and a prefix that many rows share."""

    def case(kind: str, rows: int, length: int, *, element: int = 2, num_heads: int = HEADS[0]) -> Case:
        heads = (num_heads, *HEADS[1:])

        def made(lens: list[int], queries: list[int]) -> tuple[Tensor, ...]:
            q, *pool, table, ids, starts, kv_lens = rows_of(bench, lens, queries, heads=heads)[0]
            pool = [x.to(torch.float8_e4m3fn) for x in pool] if element == 1 else pool
            return (q, *pool, table, ids, starts, kv_lens)

        is_prefill, few = kind == "prefill", [length, length // 3, 3]
        each = [length] * rows, [length if is_prefill else 1] * rows
        return Case(
            f"{kind} {rows} x {length:,}, {num_heads} heads, {8 * element} bits",
            partial(made, few, [min(77, length), 9, 3] if is_prefill else [1, 1, 1]),
            partial(made, *each),
            attended,
            {name: partial(attend, config=config) for name, config in (PREFILL if is_prefill else DECODE).items()},
            roofline.attention(*each, **rows_of(bench, [1], [1], heads=heads)[1], element=element),
            "torch SDPA",
            torch_attention if is_prefill and element == 2 else None,
        )

    for length in (4096, 16_384, 32_768) if not SMOKE else (40,):
        yield case("prefill", 1, length)
    yield case("prefill", 1, 16_384 if not SMOKE else 40, element=1)
    for rows, length in ((256, 1024), (256, 8192), (8, 2048), (1, 8192)) if not SMOKE else ((2, 70),):
        yield case("decode", rows, length)
        yield case("decode", rows, length, element=1)
        yield case("decode", rows, length, num_heads=16)
    yield shared_case(bench)


def shared_case(bench: Bench) -> Case:
    children, prefix, own = (64, 8192, 64) if not SMOKE else (3, 1024, 5)
    size = rows_of(bench, [1], [1])[1]
    group, table = size["num_heads"] // size["num_kv_heads"], config_of(bench.device)

    def made() -> tuple[Tensor, ...]:
        inputs = rows_of(bench, [prefix + own] * children, [1] * children)[0]
        inputs[3][:, :prefix] = inputs[3][0, :prefix].clone()
        return inputs

    configs = {
        f"{name}, {programs} programs": replace(
            table, attention=replace(table.attention, shared=config), busy_programs=programs
        )
        for name, config in SHARED.items()
        for programs in (512, 1024)
    }
    for name, join in named(BlockConfig(16, 4), BlockConfig(8, 2), BlockConfig(32, 4)).items():
        configs[f"shipped, join of {name}"] = replace(table, join=join)
    variants: dict[str, Call] = {"without sharing": attend}
    for name, each in configs.items():
        pieces = prefix_pieces(
            children,
            prefix // each.attention.shared.split_len,
            each.attention.shared.block_m // group,
            bench.device,
        )
        options = {"shared": pieces, "scale": size["head_dim"] ** -0.5, "config": each}
        variants[name] = lambda inputs, options=options: attention.shared_prefix_attention(*inputs, **options)
    work = roofline.shared_prefix_attention(prefix, [prefix + own] * children, **size)
    return Case(f"{children} children of {prefix:,} tokens", made, made, attended, variants, work)


# -- products ---------------------------------------------------------------------------------------------------------

GATE, SQUARE, DOWN = (4096, 28_672), (4096, 4096), (14_336, 4096)  # width in, width out: of Llama-3-8B
_P = ProductConfig
_BYTES = ((4, 1024, 2), (16, 512, 4), (8, 1024, 4), (8, 2048, 4), (16, 512, 4, 3), (8, 512, 4), (2, 4096, 4))
ROWS = {
    "bfloat16": ((4, 1024, 4), (16, 256, 4), (8, 512, 4), (8, 1024, 4), (2, 2048, 4), (16, 256, 4, 3), (4, 2048, 8)),
    "int4": ((1, 2048, 2), (2, 2048, 4), (4, 1024, 4), (1, 4096, 4), (2, 4096, 8)),
    "int8": _BYTES,
    "fp8": _BYTES,
}
FEW = named(
    *(_P(16, 64, 256, 4, 3), _P(16, 32, 256, 4, 4), _P(16, 64, 128, 4, 4), _P(16, 128, 128, 4, 3)),
    *(_P(16, 128, 128, 8, 4), _P(16, 64, 64, 4, 6), _P(16, 128, 32, 4, 6)),
)
MANY = named(_P(64, 64, 128, 4, 3), _P(64, 64, 64, 4, 4), _P(64, 128, 64, 8, 3))


def product_cases(bench: Bench) -> Iterator[Case]:
    """One row by row blocks, up to 64 rows unpacked in registers, more rows unpacked to memory."""

    def case(kind: str, rows: int, shape: tuple[int, int], calls: dict[str, Callable[..., Tensor]]) -> Case:
        width_in, width_out = shape if not SMOKE else (256, 40)
        is_dense = kind == "bfloat16"

        def made() -> tuple[Tensor, Any, Tensor]:
            weight = (bench.randn(width_out, width_in) / width_in**0.5).bfloat16()
            return bench.randn(rows, width_in).bfloat16(), weight if is_dense else packed(weight, kind), weight

        def expected(inputs: tuple[Tensor, Any, Tensor]) -> Tensor:
            x, weight, _ = inputs
            if is_dense:
                return reference.dense_product(x.float(), weight.float())
            return reference.quantized_product(x.float(), weight)

        return Case(
            f"{kind}, {rows:,} x {width_in:,} x {width_out:,}",
            made,
            made,
            expected,
            {name: lambda inputs, call=call: call(*inputs[:2]) for name, call in calls.items()},
            roofline.quantized_product(rows, width_in, width_out, kind=kind),
            "torch, bfloat16 weights",
            lambda inputs: torch.nn.functional.linear(inputs[0], inputs[2]),
        )

    for kind, configs in ROWS.items():
        is_dense = kind == "bfloat16"
        shipped = dense.dense_product if is_dense else quantized.quantized_product
        calls = {
            n: partial(row.row_product, config=each) for n, each in named(*(RowConfig(*c) for c in configs)).items()
        }
        for shape in (GATE, SQUARE, DOWN) if not SMOKE else (GATE,):
            yield case(kind, 1, shape, {"shipped": shipped, **calls})
        if is_dense:
            continue
        for rows, blocks in (
            ((4, FEW), (16, FEW), (64, MANY), (256, {}), (4096, {})) if not SMOKE else ((4, FEW), (65, {}))
        ):
            products = {n: partial(quantized.quantized_product, config=each) for n, each in blocks.items()}
            for mib in (128, 256) if rows > 16 else ():
                products[f"unpacked, {mib} MiB"] = partial(unpack.unpacked_product, scratch_bytes=mib << 20)
            yield case(kind, rows, GATE, products)


# -- sampling ---------------------------------------------------------------------------------------------------------

_D = DrawConfig
READS = named(_D(), *(_D(length, warps) for length, warps in ((2048, 2), (2048, 4), (4096, 8), (8192, 4), (8192, 8))))
CUTS = named(
    *(_D(), _D(row_warps=4), _D(row_warps=16), _D(row_warps=16, block_len=2048), _D(block_len=4096), _D(num_pivots=2)),
    *(_D(num_pivots=8), _D(num_pivots=8, row_warps=16), _D(capacity=2048), _D(capacity=32_768)),
)
BITMASKS = named(*(BlockConfig(*each) for each in ((4096, 4), (8192, 8), (2048, 4), (4096, 8), (1024, 4))))
DRAWS = {  # temperature, top_k, top_p, min_p; the logits' spread; the mask
    "greedy": ((0.0, -1, 1.0, 0.0), 4.0, "none"),
    "temperature": ((0.8, -1, 1.0, 0.0), 4.0, "none"),
    "temperature, half masked": ((0.8, -1, 1.0, 0.0), 4.0, "half"),
    "temperature, few allowed": ((0.8, -1, 1.0, 0.0), 4.0, "few"),
    "top-k and top-p": ((0.8, 50, 0.9, 0.0), 4.0, "none"),
    "top-k and top-p, few allowed": ((0.8, 50, 0.9, 0.0), 4.0, "few"),
    "top-p": ((0.8, -1, 0.9, 0.0), 4.0, "none"),
    "top-p, flat": ((1.0, -1, 0.9, 0.0), 0.5, "none"),
    "min-p": ((1.0, -1, 1.0, 0.05), 4.0, "none"),
}


def mask_of(bench: Bench, allowed: str, rows: int, vocab: int) -> Tensor | None:
    words = torch.randint(-(2**31), 2**31, (rows, (vocab + 31) // 32), device=bench.device).int()
    few = torch.zeros_like(words)
    few[:, 3::40] = 1 << 7
    return {"none": None, "half": words, "few": few, "all": torch.full_like(words, -1)}[allowed]


def sampling_cases(bench: Bench) -> Iterator[Case]:
    """Draws by each rule, and grammar masks."""
    vocab = 128_256 if not SMOKE else 300

    def case(name: str, rows: int, rule: tuple[float, ...], spread: float, allowed: str) -> Case:
        temperature, top_k, top_p, min_p = rule
        has_cuts = temperature > 0 and (top_k > 0 or top_p < 1 or min_p > 0)

        def made(count: int) -> tuple[Any, ...]:
            columns = [*(np.full(count, value) for value in rule), np.random.default_rng().random(count)]
            parameters = torch.from_numpy(np.stack(columns)).to(bench.device) if temperature else None
            logits = spread * torch.randn(count, vocab, device=bench.device)
            return logits, parameters, mask_of(bench, allowed, count, vocab), SampleBatch(*columns)

        def expected(inputs: tuple[Any, ...]) -> Tensor:
            logits, _, mask, batch = inputs
            seen = logits if mask is None else reference.apply_bitmask(logits.clone(), mask)
            return reference.sample(seen, batch).token_ids

        def call(inputs: tuple[Any, ...], config: DrawConfig) -> Tensor:
            logits, parameters, mask, _ = inputs
            return sampling.draw(logits, parameters, has_cuts=has_cuts, mask=mask, config=config).token_ids

        return Case(
            f"{rows} x {vocab:,}, {name}",
            partial(made, min(rows, 64)),
            partial(made, rows),
            expected,
            {each: partial(call, config=config) for each, config in (CUTS if has_cuts else READS).items()},
            roofline.Work(4.0 * rows * (vocab + (0 if allowed == "none" else vocab / 32))),
            error=share_of_others,
            limit=0.04,  # a draw between two tokens, to float32's rounding, may give the neighbour
        )

    for rows in (1, 256) if not SMOKE else (2,):
        for name, (rule, spread, allowed) in DRAWS.items():
            yield case(name, rows, rule, spread, allowed)
    rows = 256 if not SMOKE else 2
    for allowed, forbidden in (("half", 0.5), ("few", 1.0), ("all", 0.0)):

        def made(allowed: str = allowed) -> tuple[Tensor, Tensor | None]:
            return torch.randn(rows, vocab, device=bench.device), mask_of(bench, allowed, rows, vocab)

        yield Case(
            f"bitmask of {rows} x {vocab:,}, {allowed} allowed",
            made,
            made,
            lambda inputs: reference.apply_bitmask(inputs[0].clone(), inputs[1]),
            {
                n: lambda inputs, config=config: edits.apply_bitmask(*inputs, config=config)
                for n, config in BITMASKS.items()
            },
            roofline.apply_bitmask(rows, vocab, forbidden=forbidden),
            error=share_of_others,
            limit=0.0,
        )


# -- the command ------------------------------------------------------------------------------------------------------

PARTS: dict[str, Callable[[Bench], Iterator[Case]]] = {
    "attention": attention_cases,
    "products": product_cases,
    "sampling": sampling_cases,
}


def compile_share(names: list[str], index: int) -> None:
    """Run each ``PROCESSES``-th variant once, which leaves its build in Triton's cache."""
    bench, number = Bench(smoke=False, machine=roofline.H200), 0
    for case in (case for name in names for case in PARTS[name](bench)):
        inputs = None
        for call in case.variants.values():
            number += 1
            if number % PROCESSES == index:
                inputs = case.small() if inputs is None else inputs
                with contextlib.suppress(Exception):  # it is reported where it is checked
                    call(inputs)
                    torch.cuda.synchronize()
        del inputs
        torch.cuda.empty_cache()  # the processes share the device's memory


def main() -> None:
    names, out = selected(PARTS, __doc__ or "")
    about, begin = header(), time.perf_counter()
    if not SMOKE:
        spawning = multiprocessing.get_context("spawn")
        workers = [spawning.Process(target=compile_share, args=(names, index)) for index in range(PROCESSES)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        print(f"compiled in {time.perf_counter() - begin:.0f} s", flush=True)
    torch.manual_seed(time.time_ns() % 2**31)
    bench = Bench(smoke=SMOKE)
    for case in (case for name in names for case in PARTS[name](bench)):
        compare(bench, case)
        if out is not None:
            (out / "gpu_variants.md").write_text(report(bench, about, "Launch configurations of the GPU kernels"))
    bench.end()


if __name__ == "__main__":
    main()
