"""Which KV slot belongs to whom: a token-granular radix tree with leases, eviction and tiers. Never imports torch."""

from .blocks import block_names
from .cache import CacheCounters, Lease, NodeSnapshot, RadixCache
from .disk_tier import DiskTier
from .events import Event, Evicted, Stored
from .host_tier import HostTier
from .policies import POLICIES, Policy
from .slots import OutOfSlots
from .tiers import ReadAhead, TierCounters, Tiers

__all__ = [
    "POLICIES",
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
    "TierCounters",
    "Tiers",
    "block_names",
]
