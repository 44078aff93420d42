"""The radix cache on the host: tokens matched and inserted per second, and the time of operations by cache size.

    python -m benchmarks.radix_cache [--quick] [--save]

Throughput: prompts of 1,000 tokens that share 500 with others; a round is acquire, extend, commit, release.
Size: the same round, and one decoded token for 64 leases, in a cache that already holds 10 thousand to 10 million
tokens. It runs once with free slots and once with a full cache, where each round evicts as many tokens as it adds.
Times are CPU times of the process, because other programs on the machine change them less than wall times.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from phloem.radix_cache import RadixCache

from . import RESULTS, print_header, save

PROMPT_LEN = 1000
SHARED_LEN = 500
VOCAB_SIZE = 50_000


@dataclass(frozen=True, slots=True)
class Spread:
    """Seconds of one round: median, best and worst of the repeats."""

    median_s: float
    best_s: float
    worst_s: float


def spread(times_s: list[float]) -> Spread:
    return Spread(statistics.median(times_s), min(times_s), max(times_s))


class Prompts:
    """Distinct prompts, each with one of ``num_stems`` shared prefixes."""

    def __init__(self, *, num_stems: int, seed: int = 0) -> None:
        self._random = np.random.default_rng(seed)
        self._stems = self._random.integers(0, VOCAB_SIZE, (num_stems, SHARED_LEN), np.int32)

    def make(self, n: int) -> list[np.ndarray]:
        stems = self._stems[self._random.integers(0, len(self._stems), n)]
        tails = self._random.integers(0, VOCAB_SIZE, (n, PROMPT_LEN - SHARED_LEN), np.int32)
        return list(np.concatenate((stems, tails), axis=1))


def serve(cache: RadixCache, tokens: np.ndarray) -> None:
    lease = cache.acquire(tokens, limit=len(tokens) - 1)
    lease.extend(len(tokens) - lease.num_cached)
    lease.commit(tokens)
    lease.release()


def serve_all(cache: RadixCache, prompts: list[np.ndarray]) -> None:
    for tokens in prompts:
        serve(cache, tokens)


def timed(work: Callable[[], None]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def throughput(repeats: int, num_prompts: int) -> dict[str, Spread]:
    """Seconds to match and insert one prompt."""
    kinds = ("new prompts", "known prompts", "new prompts, events on")
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for repeat in range(repeats):
        prompts = Prompts(num_stems=max(num_prompts // 20, 1), seed=repeat).make(num_prompts)
        for kind in kinds:
            if kind != "known prompts":
                on_event = (lambda event: None) if kind.endswith("events on") else None
                cache = RadixCache(num_prompts * PROMPT_LEN, on_event=on_event)
            times[kind].append(timed(partial(serve_all, cache, prompts)) / num_prompts)
            cache.check()
    return {kind: spread(values) for kind, values in times.items()}


def filled(num_tokens: int, *, spare: int) -> tuple[RadixCache, Prompts]:
    cache = RadixCache(num_tokens + spare)
    prompts = Prompts(num_stems=max(num_tokens // PROMPT_LEN // 20, 1))
    while cache.num_cached < num_tokens - PROMPT_LEN:
        for tokens in prompts.make(max((num_tokens - cache.num_cached) // PROMPT_LEN, 1)):
            serve(cache, tokens)
    return cache, prompts


def rounds(num_tokens: int, *, repeats: int, num_prompts: int) -> dict[str, Spread]:
    """Seconds for one prompt (with free slots, and with a full cache), and for one more token of each of 64 leases."""
    result: dict[str, Spread] = {}
    for name, spare in (("prompt, free slots", repeats * num_prompts * PROMPT_LEN), ("prompt, cache full", 0)):
        cache, prompts = filled(num_tokens, spare=spare)
        if name == "prompt, cache full":
            for tokens in prompts.make(50):
                serve(cache, tokens)
        batches = [prompts.make(num_prompts) for _ in range(repeats)]
        times = [timed(partial(serve_all, cache, batch)) / num_prompts for batch in batches]
        result[name] = spread(times)
    leases, texts, num_steps = [], [], 40
    for i, tokens in enumerate(prompts.make(64)):
        text = np.concatenate((tokens[:100], np.arange(num_steps, dtype=np.int32)))
        text[0] = -1 - i
        leases.append(cache.acquire(text))
        leases[-1].extend(100)
        leases[-1].commit(text[:100])
        texts.append(text)

    def reserve() -> None:
        for lease in leases:
            lease.extend(1)
            lease.mark_fresh()

    def commit(n: int) -> None:
        for lease, text in zip(leases, texts, strict=True):
            lease.commit(text[:n])

    reserved, committed = [], []
    for n in range(101, 101 + num_steps):
        reserved.append(timed(reserve))
        committed.append(timed(partial(commit, n)))
    result["64 leases, extend by 1, full"] = spread(reserved)
    result["64 leases, commit 1 more, full"] = spread(committed)
    return result


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="measure up to one million tokens, with few repeats")
    options.add_argument("--save", action="store_true", help="write the figures to benchmarks/results")
    chosen = options.parse_args()
    repeats, num_prompts = (3, 50) if chosen.quick else (15, 50)
    sizes = (10_000, 100_000, 1_000_000) if chosen.quick else (10_000, 100_000, 1_000_000, 10_000_000)

    report = print_header()
    print(f"\nmatch + insert at {PROMPT_LEN:,}-token prompts, {SHARED_LEN} of them shared (median, worst .. best):")
    report["throughput_tokens_per_s"] = {}
    for name, s in throughput(3 * repeats, 300).items():
        rates = [PROMPT_LEN / seconds for seconds in (s.median_s, s.worst_s, s.best_s)]
        report["throughput_tokens_per_s"][name] = rates
        median, worst, best = (rate / 1e6 for rate in rates)
        print(f"  {name:<24} {median:6.1f}  {worst:6.1f} .. {best:.1f} million tokens/s")

    print("\ncost against tokens cached (median, best .. worst, microseconds):")
    report["rounds_s"] = {}
    for size in sizes:
        found = rounds(size, repeats=repeats, num_prompts=num_prompts)
        report["rounds_s"][size] = {name: [s.median_s, s.best_s, s.worst_s] for name, s in found.items()}
        for name, s in found.items():
            print(f"  {size:>10,}  {name:<32} {s.median_s * 1e6:8.1f}  {s.best_s * 1e6:8.1f} .. {s.worst_s * 1e6:.1f}")
    if chosen.save:
        save(RESULTS / "radix_cache.json", report)


if __name__ == "__main__":
    main()
