"""Step plan in, logits and tokens out."""

from .accelerator import Accelerator, Readback
from .executor import Drawn, Executor, SampledToken, SampleRow

__all__ = ["Accelerator", "Drawn", "Executor", "Readback", "SampleRow", "SampledToken"]
