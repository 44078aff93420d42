"""The child process: ``python -m phloem.runtime.process.engine_main`` with its configuration on standard input.

parent -> stdin:   one line of JSON {"config": ..., "url": ..., "factory": ...}, then kept open; its end is the
                   parent's death, and then this process ends too
child -> stdout:   one line of JSON {"url": ...} or {"error": {...}}; nothing after
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import threading

import msgspec

from ..config import EngineConfig
from ..protocol.errors import ErrorInfo, InternalError, PhloemError
from .loop import run_engine


class Order(msgspec.Struct, frozen=True, omit_defaults=True):
    """``factory`` ("module:callable") makes another engine than the real one from the config."""

    config: EngineConfig
    url: str
    factory: str = ""


class Ready(msgspec.Struct, frozen=True, omit_defaults=True):
    url: str = ""
    error: ErrorInfo | None = None


def main() -> int:
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=Order)
    form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=order.config.log_level.upper(), format=form, stream=sys.stderr)
    # What is printed by libraries must not reach the parent's line.
    answer = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    make = None
    if order.factory:
        module, _, name = order.factory.partition(":")
        make = getattr(importlib.import_module(module), name)

    def say(ready: Ready) -> None:
        answer.write(msgspec.json.encode(ready) + b"\n")
        answer.close()

    try:
        return run_engine(order.config, order.url, on_ready=lambda url: say(Ready(url)), make_engine=make)
    except PhloemError as error:
        if answer.closed:
            raise
        say(Ready(error=error.info()))
        return 2
    except Exception as error:
        if answer.closed:
            raise
        logging.getLogger(__name__).exception("the engine could not start")
        say(Ready(error=InternalError(f"the engine could not start: {type(error).__name__}: {error}").info()))
        return 1


def _end_with_parent() -> None:
    while sys.stdin.buffer.read(4096):
        pass
    os._exit(3)


if __name__ == "__main__":
    sys.exit(main())
