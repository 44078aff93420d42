"""Registers and shared memory of every Triton kernel, compiled ahead of time for each shipped configuration.

    python -m benchmarks.kernel_resources --out benchmarks/results/kernel_resources.md

Registers are counted per thread, shared memory per block. A spilled register lies in local memory; no kernel may spill.
"""

import argparse
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from phloem.kernels.triton import (
    activation,
    attention,
    edits,
    experts,
    grouped,
    norm,
    quantized,
    rope,
    row,
    sampling,
    unpack,
)
from phloem.kernels.triton.config import CONFIGS, AttentionConfig, Config, DrawConfig, ProductConfig
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from . import RESULTS

HEADS = {"SmolLM2-135M": (3, 3, 64), "Llama-3-8B": (8, 4, 128), "Qwen3-0.6B": (8, 2, 128)}  # KV heads, group, size
LARGE = {"Gemma-3-270M": (1, 4, 256)}
LATENTS = {"DeepSeek-V2-Lite": (1, 16, 576), "DeepSeek-V3": (1, 128, 576)}


_FLAGS = ("HAS_WINDOW", "HAS_SOFT_CAP", "HAS_PIECES", "IS_AFTER_PIECES", "IS_PARTIAL")


@dataclass(frozen=True)
class Build:
    """One specialization. ``types`` by argument, ``*`` marks a pointer. Those in ``aligned`` are divisible by 16."""

    name: str
    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    num_warps: int
    num_stages: int = 2
    aligned: tuple[str, ...] = ()
    max_registers: int | None = None


@dataclass(frozen=True)
class Resources:
    registers: int
    shared: int
    stack: int
    local: int


def attention_builds(config: Config, *, has_fp8: bool) -> Iterator[Build]:
    llama = HEADS["Llama-3-8B"]
    narrow, large, wide = config.attention, config.large_attention, config.wide_attention
    for model, heads in HEADS.items():
        for kind, shape in (("decode", narrow.decode), ("prefill", narrow.prefill)):
            yield attention_build(f"attention {kind} {model}", shape, heads)
            yield attention_build(f"attention {kind} {model} window, cap", shape, heads, ("HAS_WINDOW", "HAS_SOFT_CAP"))
    for kind, shape in (("decode", narrow.decode), ("prefill", narrow.prefill)):
        yield attention_build(f"attention {kind} Llama-3-8B fp8 pool", shape, llama, pool="*u8", has_fp8=has_fp8)
    for models, shapes in ((LARGE, large), (LATENTS, wide)):
        for model, heads in models.items():
            for kind, shape in (("decode", shapes.decode), ("prefill", shapes.prefill)):
                yield attention_build(f"attention {kind} {model}", shape, heads)
                yield attention_build(f"attention {kind} {model} fp8 pool", shape, heads, pool="*u8", has_fp8=has_fp8)
    flags = ("HAS_WINDOW", "HAS_SOFT_CAP")
    yield attention_build("attention prefill Gemma-3-270M window, cap", large.prefill, LARGE["Gemma-3-270M"], flags)
    for kind, shape in (("decode", narrow.decode), ("prefill", narrow.prefill)):
        yield attention_build(f"attention partial {kind} Llama-3-8B", shape, llama, ("IS_PARTIAL",))
        flags = ("IS_PARTIAL", "HAS_WINDOW", "HAS_SOFT_CAP")
        yield attention_build(f"attention partial {kind} Llama-3-8B window, cap", shape, llama, flags)
    # A shared prefix, and the rows' suffixes: of one token, and of several.
    for model, heads, shapes in (("Llama-3-8B", llama, narrow), ("Gemma-3-270M", LARGE["Gemma-3-270M"], large)):
        for kind, shape, flag in (
            ("prefix", shapes.shared, "HAS_PIECES"),
            ("suffix of one token", shapes.decode, "IS_AFTER_PIECES"),
            ("suffix of drafts", shapes.shared, "IS_AFTER_PIECES"),
        ):
            yield attention_build(f"attention shared {kind} {model}", shape, heads, (flag, "HAS_SOFT_CAP"))
            yield attention_build(
                f"attention shared {kind} {model} fp8 pool", shape, heads, (flag,), pool="*u8", has_fp8=has_fp8
            )
    for model, heads in (HEADS | LARGE | LATENTS).items():
        shapes = config.attention_of(heads[2], torch.float32)
        for kind, shape in (("decode", shapes.decode), ("prefill", shapes.prefill)):
            yield attention_build(f"attention {kind} {model} float32", shape, heads, pool="*fp32")
    shape = config.exact_attention.shared
    yield attention_build("attention shared prefix Llama-3-8B float32", shape, llama, ("HAS_PIECES",), pool="*fp32")


