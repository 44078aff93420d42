"""The engine: takes programs of ops, runs one step at a time, and answers with text and numbers."""

from .engine import EngineCore
from .warm_up import ready_engine

__all__ = ["EngineCore", "ready_engine"]
