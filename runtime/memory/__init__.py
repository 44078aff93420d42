"""The KV pool, copies of its blocks, and the process's memory."""

from .heap import ask_for_no_huge_pages, return_freed_memory, unmap_library_code
from .kv_blocks import BlockFormat, KVBlocks
from .kv_pool import KVPool, slot_size_bytes

__all__ = [
    "BlockFormat", "KVBlocks", "KVPool", "ask_for_no_huge_pages", "return_freed_memory", "unmap_library_code",
    "slot_size_bytes",
]  # fmt: skip
