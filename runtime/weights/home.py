"""Where fetched models are kept. The one place outside the command line that asks the environment."""

import os
from pathlib import Path


def default_home() -> Path:
    """``$PHLOEM_HOME``, or ``~/.cache/phloem``: a program finds what ``phloem pull`` has fetched."""
    named = os.environ.get("PHLOEM_HOME")
    return Path(named).expanduser().absolute() if named else Path.home() / ".cache" / "phloem"
