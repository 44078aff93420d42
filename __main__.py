"""``python -m phloem`` is the command ``phloem``."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
