"""What a scheduler is made with. Decides nothing."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from .waiting import ORDERS, PREEMPTIVE


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Sizes in tokens. ``decode_reserve``: slots kept free at least for each running sequence when one is admitted.

    ``order`` names how the waiting are ranked (``waiting.ORDERS``); among the first ``match_window`` of them the one
    with most tokens in the cache goes first (1: the first). Nobody is overtaken by more than ``max_overtaken`` others
    of its priority and tenant. Tenants of one priority share by ``tenant_weights`` (1 where none is given).
    ``slot_chunk``: slots that a decoding sequence takes at a time.
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
            raise ValueError(f"match_window={self.match_window}: order={self.order!r} goes by what is left to do")
        for name in ("max_running", "max_step_tokens", "prefill_chunk", "match_window", "slot_chunk"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: it must be at least 1")
        for tenant, weight in self.tenant_weights.items():
            if not weight > 0:
                raise ValueError(f"tenant_weights: {weight} for {tenant!r}; a weight is greater than 0")
