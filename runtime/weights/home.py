"""Where fetched models are kept. Apart from the command line, only this module reads the environment."""

import os
from pathlib import Path


def default_home() -> Path:
    """``$PHLOEM_HOME``, or ``~/.cache/phloem``, so that a program finds the models of ``phloem pull``."""
    named = os.environ.get("PHLOEM_HOME")
    return Path(named).expanduser().absolute() if named else Path.home() / ".cache" / "phloem"
