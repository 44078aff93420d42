"""What an engine reports of itself: its metrics, and the tree of cached prefixes."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ..speculative import Speculation

if TYPE_CHECKING:
    from ...radix_cache import NodeSnapshot, RadixCache
    from ..tokenizer import Tokenizer
    from .step_loop import StepLoop


def metrics(loop: StepLoop) -> dict[str, Any]:
    """Numbers by name; a dict where a number has parts.

    ``queue_seconds`` is a histogram of waiting times: ``counts[i]`` sequences waited at most ``bounds[i]`` seconds.
    ``cache_hit_rate``: share of admitted sequences' tokens that were in the cache. ``usage``: see ``Usage.report``.
    """
    scheduler, steps, programs = loop.scheduler, loop.counters, loop.programs
    cache, counters = scheduler.cache, scheduler.cache.counters
    masks = loop.masks.counters
    queue_time = scheduler.counters.queue_time
    return {
        "steps": steps.steps,
        "forward_tokens": steps.forward_tokens,
        "forward_rows": steps.forward_rows,
        "step_seconds": steps.step_s,
        "wait_seconds": steps.wait_s,
        "masks_deferred": masks.num_deferred,
        "mask_thread_seconds": masks.thread_s,
        "mask_wait_seconds": masks.wait_s,
        **_drafts(loop.speculation),
        "running": len(scheduler.running),
        "waiting": scheduler.num_waiting,
        "parked": len(scheduler.parked),
        "programs": len(programs.by_key),
        "preemptions": scheduler.num_preemptions,
        "yields": scheduler.counters.num_yields,
        "swapped_back": scheduler.counters.num_swapped_back,
        "queue_seconds": {"bounds": queue_time.bounds, "counts": queue_time.counts, "total": queue_time.total},
        "slots": {
            "total": cache.num_slots,
            "free": cache.num_free,
            "cached": cache.num_cached,
            "locked": cache.num_locked,
            "leased": cache.num_leased,
        },
        "cache_lookups": counters.lookups,
        "cache_hits": counters.hits,
        "cache_looked_up_tokens": counters.looked_up_tokens,
        "cache_matched_tokens": counters.matched_tokens,
        "cache_hit_rate": scheduler.counters.cached_tokens / max(scheduler.counters.admitted_tokens, 1),
        "cache_evicted_tokens": {"space": 0, "flush": 0} | counters.evicted_tokens,
        "tier_blocks": {} if loop.tiers is None else asdict(loop.tiers.counters),
        "usage": programs.usage.report((p.usage_rows, p.stats) for p in programs.by_key.values()),
    }


def cache_tree(cache: RadixCache, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The cached prefixes as nested dicts: text (its beginning), tokens, locks, hits, children."""
    return [_node(node, tokenizer) for node in cache.snapshot(max_nodes=200, num_first_tokens=24)]


def _drafts(speculation: Speculation | None) -> dict[str, Any]:
    """By drafter: tokens drafted, tokens accepted, and the estimated seconds saved."""
    if speculation is None:
        return {"drafted_tokens": {}, "accepted_tokens": {}, "draft_saved_seconds": {}}
    return {
        "drafted_tokens": dict(speculation.proposed),
        "accepted_tokens": dict(speculation.accepted),
        "draft_saved_seconds": dict(speculation.saved_s),
    }


def _node(node: NodeSnapshot, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "namespace": str(node.namespace),
        "text": tokenizer.decode(list(node.first_tokens), skip_special=False),
        "tokens": node.num_tokens,
        "is_whole": node.num_tokens <= len(node.first_tokens),
        "locks": node.lock_count,
        "pinned": node.is_pinned,
        "hits": node.hits,
        "hidden": node.num_hidden,
        "children": [_node(child, tokenizer) for child in node.children],
    }
