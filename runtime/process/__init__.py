"""The engine as a process of its own: the loop, the child's main, and the parent's hold on it."""

from .launcher import EngineProcess
from .loop import run_engine, serve_engine

__all__ = ["EngineProcess", "run_engine", "serve_engine"]
