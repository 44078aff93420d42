"""Launch parameters of the kernels by architecture: fixed tables, not tuned on the user's machine.

The tests compile each entry ahead of time for its architecture; it must not spill a register.
"""

from dataclasses import dataclass, replace
from typing import Self

import torch

LARGE = 128  # heads of more dimensions, such as Gemma's 256, have blocks of their own
WIDE = 256  # and so have those of even more, e.g. latent attention's 576


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """``block_m`` query vectors (tokens times the query heads of a KV head) against ``block_n`` keys at a time."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    split_len: int = 0  # keys of one program; 0: all
    block_n_fp8: int = 0  # block_n for a pool of 8-bit floats, whose decoding takes registers; 0: block_n
    max_registers: int = 0  # of a thread, for a pool of 16-bit floats: more programs run at once; 0: no limit
    two_loops: bool = True  # prefill: keys that every query of a block sees have a loop of their own, without masks


@dataclass(frozen=True, slots=True)
class AttentionShapes:
    """For heads of some sizes. ``shared``: a prefix that many rows have in common."""

    decode: AttentionConfig
    prefill: AttentionConfig
    shared: AttentionConfig


@dataclass(frozen=True, slots=True)
class ProductConfig:
    """A block of ``block_m`` rows by ``block_n`` columns of results, ``block_k`` terms at a time."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class RowConfig:
    """A product of one row: ``block_n`` results of a program, ``block_k`` terms at a time.

    A thread reads 16 stored bytes of each of four results. With many terms and few results a program, a narrow weight
    has enough programs too.
    """

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int = 1

    def of_width(self, width_in: int) -> Self:
        """For a weight of ``width_in`` terms: a block with more terms than that has fewer, of more results."""
        block_n, block_k = self.block_n, self.block_k
        while block_k > 32 * 32 and width_in <= block_k // 2:  # a warp has a group in each thread
            block_n, block_k = 2 * block_n, block_k // 2
        return replace(self, block_n=block_n, block_k=block_k)


@dataclass(frozen=True, slots=True)
class BlockConfig:
    """``block_len`` elements at a time."""

    block_len: int
    num_warps: int


@dataclass(frozen=True, slots=True)
class DrawConfig:
    """A first kernel has a program for every ``part_len`` logits, a second one for every row."""

    part_len: int = 4096
    part_warps: int = 4
    row_warps: int = 8
    block_len: int = 1024  # logits of a step of a pass over candidates; twice as many spill registers
    num_pivots: int = 4  # that a pass weighs; a power of two
    capacity: int = 8192  # candidates of a row that are listed


@dataclass(frozen=True, slots=True)
class Config:
    """One architecture's parameters."""

    attention: AttentionShapes  # of heads of up to LARGE dimensions
    large_attention: AttentionShapes
    wide_attention: AttentionShapes  # of heads of more than WIDE dimensions
    exact_attention: AttentionShapes  # in float32, of heads that are not wide
    exact_wide_attention: AttentionShapes
    row_int4: RowConfig  # a program has four times block_n results
    row_bytes: RowConfig  # of 8-bit weights
    row_dense: RowConfig
    row_dense_least: int  # terms of a row; with fewer, torch's product is as fast
    most_unpacked_in_registers: int  # rows of a product; for more, weights are unpacked to memory
    int4_few: ProductConfig  # of up to 16 rows: reading the weights takes the time
    bytes_few: ProductConfig
    quantized_many: ProductConfig
    grouped_few: ProductConfig  # of up to 16 rows a group
    grouped_many: ProductConfig
    exact_grouped: ProductConfig = ProductConfig(block_m=16, block_n=64, block_k=32, num_warps=4, num_stages=2)
    elementwise: BlockConfig = BlockConfig(block_len=1024, num_warps=4)
    bitmask: BlockConfig = BlockConfig(block_len=4096, num_warps=4)
    join: BlockConfig = BlockConfig(block_len=16, num_warps=1)  # parts of a query's result
    draw: DrawConfig = DrawConfig()
    busy_programs: int = 512  # that keep a large device busy, about
    shared_least_bytes: int = 8 << 20  # one more launch in each layer costs about 2 us: 8 MiB at 4 TB/s

    def attention_of(self, head_dim: int, dtype: torch.dtype) -> AttentionShapes:
        """``dtype``: of the queries. Products in float32 are not rounded to TF32, and so need registers, not tiles."""
        if dtype == torch.float32:
            return self.exact_wide_attention if head_dim > WIDE else self.exact_attention
        if head_dim > WIDE:
            return self.wide_attention
        return self.large_attention if head_dim > LARGE else self.attention

    def with_splits(self, split_len: int, *, block_n: int) -> Self:
        """Contexts and prefixes of all heads cut after ``split_len`` keys, and large pieces of prefixes, for tests."""

        def cut(shapes: AttentionShapes) -> AttentionShapes:
            decode = replace(shapes.decode, split_len=split_len, block_n=block_n)
            shared = replace(shapes.shared, split_len=split_len, block_n=block_n, block_m=128)
            return replace(shapes, decode=decode, shared=shared)

        return replace(
            self,
            attention=cut(self.attention),
            large_attention=cut(self.large_attention),
            wide_attention=cut(self.wide_attention),
            exact_attention=cut(self.exact_attention),
            exact_wide_attention=cut(self.exact_wide_attention),
        )


