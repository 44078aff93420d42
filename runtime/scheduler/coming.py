"""The tokens that running prompts are about to compute, so that who needs them too can wait. Never schedules."""

from ...radix_cache.tree import common_prefix_len
from .sequence import Sequence


class Coming:
    """Prompts being computed, found by where what they compute begins.

    A prompt that computes from position c on is of use to whoever has its tokens up to and at c: they are kept by
    (namespace, c) and the token there, so that few are compared in full.
    """

    __slots__ = ("_places",)

    def __init__(self, prefills: list[Sequence]) -> None:
        self._places: dict[tuple[str, int], dict[int, list[Sequence]]] = {}
        for seq in prefills:
            self.add(seq)

    def add(self, seq: Sequence) -> None:
        place = self._places.setdefault((seq.namespace, seq.num_computed), {})
        place.setdefault(seq.tokens.ids.item(seq.num_computed), []).append(seq)

    def longest(self, seq: Sequence, limit: int) -> tuple[Sequence, int] | None:
        """The running sequence with most of ``seq``'s first ``limit`` tokens, and how many; None if it has none new."""
        best: tuple[Sequence, int] | None = None
        ids = seq.tokens.ids
        for (namespace, start), by_token in self._places.items():
            if namespace != seq.namespace or start >= limit:
                continue
            for other in by_token.get(ids.item(start), ()):
                shared = min(common_prefix_len(ids, other.tokens.ids), limit)
                if shared > start and (best is None or shared > best[1]):
                    best = (other, shared)
        return best
