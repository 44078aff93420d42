"""Predictions for a model on a machine, without running it: step times, batches, throughput and replicas."""

from .capacity import Capacity, DeviceSplit, Goal, best_split, find_capacity
from .hardware import HARDWARE, Hardware
from .shapes import KV_BYTES, SHAPES, ModelShape
from .step_time import StepTime, step_time

__all__ = [
    "HARDWARE",
    "KV_BYTES",
    "SHAPES",
    "Capacity",
    "Goal",
    "Hardware",
    "ModelShape",
    "DeviceSplit",
    "StepTime",
    "best_split",
    "find_capacity",
    "step_time",
]
