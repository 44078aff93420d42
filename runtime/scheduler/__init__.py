"""The scheduler: which sequence computes which tokens in the next step. Imports no torch."""

from .config import SchedulerConfig
from .counters import Histogram, SchedulerCounters
from .plan import MAX_DRAFT_TOKENS, DecodePart, Draft, PlanRow, StepPlan
from .scheduler import Scheduler
from .sequence import PoolTooSmall, Sequence, TokenBuffer
from .waiting import ORDERS

__all__ = [
    "MAX_DRAFT_TOKENS",
    "ORDERS",
    "DecodePart",
    "Draft",
    "Histogram",
    "PlanRow",
    "PoolTooSmall",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerCounters",
    "Sequence",
    "StepPlan",
    "TokenBuffer",
]
