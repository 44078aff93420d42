"""Launch parameters of the kernels by architecture: fixed tables, not tuned on the user's machine.

The tests compile each entry ahead of time for its architecture; it must not spill a register.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """``block_m`` query vectors (tokens times the query heads of a KV head) against ``block_n`` keys at a time."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    split_len: int = 0  # keys of one program; 0: all
    block_n_fp8: int = 0  # block_n for a pool of 8-bit floats, whose decoding takes registers; 0: block_n
    max_registers: int = 0  # of a thread, so that more programs run at a time; 0: as many as it takes


@dataclass(frozen=True, slots=True)
class ProductConfig:
    """A block of ``block_m`` rows by ``block_n`` columns of results, ``block_k`` terms at a time."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Config:
    """One architecture's parameters. An elementwise program has ``elementwise_block`` elements."""

    decode: AttentionConfig
    prefill: AttentionConfig
    shared: AttentionConfig  # a prefix that many rows have in common
    wide_decode: AttentionConfig  # of heads of more than 256 dimensions
    wide_prefill: AttentionConfig
    quantized_few: ProductConfig  # of up to 16 rows: weights are what is read
    quantized_many: ProductConfig
    grouped_few: ProductConfig  # of up to 16 rows a group
    grouped_many: ProductConfig
    elementwise_block: int = 1024
    elementwise_warps: int = 4
    shared_least_bytes: int = 8 << 20  # one more launch in each layer costs about 2 us: 8 MiB at 4 TB/s


CONFIGS = {
    80: Config(
        decode=AttentionConfig(block_m=16, block_n=64, num_warps=4, num_stages=2, split_len=512),
        prefill=AttentionConfig(block_m=128, block_n=64, block_n_fp8=32, num_warps=8, num_stages=2),
        shared=AttentionConfig(block_m=128, block_n=64, block_n_fp8=32, num_warps=8, num_stages=2, split_len=512),
        wide_decode=AttentionConfig(block_m=16, block_n=16, num_warps=8, num_stages=2, split_len=512),
        wide_prefill=AttentionConfig(block_m=16, block_n=16, num_warps=8, num_stages=2),
        quantized_few=ProductConfig(block_m=16, block_n=32, block_k=128, num_warps=4, num_stages=3),
        quantized_many=ProductConfig(block_m=64, block_n=64, block_k=64, num_warps=4, num_stages=3),
        grouped_few=ProductConfig(block_m=16, block_n=64, block_k=128, num_warps=4, num_stages=3),
        grouped_many=ProductConfig(block_m=64, block_n=128, block_k=64, num_warps=8, num_stages=3),
    ),
    90: Config(
        decode=AttentionConfig(block_m=16, block_n=128, block_n_fp8=64, num_warps=4, num_stages=2, split_len=1024),
        prefill=AttentionConfig(block_m=128, block_n=64, num_warps=8, num_stages=3),
        shared=AttentionConfig(block_m=128, block_n=64, num_warps=8, num_stages=3, split_len=512),
        wide_decode=AttentionConfig(block_m=16, block_n=32, block_n_fp8=16, num_warps=16, num_stages=2, split_len=1024),
        wide_prefill=AttentionConfig(block_m=16, block_n=32, block_n_fp8=16, num_warps=16, num_stages=2),
        quantized_few=ProductConfig(block_m=16, block_n=32, block_k=256, num_warps=4, num_stages=4),
        quantized_many=ProductConfig(block_m=64, block_n=64, block_k=64, num_warps=4, num_stages=4),
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
