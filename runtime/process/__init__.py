"""The engine as a process of its own: the loop, the child's main function, and the parent's handle."""

from .launcher import EngineProcess
from .loop import run_engine, serve_engine
from .python_process import LIBRARIES, PythonProcess

__all__ = ["EngineProcess", "PythonProcess", "LIBRARIES", "run_engine", "serve_engine"]
