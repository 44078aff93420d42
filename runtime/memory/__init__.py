"""The KV pool, copies of its blocks, and the process's memory."""

from .heap import return_freed_memory, unmap_library_code
from .kv_blocks import BlockFormat, KVBlocks
from .kv_pool import KVPool, slot_size_bytes

__all__ = ["BlockFormat", "KVBlocks", "KVPool", "return_freed_memory", "unmap_library_code", "slot_size_bytes"]
