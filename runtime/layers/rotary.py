"""Cosines and sines of rotary position embedding (Su et al., 2021) by position."""

import math

import torch

from ...protocol.errors import Unsupported
from ..weights.model_config import FactorsRope, LinearRope, Llama3Rope, LongRope, ModelConfig, YarnRope


def cos_sin_table(config: ModelConfig, num_positions: int, *, device: torch.device | str = "cpu") -> torch.Tensor:
    """float32 [num_positions, D]: the D/2 cosines, then the D/2 sines, of each position. D: dimensions that rotate."""
    frequencies, magnitude = rope_frequencies(config, num_positions)
    return (rotations(frequencies, num_positions) * magnitude).to(device)


def rotations(frequencies: torch.Tensor, num_positions: int) -> torch.Tensor:
    """float32 [num_positions, D]: ``cos_sin_table`` of the radians that a position adds to each pair [D/2]."""
    angles = torch.arange(num_positions, dtype=torch.float32).unsqueeze(1) * frequencies  # [positions, D/2]
    return torch.cat((angles.cos(), angles.sin()), dim=1)


def plain_frequencies(dim: int, theta: float) -> torch.Tensor:
    """The radians that a position adds to each of the ``dim`` / 2 pairs, without scaling; float32."""
    return 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))


def unrotated_table(num_positions: int, *, device: torch.device | str = "cpu") -> torch.Tensor:
    """As ``cos_sin_table``, but it rotates nothing: one pair of each head, by the angle 0."""
    return torch.tensor([[1.0, 0.0]]).repeat(num_positions, 1).to(device)


def rope_frequencies(config: ModelConfig, num_positions: int = 0) -> tuple[torch.Tensor, float]:
    """The radians that a position adds to each of the D/2 pairs (float32), and the factor of the rotated vectors.

    ``num_positions`` chooses between LongRoPE's two sets of factors.
    """
    theta = config.rope_theta
    plain = plain_frequencies(config.rotary, theta)
    match config.rope_scaling:
        case LinearRope(factor=factor):
            return plain / factor, 1.0
        case FactorsRope(factors=factors):
            return plain / _factors(factors, plain), 1.0
        case LongRope() as scaling:
            factors = scaling.long if num_positions > scaling.original_max_positions else scaling.short
            return plain / _factors(factors, plain), scaling.magnitude
        case Llama3Rope() as scaling:
            return _llama3(plain, scaling), 1.0
        case YarnRope() as scaling:
            magnitude = scaling.attention_factor or (0.1 * math.log(scaling.factor) + 1 if scaling.factor > 1 else 1.0)
            return _yarn(plain, scaling, theta), magnitude
    return plain, 1.0


def _factors(factors: tuple[float, ...], plain: torch.Tensor) -> torch.Tensor:
    if len(factors) != len(plain):
        raise Unsupported(f"rope scaling: {len(factors)} factors for {len(plain)} pairs of rotated dimensions")
    return torch.tensor(factors, dtype=torch.float32)


def _llama3(plain: torch.Tensor, scaling: Llama3Rope) -> torch.Tensor:
    turns = scaling.original_max_positions * plain / (2 * math.pi)  # full turns within the trained context
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0, 1)  # 0: fewer than low turns, slowed down; 1: more than high, kept
    return (1 - blend) * plain / scaling.factor + blend * plain


def _yarn(plain: torch.Tensor, scaling: YarnRope, theta: float) -> torch.Tensor:
    dim = 2 * plain.shape[0]

    def pair_of(turns: float) -> float:
        """The (fractional) pair that makes ``turns`` full turns within the trained context."""
        return dim * math.log(scaling.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    ramp = ramp.clamp(0, 1)  # 0: extrapolate, 1: interpolate
    return plain / scaling.factor * ramp + plain * (1 - ramp)
