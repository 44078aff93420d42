"""The tokens that running prompts are about to compute, so that who needs them too can wait. Never schedules."""

from ...radix_cache.tree import common_prefix_len
from .sequence import Sequence

FEW = 16  # tokens that are sooner computed twice than waited for


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

    def worth_waiting_for(self, seq: Sequence, limit: int, *, matched: int) -> tuple[Sequence, int] | None:
        """``longest``, where waiting for it is worth a step; ``matched`` tokens are there already.

        Questions that begin with the same word need not queue up: a step's wait, and a step at the end that has few
        rows, cost more than a few tokens. But what is most of a sequence's work is not done twice, however short.
        """
        found = self.longest(seq, limit)
        if found is None:
            return None
        awaited = found[1] - matched
        return found if awaited >= FEW or 0 < seq.length - matched <= 2 * awaited else None

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
