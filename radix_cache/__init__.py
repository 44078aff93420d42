"""Which KV slot belongs to whom: a token-granular radix tree with leases, eviction and tiers. Never imports torch."""

from .cache import CacheCounters, NodeSnapshot, RadixCache
from .lease import Lease
from .policies import POLICIES, Policy
from .slots import OutOfSlots

__all__ = ["POLICIES", "CacheCounters", "Lease", "NodeSnapshot", "OutOfSlots", "Policy", "RadixCache"]
