"""Where a step's time goes: an engine under a load of its own, its spans, and their trace."""

from .load import Load, LoadResult, run_load
from .spans import Spans
from .watch import profile_lines, watch

__all__ = ["Load", "LoadResult", "Spans", "profile_lines", "run_load", "watch"]
