"""The scheduler's settings."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ...protocol.errors import InvalidParams
from .waiting import ORDERS, PREEMPTIVE


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Sizes in tokens. An admission leaves at least ``decode_reserve`` slots free for each running sequence.

    ``order`` names how waiting sequences are ranked (``waiting.ORDERS``). Among the first ``match_window`` of them the
    one with most tokens in the cache is admitted first (1: the first). A sequence is overtaken by at most
    ``max_overtaken`` others of its priority and tenant. Tenants of one priority share by ``tenant_weights`` (1
    if not given). A decoding sequence takes ``slot_chunk`` slots at a time. Raises InvalidParams, naming the setting.
    """

    max_running: int = 64
    max_step_tokens: int = 512
    prefill_chunk: int = 256
    decode_reserve: int = 16
    order: str = "oldest_program"
    match_window: int = 1
    max_overtaken: int = 512
    slot_chunk: int = 8
    tenant_weights: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise InvalidParams(f"order={self.order!r} is not one of: {', '.join(ORDERS)}", where="order")
        if self.order in PREEMPTIVE and self.match_window > 1:
            raise InvalidParams(
                f"match_window={self.match_window}: order={self.order!r} orders by the work that is left; leave it 1",
                where="match_window",
            )
        for name in ("max_running", "max_step_tokens", "prefill_chunk", "match_window", "slot_chunk"):
            if getattr(self, name) < 1:
                raise InvalidParams(f"{name}={getattr(self, name)}: it must be at least 1", where=name)
        for tenant, weight in self.tenant_weights.items():
            if not 0 < weight < math.inf:
                message = f"tenant_weights: {weight} for {tenant!r}; it must be above 0 and finite"
                raise InvalidParams(message, where="tenant_weights")
