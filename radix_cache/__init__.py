"""The prefix cache: which KV slot belongs to whom. A radix tree by token, leases, eviction and tiers; no torch."""

from .blocks import block_names
from .cache import CacheCounters, Lease, NodeSnapshot, RadixCache
from .contents import FIRST_CONTENT_ID, Contents, OutOfContentIds, in_vocabulary
from .disk_tier import DiskTier
from .events import BlockSnapshot, Event, Evicted, Stored, Tier
from .host_tier import HostTier
from .policies import POLICIES, Policy
from .slots import OutOfSlots
from .tiers import ReadAhead, TierCounters, Tiers

__all__ = [
    "FIRST_CONTENT_ID",
    "POLICIES",
    "BlockSnapshot",
    "CacheCounters",
    "Contents",
    "DiskTier",
    "Event",
    "Evicted",
    "HostTier",
    "Lease",
    "NodeSnapshot",
    "OutOfContentIds",
    "OutOfSlots",
    "Policy",
    "RadixCache",
    "ReadAhead",
    "Stored",
    "Tier",
    "TierCounters",
    "Tiers",
    "block_names",
    "in_vocabulary",
]
