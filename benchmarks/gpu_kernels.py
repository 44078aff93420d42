"""Cases of ``benchmarks.gpu``: quantized products, shared prefixes, 8-bit pools, experts, adapters, fused norms."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from phloem.benchmarks import roofline
from phloem.kernels import Groups, SharedPrefixes, reference
from phloem.kernels.backend import triton_backend
from phloem.kernels.linear import quantize_int8
from phloem.kernels.quantized_weight import QuantizedWeight, pack_fp8, pack_int4, pack_int8
from torch import Tensor

if TYPE_CHECKING:
    from .gpu import Bench


def quantized_products(bench: Bench) -> None:
    """The gate and up projection of Llama-3-8B for a row, a batch and a prompt; compared with cuBLAS in bfloat16."""
    width_in, width_out = (4096, 28_672) if not bench.smoke else (256, 40)
    dense = bench.randn(width_out, width_in) / width_in**0.5
    for kind in ("int4", "int8", "fp8"):
        weight = packed(dense, kind)
        for rows in (1, 4, 16, 64, 256, 4096) if not bench.smoke else (1, 20, 70):
            x = bench.randn(rows, width_in)
            bench.add(
                f"product {kind}",
                f"{rows:,} x {width_in:,} x {width_out:,}",
                partial(triton_backend().quantized_product, x, weight),
                partial(reference.quantized_product, x, weight),
                roofline.quantized_product(rows, width_in, width_out, kind=kind, element=bench.dtype.itemsize),
                other="torch, bfloat16 weights",
                other_call=partial(torch.matmul, x, dense.T),
            )


def dense_products(bench: Bench) -> None:
    """A row with the projections and heads of Llama-3-8B and Qwen3-0.6B in bfloat16; compared with cuBLAS."""
    from phloem.kernels.triton.row import row_product  # when the kernels' form is chosen

    llama = ((4096, 28_672), (4096, 4096), (14_336, 4096), (4096, 6144), (4096, 128_256))
    for width_in, width_out in (*llama, (1024, 151_936)) if not bench.smoke else ((256, 40),):
        weight = (bench.randn(width_out, width_in) / width_in**0.5).bfloat16()
        x = bench.randn(1, width_in).bfloat16()
        bench.add(
            "product bfloat16",
            f"1 x {width_in:,} x {width_out:,}",
            partial(row_product, x, weight, out_dtype=torch.float32),
            partial(reference.dense_product, x.double(), weight.double()),
            roofline.quantized_product(1, width_in, width_out, kind="bfloat16"),
            other="torch",
            other_call=partial(torch.matmul, x, weight.T),
            timed=partial(triton_backend().dense_product, x, weight),
        )


def packed(dense: Tensor, kind: str) -> QuantizedWeight:
    if kind == "fp8":
        return pack_fp8(dense)
    if kind == "int8":
        return pack_int8(*quantize_int8(dense))
    groups = dense.float().view(dense.shape[0], -1, 32)
    low, high = groups.amin(-1), groups.amax(-1)
    scale = (high - low) / 15
    q = ((groups - low.unsqueeze(-1)) / scale.unsqueeze(-1)).round().to(torch.uint8).view(dense.shape)
    return pack_int4(q, scale, low + 8 * scale)


def shared_prefix(bench: Bench) -> None:
    """64 children of one prefix of 8,192 tokens, one new token each; compared with a kernel that reads it 64 times."""
    children, prefix, own = (64, 8192, 64) if not bench.smoke else (3, 520, 5)
    inputs, size = rows_of(bench, [prefix + own] * children, [1] * children)
    table = inputs[3]
    table[:, :prefix] = table[0, :prefix]
    device = bench.device
    cut = triton_backend().sharing_of(device, size["num_heads"] // size["num_kv_heads"], size["head_dim"], bench.dtype)
    assert cut is not None
    shared = prefix_pieces(children, prefix // cut.chunk_len, cut.piece_len, device)
    scale = size["head_dim"] ** -0.5
    bench.add(
        "shared-prefix attention",
        f"{children} children of {prefix:,} tokens, {own} of their own",
        lambda: triton_backend().shared_prefix_attention(*inputs, shared=shared, scale=scale),
        lambda: reference.paged_attention(*inputs, scale=scale),
        roofline.shared_prefix_attention(prefix, [prefix + own] * children, **size, element=bench.dtype.itemsize),
        other="without sharing",
        other_call=partial(triton_backend().paged_attention, *inputs, scale=scale),
    )


def fp8_pool(bench: Bench) -> None:
    """Decode attention over 8-bit keys and values; compared with a pool in the activations' type."""
    for rows, length in ((256, 1024), (256, 8192), (3, 700)) if not bench.smoke else ((3, 40),):
        inputs, size = rows_of(bench, [length] * rows, [1] * rows)
        q, k, v, *tables = inputs
        pool = [cache.to(torch.float8_e4m3fn) for cache in (k, v)]
        scale = size["head_dim"] ** -0.5
        work = roofline.attention([length] * rows, [1] * rows, **size, element=1)
        bench.add(
            "decode attention, fp8 pool",
            f"{rows} x {length:,} tokens",
            partial(triton_backend().paged_attention, q, *pool, *tables, scale=scale),
            partial(reference.paged_attention, q, *pool, *tables, scale=scale) if rows < 10 else None,
            work,
            other="bfloat16 pool",
            other_call=partial(triton_backend().paged_attention, *inputs, scale=scale),
        )


