"""Which ranks of a model each of several machines has, and the address at which they meet.

    machine 0   rank 0, the engine process, which listens at dist_init_addr; ranks 1 to K - 1
    machine 1   ranks K to 2 K - 1, which the command with node_rank 1 starts

The ranks find each other in a store at that address, and then send tensors on connections of their own. Nothing there
asks for a key: the machines' network must be closed to others.
"""

from __future__ import annotations

import socket
from datetime import timedelta

import torch.distributed as dist

from ...protocol.errors import EngineLost, InvalidParams
from ..config import EngineConfig
from .lost import GangLost

START_TIMEOUT_S = 600.0


def ranks_of_node(config: EngineConfig, node: int) -> range:
    count = config.num_ranks // config.nnodes
    return range(node * count, (node + 1) * count)


def place_on_node(config: EngineConfig, rank: int) -> int:
    """The number of a rank among those of its machine."""
    return rank % (config.num_ranks // config.nnodes)


def refuse_nodes(config: EngineConfig) -> None:
    """Raises InvalidParams, by the name of the field, where the ranks cannot be shared out over the machines."""
    nnodes, rank, num_ranks = config.nnodes, config.node_rank, config.num_ranks
    if nnodes < 1 or num_ranks % nnodes:
        raise InvalidParams(
            f"nnodes={nnodes}: each machine has as many ranks, but tensor_parallel x pipeline_parallel x "
            f"sequence_parallel is {num_ranks}; set a product that nnodes divides, or nnodes=1",
            where="nnodes",
        )
    if not 0 <= rank < nnodes:
        raise InvalidParams(f"node_rank={rank}: it must be 0 to {nnodes - 1}, as nnodes={nnodes}", where="node_rank")
    if nnodes > 1 or config.dist_init_addr:
        if nnodes == 1:
            raise InvalidParams(
                f"dist_init_addr={config.dist_init_addr!r} with nnodes=1: one machine needs none; set nnodes, or leave "
                f"it out",
                where="dist_init_addr",
            )
        address_of(config)


def address_of(config: EngineConfig) -> tuple[str, int]:
    """Host and port of ``dist_init_addr``. Raises InvalidParams."""
    host, _, port = config.dist_init_addr.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise InvalidParams(
            f"dist_init_addr={config.dist_init_addr!r}: with nnodes={config.nnodes} it must be HOST:PORT of the first "
            f"machine, for example 10.0.0.1:5000, and the same on all",
            where="dist_init_addr",
        )
    return host.strip("[]"), int(port)


def listening_store(config: EngineConfig) -> dist.Store:
    """The store of machine 0, which listens at that address alone."""
    host, port = address_of(config)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        raise InvalidParams(
            f"dist_init_addr={config.dist_init_addr!r}: this machine cannot listen there: {error.strerror}; it must be "
            f"an address of the machine with node_rank 0, and a free port",
            where="dist_init_addr",
        ) from None
    timeout = timedelta(seconds=START_TIMEOUT_S)
    return dist.TCPStore(
        host, port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def reached_store(config: EngineConfig) -> dist.Store:
    """That store, as the others see it. Waits until it is there. Raises EngineLost after ``START_TIMEOUT_S``."""
    host, port = address_of(config)
    try:
        return dist.TCPStore(
            host, port, is_master=False, timeout=timedelta(seconds=START_TIMEOUT_S), wait_for_workers=False
        )
    except RuntimeError as error:
        raise EngineLost(f"nothing listens at {config.dist_init_addr} after {START_TIMEOUT_S:g} s: {error}") from None


def own_host(config: EngineConfig) -> str:
    """The address of this machine on the way to machine 0."""
    host, port = address_of(config)
    if config.node_rank == 0:
        return host
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))  # sends nothing
            found: str = probe.getsockname()[0]
            return found
    except OSError as error:
        raise GangLost(f"this machine has no way to {config.dist_init_addr}: {error}") from error