def _shapes(decode: AttentionConfig, prefill: AttentionConfig, *, chunk_len: int) -> AttentionShapes:
    """Decoding in splits of ``chunk_len`` keys; chunks of a shared prefix in prefill's blocks."""
    shared = replace(prefill, split_len=chunk_len, max_registers=0)
    return AttentionShapes(replace(decode, split_len=chunk_len), prefill, shared)


def _wide(shape: AttentionConfig, *, chunk_len: int) -> AttentionShapes:
    """Wide heads leave no registers for a second loop."""
    return _shapes(shape, replace(shape, two_loops=False), chunk_len=chunk_len)


def _exact(chunk_len: int) -> tuple[AttentionShapes, AttentionShapes]:
    """In float32, of heads that are not wide and of wide ones."""
    decode = AttentionConfig(block_m=16, block_n=32, num_warps=8, num_stages=1)
    prefill = AttentionConfig(block_m=32, block_n=16, num_warps=8, num_stages=1)
    wide = AttentionConfig(block_m=16, block_n=16, num_warps=8, num_stages=1)
    shapes = _shapes(decode, prefill, chunk_len=chunk_len)
    shapes = replace(shapes, shared=replace(shapes.shared, num_warps=16))
    return shapes, _wide(wide, chunk_len=chunk_len)


CONFIGS = {
    80: Config(
        attention=_shapes(
            AttentionConfig(block_m=16, block_n=64, num_warps=4, num_stages=2),
            AttentionConfig(block_m=128, block_n=64, block_n_fp8=32, num_warps=8, num_stages=2),
            chunk_len=512,
        ),
        large_attention=_shapes(
            AttentionConfig(block_m=16, block_n=64, num_warps=4, num_stages=2),
            AttentionConfig(block_m=64, block_n=32, num_warps=8, num_stages=2, two_loops=False),
            chunk_len=512,
        ),
        wide_attention=_wide(AttentionConfig(block_m=16, block_n=16, num_warps=8, num_stages=2), chunk_len=512),
        exact_attention=_exact(512)[0],
        exact_wide_attention=_exact(512)[1],
        row_int4=RowConfig(block_n=1, block_k=4096, num_warps=4),
        row_bytes=RowConfig(block_n=4, block_k=2048, num_warps=4),
        row_dense=RowConfig(block_n=4, block_k=1024, num_warps=4),
        row_dense_least=4096,
        most_unpacked_in_registers=64,
        int4_few=ProductConfig(block_m=16, block_n=32, block_k=128, num_warps=4, num_stages=3),
        bytes_few=ProductConfig(block_m=16, block_n=32, block_k=128, num_warps=4, num_stages=3),
        quantized_many=ProductConfig(block_m=64, block_n=64, block_k=64, num_warps=4, num_stages=3),
        grouped_few=ProductConfig(block_m=16, block_n=64, block_k=128, num_warps=4, num_stages=3),
        grouped_many=ProductConfig(block_m=64, block_n=128, block_k=64, num_warps=8, num_stages=3),
    ),
    90: Config(
        attention=AttentionShapes(
            decode=AttentionConfig(block_m=16, block_n=128, num_warps=4, num_stages=2, split_len=1024),
            prefill=AttentionConfig(block_m=128, block_n=64, num_warps=8, num_stages=2, max_registers=128),
            shared=AttentionConfig(block_m=128, block_n=64, num_warps=8, num_stages=3, split_len=1024),
        ),
        large_attention=AttentionShapes(
            decode=AttentionConfig(block_m=16, block_n=64, num_warps=4, num_stages=3, split_len=512),
            prefill=AttentionConfig(block_m=128, block_n=64, block_n_fp8=32, num_warps=8, num_stages=2),
            shared=AttentionConfig(block_m=64, block_n=64, block_n_fp8=32, num_warps=8, num_stages=2, split_len=512),
        ),
        wide_attention=_wide(
            AttentionConfig(block_m=16, block_n=32, block_n_fp8=16, num_warps=16, num_stages=2), chunk_len=1024
        ),
        exact_attention=_exact(1024)[0],
        exact_wide_attention=_exact(1024)[1],
        row_int4=RowConfig(block_n=1, block_k=2048, num_warps=2),
        row_bytes=RowConfig(block_n=4, block_k=1024, num_warps=2),
        row_dense=RowConfig(block_n=4, block_k=1024, num_warps=4),
        row_dense_least=4096,
        most_unpacked_in_registers=64,
        int4_few=ProductConfig(block_m=16, block_n=64, block_k=256, num_warps=4, num_stages=3),
        bytes_few=ProductConfig(block_m=16, block_n=32, block_k=256, num_warps=4, num_stages=4),
        quantized_many=ProductConfig(block_m=64, block_n=64, block_k=128, num_warps=4, num_stages=3),
        grouped_few=ProductConfig(block_m=16, block_n=64, block_k=128, num_warps=4, num_stages=4),
        grouped_many=ProductConfig(block_m=64, block_n=128, block_k=64, num_warps=8, num_stages=4),
    ),
}


def config_of(device: torch.device) -> Config:
    """The table of the newest architecture that is not newer than the device; sm_80's under the interpreter."""
    if device.type != "cuda":
        return CONFIGS[80]
    major, minor = torch.cuda.get_device_capability(device)
    fitting = [arch for arch in CONFIGS if arch <= 10 * major + minor]
    return CONFIGS[max(fitting, default=80)]
