"""The engine: programs of ops in, text and numbers out, one step at a time."""

from .engine import Engine

__all__ = ["Engine"]
