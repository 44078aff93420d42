"""The prefix cache: which KV slot belongs to whom. A radix tree by token, leases, eviction and tiers; no torch."""

from .block_store import BlockStore, FolderStore, StoreEntry
from .blocks import block_names
from .cache import CacheCounters, Lease, NodeSnapshot, RadixCache
from .contents import FIRST_CONTENT_ID, Contents, OutOfContentIds, in_vocabulary
from .events import BlockSnapshot, Event, Evicted, Stored, Tier
from .grants import Grants, LentPrefix, UnknownGrant
from .host_tier import HostTier
from .policies import POLICIES, Policy
from .sealed import UnsoundBlock, seal, unseal
from .slots import OutOfSlots
from .store_tier import StoreTier
from .tiers import ReadAhead, TierCounters, Tiers

__all__ = [
    "FIRST_CONTENT_ID",
    "POLICIES",
    "BlockSnapshot",
    "CacheCounters",
    "Contents",
    "BlockStore",
    "StoreEntry",
    "Event",
    "Evicted",
    "FolderStore",
    "Grants",
    "HostTier",
    "Lease",
    "LentPrefix",
    "NodeSnapshot",
    "OutOfContentIds",
    "OutOfSlots",
    "Policy",
    "RadixCache",
    "ReadAhead",
    "StoreTier",
    "Stored",
    "Tier",
    "TierCounters",
    "Tiers",
    "UnknownGrant",
    "UnsoundBlock",
    "block_names",
    "in_vocabulary",
    "seal",
    "unseal",
]
