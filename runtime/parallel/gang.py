"""The processes of a gang of ranks on this machine, as rank 0 starts, watches and ends them.

To a rank's stdin, in lines of JSON: a ``RankStart``; once all ranks have loaded, a ``Shape``. The pipe's end is the
death of rank 0, and then the rank ends too. From a rank, on its stdout: a ``RankLoaded``. That pipe's end is the rank's
death.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path
from queue import Empty
from typing import IO, Protocol

import msgspec
import torch.distributed as dist

from ...protocol.errors import EngineLost, ErrorInfo, InvalidParams, PhloemError, Unsupported, from_info
from ..config import EngineConfig
from ..models import Model
from ..models.loading import device_named
from .child import start_child
from .devices import on_device, refuse_devices
from .group import Group, connect, joined
from .leader import Leader
from .mesh import Mesh
from .nodes import START_TIMEOUT_S, listening_store, own_host, ranks_of_node, refuse_nodes
from .rank import Shape, WeightBytes, copies_of

log = logging.getLogger(__name__)

CONFIG_KEY, SHAPE_KEY = "config", "shape"  # of the store
LOG_TAIL_BYTES = 2000
LAST_STEP_S = 5.0  # that a rank has for ending after the last order
RANK_MODULE = "phloem.runtime.parallel.rank_main"


class RankStart(msgspec.Struct, frozen=True):
    config: EngineConfig
    rank: int
    folder: str
    parent_pid: int


class RankLoaded(msgspec.Struct, frozen=True, omit_defaults=True):
    """``error``: why the rank could not load its share."""

    weights: WeightBytes = WeightBytes(0, 0)
    error: ErrorInfo | None = None


class Gang(Protocol):
    """The other ranks of a model, as an engine uses them."""

    @property
    def group(self) -> Group: ...

    @property
    def weights(self) -> list[WeightBytes]:
        """Of each other rank, once ``begin`` has returned."""
        ...

    def begin(self, model: Model, shape: Shape) -> Leader:
        """Wait until every rank has its share, and give them ``shape``. They follow the leader from then on."""
        ...

    def close(self) -> None: ...


def refuse_combinations(config: EngineConfig) -> None:
    """Raises InvalidParams or Unsupported for options that a split model does not have yet, each by its name."""
    mesh = Mesh.of(config)
    if not config.rank_timeout_s > 0:
        raise InvalidParams(f"rank_timeout_s={config.rank_timeout_s}: it must be above 0", where="rank_timeout_s")
    if config.expert_copies < 0 or (config.expert_copies and mesh.expert == 1):
        raise InvalidParams(
            f"expert_copies={config.expert_copies}: it must be 0, or above 0 with expert_parallel of 2 or more",
            where="expert_copies",
        )
    refuse_nodes(config)
    refuse_devices(config)
    if mesh.size == 1:
        return
    others = {
        f"host_cache_bytes={config.host_cache_bytes:,}": bool(config.host_cache_bytes),
        f"disk_cache={config.disk_cache!r}": bool(config.disk_cache),
        f"shared_cache={config.shared_cache!r}": bool(config.shared_cache),
        f"draft_model={config.draft_model!r}": config.draft_model.startswith("self:"),
    }
    for option, is_given in others.items():
        if is_given:
            name = option.partition("=")[0]
            raise Unsupported(
                f"{mesh} with {option}: the two are not combined yet; leave out one of them",
                where=name,
            )


class LocalGang:
    """Ranks 1 to N - 1 as processes of this machine; the constructor starts them and connects ``group``. With other
    machines it starts the ranks of this one, and waits for theirs.

    Every rank ends with this process, however that ends. Raises a rank's own error when it cannot load its share.
    """

    def __init__(self, config: EngineConfig) -> None:
        if config.node_rank:
            raise InvalidParams(
                f"node_rank={config.node_rank}: the engine is on machine 0; `phloem serve` with this number runs the "
                f"ranks of another machine",
                where="node_rank",
            )
        self._folder = Path(tempfile.mkdtemp(prefix="phloem-ranks-"))
        self._config, self._timeout_s = config, config.rank_timeout_s
        self._device = device_named(on_device(config, 0).device)
        self._is_closing = False
        self._leader: Leader | None = None
        self._ranks: list[RankProcess] = []
        self._store: dist.Store | None = None  # in which ranks of other machines say what theirs say on pipes
        self.weights: list[WeightBytes] = []  # of ranks 1 to N - 1
        try:
            if config.nnodes > 1:
                self._store = listening_store(config)
                self._store.set(CONFIG_KEY, msgspec.json.encode(config).decode())
            for rank in ranks_of_node(config, 0)[1:]:
                self._ranks.append(RankProcess(RankStart(config, rank, str(self._folder), os.getpid())))
            self.group = self._connected(config.num_ranks)
        except BaseException:
            self.close()
            raise

    def _connected(self, size: int) -> Group:
        """Raises the error of a rank that ends before it has connected."""
        found: list[Group | BaseException] = []

        def run() -> None:
            try:
                # All ranks import torch first, which a busy machine takes long for.
                found.append(self._connect(size))
            except BaseException as error:
                found.append(error)

        thread = threading.Thread(target=run, name="phloem-connect", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(0.05)
            for rank in self._ranks:
                if rank.process.poll() is not None:
                    rank.loaded(1.0)
                    raise EngineLost(rank.death())
        (group,) = found
        if isinstance(group, PhloemError):
            raise group
        if isinstance(group, BaseException):
            raise EngineLost(str(group)) from group
        return group

    def _connect(self, size: int) -> Group:
        if self._store is None:
            return connect(self._folder, rank=0, size=size, timeout_s=self._timeout_s, device=self._device)
        host = own_host(self._config)
        return joined(self._store, rank=0, size=size, timeout_s=self._timeout_s, device=self._device, host=host)

    def begin(self, model: Model, shape: Shape) -> Leader:
        end_s = time.monotonic() + START_TIMEOUT_S
        self.weights = [rank.loaded(end_s - time.monotonic()) for rank in self._ranks]
        others = range(1 + len(self._ranks), self.group.size)  # of other machines
        self.weights += [self._loaded_elsewhere(number, end_s - time.monotonic()) for number in others]
        if self._store is not None:
            self._store.set(SHAPE_KEY, msgspec.json.encode(shape).decode())
        copies = copies_of(model, self.group, self._config)
        self._leader = Leader(self.group, model, num_tokens=shape.num_tokens, beat_s=self._timeout_s / 4, copies=copies)
        for rank in self._ranks:
            rank.tell(shape)
            threading.Thread(target=self._watch, args=(rank,), name="phloem-rank-watch", daemon=True).start()
        if self._device.type == "cpu":  # pairs of GPUs meet there later
            shutil.rmtree(self._folder, ignore_errors=True)
        return self._leader

    def _loaded_elsewhere(self, rank: int, timeout_s: float) -> WeightBytes:
        """As ``RankProcess.loaded``."""
        assert self._store is not None
        try:
            self._store.wait([loaded_key(rank)], timedelta(seconds=max(timeout_s, 0.001)))
        except RuntimeError:
            raise EngineLost(f"rank {rank} was not ready within {START_TIMEOUT_S:g} s") from None
        return weights_of(msgspec.json.decode(self._store.get(loaded_key(rank)), type=RankLoaded))

    def _watch(self, rank: RankProcess) -> None:
        rank.wait_for_end()
        if not self._is_closing and self._leader is not None:
            self._leader.note_lost(rank.death())

    def close(self) -> None:
        """End the ranks: asked first, if they can still hear it. A second call does nothing."""
        if self._is_closing:
            return
        self._is_closing = True
        is_told = self._leader is not None and self._leader.close()
        for rank in self._ranks:
            rank.end(LAST_STEP_S if is_told else 0.0)
        shutil.rmtree(self._folder, ignore_errors=True)


def weights_of(loaded: RankLoaded) -> WeightBytes:
    """Raises the rank's error."""
    if loaded.error is not None:
        raise from_info(loaded.error)
    return loaded.weights