def attention_build(
    name: str,
    shape: AttentionConfig,
    heads: tuple[int, int, int],
    flags: tuple[str, ...] = (),
    *,
    pool: str = "*bf16",
    has_fp8: bool = False,
) -> Build:
    num_kv_heads, group, head_dim = heads
    head_parts = attention.head_parts_of(group, shape.block_m) if head_dim > attention.WIDE else 1
    group //= head_parts
    tables = ("slot_table", "row_ids", "query_starts", "kv_lens")
    sizes = ("num_rows", "window", "q_stride", "table_stride", "num_splits", "split_len")
    is_decode = "decode" in name or "one token" in name
    return Build(
        name,
        attention.attention_kernel,
        {
            **dict.fromkeys(("q", "out"), "*fp32" if pool == "*fp32" else "*bf16"),
            **dict.fromkeys(("k_cache", "v_cache"), pool),
            **dict.fromkeys((*tables, "pieces", "piece_order", "own_from", "ends", "firsts"), "*i32"),
            **dict.fromkeys(("part_sums", "part_logs"), "*fp32"),
            **dict.fromkeys(("scale", "soft_cap"), "fp32"),
            **dict.fromkeys(sizes, "i32"),
        },
        {
            "NUM_KV_HEADS": num_kv_heads,
            "GROUP": group,
            "HEAD_PARTS": head_parts,
            "HEAD_DIM": head_dim,
            "PADDED_DIM": triton.next_power_of_2(head_dim),
            "BLOCK_M": max(shape.block_m, triton.next_power_of_2(group)),
            "BLOCK_N": shape.block_n_fp8 or shape.block_n if pool == "*u8" else shape.block_n,
            "IS_DECODE": is_decode,
            "HAS_WHOLE": attention.has_whole(shape, is_decode=is_decode, has_pieces="HAS_PIECES" in flags),
            "IS_SPLIT": shape.split_len > 0 or "IS_PARTIAL" in flags,
            **{flag: flag in flags for flag in _FLAGS},
            "PRODUCTS": tl.float16 if has_fp8 else tl.float32 if pool == "*fp32" else tl.bfloat16,
            "NATIVE_FP8": has_fp8,
        },
        shape.num_warps,
        shape.num_stages,
        ("q_stride", "table_stride", "split_len"),
        shape.max_registers or None if pool != "*u8" else None,
    )


