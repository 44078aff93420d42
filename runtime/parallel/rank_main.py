"""The main function of a rank's process, which ``LocalGang`` starts."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import logging
import os
import signal
import sys
import threading
from pathlib import Path

import msgspec

from ...protocol.errors import InternalError, PhloemError
from ..config import choose_cpu_isa
from ..models.loading import device_named
from .child import is_orphan, wait_for_parents_end
from .devices import on_device
from .gang import RankLoaded, RankStart
from .group import connect, joined
from .lost import GANG_LOST, GangLost
from .nodes import own_host, reached_store
from .rank import Rank, Shape

log = logging.getLogger(__name__)

_SIGNAL_AT_PARENTS_DEATH = 1  # of Linux's prctl


def run(ready_fd: int) -> None:
    gc.disable()  # until the rank has its share: all that loading makes stays
    code = main(ready_fd)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a thread of the process group may wait for a rank that is gone


def main(ready_fd: int) -> int:
    start = msgspec.json.decode(sys.stdin.buffer.readline(), type=RankStart)
    _end_with_parent(start.parent_pid)
    faulthandler.enable()
    form = f"%(asctime)s %(levelname)s rank {start.rank}: %(name)s: %(message)s"
    logging.basicConfig(level=start.config.log_level.upper(), format=form, stream=sys.stderr)

    def say(loaded: RankLoaded) -> None:
        os.write(ready_fd, msgspec.json.encode(loaded) + b"\n")

    config = start.config
    try:
        choose_cpu_isa(config)
        device = device_named(on_device(config, start.rank).device)
        sizes = {"rank": start.rank, "size": config.num_ranks}
        timeout_s = config.rank_timeout_s
        if config.nnodes > 1:
            store, host = reached_store(config), own_host(config)
            group = joined(store, **sizes, timeout_s=timeout_s, device=device, host=host)
        else:
            group = connect(Path(start.folder), **sizes, timeout_s=timeout_s, device=device)
        rank = Rank(config, group)
        say(RankLoaded(rank.weight_bytes))
    except GangLost as error:
        log.error("%s", error)
        return GANG_LOST
    except PhloemError as error:
        say(RankLoaded(error=error.info()))
        return 2
    except Exception as error:
        log.exception("the rank could not load its share")
        text = f"rank {start.rank} could not load its share: {type(error).__name__}: {error}"
        say(RankLoaded(error=InternalError(text).info()))
        return 1
    line = sys.stdin.buffer.readline()
    if not line:
        return GANG_LOST
    gc.freeze()
    gc.enable()
    threading.Thread(target=_watch_parent, args=(start.parent_pid,), name="phloem-parent-watch", daemon=True).start()
    try:
        rank.follow(msgspec.json.decode(line, type=Shape))
    except GangLost as error:
        log.error("%s", error)
        return GANG_LOST
    return 0


def _end_with_parent(parent_pid: int) -> None:
    """Linux kills this process when its parent dies, also where it is stopped (SIGSTOP)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for rank 0, which then ends the others
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SIGNAL_AT_PARENTS_DEATH, signal.SIGKILL)
    if is_orphan(parent_pid):
        os._exit(GANG_LOST)


def _watch_parent(parent_pid: int) -> None:
    """End when rank 0 has ended, or has closed the pipe."""
    wait_for_parents_end(parent_pid)
    os._exit(GANG_LOST)
