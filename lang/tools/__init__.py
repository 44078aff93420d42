"""Tools: Python functions that a model may call, the calls it writes, and loops of calls and results."""