def builds(arch: int) -> Iterator[Build]:
    """A build of every kernel with each configuration shipped for ``arch``."""
    config = CONFIGS[arch]
    yield from attention_builds(config, has_fp8=arch >= 89)
    yield from product_builds(arch, config)
    yield Build(
        "attention join",
        attention.join_kernel,
        {"part_sums": "*fp32", "part_logs": "*fp32", "out": "*bf16", "own_from": "*i32", "num_splits": "i32"},
        {"NUM_HEADS": 32, "HEAD_DIM": 128, "PADDED_DIM": 128, "BLOCK_SPLITS": config.join.block_len, "NUM_OWN": 0},
        config.join.num_warps,
    )
    for width in (576, 4096):
        block = triton.next_power_of_2(width)
        yield Build(
            f"rms_norm {width}",
            norm.rms_norm_kernel,
            {
                **dict.fromkeys(("x", "y"), "*bf16"),
                **dict.fromkeys(("weight", "residual", "residual_out"), "*fp32"),
                "width": "i32",
                "eps": "fp32",
            },
            {"HAS_RESIDUAL": True, "BLOCK": block},
            norm.warps_of(block),
            aligned=("width",),
        )
    for name, pool, normed in (
        ("rope_write_kv 128", "*bf16", False),
        ("rope_write_kv 128 fp8 pool", "*u8", False),
        ("norm_rope_write_kv 128", "*bf16", True),
        ("norm_rope_write_kv 128 fp8 pool", "*u8", True),
    ):
        yield Build(
            name,
            rope.rope_write_kv_kernel,
            {
                **dict.fromkeys(("q", "k", "v"), "*bf16"),
                **dict.fromkeys(("k_cache", "v_cache"), pool),
                **dict.fromkeys(("cos_sin", "q_norm", "k_norm"), "*fp32"),
                "eps": "fp32",
                **dict.fromkeys(("positions", "out_slots"), "*i64"),
                **dict.fromkeys(("q_stride", "k_stride", "v_stride", "num_heads", "num_kv_heads", "rotary"), "i32"),
            },
            {
                "HEAD_DIM": 128,
                "HALF": 64,
                "WHOLE": 128,
                "HEADS": 4,
                "HAS_NORM": normed,
                "HAS_REST": False,
                "HAS_VALUES": True,
            },
            1,
            aligned=("q_stride", "k_stride", "v_stride", "rotary"),
        )
    for name in ("silu_mul", "gelu_mul"):
        yield Build(
            name,
            activation.gated_kernel,
            {"x": "*bf16", "y": "*bf16", "width": "i32"},
            {"GELU": name == "gelu_mul", "BLOCK": config.elementwise.block_len},
            config.elementwise.num_warps,
            aligned=("width",),
        )
    yield from logit_builds(config)


def sample_builds(name: str, absent: tuple[str, ...], config: DrawConfig) -> Iterator[Build]:
    """The two kernels of a draw. ``absent``: arguments that are None."""
    types = {
        **dict.fromkeys(("logits", "stats", "maxima", "listed_logits", "logprobs"), "*fp32"),
        **dict.fromkeys(("mask", "lines", "bests", "listed_groups", "listed_tokens"), "*i32"),
        "parameters": "*fp64",
        "token_ids": "*i64",
        **dict.fromkeys(("num_rows", "vocab_size", "num_words", "logits_stride", "num_parts", "num_groups"), "i32"),
    }
    if "maxima" in absent:
        absent = (*absent, "listed_groups", "listed_tokens", "listed_logits")
    scratch = ("listed_groups", "listed_tokens", "listed_logits")
    aligned = ("vocab_size", "logits_stride")
    part = {**{argument: None for argument in absent if argument not in scratch}, "PART": config.part_len}
    yield Build(f"sample part, {name}", sampling.part_kernel, types, part, config.part_warps, aligned=aligned)
    row = {
        **dict.fromkeys(absent),
        "PART": config.part_len,
        "PARTS": 32,
        "BLOCK": config.block_len,
        "PIVOTS": config.num_pivots,
        "CAPACITY": config.capacity,
    }
    yield Build(f"sample, {name}", sampling.draw_kernel, types, row, config.row_warps, aligned=aligned)


def logit_builds(config: Config) -> Iterator[Build]:
    """Builds of the kernels from logits to tokens."""
    yield Build(
        "apply_bitmask",
        edits.apply_bitmask_kernel,
        {
            "logits": "*fp32",
            "mask": "*i32",
            "rows": "*i64",
            **dict.fromkeys(("vocab_size", "num_words", "logits_stride", "mask_stride"), "i32"),
        },
        {"BLOCK": config.bitmask.block_len},
        config.bitmask.num_warps,
        aligned=("vocab_size", "logits_stride"),
    )
    for name, absent in (
        ("greedy", ("mask", "lines", "parameters", "maxima")),
        ("temperature", ("mask", "lines", "maxima")),
        ("masked", ("lines", "maxima")),
        ("cuts", ("mask", "lines")),
        ("masked cuts", ()),
    ):
        yield from sample_builds(name, absent, config.draw)
    yield Build(
        "logit bias",
        edits.add_bias_kernel,
        {
            **dict.fromkeys(("logits", "values"), "*fp32"),
            **dict.fromkeys(("rows", "ids"), "*i64"),
            **dict.fromkeys(("count", "logits_stride"), "i32"),
        },
        {"BLOCK": edits.BLOCK},
        4,
    )
    yield Build(
        "penalties count",
        edits.count_tokens_kernel,
        {
            **dict.fromkeys(("counts", "ids"), "*i32"),
            **dict.fromkeys(("starts", "prompt_lens"), "*i64"),
            "vocab_size": "i32",
        },
        {"SEEN": 1 << 30, "BLOCK": edits.BLOCK},
        4,
    )
    yield Build(
        "penalties",
        edits.penalise_kernel,
        {
            **dict.fromkeys(("logits", "penalties"), "*fp32"),
            "counts": "*i32",
            "rows": "*i64",
            **dict.fromkeys(("num_lines", "vocab_size", "logits_stride"), "i32"),
        },
        {"SEEN": 1 << 30, "BLOCK": edits.BLOCK},
        4,
    )