def experts(bench: Bench) -> None:
    """A mixture as Qwen3-30B-A3B's: 8 of 128 experts; compared with the reference, which runs all experts."""
    hidden, inner, count, top_k = (2048, 768, 128, 8) if not bench.smoke else (24, 20, 5, 2)
    gate_up = bench.randn(count, 2 * inner, hidden) / hidden**0.5
    down = bench.randn(count, hidden, inner) / inner**0.5
    for tokens in (1, 64, 4096) if not bench.smoke else (7,):
        x, logits = bench.randn(tokens, hidden), torch.randn(tokens, count, device=bench.device)
        weights, ids = reference.route_experts(logits, top_k, normalise=True)
        inputs = (x, gate_up, down, weights, ids)
        taken = len(ids.unique())
        shape = {"hidden": hidden, "inner": inner, "top_k": top_k, "taken": taken, "element": bench.dtype.itemsize}
        bench.add(
            "experts",
            f"{tokens:,} tokens, {top_k} of {count}",
            partial(triton_backend().mix_experts, *inputs),
            partial(reference.mix_experts, *inputs),
            roofline.mix_experts(tokens, **shape),
            other="torch, all experts",
            other_call=partial(reference.mix_experts, *inputs),
            other_in_graph=False,
            note=f"{taken} experts taken",
        )
        bench.add(
            "routing",
            f"{tokens:,} tokens, {top_k} of {count}",
            partial(triton_backend().route_experts, logits, top_k, normalise=True),
            partial(reference.route_experts, logits, top_k, normalise=True),
            roofline.Work(4.0 * tokens * (count + 2 * top_k)),
        )


def adapters(bench: Bench) -> None:
    """Adapters of rank 16 on a product of width 4,096. Rows of a batch use different adapters, and some use none."""
    width, rank, count = (4096, 16, 32) if not bench.smoke else (48, 8, 3)
    down, up = bench.randn(count, rank, width) / width**0.5, bench.randn(count, width, rank)
    for rows in (64, 4096) if not bench.smoke else (9,):
        x, y = bench.randn(rows, width), bench.randn(rows, width)
        groups = Groups(torch.arange(rows, device=bench.device) % (count + 1) - 1, count)
        inputs = (x, down, up, groups)
        bench.add(
            "adapters",
            f"{rows:,} x {width:,}, {count} of rank {rank}",
            partial(triton_backend().add_adapters, y.clone(), *inputs),  # in place: run once
            partial(reference.add_adapters, y, *inputs),
            roofline.add_adapters(
                rows, width, width, rank=rank, adapters=min(rows, count), element=bench.dtype.itemsize
            ),
        )


