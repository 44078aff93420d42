"""Predictions for a model on a machine, without running it: step times, batches, throughput and replicas."""

from .capacity import Capacity, Goal, best_split, find_capacity
from .hardware import HARDWARE, Hardware
from .shapes import SHAPES, ModelShape
from .step_time import StepTime, step_time

__all__ = [
    "HARDWARE",
    "SHAPES",
    "Capacity",
    "Goal",
    "Hardware",
    "ModelShape",
    "StepTime",
    "best_split",
    "find_capacity",
    "step_time",
]
