"""``python -m phloem`` is the command ``phloem``. Ctrl-C ends it in one line also while its modules are imported."""

import gc
import sys

INTERRUPTED = 130  # 128 and the number of SIGINT, as shells have it


def main() -> int:
    try:
        from .cli import main as run

        code = run()
        gc.freeze()  # the interpreter's last collection of millions of objects would take seconds
        return code
    except KeyboardInterrupt:
        sys.stderr.write("phloem: error: interrupted\n")
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