def fused_norms(bench: Bench) -> None:
    """Head norms, rope and KV write in one kernel, and the gelu gate; compared with separate kernels."""
    rows, inner = (4096, 14_336) if not bench.smoke else (3, 40)
    heads, kv_heads, size = (32, 8, 128) if not bench.smoke else (3, 1, 16)
    element, device = bench.dtype.itemsize, bench.device
    gates = bench.randn(rows, 2 * inner)
    bench.add(
        "gelu_mul",
        f"{rows:,} x {inner:,}",
        lambda: triton_backend().gelu_mul(gates),
        lambda: reference.gelu_mul(gates),
        roofline.silu_mul(rows, inner, element=element),
    )
    table, norms = torch.randn(rows, size, device=device), torch.rand(2, size, device=device)
    positions, slots = torch.arange(rows, device=device), torch.randperm(rows, device=device)
    fused = bench.randn(rows, heads + 2 * kv_heads, size)

    def write(op: Callable[..., Tensor]) -> Tensor:
        q, k, v = fused.clone().split((heads, kv_heads, kv_heads), dim=1)
        caches = [torch.zeros(rows, kv_heads, size, device=device, dtype=bench.dtype) for _ in range(2)]
        turned = op(q, k, v, table, positions, *caches, slots, q_norm=norms[0], k_norm=norms[1], eps=1e-6)
        return torch.cat([turned.flatten(), *(cache.flatten() for cache in caches)])

    error = float((write(triton_backend().norm_rope_write_kv) - write(reference.norm_rope_write_kv)).abs().max())
    if not error <= (1e-4 if bench.smoke else 0.1):
        raise SystemExit(f"norm + rope + KV write: wrong by {error:.2e}")
    q, k, v = fused.split((heads, kv_heads, kv_heads), dim=1)
    caches = [torch.zeros(rows, kv_heads, size, device=device, dtype=bench.dtype) for _ in range(2)]
    rest = (table, positions, *caches, slots)

    def apart() -> None:
        normed = [triton_backend().rms_norm(x.contiguous(), norms[i], 1e-6)[0] for i, x in enumerate((q, k))]
        triton_backend().rope_write_kv(*normed, v, *rest)

    bench.add(
        "norm + rope + KV write",
        f"{rows:,} tokens, {heads}/{kv_heads} heads of {size}",
        lambda: triton_backend().norm_rope_write_kv(q, k, v, *rest, q_norm=norms[0], k_norm=norms[1], eps=1e-6),
        None,
        roofline.rope_write_kv(rows, num_heads=heads, num_kv_heads=kv_heads, head_dim=size, element=element),
        other="one after the other",
        other_call=apart,
        note=f"largest difference {error:.1e}",
    )


HEADS = (32, 8, 128)  # query heads, KV heads, dimensions: of Llama-3-8B


def rows_of(
    bench: Bench, kv_lens: list[int], num_queries: list[int], *, heads: tuple[int, int, int] = HEADS
) -> tuple[tuple[Tensor, ...], dict[str, int]]:
    """Inputs of ``paged_attention`` with slots in random order, and the shape of its heads."""
    num_heads, num_kv_heads, head_dim = heads if not bench.smoke else (heads[0] // 8, max(heads[1] // 4, 1), 16)
    size = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    device, num_slots = bench.device, sum(kv_lens)
    k, v = (bench.randn(num_slots, size["num_kv_heads"], size["head_dim"]) for _ in range(2))
    order = torch.randperm(num_slots, device=device).int()
    width = -(-max(kv_lens) // 16) * 16
    table = torch.zeros(len(kv_lens), width, dtype=torch.int32, device=device)
    for row, slots in enumerate(order.split(kv_lens)):
        table[row, : len(slots)] = slots
    q = bench.randn(sum(num_queries), size["num_heads"], size["head_dim"])
    rows = torch.arange(len(kv_lens), device=device, dtype=torch.int32)
    starts = torch.tensor([0, *num_queries], device=device).cumsum(0).int()
    return (q, k, v, table, rows, starts, torch.tensor(kv_lens, device=device, dtype=torch.int32)), size


def prefix_pieces(children: int, chunks: int, piece_len: int, device: torch.device) -> SharedPrefixes:
    """Rows 0 to ``children`` share their first ``chunks`` chunks, ``piece_len`` rows a piece."""
    pieces = [(begin, min(begin + piece_len, children), begin, 0, chunks) for begin in range(0, children, piece_len)]
    return SharedPrefixes(
        torch.arange(children, dtype=torch.int32, device=device),
        torch.tensor(pieces, dtype=torch.int32, device=device),
        torch.full((children,), chunks, dtype=torch.int32, device=device),
    )


PARTS = {
    "quantized_products": quantized_products,
    "dense_products": dense_products,
    "shared_prefix": shared_prefix,
    "fp8_pool": fp8_pool,
    "experts": experts,
    "adapters": adapters,
    "fused_norms": fused_norms,
}
