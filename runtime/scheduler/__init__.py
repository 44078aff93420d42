"""Which sequence computes which tokens in the next step. No torch, no sockets."""

from .plan import PlanRow, StepPlan
from .scheduler import PoolTooSmall, Scheduler, SchedulerConfig
from .sequence import Sequence, TokenBuffer
from .waiting import ORDERS

__all__ = ["ORDERS", "PlanRow", "PoolTooSmall", "Scheduler", "SchedulerConfig", "Sequence", "StepPlan", "TokenBuffer"]
