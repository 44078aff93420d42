"""Where keys and values live, and what they take. Never knows what they belong to."""

from .heap import give_back_freed, let_go_of_libraries
from .kv_blocks import BlockFormat, KVBlocks
from .kv_pool import KVPool, slot_size_bytes

__all__ = ["BlockFormat", "KVBlocks", "KVPool", "give_back_freed", "let_go_of_libraries", "slot_size_bytes"]
