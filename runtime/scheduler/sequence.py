"""A sequence as the scheduler sees it: tokens, a lease on their KV slots, and what is still to be computed.

    tokens:  [0, num_computed) have KV in the lease's slots   [num_computed, length) pending

The last pending token may still be being drawn; ``length`` is then one more than ``len(tokens)``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ...radix_cache import Lease


class PoolTooSmall(Exception):
    """One sequence alone needs more slots than the pool has."""

    def __init__(self, need: int, have: int) -> None:
        super().__init__(f"the sequence needs {need:,} KV slots, but the pool has {have:,}")
        self.need = need
        self.have = have


class TokenBuffer:
    """A growing int32 array of token ids. ``ids`` is a view: growth leaves it valid, truncation does not."""

    __slots__ = ("_array", "_len")

    def __init__(self, ids: np.ndarray | list[int] | tuple[int, ...] = ()) -> None:
        self._array = np.array(ids, dtype=np.int32)
        self._len = len(self._array)

    def __len__(self) -> int:
        return self._len

    @property
    def ids(self) -> np.ndarray:
        return self._array[: self._len]

    def extend(self, ids: np.ndarray | list[int] | tuple[int, ...]) -> None:
        end = self._len + len(ids)
        self._reserve(end)
        self._array[self._len : end] = ids
        self._len = end

    def append(self, token_id: int) -> None:
        self._reserve(self._len + 1)
        self._array[self._len] = token_id
        self._len += 1

    def write_ahead(self, code: int) -> None:
        """Write ``code`` in the next token's place without counting it; ``span`` may read it."""
        self._reserve(self._len + 1)
        self._array[self._len] = code

    def span(self, start: int, end: int) -> np.ndarray:
        """A view of [start, end), which may include the code written ahead."""
        return self._array[start:end]

    def truncate(self, length: int) -> None:
        assert 0 <= length <= self._len, (length, self._len)
        self._len = length

    def copy(self) -> TokenBuffer:
        return TokenBuffer(self.ids)

    def _reserve(self, size: int) -> None:
        if size > len(self._array):
            grown = np.empty(max(size, 2 * len(self._array), 64), dtype=np.int32)
            grown[: self._len] = self.ids
            self._array = grown


class Sequence:
    """Owned by the engine; the scheduler alone changes ``lease``, ``row_id`` and ``num_computed``.

    ``kind`` is the program's name: lengths and pauses are learned by kind. Logits are wanted for every pending position
    from ``logits_from`` on. ``tag`` belongs to the engine. The executor's slot table holds the slots of the first
    ``table_len`` positions. Since the last submit ``num_cached`` tokens were found in the cache, ``num_run`` were
    computed, and ``num_restored``, after preemptions too, came from host memory or disk. ``min_new`` and ``max_new``
    bound the tokens that it will generate (-1: not known); ``prompt_len`` is its length at submit. ``rank``, ``due``,
    ``order`` and ``program_order`` belong to the waiting queue.
    """

    __slots__ = (
        "adapter",
        "admitted_s",
        "arrival_s",
        "blocked_on",
        "deadline_s",
        "due",
        "is_looked_up",
        "is_vectorised",
        "kind",
        "lease",
        "logits_from",
        "matched",
        "max_new",
        "min_new",
        "namespace",
        "next_draw",
        "num_cached",
        "num_computed",
        "num_preempted",
        "num_restored",
        "num_run",
        "order",
        "parked_s",
        "priority",
        "program",
        "program_order",
        "prompt_len",
        "rank",
        "row_id",
        "seq_id",
        "state",
        "table_len",
        "tag",
        "tenant",
        "tokens",
    )

    def __init__(
        self,
        seq_id: int,
        tokens: TokenBuffer,
        *,
        program: str = "",
        kind: str = "",
        namespace: str = "",
        priority: int = 0,
        tenant: str = "",
        deadline_s: float = math.inf,
        tag: object = None,
        adapter: int = -1,
    ) -> None:
        self.seq_id = seq_id
        self.tokens = tokens
        self.program = program
        self.kind = kind
        self.namespace = namespace
        self.priority = priority
        self.tenant = tenant
        self.deadline_s = deadline_s
        self.tag = tag
        self.adapter = adapter  # the executor's number of it; -1: none
        self.state = "new"  # new | waiting | running | parked | ended
        self.lease: Lease | None = None
        self.row_id = -1
        self.num_computed = 0
        self.next_draw = 0  # -1 - i while draw i of the step being computed makes its next token
        self.logits_from = 0
        self.blocked_on: tuple[Sequence, int] | None = None
        self.order = self.program_order = 0
        self.rank: tuple[float, ...] = ()
        self.due = -1
        self.matched = (-1, 0)  # (cache version, tokens found in it)
        self.max_new = -1
        self.min_new = 0
        self.prompt_len = 0
        self.arrival_s = 0.0
        self.parked_s = 0.0
        self.is_vectorised = False  # its newest tokens may be in ``Scheduler.vectorised`` alone
        self.is_looked_up = False  # in the cache, since it was submitted
        self.admitted_s = 0.0
        self.table_len = 0
        self.num_cached = 0
        self.num_run = 0
        self.num_restored = 0
        self.num_preempted = 0

    @property
    def length(self) -> int:
        return len(self.tokens) + (self.next_draw < 0)

    @property
    def num_pending(self) -> int:
        return self.length - self.num_computed

    def __repr__(self) -> str:
        return f"Sequence({self.seq_id}, {self.state}, {self.num_computed}/{len(self.tokens)})"


def urgency(seq: Sequence) -> tuple[int, int]:
    """A lower value is more urgent."""
    return (seq.priority, seq.order)


def slots_to_come(running: Iterable[Sequence], *, usual: int, least: int) -> int:
    """Slots that these are expected to take beyond the tokens they have, if a sequence generates ``usual`` tokens.

    At least ``least`` each, and no more than ``max_new`` allows.
    """
    total = 0
    for seq in running:
        made = len(seq.tokens) - seq.prompt_len
        expected = usual - made if usual - made > least else least
        if 0 <= seq.max_new < made + expected:
            expected = seq.max_new - made if seq.max_new > made else 0
        total += expected
    return total


def slots_missing(prefills: Iterable[Sequence]) -> int:
    """Slots that the rest of these running prompts needs."""
    return sum(seq.length - seq.lease.num_slots for seq in prefills if seq.lease)