def row_builds(arch: int, config: Config) -> Iterator[Build]:
    """Builds of the products of one row, and of the kernels that unpack weights."""
    has_fp8 = arch >= 89
    yield Build(
        "product int4, one row",
        row.int4_row_kernel,
        {
            "x": "*i64",
            "weight": "*i32",
            **dict.fromkeys(("scale", "zero"), "*fp16"),
            **dict.fromkeys(("bias", "out"), "*bf16"),
            **dict.fromkeys(("width_out", "num_groups", "bits"), "i32"),
        },
        {"HAS_BIAS": True, "BLOCK_N": config.row_int4.block_n, "BLOCK_K": config.row_int4.block_k},
        config.row_int4.num_warps,
        aligned=("width_out", "num_groups"),
    )
    for kind, stored in (("int8", "*i8"), ("fp8", "*u8"), ("", "*bf16")):
        shape = config.row_bytes if kind else config.row_dense
        yield Build(
            f"product {kind or 'bfloat16'}, one row",
            row.row_product_kernel,
            {
                **dict.fromkeys(("x", "out", "bias"), "*bf16"),
                "weight": stored,
                "scale": {"int8": "*fp16", "fp8": "*fp32", "": "*bf16"}[kind],
                **dict.fromkeys(("width_out", "width_in", "num_groups"), "i32"),
            },
            {
                "KIND": kind,
                "GROUP_LEN": {"int8": 32, "fp8": 128, "": 0}[kind],
                "HAS_BIAS": True,
                "HAS_FP8": has_fp8,
                "BLOCK_N": shape.block_n,
                "BLOCK_K": shape.block_k,
                "NUM_STAGES": shape.num_stages,
            },
            shape.num_warps,
            aligned=("width_out", "width_in"),
        )
    for kind, stored in (("int4", "*u8"), ("int8", "*i8"), ("fp8", "*u8")):
        yield Build(
            f"unpack {kind}",
            unpack.unpack_kernel,
            {
                "values": stored,
                **dict.fromkeys(("scale", "zero"), "*fp32" if kind == "fp8" else "*fp16"),
                "out": "*bf16",
                "num_chunks": "i32",
            },
            {
                "KIND": kind,
                "GROUP_LEN": 128 if kind == "fp8" else 32,
                "HAS_FP8": has_fp8,
                "BLOCK": unpack.BLOCK,
            },
            unpack.NUM_WARPS,
            aligned=("num_chunks",),
        )


