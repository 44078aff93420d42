"""The executor: runs a step plan and draws tokens from its logits."""

from .accelerator import Accelerator, Readback
from .executor import DrawArrays, Executor, SampledToken, SampleRow, StepDraws
from .step_logits import StepLogits

__all__ = ["Accelerator", "DrawArrays", "StepDraws", "Executor", "Readback", "SampleRow", "SampledToken", "StepLogits"]
