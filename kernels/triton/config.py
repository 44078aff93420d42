"""Launch parameters of the kernels by architecture: tables that are shipped. Never tuned on a user's machine.

Each entry is compiled ahead of time by the tests for its architecture and must not spill a register.
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


@dataclass(frozen=True, slots=True)
class Config:
    """One architecture's. Elementwise kernels take ``elementwise_block`` elements a program."""

    decode: AttentionConfig
    prefill: AttentionConfig
    elementwise_block: int = 1024
    elementwise_warps: int = 4


CONFIGS = {
    80: Config(
        decode=AttentionConfig(block_m=16, block_n=64, num_warps=4, num_stages=2, split_len=512),
        prefill=AttentionConfig(block_m=128, block_n=64, num_warps=8, num_stages=2),
    ),
    90: Config(
        decode=AttentionConfig(block_m=16, block_n=128, num_warps=4, num_stages=2, split_len=1024),
        prefill=AttentionConfig(block_m=128, block_n=64, num_warps=8, num_stages=3),
    ),
}


def config_of(device: torch.device) -> Config:
    """The table of the newest architecture that is not newer than the device; under the interpreter the first."""
    if device.type != "cuda":
        return CONFIGS[80]
    major, minor = torch.cuda.get_device_capability(device)
    fitting = [arch for arch in CONFIGS if arch <= 10 * major + minor]
    return CONFIGS[max(fitting, default=80)]
