"""Which sequence computes which tokens in the next step. No torch, no sockets."""

from .plan import PlanRow, StepPlan
from .scheduler import PoolTooSmall, Scheduler, SchedulerConfig
from .sequence import Sequence, TokenBuffer

__all__ = ["PlanRow", "PoolTooSmall", "Scheduler", "SchedulerConfig", "Sequence", "StepPlan", "TokenBuffer"]
