"""The executor: runs a step plan and draws tokens from its logits."""

from .accelerator import Accelerator, Readback
from .executor import DrawArrays, Drawn, Executor, SampledToken, SampleRow
from .step_logits import StepLogits

__all__ = ["Accelerator", "DrawArrays", "Drawn", "Executor", "Readback", "SampleRow", "SampledToken", "StepLogits"]
