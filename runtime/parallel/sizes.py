"""From which sizes on ranks work in another way: numbers that plans know too."""

from math import sqrt

SUM_BY_PARTS = 1 << 16  # numbers: above it each rank adds one part of the tensor and sends the result
GPU_SUM_BY_PARTS = 1 << 18  # the same where a collective takes 12 µs and links send 340 GB/s: predicted
SHARED_TOKENS = 16  # of each sequence-parallel rank: where it would run fewer of a step's tokens, it runs all of them
READ_TOKENS = 8.0  # on a CPU products take as long for one token as for so many: the weights are read
GPU_READ_TOKENS = 240.0  # the same, of 16-bit weights on an H100


def num_micro_steps(num_stages: int, num_tokens: float, *, read_tokens: float = READ_TOKENS) -> int:
    """The number M that takes the least time: (M + P - 1) turns, of each (``read_tokens`` + T / M) tokens' time."""
    best = round(sqrt((num_stages - 1) * num_tokens / read_tokens))
    return max(1, min(best, int(num_tokens)))
