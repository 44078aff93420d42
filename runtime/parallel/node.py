"""The ranks of one machine but the first, gang after gang, for ``phloem serve --node-rank 1``."""

from __future__ import annotations

import logging
import os
import time

import msgspec
import torch.distributed as dist

from ...protocol.errors import EngineLost, InvalidParams, PhloemError
from ..config import EngineConfig, sized
from .gang import CONFIG_KEY, SHAPE_KEY, RankLoaded, RankProcess, RankStart, loaded_key
from .lost import GANG_LOST
from .nodes import START_TIMEOUT_S, ranks_of_node, reached_store
from .rank import Shape

log = logging.getLogger(__name__)

OWN_FIELDS = ("model", "node_rank", "num_threads", "log_level")  # that may differ from machine to machine
RETRY_S = 0.5  # while a gang that has lost a rank still has the address


def run_node(config: EngineConfig) -> None:
    """Run the ranks of machine ``config.node_rank``. A gang that has lost a rank is followed by another one, as soon
    as machine 0 has started it. Returns once machine 0 has ended the model.

    Raises InvalidParams where this machine's options differ from those of machine 0, the error of a rank that cannot
    load its share, EngineLost where nobody listens at the address.
    """
    while _run_gang(sized(config)) == GANG_LOST:
        log.warning("machine %d: the gang has lost a rank; waiting for the next one", config.node_rank)


def _run_gang(config: EngineConfig) -> int:
    try:
        store = reached_store(config)
        if store.add(f"node {config.node_rank}", 1) > 1:  # of the gang that has just ended
            time.sleep(RETRY_S)
            return GANG_LOST
        first = msgspec.json.decode(store.get(CONFIG_KEY), type=EngineConfig)
    except RuntimeError as error:
        log.info("machine 0 has gone: %s", error)
        return GANG_LOST
    _refuse_different(config, first)
    ranks: list[RankProcess] = []
    try:
        for rank in ranks_of_node(config, config.node_rank):
            ranks.append(RankProcess(RankStart(config, rank, "", os.getpid())))
        try:
            shape = _load(ranks, store)
        except (EngineLost, RuntimeError) as error:
            log.info("a rank or machine 0 has gone: %s", error)
            return GANG_LOST
        for one in ranks:
            one.tell(shape)
        codes = [one.process.wait() for one in ranks]
        return GANG_LOST if any(codes) else 0
    finally:
        for one in ranks:
            one.end(0.0)


def _refuse_different(config: EngineConfig, first: EngineConfig) -> None:
    for name in EngineConfig.__struct_fields__:
        own, other = getattr(config, name), getattr(first, name)
        if own != other and name not in OWN_FIELDS:
            raise InvalidParams(
                f"{name}={own!r} on machine {config.node_rank}, but {other!r} on machine 0; give both the same",
                where=name,
            )


def _load(ranks: list[RankProcess], store: dist.Store) -> Shape:
    """Waits for each rank's share, and tells machine 0. Raises RuntimeError where that has gone."""
    end_s = time.monotonic() + START_TIMEOUT_S
    for rank in ranks:
        try:
            loaded = RankLoaded(rank.loaded(end_s - time.monotonic()))
        except PhloemError as error:
            store.set(loaded_key(rank.rank), msgspec.json.encode(RankLoaded(error=error.info())).decode())
            raise
        store.set(loaded_key(rank.rank), msgspec.json.encode(loaded).decode())
    return msgspec.json.decode(store.get(SHAPE_KEY), type=Shape)
