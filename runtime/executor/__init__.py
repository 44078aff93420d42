"""Step plan in, logits and tokens out."""

from .executor import Executor, SampledToken, SampleRow

__all__ = ["Executor", "SampleRow", "SampledToken"]
