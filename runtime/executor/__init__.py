"""Step plan in, logits and tokens out."""

from .accelerator import Accelerator, Readback
from .executor import Drawn, Executor, SampledToken, SampleRow
from .step_logits import StepLogits

__all__ = ["Accelerator", "Drawn", "Executor", "Readback", "SampleRow", "SampledToken", "StepLogits"]