def product_builds(arch: int, config: Config) -> Iterator[Build]:
    yield from row_builds(arch, config)
    for size, int4, other in (
        ("few", config.int4_few, config.bytes_few),
        ("many", config.quantized_many, config.quantized_many),
    ):
        for kind, stored, shape in (("int4", "*u8", int4), ("int8", "*i8", other), ("fp8", "*u8", other)):
            yield Build(
                f"product {kind}, {size} rows",
                quantized.quantized_product_kernel,
                {
                    **dict.fromkeys(("x", "out", "bias"), "*bf16"),
                    "weight": stored,
                    **dict.fromkeys(("scale", "zero"), "*fp32" if kind == "fp8" else "*fp16"),
                    **dict.fromkeys(("num_rows", "width_out", "width_in", "num_groups", "x_stride"), "i32"),
                },
                {
                    "KIND": kind,
                    "GROUP_LEN": 128 if kind == "fp8" else 32,
                    "HAS_BIAS": True,
                    "HAS_FP8": arch >= 89,
                    **_blocks(shape),
                },
                shape.num_warps,
                shape.num_stages,
                ("width_out", "width_in", "x_stride"),
            )
    sizes = ("width_out", "width_in", "scales_a_row", "divide", "x_stride", "out_stride")
    for size, shape in (("few", config.grouped_few), ("many", config.grouped_many), ("any", config.exact_grouped)):
        number = "*fp32" if size == "any" else "*bf16"
        for name, adds, stored in (
            ("", False, number),
            (" added", True, number),
            (" fp8", False, "*u8"),
            (" int8", False, "*i8"),
            (" int4", False, "*u8"),
        ):
            if size == "any" and stored != number:
                continue
            kind = "" if stored == number else name.strip()
            yield Build(
                f"grouped product{name}{' float32' * (size == 'any')}, {size} rows",
                grouped.grouped_product_kernel,
                {
                    **dict.fromkeys(("x", "out"), number),
                    "weight": stored,
                    **dict.fromkeys(("weight_scale", "weight_zero"), "*fp16" if kind.startswith("int") else "*fp32"),
                    **dict.fromkeys(("order", "block_groups", "block_firsts", "group_starts"), "*i32"),
                    "row_scale": "*fp32",
                    **dict.fromkeys(sizes, "i32"),
                },
                {
                    "KIND": kind,
                    "GROUP_LEN": {"": 0, "fp8": 128}.get(kind, 32),
                    "HAS_SCALE": True,
                    "HAS_FP8": arch >= 89,
                    "ADDS": adds,
                    **_blocks(shape, tl.float32 if size == "any" else tl.bfloat16),
                },
                shape.num_warps,
                shape.num_stages,
                ("width_out", "width_in", "x_stride", "out_stride"),
            )
    yield Build(
        "rows of 128 groups",
        grouped.group_rows_kernel,
        {
            **dict.fromkeys(("ids", "order", "starts", "block_groups", "block_firsts"), "*i32"),
            **dict.fromkeys(("num_rows", "num_groups", "num_blocks"), "i32"),
        },
        {"BINS": 256, "BLOCK_M": config.grouped_few.block_m, "BLOCK": grouped.GROUP_BLOCK},
        4,
    )
    yield Build(
        "route 8 of 128 experts",
        experts.route_kernel,
        {"logits": "*bf16", "weights": "*fp32", "ids": "*i32", "num_experts": "i32"},
        {"TOP_K": 8, "NORMALISE": True, "BLOCK": 128},
        1,
    )


def _blocks(shape: ProductConfig, products: tl.dtype = tl.bfloat16) -> dict[str, Any]:
    return {"BLOCK_M": shape.block_m, "BLOCK_N": shape.block_n, "BLOCK_K": shape.block_k, "PRODUCTS": products}


def resources(build: Build, arch: int) -> Resources:
    """Compile ``build`` for ``arch`` and return its resources. Needs no GPU."""
    names = build.kernel.arg_names
    signature = {name: "constexpr" if name in build.constants else build.types[name] for name in names}
    aligned = [name for name in names if signature[name].startswith("*") or name in build.aligned]
    source = ASTSource(
        build.kernel,
        signature,
        {(names.index(name),): value for name, value in build.constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": build.num_warps, "num_stages": build.num_stages, "maxnreg": build.max_registers}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(compiled.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        told = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    found = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", told)}
    return Resources(found["REG"], compiled.metadata.shared, found["STACK"], found["LOCAL"])


def table(archs: tuple[int, ...]) -> str:
    lines = [
        "# Registers and shared memory of the Triton kernels",
        "",
        "Made by `python -m benchmarks.kernel_resources` with Triton "
        + triton.__version__
        + ", ahead of time, bfloat16.",
        "",
        "| kernel | architecture | warps | registers | shared memory, bytes | spilled |",
        "|---|---|---|---|---|---|",
    ]
    for arch in archs:
        for build in builds(arch):
            found = resources(build, arch)
            spilled = found.stack + found.local
            lines.append(
                f"| {build.name} | sm_{arch} | {build.num_warps} | {found.registers} | {found.shared:,} | {spilled} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / "kernel_resources.md")
    arguments = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise SystemExit("TRITON_INTERPRET=1 is set: interpreted kernels cannot be compiled; unset it")
    text = table(tuple(CONFIGS))
    arguments.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
