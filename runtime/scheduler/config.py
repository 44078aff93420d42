"""The scheduler's settings."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from .waiting import ORDERS, PREEMPTIVE


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Sizes in tokens. An admission leaves at least ``decode_reserve`` slots free for each running sequence.

    ``order`` names how waiting sequences are ranked (``waiting.ORDERS``). Among the first ``match_window`` of them the
    one with most tokens in the cache is admitted first (1: the first). A sequence is overtaken by at most
    ``max_overtaken`` others of its priority and tenant. Tenants of one priority share by ``tenant_weights`` (1
    if not given). A decoding sequence takes ``slot_chunk`` slots at a time.
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
            raise ValueError(f"order={self.order!r} is not one of: {', '.join(ORDERS)}")
        if self.order in PREEMPTIVE and self.match_window > 1:
            raise ValueError(
                f"match_window={self.match_window}: order={self.order!r} orders by the work that is left; leave it 1"
            )
        for name in ("max_running", "max_step_tokens", "prefill_chunk", "match_window", "slot_chunk"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: it must be at least 1")
        for tenant, weight in self.tenant_weights.items():
            if not weight > 0:
                raise ValueError(f"tenant_weights: {weight} for {tenant!r}; a weight is greater than 0")
