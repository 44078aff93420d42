"""Which sequence computes which tokens in the next step. No torch, no sockets."""

from .draft import Draft
from .plan import PlanRow, StepPlan
from .scheduler import PoolTooSmall, Scheduler, SchedulerConfig
from .sequence import Sequence, TokenBuffer
from .waiting import ORDERS

__all__ = [
    "ORDERS",
    "Draft",
    "PlanRow",
    "PoolTooSmall",
    "Scheduler",
    "SchedulerConfig",
    "Sequence",
    "StepPlan",
    "TokenBuffer",
]
