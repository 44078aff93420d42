"""The prefix cache: which KV slot belongs to whom. A radix tree by token, leases, eviction and tiers; no torch."""

from .blocks import block_names
from .cache import CacheCounters, Lease, NodeSnapshot, RadixCache
from .disk_tier import DiskTier
from .events import BlockSnapshot, Event, Evicted, Stored, Tier
from .host_tier import HostTier
from .policies import POLICIES, Policy
from .slots import OutOfSlots
from .tiers import ReadAhead, TierCounters, Tiers

__all__ = [
    "POLICIES",
    "BlockSnapshot",
    "CacheCounters",
    "DiskTier",
    "Event",
    "Evicted",
    "HostTier",
    "Lease",
    "NodeSnapshot",
    "OutOfSlots",
    "Policy",
    "RadixCache",
    "ReadAhead",
    "Stored",
    "Tier",
    "TierCounters",
    "Tiers",
    "block_names",
]
