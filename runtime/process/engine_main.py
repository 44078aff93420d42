"""The main function of the child process that ``EngineProcess`` starts.

arguments:         the folder that the parent made for it, and the modules that the child imports before it reads its
                   order
parent -> stdin:   one line of JSON, an ``Order``, then kept open; ``STOP`` once the engine is to end. The pipe's end is
                   the parent's death, and then this process ends too
child -> stdout:   lines of JSON: ``Loading`` while that takes long, and at the end one ``Ready``; nothing after
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import logging
import os
import shutil
import signal
import sys
import threading
import time

import msgspec

from ...protocol.address import ServerKeys
from ...protocol.errors import EngineLost, ErrorInfo, InternalError, PhloemError
from ..config import EngineConfig
from ..parallel.child import wait_for_parents_end
from ..parallel.lost import GANG_LOST, GangLost
from .loop import run_engine

STOP = b"stop\n"
LAST_STEP_S = 2.0


class Order(msgspec.Struct, frozen=True, omit_defaults=True):
    """``factory`` ("module:callable") makes another engine than the real one: a ``MakeEngine``.

    ``folder`` is the parent's, for the time of this process; the child removes it when the parent no longer can.
    ``has_private_events``: subscribers to the cache events need ``keys``.
    """

    config: EngineConfig
    url: str
    parent_pid: int
    folder: str
    factory: str = ""
    keys: ServerKeys | None = None
    has_private_events: bool = False


class Loading(msgspec.Struct, frozen=True, tag=True):
    """Progress: ``done`` of ``total`` parts of ``what``."""

    what: str
    done: int
    total: int


class Ready(msgspec.Struct, frozen=True, omit_defaults=True, tag=True):
    url: str = ""
    error: ErrorInfo | None = None


Told = Loading | Ready


def run(ready_fd: int) -> None:
    gc.disable()  # until the engine is ready: all that loading makes stays
    folder, *modules = sys.argv[1:]
    for module in modules:
        importlib.import_module(module)
    line = sys.stdin.buffer.readline()
    if not line:  # the parent needs no engine, or has died
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)
    code = main(ready_fd, line)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # all is closed; taking half a million objects apart would take Python half a second


def main(ready_fd: int, line: bytes) -> int:
    order = msgspec.json.decode(line, type=Order)
    answer = os.fdopen(ready_fd, "wb", buffering=0)
    faulthandler.enable()
    threading.Thread(target=_end_with_parent, args=(order,), daemon=True).start()

    def tell(what: str, done: int, total: int) -> None:
        answer.write(msgspec.json.encode(Loading(what, done, total)) + b"\n")

    def say(ready: Ready) -> None:
        answer.write(msgspec.json.encode(ready) + b"\n")
        answer.close()

    try:
        form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
        logging.basicConfig(level=order.config.log_level.upper(), format=form, stream=sys.stderr)
        make = None
        if order.factory:
            module, _, name = order.factory.partition(":")
            make = getattr(importlib.import_module(module), name)
        return run_engine(
            order.config,
            order.url,
            keys=order.keys,
            has_private_events=order.has_private_events,
            on_ready=lambda url: say(Ready(url)),
            make_engine=make,
            progress=tell,
        )
    except GangLost as error:
        logging.getLogger(__name__).error("the gang has lost a rank: %s", error)
        if not answer.closed:
            say(Ready(error=EngineLost(str(error)).info()))
        return GANG_LOST
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


def _end_with_parent(order: Order) -> None:
    """The engine ends after its step where the parent asks for it, and where the parent has ended."""
    wait_for_parents_end(order.parent_pid, said=_end)
    shutil.rmtree(order.folder, ignore_errors=True)
    _end()
    time.sleep(LAST_STEP_S)
    os._exit(3)


def _end() -> None:
    """The signal is raised, not sent: a signal that is sent ends a process of Windows at once."""
    signal.raise_signal(signal.SIGTERM)
