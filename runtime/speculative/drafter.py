"""What a drafter is, what it is told and what it answers. Never verifies a guess."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ..scheduler import Draft

if TYPE_CHECKING:
    from ...constrained import Matcher
    from ...protocol.sampling import SamplingParams


@dataclass(frozen=True, slots=True, eq=False)
class Want:
    """A sequence whose next token is about to be computed, and that may have at most ``limit`` guessed beyond it.

    ``tokens`` (int32, a view) are all it has, of which the first ``num_cached`` were found in the cache; with
    ``is_first`` they may be others than before. ``ends`` are tokens that would end it: to guess them gains nothing.
    The next token is drawn by ``params`` with the random number of ``seed`` and its position.
    """

    seq_id: int
    tokens: np.ndarray
    is_first: bool
    num_cached: int
    namespace: str
    limit: int
    ends: frozenset[int]
    matcher: "Matcher | None" = None
    params: "SamplingParams | None" = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Price:
    """What guesses are worth in this step, in seconds: a token that comes true saves ``token_s``, each that is run
    costs ``row_s``, and ``gain_s`` is what somebody else's guess is expected to gain already.
    """

    token_s: float
    row_s: float
    gain_s: float = 0.0

    def gain(self, reached: np.ndarray) -> float:
        """What a draft with these chances to come true gains where only what pays of it is run."""
        each = reached * self.token_s - self.row_s
        return float(each[each > 0.0].sum())


@dataclass(frozen=True, slots=True, eq=False)
class Proposal:
    """A draft, and for each of its tokens the chance (float64 [k]) that it comes true given that its parent does."""

    draft: Draft
    chances: np.ndarray

    def reached(self) -> np.ndarray:
        """float64 [k]: the chance of each token that all on the way to it, and it, come true."""
        if self.draft.parents is None:
            return np.multiply.accumulate(self.chances)
        found = self.chances.tolist()
        for i, parent in enumerate(self.draft.parents.tolist()):
            if parent >= 0:
                found[i] *= found[parent]
        return np.array(found)


class Drafter(Protocol):
    """Guesses what follows sequences. Told about every token that was made, whoever guessed it.

    ``source``: what the time it takes is counted under; its drafts may have other names.
    """

    source: str

    def propose(self, want: Want, price: Price) -> Proposal | None:
        """A guess of at most ``want.limit`` tokens, which may be cut, or not be run at all.

        Whoever takes more than microseconds for it does so only where it expects to gain more than ``price.gain_s``.
        """
        ...

    def observe(self, seq_id: int, made: np.ndarray) -> None:
        """After the tokens of the last ``Want`` came ``made`` (int32)."""
        ...

    def rest(self, seq_id: int) -> None:
        """A generation of the sequence has ended."""
        ...

    def flush(self) -> None:
        """Keep nothing of what was said; rates stay."""
        ...

    def forget(self, seq_id: int) -> None:
        """The sequence is over."""
        ...
