"""Profiling: runs an engine under a synthetic load and shows where a step's time goes."""

from .load import Load, LoadResult, run_load
from .spans import Spans
from .watch import profile_lines, watch

__all__ = ["Load", "LoadResult", "Spans", "profile_lines", "run_load", "watch"]