def loaded_key(rank: int) -> str:
    """Where in the store a rank's ``RankLoaded`` lies."""
    return f"loaded {rank}"


class RankProcess:
    def __init__(self, start: RankStart) -> None:
        self.rank = start.rank
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self.process, self._lines = start_child(RANK_MODULE, log=self._log)
        self.tell(start)

    def tell(self, message: msgspec.Struct) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has died, which its pipe says
            self.process.stdin.write(msgspec.json.encode(message) + b"\n")
            self.process.stdin.flush()

    def loaded(self, timeout_s: float) -> WeightBytes:
        """Wait for its share. Raises the rank's error, EngineLost when it has died or takes too long."""
        try:
            line = self._lines.next(max(0.0, timeout_s))
        except Empty:
            raise EngineLost(f"rank {self.rank} was not ready within {START_TIMEOUT_S:g} s") from None
        if line is None:
            raise EngineLost(self.death())
        return weights_of(msgspec.json.decode(line, type=RankLoaded))

    def wait_for_end(self) -> None:
        while self._lines.next() is not None:
            pass

    def death(self) -> str:
        """How the process ended, with the end of its log."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5.0)
        code = self.process.returncode
        how = f"was ended by signal {-code}" if code is not None and code < 0 else f"exited with code {code}"
        tail = b""
        with contextlib.suppress(ValueError):  # the gang is being closed, and the log with it
            self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
            tail = self._log.read()
        return f"rank {self.rank} (process {self.process.pid}) {how}; its log ends: {tail.decode(errors='replace')}"

    def end(self, timeout_s: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout_s)
        if self.process.poll() is None:
            self.process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(LAST_STEP_S)
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        self._log.close()
