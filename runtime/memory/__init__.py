"""Where keys and values live, and how many fit. Never knows what they belong to."""

from .kv_blocks import BlockFormat, KVBlocks
from .kv_pool import KVPool, kv_budget_bytes, size_slots, slot_size_bytes

__all__ = ["BlockFormat", "KVBlocks", "KVPool", "kv_budget_bytes", "size_slots", "slot_size_bytes"]
