"""The least bytes and flops of each kernel, and the time that a device needs for them.

Bytes count each input and output once, as if a cache served repeated reads. A multiply-add is two flops.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """A device's measured rates: bytes/s of a memory copy, and flops/s of bfloat16 matrix products."""

    name: str
    copy: float
    flops: float


H200 = DeviceSpec("H200", copy=4.3e12, flops=790e12)


@dataclass(frozen=True, slots=True)
class Work:
    bytes: float
    flops: float = 0.0

    def seconds(self, device: DeviceSpec) -> float:
        """The roofline: the larger of the times to move the bytes and to compute the flops."""
        return max(self.bytes / device.copy, self.flops / device.flops)

    def bound(self, device: DeviceSpec) -> str:
        return "memory" if self.bytes / device.copy >= self.flops / device.flops else "compute"


def attention(
    kv_lens: Sequence[int],
    num_queries: Sequence[int],
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    element: int = 2,
    window: int = 0,
) -> Work:
    """Rows of ``kv_lens`` tokens; the last ``num_queries`` of each are queries. ``element``: bytes per number."""
    keys = seen = 0
    for length, queries in zip(kv_lens, num_queries, strict=True):
        first = length - queries  # the first query's position; it sees first + 1 keys
        reach = window or length
        keys += length - max(first + 1 - reach, 0)
        seen += sum(min(position + 1, reach) for position in range(first, length))
    tokens = sum(num_queries)
    moved = 2 * keys * num_kv_heads * head_dim * element + 2 * tokens * num_heads * head_dim * element
    moved += 4 * keys + 4 * 3 * len(kv_lens)  # the slot table, row ids, starts and lengths
    return Work(moved, 4.0 * seen * num_heads * head_dim)


def shared_prefix_attention(
    prefix_len: int, kv_lens: Sequence[int], *, num_heads: int, num_kv_heads: int, head_dim: int, element: int = 2
) -> Work:
    """One new token a row, the first ``prefix_len`` keys read once for all rows."""
    shape = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "element": element}
    whole = attention(kv_lens, [1] * len(kv_lens), **shape)
    twice = (len(kv_lens) - 1) * prefix_len * (2 * num_kv_heads * head_dim * element + 4)
    return Work(whole.bytes - twice, whole.flops)


def rms_norm(rows: int, width: int, *, element: int = 2, residual_element: int = 0) -> Work:
    """``residual_element`` 0: without a residual."""
    return Work(rows * width * (2 * element + 2 * residual_element) + 4 * width, 6.0 * rows * width)


def rope_write_kv(tokens: int, *, num_heads: int, num_kv_heads: int, head_dim: int, element: int = 2) -> Work:
    moved = tokens * head_dim * element * (2 * num_heads + 4 * num_kv_heads) + tokens * (4 * head_dim + 16)
    return Work(moved, 3.0 * tokens * head_dim * (num_heads + num_kv_heads))


def silu_mul(rows: int, width: int, *, element: int = 2) -> Work:
    return Work(3 * rows * width * element, 5.0 * rows * width)


# Including scales, and offsets for int4.
_WEIGHT_BYTES = {"int4": 0.5 + 4 / 32, "int8": 1 + 2 / 32, "fp8": 1 + 4 / 128, "bfloat16": 2.0}


def quantized_product(rows: int, width_in: int, width_out: int, *, kind: str, element: int = 2) -> Work:
    """``kind``: int4, int8 or fp8, in groups of 32, 32 and 128 weights; or bfloat16."""
    moved = width_in * width_out * _WEIGHT_BYTES[kind] + element * rows * (width_in + width_out)
    return Work(moved, 2.0 * rows * width_in * width_out)


def mix_experts(tokens: int, *, hidden: int, inner: int, top_k: int, taken: int, element: int = 2) -> Work:
    """``taken``: the number of distinct experts that the tokens use. The weights of each are read once."""
    moved = element * (3 * hidden * inner * taken + 2 * tokens * hidden) + 8 * tokens * top_k
    return Work(moved, 6.0 * tokens * top_k * hidden * inner)


def add_adapters(tokens: int, width_in: int, width_out: int, *, rank: int, adapters: int, element: int = 2) -> Work:
    """``adapters``: the number of distinct adapters. Every token uses one."""
    moved = element * (adapters * rank * (width_in + width_out) + tokens * (width_in + 2 * width_out)) + 12 * tokens
    return Work(moved, 2.0 * tokens * rank * (width_in + width_out))


def apply_bitmask(rows: int, vocab_size: int, *, forbidden: float = 1.0) -> Work:
    """``forbidden``: the share of tokens whose logits are overwritten. Logits of allowed tokens are not read."""
    return Work(rows * (vocab_size / 8 + 4 * vocab_size * forbidden))


def sample(rows: int, vocab_size: int) -> Work:
    """Logits are read from memory once; the L2 cache serves the later passes over a row."""
    return Work(4.0 * rows * vocab_size + 60.0 * rows, 10.0 * rows * vocab_size)


def penalties(rows: int, vocab_size: int, *, seen: int) -> Work:
    """``seen``: distinct tokens per row. The kernel clears and reads the table of counts and changes seen logits."""
    return Work(rows * (8.0 * vocab_size + 12.0 * seen))
