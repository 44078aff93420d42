"""The engine: programs of ops in, text and numbers out, one step at a time."""

from .engine import EngineCore
from .warm_up import ready_engine

__all__ = ["EngineCore", "ready_engine"]
