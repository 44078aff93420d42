"""What an engine reports of itself: its metrics, its steps and sequences, and the tree of cached prefixes."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ...processor import resident_bytes
from ..scheduler import Sequence
from ..speculative import Speculation
from .embedding_ops import PooledRow
from .generation import Candidate
from .scoring import ScoreRow

if TYPE_CHECKING:
    from ...radix_cache import NodeSnapshot, RadixCache
    from ..tokenizer import Tokenizer
    from .programs import Programs
    from .step_loop import StepLoop

MAX_SEQUENCES = 200  # in a report of the batch
MAX_NODES = 3_000  # in an outline of the tree: some 20 ms of the loop


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
        "memory_bytes": resident_bytes(),
        "preemptions": scheduler.num_preemptions,
        "yields": scheduler.counters.num_yields,
        "swapped_back": scheduler.counters.num_swapped_back,
        "queue_seconds": {"bounds": queue_time.bounds, "counts": queue_time.counts, "total": queue_time.total},
        "slots": _slots(cache),
        "cache_lookups": counters.lookups,
        "cache_hits": counters.hits,
        "cache_looked_up_tokens": counters.looked_up_tokens,
        "cache_matched_tokens": counters.matched_tokens,
        "cache_hit_rate": scheduler.counters.cached_tokens / max(scheduler.counters.admitted_tokens, 1),
        "cache_evicted_tokens": {"space": 0, "flush": 0} | counters.evicted_tokens,
        "tier_blocks": {} if loop.tiers is None else asdict(loop.tiers.counters),
        "store_faults": 0 if loop.tiers is None or loop.tiers.store is None else loop.tiers.store.num_faults,
        "usage": programs.usage.report((p.usage_rows, p.stats) for p in programs.by_key.values()),
    }


def cache_tree(cache: RadixCache, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The cached prefixes as nested dicts: text (its beginning), tokens, locks, hits, children."""
    return [_node(node, tokenizer) for node in cache.snapshot(max_nodes=200, num_first_tokens=24)]


def batch(loop: StepLoop) -> dict[str, Any]:
    """The last steps, and the sequences that run or wait, running ones first; ``num_hidden`` more are left out."""
    scheduler = loop.scheduler
    sequences = [*scheduler.running, *(seq for seq in loop.programs.live.values() if seq.state == "waiting")]
    return {
        "steps": list(loop.recent),
        "sequences": [_sequence(seq) for seq in sequences[:MAX_SEQUENCES]],
        "num_hidden": max(0, len(sequences) - MAX_SEQUENCES),
    }


def _sequence(seq: Sequence) -> dict[str, Any]:
    """``computed``: of its ``tokens``, those with keys and values. ``cached``: those that were found in the cache."""
    row: dict[str, Any] = {"name": seq.kind, "tenant": seq.tenant, "state": seq.state, "tokens": len(seq.tokens)}
    row |= {"computed": seq.num_computed, "cached": seq.num_cached, "preempted": seq.num_preempted}
    match seq.tag:
        case Candidate() as candidate:
            program = candidate.generation.owner.program
            row |= {"generated": candidate.num_generated, "max_tokens": candidate.generation.op.params.max_tokens}
            row |= {
                "forced": candidate.num_forced,
                "drafted": candidate.num_drafted,
                "accepted": candidate.num_accepted,
            }
            return row | {"program": program.id, "has_grammar": candidate.matcher is not None}
        case ScoreRow() | PooledRow() as computed:
            return row | {"program": computed.owner.program.id}
    return row


def cache_nodes(cache: RadixCache, programs: Programs) -> dict[str, Any]:
    """The tree's outline (see ``RadixCache.outline``), and what its numbers add up to."""
    namespaces, nodes = cache.outline(max_nodes=MAX_NODES)
    names = {program.cache_key: program.settings.name or program.id for program in programs.by_key.values()}
    return {
        "roots": [str(namespace) for namespace in namespaces],
        "nodes": nodes,
        "programs": {key: names.get(key, "") for node in nodes for key in node.programs},
        "num_hidden": cache.num_nodes - len(nodes),
        "slots": _slots(cache),
        "evicted_tokens": {"space": 0, "flush": 0} | cache.counters.evicted_tokens,
    }


def _slots(cache: RadixCache) -> dict[str, int]:
    return {
        "total": cache.num_slots,
        "free": cache.num_free,
        "cached": cache.num_cached,
        "locked": cache.num_locked,
        "leased": cache.num_leased,
    }


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
