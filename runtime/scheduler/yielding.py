"""Which running sequence makes way for a shorter one that waits: shortest remaining time first. Never preempts itself.

A long one makes way only where it has more than twice to do what the short one has, and its own return; four times
after the first time, eight times after the second, and never a fourth time. Nor does it when it is due (overtaken as
often as may be), of a more urgent priority or deadline, of another tenant that was not served more, one of several
running sequences of its program (they were forked to run together, and a join waits for all), or when another waits for
the tokens it computes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from .held import Held
from .lengths import PROMPT_COST, UNKNOWN, Lengths
from .sequence import Sequence, slots_to_come
from .waiting import Waiting

MAX_TIMES = 3  # that a sequence makes way since its submit
LEAST_RATIO = 2.0


def longest_to_yield(
    head: Sequence,
    running: Iterable[Sequence],
    *,
    shortage: int,
    least_slots: int,
    lengths: Lengths,
    waiting: Waiting,
    held: Held,
) -> Sequence | None:
    """Who makes way for ``head``: the one with most to do of those that may and whose leaving frees ``shortage`` slots.

    ``least_slots`` is what a running sequence is kept free beyond those it has.
    """
    work = lengths.work(head)
    best, most = None, 0.0
    num_running: Counter[str] | None = None
    for seq in running:
        if seq.num_preempted >= MAX_TIMES or seq.priority < head.priority or seq.deadline_s < head.deadline_s:
            continue
        if seq.tenant != head.tenant and waiting.served.get(seq.tenant, 0.0) <= waiting.served.get(head.tenant, 0.0):
            continue
        left = lengths.left(seq)
        bar = LEAST_RATIO * 2**seq.num_preempted * work + PROMPT_COST * len(seq.tokens)
        if not max(bar, most) < left < UNKNOWN or waiting.is_due(seq) or held.is_awaited(seq):
            continue
        if seq.program:
            num_running = num_running or Counter(other.program for other in running)
            if seq.program == head.program or num_running[seq.program] > 1:
                continue
        if shortage > 0:
            assert seq.lease is not None
            freed = seq.lease.num_sole + slots_to_come((seq,), usual=int(lengths.usual), least=least_slots)
            if freed < shortage:
                continue
        best, most = seq, left
    return best
