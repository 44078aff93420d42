"""Which KV slot belongs to whom: a token-granular radix tree with leases, eviction and tiers. Never imports torch."""

from .blocks import block_names
from .cache import CacheCounters, NodeSnapshot, RadixCache
from .events import Event, Evicted, Stored
from .lease import Lease
from .policies import POLICIES, Policy
from .slots import OutOfSlots

__all__ = [
    "POLICIES",
    "CacheCounters",
    "Event",
    "Evicted",
    "Lease",
    "NodeSnapshot",
    "OutOfSlots",
    "Policy",
    "RadixCache",
    "Stored",
    "block_names",
]
